"""Scans, and derivatives of programs with control flow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from tests.harness import Arg, Case

BATCH = "b, s"
MIXED = ("mixed",)

# --- scan ---------------------------------------------------------------------------------


def _step(carry, row):
    carry = 0.5 * carry + row
    return carry, carry - carry.mean()


def _viterbi(x, step):
    def forward(score, x_t):
        scores = score[:, None] + step
        return scores.max(0) + x_t, scores.argmax(0)

    score, back = lax.scan(forward, x[0], x[1:])
    last = score.argmax()
    _, path = lax.scan(lambda i, b: (b[i], b[i]), last, back, reverse=True)
    return score.max(), path, last


SCANS = [
    Case(
        "scan_bfloat16",
        lambda c, x: lax.scan(lambda c, r: (c + r, c * r), c, x),
        (Arg("3", "bfloat16"), Arg("s, 3", "bfloat16")),
        ("scan",),
    ),
    Case(
        "scan_dtypes",
        lambda n, p, z: lax.scan(
            lambda c, r: ((c[0] + r[0], c[1] ^ r[1].any()), (c[0] % 3, r[2] * c[0], c[1])),
            (jnp.uint8(1), False),
            (n, p, z),
        ),
        (Arg("s", "uint8", low=0, high=200), Arg("s, b", "bool"), Arg("s, 2", "complex64")),
        ("scan",),
        domains=MIXED,
    ),
    Case(
        "scan_keys",
        lambda k: lax.scan(lambda c, k: (c + jax.random.uniform(k), k), jnp.float32(0), k),
        (Arg("b", "key"),),
        ("scan",),
        domains=MIXED,
    ),
    Case(
        "scan_key_carry",
        lambda k, x: lax.scan(
            lambda k, r: (jax.random.split(k)[0], r + jax.random.normal(k, r.shape)), k, x
        ),
        (Arg("", "key"), BATCH),
        ("scan",),
        domains=MIXED,
    ),
    Case(
        "scan_viterbi",
        _viterbi,
        ("s, 3", "3, 3"),
        ("scan",),
        sizes=tuple({"s": n} for n in (2, 3, 7, 8)),
        constraints=("s >= 2",),
    ),
    Case(
        "scan_cond",
        lambda x: lax.scan(
            lambda c, r: (lax.cond(r.sum() > 0, lambda: c + r.mean(), lambda: c * 0.5), c),
            jnp.float32(0),
            x,
        ),
        (BATCH,),
        ("scan", "cond"),
        grad=True,
    ),
    Case(
        "map_batch_size",
        lambda x: lax.map(lambda r: r - r.mean(), x, batch_size=2),
        (BATCH,),
        ("scan",),
        buckets={"b": 7},
    ),
]


# --- derivatives --------------------------------------------------------------------------


def _loss(w, row):
    return jnp.mean(jnp.tanh(row * w) ** 2)


CASES = SCANS
