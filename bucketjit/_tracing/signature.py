"""One signature: which axes of its arguments are open, and the program of each call.

All calls with the same tree, dtypes, weak types, ranks, static arguments and configuration have
one signature. `Signature` keeps a token per axis (a dimension variable, an expression, or static)
and one program per set of static sizes and guards.

Axes that the user does not name (the default rule, or a list of axes as in GoMLX) get their names
from the sizes of the first call. An axis that was taken to be static is opened when its size
varies: any axis under the default rule, otherwise a listed one.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from jax.tree_util import PyTreeDef

from bucketjit._ir.dynamic_axes import STATIC, LeafSpec, Tokens, places_of
from bucketjit._ir.guards import fixed_by, parse_constraint
from bucketjit._ir.interface import Interface
from bucketjit._ir.program import TraceRefused
from bucketjit._jax.arrays import devices_of, is_of_topology, names_of
from bucketjit._tracing.axis_guesses import AxisGuesses, Place, Shapes
from bucketjit._tracing.leaf_types import LeafType
from bucketjit._tracing.resolution import Resolution, bind_sizes, without_empty
from bucketjit._tracing.shards import NO_SHARDINGS, Shardings
from bucketjit._tracing.traced_programs import TracedPrograms, may_try
from bucketjit.errors import ArgumentError, SpecError

_SHOWN = 8  # reasons in one line of a log

_MAX_GUESSES = 4  # of the open axes of a call that has an axis of size 0


class _Learnt(NamedTuple):
    """What the calls so far have taught about the axes. A call that fails teaches nothing.

    Attributes:
        tokens: A token per axis of each leaf; None before the first call.
        last: The shapes of the call that the last program was traced for.
        closed: The axes that could not be opened, and the sizes at which they could not.
        refusal: Why calls without open axes have no program.
        reasons: Why the next program is traced, as far as known before the trace.
    """

    tokens: Tokens | None
    last: Shapes
    closed: Mapping[Place, frozenset[tuple[int, ...]]]
    refusal: TraceRefused | None
    reasons: tuple[str, ...]


class Signature(TracedPrograms):
    """The open axes and the programs of one signature.

    Attributes:
        specs: What the user says of each leaf.
        shardings: Where arguments and results are put.
        remembered: What `bucketjit._runtime.rows` has decided for calls of this signature.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        in_tree: PyTreeDef,
        types: Sequence[LeafType],
        paths: Sequence[str],
        specs: Sequence[LeafSpec],
        constraints: Sequence[str],
        *,
        learns: bool = False,
        why: str = "new",
        shardings: Shardings | None = None,
        **more: Any,
    ) -> None:
        super().__init__(fn, in_tree, types, paths, constraints, **more)
        self.specs, self.shardings = tuple(specs), shardings or NO_SHARDINGS
        self._axes = AxisGuesses(specs, paths, learns)
        self._learnt = _Learnt(None, (), MappingProxyType({}), None, (why,))
        self._news: list[str] = []
        self._reported: weakref.WeakSet[Interface] = weakref.WeakSet()  # programs with news
        self._open_leaves: tuple[Tokens, list[int]] = ((), [])  # of the last tokens asked for
        self.remembered: dict[Any, Any] = {}

    @contextmanager
    def restoring_axes(self) -> Iterator[None]:
        """A context that undoes, at its end, the opening of axes within it."""
        before = self._learnt, list(self._news), weakref.WeakSet(self._reported)
        try:
            yield
        finally:
            self._learnt, self._news, self._reported = before

    def _learn(self, **facts: Any) -> None:
        self._learnt = self._learnt._replace(**facts)

    def _note(self, reasons: Sequence[str]) -> None:
        self._learn(reasons=(*self._learnt.reasons, *reasons))

    @property
    def is_cut(self) -> bool:
        """Whether a mesh cuts arguments, or the user places them."""
        return self._is_cut or bool(self.shardings.leaves)

    @property
    def placed(self) -> dict[int, Any]:
        """Where the user places leaves, but for those whose types say where they are."""
        pairs = enumerate(zip(self.shardings.leaves, self.types, strict=False))
        return {i: s for i, (s, kind) in pairs if s is not None and kind.sharding is None}

    def is_cut_inside(self, tokens: Tokens) -> bool:
        """Whether a mesh cuts open axes behind the first one."""
        inner = tuple((STATIC, *row[1:]) for row in tokens)
        return bool(self.evenness(inner)) or self.shardings.cuts(inner)

    @functools.cached_property
    def target(self) -> Any:
        """The sharding of arguments on devices of a topology; None if they are here."""
        placed = filter(None, self.shardings.leaves)
        there = (s for s in placed if is_of_topology(devices_of(s)))
        return next((t.target for t in self.types if t.target is not None), next(there, None))

    @property
    def device(self) -> str:
        """The devices of a topology that arguments are on, in words; ``""`` if they are here."""
        return "" if self.target is None else names_of(self.target.device_set)

    @property
    def tokens(self) -> Tokens | None:
        """A token per axis of each leaf; None before the first call."""
        return self._learnt.tokens

    def open_leaves(self, tokens: Tokens) -> list[int]:
        """The leaves that have open axes, or are sizes themselves."""
        if self._open_leaves[0] is not tokens:
            opened = {place.leaf for place in places_of(tokens).opened}
            leaves = [i for i, kind in enumerate(self.types) if kind.dtype is None or i in opened]
            self._open_leaves = tokens, leaves
        return self._open_leaves[1]

    def resolve(self, shapes: Shapes) -> Resolution:
        """Find or trace the program for a call of these shapes."""
        learnt = self._learnt
        try:
            tokens = learnt.tokens
            call = self._first(shapes) if tokens is None else self._opened_again(tokens, shapes)
        except BaseException:  # a call that fails opens no axes
            self._learnt = learnt
            raise
        program, reasons = call.program, self._learnt.reasons
        if reasons or (program is not None and program not in self._reported):
            reasons = reasons or (self.why_again(call, shapes),)
            self._news.append("; ".join([*reasons[:_SHOWN], self.traced_as(call, shapes)]))
            self._learn(reasons=())
            if program is not None:
                self._reported.add(program)
        return call

    def release(self, program: Interface) -> None:
        """Drop the reference to a program; others may still hold it.

        A program that serves another call is held again.
        """
        super().release(program)
        self.remembered.clear()  # it holds programs

    def take_news(self) -> list[str]:
        """The programs traced since the last call of this method, and why, one line each."""
        news, self._news = self._news, []
        return news

    def open_axes(self, call: Resolution, shapes: Shapes) -> tuple[Tokens, dict[str, int]]:
        """The open axes of a call with their sizes, those of size 0 included."""
        tokens = call.tokens if self.tokens is None else self.tokens
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
        names = next(self._axes.guesses(shapes, self._axes.anonymous(shapes)), {})
        return self._axes.tokens(shapes, names)

    def guessed_sizes(self, shapes: Shapes) -> dict[str, int]:
        """The sizes along `guessed_tokens`, for the statistics of calls without a program."""
        return bind_sizes(self.guessed_tokens(shapes), shapes, self.paths)

    # --- the first call ---

    def _first(self, shapes: Shapes) -> Resolution:
        """Resolve the first call. The first guess of open axes that can be traced is kept."""
        if self._axes.are_named:
            tokens = self._axes.tokens(shapes, {})
            self._learn(tokens=tokens)
            return self._serve(tokens, shapes)
        wanted = self._axes.anonymous(shapes)
        if any(shapes[leaf][axis] == 0 for leaf, axis in wanted):
            return self._first_empty(wanted, shapes)
        refusal: TraceRefused | None = None  # of the best guess
        pinned: Resolution | None = None
        for names in self._axes.guesses(shapes, wanted):
            tokens = self._axes.tokens(shapes, names)
            # An explained call has traced a program, and has opened no axes.
            call = self._before(tokens, shapes, bind_sizes(tokens, shapes, self.paths))
            call = call or self.attempt(tokens, shapes)
            if call.program is None:
                refusal = refusal or call.refusal
            elif fixed_by(call.program.guards, call.sizes):
                # The program serves one size only of some axis, so another guess may be better.
                pinned = pinned or call
            elif call.sizes or pinned is None:
                return self._settle(call, shapes)
        if pinned is not None:
            return self._settle(pinned, shapes)
        # No guess can be traced: all axes are static, and this call runs exact.
        self._close(wanted, shapes, refusal)
        tokens = self._axes.tokens(shapes, {})
        return self._settle(Resolution(tokens, {}, None, refusal), shapes)

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

    def _settle(self, call: Resolution, shapes: Shapes) -> Resolution:
        """Make these the open axes, and keep the program of the call that they were traced for."""
        self._learn(tokens=call.tokens, last=tuple(shapes))
        if call.program is not None:
            self.add(call.program, self.at(call.tokens, shapes))
        return call

    # --- later calls ---

    def _opened_again(self, tokens: Tokens, shapes: Shapes) -> Resolution:
        """Open axes, or split a shared variable, as the sizes of a call demand, and resolve it."""
        if self._axes.are_named:
            return self._serve(tokens, shapes)
        renamed = self._axes.without_shared_names(tokens, shapes)
        if renamed is not None:
            tokens, reasons = renamed
            self._learn(tokens=tokens)
            self._note(reasons)
        last = self._learnt.last
        opened: list[Place] = []
        if last and not any(0 in shape for shape in shapes):
            opened = [
                (leaf, axis)
                for leaf, axis in self._axes.unnamed(shapes)
                if tokens[leaf][axis] == STATIC
                and last[leaf][axis] != shapes[leaf][axis]
                and may_try(self._learnt.closed.get((leaf, axis), ()), (shapes[leaf][axis],))
            ]
        call = self._open(tokens, shapes, opened) if opened else None
        return call or self._serve(tokens, shapes)

    def _open(self, tokens: Tokens, shapes: Shapes, places: Sequence[Place]) -> Resolution | None:
        """Open static axes whose sizes changed since the last program was traced."""
        tokens, varied = self._axes.opened(tokens, self._learnt.last, shapes, places)
        call = self.attempt(tokens, shapes)
        if call.program is not None:
            names = [tokens[leaf][axis] for leaf, axis in places]
            self._note([f"{v}: opened as {n}" for v, n in zip(varied, names, strict=True)])
            return self._settle(call, shapes)
        why = "it cannot be traced" if call.refusal is None else call.refusal.reason
        self._note([f"{v}, and cannot be opened: {why}" for v in varied])
        self._close(places, shapes, call.refusal)
        return None

    def _close(self, axes: Sequence[Place], shapes: Shapes, refusal: TraceRefused | None) -> None:
        closed = dict(self._learnt.closed)
        for leaf, axis in axes:
            sizes = closed.get((leaf, axis), frozenset())
            closed[leaf, axis] = sizes | {(shapes[leaf][axis],)}
        self._learn(closed=closed, refusal=refusal and refusal.without_frames())

    def _serve(self, tokens: Tokens, shapes: Shapes) -> Resolution:
        """Resolve a call with known tokens: by a program that holds, or by a new trace."""
        sizes = bind_sizes(tokens, shapes, self.paths)
        self.check_constraints(sizes)
        for guard in self.evenness(tokens):
            if not guard.holds(sizes):
                raise ArgumentError(f"sizes {sizes} cannot be sharded as given: {guard} is wanted")
        if not sizes:
            return Resolution(tokens, sizes, None, self._learnt.refusal)
        if min(sizes.values()) < 1:
            empty = frozenset(v for v, n in sizes.items() if n == 0)
            if min(sizes.values()) < 0 or len(empty) == len(sizes):
                return self._computing(tokens, shapes) or Resolution(tokens, sizes, None)
            # Symbolic sizes are at least 1, so these axes are of size 0 in a program of its own.
            tokens = without_empty(tokens, empty)
            sizes = {v: n for v, n in sizes.items() if n}
        if (call := self._before(tokens, shapes, sizes)) is not None:
            return call
        traced = self.at(tokens, shapes)
        if (refusal := traced.refusal(sizes)) is not None:
            return Resolution(tokens, sizes, None, refusal)
        call = self.attempt(tokens, shapes)
        if call.program is not None:
            self.add(call.program, traced)
        return call

    def _before(self, tokens: Tokens, shapes: Shapes, sizes: dict[str, int]) -> Resolution | None:
        """Resolve a call by a program that was traced before; None if none holds."""
        # `size_constants` is None if a guard fails; a program of concrete traces traces here.
        for program in self.at(tokens, shapes).programs():
            if (size_constants := program.size_constants(sizes)) is not None:
                self.keep(program)
                return Resolution(tokens, sizes, program, size_constants=size_constants)
        return None

    def _computing(self, tokens: Tokens, shapes: Shapes) -> Resolution | None:
        """Resolve a call of a size 0, where that size is static; None if it computes no sizes."""
        tokens = tuple(
            tuple(STATIC if n == 0 else t for t, n in zip(row, shape, strict=True))
            for row, shape in zip(tokens, shapes, strict=True)
        )
        traced = self.at(tokens, shapes)
        sizes = bind_sizes(tokens, shapes, self.paths)
        programs = (p for p in traced.programs() if p.admits(sizes))
        program = next(programs, None) or self.computing(tokens, shapes)
        if program is None:
            return None
        self.add(program, traced)
        return Resolution(tokens, sizes, program)

    def remember_refusal(self, call: Resolution, shapes: Shapes) -> None:
        """Keep the reason why a call has no program, so that it is not traced again.

        Called after the exact run has succeeded: a refusal counts only if the function itself works
        at these sizes.
        """
        if call.refusal is not None:
            self.at(call.tokens, shapes).refuse(call.sizes, call.refusal)

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
