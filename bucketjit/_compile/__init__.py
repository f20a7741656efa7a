"""From a program and a bucket to an executable, and where executables come from.

An executable is found in the cache, loaded from a file (`files`), or compiled: at once or in a
background thread. `workarounds` is the door to what XLA's CPU backend computes wrongly. The package
handles no calls: `bucketjit._runtime` requests executables from it.
"""
