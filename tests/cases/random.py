"""Random draws: exactly the bits of the exact run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import random

from tests.harness import Arg, Case

KEY = Arg("", "key")
KEYS = Arg("b", "key")
RAW = Arg("2", "uint32", low=0, high=1 << 32)
DOMAIN = ("mixed",)


def draw(name, fn, args, covers=("random_bits",), **options):
    """A case of a draw: the value domain of floats plays no part."""
    return Case(name, fn, args, covers, domains=DOMAIN, **options)


def _shape_of(sampler, *params):
    return lambda key, x: sampler(key, *params, x.shape)


CASES = [
    draw("random_normal", lambda k, x: random.normal(k, x.shape), (KEY, "b, s")),
    draw("random_bits_lead", lambda k, x: random.bits(k, x.shape), (KEY, "b, 3")),
    draw("random_bits_inner", lambda k, x: random.bits(k, (2, *x.shape, 3)), (KEY, "s")),
    draw("random_bits_raw", lambda k, x: random.bits(k, x.shape), (RAW, "b, s")),
    draw(
        "random_bits_8",
        lambda k, x: random.bits(k, x.shape, jnp.uint8),
        (KEY, "b, s"),
    ),
    draw(
        "random_bits_16",
        lambda k, x: random.bits(k, x.shape, jnp.uint16),
        (KEY, "b, s"),
    ),
    draw(
        "random_bits_per_key",
        lambda k, x: jax.vmap(lambda k: random.bits(k, x.shape))(k),
        (KEYS, "s"),
    ),
    draw("random_split", lambda k, x: random.split(k, x.shape[0]), (KEY, "b"), ("random_split",)),
    draw("random_split_raw", lambda k, x: random.split(k, x.shape[0]), (RAW, "b"), ("random_split",)),
    draw("random_split_many", lambda k, x: random.split(k, x.shape), (KEY, "b, s"), ("random_split",)),
    draw("random_gamma", lambda k, x: random.gamma(k, jnp.abs(x) + 0.1), (KEY, "b, s"), ("random_gamma",), grad=True),
]
