"""Functions that look at sizes: every call takes the branch that exact takes."""

import collections
import decimal
import fractions
import math
import numbers
import operator
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit import BucketedExec
from bucketjit._ir.guards import Guard, parse_constraint
from bucketjit._ir.program import TraceRefused
from bucketjit.errors import FallbackWarning, ShapeCheckError
from tests.comparison import assert_like_jit, assert_same, ramp, unrolled
from tests.harness import traced

SIZES = (3, 1, 4, 5, 8, 3)


def _branch(test: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that tells by its result which branch it took."""

    return lambda x: (x * 2, "yes" and jnp.ones(2)) if test(x.shape[0]) else (x + 100, jnp.zeros(2))


BRANCHES: dict[str, Callable[[Any], Any]] = {
    ">": lambda n: n > 4,
    "chain": lambda n: 2 < n <= 6,
    "==": lambda n: n == 3,
    "!=": lambda n: n != 3,
    "== 1": lambda n: n == 1,
    "== 0": lambda n: n == 0,
    "== of an expression and 0": lambda n: n - 1 == 0,
    "== negative": lambda n: 2 - n == -1,
    "== a float": lambda n: n == 3.0,
    "== a NumPy integer": lambda n: n == np.int64(3),
    "NumPy integer ==": lambda n: np.int64(3) == n,
    "== text": lambda n: n == "3",
    "== None": lambda n: n == None,  # noqa: E711
    "is None": lambda n: n is None,
    "not": lambda n: not n > 4,
    "and": lambda n: n > 2 and n < 6,
    "in a tuple": lambda n: n in (3, 5),
    "not in": lambda n: n not in (3, 5),
    "in a set": lambda n: n in {3, 5},
    "in a range": lambda n: n in range(2, 6),
    "dict.get": lambda n: {3: True, 8: True}.get(n, False),
    "dict by subscript": lambda n: collections.defaultdict(bool, {3: True})[n],
    "list.index": lambda n: [3, 5, n].index(n) == 0,
    "even": lambda n: n % 2 == 0,
    "truth of a remainder": lambda n: n % 2,
    "truth of the size": lambda n: n,
    "bool()": lambda n: bool(n - 3),
    "quotient": lambda n: n // 2 == 1,
    "divmod": lambda n: divmod(n, 3)[1] == 0,
    "product": lambda n: n * n > 20,
    "min": lambda n: min(n, 4) == 4,
    "max": lambda n: max(n, 4) > 4,
    "sorted": lambda n: sorted([4, n])[0] == 4,
    "shape ==": lambda n: (n, 2) == (3, 2),
    "== complex": lambda n: n == 3 + 0j,
    "== a fraction": lambda n: n == fractions.Fraction(4),
    "== a decimal": lambda n: n == decimal.Decimal(4),
    "== NaN": lambda n: n == float("nan"),
    "in an array": lambda n: n in np.array([3, 5]),
    "array.any": lambda n: (np.array([[3], [8]]) == n).any(),
    "isinstance": lambda n: isinstance(n, int),
    "isinstance of several": lambda n: isinstance(n, str | int | np.integer),
    "not isinstance": lambda n: isinstance(n, np.integer | float),
    "isinstance of an ABC": lambda n: isinstance(n, numbers.Integral),
    "__class__": lambda n: n.__class__ is int,
    "match": lambda n: _is_matched(n),
    "a comparison that is caught": lambda n: _caught(lambda: n > 3),
}

# What no guard can decide is traced at concrete sizes, also where user code catches what a size
# raises; programs of different sizes are then kept apart.
UNDECIDABLE: dict[str, Callable[[Any], Any]] = {
    "int": lambda n: _caught(lambda: int(n) > 3),
    "range": lambda n: _caught(lambda: bool(list(range(n)))),
    "operator.index": lambda n: _caught(lambda: operator.index(n) > 3),
    "NumPy": lambda n: _caught(lambda: np.zeros(n).size > 3),
    "an attribute of ints": lambda n: hasattr(n, "bit_length"),
}


def _is_matched(n: Any) -> bool:
    match n:
        case int():
            return True
    return False


def _caught(decide: Callable[[], bool]) -> bool:
    try:
        return decide()
    except Exception:
        return False


def assert_takes(executor: Any, test: Callable[..., Any], *sizes: int) -> None:
    """A call takes the branch that the numbers decide."""
    arrays = [*map(ramp, sizes)]
    want = arrays[0] * 2 if test(*sizes) else arrays[0] + 100
    np.testing.assert_array_equal(executor(*arrays)[0], want)


@pytest.mark.sampled(6, "== a fraction", "== NaN")
@pytest.mark.parametrize("name", BRANCHES)
def test_branches(name: str) -> None:
    executor = BucketedExec(_branch(BRANCHES[name])).with_pow2()
    for n in SIZES:
        assert_takes(executor, BRANCHES[name], n)
    assert executor.stats().fallback_calls == 0


@pytest.mark.parametrize("name", UNDECIDABLE)
def test_what_sizes_raise_is_not_caught_in_silence(name: str) -> None:
    executor = BucketedExec(_branch(UNDECIDABLE[name])).with_pow2()
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        for n in SIZES:
            assert_takes(executor, UNDECIDABLE[name], n)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first", [1, 8])
@pytest.mark.parametrize("name", ["==", "in a set", "dict.get", "truth of a remainder", "chain"])
def test_branches_whatever_comes_first(name: str, first: int) -> None:
    executor = BucketedExec(_branch(BRANCHES[name])).with_pow2()
    for n in (first, 2, 3, 5, 8, 4, 7, 1):
        assert_takes(executor, BRANCHES[name], n)


TWO_SIZES: dict[str, Callable[[Any, Any], Any]] = {
    "==": lambda a, b: a == b,
    ">": lambda a, b: a > b,
    "shapes": lambda a, b: (a, 1) == (b, 1),
    "multiple": lambda a, b: a % b == 0,
    "set": lambda a, b: len({a, b, 3}) == 2,
    "max": lambda a, b: max(a, b) == b,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TWO_SIZES)
def test_branches_on_two_sizes(name: str) -> None:
    test = TWO_SIZES[name]

    def fn(x: Any, y: Any) -> Any:
        return (x * 2, y) if test(x.shape[0], y.shape[0]) else (x + 100, y)

    executor = BucketedExec(fn, dynamic_axes=("a", "b")).with_pow2()
    for a, b in ((3, 3), (3, 5), (4, 2), (4, 4), (6, 3), (1, 1), (2, 3), (5, 5), (3, 3)):
        assert_takes(executor, test, a, b)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "slice by min": lambda x: x[: min(x.shape[0], 3)],
    "static slice": lambda x: x[:3] if x.shape[0] >= 3 else x,
    "loop until": lambda x: _halve(x),
    "pad to a multiple": lambda x: jnp.pad(x, (0, -x.shape[0] % 4)),
    "pad if odd": lambda x: jnp.concatenate([x, x[:1]]) if x.shape[0] % 2 else x,
    "repeat to at least 4": lambda x: jnp.concatenate([x, jnp.zeros(max(4 - x.shape[0], 0))]),
    "array_equal": lambda x: jnp.array_equal(x, x[: x.shape[0] - 1]),
    "math": lambda x: x * math.prod((2, x.shape[0])),
    "== an index": lambda x: lax.fori_loop(
        0, x.shape[0], lambda i, a: a + jnp.where(x.shape[0] - 1 == i, 100.0, x[i]), 0.0
    ),
    "index ==": lambda x: jnp.where(jnp.arange(x.shape[0]) == x.shape[0] - 1, x, -x),
    "!= an array": lambda x: jnp.where(x.shape[0] != jnp.asarray(4), x, -x),
    "== a NumPy array": lambda x: jnp.asarray(x.shape[0] == np.array([[3, 4, 5]])),
    "NumPy array !=": lambda x: jnp.asarray(np.array([3.0, 4.5, 5.0]) != x.shape[0]),
}


def _halve(x: Any) -> Any:
    while x.shape[0] > 2:
        x = x[: x.shape[0] // 2] * 2
    return x


@pytest.mark.sampled(3, "NumPy array !=", "!= an array")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_look_at_sizes(name: str) -> None:
    fn = FUNCTIONS[name]
    executor = BucketedExec(fn).with_pow2()
    for n in SIZES:
        assert_like_jit(executor, fn, ramp(n))
    assert executor.stats().fallback_calls == 0


def test_guards_cost_executables_not_sizes() -> None:
    executor = BucketedExec(_branch(lambda n: n > 4)).with_pow2()
    for n in range(1, 33):
        executor(ramp(n))
    assert [b.sizes["batch"] for b in executor.stats().buckets] == [1, 2, 4, 8, 16, 32]


def test_an_unequal_size_keeps_its_bucket() -> None:
    executor = BucketedExec(_branch(lambda n: n == 4)).with_pow2()
    for n in (3, 2, 4, 3):
        assert_like_jit(executor, executor.__wrapped__, ramp(n))
    sizes = [b.sizes["batch"] for b in executor.stats().buckets]
    assert sizes in ([2, 4, 4], [4, 2, 4])


@pytest.mark.parametrize(
    ("fn", "holds"),
    [
        (lambda x: x.reshape(-1, 4), lambda n: n % 4 == 0),
        (lambda x: x.reshape(2, -1).sum(0), lambda n: n % 2 == 0),
        (lambda x: x * 2 if x.shape[0] % 3 == 0 else x, lambda n: n % 3 == 0),
    ],
    ids=["minus one", "leading", "branch"],
)
@pytest.mark.parametrize("strategy", ["pow2", "linear", "buckets"])
def test_buckets_satisfy_guards(fn: Any, holds: Any, strategy: str) -> None:
    executor = BucketedExec(fn)
    executor = {
        "pow2": lambda: executor.with_pow2(),
        "linear": lambda: executor.with_linear(5),
        "buckets": lambda: executor.with_buckets([9, 13, 21]),
    }[strategy]()
    for n in (n for n in range(1, 13) if holds(n)):
        assert_like_jit(executor, fn, ramp(n))
    assert all(b.exact or holds(b.sizes["batch"]) for b in executor.stats().buckets)
    assert executor.cache_size() <= 4


RESHAPES: dict[str, Callable[[Any], Any]] = {
    "minus one": lambda x: x.reshape(-1, 4),
    "floordiv": lambda x: x.reshape(x.shape[0] // 2, 2),
    "static": lambda x: x.reshape(8),
    "static next to a size": lambda x: (x.reshape(4, 2), x.shape[0]),
    "in a jit": lambda x: jax.jit(lambda y: y.reshape(y.shape[0] // 2, 2))(x),
    "in a scan": lambda x: jax.lax.scan(
        lambda c, _: (c, x.reshape(x.shape[0] // 2, 2).sum()), 0.0, None, length=2
    )[1],
    "split": lambda x: jnp.split(x, 2),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", RESHAPES)
@pytest.mark.filterwarnings("ignore::bucketjit.errors.FallbackWarning")
def test_a_reshape_raises_where_exact_raises(name: str) -> None:
    fn = RESHAPES[name]
    executor = BucketedExec(fn).with_pow2()
    for n in (8, 4, 7, 6, 16, 5, 8):
        try:
            want = jax.jit(fn)(ramp(n))
        except (TypeError, ValueError) as error:
            before = executor.cache_size()
            with pytest.raises((type(error), ShapeCheckError)):
                executor(ramp(n))
            assert executor.cache_size() == before
        else:
            assert_same(executor(ramp(n)), want)


def test_a_reshape_error_says_what_exact_says() -> None:
    executor = BucketedExec(lambda x: x.reshape(x.shape[0] // 2, 2)).with_pow2()
    executor(ramp(4))
    with pytest.raises(ShapeCheckError) as raised:
        executor(ramp(5))
    for part in ("(5,)", "(2, 2)", "size 5", "size 4", "test_guards.py:", "<lambda>"):
        assert part in str(raised.value)
    assert isinstance(raised.value, TypeError)


def test_a_failing_assertion_about_sizes_is_raised() -> None:
    def fn(x: Any) -> Any:
        assert x.shape[0] % 2 == 0, "even sizes only"
        return x * 2

    executor = BucketedExec(fn).with_pow2()
    for n in (4, 3, 6, 5, 4):
        if n % 2:
            with pytest.raises(AssertionError, match="even sizes only"):
                executor(ramp(n))
        else:
            assert_like_jit(executor, fn, ramp(n))


def test_a_size_that_counts_equations_falls_back() -> None:
    for fn in (unrolled, lambda x: [x] * x.shape[0], lambda x: list(x)):
        executor = BucketedExec(fn).with_pow2()
        with pytest.warns(FallbackWarning):
            for n in (3, 4):
                assert_like_jit(executor, fn, ramp(n))
        assert executor.stats().fallback_calls == 2


def test_the_comparison_of_sizes_is_restored_after_tracing() -> None:
    (before,) = jax.export.symbolic_shape("b")
    methods = [getattr(type(before), m, None) for m in ("__eq__", "__ne__", "__hash__")]
    assert "__bool__" not in vars(type(before))
    executor = BucketedExec(_branch(lambda n: n == 3)).with_pow2()
    executor(ramp(3))
    with pytest.raises(ZeroDivisionError):
        BucketedExec(lambda x: 1 // 0).with_pow2()(ramp(3))
    assert [getattr(type(before), m, None) for m in ("__eq__", "__ne__", "__hash__")] == methods
    assert "__bool__" not in vars(type(before))


# --- the tracer --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("test", "n", "admitted"),
    [
        (lambda n: n > 4, 7, range(5, 10)),
        (lambda n: n > 4, 4, range(1, 5)),
        (lambda n: n >= 4, 3, range(1, 4)),
        (lambda n: n < 4, 3, range(1, 4)),
        (lambda n: n <= 4, 5, range(5, 10)),
        (lambda n: n == 3, 3, [3]),
        (lambda n: n == 3, 4, [1, 2, *range(4, 10)]),
        (lambda n: n - 3, 3, [3]),
        (lambda n: n - 3, 4, [1, 2, *range(4, 10)]),
        (lambda n: n % 2, 3, [1, 3, 5, 7, 9]),
        (lambda n: n % 2, 4, [2, 4, 6, 8]),
        (lambda n: n in {7}, 5, [5]),
        (lambda n: n * n + n == 12, 3, [3]),
        (lambda n: n * n + n == 12, 4, [1, 2, *range(4, 10)]),
    ],
)
def test_guards(test: Any, n: int, admitted: Any) -> None:
    program = traced(_branch(test), "b", b=n)
    assert [m for m in range(1, 10) if program.admits({"b": m})] == list(admitted)


def test_guards_admit_and_refuse() -> None:
    program = traced(_branch(lambda n: 2 < n <= 6 and n % 2 == 0), "b", b=4)
    assert [n for n in range(1, 10) if program.admits({"b": n})] == [4, 6]
    assert program.lower["b"] == 3


def test_a_program_without_comparisons_admits_everything() -> None:
    program = traced(lambda x: x * 2, "b", b=4)
    assert program.guards == ()
    assert program.admits({"b": 1}) and program.fits({"b": 1 << 20})


def test_the_output_shapes_are_expressions() -> None:
    program = traced(lambda x: (jnp.concatenate([x, x]), x[1:], x.sum()), "b", "b >= 2", b=4)
    assert [str(s) for s in program.out_shapes] == ["(2*b,)", "(b - 1,)", "()"]


def test_a_refusal_names_its_cause() -> None:
    with pytest.raises(TraceRefused, match="size 'b' is used as a Python int") as raised:
        traced(lambda x: x * int(x.shape[0]), "b", b=4)
    assert isinstance(raised.value.cause, jax.errors.InconclusiveDimensionOperation)


@pytest.mark.parametrize(
    ("text", "sizes", "holds"),
    [
        ("b >= 4", {"b": 4}, True),
        ("b <= 3", {"b": 4}, False),
        ("mod(s, 2) == 0", {"s": 6}, True),
        ("b*s >= t + 1", {"b": 2, "s": 3, "t": 6}, False),
        (" floordiv(b, 2)==max(b, 3) - 1 ", {"b": 4}, False),
    ],
)
def test_parse_constraint(text: str, sizes: dict[str, int], holds: bool) -> None:
    guard = parse_constraint(text)
    assert guard.variables == frozenset(sizes)
    assert guard.holds(sizes) is holds


@pytest.mark.parametrize("text", ["b", "b > 3", "b != 3", "", "b = 3", ">= 3", "b >="])
def test_constraints_of_another_form(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        parse_constraint(text)


def test_guard_text_is_a_constraint_again() -> None:
    guard = Guard("2*b", ">=", "s + 1")
    assert parse_constraint(str(guard)) == guard


def test_a_refused_size_leaves_the_others_alone() -> None:
    """At size 1 there is nothing to compare with; every other size has a program."""

    def fn(x: Any) -> Any:
        return (x[1:] * x[:-1]).reshape(x.shape[0] - 1, 1) / (x.shape[0] - 1)

    executor = BucketedExec(fn, dynamic_axes="n").with_pow2()
    for n in (8, 7, 6, 5):
        assert_like_jit(executor, fn, ramp(n))
    assert executor.stats().compiles == 1


def test_refusals_are_remembered_by_size() -> None:
    traced = []

    def fn(x: Any) -> Any:
        traced.append(x.shape)
        return unrolled(x)

    executor = BucketedExec(fn).with_pow2()
    with pytest.warns(FallbackWarning):
        for n in (3, 5, 7, 9):
            executor(ramp(n))
        count = len(traced)
        for n in (3, 5, 7, 9):
            executor(ramp(n))
    assert len(traced) == count
    executor(ramp(4))  # refused at four sizes around it: not tried, traced for its exact run only
    assert len(traced) == count + 1


def half_rolled(x: Any) -> Any:
    """At 2 and 3 rows half of them is one row, which JAX broadcasts by other equations."""
    return jnp.roll(x, len(x) // 2, 0)


def half_rolled_in_a_dict(batch: dict[str, Any]) -> Any:
    return half_rolled(batch["x"])


# How the sizes of an argument are opened: by name, by axis, or as calls show them.
OPENED: dict[str, tuple[Callable[..., Any], Any]] = {
    "default": (half_rolled, None),
    "listed": (half_rolled, ([0],)),
    "declared": (half_rolled, "n"),
    "default_in_a_dict": (half_rolled_in_a_dict, None),
    "declared_in_a_dict": (half_rolled_in_a_dict, ({"x": "n"},)),
}


def _resolved(executor: BucketedExec, argument: Any) -> bool:
    """What a call learns, without its compiles. Returns whether there is a program for it."""
    engine = executor._engine
    call = engine.signer.sign((argument,), {})
    call = engine.resolve(call)
    call.signature.remember_refusal(call, call.shapes)
    return call.program is not None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sizes", [(2, 3, 7, 8, 9, 12, 1000), (12, 2, 8, 1000, 3, 9, 7)])
@pytest.mark.parametrize("form", ["default", "default_in_a_dict", "declared_in_a_dict"])
def test_a_small_size_does_not_keep_larger_ones_from_their_buckets(form: str, sizes: Any) -> None:
    fn, spec = OPENED[form]
    executor = BucketedExec(fn, dynamic_axes=spec).with_pow2()
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        for n in sizes:
            assert_like_jit(executor, fn, {"x": ramp(n)} if "dict" in form else ramp(n))
    buckets = executor.stats().buckets
    padded = {b.sizes["batch" if spec is None else "n"] for b in buckets if not b.exact}
    assert padded == {8, 16, 1024}
    assert {n for b in buckets if b.exact for n in b.sizes.values()} == {2, 3}


@pytest.mark.sampled(2, "1-declared")
@pytest.mark.parametrize("form", ["default", "listed", "declared", "default_in_a_dict"])
@pytest.mark.parametrize("order", [1, -1])
def test_what_is_never_traced_is_tried_so_often_and_no_more(form: str, order: int) -> None:
    traced = []

    def fn(tree: Any) -> Any:
        (x,) = jax.tree_util.tree_leaves(tree)
        traced.append(x.shape)
        return [x] * int(x.shape[0])

    executor = BucketedExec(fn, dynamic_axes=OPENED[form][1]).with_pow2()
    sizes = [2**k for k in range(2, 10)] + list(range(5, 60, 2))
    for n in sorted(sizes)[::order]:
        assert not _resolved(executor, {"x": ramp(n)} if "dict" in form else ramp(n))
    # Each trial is a symbolic trace or two, and one at each of six other sizes.
    assert len(traced) <= 9 * (8 + 8)
    count = len(traced)
    for n in range(6, 60, 2):
        assert not _resolved(executor, {"x": ramp(n)} if "dict" in form else ramp(n))
    assert len(traced) == count


def test_shapes_that_agree_at_some_sizes() -> None:
    def pairs(x: Any) -> Any:
        return x[::2] + x[1::2]

    executor = BucketedExec(pairs, dynamic_axes="n").with_pow2()
    for n in (6, 4, 8, 2):
        assert_like_jit(executor, pairs, ramp(n))
    assert executor.explain(ramp(6)).kind == "masked"
    assert executor.stats().fallback_calls == 0
    with pytest.raises(TypeError, match="incompatible shapes"):
        executor(ramp(5))

    def blocks(x: Any) -> Any:
        b, s = x.shape
        pad = -s % 4
        wide = jnp.pad(x, ((0, 0), (0, pad))).reshape(b, -1, 4)
        return wide * jnp.ones((b, (s + pad) // 4, 1)) + x[:, :1, None]

    executor = BucketedExec(blocks, dynamic_axes="b, s").with_pow2()
    for b, s in ((3, 6), (4, 8), (2, 9), (1, 5)):
        assert_like_jit(executor, blocks, ramp(b, s))
    assert executor.stats().fallback_calls == 0
