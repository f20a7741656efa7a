"""The programs that were traced for one signature, by which axes are open and the static sizes.

A function that cannot be traced at some sizes may be traced at others, most often at larger ones:
at 2 rows, half of them is one row, and JAX broadcasts that. So a refusal is of the sizes of its
call; `Refused` decides how often others are tried.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.tree_util import PyTreeDef

from bucketjit._signature.axis_guesses import Shapes
from bucketjit._signature.binding import bind_sizes
from bucketjit._signature.leaf_types import LeafType
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._sizes.dynamic_axes import STATIC, Tokens, places_of
from bucketjit._sizes.guards import Guard
from bucketjit._tracing.concrete import Tracer, pair
from bucketjit._tracing.output_trees import same_tree
from bucketjit._tracing.program import Leaf, Program, TraceRefused, size_in_data
from bucketjit._tracing.symbolic import COMPUTE, trace

_MAX_REFUSALS = 4  # then only sizes beyond all of these are tried

_MAX_BEYOND = 8  # then only sizes beyond the double or the half

_REFUSALS_KEPT = 4096

_MAX_PAIRED = 8  # programs of concrete traces, which are made where sizes decide what is done

_LOOKED_THROUGH = 64  # sets of static sizes, at which those without a program are first looked for


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


class TracedPrograms:
    """Traces a function, and holds the programs of one signature.

    A program is kept from when it is traced. Once one of its executables has had to leave the cache
    (`release`) it is kept for as long as others hold it, as the keys of its executables do.

    Args:
        fn: The function with its static arguments bound.
        in_tree: Tree of ``(args, kwargs)``.
        types: Type of each leaf.
        paths: How errors name each leaf.
        constraints: The user's constraints on sizes.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        in_tree: PyTreeDef,
        types: Sequence[LeafType],
        paths: Sequence[str],
        constraints: Sequence[str],
    ) -> None:
        self.fn = fn
        self.in_tree = in_tree
        self.types = tuple(types)
        self.paths = tuple(paths)
        self.constraints = tuple(constraints)
        self._is_cut = any(kind.partitions for kind in self.types)
        self._traced: dict[Any, Traced] = {}
        self._look_through_at = _LOOKED_THROUGH
        self._kept: set[Program] = set()

    def keep(self, program: Program) -> None:
        """Hold a program until it is released."""
        self._kept.add(program)

    def release(self, program: Program) -> None:
        """Keep a program no longer than others hold it, until it serves another call."""
        self._kept.discard(program)

    def every(self) -> list[tuple[Any, Program]]:
        """The programs so far, each with the axes and the static sizes that it was traced for."""
        return [
            (key, program)
            for key, traced in list(self._traced.items())
            for program in traced.programs()
        ]

    def static_key(self, tokens: Tokens, shapes: Shapes) -> Any:
        """What programs are told apart by: which axes are open, and the sizes of the others."""
        return tokens, tuple(shapes[leaf][axis] for leaf, axis, _ in places_of(tokens).static)

    def at(self, tokens: Tokens, shapes: Shapes) -> Traced:
        """What is known for the static sizes of a call."""
        key = self.static_key(tokens, shapes)
        known = self._traced.get(key)
        if known is None:
            if len(self._traced) >= self._look_through_at:
                self._forget_what_is_gone()
            known = self._traced[key] = Traced()
        return known

    def _forget_what_is_gone(self) -> None:
        """Static sizes that vary have programs of their own, of which few may be there."""
        self._traced = {k: t for k, t in self._traced.items() if t.refusals or t.programs()}
        self._look_through_at = max(_LOOKED_THROUGH, 2 * len(self._traced))

    def add(self, program: Program, to: Traced) -> None:
        """Take note of a program."""
        self.keep(program)
        to.add(program)

    def _leaves(self, tokens: Tokens, shapes: Shapes) -> list[Leaf]:
        return [
            Leaf(
                path,
                tuple(
                    n if t == STATIC else int(t) if t.isdigit() else t
                    for t, n in zip(row, shape, strict=True)
                ),
                kind.dtype,
                kind.weak_type,
                kind.sharding,
            )
            for path, row, shape, kind in zip(self.paths, tokens, shapes, self.types, strict=True)
        ]

    def evenness(self, tokens: Tokens) -> list[Guard]:
        """What sharding holds sizes to: an axis is cut into equal parts."""
        if not self._is_cut:
            return []
        return [
            Guard(f"mod({token}, {count})", "==", "0")
            for row, kind in zip(tokens, self.types, strict=True)
            for token, count in zip(row, kind.partitions or (), strict=False)
            if count > 1 and token != STATIC and not token.isdigit()
        ]

    def _constraints(self, tokens: Tokens) -> list[str]:
        """The user's, and what sharding holds sizes to."""
        return list(dict.fromkeys([*self.constraints, *map(str, self.evenness(tokens))]))

    def attempt(self, tokens: Tokens, shapes: Shapes) -> ResolvedCall:
        """Trace the function for a call: with symbolic sizes, or else at several concrete ones.

        Raises:
            Exception: Whatever the function raises at these sizes.
        """
        sizes = bind_sizes(tokens, shapes, self.paths)
        leaves, constraints = self._leaves(tokens, shapes), self._constraints(tokens)
        program: Program | TraceRefused
        try:
            program = trace(self.fn, self.in_tree, leaves, sizes, constraints)
        except TraceRefused as refusal:
            program = refusal.placed(self.fn)
        if isinstance(program, TraceRefused):  # what is raised now has nothing to do with it
            return self._pair(tokens, shapes, sizes, program)
        if program.may_hold_sizes:
            nested = self._tracer(tokens, shapes).at(sizes).out_tree
            if not same_tree(nested, program.out_tree):
                return self._pair(tokens, shapes, sizes, size_in_data().placed(self.fn))
        if any(g.pins for g in program.guards):  # good for one size; traces may serve more
            call = self._pair(tokens, shapes, sizes)
            if call.program is not None:
                return call
        return ResolvedCall(tokens, sizes, program)

    def _tracer(self, tokens: Tokens, shapes: Shapes) -> Tracer:
        known = self.at(tokens, shapes).tracer()
        return known or Tracer(self.fn, self.in_tree, self._leaves(tokens, shapes))

    def _pair(
        self,
        tokens: Tokens,
        shapes: Shapes,
        sizes: dict[str, int],
        refusal: TraceRefused | None = None,
    ) -> ResolvedCall:
        """Concrete traces in place of a symbolic one."""
        traced = self.at(tokens, shapes)
        known = [p.pairing.samples[0] for p in traced.programs() if p.pairing]
        tracer = self._tracer(tokens, shapes)
        traced.tracer = lambda: tracer
        try:
            tracer.at(sizes)  # what it raises by itself, the exact run raises too
            if len(known) >= _MAX_PAIRED:
                return ResolvedCall(tokens, sizes, None, refusal)
            why = "" if refusal is None else refusal.reason
            program = pair(tracer, sizes, self._constraints(tokens), known, why)
        except TraceRefused as second:
            if refusal is not None:
                reason = f"{refusal.reason}; {second.reason}"
                both = f"{refusal.remedy}; {second.remedy}"
                remedy = refusal.remedy if second.remedy == COMPUTE else both
                refusal = TraceRefused(reason, remedy, refusal.cause)
            return ResolvedCall(tokens, sizes, None, refusal)
        size_constants = program.size_constants(sizes)
        if size_constants is None:  # it is not traced the same way twice
            return ResolvedCall(tokens, sizes, None, refusal)
        traced.tracer = weakref.ref(tracer)  # which the program holds
        return ResolvedCall(tokens, sizes, program, size_constants=size_constants)
