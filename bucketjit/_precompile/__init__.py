"""Compiles buckets before calls need them: warm-up, manifests, listed buckets.

The package may import `bucketjit._runtime`, `bucketjit._autodiff` and what is below them.
"""
