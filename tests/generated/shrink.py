"""Cut a failing program down to the lines that it takes to fail."""

import dataclasses
import re
from collections.abc import Callable, Iterator

from tests.generated.programs import Generated

_VARIABLE = re.compile(r"\bv(\d+)\b")


def _needed(program: Generated, last: int) -> list[int]:
    """The lines that line ``last`` depends on, itself included."""
    count = len(program.args)
    needed = {last}
    for i in range(last, -1, -1):
        if i in needed:
            used = map(int, _VARIABLE.findall(program.lines[i].split("=", 1)[1]))
            needed |= {v - count for v in used if v >= count}
    return sorted(needed)


def _keep(program: Generated, lines: list[int]) -> Generated:
    """Only these lines, their variables numbered anew."""
    count = len(program.args)
    new = {i + count: k + count for k, i in enumerate(lines)}
    new.update({i: i for i in range(count)})

    def renamed(line: str) -> str:
        return _VARIABLE.sub(lambda m: f"v{new[int(m[1])]}", line)

    return dataclasses.replace(program, lines=tuple(renamed(program.lines[i]) for i in lines))


def _smaller(program: Generated) -> Iterator[Generated]:
    for i in range(len(program.lines)):
        kept = _needed(program, i)
        if len(kept) < len(program.lines):
            yield _keep(program, kept)
    if len(program.sizes) > 1:
        for sizes in program.sizes:
            yield dataclasses.replace(program, sizes=(sizes,))


def shrink(program: Generated, fails: Callable[[Generated], bool]) -> Generated:
    """The smallest program found that still fails."""
    for smaller in _smaller(program):
        if fails(smaller):
            return shrink(smaller, fails)
    return program
