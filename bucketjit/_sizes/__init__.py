"""Sizes as expressions of dimension variables: evaluate, bound, solve and compare them.

The package also reads ``dynamic_axes``. It may import `bucketjit._jax` and what that may import. It
reads no jaxpr.
"""
