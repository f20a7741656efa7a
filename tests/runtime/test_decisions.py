"""What a call does is decided once: the engine, `explain`, warm-up and the call itself agree."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec, Fallback, Overflow
from bucketjit._runtime.decisions import Because, Decision, Masked, Unpadded
from bucketjit.errors import BucketOverflowError, FallbackError

pytestmark = pytest.mark.filterwarnings("ignore::bucketjit.errors.FallbackWarning")


def rows(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 7


def up_to(largest: int, overflow: Overflow, fn: Callable[..., Any]) -> BucketedExec:
    return BucketedExec(fn).with_pow2(max=largest).with_overflow(overflow)


def centered(x: Any) -> Any:
    return x - x.mean(0)


def doubled(x: Any) -> Any:
    return 2 * x


def with_reference(x: Any) -> Any:
    held = jax.new_ref(x)
    held[...] = held[...] + 1
    return held[...] * x


def by_parity(x: Any) -> Any:
    return x * (2 if x.shape[0] % 2 else 3)


class Case(NamedTuple):
    """A call, and what it does.

    Attributes:
        executor: Makes the executor.
        args: The argument.
        kind: The kind of decision; None if deciding raises.
        because: Why it runs exact, if it does.
        shown: The kind that `explain` shows; None where it raises.
        error: What the call raises; None if it returns.
    """

    executor: Callable[[], BucketedExec]
    args: tuple[Any, ...]
    kind: type[Decision] | None
    because: Because | None = None
    shown: str | None = "exact"
    error: type[Exception] | None = None


def masked(make: Callable[[], BucketedExec], *shape: int) -> Case:
    return Case(make, (rows(*shape),), Masked, None, "masked")


def exact(make: Callable[[], Any], because: Because, *shape: int, error: Any = None) -> Case:
    return Case(make, (rows(*shape),), Unpadded, because, error=error)


def one_size_exact() -> BucketedExec:
    executor = BucketedExec(lambda x: x.sum(), dynamic_axes="b, s").with_pow2("b", max=4)
    return executor.with_pow2("s").with_overflow(Overflow.EXACT)


def of_references(**options: Any) -> BucketedExec:
    return BucketedExec(with_reference, **options).with_pow2()


CASES = {
    "masked": masked(lambda: BucketedExec(centered).with_pow2(), 3, 2),
    "at the sizes of a guard": masked(lambda: BucketedExec(by_parity).with_pow2(), 5),
    "masked, one size exact": masked(one_size_exact, 9, 3),
    "no open axis": exact(
        lambda: BucketedExec(doubled, dynamic_axes=(None,)).with_pow2(), Because.NO_OPEN_AXIS, 3
    ),
    "size 0": exact(lambda: BucketedExec(doubled).with_pow2(), Because.EMPTY, 0, 2),
    "beyond the largest bucket, exact": exact(
        lambda: up_to(4, Overflow.EXACT, centered), Because.BEYOND, 9, 2
    ),
    "beyond the last bucket, extended": masked(lambda: up_to(4, Overflow.EXTEND, centered), 9, 2),
    "no rule": exact(of_references, Because.UNMASKED, 5),
    "no rule, and that is an error": exact(
        lambda: of_references(fallback=Fallback.ERROR), Because.UNMASKED, 5, error=FallbackError
    ),
    "beyond the largest bucket": Case(
        lambda: up_to(4, Overflow.ERROR, centered),
        (rows(9, 2),),
        None,
        None,
        None,
        BucketOverflowError,
    ),
}


def decided(executor: BucketedExec, args: tuple[Any, ...]) -> Decision:
    engine = executor._engine
    call = engine.signer.sign(args, {})
    return engine.chosen(call)[1]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_call_does_what_is_decided(case: Case) -> None:
    executor = case.executor()
    if case.error is not None:
        with pytest.raises(case.error):
            executor(*case.args)
    else:
        fn = executor.__wrapped__
        np.testing.assert_allclose(
            executor(*case.args), jax.jit(fn)(*case.args), rtol=1e-5, atol=1e-6
        )
    if case.kind is None:
        with pytest.raises(case.error):
            decided(executor, case.args)
        return
    # A program that no rule masks is known to be such once it is built.
    decision = decided(executor, case.args)
    assert type(decision) is case.kind
    entries = [key for key, _ in executor._engine.cache.items()]
    match decision:
        case Masked():
            assert entries == [decision.key]
        case Unpadded():
            assert decision.because is case.because
            assert len(entries) == (case.error is None)
            assert all(type(key[0]).__name__ != "Program" for key in entries)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_explain_shows_what_is_decided(case: Case) -> None:
    executor = case.executor()
    if case.shown is None:
        with pytest.raises(case.error or AssertionError):
            executor.explain(*case.args)
        return
    before = executor.explain(*case.args)
    if case.error is None:
        executor(*case.args)
    after = executor.explain(*case.args)
    assert before.kind == after.kind == case.shown
    decision = decided(executor, case.args)
    if isinstance(decision, Masked) and case.kind is Masked:
        assert dict(after.bucket) == dict(decision.bucket)
    if isinstance(decision, Unpadded):
        assert after.reason == decision.why.reason


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_warmup_compiles_what_is_decided(case: Case) -> None:
    executor = case.executor()
    report = executor.warmup(*case.args, progress=False)
    keys = [key for key, _ in executor._engine.cache.items()]
    assert bool(report.failed) == (case.error is not None)
    if case.error is None:
        executor(*case.args)  # nothing is left to compile
        assert [key for key, _ in executor._engine.cache.items()] == keys
        assert executor.stats().compiles == len(keys) == len(report.compiled)
    is_unmasked = case.because in (Because.UNMASKED, Because.EMPTY) and case.error is None
    assert bool(report.exact) == is_unmasked


def test_without_a_strategy_nothing_is_decided() -> None:
    executor = BucketedExec(centered)
    x = rows(3, 2)
    assert executor.explain(x).kind == "exact" and "no strategy" in executor.explain(x).reason
    report = executor.warmup(x, progress=False)
    executor(x)
    assert executor.stats().compiles == len(report.compiled) == 1


def test_a_decision_compiles_nothing() -> None:
    executor = BucketedExec(lambda x: jnp.tanh(x).sum()).with_pow2()
    assert isinstance(decided(executor, (rows(5),)), Masked)
    assert executor.cache_size() == 0 and executor.stats().calls == 0
