"""From a function to a `Program`: a jaxpr with symbolic sizes, and the guards it holds under.

A function is traced with symbolic sizes, or at several concrete sizes whose traces are compared.
The package may import `bucketjit._sizes`, `bucketjit._ir` and what is below them, and knows no
padded size.
"""
