"""Modules for other programs: dynamic ones, bounded ones, and ones refined to fixed sizes.

`dynamic` exports a traced program with its symbolic sizes, `bounded` writes the bucket of a masked
program into the types of its module, and `refine` fixes the sizes of a module without the Python
code that it was made from. `bucketjit._jax.stablehlo` reads and writes the modules. The bucketed
function's methods are in `bucketjit._api.exporting`; nothing here serves calls.
"""
