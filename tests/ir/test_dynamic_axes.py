"""Every form of `dynamic_axes`, and the default rule."""

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit._ir.dynamic_axes import STATIC, Anonymous, leaf_entries, tokens_of
from bucketjit.errors import ArgumentError, SizeMismatchError, SpecError
from tests.comparison import assert_as_jit, assert_like_jit, buckets, ramp, unrolled


def double(x: Any) -> Any:
    return jax.tree.map(lambda a: a * 2, x)


# --- forms for one argument --------------------------------------------------------------------

FORMS: dict[str, tuple[Any, tuple[int, ...], dict[str, int]]] = {
    "string": ("b, s, _", (3, 5, 2), {"b": 4, "s": 8}),
    "string with spaces": ("  b ,  s,_  ", (3, 5, 2), {"b": 4, "s": 8}),
    "string in parentheses": ("(b, s, _)", (3, 5, 2), {"b": 4, "s": 8}),
    "string with a trailing comma": ("b,", (3,), {"b": 4}),
    "string with an ellipsis": ("b, ...", (3, 5, 2), {"b": 4}),
    "ellipsis first": ("..., s", (3, 5, 2), {"s": 2}),
    "ellipsis in the middle": ("b, ..., s", (3, 5, 2, 6), {"b": 4, "s": 8}),
    "string with a constant": ("b, 5, 2", (3, 5, 2), {"b": 4}),
    "one name twice": ("n, n", (3, 3), {"n": 4}),
    "expression": ("2*b + 1, b", (7, 3), {"b": 4}),
    "expression with two variables": ("b, s, b + s", (3, 5, 8), {"b": 4, "s": 8}),
    "expression with a function": ("b, floordiv(b, 2)", (7, 3), {"b": 8}),
    "expression with two arguments": ("max(b, s), b, s", (5, 3, 5), {"b": 4, "s": 8}),
    "dict": ({0: "b", 1: "s"}, (3, 5, 2), {"b": 4, "s": 8}),
    "dict with negative axes": ({-1: "s"}, (3, 2, 5), {"s": 8}),
    "dict with both kinds": ({0: "b", -1: "s"}, (3, 2, 5), {"b": 4, "s": 8}),
    "dict with an expression": ({0: "b", 1: "b + 1"}, (3, 4), {"b": 4}),
    "tuple of names": (("b", "s", None), (3, 5, 2), {"b": 4, "s": 8}),
    "tuple with underscores": (("b", "_", "s"), (3, 5, 2), {"b": 4, "s": 2}),
    "list of axes": ([0], (3, 5), {"batch": 4}),
    "list of two axes": ([0, 1], (3, 5), {"batch": 4, "axis1": 8}),
    "list of negative axes": ([-1], (3, 5), {"axis1": 8}),
    "list out of order": ([1, 0], (3, 5), {"axis1": 8, "batch": 4}),
}


@pytest.mark.sampled(11, "ellipsis first")
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    spec, shape, bucket = FORMS[form]
    executor = BucketedExec(double, dynamic_axes=(spec,)).with_pow2()
    for _ in range(2):
        assert_like_jit(executor, double, ramp(*shape))
        if not isinstance(spec, tuple):  # which would be one entry per child
            assert_like_jit(executor, double, {"k": [ramp(*shape)]})
    assert buckets(executor) in ([bucket, bucket], [bucket])


@pytest.mark.parametrize(
    "form", ["string", "expression", "dict with both kinds", "tuple of names", "list of two axes"]
)
def test_forms_by_the_builder_and_by_name(form: str) -> None:
    spec, shape, bucket = FORMS[form]
    for given in ({"x": spec}, [spec]):
        executor = BucketedExec(double).with_pow2().with_dynamic_axes(given)
        assert_like_jit(executor, double, ramp(*shape))
        assert buckets(executor) == [bucket]
    executor = BucketedExec(double).with_pow2().with_dynamic_axes({"x": spec})
    assert_like_jit(executor, double, x=ramp(*shape))
    assert buckets(executor) == [bucket]


@pytest.mark.parametrize("spec", ["b, s", {0: "b", 1: "s"}, [0, 1]], ids=str)
def test_a_function_of_one_argument_needs_no_tuple(spec: Any) -> None:
    executor = BucketedExec(double, dynamic_axes=spec).with_pow2()
    assert_like_jit(executor, double, ramp(3, 5))
    assert list(buckets(executor)[0].values()) == [4, 8]


