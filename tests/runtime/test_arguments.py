"""Which arguments of `map` are lists, what a list may be, and what errors say."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec, Ragged
from bucketjit.errors import ArgumentError, SpecError

LENGTHS = [3, 1, 6, 3, 8]
F32 = np.float32


class Pair(NamedTuple):
    a: Any
    b: Any


def rows(lengths: list[int] = LENGTHS, d: int = 2) -> list[np.ndarray]:
    return [np.arange(n * d, dtype=np.float32).reshape(n, d) + i for i, n in enumerate(lengths)]


def encode(params: Any, x: Any) -> Any:
    return (x @ params["w"] + params["b"]).sum(0)


PARAMS = {"w": np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), "b": jnp.ones(2)}


def encoder() -> BucketedExec:
    return BucketedExec(encode, dynamic_axes=(None, "n, _")).with_pow2(min=4)


def check(got: list[Any], examples: list[np.ndarray]) -> None:
    assert len(got) == len(examples)
    for result, x in zip(got, examples, strict=True):
        np.testing.assert_allclose(result, encode(PARAMS, x), rtol=1e-5)


# --- lists ---


def test_arguments_in_their_places() -> None:
    executor, examples = encoder(), rows()
    check(executor.map(PARAMS, examples), examples)
    assert executor.stats().rows == 5 and executor.stats().fallback_calls == 0
    assert all(isinstance(x, jax.Array) for x in executor.map(PARAMS, examples))


def as_objects(examples: list[np.ndarray]) -> np.ndarray:
    array = np.empty(len(examples), object)
    array[:] = examples
    return array


def as_ragged(examples: list[np.ndarray]) -> Ragged:
    wide = np.stack([np.pad(x, ((0, 8 - len(x)), (0, 0))) for x in examples])
    return Ragged(wide, np.array(LENGTHS))


LISTS: dict[str, Callable[[list[np.ndarray]], Any]] = {
    **{"tuple": tuple, "generator": iter, "object array": as_objects, "Ragged": as_ragged},
    "jax": lambda examples: [jnp.asarray(x) for x in examples],
    "mixed": lambda examples: [jnp.asarray(x) if i % 2 else x for i, x in enumerate(examples)],
}


@pytest.mark.parametrize("form", LISTS)
def test_forms_of_lists(form: str) -> None:
    check(encoder().map(PARAMS, LISTS[form](rows())), rows())


def test_an_array_gives_its_rows() -> None:
    total = BucketedExec(jnp.sum, dynamic_axes="n").with_pow2()
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    for given in (array, jnp.asarray(array)):
        assert [float(x) for x in total.map(given)] == array.sum(1).tolist()


def test_in_axes() -> None:
    executor = BucketedExec(lambda x, scale: (x * scale).sum(), dynamic_axes=("n", None))
    executor = executor.with_pow2()
    examples = [np.ones(n, np.float32) for n in LENGTHS]
    scales = np.arange(5, dtype=np.float32)
    wanted = [float(n * s) for n, s in zip(LENGTHS, scales, strict=True)]
    forms: list[Any] = [(0, 0), 0, {"x": 0, "scale": 0}, [0, 0]]
    for in_axes in forms:
        assert [float(x) for x in executor.map(examples, scales, in_axes=in_axes)] == wanted
    got = executor.map(examples[0], list(scales), in_axes=(None, 0))
    assert [float(x) for x in got] == [3 * float(s) for s in scales]
    assert [float(x) for x in executor.map(examples, 2.0)] == [2.0 * n for n in LENGTHS]


def test_without_dynamic_axes_lists_are_mapped() -> None:
    executor = BucketedExec(lambda x, w: (x * w).sum()).with_pow2()
    assert [float(x) for x in executor.map([np.ones(n, F32) for n in (3, 5)], 2.0)] == [6, 10]


def test_named_tuples_are_no_lists() -> None:
    executor = BucketedExec(lambda p, x: (x * p.a + p.b).sum()).with_pow2()
    params = Pair(np.float32(2), np.float32(1))
    got = executor.map(params, [np.ones(n, np.float32) for n in (3, 5)])
    assert [float(x) for x in got] == [9, 15]
    pairs = BucketedExec(lambda p: (p.a * p.b).sum(), dynamic_axes=(Pair("n", None),)).with_pow2()
    got = pairs.map([Pair(np.ones(n, np.float32), np.float32(n)) for n in (3, 5)])
    assert [float(x) for x in got] == [9, 25]


def test_trees_keywords_and_static_arguments() -> None:
    def fn(batch: Any, scale: Any, *, power: int, offset: Any) -> Any:
        return {"out": (batch["x"] ** power).sum() * scale + offset, "y": batch["y"] + 1}

    executor = BucketedExec(
        fn, dynamic_axes=({"x": "n", "y": "m, _"}, None, {"offset": None}), static_argnames="power"
    ).with_pow2()
    examples = [
        {"x": np.full(n, 2, np.float32), "y": np.full((m, 3), n, np.int32)}
        for n, m in [(3, 2), (5, 1), (2, 2)]
    ]
    got = executor.map(examples, 3.0, power=2, offset=np.float32(1))
    for result, example in zip(got, examples, strict=True):
        assert float(result["out"]) == 12 * len(example["x"]) + 1
        np.testing.assert_array_equal(result["y"], example["y"] + 1)
    offsets = [np.float32(1), np.float32(2), np.float32(3)]
    got = executor.map(examples, 3.0, power=2, offset=offsets, in_axes={"batch": 0, "offset": 0})
    assert [float(r["out"]) for r in got] == [37, 62, 27]


def test_size_arguments() -> None:
    def fn(x: Any, n: int) -> Any:
        return jnp.concatenate([x, jnp.zeros(n)]).sum() + n

    executor = BucketedExec(fn, dynamic_axes=("s", "n")).with_pow2()
    examples = [np.ones(k, np.float32) for k in (3, 5, 2)]
    assert [float(x) for x in executor.map(examples, [1, 4, 3])] == [4, 9, 5]
    assert executor.stats().rows == 3


def test_a_shared_argument_with_open_axes() -> None:
    executor = BucketedExec(lambda q, k: (q @ k.T).sum(0), dynamic_axes=("t, _", "s, _"))
    keys = np.ones((5, 2), np.float32)
    got = executor.with_pow2().map(rows(), keys, in_axes=(0, None))
    for x, result in zip(rows(), got, strict=True):
        np.testing.assert_allclose(result, (x @ keys.T).sum(0))


def test_order_is_kept_and_an_empty_list_is_empty() -> None:
    last = BucketedExec(lambda x: x[-1], dynamic_axes="n").with_pow2(min=4)
    lengths = np.random.default_rng(0).integers(1, 40, 300)
    got = last.map([np.arange(n, dtype=np.float32) for n in lengths])
    assert [int(x) for x in got] == [n - 1 for n in lengths]
    assert last.map([]) == [] and last.map(iter(())) == []
    assert len(last.map([], out="stacked")) == 0
    assert [int(x) for x in last.map([np.arange(7.0)])] == [6]


def test_donated_arguments_of_all_examples_survive() -> None:
    executor = BucketedExec(lambda w, x: x * w, dynamic_axes=(None, "n"), donate_argnums=(0, 1))
    executor = executor.with_pow2()
    w = jnp.float32(2.0)
    got = executor.map(w, [jnp.ones(n) for n in (2, 3, 2)])
    assert [x.tolist() for x in got] == [[2, 2], [2, 2, 2], [2, 2]] and float(w) == 2


# --- results ---


def test_forms_of_results() -> None:
    executor = BucketedExec(lambda x: {"y": x * 2, "n": x.sum()}, dynamic_axes="n").with_pow2(min=4)
    examples = [np.ones(n, np.float32) for n in LENGTHS]
    for row in executor.map(examples, out="numpy"):
        assert type(row["y"]) is np.ndarray and row["n"].shape == ()
    padded = executor.map(examples, out="padded")
    assert [row["y"].sizes for row in padded] == [(n,) for n in LENGTHS]
    assert {row["y"].array.shape for row in padded} == {(4,), (8,)}
    again = BucketedExec(lambda y: y.sum(), dynamic_axes="n").with_pow2(min=4)
    assert [float(x) for x in again.map([row["y"] for row in padded])] == [2 * n for n in LENGTHS]


def test_stacked_results() -> None:
    def fn(x: Any) -> Any:
        return {"y": x * 2, "pairs": x[:, None] + x[None], "n": x.sum()}

    executor = BucketedExec(fn, dynamic_axes="n").with_pow2(min=4)
    examples = [np.arange(n, dtype=np.float32) for n in LENGTHS]
    stacked = executor.map(examples, out="stacked")
    y, pairs, n = (stacked[name] for name in ("y", "pairs", "n"))
    assert all(isinstance(one, Ragged) and len(one) == 5 for one in (y, pairs, n))
    assert y.values.shape == (5, 8) and pairs.values.shape == (5, 8, 8)
    assert y.lengths.tolist() == LENGTHS
    assert pairs.lengths.tolist() == [[n, n] for n in LENGTHS]
    assert n.lengths.shape == (5, 0) and n.mask.tolist() == [True] * 5
    assert y.mask.sum() == sum(LENGTHS)
    assert pairs.mask.sum() == sum(n * n for n in LENGTHS)
    assert isinstance(y.values, jax.Array)
    plain = executor.map(examples)
    for name, ragged in stacked.items():
        for one, other, indexed in zip(ragged.rows(), plain, ragged, strict=True):
            np.testing.assert_array_equal(one, other[name])
            np.testing.assert_array_equal(indexed, other[name])
    assert len(y.to_list()) == 5 and y[-1].shape == (8,)
    assert type(y[-1]) is np.ndarray  # JAX would compile for each length
    assert len(y[1:3]) == 2
    with pytest.raises(IndexError):
        y[5]
    numpy = executor.map(examples, out="numpy")
    assert [row["n"] for row in numpy] == [float(x.sum()) for x in examples]


@pytest.mark.parametrize("form", [lambda y, n: (y, n), lambda y, n: {"a": y, "b": n}, Pair])
def test_each_stacked_result_is_a_list_of_examples(form: Any) -> None:
    examples = [np.arange(n, dtype=np.float32) for n in LENGTHS]
    first = BucketedExec(lambda x: form(x * 2, x.sum()), dynamic_axes="n").with_pow2()
    stacked = first.map(examples, out="stacked")
    assert isinstance(stacked, type(form(0, 0)))
    second = BucketedExec(lambda y, n: y.sum() + n, dynamic_axes=("n", None)).with_pow2()
    got = second.map(*jax.tree.leaves(stacked), in_axes=(0, 0))
    assert [float(x) for x in got] == [3 * x.sum() for x in examples]
    with pytest.raises(ArgumentError, match="of Ragged, each of which is such a list; pass each"):
        bucketjit.jit(lambda pair: pair).map(stacked)


def test_equal_lengths_are_ragged_too() -> None:
    double = BucketedExec(lambda x: x * 2, dynamic_axes="n").with_pow2()
    ragged = double.map([np.ones(3, np.float32)] * 2, out="stacked")
    assert ragged.lengths.tolist() == [3, 3] and ragged.mask.shape == (2, 3)


def test_wrong_ragged() -> None:
    with pytest.raises(ArgumentError, match="Ragged: values are a dict; expected one array"):
        Ragged({"a": np.ones((2, 3))}, np.array([1, 2]))


def test_calls_inside_of_transformations() -> None:
    executor = BucketedExec(lambda w, x: (w * x).sum(), dynamic_axes=(None, "n")).with_pow2()
    examples = [np.ones(n, np.float32) for n in (2, 3)]

    def loss(w: Any) -> Any:
        return sum(executor.map(w, examples))

    assert float(jax.grad(loss)(2.0)) == 5 and float(jax.jit(loss)(2.0)) == 10
    with jax.disable_jit():
        assert float(loss(2.0)) == 10
    with pytest.raises(SpecError, match="stacked"):
        jax.jit(lambda w: executor.map(w, examples, out="stacked"))(2.0)


# --- errors ---


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (np.ones((5, 2), np.float16), r"example 3, x: float16\[5, 2\], the others are float32\[n"),
        (np.array([["a"]]), r"example 3.*x: expected a numeric array"),
    ],
)
def test_an_example_unlike_the_others(wrong: Any, message: str) -> None:
    executor, examples = encoder(), rows()
    examples[3] = wrong
    with pytest.raises(ArgumentError, match=message):
        executor.map(PARAMS, examples)
    assert executor.stats().calls == 0 and executor.stats().compiles == 0
    check(executor.map(PARAMS, rows()), rows())


def test_the_path_of_a_leaf_is_named() -> None:
    executor = BucketedExec(lambda x: x["tokens"].sum(), dynamic_axes={"x": {"tokens": "s, _"}})
    examples = [{"tokens": np.ones((n, 8), F32)} for n in (3, 5)] * 9
    examples[17] = {"tokens": np.ones((5, 8), np.float16)}
    message = r"^example 17, x\['tokens'\]: float16\[5, 8\], the others are float32\[s, 8\]; con"
    with pytest.raises(ArgumentError, match=message):
        executor.with_pow2().map(examples)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("abc", "x: expected a list of examples, got str"),
        ({"a": 1}, "x: expected a list of examples, got dict; a dict of lists is no list of dicts"),
        ({1, 2}, "x: expected a list of examples, got set"),
        (3, "x: expected a list of examples, or an iterator, got int"),
        (Pair(np.ones(2), np.ones(3)), "x: expected a list of examples, got Pair"),
        (np.float32(1), "x: expected a list of examples"),
        (jnp.float32(1), "x: expected a list of examples, got an array of rank 0"),
    ],
)
def test_no_list(given: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        encoder().map(PARAMS, given)


@pytest.mark.parametrize("budget", [0, -1, "8", 2.5, True])
def test_token_budget(budget: Any) -> None:
    with pytest.raises(SpecError, match="token_budget must be an int of at least 1"):
        encoder().map(PARAMS, rows(), token_budget=budget)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduce": "max"}, "reduce must be 'sum', 'mean' or None"),
        ({"reduce": 1}, "reduce must be"),
        ({"out": "torch"}, "out must be 'jax'"),
        ({"out": "stacked", "reduce": "sum"}, "has no rows"),
        ({"in_axes": (0,)}, "in_axes has 1 entries for 2 positional arguments"),
        ({"in_axes": (None, 1)}, "in_axes of x: expected 0"),
        ({"in_axes": (None, True)}, "in_axes of x: expected 0"),
        ({"in_axes": (None, None)}, "no argument is a list"),
        ({"in_axes": {"y": 0}}, "in_axes names 'y'"),
        ({"in_axes": "x"}, "in_axes of params: expected 0"),
    ],
)
def test_options(options: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        encoder().map(PARAMS, rows(), **options)


def test_a_static_argument_is_shared() -> None:
    executor = BucketedExec(lambda x, k: x[:k], dynamic_axes=("n", None), static_argnums=1)
    with pytest.raises(SpecError, match="in_axes of k: a static argument is shared"):
        executor.with_pow2().map([np.ones(3)], [1], in_axes=(0, 0))
    assert len(executor.with_pow2().map([np.ones(3)], 2)[0]) == 2


def test_an_error_of_the_function_says_which_example() -> None:
    def fn(x: Any) -> Any:
        if x.shape[0] > 4:
            raise ValueError("too long")
        return x.sum()

    executor = BucketedExec(fn, dynamic_axes="n").with_pow2(min=1, max=8)
    with pytest.raises(ValueError, match="too long") as caught:
        executor.map([np.ones(2, F32), np.ones(6, F32)])
    assert any("example 1 of map" in note for note in caught.value.__notes__)
    assert [float(x) for x in executor.map([np.ones(2, F32)])] == [2]


def test_a_ragged_of_no_rows() -> None:
    empty = Ragged(np.zeros((0, 3), np.float32), np.zeros(0, np.int32))
    assert (len(empty), empty.to_list(), empty.mask.shape) == (0, [], (0, 3))
