"""Data of results that is no array: static fields, shapes of sparse matrices, closures, texts."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

from bucketjit import BucketedExec, Check
from bucketjit._ir.closures import holds_a_size
from bucketjit._tracing.held_output import tree_holds_a_size
from bucketjit.errors import FallbackWarning
from tests.comparison import ramp


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Sized:
    data: Any
    size: Any = dataclasses.field(metadata={"static": True})


NO_SIZE = datetime.date(2000, 1, 1)  # nobody can look into it


@jax.tree_util.register_pytree_node_class
class Opaque:
    """Its data is an object that can be compared."""

    def __init__(self, data: Any, size: Any) -> None:
        self.data, self.size = data, size

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.data,), Held(self.size)

    @classmethod
    def tree_unflatten(cls, held: Held, children: Any) -> Opaque:
        return cls(*children, held.size)


class Held:
    def __init__(self, size: Any) -> None:
        self.size = size

    def __eq__(self, other: Any) -> bool:
        return type(other) is Held and self.size == other.size

    def __hash__(self) -> int:
        return 1


FORMS: dict[str, Callable[[Any], Any]] = {
    "size": lambda x: Sized(x * 2, x.shape[0]),
    "half": lambda x: Sized(x * 2, x.shape[0] // 2),
    "eighth": lambda x: Sized(x * 2, x.shape[0] // 8),
    "shape": lambda x: Sized(x.sum(0), x.shape),
    "inside": lambda x: [x, {"a": Sized(x, (1, {"n": (x.size,)}))}],
    "struct": lambda x: Sized(x.sum(), jax.ShapeDtypeStruct(x.shape, x.dtype)),
    "number": lambda x: Sized(x * 2, x.shape[0] / 4),
    "text": lambda x: Sized(x * 2, f"{x.shape[0]} rows"),
    "named by a text": lambda x: {f"{x.shape[0]} rows": x, "sum": x.sum(0)},
    "named by the size": lambda x: {x.shape[0]: x * 2},
    "opaque": lambda x: Opaque(x * 2, x.shape[0]),
    "with a number": lambda x: Sized(x / np.sqrt(x.shape[0]), x.shape[0]),
    "sparse": lambda x: sparse.BCOO(
        (x[:, 0], jnp.stack([jnp.arange(x.shape[0])] * 2, 1)), shape=(x.shape[0],) * 2
    ),
}


@pytest.mark.sampled(4, "None-number", "None-struct")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("axes", ["n, _", None])
def test_data_of_results_is_that_of_the_unpadded_run(form: str, axes: str | None) -> None:
    fn = FORMS[form]
    executor = BucketedExec(fn, dynamic_axes=axes).with_pow2()
    for n in (5, 7, 5, 9):
        x = ramp(n, 4)
        got, want = executor(x), jax.jit(fn)(x)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        jax.tree.map(np.testing.assert_allclose, got, want)
    stats = executor.stats()
    assert not stats.fallback_reasons
    assert stats.compiles <= 4 + (axes is None)  # 8, 16, 32, and a first one that opened nothing


def test_a_sparse_result_can_be_used() -> None:
    executor = BucketedExec(FORMS["sparse"], dynamic_axes="n, _").with_pow2()
    for n in (5, 6):
        x = ramp(n, 4)
        np.testing.assert_allclose(executor(x) @ jnp.ones(n), x[:, 0])


@pytest.mark.parametrize("out", ["jax", "numpy", "padded"])
@pytest.mark.parametrize("check", [Check.OFF, Check.POISON, Check.EXACT])
def test_in_every_form_and_checked(out: str, check: Check) -> None:
    executor = BucketedExec(FORMS["size"], dynamic_axes="n, _", out=out, check=check).with_pow2()
    for n in (5, 6, 5, 6):
        got = executor(ramp(n, 4))
        assert isinstance(got, Sized)
        assert (got.size, got.data.shape) == (n, (n, 4))


def test_what_came_with_the_arguments_costs_no_trace() -> None:
    traces = 0

    class State:
        """Compared as objects are, and not to be looked into."""

    def fn(x: Any) -> Any:
        nonlocal traces
        traces += 1
        return Sized(x.data * 2, x.size)

    executor = BucketedExec(fn, dynamic_axes="n").with_pow2()
    state = State()
    for n in (5, 6, 7):
        assert executor(Sized(ramp(n), state)).size is state
    assert traces == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [str, repr, "{}".format, lambda n: f"{n}", lambda n: str((n, 2))])
def test_texts_of_sizes_are_those_of_the_unpadded_run(make: Callable[[Any], str]) -> None:
    def fn(x: Any) -> Any:
        return x * len(make(x.shape[0] ** 3))

    executor = BucketedExec(fn, dynamic_axes="n").with_pow2()
    for n in (5, 1, 9, 10, 22, 3):
        np.testing.assert_allclose(executor(ramp(n)), jax.jit(fn)(ramp(n)))
    assert not executor.stats().fallback_reasons


def test_the_text_of_an_array_is_no_text_of_a_size() -> None:
    traces = 0

    def fn(x: Any) -> Any:
        nonlocal traces
        traces += 1
        assert str(x)
        return x * 2

    executor = BucketedExec(fn, dynamic_axes="n").with_pow2()
    for n in (5, 6, 7):
        executor(ramp(n))
    assert traces == 1


def test_explain_tells() -> None:
    executor = BucketedExec(FORMS["size"], dynamic_axes="n, _").with_pow2()
    assert "the tree of the results" in str(executor.explain(ramp(5, 4), rules=True))


def test_holds_a_size() -> None:
    (n,) = jax.export.symbolic_shape("n")
    loop: list[Any] = [1]
    loop.append(loop)
    many = [{i: {i: i}} for i in range(99)] + [{1: {n: 2}}]
    for plain in (
        *(None, 1, "a", (1, [2.0, {"k": np.float32}]), {3}, len, loop, object(), np.zeros(2)),
    ):
        assert holds_a_size(plain) is False
    for sized in (
        *(n, [(n,)], many, {"k": n}, {n + 1}, Sized(1, n), functools.partial(len, n), lambda: n),
        *([Held(n)], Held(functools.partial(len, [Held(n)])).__eq__),
    ):
        assert holds_a_size(sized) is True
    for unknown in (NO_SIZE, np.array([n], object)):
        assert holds_a_size(unknown) is None
    of = jax.tree.structure
    assert tree_holds_a_size(of({"a": (1, None)}), of(())) is False
    assert tree_holds_a_size(of([Sized(0, n)]), of(())) is True
    held = Opaque(0, 3)
    assert tree_holds_a_size(of([held]), of(())) is False
    assert tree_holds_a_size(of([held]), of((held,))) is False


def struct(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def root_or_one(number: Any) -> float:
    try:
        return math.sqrt(number)
    except TypeError:
        return 1.0


def is_whole(number: Any) -> int:
    return 2 if hasattr(number, "is_integer") and number.is_integer() else 3


DECISIONS: dict[str, Callable[[Any, Any], Any]] = {
    "types": lambda x, y: x + 1 if jax.typeof(x) == jax.typeof(y) else x,
    "other types": lambda x, y: x + 1 if x.aval != y.aval else x,
    "a set of types": lambda x, y: x + 1 if jax.typeof(x) in {jax.typeof(y)} else x,
    "structs": lambda x, y: x + 1 if struct(x) == struct(y) else x,
    "a set of structs": lambda x, y: x + 1 if struct(x) in {struct(y)} else x,
    "a known struct": lambda x, y: x + 1 if struct(x) == jax.ShapeDtypeStruct((5, 3), "f4") else x,
    "result": lambda x, y: x + 1 if jax.eval_shape(jnp.sin, x) == jax.eval_shape(jnp.cos, y) else x,
    "text of a type": lambda x, y: x + (f"{jax.typeof(x)}" == "float32[5,3]"),
    "text of a struct": lambda x, y: x + len(str(struct(x))),
    "text of a number": lambda x, y: x * len(f"{x.shape[0] / 4}"),
    "key of a number": lambda x, y: {f"{x.shape[0] / 4}": x},
    "text of a mean": lambda x, y: x * len(f"{np.mean([x.shape[0], 3])}"),
    "number of a number": lambda x, y: x * root_or_one(x.shape[0] / 4),
    "whole number": lambda x, y: x * is_whole(x.shape[0] / 4),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DECISIONS)
def test_types_and_their_texts_decide_as_in_the_unpadded_run(name: str) -> None:
    fn = DECISIONS[name]
    executor = BucketedExec(fn, dynamic_axes=("n, _", "m, _")).with_pow2()
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        for n, m in ((6, 7), (5, 5), (7, 7), (16, 16), (5, 6)):
            x, y = ramp(n, 3), ramp(m, 3)
            got, want = executor(x, y), jax.jit(fn)(x, y)
            assert jax.tree.structure(got) == jax.tree.structure(want)
            jax.tree.map(np.testing.assert_allclose, got, want)
