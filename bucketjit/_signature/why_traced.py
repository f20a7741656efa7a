"""Say in words why each program of a signature was traced, for log lines and events."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from bucketjit._signature.axis_guesses import Shapes
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.traced_programs import TracedPrograms
from bucketjit._sizes.dynamic_axes import STATIC, Tokens
from bucketjit._tracing.interface import Interface

_SHOWN = 8  # arguments, or reasons, in one line of a log


class News:
    """Collects a line for each program of a signature, until somebody takes them.

    Attributes:
        reasons: Why the next program is traced, as far as known before the trace.
    """

    def __init__(self, why: str, traced: TracedPrograms) -> None:
        self.reasons = [why]
        self._traced = traced
        self._lines: list[str] = []
        self._told: weakref.WeakKeyDictionary[Interface, tuple[Tokens, Shapes]]
        self._told = weakref.WeakKeyDictionary()

    def copy(self) -> News:
        """A copy, to restore the state from."""
        other = News("", self._traced)
        other.reasons, other._lines = list(self.reasons), list(self._lines)
        other._told.update(self._told)
        return other

    def take(self) -> list[str]:
        """Return the lines since the last call of this method, and forget them."""
        if not self._lines:
            return []
        lines, self._lines = self._lines, []
        return lines

    def is_to_tell(self, call: ResolvedCall) -> bool:
        """Whether `note` has something to say about a call."""
        return bool(self.reasons) or (call.program is not None and call.program not in self._told)

    def note(self, call: ResolvedCall, shapes: Shapes) -> None:
        """Add a line about a program that serves for the first time, and why it was traced."""
        program = call.program
        reasons, self.reasons = self.reasons, []
        if program is None:
            self._lines.append(f"{'; '.join(reasons[:_SHOWN])}; runs exact")
            return
        if not reasons:
            reasons = [self._why_again(call, shapes)]
        # Weak keys: the note of a program goes with it.
        served = self._told.setdefault(program, (call.tokens, tuple(shapes)))
        inputs = inputs_of(self._traced, *self._traced.static_key(*served))
        more = f" and {len(inputs) - _SHOWN} more" if len(inputs) > _SHOWN else ""
        shown = ", ".join(inputs[:_SHOWN])
        how = f"traced as {shown}{more}"
        if program.pairing is not None and program.pairing.why:
            how += f", once at each size: {program.pairing.why}"
        self._lines.append(f"{'; '.join(reasons[:_SHOWN])}; {how}")

    def _why_again(self, call: ResolvedCall, shapes: Shapes) -> str:
        """Why none of the existing programs serves a call."""
        key = self._traced.static_key(call.tokens, shapes)
        alike = [p for p, served in self._told.items() if self._traced.static_key(*served) == key]
        if alike:
            sizes = ", ".join(f"{v} = {n}" for v, n in call.sizes.items())
            broken = {str(g): None for p in alike for g in p.guards if not g.holds(call.sizes)}
            return f"re-signed: {sizes} breaks the guard {' and '.join(broken) or 'of the traces'}"
        if self._traced.at(call.tokens, shapes).is_traced_again:
            return "traced before, but dropped with the last of its executables"
        if not self._told:
            return "new"
        _, before = list(self._told.values())[-1]
        changed = [
            f"axis {axis} of {path} is {now}, not {old}"
            for path, row, olds, news in zip(
                self._traced.paths, call.tokens, before, shapes, strict=True
            )
            for axis, (token, old, now) in enumerate(zip(row, olds, news, strict=True))
            if (token == STATIC or token.isdigit()) and old != now
        ]
        return f"re-signed: {', '.join(changed) or 'other axes are open'}"


def inputs_of(traced: TracedPrograms, tokens: Tokens, static: Sequence[int]) -> tuple[str, ...]:
    """The arguments with open axes, as people write them: ``x: float32[b, s, 64]``."""
    rest, found = iter(static), []
    for path, row, kind in zip(traced.paths, tokens, traced.types, strict=True):
        dims = ", ".join([str(next(rest)) if token == STATIC else token for token in row])
        if all(token == STATIC or token.isdigit() for token in row):
            continue
        found.append(
            f"{path}: size {dims}" if kind.dtype is None else f"{path}: {kind.dtype}[{dims}]"
        )
    return tuple(found)