def test_none_is_static() -> None:
    executor = BucketedExec(lambda x, y: (x * 2, y + 1), dynamic_axes=("b", None)).with_pow2()
    for b, n in ((3, 3), (4, 3), (3, 4), (3, 5)):
        assert_like_jit(executor, executor.__wrapped__, ramp(b), ramp(n))
    assert executor.cache_size() == 3  # one per size of y
    assert buckets(executor) == [{"b": 4}] * 3


def test_underscores_are_static_sizes() -> None:
    executor = BucketedExec(double, dynamic_axes="b, _").with_pow2()
    for b, d in ((3, 2), (4, 2), (3, 5), (3, 2)):
        assert_like_jit(executor, double, ramp(b, d))
    assert executor.cache_size() == 2


def test_missing_entries_are_static() -> None:
    fn = lambda x, y, z: (x * 2, y + z)  # noqa: E731
    for spec in (("b",), ("b", None), {"x": "b"}):
        executor = BucketedExec(fn, dynamic_axes=spec).with_pow2()
        assert_like_jit(executor, fn, ramp(3), ramp(3), 1.0)
        assert buckets(executor) == [{"b": 4}]


def test_keyword_arguments_by_name_in_a_dict_after_the_positional_entries() -> None:
    fn = lambda x, *, y, z=1: (x * 2, y * 3, z)  # noqa: E731
    executor = BucketedExec(fn, dynamic_axes=("b", {"y": "s", "z": None})).with_pow2()
    for b, s in ((3, 5), (4, 6)):
        assert_like_jit(executor, fn, ramp(b), y=ramp(s))
        assert_like_jit(executor, fn, ramp(b), y=ramp(s), z=ramp(s))
    assert buckets(executor)[0] == {"b": 4, "s": 8}


def test_positional_entries_serve_arguments_passed_by_name() -> None:
    fn = lambda x, y: (x * 2, y * 3)  # noqa: E731
    for spec in (("b", "s"), {"x": "b", "y": "s"}):
        executor = BucketedExec(fn, dynamic_axes=spec).with_pow2()
        assert_like_jit(executor, fn, ramp(3), ramp(5))
        assert_like_jit(executor, fn, ramp(3), y=ramp(5))
        assert_like_jit(executor, fn, y=ramp(5), x=ramp(3))
        assert buckets(executor) == [{"b": 4, "s": 8}] * 3


def test_static_arguments_have_entries_that_do_not_count() -> None:
    fn = lambda how, x, flag: x * 2 if flag else x  # noqa: E731
    executor = BucketedExec(fn, static_argnums=(0, 2), dynamic_axes=(None, "b", None)).with_pow2()
    for n in (3, 4):
        np.testing.assert_array_equal(executor("a", ramp(n), True), 2 * ramp(n))
    assert buckets(executor) == [{"b": 4}]
    executor = executor.with_dynamic_axes({"x": "b"})
    np.testing.assert_array_equal(executor("a", ramp(3), False), ramp(3))
    assert buckets(executor) == [{"b": 4}]


def test_variadic_arguments() -> None:
    fn = lambda *xs, **named: [x * 2 for x in (*xs, *named.values())]  # noqa: E731
    executor = BucketedExec(fn, dynamic_axes=("b", "b", {"y": "s"})).with_pow2()
    assert_like_jit(executor, fn, ramp(3), ramp(3), y=ramp(5))
    assert buckets(executor) == [{"b": 4, "s": 8}]


# --- containers --------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["tokens", "labels"], meta_fields=[]
)
@dataclasses.dataclass
class Batch:
    tokens: Any
    labels: Any


