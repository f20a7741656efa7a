"""Read jaxprs: facts about primitives, one walk for all analyses, and primitives of bucketjit.

Every pass over a program uses the package. It masks nothing. It may import `bucketjit._jax`,
`bucketjit._sizes` and what these may import.
"""
