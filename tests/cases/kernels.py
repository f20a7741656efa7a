"""Calls of kernels that are declared; tests/api/test_kernel.py has how they are called."""

import jax
import jax.numpy as jnp

import bucketjit
from tests.harness import cases, family

case = family("kernel", grad=True)


@bucketjit.kernel("n%3, d", out=("d", "n, d"))
def norm(x, sizes):
    """The sums of columns, and rows divided by them, in blocks of three rows."""
    assert x.shape[0] % 3 == 0
    real = (jnp.arange(x.shape[0]) < sizes["n"])[:, None]
    total = jnp.where(real, x * x, 0).sum(0)
    return total, jnp.where(real, x, 0) / (1 + total)


@bucketjit.kernel("n", out="n + 1", fill=0)
def offsets(x, sizes):
    return jnp.concatenate([jnp.zeros(1, x.dtype), jnp.cumsum(x)])


def _both(x):
    total, rows = norm(x)
    return total * rows.sum(0), rows


TABLE = {
    "kernel": case(_both, "b, 3"),
    "kernel_filled": case(lambda x: offsets(x[:, 0]) * offsets(x.sum(1)), grad=False),
    "kernel_vmap": case(lambda x: jax.vmap(_both)(x), "s, b, 2"),
    "kernel_map": case(lambda x: jax.lax.map(_both, x), "s, b, 2", covers="kernel scan"),
}
CASES = cases(TABLE)
