"""One signature: which axes of its arguments are open, and the program of each call.

All calls with the same tree, dtypes, weak types, ranks, static arguments and configuration have
one signature. `Signature` keeps a token per axis (a dimension variable, an expression, or static)
and one program per set of static sizes and guards.

Axes that the user does not name (the default rule, or a list of axes as in GoMLX) get their names
from the sizes of the first call. An axis that was taken to be static is opened when its size
varies: any axis under the default rule, otherwise a listed one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jax.tree_util import PyTreeDef

from bucketjit._ir.dynamic_axes import STATIC, LeafSpec, Tokens, places_of
from bucketjit._ir.guards import parse_constraint
from bucketjit._ir.interface import Interface
from bucketjit._ir.program import Program, TraceRefused
from bucketjit._raised import is_of_machine
from bucketjit._tracing.axis_guesses import AxisGuesses, Place, Shapes
from bucketjit._tracing.binding import bind_sizes, without_empty
from bucketjit._tracing.leaf_types import LeafType
from bucketjit._tracing.resolution import Resolution
from bucketjit._tracing.traced_programs import RefusedAt, TracedPrograms
from bucketjit._tracing.why_traced import News, inputs_of
from bucketjit.errors import ArgumentError, SpecError

_MAX_GUESSES = 4  # of the open axes of a call that has an axis of size 0


class Signature:
    """The open axes and the programs of one signature.

    Attributes:
        fn: See above.
        in_tree: See above.
        types: See above.
        paths: See above.
        specs: See above.
        constraints: See above.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        in_tree: PyTreeDef,
        types: Sequence[LeafType],
        paths: Sequence[str],
        specs: Sequence[LeafSpec],
        constraints: Sequence[str],
        learns: bool = False,
        why: str = "new",
        traced: TracedPrograms | None = None,
    ) -> None:
        self.fn = fn
        self.in_tree = in_tree
        self.types = tuple(types)
        self.paths = tuple(paths)
        self.specs = tuple(specs)
        self.constraints = tuple(constraints)
        self._axes = AxisGuesses(specs, paths, learns)
        self._traced = traced or TracedPrograms(fn, in_tree, types, paths, constraints)
        self._news = News(why, self._traced)
        self._tokens: Tokens | None = None
        self._last: Shapes = ()  # of the call that the last program was traced for
        self._closed: dict[
            Place, RefusedAt
        ] = {}  # axes that could not be opened, and at which sizes
        self._refusal: TraceRefused | None = None  # why calls without open axes have no program
        self._open_leaves: tuple[Tokens, list[int]] = ((), [])  # of the last tokens asked for
        # What `bucketjit._runtime.rows` has decided for calls of this signature.
        self.remembered: dict[Any, Any] = {}

    @contextmanager
    def restoring_axes(self) -> Iterator[None]:
        """A context that undoes, at its end, the opening of axes within it."""
        learnt, news = self._learnt(), self._news.copy()
        try:
            yield
        finally:
            self._unlearn_to(learnt)
            self._news = news

    def _learnt(self) -> tuple[Any, ...]:
        """A snapshot for `_unlearn_to`: the open axes, and why they are open."""
        reasons = list(self._news.reasons)
        return self._tokens, self._last, dict(self._closed), self._refusal, reasons

    def _unlearn_to(self, learnt: tuple[Any, ...]) -> None:
        self._tokens, self._last, self._closed, self._refusal, self._news.reasons = learnt

    @property
    def tokens(self) -> Tokens | None:
        """A token per axis of each leaf; None before the first call."""
        return self._tokens

    def open_leaves(self, tokens: Tokens) -> list[int]:
        """The leaves that have open axes, or are sizes themselves."""
        known, found = self._open_leaves
        if known is not tokens:
            opened = {place.leaf for place in places_of(tokens).opened}
            found = [i for i, kind in enumerate(self.types) if kind.dtype is None or i in opened]
            self._open_leaves = tokens, found
        return found

    def resolve(self, shapes: Shapes) -> Resolution:
        """Find or trace the program for a call of these shapes."""
        learnt = self._learnt()
        try:
            if self._tokens is None:
                call = self._first(shapes)
            else:
                call = self._opened_again(shapes) or self._serve(self._tokens, shapes)
        except BaseException:  # a call that fails opens no axes
            self._unlearn_to(learnt)
            raise
        if self._news.has_news_of(call):
            self._news.note(call, shapes)
        return call

    def resolve_again(
        self, call: Resolution, shapes: Shapes, computed: Mapping[str, int]
    ) -> Resolution:
        """Find or trace the program for a call whose computed sizes are known better."""
        known = self._traced.at(call.tokens, shapes)
        for program in known.programs():
            if program.admits(call.sizes) and program.presumes(call.sizes, computed):
                self._traced.keep(program)
                found = dataclasses.replace(call, program=program)
                break
        else:
            found = self._traced.attempt(call.tokens, shapes, computed)
            if found.program is not None:
                self._traced.add(found.program, known)
        if found.program is not None:
            known.prefer(found.program)
        return dataclasses.replace(found, presumed=computed)

    def program_of(self, call: Resolution, shapes: Shapes) -> Program:
        """A program of a call whose sizes are all static; see `TracedPrograms.program_of`."""
        return self._traced.program_of(call, shapes)

    def release(self, program: Interface) -> None:
        """Drop the reference to a program; others may still hold it.

        A program that serves another call is held again.
        """
        self._traced.release(program)
        self.remembered.clear()  # it holds programs

    def take_news(self) -> list[str]:
        """The programs traced since the last call of this method, and why, one line each."""
        return self._news.take()

    def programs(self) -> list[tuple[tuple[str, ...], Interface]]:
        """The programs that exist, each with its arguments that have open axes, in words."""
        return [(inputs_of(self._traced, *key), program) for key, program in self._traced.every()]

    def open_axes(self, call: Resolution, shapes: Shapes) -> tuple[Tokens, dict[str, int]]:
        """The open axes of a call with their sizes, those of size 0 included."""
        tokens = call.tokens if self._tokens is None else self._tokens
        return tokens, bind_sizes(tokens, shapes, self.paths)

    def declared(self, shapes: Shapes) -> Resolution:
        """The sizes of the variables that the user named, checked, without tracing."""
        self._axes.anonymous(shapes)
        tokens = self.declared_tokens(shapes)
        sizes = bind_sizes(tokens, shapes, self.paths)
        if self._axes.are_named:
            self.check_constraints(sizes)
        return Resolution(tokens, sizes, None)

    def declared_tokens(self, shapes: Shapes) -> Tokens:
        """A token per axis of each leaf, where only axes that the user named are open."""
        return self._axes.tokens(shapes, {})

    def guessed_tokens(self, shapes: Shapes) -> Tokens:
        """A token per axis of each leaf, where axes that the user named or listed are open.

        Listed axes of equal number and size share a variable.
        """
        names = (
            {}
            if self._axes.are_named
            else next(self._axes.guesses(shapes, self._axes.anonymous(shapes)), {})
        )
        return self._axes.tokens(shapes, names)

    def guessed_sizes(self, shapes: Shapes) -> dict[str, int]:
        """The sizes along `guessed_tokens`, for the statistics of calls without a program."""
        return bind_sizes(self.guessed_tokens(shapes), shapes, self.paths)

    # --- the first call ---

    def _first(self, shapes: Shapes) -> Resolution:
        """Resolve the first call. The first guess of open axes that can be traced is kept."""
        if self._axes.are_named:
            self._tokens = self._axes.tokens(shapes, {})
            return self._serve(self._tokens, shapes)
        wanted = self._axes.anonymous(shapes)
        if any(shapes[leaf][axis] == 0 for leaf, axis in wanted):
            return self._first_empty(wanted, shapes)
        refusal: TraceRefused | None = None  # of the best guess
        pinned: tuple[Tokens, Resolution] | None = None
        for names in self._axes.guesses(shapes, wanted):
            tokens = self._axes.tokens(shapes, names)
            call = self._traced.attempt(tokens, shapes)
            if call.program is None:
                refusal = refusal or call.refusal
            elif any(g.pins for g in call.program.guards):
                # The program serves one size only of some axis, so another guess may be better.
                pinned = pinned or (tokens, call)
            elif call.sizes or pinned is None:
                return self._settle(tokens, shapes, call)
        if pinned is not None:
            return self._settle(pinned[0], shapes, pinned[1])
        # No guess can be traced: all axes are static, and this call runs exact.
        self._refusal = refusal and refusal.without_frames()
        self._close(wanted, shapes)
        tokens = self._axes.tokens(shapes, {})
        return self._settle(tokens, shapes, Resolution(tokens, {}, None, refusal))

    def _first_empty(self, wanted: Sequence[Place], shapes: Shapes) -> Resolution:
        """Resolve a call with an axis of size 0; the first call without one names the axes."""
        filled = [(leaf, axis) for leaf, axis in wanted if shapes[leaf][axis]]
        for names in itertools.islice(self._axes.guesses(shapes, filled), _MAX_GUESSES):
            call = self._serve(self._axes.tokens(shapes, names), shapes)
            if call.program is not None:
                return call
            self.remember_refusal(call, shapes)
        tokens = self._axes.tokens(shapes, {})
        return self._computing(tokens, shapes) or Resolution(tokens, {}, None)

    def _settle(self, tokens: Tokens, shapes: Shapes, call: Resolution) -> Resolution:
        """Make these the open axes, and keep the program of the call that they were traced for."""
        self._tokens, self._last = tokens, tuple(shapes)
        if call.program is not None:
            self._traced.add(call.program, self._traced.at(tokens, shapes))
        return call

    # --- later calls ---

    def _opened_again(self, shapes: Shapes) -> Resolution | None:
        """Open axes, or split a shared variable, as the sizes of a call demand."""
        assert self._tokens is not None
        if self._axes.are_named:
            return None
        renamed = self._axes.without_shared_names(self._tokens, shapes)
        if renamed is not None:
            self._tokens = renamed.tokens
            self._news.reasons += renamed.reasons
        return self._open_what_varies(shapes)

    def _open_what_varies(self, shapes: Shapes) -> Resolution | None:
        """Open the static axes whose sizes changed since the last program was traced."""
        assert self._tokens is not None
        if not self._last or any(0 in shape for shape in shapes):
            return None
        opened = [
            (leaf, axis)
            for leaf, axis in self._axes.unnamed(shapes)
            if self._tokens[leaf][axis] == STATIC
            and self._last[leaf][axis] != shapes[leaf][axis]
            and self._closed.get((leaf, axis), RefusedAt()).may_do_at((shapes[leaf][axis],))
        ]
        if not opened:
            return None
        tokens, varied = self._axes.opened(self._tokens, self._last, shapes, opened)
        call = self._traced.attempt(tokens, shapes)
        traced_at, traced, tried = shapes, call, [shapes]
        # Many functions can be traced at larger sizes only, so the sizes before are tried as well.
        if call.program is None and self._is_larger_before(opened, shapes):
            tried.append(self._last)
            traced_at, traced = self._last, self._attempt_before(tokens) or call
        if traced.program is not None:
            names = [tokens[leaf][axis] for leaf, axis in opened]
            self._news.reasons += [
                f"{v}: opened as {n}" for v, n in zip(varied, names, strict=True)
            ]
            self._settle(tokens, traced_at, traced)
            # A program of the sizes before may not serve this call, which then runs exact.
            return call
        why = "it cannot be traced" if call.refusal is None else call.refusal.reason
        self._news.reasons += [f"{v}, and cannot be opened: {why}" for v in varied]
        self._refusal = call.refusal and call.refusal.without_frames()
        for refused_at in tried:
            self._close(opened, refused_at)
        return None

    def _is_larger_before(self, axes: Sequence[Place], shapes: Shapes) -> bool:
        """Whether an axis was larger when the last program was traced, and may be opened there."""
        sizes = [(self._last[leaf][axis], shapes[leaf][axis]) for leaf, axis in axes]
        closed = [self._closed.get(place, RefusedAt()) for place in axes]
        return any(
            before > now and refused.may_do_at((before,))
            for (before, now), refused in zip(sizes, closed, strict=True)
        )

    def _close(self, axes: Sequence[Place], shapes: Shapes) -> None:
        """Note that these axes could not be opened at these sizes."""
        for leaf, axis in axes:
            closed = self._closed.get((leaf, axis), RefusedAt())
            self._closed[leaf, axis] = closed.and_at((shapes[leaf][axis],))

    def _attempt_before(self, tokens: Tokens) -> Resolution | None:
        """Trace at the sizes of the last program; None if the function raises there."""
        try:
            return self._traced.attempt(tokens, self._last)
        except Exception as error:
            if is_of_machine(error):
                raise
            return None  # not the sizes of this call, so its caller must not get the error

    def _serve(self, tokens: Tokens, shapes: Shapes) -> Resolution:
        """Resolve a call with known tokens: by a program that holds, or by a new trace."""
        sizes = bind_sizes(tokens, shapes, self.paths)
        self.check_constraints(sizes)
        for guard in self._traced.evenness(tokens):
            if not guard.holds(sizes):
                raise ArgumentError(f"sizes {sizes} cannot be sharded as given: {guard} is wanted")
        if not sizes:
            return Resolution(tokens, sizes, None, self._refusal)
        if min(sizes.values()) < 1:
            empty = frozenset(v for v, n in sizes.items() if n == 0)
            if min(sizes.values()) < 0 or len(empty) == len(sizes):
                return self._computing(tokens, shapes) or Resolution(tokens, sizes, None)
            # Symbolic sizes are at least 1, so these axes are of size 0 in a program of its own.
            tokens = without_empty(tokens, empty)
            sizes = {v: n for v, n in sizes.items() if n}
        known = self._traced.at(tokens, shapes)
        # `size_constants` is None if a guard fails; a program of concrete traces traces here.
        for program in known.programs():
            if (size_constants := program.size_constants(sizes)) is not None:
                self._traced.keep(program)
                return Resolution(tokens, sizes, program, size_constants=size_constants)
        if (refusal := known.refusal(sizes)) is not None:
            return Resolution(tokens, sizes, None, refusal)
        call = self._traced.attempt(tokens, shapes)
        if call.program is not None:
            self._traced.add(call.program, known)
        return call

    def _computing(self, tokens: Tokens, shapes: Shapes) -> Resolution | None:
        """Resolve a call of a size 0, where that size is static; None if it computes no sizes."""
        tokens = tuple(
            tuple(STATIC if n == 0 else t for t, n in zip(row, shape, strict=True))
            for row, shape in zip(tokens, shapes, strict=True)
        )
        known = self._traced.at(tokens, shapes)
        sizes = bind_sizes(tokens, shapes, self.paths)
        found = (p for p in known.programs() if p.admits(sizes))
        program = next(found, None) or self._traced.computing(tokens, shapes)
        if program is None:
            return None
        self._traced.add(program, known)
        return Resolution(tokens, sizes, program)

    def remember_refusal(self, call: Resolution, shapes: Shapes) -> None:
        """Keep the reason why a call has no program, so that it is not traced again.

        Called after the exact run has succeeded: a refusal counts only if the function itself works
        at these sizes.
        """
        if call.refusal is not None:
            self._traced.at(call.tokens, shapes).refuse(call.sizes, call.refusal)

    def check_constraints(self, sizes: Mapping[str, int]) -> None:
        """Check the user's constraints."""
        for text in self.constraints:
            guard = parse_constraint(text)
            if guard.variables <= sizes.keys() and not guard.holds(sizes):
                raise ArgumentError(f"sizes {dict(sizes)} break the constraint {text!r}")
            if unknown := guard.variables - sizes.keys():
                raise SpecError(
                    f"constraint {text!r} names {sorted(unknown)}, which dynamic_axes does not; "
                    f"the variables are {', '.join(sizes) or 'none'}"
                )
