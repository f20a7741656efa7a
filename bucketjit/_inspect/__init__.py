"""Shows people what a bucketed function did and would do: explanations, tables, reports, drawings.

Nothing here runs or compiles a program. The package may import `bucketjit._runtime` and what is
below it.
"""
