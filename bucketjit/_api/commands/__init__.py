"""`python -m bucketjit` and the script `bucketjit`: a command a file, listed in `app`."""
