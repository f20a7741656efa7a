"""Read and describe jaxprs: facts about primitives, and equations that stand for larger things.

Nothing here traces or masks a function. The package may import `bucketjit._jax` and
`bucketjit._sizes`, and is used by every pass over a program.
"""
