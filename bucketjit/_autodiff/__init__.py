"""Derivatives in buckets: ``jax.grad`` and ``jax.jvp`` of an executor outside ``jit``.

A function is differentiated first and masked after, so each derivative has an engine of its own.
The package may import `bucketjit._runtime` and what is below it.
"""
