"""Compile buckets before calls need them: warm-up, manifests, listed buckets, adaptive strategies.

The package may import `bucketjit._runtime`, `bucketjit._autodiff` and what is below them. A call
that is being served does not wait for anything here.
"""
