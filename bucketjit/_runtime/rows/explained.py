"""What a call of `map` would do: `MapExplanation`, and how it is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from bucketjit._compile.rows import rows_key
from bucketjit._events import counted, shown
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.rows.examples import Examples
from bucketjit._runtime.rows.kinds import Alone
from bucketjit._runtime.rows.map import MapOptions
from bucketjit._runtime.rows.run import MapCall
from bucketjit._runtime.statistics import FrozenDict, share


@dataclass(frozen=True)
class ExplainedGroup:
    """Examples of one bucket, and the batches that they run in.

    Attributes:
        bucket: The padded size of each variable.
        examples: How many examples there are.
        batches: How many rows the executable of each batch takes.
        missing: The row counts that have no executable yet.
        tokens: Padded tokens of one example.
        real: Elements of the examples that are not padding.
        total: Elements of all batches, padding and spare rows included.
    """

    bucket: Mapping[str, int]
    examples: int
    batches: tuple[int, ...]
    missing: tuple[int, ...]
    tokens: int
    real: int
    total: int

    def __str__(self) -> str:
        batches = Counter(self.batches).items()
        rows = ", ".join(f"{n} x {counted(count, 'row')}" for count, n in batches)
        told = f"{shown(self.bucket)}: {counted(self.examples, 'example')} in {rows}"
        new = f", to compile: {', '.join(map(str, self.missing))} rows" if self.missing else ""
        return f"{told}, {share(self.total - self.real, self.total):.0%} padding{new}"


@dataclass(frozen=True)
class MapExplanation:
    """What a call of `BucketedExec.map` would do. ``print`` it.

    Attributes:
        mapped: The arguments that are lists of examples.
        shared: The other arguments.
        examples: How many examples there are.
        groups: The examples that run in batches, by bucket.
        alone: How many examples run one by one, by reason.
    """

    mapped: tuple[str, ...]
    shared: tuple[str, ...]
    examples: int
    groups: tuple[ExplainedGroup, ...]
    alone: Mapping[str, int]

    @property
    def padding_waste(self) -> float:
        """Share of padding in what the batches compute, 0 to 1."""
        total = sum(group.total for group in self.groups)
        return share(total - sum(group.real for group in self.groups), total)

    def __str__(self) -> str:
        lines = [
            f"{counted(self.examples, 'example')}; lists: {', '.join(self.mapped)}; "
            f"shared: {', '.join(self.shared) or 'none'}"
        ]
        lines += [f"  {group}" for group in self.groups]
        alone = self.alone.items()
        lines += [f"  one by one, {counted(count, 'example')}: {why}" for why, count in alone]
        if self.groups:
            lines.append(f"  padding: {self.padding_waste:.0%} of what is computed")
        return "\n".join(lines)


def explain_map(engine: Engine, examples: Examples, options: MapOptions) -> MapExplanation:
    """Explain a call of `map`; nothing is compiled or run."""
    call = MapCall(engine, examples, options.out, options.token_budget, options.is_stacked)
    summed = options.reduce is not None
    count, groups, alone = 0, [], Counter[str]()
    for window in call.windows():
        count += len(window)
        call.expect(window)
        ways = (row.kind.way for row in window)
        alone.update(way.reason for way in ways if isinstance(way, Alone))
        for planned in call.plan(window, summed):
            way, given = planned.way, (summed, planned.in_turn)
            keys = {
                n: rows_key(way.program, way.bucket, call.kinds.rows(n, *given))
                for n in planned.rows
            }
            groups.append(
                ExplainedGroup(
                    bucket=FrozenDict(way.bucket),
                    examples=len(planned.members),
                    batches=tuple(planned.rows),
                    missing=tuple(n for n, key in keys.items() if key not in engine.cache),
                    tokens=way.tokens,
                    real=sum(window[i].kind.real for i in planned.members),
                    total=sum(planned.rows) * way.elements,
                )
            )
    shared = tuple(examples.words[n] for n in examples.given if n not in examples.mapped)
    return MapExplanation(examples.names, shared, count, tuple(groups), FrozenDict(alone))
