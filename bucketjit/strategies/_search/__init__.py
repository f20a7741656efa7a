"""Which buckets cost least: histograms of sizes, and the searches over them.

Plain arithmetic on NumPy arrays. The strategies that are made from its results are in
`bucketjit.strategies`.
"""