CONTAINERS: dict[str, tuple[Any, Callable[[int, int], Any]]] = {
    "dict": ({"x": "b, s", "y": "b"}, lambda b, s: {"y": ramp(b), "x": ramp(b, s)}),
    "dict, partly": ({"x": "b, s"}, lambda b, s: {"x": ramp(b, s), "c": 7.0}),
    "dict, partly None": ({"x": "b, s", "c": None}, lambda b, s: {"x": ramp(b, s), "c": ramp(7)}),
    "list": (["b, s", "b"], lambda b, s: [ramp(b, s), ramp(b)]),
    "tuple": (("b, s", None, "b"), lambda b, s: (ramp(b, s), ramp(2), ramp(b))),
    "named tuple": (Pair("b, s", "b"), lambda b, s: Pair(ramp(b, s), ramp(b))),
    "dataclass": (Batch("b, s", "b"), lambda b, s: Batch(ramp(b, s), ramp(b))),
    "prefix": ("b, s", lambda b, s: {"a": ramp(b, s), "l": [ramp(b, s), (ramp(b, s),)]}),
    "prefix with an ellipsis": ("b, ...", lambda b, s: [ramp(b), ramp(b, 2), ramp(b, 2, 2)]),
    "prefix as a list of axes": ([0], lambda b, s: {"a": ramp(b, 2), "b": [ramp(b)]}),
    "inner prefix": (
        {"a": "b, ...", "c": None},
        lambda b, s: {"a": [ramp(b), ramp(b, 3)], "c": [1, ramp(4)]},
    ),
    "None": ({"a": "b", "n": None, "m": "b"}, lambda b, s: {"a": ramp(b), "n": None, "m": None}),
    "ordered": (OrderedDict(y="b", x="b, s"), lambda b, s: OrderedDict(y=ramp(b), x=ramp(b, s))),
    "int keys": ({"k": {7: "b", 3: "b, s"}}, lambda b, s: {"k": {7: ramp(b), 3: ramp(b, s)}}),
    "empty": ({"a": "b", "e": []}, lambda b, s: {"a": ramp(b), "e": []}),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", CONTAINERS)
def test_containers(name: str) -> None:
    spec, make = CONTAINERS[name]
    executor = BucketedExec(double, dynamic_axes=(spec,)).with_pow2()
    for b, s in ((3, 5), (4, 8), (3, 7), (1, 5)):
        assert_like_jit(executor, double, make(b, s))
    first = buckets(executor)[0]
    assert (first.get("b") or first.get("batch")) == 4
    assert executor.cache_size() == 2


# --- a Python int that is a size ---------------------------------------------------------------


def test_an_int_argument_as_a_size() -> None:
    fn = lambda n: jnp.ones((n, 2)) * jnp.arange(n)[:, None]  # noqa: E731
    executor = BucketedExec(fn, dynamic_axes="n").with_pow2()
    for n in (1, 3, 4, np.int32(5), 7, 8, 0, 3):
        want = np.ones((n, 2)) * np.arange(n)[:, None]
        got = executor(n)
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, want)
    masked = [b.sizes["n"] for b in executor.stats().buckets if not b.exact]
    assert masked.count(1) == masked.count(4) == 1
    assert set(masked) == {1, 4, 8}


def test_an_int_argument_as_a_size_without_a_strategy() -> None:
    executor = BucketedExec(lambda n: jnp.ones((n, 2)), dynamic_axes="n")
    for n in (1, 3, 3, 0):
        assert executor(n).shape == (n, 2)
    assert executor.cache_size() == 3


def test_a_size_argument_is_checked_against_an_array() -> None:
    executor = BucketedExec(lambda x, n: x + jnp.arange(n), dynamic_axes=("n", "n")).with_pow2()
    for n in (3, 4, 5):
        np.testing.assert_array_equal(executor(ramp(n), n), ramp(n) + np.arange(n))
    with pytest.raises(SizeMismatchError, match="axis 0 of x"):
        executor(ramp(3), 4)


def test_a_size_argument_in_a_container_and_by_name() -> None:
    fn = lambda x, *, options: x * jnp.ones(options["n"]).sum()  # noqa: E731
    executor = BucketedExec(fn, dynamic_axes=("b", {"options": {"n": "n"}})).with_pow2()
    for b, n in ((3, 5), (4, 6)):
        np.testing.assert_array_equal(executor(ramp(b), options={"n": n}), ramp(b) * n)
    assert buckets(executor) == [{"b": 4, "n": 8}]


@pytest.mark.parametrize("value", [True, 2.0, "3", np.float32(3), -1], ids=repr)
def test_a_size_argument_must_be_an_int_and_not_negative(value: Any) -> None:
    executor = BucketedExec(lambda n: jnp.ones((n, 2)), dynamic_axes="n").with_pow2()
    errors = ArgumentError if value != -1 else (ArgumentError, TypeError, ValueError)
    with pytest.raises(errors, match="n|neg"):
        executor(value)
    assert executor(3).shape == (3, 2)


