"""Code that turns sizes into Python numbers; its programs are made of concrete traces."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.harness import cases, family

BOTH = "b, s"
_TABLE = np.sin(np.arange(64, dtype=np.float32))
_BY_SIZE = {n: 1.0 / (n + 1) for n in range(64)}


def _attention(q):
    scores = jnp.einsum("bqd,bkd->bqk", q, q) / math.sqrt(q.shape[1])
    causal = np.tril(np.ones((q.shape[1], q.shape[1]), bool))
    return jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)) @ q


def _sinusoidal(x):
    angle = np.arange(x.shape[1])[:, None] / 100.0 ** np.linspace(0, 1, 3)
    return x[..., None] + np.sin(angle).astype(np.float32)


def _scaled_in_loop(x):
    return lax.scan(lambda c, row: (c + row / float(x.shape[1]), c.sum()), x[0], x)


def _counted_loop(x):
    return lax.fori_loop(
        0, int(x.shape[1]), lambda i, c: c + x[:, i] * math.log(x.shape[1]), x[:, 0]
    )


def _either(x):
    return lax.cond(
        x.sum() > 0, lambda y: y * math.sqrt(y.shape[1]), lambda y: y - np.arange(y.shape[1]), x
    )


def _until(x):
    more = lambda c: c[0] < int(x.shape[1])  # noqa: E731
    return lax.while_loop(more, lambda c: (c[0] + 1, c[1] + x[:, c[0]]), (0, x[:, 0]))


def _padded_to_pow2(x):
    wide = 1 << (int(x.shape[1]) - 1).bit_length()
    return jnp.pad(x, ((0, 0), (0, wide - x.shape[1]))).sum(1) / wide


# At size 1 JAX broadcasts by other equations than elsewhere: that is another program.
SIZES = ({"b": 2, "s": 2}, {"b": 3, "s": 7}, {"b": 4, "s": 8}, {"b": 4, "s": 5})


# Where a part of an axis is 1 at some size, that is another program too.
LARGER = SIZES[1:]

case, smooth = family(sizes=SIZES), family(sizes=SIZES, grad=True)
constant = family("size_constant", sizes=SIZES)


TABLE = {
    "paired_scale": constant(lambda x: x / math.sqrt(x.shape[1]), grad=True),
    "paired_arange": constant(lambda x: x * np.arange(x.shape[1]), grad=True),
    "paired_eye": constant(lambda x: x @ np.eye(x.shape[1], 3, 1), grad=True),
    "paired_table": constant(lambda x: x + _TABLE[: x.shape[1]]),
    "paired_key": case(lambda x: x * _BY_SIZE[x.shape[1]]),
    "paired_half": smooth(lambda x: x[:, : int(x.shape[1] * 0.5)], covers="slice", sizes=LARGER),
    "paired_split": case(lambda x: jnp.split(x, [1, int(x.shape[1])], axis=1)[1], sizes=LARGER),
    "paired_outer": case(lambda x: jnp.indices(x.shape) * x),
    "paired_vander": case(lambda x: jnp.vander(x[0]), rtol=1e-3, atol=1e-3),
    "paired_isqrt": case(lambda x: x[:, : math.isqrt(x.shape[1])].sum(), sizes=LARGER),
    "paired_pow2": constant(_padded_to_pow2, grad=True),
    "paired_attention": constant(_attention, "b, s, 4", grad=True),
    "paired_positions": constant(_sinusoidal),
    "paired_in_scan": smooth(_scaled_in_loop, covers="size_constant scan"),
    "paired_fori": smooth(_counted_loop, covers="size_constant scan"),
    "paired_cond": smooth(_either, covers="size_constant cond"),
    "paired_while": case(_until, covers="size_constant while"),
    "paired_merge": case(lambda x: (x.reshape(int(x.shape[0] * x.shape[1])) * 2).reshape(x.shape)),
    "paired_of_two": constant(
        lambda x, i: x[i] * np.float32(x.shape[0] / x.shape[1]) + np.arange(x.shape[1]),
        "b, s; int32[n] 0:b",
        sizes=tuple({**sizes, "n": 3} for sizes in SIZES),
    ),
}
CASES = cases(TABLE)
