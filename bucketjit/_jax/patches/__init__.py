"""Functions of JAX that refuse symbolic sizes without need, and what stands in for each.

A topic a file. Each has a function that returns its patches (`patch.Patch`), which say what they
replace, why, since which version of JAX, and when they can be deleted. A replacement does for plain
sizes what the original does. The package imports from the other files of `bucketjit._jax` alone.
"""