def test_a_python_int_without_an_entry_is_a_number() -> None:
    executor = BucketedExec(lambda x, n: x * n, dynamic_axes=("b", None)).with_pow2()
    for n in (2, 3, 4):
        assert_like_jit(executor, executor.__wrapped__, ramp(3), n)
    assert executor.cache_size() == 1


# --- expressions and constraints ---------------------------------------------------------------


def test_an_expression_binds_its_variable() -> None:
    fn = lambda x, y: (x * 2, y[:-1] + 1)  # noqa: E731
    executor = BucketedExec(fn, dynamic_axes=("2*b + 1", "b")).with_pow2()
    for b in (3, 4, 2, 5):
        assert_like_jit(executor, fn, ramp(2 * b + 1), ramp(b))
    assert buckets(executor) == [{"b": 4}, {"b": 2}, {"b": 8}]


def test_expressions_in_any_order() -> None:
    fn = lambda *xs: [x * 2 for x in xs]  # noqa: E731
    executor = BucketedExec(fn, dynamic_axes=("a + b", "b + c", "c")).with_pow2()
    for a, b, c in ((1, 2, 3), (3, 1, 2)):
        assert_like_jit(executor, fn, ramp(a + b), ramp(b + c), ramp(c))


@pytest.mark.parametrize(
    ("spec", "shape"),
    [("2*b + 1", (4,)), ("b + 3", (1,)), ("2*b", (7,)), ("b*b", (9,)), ("b + s", (5,))],
    ids=str,
)
def test_an_expression_that_no_size_solves(spec: str, shape: tuple[int, ...]) -> None:
    executor = BucketedExec(double, dynamic_axes=(spec,)).with_pow2()
    with pytest.raises(ArgumentError) as raised:
        executor(ramp(*shape))
    for part in (f"axis 0 of x has size {shape[0]}, declared", "no whole size of"):
        assert part in str(raised.value)


def test_constraints_are_given_to_the_tracer() -> None:
    """Without the constraint, min needs a decision, and with it the program is one."""
    fn = lambda x: x[:4] * min(x.shape[0], 4)  # noqa: E731
    executor = BucketedExec(fn, dynamic_axes="s", constraints=("s >= 4",)).with_pow2()
    for n in (4, 5, 9):
        assert_like_jit(executor, fn, ramp(n))
    with pytest.raises(ArgumentError, match="s >= 4"):
        executor(ramp(3))
    assert_like_jit(executor, fn, ramp(8))


def test_a_constraint_may_be_one_string_and_shapes_the_bucket() -> None:
    fn = lambda x: x.reshape(-1, 2).sum(1)  # noqa: E731
    executor = BucketedExec(fn, dynamic_axes="s", constraints="mod(s, 2) == 0").with_linear(5)
    for n in (2, 4, 6):
        assert_like_jit(executor, fn, ramp(n))
    assert all(b["s"] % 2 == 0 for b in buckets(executor))
    with pytest.raises(ArgumentError, match="mod"):
        executor(ramp(3))


def test_constraints_between_variables() -> None:
    fn = lambda x, y: x[: y.shape[0]] + y  # noqa: E731
    executor = BucketedExec(fn, dynamic_axes=("b", "s"), constraints=("b >= s",)).with_pow2()
    for b, s in ((3, 2), (5, 5), (4, 1)):
        assert_like_jit(executor, fn, ramp(b), ramp(s))
    with pytest.raises(ArgumentError, match="b >= s"):
        executor(ramp(2), ramp(3))


# --- the default rule --------------------------------------------------------------------------


def test_default_axis_0_of_every_array_shares_a_variable() -> None:
    executor = BucketedExec(lambda x, y, c: (x * 2, y + c)).with_pow2()
    for n in (3, 5, 4):
        assert_as_jit(executor, ramp(n, 2), ramp(n), 1.0)
    assert buckets(executor) == [{"batch": 4}, {"batch": 8}]


def test_default_sizes_that_differ_get_their_own_variables() -> None:
    executor = BucketedExec(lambda x, y: (x * 2, y + 1)).with_pow2()
    for n, m in ((3, 5), (4, 8), (3, 9)):
        assert_as_jit(executor, ramp(n), ramp(m))
    assert buckets(executor) == [{"batch": 4, "batch_1": 8}, {"batch": 4, "batch_1": 16}]


