"""Sizes that the program computes, beside eager JAX, and beside `size=` and masks by hand.

    python -m benchmarks.computed
    python -m benchmarks.computed computed-warm

``jax.jit`` refuses ``x[x > 0]``. There are two ways around it. Eager JAX compiles each operation
for each number of selected entries. By hand, one pads to a bucket, gives ``size=`` to
``jnp.nonzero`` or ``jnp.unique``, and masks all that follows by the number of selected entries.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bucketjit
from benchmarks.alone import run_alone
from benchmarks.measuring import in_turn, paired_ratio
from benchmarks.sections import Column, Options, Row, Section, add_ratios, print_sections
from bucketjit import BucketedExec, Fallback
from bucketjit.strategies import Pow2
from examples.compile_counter import CompileCounter

ROWS, WIDTH = 4_000, 64
WEIGHTS = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8
EAGER, BY_HAND, OURS = "eager JAX", "by hand, pow2", "bucketjit, pow2"
TOLERANCE = 1e-4

Call = Callable[[np.ndarray], Any]

# --- what is selected ---------------------------------------------------------------------------


def vector(rng: np.random.Generator, n: int) -> np.ndarray:
    """Floats of which a random share is positive, one at least."""
    x = np.abs(rng.standard_normal(n, np.float32))
    x[rng.random(n) > rng.random()] *= -1
    x[rng.integers(n)] = 1
    return x


def whole_numbers(rng: np.random.Generator, n: int) -> np.ndarray:
    """Floats among which few or many are equal."""
    return rng.integers(0, 10 ** rng.uniform(0.5, 4), n).astype(np.float32)


def rows(rng: np.random.Generator, n: int) -> np.ndarray:
    """Rows of which a random share begins with a positive number."""
    x = rng.standard_normal((n, WIDTH), np.float32)
    x[:, 0] = vector(rng, n)
    return x


# --- masks by hand ------------------------------------------------------------------------------


def _selected(x: Any, mask: Any, n: Any) -> tuple[Any, Any, Any]:
    """What is selected of a padded array, which of it is real, and its number."""
    positions = jnp.arange(len(x))
    mask &= positions < n
    (at,) = jnp.nonzero(mask, size=len(x), fill_value=0)
    count = mask.sum()
    return x[at], positions < count, count


def _mean(x: Any, n: Any) -> Any:
    y, is_real, count = _selected(x, x > 0, n)
    return jnp.where(is_real, y, 0).sum() / count


def _max(x: Any, n: Any) -> Any:
    y, is_real, _ = _selected(x, x > 0, n)
    return jnp.where(is_real, y, -jnp.inf).max()


def _largest_share(x: Any, n: Any) -> Any:
    y, is_real, _ = _selected(x, x > 0, n)
    return jax.nn.softmax(jnp.where(is_real, y, -jnp.inf)).max()


def _unique(x: Any, n: Any) -> tuple[Any, Any]:
    # Infinity is no value of the data here, and the last in order.
    padded = jnp.where(jnp.arange(len(x)) < n, x, jnp.inf)
    values = jnp.unique(padded, size=len(x), fill_value=jnp.inf)
    return values, (values < jnp.inf).sum()


def _matmul(x: Any, n: Any) -> tuple[Any, Any]:
    y, _, count = _selected(x, x[:, 0] > 0, n)
    return y @ WEIGHTS, count


@dataclass(frozen=True)
class Program:
    """A function that selects, the same with masks by hand, and its argument.

    Attributes:
        text: What it is called in tables.
        plain: The function.
        by_hand: ``by_hand(padded, n)``. It returns the result, or the padded result and its size.
        draw: ``draw(rng, n)``, an argument of ``n`` rows.
        is_cut: Whether the result has a computed size.
    """

    text: str
    plain: Callable[[Any], Any]
    by_hand: Callable[[Any, Any], Any]
    draw: Callable[[np.random.Generator, int], np.ndarray]
    is_cut: bool = False

    def executor(self) -> BucketedExec:
        """The function by bucketjit."""
        axes = "n, _" if self.draw is rows else "n"
        return bucketjit.jit(self.plain, dynamic_axes=axes, fallback=Fallback.ERROR, buckets="pow2")

    def expert(self) -> Call:
        """The function with padding and masks by hand."""
        bucket_of, compiled = Pow2().bucket, jax.jit(self.by_hand)

        def call(x: np.ndarray) -> Any:
            n = len(x)
            padded = np.zeros((bucket_of(n), *x.shape[1:]), x.dtype)
            padded[:n] = x
            result = compiled(padded, np.int32(n))
            if not self.is_cut:
                return result
            values, count = result
            return jax.device_put(np.asarray(values)[: int(count)])

        return call


SHARE = Program(
    "softmax(x[x > 0]).max()",
    lambda x: jax.nn.softmax(x[x > 0]).max(),
    _largest_share,
    vector,
)
PROGRAMS = (
    Program("x[x > 0].mean()", lambda x: x[x > 0].mean(), _mean, vector),
    Program("unique(x)", lambda x: jnp.unique(x), _unique, whole_numbers, is_cut=True),
    Program("x[x[:, 0] > 0] @ w", lambda x: x[x[:, 0] > 0] @ WEIGHTS, _matmul, rows, is_cut=True),
    Program("x[x > 0].max()", lambda x: x[x > 0].max(), _max, vector),
)


def _waiting(call: Call) -> Call:
    return lambda x: jax.block_until_ready(call(x))


# --- cold ---------------------------------------------------------------------------------------

_WAYS: dict[str, Callable[[Program], Call]] = {
    EAGER: lambda program: lambda x: program.plain(jnp.asarray(x)),
    BY_HAND: lambda program: program.expert(),
    OURS: lambda program: program.executor(),
}


def start(way: str, calls: int) -> Row:
    """Run the stream in this process, which has not compiled anything.

    Args:
        way: A key of the ways to call the function.
        calls: The number of calls.

    Returns:
        What it took.

    Raises:
        ArithmeticError: A result is wrong.
    """
    counter, rng = CompileCounter(), np.random.default_rng(0)
    stream = [vector(rng, int(n)) for n in rng.integers(500, 1001, calls)]
    before, began = counter.compiles, time.perf_counter()
    call = _waiting(_WAYS[way](SHARE))
    results = [call(x) for x in stream]
    row = {
        "contender": way,
        "calls": calls,
        "counts": len({int((x > 0).sum()) for x in stream}),
        "total_s": time.perf_counter() - began,
        "compiles": counter.compiles - before,
    }
    for x, got in zip(stream, results, strict=True):
        shares = np.exp(x[x > 0] - x.max())
        expected = (shares / shares.sum()).max()
        if not abs(got - expected) <= TOLERANCE * expected:
            raise ArithmeticError(f"{way}: {got} for {len(x)} rows, not {expected}")
    return row


def cold(options: Options) -> list[Row]:
    """The stream in each way, in a process of its own."""
    found: list[Row] = []
    for way in _WAYS:
        arguments = {"way": way, "calls": 2 if options.quick else 40}
        outcome = run_alone("benchmarks.computed:start", arguments)
        if outcome.status != "ok":
            raise RuntimeError(outcome.reason)
        found.append(outcome.value)
    add_ratios(found, EAGER)
    return found


# --- warm ---------------------------------------------------------------------------------------


def warm(options: Options) -> list[Row]:
    """Calls by hand and by bucketjit, in turn; each argument selects another number of rows."""
    rounds, n = (3, 100) if options.quick else (400, ROWS)
    return [_compared(program, rounds, n) for program in PROGRAMS]


def _compared(program: Program, rounds: int, n: int) -> Row:
    rng = np.random.default_rng(1)
    arguments = [program.draw(rng, n) for _ in range(rounds)]
    calls = {"hand": _waiting(program.expert()), "ours": _waiting(program.executor())}
    for x in arguments[:3]:
        expected = program.plain(jnp.asarray(x))
        for call in calls.values():
            np.testing.assert_allclose(call(x), expected, rtol=TOLERANCE, atol=TOLERANCE)
    times = in_turn(calls, [(x,) for x in arguments])
    return {
        "program": program.text,
        "hand_ms": median(times["hand"]) * 1e3,
        "ours_ms": median(times["ours"]) * 1e3,
        "ratio": paired_ratio(times, "ours", "hand"),
    }


# --- compiles -----------------------------------------------------------------------------------


def compiles(options: Options) -> list[Row]:
    """How many executables random sizes and shares take, of all that XLA compiles."""
    calls, programs = (5, PROGRAMS[:1]) if options.quick else (100, (*PROGRAMS, SHARE))
    return [_counted(program, calls) for program in programs]


def _counted(program: Program, calls: int) -> Row:
    counter, rng = CompileCounter(), np.random.default_rng(3)
    sizes = rng.integers(1, 1001, calls).tolist()
    executor, before = program.executor(), counter.compiles
    for n in sizes:
        executor(program.draw(rng, n))
    return {
        "program": program.text,
        "calls": calls,
        "buckets": len(set(map(Pow2().bucket, sizes))),
        "compiles": counter.compiles - before,
        "eager": executor.stats().fallback_calls,
    }


SECTIONS = (
    Section(
        "computed-cold",
        "Computed sizes, cold",
        f"A stream of calls of `{SHARE.text}` on 500 to 1,000 numbers from a cold start, each way "
        "in a process of its own; results are compared with NumPy's. *Counts* is how many "
        "different numbers of entries are selected. Eager JAX compiles its operations for each. "
        f"*Ratio* is to *{EAGER}*.",
        (
            Column("contender", "contender"),
            Column("calls", "calls", "d"),
            Column("counts", "counts", "d"),
            Column("total_s", "total, s", ".2f"),
            Column("ratio", "ratio", ".3f"),
            Column("compiles", "compiles", "d"),
        ),
        "benchmarks.computed:cold",
    ),
    Section(
        "computed-warm",
        "Computed sizes, warm",
        f"{ROWS:,} rows in a bucket of 4,096, NumPy in; each call selects another number of rows. "
        "*By hand* pads, gives `size=` to `nonzero` or `unique`, masks what follows, and cuts on "
        "the host what has a computed size. The two take each call in turn; *ratio* is the median "
        "of the paired ratios. `max` decides by the number of selected rows (it raises for none), "
        "so each run is checked on the host before its result is returned.",
        (
            Column("program", "program"),
            Column("hand_ms", "by hand, ms", ".3f"),
            Column("ours_ms", "bucketjit, ms", ".3f"),
            Column("ratio", "ratio", ".3f"),
        ),
        "benchmarks.computed:warm",
    ),
    Section(
        "computed-compiles",
        "Computed sizes, executables",
        "Calls on 1 to 1,000 rows of which random shares are selected. *Buckets* is how many "
        "powers of two these sizes need, *compiles* all that XLA compiled meanwhile, *eager* the "
        "calls that no executable served.",
        (
            Column("program", "program"),
            Column("calls", "calls", "d"),
            Column("buckets", "buckets", "d"),
            Column("compiles", "compiles", "d"),
            Column("eager", "eager", "d"),
        ),
        "benchmarks.computed:compiles",
    ),
)

if __name__ == "__main__":
    print_sections(SECTIONS, __doc__)
