"""Evaluation of a traced program at padded sizes: the interpreter, the rule context, the analyses.

The interpreter knows no primitive: it gets the table of `bucketjit._masking.rules` as an argument.
The package imports `bucketjit._ir`, `bucketjit._arrays` and what is below them. It neither chooses
buckets nor serves calls.
"""
