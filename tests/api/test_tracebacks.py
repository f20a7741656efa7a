"""Errors of the user's code: as ``jax.jit`` shows them, with no frame of bucketjit or JAX."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec
from bucketjit._jax.tracebacks import shortened
from bucketjit.errors import ArgumentError, FallbackError
from tests.comparison import filtering

X = np.arange(5, dtype=np.float32)
LIKE = jax.ShapeDtypeStruct((5,), np.float32)
OURS = os.path.dirname(bucketjit.__file__) + os.sep
OF_JAX = os.path.dirname(jax.__file__) + os.sep


class OfUser(Exception):
    """With an attribute, which must not get lost."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message, code)
        self.code = code


def inner(x: Any) -> Any:
    raise OfUser("of the user", 7)


def middle(x: Any) -> Any:
    return inner(x * 2)


def deep(x: Any) -> Any:
    return middle(x + 1)


def two(x: Any, y: Any) -> Any:
    return x + y


def caused(x: Any) -> Any:
    try:
        return {"a": x}["b"]
    except KeyError as error:
        raise OfUser("caused", 1) from error


def while_handling(x: Any) -> Any:
    try:
        return {"a": x}["b"]
    except KeyError:
        raise OfUser("while handling", 2)  # noqa: B904


def loss(x: Any) -> Any:
    return jnp.sum(middle(x))


SAME = OfUser("the same object each time", 3)


def the_same(x: Any) -> Any:
    raise SAME


def of_the_machine(x: Any) -> Any:
    raise RuntimeError("plain")


FAILING: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "two calls deep": (deep, (X,), {}),
    "missing": (two, (X,), {}),
    "too many": (two, (X, X, X), {}),
    "wrong keyword": (two, (X,), {"z": X}),
    "a key": (lambda x: {"a": x}["b"], (X,), {}),
    "jnp": (lambda x: jnp.dot(x, jnp.ones(3)), (X,), {}),
    "broadcast": (two, (X, np.ones(3, np.float32)), {}),
    "with a cause": (caused, (X,), {}),
    "while handling": (while_handling, (X,), {}),
    "inside value_and_grad": (jax.value_and_grad(loss), (X,), {}),
    "a branch on a value": (lambda x: x if x.sum() > 0 else -x, (X,), {}),
    "a NumPy function": (lambda x: np.sort(x), (X,), {}),
    "a result": (lambda x: "text", (X,), {}),
    "the same object": (the_same, (X,), {}),
    "a plain RuntimeError": (of_the_machine, (X,), {}),
}


