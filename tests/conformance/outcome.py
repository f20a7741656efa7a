"""What came of one case, and the tables made of many."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MASKED = "masked"
FALLBACK = "fallback"
UNTRACEABLE = "untraceable"
UNSUPPORTED = "unsupported"
WRONG = "wrong"
ERROR = "error"

KINDS = (MASKED, FALLBACK, UNTRACEABLE, UNSUPPORTED, WRONG, ERROR)
BAD = (WRONG, ERROR)


@dataclass(frozen=True)
class Outcome:
    """One case of one part.

    Attributes:
        harness: Name of the case.
        primitive: What it is about.
        part: ``a``, ``b`` or ``g``.
        opened: The axes that were open.
        kind: ``masked``: padded and exact agree. ``fallback``: refused by a rule, so the call
            runs exact, with the reason. ``untraceable``: JAX cannot trace it with these axes
            symbolic, or only at one size. ``unsupported``: JAX cannot run it at all here.
            ``wrong``: padded and exact differ. ``error``: anything else.
        reason: Why, if it is not masked.
        seconds: What it took.
    """

    harness: str
    primitive: str
    part: str
    opened: str
    kind: str
    reason: str = ""
    seconds: float = 0.0

    @property
    def command(self) -> str:
        """Runs this case alone."""
        return (
            f"python -m tests.conformance --part {self.part} --filter '{self.harness}' "
            f"--open '{self.opened}'"
        )

    @property
    def told(self) -> str:
        """The reason, and below it the command."""
        return f"{self.reason}\n        {self.command}"


def cause(reason: str) -> str:
    """A reason without what differs from case to case: source lines, numbers, values."""
    text = re.sub(r" \[[^\]]*:\d+[^\]]*\]", "", reason.splitlines()[0] if reason else "")
    text = re.sub(r"[(\[][^()\[\]]*[)\]]", "(...)", text)
    text = re.sub(r"(?<![\w.])-?\d+(\.\d+)?(e[+-]?\d+)?", "#", text)
    return re.sub(r"(#,? ?)+#", "#", text)[:160]


def table(outcomes: Sequence[Outcome]) -> str:
    """Primitive by primitive, the number of cases of each kind, and the totals."""
    counted: dict[str, Counter[str]] = {}
    for o in outcomes:
        counted.setdefault(o.primitive, Counter())[o.kind] += 1
    rows = {**dict(sorted(counted.items())), "total": sum(counted.values(), Counter())}
    width = max([len("primitive"), *map(len, rows)])
    lines = [f"{'primitive':{width}}" + "".join(f"{k:>13}" for k in KINDS)]
    for name, counts in rows.items():
        cells = "".join(f"{counts[k] or '.':>13}" for k in KINDS)
        lines.append(f"{name:{width}}{cells}")
    return "\n".join(lines)


def share_masked(outcomes: Iterable[Outcome]) -> float:
    """Masked among all that bucketjit is asked to mask.

    Mapped over a batch axis, that is whatever JAX runs. A single axis it need not let be open.
    """
    counts = Counter(o.kind for o in outcomes if o.part != "b" or o.kind != UNTRACEABLE)
    asked = sum(counts[k] for k in (MASKED, FALLBACK, UNTRACEABLE, WRONG, ERROR))
    return counts[MASKED] / asked if asked else 1.0


def causes(outcomes: Iterable[Outcome], kind: str, most: int = 3) -> str:
    """The cases of a kind by what caused them, each with a few commands that repeat it."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for o in outcomes:
        if o.kind == kind:
            groups.setdefault((o.primitive, cause(o.reason)), []).append(o)
    lines = []
    for (primitive, _), members in sorted(groups.items(), key=lambda g: -len(g[1])):
        first = members[0].reason.splitlines() or [""]
        lines.append(f"{len(members):5} {primitive}: {first[0][:300]}")
        lines += [f"        {o.command}" for o in members[:most]]
    return "\n".join(lines)
