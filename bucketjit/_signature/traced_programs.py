"""The programs that were traced for one signature and one set of static sizes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bucketjit._tracing.concrete import Tracer
from bucketjit._tracing.program import Program, TraceRefused

_MAX_REFUSALS = 4  # then only sizes beyond all of these are tried

_MAX_BEYOND = 8  # then only sizes beyond the double or the half

_REFUSALS_KEPT = 4096


@dataclass(frozen=True)
class Refused:
    """Sizes at which something could not be traced, and whether it is tried at others.

    Many things cannot be traced at small sizes alone, and some at large ones alone. So after a few
    refusals it is tried only at sizes beyond all of these, larger or smaller, and then only beyond
    the double or below the half. That is at most ``_MAX_BEYOND + 62`` times for each variable.

    Attributes:
        sizes: The sizes of each variable, wherever it was refused.
    """

    sizes: frozenset[tuple[int, ...]] = frozenset()

    def and_at(self, sizes: tuple[int, ...]) -> Refused:
        """The same, refused at these sizes too."""
        return Refused(self.sizes | {sizes})

    def may_do_at(self, sizes: tuple[int, ...]) -> bool:
        """Whether it is tried at these sizes."""
        if len(self.sizes) < _MAX_REFUSALS:
            return sizes not in self.sizes
        factor = 1 if len(self.sizes) < _MAX_BEYOND else 2
        refused = zip(sizes, zip(*self.sizes, strict=True), strict=True)
        return any(n > factor * max(at) or factor * n < min(at) for n, at in refused)


@dataclass
class Traced:
    """What is known for one set of static sizes: programs, and by size why there is none.

    Attributes:
        tracer: Gives what traces at concrete sizes; None if nothing does, or its programs are gone.
        refusals: Why there is no program, by sizes.
        refused: At which sizes there was none before the first program.
        is_traced_again: Whether there was a program before those that are there.
    """

    tracer: Callable[[], Tracer | None] = lambda: None
    refusals: dict[tuple[int, ...], TraceRefused] = field(default_factory=dict)
    refused: Refused = Refused()
    is_traced_again: bool = False
    _programs: list[weakref.ref[Program]] = field(default_factory=list)

    def programs(self) -> list[Program]:
        """Those that somebody holds."""
        return [program for ref in self._programs if (program := ref()) is not None]

    def add(self, program: Program) -> None:
        """Take note of one."""
        there = [ref for ref in self._programs if ref() is not None]
        self.is_traced_again |= len(there) < len(self._programs)
        self._programs = [*there, weakref.ref(program)]

    def refusal(self, sizes: Mapping[str, int]) -> TraceRefused | None:
        """Why a call is not traced again: it was refused, or so was every one of several."""
        at = tuple(sizes.values())
        if at in self.refusals or self._has_served() or self.refused.may_do_at(at):
            return self.refusals.get(at)
        return next(reversed(self.refusals.values()))

    def refuse(self, sizes: Mapping[str, int], refusal: TraceRefused) -> None:
        """Take note of why there is no program at these sizes, if it was tried there."""
        at = tuple(sizes.values())
        if not self._has_served():
            if not self.refused.may_do_at(at):
                return
            self.refused = self.refused.and_at(at)
            if len(self.refused.sizes) >= _MAX_REFUSALS:
                self.tracer = lambda: None  # it holds traces, which will hardly be of use
        self.refusals[at] = refusal.without_frames()
        if len(self.refusals) > _REFUSALS_KEPT:
            del self.refusals[next(iter(self.refusals))]

    def _has_served(self) -> bool:
        """Whether there is a program for some sizes, or was one that is gone since."""
        return bool(self._programs)