def test_default_a_shared_variable_is_split_when_sizes_come_apart() -> None:
    executor = BucketedExec(lambda x, y, z: (x * 2, y + 1, z - 1)).with_pow2()
    sizes = ((3, 3, 3), (5, 5, 5), (3, 5, 3), (3, 3, 5), (2, 5, 9), (4, 4, 4), (3, 3, 3))
    for n, m, k in sizes:
        assert_as_jit(executor, ramp(n), ramp(m), ramp(k))
    assert max(map(len, buckets(executor))) == 3


def test_default_containers_are_static_until_they_vary() -> None:
    executor = BucketedExec(lambda p, x: (x * p["w"].sum(), p["w"] + 1)).with_pow2()
    for n in (3, 4):
        assert_as_jit(executor, {"w": ramp(3)}, ramp(n))
    assert buckets(executor) == [{"batch": 4}]
    for m in (5, 6, 7, 8):
        assert_as_jit(executor, {"w": ramp(m)}, ramp(3))
    assert executor.cache_size() == 2
    assert sorted(buckets(executor)[1].values()) == [4, 8]


def test_default_an_axis_that_varies_with_the_batch_joins_it() -> None:
    executor = BucketedExec(lambda x, d: (x * 2, d["y"] + 1)).with_pow2()
    for n in (3, 5, 6, 7, 3, 9):
        assert_as_jit(executor, ramp(n), {"y": ramp(n)})
    # A size met before is served as it was then.
    assert buckets(executor)[1:] == [{"batch": 8}, {"batch": 16}]


def test_default_learned_axes_that_agreed_by_chance_come_apart_again() -> None:
    executor = BucketedExec(lambda x, d: (x * 2, d["v"] + 1, d["w"] - 1)).with_pow2()
    sizes = ((4, 4, 4), (6, 6, 6), (6, 8, 6), (4, 5, 7), (3, 3, 3), (4, 6, 6), (6, 6, 4))
    for n, v, w in sizes:
        assert_as_jit(executor, ramp(n), {"v": ramp(v), "w": ramp(w)})


def test_default_only_containers_learn_too() -> None:
    executor = BucketedExec(lambda d: jax.tree.map(lambda a: a * 2, d)).with_pow2()
    for n in (3, 5, 6, 7, 8):
        assert_as_jit(executor, {"x": ramp(n, 2), "y": [ramp(n)]})
    assert executor.cache_size() == 2  # 3 as it is, then the bucket 8


def test_default_inner_axes_learn() -> None:
    executor = BucketedExec(lambda x: (x * 2, x.sum(1))).with_pow2()
    for b, s in ((3, 5), (4, 5), (3, 6), (3, 7), (2, 8), (4, 8)):
        assert_as_jit(executor, ramp(b, s))
    assert executor.cache_size() == 3
    assert buckets(executor)[0] == {"batch": 4}
    assert sorted(buckets(executor)[1].values()) == [4, 8]


def test_default_weights_beside_data() -> None:
    """A matrix of weights is an array too; its axis 0 must meet the data's features."""
    executor = BucketedExec(lambda w, x: jnp.tanh(x @ w)).with_pow2()
    w = ramp(4, 2) / 10
    for n in (4, 5, 4, 7, 3):  # the first batch is as large as the features
        np.testing.assert_allclose(executor(w, ramp(n, 4)), np.tanh(ramp(n, 4) @ w), rtol=1e-5)
    assert executor.stats().fallback_calls == 0
    assert executor.cache_size() <= 3


def test_default_what_does_not_trace_stays_static() -> None:
    """Here axis 0 of the table counts equations; that of the data does not."""

    executor = BucketedExec(lambda table, x: x * unrolled(table).sum() + table.sum()).with_pow2()
    for n in (3, 4, 5, 7):
        assert_as_jit(executor, ramp(6), ramp(n))
    assert buckets(executor) == [{"batch": 4}, {"batch": 8}]
    assert executor.stats().fallback_calls == 0
    assert_as_jit(executor, ramp(7), ramp(3))


def test_default_scalars_and_keys_are_left_alone() -> None:
    executor = BucketedExec(lambda key, x, c: (jax.random.uniform(key) + c, x)).with_pow2()
    for n in (2, 3, 4):
        assert_as_jit(executor, jax.random.key(n), ramp(n), 3)
    assert buckets(executor) == [{"batch": 2}, {"batch": 4}]


