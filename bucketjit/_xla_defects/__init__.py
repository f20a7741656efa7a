"""What XLA's CPU backend computes wrongly, and how executables of buckets avoid it.

Each module finds one kind of program that is affected. The package may import `bucketjit._ir` and
`bucketjit._jax` alone.
"""
