"""Executables in files, as the cache sees them: their keys, and how they are stored and loaded.

`bucketjit._persistence` reads and writes the files. This package decides which file holds which
executable. It may import the modules of `bucketjit._compile` below `requests` and `provider`.
"""
