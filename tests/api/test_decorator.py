"""The decorator form."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec, strategies
from bucketjit.errors import BucketOverflowError, SpecError
from tests.comparison import ramp


def test_bare_and_with_options() -> None:
    @bucketjit.jit
    def bare(x: Any) -> Any:
        """Its docstring."""
        return x.mean()

    @bucketjit.jit(buckets=[4, 10], dynamic_axes="n")
    def listed(x: Any) -> Any:
        return x.mean()

    for n in (3, 4, 7, 8):
        assert float(bare(ramp(n))) == float(listed(ramp(n))) == ramp(n).mean()
    assert isinstance(bare, BucketedExec)
    assert (bare.__name__, bare.__doc__) == ("bare", "Its docstring.")
    assert bare.__wrapped__(ramp(3)) == ramp(3).mean()
    assert list(inspect.signature(bare).parameters) == ["x"]
    assert [dict(b.sizes) for b in listed.stats().buckets] == [{"n": 4}, {"n": 10}]


def test_buckets_by_dimension() -> None:
    wanted = {"b": "exact", "s": strategies.Linear(3)}
    fn = bucketjit.jit(lambda x: x.sum(0), buckets=wanted, dynamic_axes="b, s")
    fn(ramp(5, 4))
    assert [dict(b.sizes) for b in fn.stats().buckets] == [{"b": 5, "s": 6}]
    both = {"b": [4], "s": [8]}
    fn = bucketjit.jit(lambda x: x * 2, dynamic_axes="b, s", buckets=both, overflow={"s": "extend"})
    assert fn(ramp(3, 9)).shape == (3, 9)
    with pytest.raises(BucketOverflowError, match="'b'"):
        fn(ramp(5, 8))


def test_parameters_of_jit() -> None:
    @functools.partial(
        bucketjit.jit, static_argnames="power", donate_argnames="state", dynamic_axes={"x": "n"}
    )
    def step(state: Any, x: Any, power: int = 1) -> Any:
        return state + (x**power).sum(), x * state[0]

    state = jnp.ones(2)
    for n in (3, 4, 5):
        new, out = step(state, ramp(n), 2)
        assert state.is_deleted()
        assert out.shape == (n,)
        state = new
    assert step.cache_size() == 2
    with pytest.raises(SpecError, match="donate_argnames"):
        bucketjit.jit(lambda x: x, donate_argnames="y")


class Scaled:
    """``self`` is hashable, hence static."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    @bucketjit.jit(dynamic_axes=(None, "n"), static_argnums=0)
    def __call__(self, x: Any) -> Any:
        return (x * self.scale).sum()


@jax.tree_util.register_pytree_node_class
class Tree:
    """``self`` is a pytree, hence an argument like any other."""

    def __init__(self, scale: Any) -> None:
        self.scale = scale

    @bucketjit.jit
    def total(self, x: Any) -> Any:
        return (x * self.scale).sum()

    def tree_flatten(self) -> Any:
        return (self.scale,), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Tree:
        return cls(*children)


def test_methods() -> None:
    two, three = Scaled(2.0), Scaled(3.0)
    for n in (3, 4, 5):
        assert float(two(ramp(n))) == 2 * ramp(n).sum()
        assert float(three(ramp(n))) == 3 * ramp(n).sum()
        assert float(Tree(np.float32(4)).total(ramp(n))) == 4 * ramp(n).sum()
    assert Tree.total.cache_size() == 2
