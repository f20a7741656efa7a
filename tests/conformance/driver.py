"""Run one of JAX's cases with open axes, padded and exact.

Part ``a`` maps the case over an open batch axis, ``g`` its gradient. Part ``b`` opens every axis
of every argument, one at a time; where JAX wants other axes to agree with it, together with
axes of the same size. The driver knows no primitive: it looks at shapes only.
"""

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
from bucketjit._compile.workarounds import hooks, workarounds
from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._ir.expressions import evaluate
from bucketjit._ir.program import Leaf, Program, TraceRefused
from bucketjit._jax.jaxprs import is_jaxpr, open_jaxpr
from bucketjit._jax.patches import lifetimes
from bucketjit._masking.interpreter import interpret
from bucketjit._masking.rules import default_rules
from bucketjit._tracing.symbolic import trace
from bucketjit.errors import FallbackError, MaskingError, ShapeCheckError
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
from tests.harness import POISONS, poison_equations, poison_of, poison_padding, scalar_of

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


@contextmanager
def _whole_tracebacks() -> Iterator[None]:
    """Who raised an error is read off its frames, and errors have all of them."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


def _decide(run: Callable[[], None], limit: int) -> tuple[str, str]:
    try:
        with _whole_tracebacks(), _time_limit(limit), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
    except _TooSlow:
        return ERROR, f"took more than {limit} s"
    except Exception as error:
        stop = decided_by(error)
        if show_tracebacks and stop.kind in (*BAD, FALLBACK):
            traceback.print_exc()
        return stop.kind, stop.reason
    return MASKED, ""


def _exact(fn: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """The plain run.

    Raises:
        Stop: JAX cannot run it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return jax.tree_util.tree_leaves(jax.block_until_ready(jax.jit(fn)(*args)))
    except Exception as error:
        raise Stop(UNSUPPORTED, f"exact: {_first_line(error)}") from error


