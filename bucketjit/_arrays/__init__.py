"""Arrays with padding: pad arguments, cut results, and keep padding between two bucketed functions.

Nothing here compiles a program for each logical size. The package deals with shapes and arrays
only: it does not know traced programs. It may import `bucketjit._ir`, `bucketjit._ir` and what
is below them.
"""
