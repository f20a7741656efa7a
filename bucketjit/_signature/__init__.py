"""Arguments to a signature, and a signature to its traced programs.

A signature is what identifies a traced program: tree, dtypes, weak types, ranks, static arguments
and configuration. The package may import `bucketjit._tracing`, `bucketjit._config` and what is
below them, and knows no bucket.
"""
