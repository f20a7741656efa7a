"""Run one of JAX's cases with open axes, padded and exact.

Part ``a`` maps the case over an open batch axis, ``g`` its gradient. Part ``b`` opens every axis
of every argument, one at a time; where JAX wants other axes to agree with it, together with
axes of the same size. The driver knows no primitive: it looks at shapes only.
"""

import dataclasses
import functools
import itertools
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax._src.traceback_util import include_filename

import bucketjit
from bucketjit import BucketedExec, Fallback
from bucketjit._ir.program import Leaf, TraceRefused
from bucketjit._jax.patches import lifetimes
from bucketjit._masking.rules import default_rules
from bucketjit._tracing.symbolic import trace
from bucketjit.errors import FallbackError, MaskingError, ShapeCheckError
from tests.comparison import filtering
from tests.conformance.compare import difference
from tests.conformance.harnesses import Harness
from tests.conformance.outcome import (
    BAD,
    ERROR,
    FALLBACK,
    MASKED,
    UNSUPPORTED,
    UNTRACEABLE,
    WRONG,
    Outcome,
)
from tests.harness import POISONS, Arg, Case, Masked, equations, scalar_of

ROWS = 3
BUCKET = 4
LIMIT = 120  # seconds a case may take
show_tracebacks = False  # of what is not masked, to look into one case

Axis = tuple[int, int]  # argument, axis


class Stop(Exception):
    """A case is decided: its kind and the reason."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


class _TooSlow(BaseException):
    """Not an `Exception`, which tracing would take for a refusal."""


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: Any) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _is_our_own(error: BaseException | None) -> bool:
    """True if bucketjit raised it, not JAX nor the case."""
    if error is None:
        return False
    frames = traceback.extract_tb(error.__traceback__)
    passing = lifetimes.__file__  # hands calls of JAX on
    frames = [f for f in frames if include_filename(f.filename) and f.filename != passing]
    ours = os.path.dirname(bucketjit.__file__)
    hooks = ("fail", "_no_attribute", "reporting")  # say what a plain size says
    if not frames or frames[-1].name in hooks:
        return False
    return frames[-1].filename.startswith(ours)


def is_defect(error: MaskingError) -> bool:
    """True if a rule failed, rather than refused."""
    return "defect of" in error.remedy


def decided_by(error: Exception) -> Stop:
    """What an exception of the masked run says about the case."""
    if isinstance(error, Stop):
        return error
    if isinstance(error, FallbackError) and isinstance(error.__cause__, MaskingError):
        error = error.__cause__
    if isinstance(error, TraceRefused):
        kind = ERROR if _is_our_own(error.cause) else UNTRACEABLE
        return Stop(kind, error.reason)
    if isinstance(error, MaskingError):
        return Stop(ERROR if is_defect(error) else FALLBACK, error.reason)
    frames = [
        f"{os.path.basename(f.filename)}:{f.lineno}"
        for f in traceback.extract_tb(error.__traceback__)
        if f"{os.sep}bucketjit{os.sep}" in f.filename
    ]
    return Stop(ERROR, f"{_first_line(error)} via {' '.join(frames[-2:])}")


def _decided(
    harness: Harness, part: str, label: str, run: Callable[[], None], limit: int
) -> Outcome:
    """What becomes of a case, or of some of its axes, when it is run."""
    began, kind, reason = time.perf_counter(), MASKED, ""
    try:
        # Who raised an error is read off its frames, and errors have all of them.
        with filtering("off"), _time_limit(limit), warnings.catch_warnings(action="ignore"):
            run()
    except _TooSlow:
        kind, reason = ERROR, f"took more than {limit} s"
    except Exception as error:
        stop = decided_by(error)
        if show_tracebacks and stop.kind in (*BAD, FALLBACK):
            traceback.print_exc()
        kind, reason = stop.kind, stop.reason
    seconds = time.perf_counter() - began
    return Outcome(harness.name, harness.primitive, part, label, kind, reason, seconds)


def _exact(fn: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """The plain run.

    Raises:
        Stop: JAX cannot run it.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            return jax.tree_util.tree_leaves(jax.block_until_ready(jax.jit(fn)(*args)))
    except Exception as error:
        raise Stop(UNSUPPORTED, f"exact: {_first_line(error)}") from error


