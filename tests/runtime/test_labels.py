"""Arguments that may be labels or shared, buffers that are filled again, methods, and lengths."""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec, Ragged
from bucketjit.errors import (
    ArgumentError,
    BucketOverflowError,
    FallbackWarning,
    RecompileWarning,
    SpecError,
)

F32 = np.float32
WEIGHTS = np.arange(1, 5, dtype=F32)
LENGTHS = (2, 5, 3)


def loss(w: Any, x: Any, y: Any) -> Any:
    return ((x @ w).mean() - y) ** 2


def examples(lengths: Sequence[int] = LENGTHS) -> list[np.ndarray]:
    return [np.full((n, 4), n, F32) for n in lengths]


def losses(**options: Any) -> BucketedExec:
    return BucketedExec(loss, **options).with_pow2()


DECLARED = {"dynamic_axes": (None, "n, _", None)}
LABELS: dict[str, Callable[[], Any]] = {
    "NumPy": lambda: np.arange(3, dtype=F32),
    "jax": lambda: jnp.arange(3.0),
    "one-hot": lambda: np.eye(3, dtype=F32),
    "numbers": lambda: [0.0, 1.0, 2.0],
    "scalars of NumPy": lambda: tuple(np.arange(3, dtype=F32)),
}


@pytest.mark.parametrize("form", LABELS)
@pytest.mark.parametrize("reduce", [None, "mean"])
@pytest.mark.parametrize("given", ["list", "iterator", "keywords"])
def test_what_may_be_labels_is_asked_for(form: str, reduce: str | None, given: str) -> None:
    executor, ys = losses(**DECLARED), LABELS[form]()
    args: tuple[Any, ...] = (WEIGHTS, examples(), ys)
    named: dict[str, Any] = {}
    both = "in_axes=(None, 0, 0)", "in_axes=(None, 0, None)"
    if given == "iterator":
        ys = np.asarray(ys)  # a list of numbers is a tree, which the function would refuse first
        args = (WEIGHTS, iter(examples()), ys)
    if given == "keywords":
        args, named = (WEIGHTS,), {"x": examples(), "y": ys}
        both = "in_axes={'x': 0, 'y': 0}", "in_axes={'x': 0, 'y': None}"
    with pytest.raises(ArgumentError, match="y has 3 rows and there are 3 examples") as error:
        executor.map(*args, reduce=reduce, **named)
    assert all(way in str(error.value) for way in both)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", LABELS)
@pytest.mark.parametrize("options", [DECLARED, {}])
def test_labels_and_shared_arrays_are_as_in_a_loop(form: str, options: Any) -> None:
    ys = LABELS[form]()
    for in_axes in ((None, 0, 0), {"x": 0, "y": 0}):
        got = losses(**options).map(WEIGHTS, examples(), ys, in_axes=in_axes)
        for result, x, y in zip(got, examples(), ys, strict=True):
            np.testing.assert_allclose(result, loss(WEIGHTS, x, y), rtol=1e-5)
    shared = jnp.asarray(ys)
    for in_axes in ((None, 0, None), {"x": 0}):
        got = losses(**options).map(WEIGHTS, examples(), shared, in_axes=in_axes)
        for result, x in zip(got, examples(), strict=True):
            np.testing.assert_allclose(result, loss(WEIGHTS, x, shared), rtol=1e-5)


def test_other_lengths_and_trees_are_shared() -> None:
    executor = BucketedExec(lambda p, x: (x @ p["w"]).sum(), dynamic_axes=(None, "n, _"))
    got = executor.with_pow2().map({"w": np.ones((4, 3), F32)}, examples((4, 2, 1, 3)))
    assert [float(x) for x in got] == [192.0, 48.0, 12.0, 108.0]
    assert len(losses(**DECLARED).map(WEIGHTS, examples(), np.zeros(2, F32))) == 3


FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[Any, ...]]] = {
    "masked": (jnp.cumsum, {"dynamic_axes": "n"}, (2,)),
    "a number": (jnp.sum, {"dynamic_axes": "n"}, (2, 0)),
    "exact": (lambda x: x * 2, {}, (2,)),
    "selection": (lambda x: x[x > 0], {"dynamic_axes": "n"}, (2,)),
    "branch": (lambda x: x if x.shape[0] > 2 else x[:1], {"dynamic_axes": "n"}, (2,)),
    "two axes": (lambda x: jnp.outer(x, x), {"dynamic_axes": "n"}, (2, 2)),
}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("lengths", [(1, 3), (2, 2), (0, 0), (0, 2)])
def test_the_shape_of_lengths_does_not_depend_on_the_data(name: str, lengths: Any) -> None:
    fn, options, shape = FUNCTIONS[name]
    executor = BucketedExec(fn, **options)
    executor = executor if name == "exact" else executor.with_pow2()
    with warnings.catch_warnings(action="ignore"):
        got = executor.map([np.ones(n, F32) for n in lengths], out="stacked")
    assert np.shape(got.lengths) == shape
    for row, n in zip(got.rows(), lengths, strict=True):
        np.testing.assert_array_equal(row, fn(jnp.ones(n)))


