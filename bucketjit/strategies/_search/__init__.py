"""Searches for the buckets that cost least, given a histogram of sizes.

This is plain arithmetic on NumPy arrays. `bucketjit.strategies` makes strategies of the results.
"""
