"""StableHLO modules, for other programs and for files.

`dynamic` exports a program as one module for all sizes, `bounded` writes the bucket into the types
of its module, and `saved` makes and checks the modules of files. `building` changes a module. What
is not public in JAX is in `bucketjit._jax.stablehlo`.
"""
