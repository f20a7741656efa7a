"""The command ``plan``: fits buckets to the sizes of past calls, and compares powers of two."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from bucketjit._api.commands.command import (
    Command,
    CommandError,
    UsageError,
    positive_int,
    print_table,
    read_text,
    shown_name,
)
from bucketjit._events import counted
from bucketjit.strategies import Assessment, Pow2, Strategy, assess_joint, fit

_LARGEST_MULTIPLE = 2**40  # the largest N of --multiple-of
_DESCRIPTION = """\
Fit buckets to the sizes of past calls, and compare powers of two: how many executables each plan
needs, and which share of the work is padding. LENGTHS.txt has one call a line: its size, or the
sizes of several dimension variables, separated by white space or commas. A first line may name
them:

    b, s
    32, 17
    8, 120

Several variables are planned together: there is an executable for each combination of their
boundaries that occurs.
"""


class _Plan(NamedTuple):
    """The strategies by variable, the buckets that are used, and what they need and pad."""

    name: str
    strategies: Mapping[str, Strategy]
    buckets: list[tuple[int, ...]]
    assessment: Assessment


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "lengths",
        metavar="LENGTHS.txt",
        nargs="?",
        default="-",
        help="the sizes; standard input by default",
    )
    parser.add_argument(
        "--k", type=positive_int, default=8, help="how many executables there may be (default: 8)"
    )
    parser.add_argument(
        "--multiple-of",
        type=_multiple,
        action="append",
        default=[],
        metavar="[DIM=]N",
        help="round buckets up to multiples of N, those of one variable or all",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _multiple(text: str) -> tuple[str | None, int]:
    dim, equals, number = text.rpartition("=")
    found = positive_int(number)
    if found > _LARGEST_MULTIPLE:
        raise argparse.ArgumentTypeError(f"expected at most {_LARGEST_MULTIPLE}, got {number}")
    return (dim if equals else None), found


def _run(options: argparse.Namespace) -> None:
    source = shown_name(options.lengths)
    sizes = parse_lengths(read_text(options.lengths), source)
    multiples = _multiples(options.multiple_of, list(sizes))
    # A call with a size of 0 runs exact, in no bucket, so it does not count.
    calls = [call for call in zip(*sizes.values(), strict=True) if all(call)]
    sizes = dict(zip(sizes, map(list, zip(*calls, strict=True)), strict=True))
    plans = _plans(sizes, options.k, multiples)
    if options.json:
        print(json.dumps(_as_json(sizes, options.k, plans), indent=2))
        return
    print_table(
        f"{counted(len(calls), 'call')} of {source}, at most {options.k} executables",
        ("plan", "executables", "waste", "strategy"),
        [
            (p.name, f"{p.assessment.executables:,}", f"{p.assessment.waste:.1%}", _code(p))
            for p in plans
        ],
        numeric=("executables", "waste"),
    )


def _plans(sizes: Mapping[str, list[int]], k: int, multiples: Mapping[str, int]) -> list[_Plan]:
    """Powers of two, the fitted plan, and of one variable a fitted plan of as many executables."""

    def plan(name: str, chosen: Mapping[str, Strategy]) -> _Plan:
        calls = {*zip(*sizes.values(), strict=True)}
        buckets = {tuple(chosen[d].bucket(n) for d, n in zip(sizes, c, strict=True)) for c in calls}
        return _Plan(name, chosen, sorted(buckets), assess_joint(chosen, sizes))

    pow2 = plan("pow2", {dim: Pow2(multiple_of=multiples[dim]) for dim in sizes})
    plans = [pow2, plan("fitted", fit(sizes, k, multiple_of=multiples))]
    as_many = pow2.assessment.executables
    if len(sizes) == 1 and as_many != k:
        plans.append(plan("fitted, as pow2", fit(sizes, as_many, multiple_of=multiples)))
    return plans


def _multiples(given: list[tuple[str | None, int]], dims: list[str]) -> dict[str, int]:
    """The multiple for each variable: the one given for it, else the one given for all, else 1."""
    multiples = dict.fromkeys(dims, 1)
    for dim, number in sorted(given, key=lambda pair: pair[0] is not None):
        if dim is None:
            multiples = dict.fromkeys(dims, number)
        elif dim in multiples:
            multiples[dim] = number
        else:
            raise UsageError(f"--multiple-of: no variable {dim!r}, there are {', '.join(dims)}")
    return multiples


def _code(plan: _Plan) -> str:
    """The strategies as Python code."""
    if len(plan.strategies) == 1:
        return repr(*plan.strategies.values())
    return ", ".join(f"{dim}: {strategy!r}" for dim, strategy in plan.strategies.items())


def _as_json(sizes: Mapping[str, list[int]], k: int, plans: list[_Plan]) -> dict[str, Any]:
    """The output of ``--json``. Waste is a share, 0 to 1."""
    return {
        "calls": len(next(iter(sizes.values()))),
        "k": k,
        "largest": {dim: max(column) for dim, column in sizes.items()},
        "plans": [
            {
                "name": plan.name,
                "strategy": _code(plan),
                "executables": plan.assessment.executables,
                "waste": round(plan.assessment.waste, 6),
                "buckets": [dict(zip(sizes, bucket, strict=True)) for bucket in plan.buckets],
            }
            for plan in plans
        ],
    }


_MOST_COLUMNS = 8


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
    columns: list[list[int]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].replace(",", " ").replace(";", " ").split()
        if not words:
            continue
        if not names and all(word.isidentifier() for word in words):
            if len(set(words)) < len(words):
                raise CommandError(f"{source}, line {number}: each column needs a name of its own")
            names = words
            columns = [[] for _ in names]
            continue
        if len(words) > _MOST_COLUMNS:
            raise CommandError(
                f"{source}, line {number}: expected one call a line, with a column for each of at "
                f"most {_MOST_COLUMNS} variables, got {len(words)} columns"
            )
        if not columns:
            names = ["n"] if len(words) == 1 else [f"dim{i}" for i in range(len(words))]
            columns = [[] for _ in names]
        if len(words) != len(columns):
            raise CommandError(
                f"{source}, line {number}: expected {len(columns)} sizes, got {len(words)}"
            )
        for column, word in zip(columns, words, strict=True):
            # Digits alone: int() takes signs, underscores and digits of other scripts too.
            if not (word.isascii() and word.isdigit() and len(word) < 19):
                raise CommandError(f"{source}, line {number}: expected a size, got {word!r}")
            column.append(int(word))
    if not any(all(call) for call in zip(*columns, strict=True)):
        raise CommandError(f"{source} holds no sizes; expected one call a line")
    return dict(zip(names, columns, strict=True))


COMMAND = Command(
    name="plan",
    summary="fit buckets to the sizes of past calls",
    description=_DESCRIPTION,
    add_arguments=_add_arguments,
    run=_run,
)
