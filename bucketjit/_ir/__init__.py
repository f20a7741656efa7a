"""Sizes and jaxprs: expressions of sizes, facts about primitives, and one walk for all analyses.

Every pass over a program uses the package. `program` says what a program is. It masks nothing, and
may import `bucketjit._jax` and what that may import.
"""
