"""The only door to non-public JAX: no other package of bucketjit imports ``jax._src``.

Each function says why the public API is not enough, and since which version of JAX the private
name behind it exists. `names` lists all private names; a topic has a file.
"""
