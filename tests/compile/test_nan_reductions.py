"""Where the loss of a NaN by a maximum shows, and where it does not."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec, Fallback
from bucketjit._compile.nan_reductions import may_lose_nan
from bucketjit._jax.jaxprs import without_dead_code

Function = Callable[[Any], Any]


def shifted(x: Any, axis: int = -1) -> Any:
    return jnp.exp(x - x.max(axis, keepdims=True))


def share(x: Any, axis: int = -1) -> Any:
    return x / x.sum(axis, keepdims=True)


def attention(x: Any) -> Any:
    return jax.nn.softmax(x @ x.mT, axis=-1) @ x


def sums(x: Any) -> Any:
    return x.sum(-1)


HIDDEN: dict[str, Function] = {
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
    "softmax of another axis": lambda x: jax.nn.softmax(x, axis=0),
    "softmax of two axes": lambda x: jax.nn.softmax(x, axis=(0, 1)),
    "softmax by hand": lambda x: share(shifted(x)),
    "softmax of a softmax": lambda x: jax.nn.softmax(jax.nn.log_softmax(x, axis=-1), axis=-1),
    "softmin": lambda x: share(jnp.exp(x.min(0) - x), 0),
    "log_softmax": lambda x: jax.nn.log_softmax(x, axis=-1),
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=-1),
    "attention": attention,
    "divided by a product": lambda x: shifted(x) * (1 / sums(shifted(x)))[:, None],
    "of a product": lambda x: jax.nn.softmax(x @ jnp.cos(x).mT, axis=-1),
    "gradient": jax.grad(lambda x: jnp.sin(attention(x)).sum()),
    "of ints": lambda x: x.astype(int).max(-1) + jnp.maximum(x.astype(int), 0).sum(),
}

# What is not followed is taken for shown.
SHOWN: dict[str, Function] = {
    "turned": lambda x: share(shifted(x).T, 0),
    "itself": lambda x: x.max(-1),
    "what is shifted": shifted,
    "both": lambda x: (share(shifted(x)), x.max(-1)),
    "one side": lambda x: (share(shifted(x)), shifted(x)[0]),
    "sums of other rows": lambda x: share(shifted(x), 0),
    "shifted by another row": lambda x: share(jnp.exp(x - x.max(-1)[::-1, None])),
    "another order": lambda x: share(jnp.exp(x[:, ::-1] - x.max(-1, keepdims=True))),
    "another function": lambda x: share(jnp.exp(jnp.abs(x[0]) - x.max(-1, keepdims=True))),
    "a choice": lambda x: share(jnp.where(x > 0, shifted(x), 0)),
    "a choice by a product": lambda x: share(shifted(x) * (x > 0)),
    "a choice by broadcasts": lambda x: share(shifted(x) * (x[0] > 0)),
    "NaN is replaced": lambda x: share(jnp.nan_to_num(shifted(x))),
    "a power that is 1": lambda x: share(shifted(x) ** x.astype(int)),
    "ints": lambda x: shifted(x).astype(int) / shifted(x).sum(-1, keepdims=True).astype(int),
    "compared": lambda x: (share(shifted(x)), shifted(x) > 0.5),
    "a choice by a sum": lambda x: share(shifted(x) * (x > 0)[..., None].astype(x.dtype).sum(-1)),
    "a choice by a contraction of one": lambda x: share(
        shifted(x) * ((x[:, :1] > 0).astype(x.dtype) @ jnp.ones((1, x.shape[1])))
    ),
    "gradient of chosen scores": jax.grad(
        lambda x: (jax.nn.softmax(jax.nn.relu(x) @ x.mT, axis=-1) @ x).sum()
    ),
    "every row with every other": lambda x: x.max(1)[None] + sums(x)[:, None],
    "every row with every other, shifted": lambda x: (
        (x.max(1)[:, None] - x.max(1)[None]) / sums(shifted(x))[:, None]
    ),
    "softmax of what is chosen": lambda x: jax.nn.softmax(jax.nn.relu(x), axis=-1),
    "softmax of a product of what is chosen": lambda x: jax.nn.softmax(
        jax.nn.relu(x) @ jnp.cos(x).mT, axis=-1
    ),
    "by one for all": lambda x: (x[0] / x.max()).sum(0),
    "by one for all, turned": lambda x: ((x[0][:, None] - 1) / x.max()).T,
    "a mean of what is chosen": lambda x: jax.nn.relu(x).mean(),
    "a mean of minima": lambda x: jnp.minimum(x, 1).mean(),
    "a loss": lambda x: (0.5 * jnp.minimum(jnp.abs(x), 1) ** 2).mean(),
    "chosen among sums": lambda x: jnp.maximum(sums(x)[:, None], x[0]),
    "chosen so far": lambda x: jax.lax.cummax(x, axis=1).sum(0),
    "the sign of NaN, sorted": lambda x: jax.lax.top_k(jax.nn.log_softmax(x, -1).reshape(-1), 4),
    "the sign of NaN": lambda x: jnp.signbit(jax.nn.log_softmax(x, -1)),
    "in a loop": lambda x: jax.lax.fori_loop(
        0, 2, lambda _, y: y + jax.nn.relu(x).sum(0), jnp.zeros(x.shape[1])
    ),
    "turned with the wrong rows": lambda x: share(jnp.exp(x[:40, :40] - x[:40, :40].max(-1))),
}


@pytest.mark.parametrize("name", [*HIDDEN, *SHOWN])
def test_what_shows(name: str) -> None:
    fn = HIDDEN.get(name) or SHOWN[name]
    jaxpr = without_dead_code(jax.make_jaxpr(fn)(jnp.ones((41, 60))).jaxpr)
    assert may_lose_nan(jaxpr) is (name in SHOWN)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", [*HIDDEN, *SHOWN])
def test_results_are_those_without_padding(name: str) -> None:
    """In buckets of 4,096 elements, where XLA's CPU backend may lose NaN."""
    fn = HIDDEN.get(name) or SHOWN[name]
    bucketed = BucketedExec(fn, dynamic_axes="a, b", fallback=Fallback.ERROR).with_pow2()
    for at in ([], [(3, 5)], [(0, 0), (40, 59), (3, 5)]):
        x = np.random.default_rng(0).standard_normal((41, 60)).astype(np.float32)
        for place in at:
            x[place] = np.nan
        found, wanted = bucketed(x), jax.jit(fn)(x)
        jax.tree_util.tree_map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, wanted
        )