def raised(call: Callable[[], Any]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing is raised")


def text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def lines(error: BaseException) -> int:
    """Lines that are shown, without the marks below the source."""
    return sum(not line.lstrip().startswith(("^", "~")) for line in text(error).splitlines())


def is_clean(error: BaseException) -> bool:
    """Whether no frame of bucketjit is in the error, nor in those that are shown with it."""
    told: BaseException | None = error
    while told is not None:
        if any(OURS in frame.filename for frame in traceback.extract_tb(told.__traceback__)):
            return False
        told = told.__cause__ or told.__context__
    return True


def same_chain(one: BaseException | None, other: BaseException | None) -> bool:
    if one is None or other is None:
        return one is other
    return (
        type(one) is type(other)
        and same_chain(one.__cause__, other.__cause__)
        and same_chain(one.__context__, other.__context__)
    )


@pytest.fixture(autouse=True)
def filtered() -> Iterator[None]:
    SAME.__traceback__ = None
    with filtering("quiet_remove_frames"):
        yield


@pytest.mark.parametrize("name", FAILING)
def test_a_call_shows_what_jit_shows(name: str) -> None:
    fn, args, kwargs = FAILING[name]
    expected = raised(lambda: jax.jit(fn)(*args, **kwargs))
    length, message = lines(expected), str(expected)
    SAME.__traceback__ = None
    for make in (bucketjit.jit, BucketedExec, lambda f: BucketedExec(f).with_pow2()):
        SAME.__notes__ = []
        executor = make(fn)
        error = raised(lambda: executor(*args, **kwargs))  # noqa: B023
        SAME.__traceback__ = None
        if error is not SAME:
            assert is_clean(error) and same_chain(error, expected), text(error)
            assert error.__notes__ == expected.__notes__
            assert lines(error) == length
        assert type(error) is type(expected) and str(error) == message
        assert error.args == expected.args and executor.cache_size() == 0


def test_an_object_raised_in_each_trace_has_its_frames_once() -> None:
    error = raised(lambda: BucketedExec(the_same).with_pow2()(X))
    assert error is SAME and SAME.code == 3
    assert [f.name for f in traceback.extract_tb(error.__traceback__)][-1] == "the_same"
    assert sum(f.name == "the_same" for f in traceback.extract_tb(error.__traceback__)) == 1
    assert len(error.__notes__) == 1


WAYS: dict[str, Callable[[BucketedExec], Any]] = {
    "explain": lambda executor: executor.explain(LIKE),
    "trace": lambda executor: executor.trace(LIKE),
    "lower": lambda executor: executor.lower(LIKE),
    "warmup": lambda executor: executor.warmup(LIKE, sizes=[4, 8], progress=False),
    "export": lambda executor: executor.export_dynamic(LIKE),
    "map": lambda executor: executor.map([X, X[:3]]),
    "explain_map": lambda executor: executor.explain_map([X, X[:3]]),
    "grad": lambda executor: jax.value_and_grad(lambda x: executor(x).sum())(X),
    "jit": lambda executor: jax.jit(executor)(X),
    "vmap": lambda executor: jax.vmap(executor)(X[None]),
}


@pytest.mark.parametrize("name", WAYS)
def test_every_way_to_run_the_function(name: str) -> None:
    executor = BucketedExec(deep, dynamic_axes="n").with_pow2()
    error = raised(lambda: WAYS[name](executor))
    assert isinstance(error, OfUser) and error.code == 7
    assert error.__cause__ is None and error.__context__ is None
    frames = [f.name for f in traceback.extract_tb(error.__traceback__) if f.filename == __file__]
    assert frames[-3:] == ["deep", "middle", "inner"] and frames.count("deep") == 1
    assert all(f.filename == __file__ for f in traceback.extract_tb(error.__traceback__))
    of_map = ["bucketjit: this is example 0 of map"] if name in ("map", "explain_map") else []
    assert len(error.__notes__) == 1 + len(of_map) and error.__notes__[1:] == of_map


def test_what_the_caller_handles_stays_the_context() -> None:
    executor = BucketedExec(deep).with_pow2()
    try:
        int("no number")
    except ValueError as handled:
        error = raised(lambda: executor(X))
        assert error.__context__ is handled


def test_all_is_shown_without_filtering() -> None:
    with filtering("off"):
        error = raised(lambda: BucketedExec(deep).with_pow2()(X))
    shown = text(error)
    assert OURS in shown and OF_JAX in shown and not hasattr(error, "__notes__")
    assert error.__cause__ is None and error.__context__ is None  # not chained to the attempts


def test_the_whole_traceback_as_the_cause() -> None:
    with filtering("remove_frames"):
        expected = raised(lambda: jax.jit(deep)(X))
        error = raised(lambda: BucketedExec(deep).with_pow2()(X))
    assert type(error.__cause__) is type(expected.__cause__) and OF_JAX in text(error.__cause__)
    assert all(f.filename == __file__ for f in traceback.extract_tb(error.__traceback__))
    assert error.__context__ is None and not hasattr(error, "__notes__")


def test_a_refusal_says_it_once() -> None:
    executor = BucketedExec(
        lambda x: jnp.linalg.eig(x[:, None] * x)[0],
        dynamic_axes="n",
        fallback=bucketjit.Fallback.ERROR,
    ).with_pow2()
    error = raised(lambda: executor(X))
    assert isinstance(error, FallbackError) and is_clean(error)
    assert text(error).count("would mix its eigenvalues") == 1
    with filtering("off"):
        assert raised(lambda: executor(X)).__cause__ is not None


def test_an_argument_error_has_no_frame_within() -> None:
    executor = BucketedExec(deep).with_pow2()
    error = raised(lambda: executor("text"))
    assert isinstance(error, ArgumentError) and is_clean(error)
    assert error.__context__ is None and not hasattr(error, "__notes__")


def test_an_error_with_no_frame_to_hide_stays() -> None:
    error = raised(lambda: inner(X))
    before = [f.name for f in traceback.extract_tb(error.__traceback__)]
    shortened(error)
    assert [f.name for f in traceback.extract_tb(error.__traceback__)] == before


class WithoutMessage(Exception):
    def __str__(self) -> str:
        raise KeyError("no message")


class WithoutNotes(Exception):
    def __init__(self) -> None:
        self.__notes__ = [["no text"]]


@pytest.mark.parametrize("kind", [WithoutMessage, WithoutNotes])
def test_an_error_that_cannot_be_described_is_raised_as_it_is(kind: Any) -> None:
    def fail(x: Any) -> Any:
        raise kind

    with pytest.raises(kind):
        bucketjit.jit(fail)(X)


def test_near_the_limit_of_recursion_the_error_of_recursion_is_raised() -> None:
    def down(levels: int, call: Callable[[], Any]) -> Any:
        return down(levels - 1, call) if levels else call()

    bucketjit.jit(jnp.sum)(X)  # what JAX makes at its first compile is there
    executor, outcomes = bucketjit.jit(jnp.sum), set()
    above = len(traceback.extract_stack())
    for left in range(10, 70, 2):
        try:
            down(sys.getrecursionlimit() - above - left, lambda: executor(X))
        except Exception as error:
            outcomes.add(type(error))
    assert RecursionError in outcomes and outcomes <= {RecursionError, SystemError}  # of jaxlib
    assert executor(X) == 10 and not executor.stats().fallback_calls
