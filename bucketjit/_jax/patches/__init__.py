"""Functions of JAX that refuse symbolic sizes without need, and a replacement for each.

A topic has a file. Each file has a function that returns its patches (`patch.Patch`): what they
replace, why, since which version of JAX, and when they can be deleted. For plain sizes a
replacement does what the original does. `bucketjit._ir.jax_patches` installs them while a function
is traced. The package imports only from the other files of `bucketjit._jax`.
"""
