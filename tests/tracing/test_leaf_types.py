"""Errors of newcomers: each names the argument, what came and what to write instead."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec
from bucketjit.errors import ArgumentError, SpecError

X = np.ones((4, 3), np.float32)


def f(ids: Any, mask: Any = None) -> Any:
    return jnp.sum(ids)


class Holding:
    """Stands for an array of another library."""

    shape = (4, 3)

    def __init__(self, *methods: str) -> None:
        for method in methods:
            setattr(self, method, lambda *_: X)


def stand_in(package: str, name: str, *methods: str) -> Any:
    kind = type(name, (Holding,), {m: (lambda *_: X) for m in methods if m.startswith("__")})
    kind.__module__ = package
    return kind(*(m for m in methods if not m.startswith("__")))


VALUES: dict[str, tuple[Any, str]] = {
    "a tensor of PyTorch": (
        stand_in("torch", "Tensor", "detach", "numpy", "__array__", "__dlpack__"),
        "got Tensor (torch); pass ids.detach().cpu().numpy(), or jnp.from_dlpack(ids)",
    ),
    "a frame of pandas": (
        stand_in("pandas.core.frame", "DataFrame", "columns", "to_numpy", "__array__"),
        "got DataFrame (pandas); pass ids.to_numpy(), or a dict of its columns as arrays",
    ),
    "a column of polars": (
        stand_in("polars.series", "Series", "to_numpy", "__array__"),
        "got Series (polars); pass ids.to_numpy()",
    ),
    "a tensor of TensorFlow": (
        stand_in("tensorflow.python", "EagerTensor", "numpy", "__array__"),
        "got EagerTensor (tensorflow); pass ids.numpy()",
    ),
    "a sparse matrix": (
        stand_in("scipy.sparse", "csr_matrix", "toarray"),
        "got csr_matrix (scipy); pass ids.toarray()",
    ),
    "an array of CuPy": (
        stand_in("cupy", "ndarray", "__dlpack__"),
        "got ndarray (cupy); pass jnp.from_dlpack(ids)",
    ),
    "what becomes an array": (
        stand_in("xarray.core", "DataArray", "__array__"),
        "got DataArray (xarray); pass np.asarray(ids)",
    ),
    "a range": (range(3), "got range; pass np.array(list(ids))"),
    "a set": ({1, 2}, "got set; pass np.array(sorted(ids))"),
    "text": ("abc", "got str; encode text as an array of numbers"),
    "a function": (f, "got function; pass other values as static arguments"),
    "a class": (stand_in("torch", "Tensor").__class__, "got type; pass other values as static"),
    "rows": (np.array([[1], [1, 2]], dtype=object), "do not form an array: pad them, or give the"),
    "texts": (np.array(["a"]), "dtype <U1; encode text as numbers"),
    "dates": (np.array(["2020-01-01"], "M8[D]"), "datetime64[D]; pass numbers, such as ids.astype"),
    "fields": (np.zeros(2, [("a", "f4")]), "such as a dict of ids[name]"),
    "a masked array": (np.ma.masked_array([1.0], [1]), "pass ids.filled(0), and ids.mask"),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("spec", [None, {"ids": "b, s"}], ids=["default", "declared"])
def test_what_is_no_array(name: str, spec: Any) -> None:
    value, cure = VALUES[name]
    exact = BucketedExec(f, dynamic_axes=spec)
    for executor in (exact, exact.with_pow2()):
        with pytest.raises(ArgumentError, match=re.escape(cure)) as raised:
            executor(value)
        assert str(raised.value).startswith("ids: expected a") and executor.cache_size() == 0
        assert float(executor(X)) == 12  # it still works


@pytest.mark.parametrize(
    ("spec", "value", "told"),
    [
        ("n", [1, 2, 3], "ids: expected an array, by dynamic_axes 'n', got a list of 3 numbers"),
        ("n", [4, 4], "pass np.asarray(ids)"),
        ({"ids": {0: "n"}}, (1.0, 2.0), "got a tuple of 2 numbers; pass np.asarray(ids)"),
        ({"ids": [0]}, [1.0], "by dynamic_axes [0], got a list of 1 numbers"),
        ("b, s", [[1, 2], [3, 4]], "got a list of 2 lists; pass np.asarray(ids)"),
        ("b, s", [[1, 2], [3]], "of different length, which do not form an array; pad them, or"),
        ({"ids": {"a": "n"}}, {"a": [1, 2]}, "ids['a']: expected an array"),
        ({"ids": {"a": "n"}}, {"a": [1, 2]}, "pass np.asarray(ids['a'])"),
    ],
)
def test_a_list_where_an_array_is_declared(spec: Any, value: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(told)):
        BucketedExec(f, dynamic_axes=spec).with_pow2()(value)


def test_lists_that_are_trees_stay_trees() -> None:
    executor = BucketedExec(lambda xs: sum(map(jnp.sum, xs)), dynamic_axes="b, s").with_pow2()
    assert float(executor([X, X])) == 24
    scalars = BucketedExec(lambda xs, x: x * xs[0] + xs[1], dynamic_axes=(None, "n")).with_pow2()
    assert scalars([2, 3], np.ones(3, np.float32)).tolist() == [5, 5, 5]
    sizes = BucketedExec(lambda ns, x: x * ns[0], dynamic_axes=(["n"], "n")).with_pow2()
    assert sizes([3], np.ones(3, np.float32)).tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("b s", "dynamic_axes of ids: 'b s' is not a size; separate axes by commas: 'b, s'"),
        ("b s _", "separate axes by commas: 'b, s, _'"),
        ("b; s", "separate axes by commas: 'b, s'"),
        ({"ids": ("b s", None)}, "separate axes by commas: 'b, s'"),
        ("b, :", "dynamic_axes of ids: ':' is not a size; write _ for an axis that is static, as"),
        ("b, :", "as in 'b, _'"),
        ("*, d", "'*' is not a size; write _ for an axis that is static, as in '_, d'"),
        ("b :", "separate axes by commas: 'b, _'"),
        ("b,, d", "as in 'b, _, d'"),
        ("::, d", "'::' is not a size; write _ for an axis that is static, as in '_, d'"),
        ("b, d:", "'d:' is not a size; write 'd'"),
        ("* d", "separate axes by commas: '_, d'"),
        ("*b, d", "'*b' is not a size; write 'b'"),
        ("[b, _]", "'[b' is not a size; write 'b'"),
        ({"ids": ("b", "?")}, "'?' is not a size; write _ for an axis that is static, as in 'b,"),
        ("None, s", "'None' is not a size; write _ for an axis that is static, as in '_, s'"),
        ("-1, s", "'-1' is not a size; write _ for an axis that is static, as in '_, s'"),
        ("-2, s", "'-2' is not a size; expected a name such as 'b', a number, or _"),
        ({"b": 0}, "axes of one argument go by their number: {0: 'b'}"),
        (("b", "s", "t"), "the axes of one argument are one text, such as 'b, s'"),
    ],
)
def test_what_is_no_specification(spec: Any, told: str) -> None:
    with pytest.raises(SpecError, match=re.escape(told)):
        BucketedExec(f, dynamic_axes=spec).with_pow2()(X)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("b", "'b' describes 1 axis, but the argument has shape (4, 3) of rank 2; an axis is a "),
        ("b", "as in 'b, _'"),
        ("b, s, t", "as in 'b, s'"),
        ({"ids": {5: "b"}}, "dynamic_axes {5: 'b'} names an axis that shape (4, 3) does not have"),
    ],
)
def test_what_does_not_fit_the_rank(spec: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(told)):
        BucketedExec(f, dynamic_axes=spec).with_pow2()(X)


def test_spaces_within_an_expression_are_none_between_axes() -> None:
    executor = BucketedExec(f, dynamic_axes="2 * b, max(b, 1) + 1").with_pow2()
    assert float(executor(X)) == 12


@pytest.mark.parametrize(
    "made",
    [
        lambda e: e.with_pow2("seq"),
        lambda e: e.with_pow2().with_overflow("extend", "seq"),
        lambda e: e.with_strategy(bucketjit.strategies.Linear(4), "seq"),
    ],
)
def test_what_is_meant_for_no_variable(made: Any) -> None:
    executor = BucketedExec(f, dynamic_axes=("b, 2*s + max(b, 1)",))
    with pytest.raises(SpecError, match=r"for dimension 'seq', .*; the variables are b, s$"):
        made(executor)(np.ones((2, 8), np.float32))
    with pytest.raises(SpecError, match="batch, axis1, axis2 and so on; name them with"):
        made(BucketedExec(f))(X)


def test_a_scalar_whose_value_is_needed_is_named() -> None:
    """The error is that of ``jax.jit``; the note says how to pass the scalar."""
    x = np.ones(3, np.float32)
    chosen = bucketjit.jit(lambda x, training=True: x.sum() if training else x)
    for args, kwargs in (((x, True), {}), ((x,), {"training": True})):
        with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
            chosen(*args, **kwargs)
        (note,) = (n for n in raised.value.__notes__ if n.startswith("bucketjit"))
        assert "training is a Python bool" in note and "static_argnames='training'" in note
    nested = bucketjit.jit(lambda x, flags: x.sum() if flags["training"] else x)
    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        nested(x, {"training": True})
    assert any("flags['training'] is a Python bool" in n for n in raised.value.__notes__)
    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        bucketjit.jit(lambda x, k: x if x.sum() > 0 else k)(x, 3)
    assert not any("bucketjit" in n for n in getattr(raised.value, "__notes__", ()))
