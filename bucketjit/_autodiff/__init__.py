"""Derivatives in buckets: ``jax.grad`` and ``jax.jvp`` of a bucketed function outside ``jit``.

A function is differentiated first and masked after, so each derivative has its own engine. The
package may import `bucketjit._runtime` and the packages below it.
"""