class Poisoned:
    """A function with open axes, at one bucket, the padding of every equation poisoned.

    Args:
        fn: The function.
        args: Arguments at their logical shapes.
        names: The variable of each open axis.
        sizes: Logical size of each variable.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        names: Mapping[Axis, str],
        sizes: Mapping[str, int],
    ) -> None:
        self._names = names
        leaves = [
            Leaf(
                f"arg{i}",
                tuple(names.get((i, axis), n) for axis, n in enumerate(x.shape)),
                x.dtype,
            )
            for i, x in enumerate(args)
        ]
        tree = jax.tree_util.tree_structure((tuple(args), {}))
        self.program = trace(fn, tree, leaves, sizes)
        self.bucket = _bucket(self.program, sizes)
        self._run = jax.jit(self._masked)

    def _masked(self, values: Any, poison: Any, *padded: Any) -> list[Any]:
        at = BucketSizes(self.bucket, self.program.lower, values)
        needed = workarounds(self.program.jaxpr)
        after = hooks(poison_equations(poison), needed.after())
        return interpret(
            self.program.jaxpr, self.program.consts, padded, at, default_rules(), after=after
        )

    def __call__(self, args: Sequence[Any], sizes: Mapping[str, int], poison: str) -> list[Any]:
        """The masked outputs at these logical sizes, cut to their logical shapes."""
        padded = [
            poison_padding(
                x,
                tuple(
                    self.bucket[self._names[i, axis]] if (i, axis) in self._names else n
                    for axis, n in enumerate(x.shape)
                ),
                poison,
            )
            for i, x in enumerate(args)
        ]
        values = {v: np.int32(n) for v, n in sizes.items()}
        outs = self._run(values, poison_of(poison), *padded)
        return [
            np.asarray(out)[tuple(slice(0, evaluate(d, sizes)) for d in shape)]
            for out, shape in zip(outs, self.program.out_shapes, strict=True)
        ]


def _bucket(program: Program, sizes: Mapping[str, int]) -> dict[str, int]:
    """A bucket beyond the sizes that agrees with the guards.

    Raises:
        Stop: There is none near by: the trace holds for one size only.
    """
    for more in (3, 2, 4, 1, 5, 6, 8, 12, 16):
        bucket = {v: n + more for v, n in sizes.items()}
        if program.fits(bucket):
            return bucket
    guards = ", ".join(map(str, program.guards))
    raise Stop(UNTRACEABLE, f"holds for one size only: {guards}")


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
    began = time.perf_counter()

    def run() -> None:
        if not harness.supported:
            raise Stop(UNSUPPORTED, "JAX says so")
        rows = [harness.make(seed) for seed in range(ROWS)]
        if not rows[0]:
            raise Stop(UNSUPPORTED, "no array argument to map over")
        fn = gradient(harness.fn, rows[0]) if part == "g" else harness.fn
        _check_mapped(jax.vmap(fn), [np.stack(x) for x in zip(*rows, strict=True)], harness, part)

    kind, reason = _decide(run, limit)
    seconds = time.perf_counter() - began
    return Outcome(harness.name, harness.primitive, part, "batch", kind, reason, seconds)


def _check_mapped(
    fn: Callable[..., Any], args: Sequence[np.ndarray], harness: Harness, part: str
) -> None:
    # Rows are mapped, so those of a smaller batch are the first rows of a larger one.
    want = _exact(fn, args)

    def check(got: Any, rows: int, context: str) -> None:
        first = [x[:rows] for x in want]
        leaves = jax.tree_util.tree_leaves(got)
        found = difference(
            leaves,
            first,
            harness.primitive,
            gradient=part == "g",
            tied_keys=harness.tied_keys,
        )
        if found:
            raise Stop(WRONG, f"batch {rows}, {context}: {found}")

    executor = BucketedExec(
        fn, dynamic_axes=["b, ..."] * len(args), fallback=Fallback.ERROR
    ).with_buckets([BUCKET])
    for rows in (ROWS, 1):
        check(executor(*(x[:rows] for x in args)), rows, "BucketedExec")
    if executor.cache_size() != 1:
        raise Stop(UNTRACEABLE, f"{executor.cache_size()} executables for one bucket")
    names = {(i, 0): "b" for i in range(len(args))}
    poisoned = Poisoned(fn, args, names, {"b": ROWS})
    for rows, poison in itertools.product((ROWS, 1), POISONS):
        sizes = {"b": rows}
        if poisoned.program.admits(sizes):
            got = poisoned([x[:rows] for x in args], sizes, poison)
            check(got, rows, f"poison {poison}")


# --- part b: every axis of every argument -----------------------------------------------------


def _label(axes: Sequence[Axis]) -> str:
    return "=".join(f"arg{i}[{axis}]" for i, axis in axes)


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
    began = time.perf_counter()

    def single(kind: str, reason: str) -> list[Outcome]:
        seconds = time.perf_counter() - began
        return [Outcome(harness.name, harness.primitive, "b", "", kind, reason, seconds)]

    if not harness.supported:
        return single(UNSUPPORTED, "JAX says so")
    args: list[np.ndarray] = []
    want: list[Any] = []

    def plain() -> None:
        args.extend(harness.make(0))
        want.extend(_exact(harness.fn, args))

    kind, reason = _decide(plain, limit)
    if kind != MASKED:
        return single(kind, reason)
    shapes = [x.shape for x in args]
    done: dict[tuple[Axis, ...], Outcome] = {}
    for axis in [(i, k) for i, shape in enumerate(shapes) for k in range(len(shape))]:
        if shapes[axis[0]][axis[1]] > 0:
            _open_axis(harness, axis, args, want, done, only, limit)
    kept = [o for o in done.values() if not only or o.opened == only]
    return kept or single(UNSUPPORTED, "no axis to open")


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
        if only and _label(axes) != only:
            continue
        began = time.perf_counter()

        def run(axes: tuple[Axis, ...] = axes) -> None:
            _check_opened(harness, axes, args, want)

        kind, reason = _decide(run, limit)
        seconds = time.perf_counter() - began
        outcome = Outcome(harness.name, harness.primitive, "b", _label(axes), kind, reason, seconds)
        if kind != UNTRACEABLE:
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
    for eqn in jaxpr.eqns:
        if "PROMISE_IN_BOUNDS" in str(eqn.params.get("mode")):
            return True
        for value in jax.tree_util.tree_leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(value) and _promises(open_jaxpr(value)[0]):
                return True
    return False


def _check_smaller(
    poisoned: Poisoned,
    harness: Harness,
    axes: tuple[Axis, ...],
    args: Sequence[np.ndarray],
    size: int,
) -> None:
    """The same executable one size below, where the case itself still runs there."""
    program = poisoned.program
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
