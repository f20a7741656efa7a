"""Run programs side by side on the cores of a CPU: helper threads, and a device without threads.

The chunks of a call run here. The package may import `bucketjit._tracing`, `bucketjit._arrays` and
what is below them.
"""
