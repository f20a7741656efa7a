"""Bad input: an error that names the argument, what was expected and what came; nothing is lost."""

import contextlib
import datetime
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec, Fallback, strategies
from bucketjit.errors import (
    ArgumentError,
    BucketJitError,
    BucketOverflowError,
    FallbackError,
    FallbackWarning,
    MaskingError,
    ShapeCheckError,
    SizeMismatchError,
    SpecError,
    StrategyContractError,
    StrategyError,
)
from tests.comparison import assert_like_jit, ramp


@contextlib.contextmanager
def nothing_lost(
    executor: BucketedExec, fn: Callable[..., Any], *good: Any, **named: Any
) -> Iterator[None]:
    """Runs a good call before and after, and wants the cache as it was in between."""
    assert_like_jit(executor, fn, *good, **named)
    before = executor.stats()
    yield
    after = executor.stats()
    assert after.buckets == before.buckets
    assert (after.compiles, after.calls) == (before.compiles, before.calls)
    assert_like_jit(executor, fn, *good, **named)
    assert executor.stats().compiles == before.compiles


def double(x: Any) -> Any:
    return jax.tree.map(lambda a: a * 2, x)


def both(x: Any, y: Any) -> Any:
    return double((x, y))


# --- sizes -------------------------------------------------------------------------------------

