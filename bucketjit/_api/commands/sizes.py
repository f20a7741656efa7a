"""The commands of sizes: ``plan`` fits buckets to them, ``bench`` measures calls of many."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit._api.commands.command import (
    JSON,
    CommandError,
    argument,
    command,
    positive_int,
    print_tables,
    read_text,
    shown_name,
)
from bucketjit._api.executor import BucketedExec
from bucketjit._events import counted
from bucketjit._stages.report import Table
from bucketjit.strategies import Pow2, Strategy, assess_joint, fit

# --- plan ---

_MOST_COLUMNS = 8


@command(
    "plan",
    "fit buckets to the sizes of past calls",
    argument("lengths", metavar="LENGTHS.txt", nargs="?", default="-", help="sizes (default: -)"),
    argument("--k", type=positive_int, default=8, help="the most executables (default: 8)"),
    argument("--multiple-of", metavar="N", type=positive_int, default=1, help="divides buckets"),
    JSON,
)
def plan(options: argparse.Namespace) -> None:
    """Fit buckets to the sizes of past calls, and compare powers of two.

    It tells how many executables each plan needs, and which share of the work is padding.
    LENGTHS.txt has one call a line: its size, or the sizes of several dimension variables,
    separated by white space or commas. A first line may name them:

        b, s
        32, 17
        8, 120

    Several variables are planned together: there is an executable for each combination of their
    boundaries that occurs.
    """
    source, k = shown_name(options.lengths), options.k
    columns = parse_lengths(read_text(options.lengths), source)
    # A call with a size of 0 runs exact, in no bucket, so it does not count.
    calls = [call for call in zip(*columns.values(), strict=True) if all(call)]
    sizes = dict(zip(columns, map(list, zip(*calls, strict=True)), strict=True))
    pow2 = _plan("pow2", dict.fromkeys(sizes, Pow2(multiple_of=options.multiple_of)), sizes)
    plans = [pow2, _plan("fitted", fit(sizes, k, multiple_of=options.multiple_of), sizes)]
    if len(sizes) == 1 and (as_many := pow2["executables"]) != k:
        fitted = fit(sizes, as_many, multiple_of=options.multiple_of)
        plans.append(_plan("fitted, as pow2", fitted, sizes))
    if options.json:
        largest = {dim: max(column) for dim, column in sizes.items()}
        report = {"calls": len(calls), "k": k, "largest": largest, "plans": plans}
        print(json.dumps(report, indent=2))
        return
    title = f"{counted(len(calls), 'call')} of {source}, at most {k} executables"
    heads = ("plan", "executables", "waste", "strategy")
    rows = [(p["name"], f"{p['executables']:,}", f"{p['waste']:.1%}", p["strategy"]) for p in plans]
    print_tables([Table(title, heads, rows, ("executables", "waste"))])


def _plan(
    name: str, chosen: Mapping[str, Strategy], sizes: Mapping[str, list[int]]
) -> dict[str, Any]:
    """A plan as ``--json`` tells it; its strategies are Python code."""
    calls = {*zip(*sizes.values(), strict=True)}
    buckets = {tuple(chosen[d].bucket(n) for d, n in zip(sizes, c, strict=True)) for c in calls}
    assessment = assess_joint(chosen, sizes)
    code = [
        f"{dim}: {strategy!r}" if len(sizes) > 1 else repr(strategy)
        for dim, strategy in chosen.items()
    ]
    return {
        "name": name,
        "strategy": ", ".join(code),
        "executables": assessment.executables,
        "waste": round(assessment.waste, 6),
        "buckets": [dict(zip(sizes, bucket, strict=True)) for bucket in sorted(buckets)],
    }


def parse_lengths(text: str, source: str) -> dict[str, list[int]]:
    r"""Read the columns of a file of sizes.

    Columns are separated by white space, commas or semicolons. Empty lines, and what follows a
    ``#``, do not count. A first line of names names the columns; without one they are ``n``, or
    ``dim0``, ``dim1`` and so on.

    Args:
        text: The text of the file.
        source: Name of the file in messages.

    Returns:
        The sizes in each column, by its name.

    Raises:
        CommandError: If a line is malformed, or no call has only sizes of at least 1.

    Examples:
        >>> parse_lengths("17\n30  # the second call\n", "lengths.txt")
        {'n': [17, 30]}
        >>> parse_lengths("b, s\n4, 17\n2, 30\n", "lengths.csv")
        {'b': [4, 2], 's': [17, 30]}
    """
    names: list[str] = []
    calls: list[list[int]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        where, words = f"{source}, line {number}", re.findall(r"[^\s,;]+", line.partition("#")[0])
        if not words:
            continue
        if not names:
            is_head = all(word.isidentifier() for word in words)
            places = ["n"] if len(words) == 1 else [f"dim{i}" for i in range(len(words))]
            names = words if is_head else places
            if len({*names}) < len(names) or len(names) > _MOST_COLUMNS:
                raise CommandError(
                    f"{where}: expected one call a line, with a column for each of at most "
                    f"{_MOST_COLUMNS} variables of different names, got {len(words)} columns"
                )
            if is_head:
                continue
        if len(words) != len(names):
            raise CommandError(f"{where}: expected {len(names)} sizes, got {len(words)}")
        # Digits alone: int() takes signs, underscores and digits of other scripts too.
        if wrong := [word for word in words if not re.fullmatch("[0-9]{1,18}", word)]:
            raise CommandError(f"{where}: expected a size, got {wrong[0]!r}")
        calls.append([*map(int, words)])
    if not any(map(all, calls)):
        raise CommandError(f"{source} holds no sizes; expected one call a line")
    return dict(zip(names, map(list, zip(*calls, strict=True)), strict=True))


# --- bench ---

_WIDTH = 64  # columns of each argument
_LARGEST = 2**12  # rows of an argument at most: attention is quadratic in them


@command(
    "bench",
    "measure bucketing by hand, jax.jit and bucketjit on this machine",
    argument("--calls", type=positive_int, default=60, metavar="N", help="default: 60"),
    argument("--largest", type=positive_int, default=64, metavar="N", help="default: 64"),
    JSON,
)
def bench(options: argparse.Namespace) -> None:
    """Run one function over a stream of ragged calls in three ways, and compare them.

        by hand     padding to powers of two and masks, both written by hand
        jax.jit     unpadded: one compile for each size
        bucketjit   bucketjit.jit(function): padding and masks derived

    Cold is the whole stream, compiles included; warm is the median of a call when the stream comes
    again. It takes about 15 seconds.
    """
    if options.largest > _LARGEST:
        raise CommandError(f"--largest must be at most {_LARGEST:,}")
    # Distributed like the lengths of sentences: many small sizes, a few large ones.
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(np.log(options.largest / 4), 0.7, options.calls)
    sizes = [min(options.largest, max(1, int(n))) for n in drawn]
    batches = [rng.standard_normal((n, _WIDTH)).astype(np.float32) for n in sizes]
    jax.block_until_ready(jnp.zeros(1))  # start the backend before anything is measured
    ways = {way: _measure(way, run, batches) for way, run in _ways().items()}
    device = str(jax.devices()[0])
    if options.json:
        print(json.dumps({"sizes": sizes, "device": device, "ways": ways}, indent=2))
        return
    title = f"{counted(len(sizes), 'call')} of {counted(len(set(sizes)), 'size')} on {device}"
    rows = [(way, f"{r['cold_s']:.2f} s", f"{r['warm_us']:,.0f} us") for way, r in ways.items()]
    print_tables([Table(title, ("way", "cold", "warm"), rows, ("cold", "warm"))])


def _measure(way: str, run: Callable[[Any], Any], batches: list[Any]) -> dict[str, float]:
    """Seconds of the first pass over the calls, and microseconds of a call in the second one."""

    def passed() -> list[float]:
        took = []
        for x in batches:
            began = time.perf_counter()
            jax.block_until_ready(run(x))
            took.append(time.perf_counter() - began)
        return took

    cold = sum(passed())
    if not np.allclose(run(batches[0]), _pooled(batches[0]), rtol=1e-2, atol=1e-3):
        raise CommandError(f"{way} computes something else: nothing is measured")
    return {"cold_s": cold, "warm_us": 1e6 * float(np.median(passed()))}


def _pooled(x: Any) -> Any:
    """Attention over the rows, then their mean. The contractions and the softmax need masks too."""
    scores = x @ x.mT / _WIDTH**0.5
    return jnp.mean(jax.nn.softmax(scores, axis=-1) @ x, axis=0)


def _ways() -> dict[str, Callable[[Any], Any]]:
    @jax.jit
    def masked(n: Any, x: Any) -> Any:
        is_real = jnp.arange(x.shape[0]) < n
        scores = jnp.where(is_real, x @ x.mT / _WIDTH**0.5, -jnp.inf)
        rows = jax.nn.softmax(scores, axis=-1) @ x
        return jnp.sum(jnp.where(is_real[:, None], rows, 0), axis=0) / n

    def by_hand(x: Any) -> Any:
        padded = np.zeros((1 << (len(x) - 1).bit_length(), _WIDTH), np.float32)
        padded[: len(x)] = x
        return masked(np.int32(len(x)), padded)

    bucketed = BucketedExec(_pooled).with_pow2()
    return {"by hand": by_hand, "jax.jit": jax.jit(_pooled), "bucketjit": bucketed}
