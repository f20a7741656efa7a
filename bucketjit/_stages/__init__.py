"""A call, stopped at a step: explained, traced, lowered, compiled, warmed up or exported.

`explain` and `report` say what would happen and what did. ``trace``, ``lower`` and ``compile`` have
the names and the behaviour of ``jax.stages``. `modules` are for other programs and for files.
`bucketjit._api` has the methods of bucketed functions.
"""
