"""Dimension variables: evaluation, bounds over a bucket, order, fits and solving."""

import itertools
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from bucketjit import BucketedExec
from bucketjit._ir.bounds import LARGE, is_never_negative, magnitude, upper_bound_text
from bucketjit._ir.bucket_sizes import BucketSizes, evaluate_traced
from bucketjit._ir.expressions import (
    bind_unique_names,
    evaluate,
    evaluate_text,
    fit,
    is_symbolic,
    shape_function,
    solve,
    symbolic_axes,
    variables_of,
)
from bucketjit.errors import MaskingError

VARIABLES = ("b", "s", "t")


def leaves() -> Any:
    return st.one_of(st.integers(0, 6).map(str), st.sampled_from(VARIABLES))


def expressions(monotone: bool = False) -> Any:
    """Texts of sizes as `jax.export` prints them; with ``monotone`` only such as grow."""

    def extend(children: Any) -> Any:
        pair = st.tuples(children, children)
        positive = st.integers(1, 5)
        grown = [
            pair.map(lambda p: f"({p[0]} + {p[1]})"),
            pair.map(lambda p: f"({p[0]} * {p[1]})"),
            pair.map(lambda p: f"max({p[0]}, {p[1]})"),
            pair.map(lambda p: f"min({p[0]}, {p[1]})"),
            st.tuples(children, positive).map(lambda p: f"floordiv({p[0]}, {p[1]})"),
        ]
        other = [
            pair.map(lambda p: f"({p[0]} - {p[1]})"),
            st.tuples(children, positive).map(lambda p: f"mod({p[0]}, {p[1]})"),
            st.tuples(children, st.integers(0, 2)).map(lambda p: f"({p[0]})^{p[1]}"),
            children.map(lambda c: f"(-{c})"),
        ]
        return st.one_of(*grown) if monotone else st.one_of(*grown, *other)

    return st.recursive(leaves(), extend, max_leaves=6)


def boxes(largest: int = 5) -> Any:
    bounds = st.tuples(st.integers(1, 4), st.integers(0, largest)).map(lambda p: (p[0], sum(p)))
    return st.fixed_dictionaries({v: bounds for v in VARIABLES})


def values_over(text: str, box: Mapping[str, tuple[int, int]]) -> list[int]:
    names = variables_of(text)
    ranges = [range(box[v][0], box[v][1] + 1) for v in names]
    return [
        evaluate_text(text, dict(zip(names, point, strict=True)))
        for point in itertools.product(*ranges)
    ]


def python_value(text: str, sizes: Mapping[str, int]) -> int:
    functions = {
        "floordiv": lambda a, b: math.floor(a / b),
        "mod": lambda a, b: a - b * math.floor(a / b),
        "max": max,
        "min": min,
    }
    return eval(text.replace("^", "**"), {**functions, **sizes})


@hypothesis.given(expressions(), st.lists(st.integers(1, 40), min_size=3, max_size=3))
@hypothesis.settings(deadline=None, max_examples=200)
def test_evaluate(text: str, numbers: list[int]) -> None:
    sizes = dict(zip(VARIABLES, numbers, strict=True))
    assert evaluate_text(text, sizes) == python_value(text, sizes)