MISMATCHES: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...], list[str]]] = {
    "two arguments": (
        ("b", "b"),
        (ramp(3), ramp(3)),
        (ramp(3), ramp(4)),
        ["'b'", "is 3 at axis 0 of x", "4 at axis 0 of y"],
    ),
    "one array": (
        ("n, n", None),
        (ramp(3, 3), 1.0),
        (ramp(3, 5), 1.0),
        ["'n'", "is 3 at axis 0 of x", "5 at axis 1 of x"],
    ),
    "inner axes": (
        ("b, s", "s, b"),
        (ramp(2, 3), ramp(3, 2)),
        (ramp(2, 3), ramp(4, 2)),
        ["'s'", "is 3 at axis 1 of x", "4 at axis 0 of y"],
    ),
    "containers": (
        ({"a": "b", "c": ["b"]}, "b"),
        ({"a": ramp(3), "c": [ramp(3)]}, ramp(3)),
        ({"a": ramp(3), "c": [ramp(7)]}, ramp(3)),
        ["'b'", "is 3 at axis 0 of x['a']", "7 at axis 0 of x['c'][0]"],
    ),
    "a ragged container": (
        ("b", None),
        ([ramp(3), ramp(3)], 1.0),
        ([ramp(3), ramp(5)], 1.0),
        ["'b'", "is 3 at axis 0 of x[0]", "5 at axis 0 of x[1]"],
    ),
    "an expression": (
        ("b", "2*b + 1"),
        (ramp(3), ramp(7)),
        (ramp(3), ramp(8)),
        ["axis 0 of y", "8", "2*b + 1", "7", "b = 3 at axis 0 of x"],
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
@pytest.mark.parametrize("strategy", [strategies.Pow2(), strategies.Exact()], ids=str)
def test_one_name_for_two_sizes(name: str, strategy: Any) -> None:
    spec, good, bad, parts = MISMATCHES[name]
    executor = BucketedExec(both, dynamic_axes=spec).with_strategy(strategy)
    with nothing_lost(executor, both, *good), pytest.raises(SizeMismatchError) as raised:
        executor(*bad)
    for part in parts:
        assert part in str(raised.value)


def test_sizes_are_checked_before_the_function_is_traced() -> None:
    def fn(x: Any, y: Any) -> Any:
        raise AssertionError("traced")

    executor = BucketedExec(fn, dynamic_axes=("b", "b")).with_pow2()
    with pytest.raises(SizeMismatchError):
        executor(ramp(3), ramp(4))


@pytest.mark.parametrize("keyword", [False, True])
def test_keyword_arguments_are_named(keyword: bool) -> None:
    executor = BucketedExec(both, dynamic_axes=("b", "b")).with_pow2()
    with pytest.raises(SizeMismatchError, match="3 at axis 0 of x and 4 at axis 0 of y"):
        executor(ramp(3), y=ramp(4)) if keyword else executor(x=ramp(3), y=ramp(4))


def test_variadic_arguments_are_named_by_position() -> None:
    executor = BucketedExec(lambda *xs: xs, dynamic_axes=("b", "b")).with_pow2()
    with pytest.raises(SizeMismatchError, match=r"args\[0\].*args\[1\]"):
        executor(ramp(3), ramp(4))


@pytest.mark.parametrize("strategy", [strategies.Pow2(), strategies.Exact()], ids=str)
@pytest.mark.parametrize(
    ("spec", "good", "bad", "parts"),
    [
        ("b, _", ramp(3, 2), ramp(3), ["x", "'b, _'", "2 axes", "(3,)", "rank 1"]),
        ("b", ramp(3), ramp(3, 2), ["x", "'b'", "1 axis", "(3, 2)", "rank 2"]),
        ("b", ramp(3), np.float32(3), ["x", "'b'", "()", "rank 0"]),
        ("b", ramp(3), 2.5, ["x", "rank 0"]),
        ("b, ...", ramp(3), np.float32(3), ["x", "()"]),
        ({1: "b"}, ramp(3, 2), ramp(3), ["x", "(3,)"]),
        ({-2: "b"}, ramp(3, 2), ramp(3), ["x", "-2", "(3,)"]),
        ([1], ramp(3, 2), ramp(3), ["x", "axis 1", "(3,)"]),
        ([-2], ramp(3, 2), ramp(3), ["x", "(3,)"]),
        (("b", "s"), ramp(3, 2), ramp(3), ["x", "b, s", "(3,)"]),
        ("b, 2", ramp(3, 2), ramp(3, 5), ["axis 1 of x has size 5, declared 2"]),
    ],
    ids=str,
)
def test_wrong_ranks(spec: Any, good: Any, bad: Any, parts: list[str], strategy: Any) -> None:
    executor = BucketedExec(double, dynamic_axes=(spec,)).with_strategy(strategy)
    with nothing_lost(executor, double, good):
        for _ in range(2):
            with pytest.raises(ArgumentError) as raised:
                executor(bad)
            for part in parts:
                assert part in str(raised.value)


@pytest.mark.parametrize("strategy", [strategies.Pow2(), strategies.Exact()], ids=str)
def test_a_broken_constraint(strategy: Any) -> None:
    executor = BucketedExec(double, dynamic_axes="s", constraints=("s >= 4", "s <= 60"))
    executor = executor.with_strategy(strategy)
    with nothing_lost(executor, double, ramp(5)):
        for n, text in ((3, "s >= 4"), (61, "s <= 60"), (0, "s >= 4")):
            with pytest.raises(ArgumentError, match=text) as raised:
                executor(ramp(n))
            assert str(n) in str(raised.value)


def test_a_constraint_on_a_variable_that_is_not_there() -> None:
    executor = BucketedExec(double, dynamic_axes="b", constraints=("s >= 4",)).with_pow2()
    with pytest.raises(SpecError, match="'s'"):
        executor(ramp(3))


# --- types -------------------------------------------------------------------------------------

WRONG_TYPES: dict[str, tuple[Any, list[str]]] = {
    "object array": (np.array([1, None], object), ["object"]),
    "text array": (np.array(["a", "b"]), ["<U1"]),
    "bytes array": (np.array([b"a", b"b"]), ["S1"]),
    "durations": (np.zeros(2, "timedelta64[s]"), ["timedelta64"]),
    "raw bytes": (np.zeros(2, "V3"), ["V3"]),
    "masked array": (np.ma.masked_array(ramp(2), mask=[0, 1]), ["masked array"]),
    "long doubles": (np.zeros(2, np.longdouble), ["float128|longdouble|float"]),
    "other byte order": (ramp(2).astype(">f4"), [">f4"]),
    "text": ("text", ["str", "static"]),
    "bytes": (b"text", ["bytes"]),
    "date": (datetime.date(2020, 1, 1), ["date"]),
    "object": (object(), ["object"]),
    "generator": ((i for i in ()), ["generator"]),
    "dtype": (np.dtype("f4"), ["dtype|Float32"]),
    "struct": (jax.ShapeDtypeStruct((2,), np.float32), ["ShapeDtypeStruct"]),
}


def test_wrong_types() -> None:
    good = {"y": ramp(2), "z": [1.0, ramp(2)]}
    executor = BucketedExec(both).with_pow2()
    with nothing_lost(executor, both, ramp(2), good):
        for value, parts in WRONG_TYPES.values():
            bad = {"y": ramp(2), "z": [1.0, value]}
            for where, args, named in (
                ("x: ", (value, good), {}),
                ("y['z'][1]: ", (ramp(2), bad), {}),
                ("y['z'][1]: ", (ramp(2),), {"y": bad}),
            ):
                with pytest.raises(ArgumentError) as raised:
                    executor(*args, **named)
                message = str(raised.value)
                assert message.startswith(where) and "expected" in message
                for part in parts:
                    assert any(p in message for p in part.split("|"))


@pytest.mark.parametrize("static", [[1], {}, np.zeros(2), {1}, (1, [2])], ids=repr)
@pytest.mark.parametrize("how", ["position", "name", "by name"])
def test_unhashable_static_arguments(static: Any, how: str) -> None:
    option: dict[str, Any] = (
        {"static_argnames": "options"} if how == "by name" else {"static_argnums": 1}
    )
    executor = BucketedExec(lambda x, options=None: x * 2, **option).with_pow2()
    executor(ramp(3), "good")
    before = executor.stats().buckets
    with pytest.raises(ArgumentError, match="options: static arguments must be hashable") as raised:
        executor(ramp(3), static) if how == "position" else executor(ramp(3), options=static)
    assert type(static).__name__ in str(raised.value)
    assert executor.stats().buckets == before
    np.testing.assert_array_equal(executor(ramp(3), "good"), 2 * ramp(3))


@pytest.mark.parametrize(
    ("static", "instead"),
    [({"a": 2}, dict), ([1, 2], list), ({1, 2}, set), (np.array([1.0, 2.0]), None)],
    ids=["dict", "list", "set", "array"],
)
def test_an_unhashable_static_argument_names_a_hashable_form(static: Any, instead: Any) -> None:
    executor = bucketjit.jit(lambda x, cfg: x * len(cfg), static_argnames="cfg")
    with pytest.raises(ArgumentError, match="cfg: .* pass .*, or make it a traced") as raised:
        executor(ramp(3), cfg=static)
    (form,) = re.findall(r"pass (\w+\(cfg[^;,]*\)),", str(raised.value))
    hashable = eval(form, {"cfg": static})
    np.testing.assert_array_equal(executor(ramp(3), cfg=hashable), ramp(3) * len(static))
    assert instead is None or instead(hashable) == static


@pytest.mark.parametrize(
    "static", [{"a": [1]}, [[1]], ([1],), np.ones((2, 2)), np.array(3)], ids=repr
)
def test_no_form_is_named_that_is_not_hashable_either(static: Any) -> None:
    executor = bucketjit.jit(lambda x, cfg: x, static_argnames="cfg")
    with pytest.raises(ArgumentError, match="; pass a hashable object, such as one of a class"):
        executor(ramp(3), cfg=static)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"sizes": {"n": [4, 8]}}, r"^warmup: sizes .* arguments of one call first: warmup\(jax"),
        ({"x": ramp(3), "sizes": {"s": 8}}, r"no dimension 's'; .* 'n'; write \{'n': \.\.\.\}"),
        ({"x": ramp(3), "sizes": [{"s": 8}]}, r"no dimension 's'; .* 'n'; write \{'n': \.\.\.\}"),
        ({"x": ramp(3), "sizes": [4, 8]}, r"as \{'n': 8\}, got 4; several .* \{'n': \[8, 16\]\}"),
        ({"x": ramp(3), "sizes": 8}, r"a dict such as \{'n': range\(1, 65\)\}"),
    ],
)
def test_sizes_of_a_warmup_name_what_to_write(given: Any, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        bucketjit.jit(double, dynamic_axes="n").warmup(progress=False, **given)


# --- strategies --------------------------------------------------------------------------------


class _Answers:
    def __init__(self, answer: Any) -> None:
        self.bad = answer

    def bucket(self, n: int) -> Any:
        if n < 5:
            return 4
        if isinstance(self.bad, Exception):
            raise self.bad
        return self.bad

    def __repr__(self) -> str:
        return "mine"


@pytest.mark.parametrize("answer", [4, 0, -1, "8", 8.0, np.float64(8), None, True, [8]], ids=repr)
def test_a_strategy_that_breaks_its_contract(answer: Any) -> None:
    executor = BucketedExec(double, dynamic_axes="seq").with_strategy(_Answers(answer))
    with nothing_lost(executor, double, ramp(3)):
        for _ in range(2):
            with pytest.raises(StrategyContractError) as raised:
                executor(ramp(5))
            what = "a bucket of at least 5" if type(answer) is int else f"({type(answer).__name__})"
            for part in ("mine", "dimension 'seq' of size 5", f"not {answer!r}", what):
                assert part in str(raised.value)


def test_a_strategy_for_one_dimension_that_breaks_its_contract() -> None:
    executor = BucketedExec(double, dynamic_axes="b, s").with_pow2()
    executor = executor.with_strategy(_Answers(1), "s")
    with (
        nothing_lost(executor, double, ramp(3, 3)),
        pytest.raises(StrategyContractError, match="'s' of size 6"),
    ):
        executor(ramp(3, 6))


@pytest.mark.parametrize(
    ("bucket", "told"), [(2**61, r"seq=23\d+ pads .*\(5,\)"), (2**70, "at most .* 'seq' of size 5")]
)
def test_a_bucket_that_no_array_can_have(bucket: int, told: str) -> None:
    executor = BucketedExec(double, dynamic_axes="seq").with_strategy(_Answers(bucket))
    with nothing_lost(executor, double, ramp(3)):
        for _ in range(2):
            with pytest.raises(StrategyContractError, match=told):
                executor(ramp(5))


def test_what_a_strategy_raises_comes_through() -> None:
    executor = BucketedExec(double).with_strategy(_Answers(ZeroDivisionError("mine")))
    with nothing_lost(executor, double, ramp(3)), pytest.raises(ZeroDivisionError, match="mine"):
        executor(ramp(5))


@pytest.mark.parametrize(
    "build",
    [
        lambda e: e.with_pow2(max=16),
        lambda e: e.with_linear(4, max=16),
        lambda e: e.with_exponential(2, max=16),
        lambda e: e.with_buckets([4, 16]),
        lambda e: e.with_pow2("seq", max=16),
        lambda e: e.with_strategy(strategies.Pow2(max=16), "seq"),
    ],
    ids=["pow2", "linear", "exponential", "buckets", "dim", "strategy"],
)
def test_beyond_the_largest_bucket(build: Callable[[BucketedExec], BucketedExec]) -> None:
    executor = build(BucketedExec(double, dynamic_axes="seq"))
    with nothing_lost(executor, double, ramp(16)):
        for n in (17, 1000):
            with pytest.raises(BucketOverflowError) as raised:
                executor(ramp(n))
            error = raised.value
            assert (error.dim, error.size, error.largest) == ("seq", n, 16)
            for part in ("'seq'", str(n), "16"):
                assert part in str(error)


# --- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"constraints": ("b",)}, "'b'"),
        ({"constraints": 5}, "constraints must be a list"),
        ({"constraints": None}, "constraints must be a list"),
        ({"constraints": (4,)}, "constraints: expected text"),
        ({"constraints": "b >= 4.5"}, "sizes are whole numbers"),
        ({"constraints": ("b > 3",)}, "b > 3"),
        ({"constraints": "b = 3"}, "b = 3"),
        ({"static_argnums": 5}, "static_argnums.*5"),
        ({"static_argnums": -3}, "static_argnums.*-3"),
        ({"static_argnums": "x"}, "static_argnums"),
        ({"static_argnums": 1.0}, "static_argnums"),
        ({"static_argnames": "z"}, "z"),
        ({"static_argnames": 3}, "static_argnames: expected names"),
        ({"donate_argnums": (0, 7)}, "donate_argnums.*7"),
        ({"static_argnums": 0, "donate_argnums": 0}, "both static and donated"),
    ],
    ids=str,
)
def test_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises((SpecError, TypeError), match=match):
        BucketedExec(both, **options)


