"""What an executor did and would do, for people to read: explanations, tables, reports, drawings.

Nothing here runs or compiles a program. The package may import `bucketjit._runtime` and what is
below it.
"""
