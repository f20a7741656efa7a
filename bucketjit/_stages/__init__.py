"""Ahead of time: what a call needs, as objects of its own, before and without the call.

``trace`` gives the program and its guards, ``lower`` the module of a bucket, ``compile`` the
executable, which serves every logical size of its bucket. Names and behaviour are those of
``jax.stages``. The package may import `bucketjit._runtime` and what is below it; `bucketjit._api`
has the methods of bucketed functions.
"""