@pytest.mark.parametrize("fn", [None, 3, "f", [len]], ids=repr)
def test_what_cannot_be_called(fn: Any) -> None:
    with pytest.raises(TypeError, match="callable"):
        BucketedExec(fn)


def test_with_rules_wants_rules_by_primitive() -> None:
    with pytest.raises((SpecError, TypeError)):
        BucketedExec(double).with_rules({jax.lax.exp_p: None})  # type: ignore[dict-item]
    with pytest.raises((SpecError, TypeError)):
        BucketedExec(double).with_rules([jax.lax.exp_p])  # type: ignore[arg-type]


# --- the tree of exceptions --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        *((SpecError, (BucketJitError, ValueError)), (ArgumentError, (BucketJitError, TypeError))),
        *((SizeMismatchError, (ArgumentError,)), (StrategyError, (BucketJitError, ValueError))),
        *((BucketOverflowError, (StrategyError,)), (StrategyContractError, (StrategyError,))),
        *((ShapeCheckError, (BucketJitError, TypeError)), (MaskingError, (BucketJitError,))),
        *((FallbackError, (MaskingError,)), (FallbackWarning, (UserWarning,))),
    ],
)
def test_the_tree(error: type, bases: tuple[type, ...]) -> None:
    assert issubclass(error, bases) and all(issubclass(error, b) for b in bases)
    assert getattr(bucketjit.errors, error.__name__) is error


