"""Find the signature of a call's arguments, and the traced program that serves the call.

A signature is the tree, dtypes, weak types and ranks of the arguments, the static arguments and the
configuration of JAX: everything that a traced program depends on except for sizes. The package may
import `bucketjit._tracing`, `bucketjit._config` and what is below them. It knows no bucket.
"""