class Dim:
    """Stands for a symbolic dimension: its text is all that is used."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


@hypothesis.given(expressions(), st.lists(st.integers(1, 50_000), min_size=3, max_size=3))
@hypothesis.settings(deadline=None, max_examples=60)
def test_evaluate_traced_is_evaluate(text: str, numbers: list[int]) -> None:
    sizes = dict(zip(VARIABLES, numbers, strict=True))
    want = evaluate_text(text, sizes)
    hypothesis.assume(abs(want) < 2**31)
    bucket = {v: 2 * n for v, n in sizes.items()}
    try:
        got = evaluate_traced(Dim(text), {v: jnp.int32(n) for v, n in sizes.items()}, bucket)
    except MaskingError:
        hypothesis.reject()  # of more than 64 bits
    assert int(got) == want


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("floordiv(n^3 - 3*n^2 + 2*n, 6)", 2000),
        ("floordiv(750000*n, 1000000)", 4000),
        ("mod(2654435761*n, 1000)", 3001),
        ("mod(-1*n^3 + 7, 11)", 3001),
        ("min(n^4, 1000)", 20_000),
        ("floordiv(1000000000*n, n + 1)", 4000),
    ],
)
def test_what_a_size_is_computed_by_may_be_larger_than_int32(text: str, size: int) -> None:
    traced = jax.jit(lambda n: evaluate_traced(Dim(text), {"n": n}, {"n": 2 * size}))
    assert int(traced(np.int32(size))) == evaluate_text(text, {"n": size})
    assert traced(np.int32(size)).dtype == np.int32


@pytest.mark.parametrize("text", ["n^7", "floordiv(n^7, 1000000)", "mod(n^9, 5)"])
def test_what_takes_more_than_64_bits_is_refused_in_that_bucket(text: str) -> None:
    evaluate_traced(Dim(text), {"n": jnp.int32(2)}, {"n": 4})
    with pytest.raises(MaskingError, match="more than 64 bits in this bucket") as raised:
        evaluate_traced(Dim(text), {"n": jnp.int32(2)}, {"n": 10_000})
    assert raised.value.in_bucket


def test_a_bound_that_is_enumerated_does_not_wrap() -> None:
    text = "mod(n^7, 13) + floordiv(n^9, 1000000000000000000000)"
    bound = upper_bound_text(text, {"n": 1}, {"n": 1000})
    assert bound == max(evaluate_text(text, {"n": n}) for n in range(1, 1001))


BEYOND = (2**31, 2**32 + 3, 2**63 - 1)


@pytest.mark.parametrize("beyond", BEYOND)
@pytest.mark.parametrize(
    "text",
    [
        *("min(b, {})", "min({}, b)", "max(0, b - {})", "2*min(b, {}) + s", "min(b*s, {})"),
        *("max(s, min(b, {}) - 2)", "floordiv(b, {})", "mod(b + s, {})", "max(-1*{}, 1 - b)"),
    ],
)
def test_sizes_do_not_reach_what_int32_does_not_hold(text: str, beyond: int) -> None:
    text = text.format(beyond)
    for b, s in ((1, 1), (7, 5), (4000, 3)):
        traced = evaluate_traced(
            text, {"b": jnp.int32(b), "s": jnp.int32(s)}, {"b": 2 * b, "s": 2 * s}
        )
        assert int(traced) == evaluate_text(text, {"b": b, "s": s})


@pytest.mark.parametrize("take", [lambda x: x[: sys.maxsize], lambda x: x[-sys.maxsize :]])
def test_all_of_an_axis_as_python_writes_it(take) -> None:
    fn = BucketedExec(lambda x: take(x).cumsum(0) + x.sum()).with_pow2()
    for n in (3, 5, 8):
        x = np.arange(2.0 * n, dtype=np.float32).reshape(n, 2)
        np.testing.assert_allclose(fn(x), x.cumsum(0) + x.sum())
    assert (fn.stats().compiles, fn.stats().fallback_calls) == (2, 0)


@hypothesis.given(expressions(), boxes())
@hypothesis.settings(deadline=None, max_examples=300)
def test_upper_bound_is_an_upper_bound(text: str, box: dict[str, tuple[int, int]]) -> None:
    lo, hi = ({v: r[i] for v, r in box.items()} for i in (0, 1))
    bound = upper_bound_text(text, lo, hi)
    assert bound >= max(values_over(text, box))
    assert bound >= 0


@hypothesis.given(expressions(monotone=True), boxes())
@hypothesis.settings(deadline=None, max_examples=200)
def test_upper_bound_is_tight_where_the_expression_grows(text: str, box: Any) -> None:
    lo, hi = ({v: r[i] for v, r in box.items()} for i in (0, 1))
    assert upper_bound_text(text, lo, hi) == evaluate_text(text, hi)


@pytest.mark.parametrize(
    ("text", "lo", "hi", "bound"),
    [
        *(("b - 1", 1, 8, 7), ("10 - b", 1, 8, 9), ("10 - b", 3, 8, 7), ("3 - b", 4, 8, 0)),
        *(("mod(b, 4)", 1, 8, 3), ("mod(b, 16)", 1, 8, 8), ("mod(b, 16)", 17, 18, 2)),
        *(("b - 2*floordiv(b, 2)", 1, 8, 1), ("floordiv(b + 3, 4)*4 - b", 1, 8, 3)),
        *(("max(4 - b, 0)", 1, 8, 3), ("min(b, 3)", 1, 8, 3)),
        *(("b*b - 6*b + 9", 1, 4, 4), ("(b - 5)^2", 1, 8, 16)),
    ],
)
def test_upper_bounds_of_expressions_that_shrink(text: str, lo: int, hi: int, bound: int) -> None:
    assert upper_bound_text(text, {"b": lo}, {"b": hi}) == bound


def test_an_expression_that_cannot_be_bounded_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot bound"):
        upper_bound_text("b / s", dict.fromkeys("bs", 1), dict.fromkeys("bs", 10**6))


@hypothesis.given(
    st.integers(1, 6), st.integers(-6, 6), st.integers(0, 50), st.sampled_from(["", "s", "2*s"])
)
@hypothesis.settings(deadline=None, max_examples=200)
def test_solve(slope: int, offset: int, size: int, other: str) -> None:
    text = f"{slope}*b + {offset}" + (f" + {other}" if other else "")
    known = {"s": 3} if other else {}
    value = evaluate_text(text, {"b": size, **known})
    assert solve(text, value, known) == {"b": size}
    if slope > 1:
        assert solve(text, value + 1, known) == {}


@hypothesis.given(expressions(), st.integers(-5, 60))
@hypothesis.settings(deadline=None, max_examples=200)
def test_what_solve_finds_is_a_size(text: str, value: int) -> None:
    """Linear at 0, 1 and 2 is not linear everywhere, so whoever binds checks what it finds."""
    known = {"s": 3, "t": 2}
    for name, size in solve(text, value, known).items():
        assert name == "b" and type(size) is int and size >= 0


@pytest.mark.parametrize(
    ("text", "value", "known", "found"),
    [
        ("b + s", 7, {}, {}),
        ("b + s", 7, {"s": 3, "b": 4}, {}),
        ("b*b", 9, {}, {}),
        ("b + 3", 1, {}, {}),
        ("10 - b", 3, {}, {"b": 7}),
        ("b*s", 12, {"s": 4}, {"b": 3}),
        ("0*b + 3", 3, {}, {}),
    ],
)
def test_solve_by_example(text: str, value: int, known: Any, found: Any) -> None:
    assert solve(text, value, known) == found


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("7", ()),
        ("b", ("b",)),
        ("2*b^2 + s", ("b", "s")),
        ("floordiv(s, 2) + mod(b, 3)", ("b", "s")),
        ("max(batch, seq_len)", ("batch", "seq_len")),
        ("max(b, min(b, 3))", ("b",)),
    ],
)
def test_variables_of(text: str, names: tuple[str, ...]) -> None:
    assert variables_of(text) == names


def test_every_dimension_that_jax_prints_can_be_read() -> None:
    b, s = export.symbolic_shape("b, s", constraints=("b >= 3",))
    dims = [
        *(b + s, 2 * b * s - 3, b**3, (b + 1) // 2, -b % 4, (b * s) % (s + 1)),
        *(jax.core.max_dim(b, s), jax.core.min_dim(b, 2 * s), -b + 10, b // s, (b - s) // 2),
    ]
    for dim in dims:
        for sizes in ({"b": 3, "s": 5}, {"b": 8, "s": 1}, {"b": 7, "s": 7}):
            want = int(dim._evaluate(sizes)) if is_symbolic(dim) else dim
            assert evaluate(dim, sizes) == want
            values = {v: jnp.int32(n) for v, n in sizes.items()}
            assert int(evaluate_traced(dim, values, sizes)) == want
            assert shape_function((dim, 2), ("b", "s"))(**sizes) == (want, 2)


def test_shapes() -> None:
    b, s = export.symbolic_shape("b, s")
    assert symbolic_axes((b, 3, s, 4)) == (0, 2)
    assert shape_function((b, 3, 2 * s), ("s", "b"))(5, 2) == (2, 3, 10)
    assert shape_function((), ())() == ()
    assert not is_symbolic(3) and is_symbolic(b)


def test_bucket_sizes() -> None:
    b, s = export.symbolic_shape("b, s")
    at = BucketSizes({"b": 4, "s": 8}, {"s": 3}, {"b": jnp.int32(3), "s": jnp.int32(5)})
    assert at.padded_shape((b, 7, 2 * s + 1)) == (4, 7, 17)
    assert at.padded(10 - s) == 7  # s is at least 3
    assert at.logical(7) == 7
    assert int(at.logical(b * s)) == 15
    assert at.logical(b * s).dtype == jnp.int32


def test_bind_unique_names() -> None:
    assert bind_unique_names("batch", []) == "batch"
    assert bind_unique_names("batch", ["batch", "batch_2"]) == "batch_1"
    assert bind_unique_names("batch", ["batch", "batch_1"]) == "batch_2"


NEVER_NEGATIVE = [
    *("0", "n - 1", "n*m - n", "n^2 - n", "floordiv(n, 3)", "n - floordiv(2*n, 3)"),
    *("n - floordiv(95*n, 100)", "2*n - floordiv(7*n + 3, 4)"),
    *("floordiv(2*n, 3) - floordiv(n, 3)", "floordiv(n + 2, 3) - 1"),
    *("n - floordiv(floordiv(n, 2)*2, 3)", "max(1, floordiv(n, 2)) - 1"),
    *("n - max(1, floordiv(n, 2))", "n - min(n, floordiv(10*n, 7))", "min(n, m) - 1"),
    *("2 - mod(n, 3)", "n - mod(n, 3)", "m*n - m*floordiv(n, 2)"),
]
MAYBE_NEGATIVE = [
    *("-1", "n - 2", "n - m", "floordiv(n, 2) - 1", "n - floordiv(10*n, 7)"),
    *("floordiv(n - 5, 2) - n + 5", "n - max(n, m)", "min(n, m) - n", "mod(n, 3) - 1"),
    *("floordiv(n, 3) - floordiv(n, 4) - 1", "n - max(2, floordiv(n, 2))"),
]


def _least(text: str) -> int:
    names = variables_of(text)
    boxes = itertools.product(range(1, 30), repeat=len(names))
    return min(evaluate_text(text, dict(zip(names, box, strict=True))) for box in boxes)


@pytest.mark.parametrize("text", NEVER_NEGATIVE)
def test_what_is_never_negative_is_known(text: str) -> None:
    assert _least(text) >= 0
    assert is_never_negative(text)


@pytest.mark.parametrize("text", MAYBE_NEGATIVE)
def test_what_may_be_negative_is_not(text: str) -> None:
    assert _least(text) < 0
    assert not is_never_negative(text)


def test_no_answer_is_wrong() -> None:
    atoms = ["1", "n", "m", "floordiv(2*n, 3)", "max(m, floordiv(n, 2))", "min(n, 2*m - 3)"]
    for one, sign, other, c in itertools.product(atoms, "+-", atoms, (-2, 0, 1)):
        text = f"{one} {sign} 2*({other}) + {c}"
        assert not is_never_negative(text) or _least(text) >= 0, text


def test_variables_with_bounds() -> None:
    most_of = (("size_1", "n + 1"), ("size_2", "floordiv(size_1, 2) + 1"))
    assert is_never_negative("n + 1 - size_1", most_of)
    assert is_never_negative("n + 2 - size_2", most_of)
    assert not is_never_negative("n - size_1", most_of)
    assert not is_never_negative("size_1 - 2", most_of)


def test_magnitudes() -> None:
    assert magnitude("7") == 7 and magnitude("n") == magnitude("n*m") == LARGE
    assert magnitude("n - m") == 2 * LARGE
    assert magnitude("floordiv(100*n, 50)") == 2 * LARGE
    assert magnitude("min(1000*n, 5)") == 5 and magnitude("mod(1000*n, 5)") == 5
    assert magnitude("-max(n, 5)") == LARGE


SAMPLES = [
    *({"b": 3, "s": 5}, {"b": 4, "s": 5}, {"b": 3, "s": 7}, {"b": 6, "s": 9}, {"b": 7, "s": 14}),
    *({"b": 8, "s": 17}, {"b": 5, "s": 8}),
]
ELSEWHERE = [{"b": b, "s": s} for b in (2, 5, 9, 30) for s in (1, 4, 8, 31)]


@pytest.mark.parametrize(
    "of",
    [
        *(lambda b, s: s, lambda b, s: s - 1, lambda b, s: 2 * b + 3, lambda b, s: b * s),
        *(lambda b, s: 4 * b * s - b, lambda b, s: b + s, lambda b, s: b * b),
        *(lambda b, s: 3 * b - 2 * s + 40, lambda b, s: s // 2, lambda b, s: (s + 3) // 4),
        *(lambda b, s: 4 * ((s + 3) // 4), lambda b, s: b % 3),
    ],
)
def test_expressions_that_are_found(of: Callable[[int, int], int]) -> None:
    text = fit([of(**x) for x in SAMPLES], SAMPLES)
    assert isinstance(text, str)
    for sizes in ELSEWHERE:
        assert evaluate_text(text, sizes) == of(**sizes), text


def test_what_does_not_vary_is_an_int() -> None:
    assert fit([8] * len(SAMPLES), SAMPLES) == 8


def test_what_no_expression_gives() -> None:
    assert fit([1, 9, 2, 40, 0, 3, 3], SAMPLES) is None
