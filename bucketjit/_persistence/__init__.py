"""Executables in files, so that a second process need not compile them.

What is trusted, and what is not:

* An executable is machine code, and loading it is to run it. So a directory is used only if nobody
  but its owner can write into it, and its owner is the user of the process, or root; the same
  holds for each file. Whoever can write there can run code as the user: keep it as you keep a
  directory of programs. There are no signatures beyond that, and no secrets.
* Nothing is unpickled. A file is a digest, a record in JSON and the bytes of XLA. The digest
  detects damage, not malice.
* Executables are compressed with zstandard where it is installed, else with zlib. Where zstandard
  is missing, its files cannot be read, and are made again with zlib.
* A file is found by a key that covers everything its executable depends on: the traced program,
  the contents of its constants, the bucket, the types and the device of the arguments, the donated
  arguments, the versions and sources of the libraries, flags and configuration. Executables whose
  dependencies have no sound digest (host callbacks, primitives and rules from elsewhere) are not
  stored.
* Processes on several machines may use a directory at once. Nothing depends on locks, on clocks
  that agree, or on process numbers: files are written beside their place and renamed.
* No problem with a file breaks a call: an event reports it, and the executable is compiled.
"""
