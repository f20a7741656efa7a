"""From a program and a bucket to an executable, and where executables come from.

An executable is found in the cache, loaded from a file, or built: at once or in a background
thread. The package may import `bucketjit._signature`, `bucketjit._masking` and the
packages below them. It handles no calls: `bucketjit._runtime` requests executables from it.
"""
