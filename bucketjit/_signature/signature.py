"""One function signature, sizes aside: which axes are open, and the programs traced for it.

A *family* is every call with the same tree, dtypes, weak types, ranks, static arguments and
configuration. It knows a token per axis (a dimension variable, an expression, or static), and
keeps one program per set of static sizes and guards. Axes without a name (the default rule, or
GoMLX's list of axes) are named by the sizes of the first call, and learn: an axis that was
taken as static and then varies is opened.

A function that cannot be traced at some sizes may be traced at others, most often at larger ones:
at 2 rows, half of them is one row, and JAX broadcasts that. So a refusal is of the sizes of its
call; `Refused` decides how often others are tried.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bucketjit._errors import ArgumentError, SpecError, is_of_machine
from bucketjit._signature.binding import bind_sizes, check_declared
from bucketjit._signature.leaf_types import LeafType
from bucketjit._signature.resolved_call import Call
from bucketjit._signature.traced_programs import Refused, Traced
from bucketjit._sizes.dynamic_axes import STATIC, Anonymous, LeafSpec, Tokens, places_of, tokens_of
from bucketjit._sizes.expressions import bind_unique_names
from bucketjit._sizes.guards import Guard, parse_constraint
from bucketjit._tracing.concrete import Tracer, pair
from bucketjit._tracing.output_trees import same_tree
from bucketjit._tracing.program import Leaf, Program, TraceRefused, size_in_data
from bucketjit._tracing.symbolic import COMPUTE, trace

Shapes = Sequence[tuple[int, ...]]

_MAX_GUESSES = 64

_SHOWN = 8  # arguments, or reasons, in one line of a log

_MAX_PAIRED = 8  # programs of concrete traces, which are made where sizes decide what is done

_LOOKED_THROUGH = 64  # sets of static sizes, at which those without a program are first looked for


class Family:
    """The programs of one signature.

    A program is kept from when it is traced. Once one of its executables has had to leave the cache
    (`release`) it is kept for as long as others hold it, as the keys of its executables do.

    Args:
        fn: The function with its static arguments bound.
        in_tree: Tree of ``(args, kwargs)``.
        types: Type of each leaf.
        paths: How errors name each leaf.
        specs: Entry of ``dynamic_axes`` for each leaf.
        constraints: The user's constraints on sizes.
        learns: Whether a static axis that varies is opened (the default rule).
        why: Why there is such a family, in words.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        in_tree: Any,
        types: Sequence[LeafType],
        paths: Sequence[str],
        specs: Sequence[LeafSpec],
        constraints: Sequence[str],
        learns: bool = False,
        why: str = "new",
    ) -> None:
        self.fn = fn
        self.in_tree = in_tree
        self.types = tuple(types)
        self._is_cut = any(kind.partitions for kind in self.types)
        self.paths = tuple(paths)
        self.specs = tuple(specs)
        self.constraints = tuple(constraints)
        self._named = not learns and not any(isinstance(s, Anonymous) for s in specs)
        self._learns = learns
        self._declared = _names_in(specs)
        self._tokens: Tokens | None = None
        self._traced: dict[Any, Traced] = {}
        self._look_through_at = _LOOKED_THROUGH
        self._kept: set[Program] = set()
        self._last: Shapes = ()
        self._closed: dict[tuple[int, int], Refused] = {}
        self._refusal: TraceRefused | None = None
        self._reasons = [why]  # for what is learnt next
        self._news: list[str] = []
        self._told: weakref.WeakKeyDictionary[Program, tuple[Tokens, Shapes]]
        self._told = weakref.WeakKeyDictionary()
        self._open_leaves: tuple[Tokens, list[int]] = ((), [])

    @contextmanager
    def unlearning(self) -> Iterator[None]:
        """Forget afterwards which axes were opened meanwhile."""
        learnt, news, told = self._learnt(), list(self._news), dict(self._told)
        try:
            yield
        finally:
            self._unlearn_to(learnt)
            self._news, self._told = news, weakref.WeakKeyDictionary(told)

    def _learnt(self) -> tuple[Any, ...]:
        """What `_unlearn_to` goes back to: the axes that are open, and why they are."""
        return self._tokens, self._last, dict(self._closed), self._refusal, list(self._reasons)

    def _unlearn_to(self, learnt: tuple[Any, ...]) -> None:
        self._tokens, self._last, self._closed, self._refusal, self._reasons = learnt

    @property
    def tokens(self) -> Tokens | None:
        """A token per axis of each leaf; None before the first call."""
        return self._tokens

    def open_leaves(self, tokens: Tokens) -> list[int]:
        """Positions of the leaves that have open axes, or are sizes themselves."""
        known, found = self._open_leaves
        if known is not tokens:
            opened = {place.leaf for place in places_of(tokens).opened}
            found = [i for i, kind in enumerate(self.types) if kind.dtype is None or i in opened]
            self._open_leaves = tokens, found
        return found

    def resolve(self, shapes: Shapes) -> Call:
        """Find or trace the program for a call of these shapes.

        Args:
            shapes: Shape of each leaf; of a size leaf ``(size,)``.

        Returns:
            The call with its program, or with the reason why there is none.

        Raises:
            SizeMismatchError: One variable is given two sizes.
            ArgumentError: A size does not fit what was declared.
        """
        learnt = self._learnt()
        try:
            if self._tokens is None:
                call = self._first(shapes)
            else:
                if not self._named:
                    self._split_groups(shapes)
                opening = None if self._named else self._open_what_varies(shapes)
                call = opening or self._serve(self._tokens, shapes)
        except BaseException:  # a call that fails teaches nothing
            self._unlearn_to(learnt)
            raise
        if self._reasons or (call.program is not None and call.program not in self._told):
            self._note(call, shapes)
        return call

    def release(self, program: Program) -> None:
        """Keep a program no longer than others hold it, until it serves another call."""
        self._kept.discard(program)

    def take_news(self) -> list[str]:
        """What was learnt since this was asked last, in words, one line each."""
        if not self._news:
            return []
        news, self._news = self._news, []
        return news

    def _note(self, call: Call, shapes: Shapes) -> None:
        """Take note of a program that serves for the first time, and why it was traced."""
        program = call.program
        reasons, self._reasons = self._reasons, []
        if program is None:
            self._news.append(f"{'; '.join(reasons[:_SHOWN])}; runs exact")
            return
        if not reasons:
            reasons = [self._why_again(call, shapes)]
        served = self._told.setdefault(program, (call.tokens, tuple(shapes)))
        inputs = self._inputs(self._static_key(*served))
        more = f" and {len(inputs) - _SHOWN} more" if len(inputs) > _SHOWN else ""
        shown = ", ".join(inputs[:_SHOWN])
        how = f"traced as {shown}{more}"
        if program.pairing is not None and program.pairing.why:
            how += f", once at each size: {program.pairing.why}"
        self._news.append(f"{'; '.join(reasons[:_SHOWN])}; {how}")

    def _why_again(self, call: Call, shapes: Shapes) -> str:
        """Why no program that was there serves a call."""
        key = self._static_key(call.tokens, shapes)
        alike = [p for p, served in self._told.items() if self._static_key(*served) == key]
        if alike:
            sizes = ", ".join(f"{v} = {n}" for v, n in call.sizes.items())
            broken = {str(g): None for p in alike for g in p.guards if not g.holds(call.sizes)}
            return f"re-signed: {sizes} breaks the guard {' and '.join(broken) or 'of the traces'}"
        if self._at(call.tokens, shapes).is_traced_again:
            return "traced before, but dropped with the last of its executables"
        if not self._told:
            return "new"
        _, before = list(self._told.values())[-1]
        changed = [
            f"axis {axis} of {path} is {now}, not {old}"
            for path, row, olds, news in zip(self.paths, call.tokens, before, shapes, strict=True)
            for axis, (token, old, now) in enumerate(zip(row, olds, news, strict=True))
            if token == STATIC and old != now
        ]
        return f"re-signed: {', '.join(changed) or 'other axes are open'}"

    def _inputs(self, key: Any) -> tuple[str, ...]:
        """The arguments with open axes, as people write them: ``x: float32[b, s, 64]``."""
        tokens, static = key
        rest, found = iter(static), []
        for path, row, kind in zip(self.paths, tokens, self.types, strict=True):
            dims = ", ".join([str(next(rest)) if token == STATIC else token for token in row])
            if all(token == STATIC or token.isdigit() for token in row):
                continue
            found.append(
                f"{path}: size {dims}" if kind.dtype is None else f"{path}: {kind.dtype}[{dims}]"
            )
        return tuple(found)

    def programs(self) -> list[tuple[tuple[str, ...], Program]]:
        """The programs so far, each with the arguments that have open axes."""
        return [
            (self._inputs(key), program)
            for key, traced in list(self._traced.items())
            for program in traced.programs()
        ]

    def declared_sizes(self, shapes: Shapes) -> dict[str, int]:
        """The sizes of the variables that the user named, checked and without tracing.

        Raises:
            SizeMismatchError: One variable is given two sizes.
            ArgumentError: A size does not fit what was declared.
        """
        self._anonymous_axes(shapes)
        sizes = bind_sizes(self._with_axes(shapes, {}), shapes, self.paths)
        if self._named:
            self._check_constraints(sizes)
        return sizes

    def declared_tokens(self, shapes: Shapes) -> Tokens:
        """The axes that the user named; all others are static."""
        return self._with_axes(shapes, {})

    def guessed_tokens(self, shapes: Shapes) -> Tokens:
        """The axes that the user named or listed; those of one size share a name, if not given."""
        names = {} if self._named else next(self._guesses(shapes, self._anonymous_axes(shapes)), {})
        return self._with_axes(shapes, names)

    def guessed_sizes(self, shapes: Shapes) -> dict[str, int]:
        """The sizes along `guessed_tokens`, for the statistics of calls without a program."""
        return bind_sizes(self.guessed_tokens(shapes), shapes, self.paths)

    # --- the first call ---

    def _first(self, shapes: Shapes) -> Call:
        if self._named:
            self._tokens = self._with_axes(shapes, {})
            return self._serve(self._tokens, shapes)
        wanted = self._anonymous_axes(shapes)
        if any(shapes[leaf][axis] == 0 for leaf, axis in wanted):
            # Nothing can be learnt from an empty array: run exact, decide on a later call.
            return Call(self._with_axes(shapes, {}), {}, None)
        refusal: TraceRefused | None = None
        pinned: tuple[Tokens, Call] | None = None
        for names in self._guesses(shapes, wanted):
            tokens = self._with_axes(shapes, names)
            call = self._attempt(tokens, shapes)
            if call.program is None:
                refusal = refusal or call.refusal
            elif any(g.pins for g in call.program.guards):
                # An open axis that is good for one size is better static, if others stay open.
                pinned = pinned or (tokens, call)
            elif call.sizes or pinned is None:
                return self._settle(tokens, shapes, call)
        if pinned is not None:
            return self._settle(pinned[0], shapes, pinned[1])
        self._refusal = refusal and refusal.without_frames()
        self._close(wanted, shapes)
        tokens = self._with_axes(shapes, {})
        return self._settle(tokens, shapes, Call(tokens, {}, None, refusal))

    def _settle(self, tokens: Tokens, shapes: Shapes, call: Call) -> Call:
        self._tokens, self._last = tokens, tuple(shapes)
        if call.program is not None:
            self._add(call.program, self._at(tokens, shapes))
        return call

    def _anonymous_axes(self, shapes: Shapes) -> list[tuple[int, int]]:
        axes = []
        for leaf, spec in enumerate(self.specs):
            if isinstance(spec, Anonymous):
                rank = len(shapes[leaf])
                for axis in spec.axes:
                    if not -rank <= axis < rank:
                        raise ArgumentError(
                            f"{self.paths[leaf]}: dynamic axis {axis} does not exist in an array "
                            f"of shape {tuple(shapes[leaf])}"
                        )
                    axes.append((leaf, axis % rank))
        return axes

    def _guesses(
        self, shapes: Shapes, wanted: Sequence[tuple[int, int]]
    ) -> Iterator[dict[tuple[int, int], str]]:
        """Which axes to open, and under which names: the more the better.

        All of them, those of one size sharing a variable; all of them, each its own; then
        without some groups of one size (weights beside data); then without single axes (a
        weight that happens to have the size of the batch).
        """
        shared: dict[tuple[int, int], str] = {}
        for leaf, axis in wanted:
            self._name(shared, leaf, axis, shapes)
        if not shared:
            return
        yield shared
        own: dict[tuple[int, int], str] = {}
        for leaf, axis in wanted:
            own[leaf, axis] = self._new_name(axis, own)
        if own != shared:
            yield own
        groups = list(dict.fromkeys(shared.values()))
        seen = [set(wanted)]
        trials = itertools.chain(
            ([k for k in wanted if shared[k] in some] for some in _smaller_subsets(groups)),
            _smaller_subsets(wanted),
        )
        for kept in itertools.islice(trials, _MAX_GUESSES):
            if kept and set(kept) not in seen:
                seen.append(set(kept))
                names: dict[tuple[int, int], str] = {}
                for leaf, axis in kept:
                    self._name(names, leaf, axis, shapes)
                yield names

    def _name(
        self, names: dict[tuple[int, int], str], leaf: int, axis: int, shapes: Shapes
    ) -> None:
        for (other, its_axis), name in names.items():
            if its_axis == axis and shapes[other][axis] == shapes[leaf][axis]:
                names[leaf, axis] = name
                return
        names[leaf, axis] = self._new_name(axis, names)

    def _new_name(self, axis: int, names: Mapping[tuple[int, int], str]) -> str:
        return bind_unique_names(_base_name(axis), {*names.values(), *self._declared})

    # --- learning ---

    def _unnamed_axes(self, shapes: Shapes) -> list[tuple[int, int]]:
        """The axes that are opened, or get another variable, as calls show how they vary."""
        if self._learns:
            return [(leaf, axis) for leaf, shape in enumerate(shapes) for axis in range(len(shape))]
        return self._anonymous_axes(shapes)

    def _split_groups(self, shapes: Shapes) -> None:
        """Axes that shared a variable and now differ get their own."""
        assert self._tokens is not None
        seen: dict[str, int] = {}
        rows = [list(row) for row in self._tokens]
        renamed: dict[tuple[str, int], str] = {}
        told: set[tuple[str, int]] = set()
        for leaf, axis in self._unnamed_axes(shapes):
            token, size = rows[leaf][axis], shapes[leaf][axis]
            if token == STATIC or seen.setdefault(token, size) == size:
                continue
            taken = {t for row in rows for t in row}
            name = renamed.setdefault((token, size), bind_unique_names(_base_name(axis), taken))
            if (token, size) not in told:
                told.add((token, size))
                self._reasons.append(
                    f"re-signed: axis {axis} of {self.paths[leaf]} is {size} where {token} is "
                    f"{seen[token]}: opened as {name}"
                )
            seen[name] = size
            rows[leaf][axis] = name
        if renamed:
            self._tokens = tuple(map(tuple, rows))

    def _open_what_varies(self, shapes: Shapes) -> Call | None:
        """Open the static axes that changed since the last program was traced.

        Returns:
            The call, if it was traced for that.
        """
        assert self._tokens is not None
        if not self._last or any(0 in shape for shape in shapes):
            return None
        rows = [list(row) for row in self._tokens]
        changed: dict[tuple[int, int], str] = {}
        opened: list[tuple[int, int]] = []
        for leaf, axis in self._unnamed_axes(shapes):
            before, now = self._last[leaf][axis], shapes[leaf][axis]
            if rows[leaf][axis] != STATIC or before == now:
                continue
            if not self._closed.get((leaf, axis), Refused()).may_do_at((now,)):
                continue
            name = changed.get((before, now)) or self._variable_that_moved(before, now, shapes)
            if name is None:
                taken = {t for row in rows for t in row}
                name = bind_unique_names(_base_name(axis), taken)
            changed[before, now] = name
            rows[leaf][axis] = name
            opened.append((leaf, axis))
        if not changed:
            return None
        tokens = tuple(map(tuple, rows))
        varied = [
            f"re-signed: axis {axis} of {self.paths[leaf]} varies ({self._last[leaf][axis]}, then "
            f"{shapes[leaf][axis]})"
            for leaf, axis in opened
        ]
        call = self._attempt(tokens, shapes)
        traced_at, traced, tried = shapes, call, [shapes]
        if call.program is None and self._is_larger_before(opened, shapes):
            tried.append(self._last)
            traced_at, traced = self._last, self._attempt_before(tokens) or call
        if traced.program is not None:
            names = [rows[leaf][axis] for leaf, axis in opened]
            self._reasons += [f"{v}: opened as {n}" for v, n in zip(varied, names, strict=True)]
            self._settle(tokens, traced_at, traced)
            return call
        why = "it cannot be traced" if call.refusal is None else call.refusal.reason
        self._reasons += [f"{v}, and cannot be opened: {why}" for v in varied]
        self._refusal = call.refusal and call.refusal.without_frames()
        for refused_at in tried:
            self._close(opened, refused_at)
        return None

    def _is_larger_before(self, axes: Sequence[tuple[int, int]], shapes: Shapes) -> bool:
        """Whether an axis was larger when the last program was traced, and may be opened there."""
        sizes = [(self._last[leaf][axis], shapes[leaf][axis]) for leaf, axis in axes]
        closed = [self._closed.get(place, Refused()) for place in axes]
        return any(
            before > now and refused.may_do_at((before,))
            for (before, now), refused in zip(sizes, closed, strict=True)
        )

    def _close(self, axes: Sequence[tuple[int, int]], shapes: Shapes) -> None:
        """Take note of axes that could not be opened at these sizes."""
        for leaf, axis in axes:
            closed = self._closed.get((leaf, axis), Refused())
            self._closed[leaf, axis] = closed.and_at((shapes[leaf][axis],))

    def _attempt_before(self, tokens: Tokens) -> Call | None:
        """`_attempt` at the sizes before these, where the function has been run."""
        try:
            return self._attempt(tokens, self._last)
        except Exception as error:
            if is_of_machine(error):
                raise
            return None  # these sizes are not those of the call, to whom it would be raised

    def _variable_that_moved(self, before: int, now: int, shapes: Shapes) -> str | None:
        """The open variable that went from ``before`` to ``now`` as well, if there is one."""
        assert self._tokens is not None
        for row, old, new in zip(self._tokens, self._last, shapes, strict=True):
            for token, a, b in zip(row, old, new, strict=True):
                if token.isidentifier() and token != STATIC and (a, b) == (before, now):
                    return token
        return None

    # --- programs ---

    def _with_axes(self, shapes: Shapes, names: Mapping[tuple[int, int], str]) -> Tokens:
        rows = []
        for leaf, (spec, shape) in enumerate(zip(self.specs, shapes, strict=True)):
            if isinstance(spec, Anonymous):
                rows.append(tuple(names.get((leaf, i), STATIC) for i in range(len(shape))))
            else:
                rows.append(tokens_of(spec, len(shape), self.paths[leaf], shape))
        for row, shape, path in zip(rows, shapes, self.paths, strict=True):
            for axis, (token, size) in enumerate(zip(row, shape, strict=True)):
                if token.isdigit():
                    check_declared(token, size, f"axis {axis} of {path}")
        return tuple(rows)

    def _static_key(self, tokens: Tokens, shapes: Shapes) -> Any:
        return tokens, tuple(shapes[leaf][axis] for leaf, axis, _ in places_of(tokens).static)

    def _at(self, tokens: Tokens, shapes: Shapes) -> Traced:
        key = self._static_key(tokens, shapes)
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

    def _add(self, program: Program, to: Traced) -> None:
        self._kept.add(program)
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

    def _even(self, tokens: Tokens) -> list[Guard]:
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
        return list(dict.fromkeys([*self.constraints, *map(str, self._even(tokens))]))

    def _attempt(self, tokens: Tokens, shapes: Shapes) -> Call:
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
        return Call(tokens, sizes, program)

    def _tracer(self, tokens: Tokens, shapes: Shapes) -> Tracer:
        known = self._at(tokens, shapes).tracer()
        return known or Tracer(self.fn, self.in_tree, self._leaves(tokens, shapes))

    def _pair(
        self,
        tokens: Tokens,
        shapes: Shapes,
        sizes: dict[str, int],
        refusal: TraceRefused | None = None,
    ) -> Call:
        """Concrete traces in place of a symbolic one."""
        traced = self._at(tokens, shapes)
        known = [p.pairing.samples[0] for p in traced.programs() if p.pairing]
        tracer = self._tracer(tokens, shapes)
        traced.tracer = lambda: tracer
        try:
            tracer.at(sizes)  # what it raises by itself, the exact run raises too
            if len(known) >= _MAX_PAIRED:
                return Call(tokens, sizes, None, refusal)
            why = "" if refusal is None else refusal.reason
            program = pair(tracer, sizes, self._constraints(tokens), known, why)
        except TraceRefused as second:
            if refusal is not None:
                reason = f"{refusal.reason}; {second.reason}"
                both = f"{refusal.remedy}; {second.remedy}"
                remedy = refusal.remedy if second.remedy == COMPUTE else both
                refusal = TraceRefused(reason, remedy, refusal.cause)
            return Call(tokens, sizes, None, refusal)
        leaks = program.leaks(sizes)
        if leaks is None:  # it is not traced the same way twice
            return Call(tokens, sizes, None, refusal)
        traced.tracer = weakref.ref(tracer)  # which the program holds
        return Call(tokens, sizes, program, leaks=leaks)

    def _serve(self, tokens: Tokens, shapes: Shapes) -> Call:
        sizes = bind_sizes(tokens, shapes, self.paths)
        self._check_constraints(sizes)
        for guard in self._even(tokens):
            if not guard.holds(sizes):
                raise ArgumentError(f"sizes {sizes} cannot be sharded as given: {guard} is wanted")
        if not sizes:
            return Call(tokens, sizes, None, self._refusal)
        if min(sizes.values()) < 1:
            return Call(tokens, sizes, None)
        known = self._at(tokens, shapes)
        for program in known.programs():
            if (leaks := program.leaks(sizes)) is not None:
                self._kept.add(program)
                return Call(tokens, sizes, program, leaks=leaks)
        if (refusal := known.refusal(sizes)) is not None:
            return Call(tokens, sizes, None, refusal)
        call = self._attempt(tokens, shapes)
        if call.program is not None:
            self._add(call.program, known)
        return call

    def remember_refusal(self, call: Call, shapes: Shapes) -> None:
        """Do not try to trace this again: the exact run has succeeded."""
        if call.refusal is not None:
            self._at(call.tokens, shapes).refuse(call.sizes, call.refusal)

    def _check_constraints(self, sizes: Mapping[str, int]) -> None:
        for text in self.constraints:
            guard = parse_constraint(text)
            if guard.variables <= sizes.keys() and not guard.holds(sizes):
                raise ArgumentError(f"sizes {dict(sizes)} break the constraint {text!r}")
            if unknown := guard.variables - sizes.keys():
                raise SpecError(
                    f"constraint {text!r} names {sorted(unknown)}, which dynamic_axes does not"
                )


def _smaller_subsets(items: Sequence[Any]) -> Iterator[list[Any]]:
    """Proper subsets, larger ones first, later items kept rather than earlier ones."""
    for size in range(len(items) - 1, 0, -1):
        for kept in sorted(itertools.combinations(range(len(items)), size), reverse=True):
            yield [items[i] for i in kept]


def _names_in(specs: Sequence[LeafSpec]) -> frozenset[str]:
    """Every name that the user's own entries speak of (and words of theirs that are none)."""
    return frozenset(re.findall(r"\w+", repr([s for s in specs if not isinstance(s, Anonymous)])))


def _base_name(axis: int) -> str:
    return "batch" if axis == 0 else f"axis{axis}"


def is_default_name(name: str) -> bool:
    """Whether an axis that the user has not named may get this name."""
    return re.fullmatch(r"(batch|axis[1-9]\d*)(_\d+)?", name) is not None
