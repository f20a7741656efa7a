"""Trace the programs of one signature, and keep them by open axes and static sizes.

A function that cannot be traced at some sizes may be traced at others, most often at larger ones:
of 2 rows, one half is 1 row, which JAX broadcasts. So a refusal holds for the sizes of its call
only. `may_try` limits how many other sizes are tried.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jax.tree_util import PyTreeDef

from bucketjit._ir.dynamic_axes import STATIC, Tokens, places_of
from bucketjit._ir.guards import Guard, fixed_by, parse_constraint
from bucketjit._ir.interface import Interface
from bucketjit._ir.jax_patches import forgetful_jax
from bucketjit._ir.opaque import decisions_inside
from bucketjit._ir.program import Leaf, Program, TraceRefused, size_in_data
from bucketjit._raised import raised_anew
from bucketjit._tracing import resolution
from bucketjit._tracing.axis_guesses import Shapes
from bucketjit._tracing.held_output import holding_output, same_tree
from bucketjit._tracing.leaf_types import LeafType
from bucketjit._tracing.resolution import Resolution
from bucketjit._tracing.symbolic import COMPUTE, LOOP, trace

if TYPE_CHECKING:
    from bucketjit._tracing.concrete import Tracer

Instead = Callable[[Tokens, Shapes], Resolution]
"""Resolves a call that no program serves, or says why not, where nothing can be traced."""

_MAX_REFUSALS = 4  # after as many, only sizes larger or smaller than all of them are tried
_MAX_BEYOND = 8  # after as many, only sizes above the double of the largest or below half the least
_REFUSALS_KEPT = 4096  # for each set of static sizes; the oldest one is dropped
_MAX_PAIRED = 8  # programs of concrete traces for each set of static sizes
_SHOWN = 8  # arguments in one line of a log
_LOOKED_THROUGH = 64  # sets of static sizes; at each multiple those without a program are dropped

_ASKED_SYMBOLICALLY = (
    "bucketjit: raised while the function was traced with symbolic sizes, and nothing is learnt "
    "from it. If every call raises it, the function does not take symbolic sizes: leave its axes "
    "static (dynamic_axes), or raise an error of another class."
)


def may_try(refused: Collection[tuple[int, ...]], sizes: tuple[int, ...]) -> bool:
    """Whether a trace is tried at these sizes, where it was refused at others.

    Many functions cannot be traced at small sizes only, some at large ones only. So after a few
    refusals only a size larger or smaller than all of them is tried, or one of more than the double
    or less than the half: at most ``_MAX_BEYOND + 62`` traces for each variable.
    """
    if len(refused) < _MAX_REFUSALS:
        return sizes not in refused
    factor = 1 if len(refused) < _MAX_BEYOND else 2
    pairs = zip(sizes, zip(*refused, strict=True), strict=True)
    return any(n > factor * max(those) or factor * n < min(those) for n, those in pairs)


@dataclass
class KnownPrograms:
    """The programs and the refusals for one set of open axes and static sizes.

    It holds programs weakly; `TracedPrograms` decides how long they live.

    Attributes:
        tracer: Returns what traces at concrete sizes; None if there is none, or it is gone with
            its programs.
        refusals: Why there is no program, by sizes.
        count: How many programs there have been.
    """

    tracer: Callable[[], Tracer | None] = lambda: None
    refusals: dict[tuple[int, ...], TraceRefused] = field(default_factory=dict)
    count: int = 0
    _programs: weakref.WeakKeyDictionary[Interface, None] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def programs(self) -> list[Interface]:
        """The programs that somebody still holds."""
        return list(self._programs)

    def add(self, program: Interface) -> None:
        """Add a program, without holding it."""
        self.count += program not in self._programs
        self._programs[program] = None

    def refusal(self, sizes: Mapping[str, int]) -> TraceRefused | None:
        """Why a call is not traced."""
        key = tuple(sizes.values())
        if key in self.refusals or self.count or may_try(self.refusals, key):
            return self.refusals.get(key)
        return next(reversed(self.refusals.values()))

    def refuse(self, sizes: Mapping[str, int], refusal: TraceRefused) -> None:
        """Keep the reason why there is no program at these sizes."""
        key = tuple(sizes.values())
        if not self.count and not may_try(self.refusals, key):
            return
        self.refusals[key] = refusal.without_frames()
        if not self.count and len(self.refusals) >= _MAX_REFUSALS:
            self.tracer = lambda: None  # it holds traces, and a program is unlikely by now
        if len(self.refusals) > _REFUSALS_KEPT:
            del self.refusals[next(iter(self.refusals))]


class TracedPrograms:
    """Traces a function, and holds the programs of one signature.

    A program is held from its trace on, until one of its executables is evicted from the cache
    (`release`). Then it lives as long as the keys of its other executables, which refer to it.

    Attributes:
        fn: The function, with its static arguments bound.
        in_tree: Tree of ``(args, kwargs)``.
        types: Type of each leaf.
        paths: How errors name each leaf.
        constraints: The user's constraints.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        in_tree: PyTreeDef,
        types: Sequence[LeafType],
        paths: Sequence[str],
        constraints: Sequence[str],
        *,
        pairs: bool = True,
        has_room: Callable[[str], bool] = lambda variable: False,
        instead: Instead | None = None,
    ) -> None:
        self._pairs, self._has_room, self._instead = pairs, has_room, instead
        self.fn, self.in_tree = fn, in_tree
        self.types, self.paths = tuple(types), tuple(paths)
        self.constraints = tuple(constraints)
        self._is_cut = any(kind.partitions for kind in self.types)
        self._traced: dict[Any, KnownPrograms] = {}
        self._kept: set[Interface] = set()

    def keep(self, program: Interface) -> None:
        """Hold a program until it is released."""
        self._kept.add(program)

    def release(self, program: Interface) -> None:
        """Drop the reference to a program; others may still hold it."""
        self._kept.discard(program)

    def programs(self) -> list[tuple[tuple[str, ...], Interface]]:
        """The programs that exist, each with its arguments that have open axes, in words."""
        return [
            (self._inputs(*key), program)
            for key, traced in list(self._traced.items())
            for program in traced.programs()
        ]

    def _inputs(self, tokens: Tokens, static: Sequence[int]) -> tuple[str, ...]:
        """The arguments with open axes, as people write them: ``x: float32[b, s, 64]``."""
        rest, inputs = iter(static), []
        for path, row, kind in zip(self.paths, tokens, self.types, strict=True):
            dims = ", ".join([str(next(rest)) if token == STATIC else token for token in row])
            if any(token != STATIC and not token.isdigit() for token in row):
                of = f"size {dims}" if kind.dtype is None else f"{kind.dtype}[{dims}]"
                inputs.append(f"{path}: {of}")
        return tuple(inputs)

    def traced_as(self, call: Resolution, shapes: Shapes) -> str:
        """How the program of a call was traced, in words."""
        program = call.program
        if program is None:
            return "runs exact"
        inputs = self._inputs(*self.static_key(call.tokens, shapes))
        more = f" and {len(inputs) - _SHOWN} more" if len(inputs) > _SHOWN else ""
        why = program.pairing.why if program.pairing is not None else ""
        how = f", once at each size: {why}" if why else ""
        return f"traced as {', '.join(inputs[:_SHOWN])}{more}{how}"

    def why_again(self, call: Resolution, shapes: Shapes) -> str:
        """Why none of the programs before serves a call, in words."""
        key = self.static_key(call.tokens, shapes)
        traced = self.at(call.tokens, shapes)
        if before := [p for p in traced.programs() if p is not call.program]:
            sizes = ", ".join(f"{v} = {n}" for v, n in call.sizes.items())
            broken = {str(g): None for p in before for g in p.guards if not g.holds(call.sizes)}
            of = " and ".join(broken) or "of the traces"
            return f"traced anew: {sizes} breaks the guard {of}"
        if traced.count > 1:
            return "traced before, but dropped with the last of its executables"
        keys = [k for k, traced in self._traced.items() if traced.count and k != key]
        if not keys:
            return "new"
        tokens, sizes_before = keys[-1]
        changed = [
            f"axis {axis} of {self.paths[leaf]} is {shapes[leaf][axis]}, not {old}"
            for (leaf, axis, _), old in zip(places_of(tokens).static, sizes_before, strict=True)
            if shapes[leaf][axis] != old
        ]
        return f"traced anew: {', '.join(changed) or 'other axes are open'}"

    def static_key(self, tokens: Tokens, shapes: Shapes) -> Any:
        """The key that distinguishes programs: the tokens, and the sizes of the static axes."""
        return tokens, tuple(shapes[leaf][axis] for leaf, axis, _ in places_of(tokens).static)

    def at(self, tokens: Tokens, shapes: Shapes) -> KnownPrograms:
        """The programs and refusals for the open axes and static sizes of a call."""
        key = self.static_key(tokens, shapes)
        if key not in self._traced:
            # Static sizes that vary from call to call leave many that are gone.
            if len(self._traced) % _LOOKED_THROUGH == _LOOKED_THROUGH - 1:
                there = {k: t for k, t in self._traced.items() if t.refusals or t.programs()}
                self._traced = there
            self._traced[key] = KnownPrograms()
        return self._traced[key]

    def add(self, program: Interface, to: KnownPrograms) -> None:
        """Keep a program among those of the same static sizes, which `at` returns."""
        self.keep(program)
        to.add(program)

    def _leaves(self, tokens: Tokens, shapes: Shapes) -> list[Leaf]:
        rows = zip(self.paths, resolution.open_shapes(tokens, shapes), self.types, strict=True)
        return [
            Leaf(path, shape, kind.dtype, kind.weak_type, kind.sharding)
            for path, shape, kind in rows
        ]

    def _trace(self, tokens: Tokens, shapes: Shapes, sizes: Mapping[str, int]) -> Program:
        leaves, constraints = self._leaves(tokens, shapes), self._constraints(tokens)
        return trace(self.fn, self.in_tree, leaves, sizes, constraints)

    def _trace_static(self, shapes: Shapes) -> Program:
        """The program where all axes are static; computed sizes alone are symbolic."""
        return self._trace(tuple((STATIC,) * len(shape) for shape in shapes), shapes, {})

    def evenness(self, tokens: Tokens) -> list[Guard]:
        """A guard such as ``mod(b, 2) == 0`` for each axis that a mesh cuts into equal parts."""
        if not self._is_cut:
            return []
        return [
            Guard(f"mod({token}, {count})", "==", "0")
            for row, kind in zip(tokens, self.types, strict=True)
            for token, count in zip(row, kind.partitions or (), strict=False)
            if count > 1 and token != STATIC and not token.isdigit()
        ]

    def _constraints(self, tokens: Tokens) -> list[str]:
        opened = set(resolution.variables_in(tokens))
        texts = [text for text in self.constraints if parse_constraint(text).variables <= opened]
        return list(dict.fromkeys([*texts, *map(str, self.evenness(tokens))]))

    def attempt(self, tokens: Tokens, shapes: Shapes) -> Resolution:
        """Trace the function for a call: with symbolic sizes, or else at several concrete ones."""
        if self._instead is not None:
            return self._instead(tokens, shapes)
        with holding_output() as held:
            call = self._attempt(tokens, shapes)
            leaves = self._leaves(tokens, shapes)
            call = resolution.refusing_one_size(
                *(call, self._constraints(tokens), self.fn, self.at(tokens, shapes).programs()),
                lambda n: self._tracer(tokens, shapes).at(n),
                lambda n: self._attempt(tokens, [leaf.at(n) for leaf in leaves]),
            )
            held.is_dropped = call.program is None  # the exact run shows it
            return call

    @forgetful_jax()
    def _attempt(self, tokens: Tokens, shapes: Shapes) -> Resolution:
        sizes = resolution.bind_sizes(tokens, shapes, self.paths)
        program: Program | TraceRefused | RuntimeError
        try:
            program = self._trace(tokens, shapes, sizes)
        except TraceRefused as refusal:
            program = refusal.placed(self.fn)
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise
            program = error
        # Not in the `except` block, or errors of the second trace would show the first one as
        # their context.
        if isinstance(program, RuntimeError):
            with raised_anew(program):
                self._tree_at(tokens, shapes, sizes)  # raises the function's own error
            if _ASKED_SYMBOLICALLY not in getattr(program, "__notes__", ()):
                program.add_note(_ASKED_SYMBOLICALLY)
            raise program
        if isinstance(program, TraceRefused):
            if program.computes_sizes:  # concrete traces cannot compute sizes
                return Resolution(tokens, sizes, None, program)
            return self._pair(tokens, shapes, sizes, program)
        # Opaque data in the tree may hold a size. It does if a concrete trace has another tree.
        if program.may_hold_sizes:
            nested = self._tree_at(tokens, shapes, sizes)
            if not same_tree(nested, program.out_tree):
                return self._pair(tokens, shapes, sizes, size_in_data().placed(self.fn))
        is_fixed = any(sizes[v] > 1 for v in fixed_by(program.guards, sizes))
        if is_fixed and not program.computed:  # it serves one size; concrete traces may do more
            call = self._pair(tokens, shapes, sizes)
            # A concrete trace does not hold what a primitive of another library decides.
            if isinstance(call.program, Program) and not any(decisions_inside(call.program.jaxpr)):
                return call
        roomy = tuple(filter(self._has_room, sizes))
        return Resolution(tokens, sizes, replace(program, roomy=roomy))

    def program_of(self, call: Resolution, shapes: Shapes) -> Program:
        """A program of a call whose sizes are all static; its guards keep other sizes away."""
        guards = tuple(Guard(v, "==", str(n)) for v, n in call.sizes.items())
        return replace(self._trace_static(shapes), guards=guards, lower=dict(call.sizes))

    def _tree_at(self, tokens: Tokens, shapes: Shapes, sizes: dict[str, int]) -> Any:
        """The tree of the results at the sizes of a call; None if it cannot be traced there."""
        with contextlib.suppress(TraceRefused):
            return self._tracer(tokens, shapes).at(sizes).out_tree
        with contextlib.suppress(TraceRefused):
            return self._trace_static(shapes).out_tree
        return None

    def computing(self, tokens: Tokens, shapes: Shapes) -> Program | None:
        """The program of a function that computes sizes; None if it does not, or is refused."""
        if self._instead is not None:
            self._instead(tokens, shapes)
            return None
        with contextlib.suppress(TraceRefused):
            program = self._trace(tokens, shapes, resolution.bind_sizes(tokens, shapes, self.paths))
            return program if program.computes_sizes else None
        return None

    def _tracer(self, tokens: Tokens, shapes: Shapes) -> Tracer:
        from bucketjit._tracing.concrete import Tracer

        tracer = self.at(tokens, shapes).tracer()
        return tracer or Tracer(self.fn, self.in_tree, self._leaves(tokens, shapes))

    def _pair(
        self,
        tokens: Tokens,
        shapes: Shapes,
        sizes: dict[str, int],
        refusal: TraceRefused | None = None,
    ) -> Resolution:
        """Resolve a call by concrete traces. Without a program it has both kinds of refusals."""
        from bucketjit._tracing.pairing import pair

        traced = self.at(tokens, shapes)
        samples = [p.pairing.samples[0] for p in traced.programs() if p.pairing]
        tracer = self._tracer(tokens, shapes)
        traced.tracer = lambda: tracer
        try:
            with raised_anew(None if refusal is None else refusal.cause):
                tracer.at(sizes)  # an error of the function itself is raised, as by the exact run
            if not self._pairs or len(samples) >= _MAX_PAIRED:
                return Resolution(tokens, sizes, None, refusal)
            why = "" if refusal is None else refusal.reason
            program = pair(tracer, sizes, self._constraints(tokens), samples, why)
        except TraceRefused as second:
            if refusal is not None:
                reason = f"{refusal.reason}; {second.reason}"
                remedy = f"{refusal.remedy}; {second.remedy}"
                # The general remedy adds nothing. That traces of a loop differ is no other reason.
                if second.remedy == COMPUTE:
                    remedy = refusal.remedy
                    reason = refusal.reason if remedy == LOOP else reason
                refusal = TraceRefused(reason, remedy, refusal.cause, second.computes_sizes)
            return Resolution(tokens, sizes, None, refusal)
        size_constants = program.size_constants(sizes)
        if size_constants is None:  # the function does something else each time it is traced
            return Resolution(tokens, sizes, None, refusal)
        traced.tracer = weakref.ref(tracer)  # the program holds it from now on
        return Resolution(tokens, sizes, program, size_constants=size_constants)
