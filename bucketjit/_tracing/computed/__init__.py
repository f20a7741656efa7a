"""Sizes that a program computes, as of ``x[mask]``. The door is `sizes`: others import from it.

While a function is traced, `bucketjit._jax.patches.selections` asks `sizing` for a size. There
`values` tells which values are equal, so that they share a size, and how large a size can be. When
the trace ends, and when a run of it ends, `sizes` knows what is returned, presumed and refused.
"""
