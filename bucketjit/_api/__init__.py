"""What users call: the executor, its ``with_...`` methods and the decorator.

The top layer of the library. An executor holds the configuration and one engine, and passes calls
to the engine. The package may import every package but `bucketjit._cli`.
"""