def test_a_loaded_function_has_the_same_lengths(tmp_path: Any) -> None:
    path = str(tmp_path / "f.bkt")
    executor = BucketedExec(jnp.cumsum, dynamic_axes="n").with_pow2()
    executor.save(path, np.ones(4, F32), sizes=[{"n": 4}])
    with pytest.warns(FallbackWarning, match="one example at a time"):
        got = bucketjit.load(path).map([np.ones(2, F32)] * 2, out="stacked")
    assert np.shape(got.lengths) == (2,)


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ([-1, 2], "row 0 has length -1"),
        ([1, 4], "row 1 has length 4 along axis 1; expected 0 to 3"),
        ([1.5, 2.0], "whole numbers, got float64"),
        (3, "expected a length for each row"),
        ([[1, 1], [1, 1]], "expected a length for each ragged axis"),
    ],
)
def test_lengths_are_checked(lengths: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        Ragged(np.ones((2, 3)), np.array(lengths))


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap"])
def test_an_array_of_examples_inside_transformations(transform: str) -> None:
    executor = BucketedExec(jnp.cumsum, dynamic_axes="n").with_pow2()

    def total(xs: Any) -> Any:
        return sum((row * jnp.arange(3.0)).sum() for row in executor.map(xs))

    def by_hand(xs: Any) -> Any:
        return sum((jnp.cumsum(xs[i]) * jnp.arange(3.0)).sum() for i in range(xs.shape[-2]))

    of: Any = {"jit": jax.jit, "grad": jax.grad, "vmap": jax.vmap}[transform]
    xs = np.arange(12, dtype=F32).reshape((2, 2, 3) if transform == "vmap" else (4, 3))
    with warnings.catch_warnings(action="ignore"):
        np.testing.assert_allclose(of(total)(xs), of(by_hand)(xs), rtol=1e-5)


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    @bucketjit.jit(static_argnums=0, dynamic_axes=(None, "n", None))
    def total(self, x: Any, y: Any) -> Any:
        return x.sum() * self.factor + y


def test_methods_know_their_object(tmp_path: Any) -> None:
    one, x = Scaled(3.0), np.ones(5, F32)
    assert one.total == one.total and one.total != Scaled(3.0).total
    assert hash(one.total) == hash(one.total) and "Scaled" in repr(one.total)
    assert float(one.total(x, 1.0)) == float(Scaled.total(one, x, 1.0)) == 16
    got = one.total.map([x, x[:2]], [1.0, 2.0], in_axes=(0, 0))
    assert [float(r) for r in got] == [16, 8]
    assert [float(r) for r in one.total.map([x, x[:2]], 1.0)] == [16, 7]
    assert one.total.explain(x, 1.0).kind == "masked"
    assert "2 examples" in str(one.total.explain_map([x, x[:2]], 1.0))
    assert float(one.total.lower(x, 1.0).compile()(x[:3], 1.0)) == 10
    assert one.total.warmup(x, 1.0, progress=False).failed == ()
    assert float(one.total.with_linear(4).with_maxsize(3)(x, 1.0)) == 16
    path = str(tmp_path / "method.bkt")
    one.total.save(path, x, F32(1))
    assert float(bucketjit.load(path)(x[:2], F32(1))) == 7


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (np.ones(2), r"example 1, x: float64\[2\].*convert it by .astype\('float32'\)"),
        (np.ones((2, 2), F32), r"example 1, x: float32\[2, 2\].*reshape it"),
        ([1.0, 2.0], r"example 1, x: a list of 2 numbers, but .* an array; .*\[np.asarray\(one\)"),
        (None, "example 1, x: None, but example 0 has an array; .*the same structure"),
        ({"x": np.ones(2)}, r"example 1, x: \{'x': array\}, but example 0 has an array"),
        ("two", "example 1: x: expected an array.*encode text as an array"),
    ],
)
def test_an_odd_example_is_named_with_its_cure(odd: Any, says: str) -> None:
    with jax.enable_x64(True), pytest.raises(ArgumentError, match=says):
        BucketedExec(lambda x: x.sum(), dynamic_axes="n").with_pow2().map([np.ones(3, F32), odd])


