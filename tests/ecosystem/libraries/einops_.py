"""Einops: rearrangements with sizes taken from the arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ecosystem.model import Model, floats

einops = pytest.importorskip("einops", reason="einops is not installed")

from einops import einsum, pack, rearrange, reduce, repeat, unpack  # noqa: E402


def attention():
    weights = jnp.asarray(np.random.default_rng(0).standard_normal((8, 24)), jnp.float32)

    def apply(weights, x):
        q, k, v = rearrange(x @ weights, "b s (three h d) -> three b h s d", three=3, h=2)
        scores = einsum(q, k, "b h q d, b h k d -> b h q k") / q.shape[-1] ** 0.5
        out = einsum(jax.nn.softmax(scores, axis=-1), v, "b h q k, b h k d -> b h q d")
        return rearrange(out, "b h s d -> b s (h d)")

    return apply, weights


def patches():
    def apply(x):
        tokens = rearrange(x, "b (h p) (w q) c -> b (h w) (p q c)", p=2, q=2)
        return tokens - reduce(tokens, "b n c -> b 1 c", "mean")

    return (apply,)


def pixel_shuffle():
    def apply(x):
        y = rearrange(x, "b h w (p q c) -> b (h p) (w q) c", p=2, q=2)
        return reduce(y, "b (h p) (w q) c -> b h w c", "max", p=2, q=2), y

    return (apply,)


def pooled():
    def loss(x):
        x = reduce(x, "b s (g c) -> b s g", "mean", g=2)
        return reduce(x**2, "b s g -> b g", "sum"), repeat(x, "b s g -> b (2 s) g k", k=2)

    return (loss,)


def folded():
    """Batch and sequence as one axis, and apart again."""

    def apply(x):
        flat = rearrange(x, "b s c -> (b s) c")
        flat = flat - flat.mean(axis=0)
        return rearrange(flat, "(b s) c -> b s c", b=x.shape[0])

    return (apply,)


def packed():
    """A class token before the sequence, with pack and unpack."""

    def apply(cls, x):
        tokens, shapes = pack([repeat(cls, "c -> b c", b=x.shape[0]), x], "b * c")
        tokens = jax.nn.softmax(tokens, axis=1)
        cls, x = unpack(tokens, shapes, "b * c")
        return cls, x.sum(axis=1)

    return apply, jnp.ones(6)


MODELS = [
    Model("attention", attention, (floats("b, s, 8"),)),
    Model("patches", patches, (floats("b, 2*h, 2*w, 3"),)),
    Model("patches", patches, (floats("b, 8, 8, 3"),)),
    Model("pixel shuffle and pooling", pixel_shuffle, (floats("b, h, w, 8"),)),
    Model("reduce and repeat", pooled, (floats("b, s, 6"),)),
    Model("batch and sequence folded", folded, (floats("b, s, 6"),)),
    Model("pack and unpack", packed, (floats("b, s, 6"),)),
]
