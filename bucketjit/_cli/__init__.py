"""The command line ``python -m bucketjit``: `app` parses, and each command has its own file."""