@pytest.mark.parametrize("axes", [None, "n"])
@pytest.mark.parametrize(
    "rows",
    [
        *([[1, 2, 3], [4, 5]], [(1.0, 2.0), (3.0,)], [1, 2], [3.5, 4.5], [True, False]),
        *(np.ones(3, F32), [np.float32(1), np.float32(2)], jnp.ones(2)),
    ],
)
def test_lists_of_numbers_name_the_example_and_what_to_pass(axes: Any, rows: list[Any]) -> None:
    total = bucketjit.jit(lambda x: x.sum(), dynamic_axes=axes)
    if axes is None and not isinstance(rows, list):
        with pytest.raises(SpecError, match="say by in_axes which are"):
            total.map(rows)
        return
    if axes is None and not isinstance(rows[0], list | tuple):
        with pytest.warns(FallbackWarning, match="no axis of the lists of examples is open"):
            assert total.map(rows) == rows  # to JAX a number is an array of rank 0
        return
    with pytest.raises((TypeError, AttributeError)) as caught:
        total.map(rows)
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert re.search(r"\bexample [01]\b", told)
    (form,) = re.findall(r"pass (\[?np.asarray.*)", told)
    meant = rows if isinstance(rows[0], list | tuple) else [rows]
    assert total.map(eval(form, {"np": np, "x": rows})) == list(map(sum, meant))


def test_only_the_argument_that_an_error_is_about_has_a_cure() -> None:
    """Labels are numbers, too."""

    fn = bucketjit.jit(lambda x, y: x.sum() + y, dynamic_axes=("n", None), buckets=[4])
    with pytest.raises(BucketOverflowError) as of_size:
        fn.map([np.ones(3, F32), np.ones(9, F32)], [1, 2], in_axes=(0, 0))
    with pytest.raises(AttributeError) as of_user:
        bucketjit.jit(lambda x, y: x.nope + y).map([np.ones(3, F32)] * 2, [1, 2], in_axes=0)
    assert "np.asarray" not in str([of_size.value, of_user.value.__notes__])
    with pytest.raises(ArgumentError, match=r"example 0: x: .* for one in x\]"):
        fn.map([[1.0, 2.0], [1.0]], [1, 2], in_axes=(0, 0))
    pair = bucketjit.jit(lambda p: p[0].sum() + p[1].sum(), dynamic_axes=(("n", "n"),))
    with pytest.raises(ArgumentError, match=r"pass np.asarray\(p\[0\]\)$"):
        pair.map([([1.0, 2.0], [3.0, 4.0]), ([1.0], [3.0])])


def test_weights_of_that_length_are_shared_where_an_entry_does_not_fit() -> None:
    mixed = BucketedExec(lambda w, x: (x @ w).sum(), dynamic_axes=(None, "n, _")).with_pow2()
    for w in (np.ones(4, F32), np.ones((4, 3), F32), jnp.ones((4, 2))):
        got = mixed.map(w, examples((4, 2, 1, 3)))
        assert [float(x) for x in got] == [16.0 * c for c in (4, 1, 0.25, 2.25)] or w.ndim == 2
        assert len(mixed.map(w, iter(examples((4, 2, 1, 3))))) == 4
    keyed = BucketedExec(lambda key, x: x + jax.random.normal(key), dynamic_axes=(None, "n"))
    key = jax.random.PRNGKey(0)  # two numbers, and two examples
    assert len(keyed.with_pow2().map(key, [np.ones(3, F32), np.ones(2, F32)])) == 2


@pytest.mark.parametrize("lazy", [False, True])
def test_a_buffer_may_be_filled_again(lazy: bool) -> None:
    buffer = {"x": np.zeros((8, 4), F32)}

    class Lazy(Sequence[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: Any) -> Any:
            if i >= 3:
                raise IndexError
            buffer["x"][:] = LENGTHS[i]
            return {"x": buffer["x"][: LENGTHS[i]]}

    def filled() -> Iterator[Any]:
        yield from Lazy()

    total = BucketedExec(lambda tree: tree["x"].sum(), dynamic_axes="n, _").with_pow2()
    for reduce, wanted in ((None, [16.0, 100.0, 36.0]), ("sum", 152.0)):
        got = total.map(Lazy() if lazy else filled(), reduce=reduce)
        assert jax.tree.map(float, got) == wanted


def test_map_warns_of_compiles_as_calls_do() -> None:
    xs = [np.ones(n, F32) for n in (1, 2, 3, 4)]
    with pytest.warns(RecompileWarning, match="compiles for each size: axis 0 of x"):
        BucketedExec(lambda x: x.sum(), dynamic_axes="n").map(xs)
    with warnings.catch_warnings(action="error"):  # other numbers of rows are no other sizes
        executor = BucketedExec(lambda x: x.sum(), dynamic_axes="n").with_pow2()
        for copies in (1, 2, 3, 5, 9, 17, 33):
            executor.map([np.ones(n, F32) for n in range(1, 65) for _ in range(copies)])
    with pytest.warns(RecompileWarning, match="has compiled .* axis 0 of w"):
        shared = losses(dynamic_axes=(None, "n, _", None), warn_after=3)
        for d in range(2, 8):
            shared.map(np.ones(d, F32), [np.ones((2, d), F32)], F32(0))
