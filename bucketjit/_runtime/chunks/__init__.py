"""Serves a call beyond the largest bucket in chunks, if it is proven that it may be split.

`independence` has the proof and `splitter` runs the chunks; `chunked_handler` is the fast path.
The package may import `bucketjit._compile` and what is below it, and of `bucketjit._runtime` its
buckets and its fast path.
"""