@pytest.mark.parametrize("entry", ["", "()", None])
def test_an_entry_without_axes_is_that_of_a_scalar(entry: str | None) -> None:
    executor = BucketedExec(lambda x, i: x[i] * 2, dynamic_axes=("n, m", entry)).with_pow2()
    x = ramp(6).reshape(2, 3)
    for i in (1, np.int32(0), jnp.int32(1), np.array(0)):
        assert_as_jit(executor, x, i)
    assert all(bucket == {"n": 2, "m": 4} for bucket in buckets(executor))


def test_default_an_empty_array_teaches_nothing() -> None:
    fn = lambda x, y: (x * 2, y + 1)  # noqa: E731
    executor = BucketedExec(fn).with_pow2()
    for n, m in ((0, 3), (3, 0), (3, 3), (5, 5), (0, 0), (4, 8)):
        assert_like_jit(executor, fn, ramp(n), ramp(m))
    assert executor.stats().fallback_calls == 0


def test_default_a_first_call_of_size_1() -> None:
    executor = BucketedExec(lambda x, y: (x.sum(0), y * 2)).with_pow2()
    for n in (1, 5, 1, 3):
        assert_as_jit(executor, ramp(n, 1), ramp(n))
    assert executor.cache_size() == 3


def test_a_list_of_axes_does_not_open_others() -> None:
    executor = BucketedExec(double, dynamic_axes=([0],)).with_pow2()
    for b, s in ((3, 5), (4, 5), (3, 6)):
        assert_like_jit(executor, double, ramp(b, s))
    assert buckets(executor) == [{"batch": 4}, {"batch": 4}]


def test_a_list_of_axes_beside_a_variable_of_the_same_name() -> None:
    fn = lambda x, y: (x * 2, y + 1)  # noqa: E731
    executor = BucketedExec(fn, dynamic_axes=("batch", [0])).with_pow2()
    for n, m in ((3, 3), (3, 5), (4, 5)):
        assert_like_jit(executor, fn, ramp(n), ramp(m))


# --- arguments that a call leaves out ----------------------------------------------------------


def masked_sum(x: Any, *, mask: Any = None) -> Any:
    return x.sum(0) if mask is None else (x * mask[:, None]).sum(0)


def test_entries_by_name_behind_a_static_argument() -> None:
    def add(x: Any, mode: str = "a", *, y: Any = None) -> Any:
        return x if y is None else x + y

    executor = BucketedExec(add, dynamic_axes=("n", {"y": "n"}), static_argnames="mode").with_pow2()
    for n in (3, 5):
        assert_like_jit(executor, lambda x, y: add(x, y=y), ramp(n), y=ramp(n))


def test_a_float_may_have_an_entry_that_opens_nothing() -> None:
    for entry in ("", None, {"a": ""}):
        argument = {"a": 0.5} if isinstance(entry, dict) else 0.5
        executor = BucketedExec(lambda x, s: x * jax.tree.leaves(s)[0], dynamic_axes=("n", entry))
        np.testing.assert_array_equal(executor.with_pow2()(ramp(3), argument), ramp(3) * 0.5)


def test_a_comma_within_nested_calls_is_none_between_axes() -> None:
    executor = BucketedExec(lambda x: x, dynamic_axes="min(n, floordiv(n^2, n + 1)), _").with_pow2()
    with pytest.raises((SpecError, ArgumentError)) as raised:
        executor(ramp(3))
    assert "describes 2 axes" in str(raised.value)


def test_an_argument_that_is_not_there_is_still_told_of() -> None:
    executor = BucketedExec(masked_sum, dynamic_axes={"x": "b, _", "maks": "b"}).with_pow2()
    with pytest.raises(SpecError, match=r"\['maks'\]; this function has \['x', 'mask'\]"):
        executor(ramp(3, 2))


def test_too_many_entries_are_told_of_whatever_a_call_leaves_out() -> None:
    executor = BucketedExec(lambda x, y=None: x, dynamic_axes=("b, _", "b", "c")).with_pow2()
    for args in ((ramp(3, 2),), (ramp(3, 2), ramp(3))):
        with pytest.raises(SpecError, match="has 3 entries"):
            executor(*args)


# --- specs that are wrong ----------------------------------------------------------------------

