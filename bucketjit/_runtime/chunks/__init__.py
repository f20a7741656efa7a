"""A call in chunks of the largest bucket: may it be split, and how are the chunks served.

The package may import `bucketjit._compile` and what is below it, and of `bucketjit._runtime` its
buckets and its fast path.
"""
