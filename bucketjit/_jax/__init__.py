"""The only door to non-public JAX.

Every function here says why the public API does not do, and since which version of JAX the
name behind it exists. Nothing else in the package imports ``jax._src``.
"""