def test_a_masking_error_carries_reason_and_remedy() -> None:
    def refuse(ctx: Any, x: Any) -> Any:
        ctx.refuse("it cannot be done", "do something else")

    executor = BucketedExec(lambda x: jnp.exp(x), fallback=Fallback.ERROR).with_pow2()
    with pytest.raises(FallbackError) as raised:
        executor.with_rules({jax.lax.exp_p: refuse})(ramp(3))
    error = raised.value
    assert error.reason.startswith("exp: it cannot be done")
    assert "test_errors.py" in error.reason
    assert error.remedy == "do something else"
    assert error.reason in str(error) and error.remedy in str(error)


def test_errors_survive_pickling() -> None:
    import pickle

    for error in (
        BucketOverflowError(5, 4, "b"),
        MaskingError("reason", "remedy"),
        FallbackError("reason", "remedy"),
        SizeMismatchError("text"),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert vars(copy) == vars(error)


def test_options_that_are_none_as_with_jit() -> None:
    none: dict[str, Any] = dict.fromkeys(("static_argnums", "static_argnames", "donate_argnums"))
    np.testing.assert_array_equal(BucketedExec(double, **none).with_pow2()(ramp(3)), 2 * ramp(3))


class _OneMore:
    def bucket(self, n: int) -> int:
        return n + 1


class _Falling:
    def bucket(self, n: int) -> int:
        return {3: 8, 5: 6, 8: 8}.get(n, 8)


@pytest.mark.parametrize("strategy", [_OneMore(), _Falling()])
def test_a_strategy_that_is_not_idempotent_or_monotone(strategy: Any) -> None:
    executor = BucketedExec(double).with_strategy(strategy)
    with pytest.raises(StrategyContractError, match="'batch' of size 3 into the bucket"):
        executor(ramp(3))
    assert executor.cache_size() == 0
