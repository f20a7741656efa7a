"""What fails for the moment is raised as it is, and nothing is learnt of the function from it."""

import contextlib
import errno
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.errors import InconclusiveDimensionOperation, JaxRuntimeError

from bucketjit import BucketedExec
from bucketjit._ir import dynamic_axes
from bucketjit._raised import is_of_machine
from bucketjit.errors import FallbackWarning, MaskingError, SpecError

ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: MemoryError("planted"),
    lambda: OSError(errno.EMFILE, "planted"),
    lambda: RecursionError("planted"),
    lambda: RuntimeError("planted"),
    lambda: JaxRuntimeError("RESOURCE_EXHAUSTED: planted"),
    lambda: KeyboardInterrupt("planted"),
)
an_error = pytest.mark.parametrize("make", ERRORS, ids=lambda make: type(make()).__name__)


class Moment:
    """Fails when it is reached for the ``which``-th time, and never again."""

    def __init__(self, error: BaseException, which: int = 1) -> None:
        self.error, self.which, self.reached = error, which, 0

    def __call__(self) -> None:
        self.reached += 1
        if self.reached == self.which:
            raise self.error

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """The very error comes out of the block."""
        with pytest.raises(type(self.error)) as caught:
            yield
        assert caught.value is self.error


def rows(n: int) -> np.ndarray:
    return np.arange(2 * n, dtype=np.float32).reshape(n, 2)


@pytest.fixture(autouse=True)
def nothing_runs_exact() -> Iterator[None]:
    with warnings.catch_warnings(action="error", category=FallbackWarning):
        yield


def serves(executor: BucketedExec, fn: Callable[..., Any], sizes: tuple[int, ...] = (3, 5, 7)):
    """Every size is right, and in a bucket."""
    for n in sizes:
        np.testing.assert_allclose(executor(rows(n)), fn(rows(n)), rtol=1e-5)
    stats = executor.stats()
    assert stats.fallback_calls == 0 and not stats.fallback_reasons


# --- which errors those are ----------------------------------------------------------------------


class OfItsOwn(RuntimeError):
    """As the errors of einops are."""


def raised_while(handled: BaseException, error: BaseException, explicit: bool) -> BaseException:
    """As ``raise error`` leaves it, or ``raise error from handled``."""
    error.__context__ = handled
    if explicit:
        error.__cause__ = handled
    return error


@pytest.mark.parametrize(
    "error, expected",
    [
        *((make(), True) for make in ERRORS),
        (np.exceptions.AxisError("planted"), False),
        (FileNotFoundError("planted"), True),
        (TimeoutError("planted"), True),
        (SystemExit(), True),
        (RuntimeError("can't start new thread"), True),
        (NotImplementedError("planted"), False),
        (OfItsOwn("planted"), False),
        (JaxRuntimeError("INTERNAL: planted"), False),
        (JaxRuntimeError("INVALID_ARGUMENT: planted"), False),
        (JaxRuntimeError("UNAVAILABLE: planted"), True),
        (InconclusiveDimensionOperation("planted"), False),
        (TypeError("planted"), False),
        (ValueError("planted"), False),
        (MaskingError("planted"), False),
        (raised_while(TypeError(), RuntimeError("planted"), True), False),
        (raised_while(InconclusiveDimensionOperation(), RuntimeError(), True), False),
        (raised_while(KeyError(), RuntimeError("planted"), False), True),
        (raised_while(MemoryError(), ValueError("planted"), True), True),
        (raised_while(OSError(), TypeError("planted"), False), False),
        (raised_while(RecursionError(), MaskingError("planted"), True), True),
    ],
    ids=lambda x: repr(x) if isinstance(x, BaseException) else str(x),
)
def test_errors_of_the_machine_are_told_from_those_of_the_function(
    error: BaseException, expected: bool
) -> None:
    assert is_of_machine(error) is expected


def column_sums(x: Any) -> Any:
    return x.sum(axis=0)


def summing(moment: Moment) -> BucketedExec:
    """An executor whose rule of sums fails for a moment."""

    def total(ctx: Any, operand: Any, **_: Any) -> Any:
        moment()
        return ctx.bind(ctx.fill(operand, axes=ctx.params["axes"], value=0))

    return BucketedExec(column_sums).with_pow2().with_rules({lax.reduce_sum_p: total})


# --- where they may happen -----------------------------------------------------------------------


@an_error
@pytest.mark.parametrize("spec", [None, "b, _", [0]], ids=["default", "named", "listed"])
def test_at_the_first_trace(make: Callable[[], BaseException], spec: Any) -> None:
    moment = Moment(make())

    def fn(x: Any) -> Any:
        moment()
        return x.mean(axis=0)

    axes = spec if spec is None else (spec,)
    executor = BucketedExec(fn, dynamic_axes=axes).with_pow2()
    with moment.raised():
        executor(rows(3))
    assert executor.cache_size() == 0
    for n in (3, 5, 7):
        executor(rows(n))
    # The one that failed, and one for all sizes. A plain `RuntimeError` may come from symbolic
    # sizes, so the function is traced again at the sizes of the call.
    assert moment.reached == (3 if type(moment.error) is RuntimeError else 2)
    assert executor.cache_size() == 2 and not executor.stats().fallback_calls


