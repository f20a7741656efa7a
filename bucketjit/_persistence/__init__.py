"""Executables in files, so that a second process need not compile them.

What is trusted, and what is not:

* An executable is machine code, and loading it is to run it. So a directory is used only if nobody
  but its owner can write into it, and its owner is the user of the process, or root; the same
  holds for each file. Whoever can write there can run code as the user: keep it as you keep a
  directory of programs. There are no signatures beyond that, and no secrets.
* Nothing is unpickled. A file is a digest, a header in JSON and the bytes of XLA; all that is
  taken from the header is checked against the call at hand. The digest finds damage, not malice.
* A file is read and unpacked in pieces of 1 MiB, and no further than its header says, than its
  length can hold, and than 2 GiB: what XLA writes is a protobuf, which holds no more.
* A file is found by a key that covers everything its executable depends on: the traced program,
  the contents of its constants, the bucket, the types and the device of the arguments, what is
  donated, the versions and sources of the libraries, flags and configuration. What cannot be
  covered soundly (host callbacks, primitives and rules from elsewhere) is not stored. A file may
  be loaded before its key is known to be asked for; it has to pass the same checks before, and no
  call gets it by another key.
* No problem with a file breaks a call: it is told, and the executable is compiled.
"""
