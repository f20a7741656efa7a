"""From a program and a bucket to an executable, and where executables come from.

An executable is found in the cache, loaded from a file, or built: now, in the background or in
another process. The package may import `bucketjit._signature`, `bucketjit._masking` and what is
below them. It knows no call: `bucketjit._runtime` asks it for executables.
"""