class Poisoned(Masked):
    """A function with open axes, at one bucket, the padding of every equation poisoned.

    Args:
        fn: The function.
        args: Arguments at their logical shapes.
        names: The variable of each open axis.
        sizes: Logical size of each variable.

    Raises:
        Stop: The program holds for one size only.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        names: Mapping[Axis, str],
        sizes: Mapping[str, int],
    ) -> None:
        shapes = [
            tuple(names.get((i, axis), n) for axis, n in enumerate(x.shape))
            for i, x in enumerate(args)
        ]
        arguments = [
            Arg(", ".join(map(str, shape)), x.dtype.name)
            for shape, x in zip(shapes, args, strict=True)
        ]
        super().__init__(Case("case", fn, tuple(arguments)), fn, default_rules())
        leaves = [
            Leaf(f"arg{i}", shape, x.dtype)
            for i, (shape, x) in enumerate(zip(shapes, args, strict=True))
        ]
        tree = jax.tree_util.tree_structure((tuple(args), {}))
        self.traced = trace(fn, tree, leaves, sizes)
        self._programs.append(self.traced)
        # A bucket beyond the sizes that agrees with the guards.
        buckets = ({v: n + m for v, n in sizes.items()} for m in (3, 2, 4, 1, 5, 6, 8, 12, 16))
        bucket = next(filter(self.traced.admits, buckets), None)
        if bucket is None:
            guards = ", ".join(map(str, self.traced.guards))
            raise Stop(UNTRACEABLE, f"holds for one size only: {guards}")
        self.bucket = bucket


# --- part a: an open batch axis ---------------------------------------------------------------


def gradient(fn: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """The gradient of a scalar of ``fn`` by its real float arguments.

    Raises:
        Stop: There is none.
    """
    wrt = tuple(i for i, x in enumerate(args) if jax.numpy.issubdtype(x.dtype, np.floating))
    if not wrt:
        raise Stop(UNSUPPORTED, "no float argument")
    return jax.grad(scalar_of(fn), argnums=wrt)


def mapped(harness: Harness, part: str = "a", limit: int = LIMIT) -> Outcome:
    """Map a case over an open batch axis: by `BucketedExec`, and once more with poison."""

    def run() -> None:
        if not harness.supported:
            raise Stop(UNSUPPORTED, "JAX says so")
        rows = [harness.make(seed) for seed in range(ROWS)]
        if not rows[0]:
            raise Stop(UNSUPPORTED, "no array argument to map over")
        fn = gradient(harness.fn, rows[0]) if part == "g" else harness.fn
        _check_mapped(jax.vmap(fn), [np.stack(x) for x in zip(*rows, strict=True)], harness, part)

    return _decided(harness, part, "batch", run, limit)


def _check_mapped(
    fn: Callable[..., Any], args: Sequence[np.ndarray], harness: Harness, part: str
) -> None:
    # Rows are mapped, so those of a smaller batch are the first rows of a larger one.
    want = _exact(fn, args)

    def check(got: Any, rows: int, context: str) -> None:
        first = [x[:rows] for x in want]
        leaves = jax.tree_util.tree_leaves(got)
        found = difference(
            leaves, first, harness.primitive, gradient=part == "g", tied_keys=harness.tied_keys
        )
        if found:
            raise Stop(WRONG, f"batch {rows}, {context}: {found}")

    executor = BucketedExec(fn, dynamic_axes=["b, ..."] * len(args), fallback=Fallback.ERROR)
    executor = executor.with_buckets([BUCKET])
    for rows in (ROWS, 1):
        check(executor(*(x[:rows] for x in args)), rows, "BucketedExec")
    if executor.cache_size() != 1:
        raise Stop(UNTRACEABLE, f"{executor.cache_size()} executables for one bucket")
    names = {(i, 0): "b" for i in range(len(args))}
    poisoned = Poisoned(fn, args, names, {"b": ROWS})
    for rows, poison in itertools.product((ROWS, 1), POISONS):
        sizes = {"b": rows}
        if poisoned.traced.admits(sizes):
            got = poisoned([x[:rows] for x in args], sizes, poison)
            check(got, rows, f"poison {poison}")


# --- part b: every axis of every argument -----------------------------------------------------


def _together(axis: Axis, shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[Axis, ...]]:
    """What to open: the axis alone, with another one of its size, with all of them."""
    yield (axis,)
    size = shapes[axis[0]][axis[1]]
    others = [
        (i, k)
        for i, shape in enumerate(shapes)
        for k, n in enumerate(shape)
        if n == size and (i, k) != axis
    ]
    for count in sorted({1, 2, len(others)}):
        if 0 < count <= len(others):
            for more in itertools.combinations(others, count):
                yield tuple(sorted((axis, *more)))


def opened(harness: Harness, only: str = "", limit: int = LIMIT) -> list[Outcome]:
    """Open every axis of every argument of a case.

    Args:
        harness: The case.
        only: Just this, as an outcome's `opened` says it.
        limit: Seconds for each opening.
    """
    args: list[np.ndarray] = []
    want: list[Any] = []

    def plain() -> None:
        if not harness.supported:
            raise Stop(UNSUPPORTED, "JAX says so")
        args.extend(harness.make(0))
        want.extend(_exact(harness.fn, args))

    single = _decided(harness, "b", "", plain, limit)
    if single.kind != MASKED:
        return [single]
    done: dict[tuple[Axis, ...], Outcome] = {}
    for axis in [(i, k) for i, x in enumerate(args) for k, n in enumerate(x.shape) if n > 0]:
        _open_axis(harness, axis, args, want, done, only, limit)
    kept = [o for o in done.values() if not only or o.opened == only]
    return kept or [dataclasses.replace(single, kind=UNSUPPORTED, reason="no axis to open")]


def _open_axis(
    harness: Harness,
    axis: Axis,
    args: Sequence[np.ndarray],
    want: Sequence[Any],
    done: dict[tuple[Axis, ...], Outcome],
    only: str,
    limit: int,
) -> None:
    first: Outcome | None = None
    for axes in _together(axis, [x.shape for x in args]):
        if axes in done:
            if done[axes].kind != UNTRACEABLE:
                return
            continue
        label = "=".join(f"arg{i}[{k}]" for i, k in axes)
        if only and label != only:
            continue
        run = functools.partial(_check_opened, harness, axes, args, want)
        outcome = _decided(harness, "b", label, run, limit)
        if outcome.kind != UNTRACEABLE:
            done[axes] = outcome
            return
        first = first or outcome
    if first is not None:
        done[axis,] = first


def _check_opened(
    harness: Harness, axes: tuple[Axis, ...], args: Sequence[np.ndarray], want: Sequence[Any]
) -> None:
    size = args[axes[0][0]].shape[axes[0][1]]
    poisoned = Poisoned(harness.fn, args, dict.fromkeys(axes, "n"), {"n": size})
    _compare(poisoned, harness, args, want, {"n": size}, POISONS)
    if size > 1:
        _check_smaller(poisoned, harness, axes, args, size - 1)


def _compare(
    poisoned: Poisoned,
    harness: Harness,
    args: Sequence[np.ndarray],
    want: Sequence[Any],
    sizes: Mapping[str, int],
    poisons: Sequence[str],
) -> None:
    for poison in poisons:
        got = poisoned(args, sizes, poison)
        found = difference(got, want, harness.primitive, tied_keys=harness.tied_keys)
        if found:
            size, bucket = sizes["n"], poisoned.bucket["n"]
            raise Stop(WRONG, f"size {size} in {bucket}, poison {poison}: {found}")


def _promises(jaxpr: Any) -> bool:
    """Whether the case promises that its indices are in bounds, as they are at its own size."""
    return any("PROMISE_IN_BOUNDS" in str(eqn.params.get("mode")) for eqn in equations(jaxpr))


def _check_smaller(
    poisoned: Poisoned,
    harness: Harness,
    axes: tuple[Axis, ...],
    args: Sequence[np.ndarray],
    size: int,
) -> None:
    """The same executable one size below, where the case itself still runs there."""
    program = poisoned.traced
    if not program.admits({"n": size}) or _promises(program.jaxpr):
        return
    smaller = list(args)
    for i, axis in axes:
        smaller[i] = np.take(smaller[i], np.arange(size), axis)
    try:
        program.check_reshapes({"n": size})
        want = _exact(harness.fn, smaller)
    except (Stop, ShapeCheckError):
        return
    _compare(poisoned, harness, smaller, want, {"n": size}, ("nan",))