@an_error
def test_where_an_axis_is_opened(make: Callable[[], BaseException]) -> None:
    """What the failed call has shown of the sizes is forgotten, too."""
    moment = Moment(make(), which=2)

    def fn(x: Any, y: Any) -> Any:
        moment()
        return x.sum() + y.sum()

    executor = BucketedExec(fn).with_pow2()
    executor(np.ones(3), np.ones(3))
    with moment.raised():
        executor(np.ones(4), np.ones(5))
    executor(np.ones(6), np.ones(6))
    # By the program in which both have one size; a `RuntimeError` is asked again, see above.
    reached = 3 if type(moment.error) is RuntimeError else 2
    assert moment.reached == reached
    executor(np.ones(4), np.ones(5))
    assert moment.reached == reached + 1 and not executor.stats().fallback_calls


@an_error
def test_while_a_bucket_is_built(make: Callable[[], BaseException]) -> None:
    moment = Moment(make())

    executor = summing(moment)
    with moment.raised():
        executor(rows(3))
    serves(executor, column_sums)


@pytest.mark.sampled(5, "3-KeyboardInterrupt")
@an_error
@pytest.mark.parametrize("which", [1, 2, 3, 4])
def test_in_concrete_traces(make: Callable[[], BaseException], which: int) -> None:
    """Of the size at hand, of those that it is compared with, and of a size that comes later.

    Nobody has asked for those that it is compared with, so they are tried again.
    """
    error = make()
    raising: list[BaseException] = []
    concrete: list[int] = []

    def fn(x: Any) -> Any:
        scale = math.sqrt(x.shape[0])  # which cannot be traced with symbolic sizes
        concrete.append(x.shape[0])
        if len(concrete) == which:
            raising.append(error)
            raise error
        return x.sum(axis=0) / scale

    executor = BucketedExec(fn).with_pow2()
    failed = 0
    for n in (13, 27, 41, 55):
        try:
            executor(rows(n))
        except BaseException as caught:
            assert caught is error
            failed += 1
    assert concrete[which - 1] == 27 or which < 4  # three traces make the program
    asked_for = which in (1, 4)
    assert len(raising) == 1 and failed == (asked_for or not isinstance(error, Exception))
    serves(executor, lambda x: x.sum(axis=0) / math.sqrt(len(x)), (13, 27, 41, 55))
    assert executor.cache_size() == 3


@an_error
def test_in_a_warmup(make: Callable[[], BaseException]) -> None:
    moment = Moment(make(), which=2)

    executor = summing(moment)

    def warm_up() -> Any:
        return executor.warmup(rows(3), sizes={"batch": [4, 8, 16]}, progress=False, workers=1)

    if isinstance(moment.error, Exception):
        report = warm_up()
        [(sizes, why)] = report.failed
        assert dict(sizes) == {"batch": 8} and "planted" in why
        assert [dict(at) for at in report.compiled] == [{"batch": 16}, {"batch": 4}]
    else:
        with moment.raised():
            warm_up()
    assert not warm_up().failed
    assert executor.cache_size() == 3
    serves(executor, column_sums, (3, 5, 9))


@an_error
def test_while_a_specification_is_read(
    make: Callable[[], BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    moment = Moment(make())
    plain = dynamic_axes.export.symbolic_shape

    def reading(*args: Any, **options: Any) -> Any:
        moment()
        return plain(*args, **options)

    monkeypatch.setattr(dynamic_axes.export, "symbolic_shape", reading)
    executor = BucketedExec(lambda x: x * 2, dynamic_axes="n, _").with_pow2()
    with moment.raised():
        executor(rows(3))
    serves(executor, lambda x: x * 2)
    with pytest.raises(SpecError, match="is not a size"):
        BucketedExec(lambda x: x * 2, dynamic_axes="n//, _").with_pow2()(rows(3))


# --- what is none of them ------------------------------------------------------------------------


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("how", ["of its own", "in place of another", "after another"])
def test_errors_about_symbolic_sizes_run_exact(how: str) -> None:
    def fn(x: Any) -> Any:
        number = None
        try:
            number = int(x.shape[0])
        except Exception as error:
            if how == "in place of another":
                raise RuntimeError("no number") from error
        if number is None:
            raise OfItsOwn("no number") if how == "of its own" else RuntimeError("no number")
        return x * number if number > 4 else jnp.sin(x) * number

    executor = BucketedExec(fn).with_pow2()
    for n in (3, 5, 6):
        np.testing.assert_allclose(executor(rows(n)), fn(rows(n)), rtol=1e-5)


def test_a_plain_error_in_every_symbolic_trace_says_what_to_do() -> None:
    def fn(x: Any) -> Any:
        if not str(type(x.shape[0])).endswith("'int'>"):
            raise RuntimeError("planted")
        return x

    executor = BucketedExec(fn).with_pow2()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="planted") as caught:
            executor(rows(3))
        told = [note for note in caught.value.__notes__ if "bucketjit" in note]
        assert len(told) == 1 and "leave its axes static" in told[0]
    static = executor.with_dynamic_axes((None,))
    np.testing.assert_array_equal(static(rows(3)), rows(3))
