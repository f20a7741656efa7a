"""Arrays with padding: pad arguments, cut results, and keep padding between two executors.

Nothing here compiles a program per size. The package knows shapes and arrays. It may import
`bucketjit._sizes`, `bucketjit._ir` and what is below them, and knows no traced program.
"""
