"""What bucketjit costs and saves, beside what its users would do without it."""