WRONG_SPECS: dict[str, tuple[Any, Any, str]] = {
    "starts with a digit": ("1b", ramp(3), "1b"),
    "unfinished expression": ("2*", ramp(3), r"2\*"),
    "unknown function": ("sqrt(b)", ramp(3), "sqrt"),
    "a keyword": ("in, out", ramp(3, 4), "in"),
    "two ellipses": ("..., b, ...", ramp(3, 4), r"more than one '\.\.\.'"),
    "a number": (3, ramp(3), "3"),
    "a name of numbers": ({0: 3}, ramp(3), "axis"),
    "a dict without a name": ({0: None}, ramp(3), "axis|None"),
    "a set": ({"b"}, ramp(3), "b"),
    "an object": (object(), ramp(3), "object"),
    "a float": (1.5, ramp(3), "1.5"),
    "a class": (int, ramp(3), "int"),
    "other keys": ({"z": "b"}, {"x": ramp(3), "y": ramp(3)}, "an entry for 'z', .* has 'x', 'y'$"),
    "a key too many": ({"x": "b", "z": "b"}, {"x": ramp(3)}, "an entry for 'z', .* has 'x'$"),
    "too many entries": (["b", "b", "b"], [ramp(3), ramp(3)], "structure"),
    "too few entries": (["b"], [ramp(3), ramp(3)], "structure"),
}


@pytest.mark.parametrize("name", WRONG_SPECS)
def test_wrong_specs(name: str) -> None:
    spec, value, match = WRONG_SPECS[name]
    executor = BucketedExec(double, dynamic_axes=(spec,)).with_pow2()
    for _ in range(2):
        with pytest.raises((SpecError, ArgumentError), match=match) as raised:
            executor(value)
        assert "x" in str(raised.value) or "dynamic_axes" in str(raised.value)
    assert executor.cache_size() == 0


@pytest.mark.parametrize("spec", [("b", "b"), ("b", None, "s"), {"q": "b"}, 3, {1.5}], ids=repr)
def test_specs_for_other_arguments(spec: Any) -> None:
    executor = BucketedExec(double, dynamic_axes=spec).with_pow2()
    with pytest.raises(SpecError, match="dynamic_axes"):
        executor(ramp(3))


def test_one_axis_named_twice() -> None:
    executor = BucketedExec(double, dynamic_axes=({1: "b", -1: "s"},)).with_pow2()
    with pytest.raises((SpecError, ArgumentError), match="-1|axis 1|twice"):
        executor(ramp(3, 4))


def test_a_strategy_for_a_variable_of_an_argument_left_out() -> None:
    fn = lambda x, y=None: x * 2 if y is None else x.sum() + y  # noqa: E731
    executor = BucketedExec(fn, dynamic_axes=("b", "s")).with_pow2("s").with_pow2("b")
    assert_like_jit(executor, fn, ramp(3))
    assert_like_jit(executor, fn, ramp(3), ramp(5))


# --- properties --------------------------------------------------------------------------------

NAMES = st.sampled_from(["b", "s", "t", "batch", "seq_len", "n1"])


@hypothesis.given(st.lists(NAMES, min_size=1, max_size=3), st.integers(0, 3), st.integers(0, 3))
@hypothesis.settings(deadline=None, max_examples=40)
def test_an_ellipsis_stands_for_the_axes_left(names: list[str], at: int, extra: int) -> None:
    at = min(at, len(names))
    parts = [*names[:at], "...", *names[at:]]
    rank = len(names) + extra
    wanted = (*names[:at], *(STATIC,) * extra, *names[at:])
    assert tokens_of(", ".join(parts), "x", (2,) * rank) == wanted
    with pytest.raises(ArgumentError):
        tokens_of(", ".join(parts), "x", (2,) * (len(names) - 1))


@hypothesis.given(st.text(max_size=12))
@hypothesis.settings(deadline=None, max_examples=60)
def test_any_text_is_a_spec_or_a_clear_error(text: str) -> None:
    for rank in (1, 2):
        try:
            tokens = tokens_of(text, "x", (2,) * rank)
        except (SpecError, ArgumentError) as error:
            assert "x" in str(error)
        else:
            assert len(tokens) == rank


def test_entries_of_a_container_are_paired_with_its_leaves() -> None:
    value = {"a": [np.zeros(2), None, np.zeros((2, 3))], "b": np.zeros(4)}
    entry = {"a": ["b", None, Anonymous((0,))], "b": None}
    assert leaf_entries(entry, value, "x") == ["b", Anonymous((0,)), None]
