"""Where the loss of a NaN by a maximum shows, and where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec, Fallback, _jax
from bucketjit._nan_paths import NanPaths

Function = Callable[[Any], Any]


def shifted(x: Any, axis: int = -1) -> Any:
    return jnp.exp(x - x.max(axis, keepdims=True))


def share(x: Any, axis: int = -1) -> Any:
    return x / x.sum(axis, keepdims=True)


def attention(x: Any) -> Any:
    return jax.nn.softmax(x @ x.mT, axis=-1) @ x


HIDDEN: dict[str, Function] = {
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
    "softmax of another axis": lambda x: jax.nn.softmax(x, axis=0),
    "softmax of two axes": lambda x: jax.nn.softmax(x, axis=(0, 1)),
    "softmax by hand": lambda x: share(shifted(x)),
    "softmin": lambda x: share(jnp.exp(x.min(0) - x), 0),
    "log_softmax": lambda x: jax.nn.log_softmax(x, axis=-1),
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=-1),
    "turned": lambda x: share(shifted(x).T, 0),
    "attention": attention,
    "gradient": jax.grad(lambda x: jnp.sin(attention(x)).sum()),
}

SHOWN: dict[str, Function] = {
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
    "turned with the wrong rows": lambda x: share(jnp.exp(x[:40, :40] - x[:40, :40].max(-1))),
}


def shows(fn: Function, shape: tuple[int, ...]) -> bool:
    """Whether the loss of some extremum of a function shows."""

    def every(jaxpr: Any) -> list[bool]:
        paths, found = NanPaths(jaxpr), []
        for eqn in jaxpr.eqns:
            if _jax.name_of(eqn) in ("reduce_max", "reduce_min"):
                found.append(paths.show(eqn))
            for body in _jax.bodies(eqn):
                found += every(body)
        return found

    found = every(_jax.without_dead_code(jax.make_jaxpr(fn)(jnp.ones(shape)).jaxpr))
    assert found
    return any(found)


@pytest.mark.parametrize("name", [*HIDDEN, *SHOWN])
def test_what_shows(name: str) -> None:
    hidden = name in HIDDEN
    assert shows(HIDDEN[name] if hidden else SHOWN[name], (41, 60)) is not hidden


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
