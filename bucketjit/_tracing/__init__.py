"""Turn a function into a `Program`: a jaxpr with symbolic sizes, and the guards it holds under.

A function is traced once with symbolic sizes (`bucketjit._tracing.symbolic`). If it refuses them,
it is traced at several concrete sizes, and the traces are compared (`bucketjit._tracing.concrete`).
The package may import `bucketjit._arrays` and what is below it. It knows no padded size.
"""
