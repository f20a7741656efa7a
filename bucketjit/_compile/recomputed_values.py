"""Find values that a program compares with themselves, or with what it has chosen among them.

    y = sub x (mul a b)      computed: it may be rounded in two ways
    m = reduce_max y         chosen among the elements of y
    c = eq y m               compares y with m, so this pass returns y

XLA's CPU backend may compute ``y`` in each kernel that reads it, and round it differently there:
``x - a * b`` in one step or in two (jaxlib 0.10.2 and 0.12, in ``jax.jit`` too). Then no element
equals the maximum, and its gradient is lost. Masks and padding can trigger or hide it. This pass
finds the values that must be computed once; a hook of the interpreter keeps them in memory.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from bucketjit._ir.primitive_facts import ELEMENTWISE
from bucketjit._jax import jaxprs
from bucketjit._jax.jaxprs import Atom, all_equations, is_literal, open_jaxpr, scan_arity
from bucketjit._jax.primitives import CALLBACKS, CALLS, called_jaxpr, name_of

# Sets of primitives. Choices return some of the numbers of an operand.
_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to"))
_CHOICES = frozenset(
    (
        *("reduce_max", "reduce_min", "argmax", "argmin", "cummax", "cummin", "reduce"),
        *("sort", "top_k", "approx_top_k", "reduce_window_max", "reduce_window_min"),
        *("reduce_window", "scatter-max", "scatter-min", "select_and_gather_add"),
        *("max", "min", "clamp"),
    )
)
# Their results have the numbers of their first operand, up to the sign.
_MOVES = frozenset(
    (
        *("broadcast_in_dim", "reshape", "transpose", "squeeze", "rev", "copy", "stop_gradient"),
        *("convert_element_type", "reduce_precision", "neg", "abs", "real", "imag"),
        "bitcast_convert_type",
        *("slice", "dynamic_slice", "gather", "split", "unstack"),
        *("sharding_constraint", "reshard", "pvary", "reduce_max", "reduce_min"),
        *("cummax", "cummin", "top_k", "approx_top_k", "reduce_window_max", "reduce_window_min"),
    )
)
# Each result has the numbers of the operand in the same place.
_MOVES_OF_EACH = frozenset(("sort", "optimization_barrier", "device_put"))
# Their results have numbers of several operands, and may have others in some positions.
_MIXTURES = frozenset(
    (
        *("concatenate", "stack", "pad", "dynamic_update_slice", "select_n", "max", "min", "clamp"),
        *("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-max", "scatter-min"),
        *("reduce", "reduce_window", "select_and_gather_add"),
    )
)
_MOVES_BITS = _MOVES - {"convert_element_type"}
_FUNCTIONS = frozenset(ELEMENTWISE) - _MOVES - _MIXTURES
_COMPUTED = _FUNCTIONS | {"reduce_sum", "reduce_prod"}
_DIFFERENCES = frozenset(("sub", "add", "add_any", "div"))  # ``y + -m`` is 0, ``y / m`` is 1
_DECIDE_BY_TWO = _DIFFERENCES | _COMPARISONS | {"rem"}
_KEEP_DIFFERENCES = frozenset(ELEMENTWISE) | _MOVES | _MOVES_OF_EACH | _MIXTURES
# At a difference of nearly 0, or just below 0, they return something quite different than at 0.
_READ_SIGNS = frozenset(
    (
        *("sign", "sqrt", "rsqrt", "cbrt", "log", "log2", "log1p", "pow", "floor", "ceil", "round"),
        *("asin", "acos", "acosh", "atanh", "bitcast_convert_type", *_COMPARISONS),
    )
)
_READ = _READ_SIGNS | {"convert_element_type", "rem", "div"}  # in some cases; see `_read`
_STEPS = 4  # operations on a value, and on what was chosen among it, that origins record
# The same operands need not give the same result.
_ANEW = frozenset(("rng_uniform", "empty", "ffi_call", *CALLBACKS))
_Values = frozenset[int]  # values or sources, by number
_Origins = frozenset[tuple[int, tuple[Hashable, ...]]]
_NONE: _Values = frozenset()


class _Facts(NamedTuple):
    """What is known of a value.

    Attributes:
        number: Identifies the value. Two values with one number are computed by the same operations
            on the same operands, so XLA computes one of them.
        source: The number of the computed or mixed value whose elements it has, or None.
        chosen: The sources whose elements something was chosen among, on the way to this value.
        nearly: The sources from which it subtracts what was chosen among them, or the other way.
        origins: The sources that the value is a function of, each with the operations in between.
            The same operations on a source, and on what was chosen among it, have equal results.
    """

    number: int
    source: int | None = None
    chosen: _Values = _NONE
    nearly: _Values = _NONE
    origins: _Origins = frozenset()


def recomputed_values(jaxpr: Jaxpr) -> Mapping[Any, Hashable]:
    """The variables that must be computed once, those of inner programs included."""
    names = {name_of(eqn) for eqn in all_equations(jaxpr)}
    if names.isdisjoint(_READ) or names.isdisjoint(_CHOICES | _COMPARISONS):
        return {}
    work = _Following()
    work.program(jaxpr, work.unknown(jaxpr.invars))
    found = work.to_keep()
    return {
        var: tuple(numbers)
        for var, numbers in work.numbers.items()
        if not found.isdisjoint(numbers)
    }


class _Following:
    """Follows programs, and collects the values that must be computed once.

    Attributes:
        numbers: For each variable, the number of its value in each call of its program.
    """

    def __init__(self) -> None:
        self.numbers: dict[Any, list[int]] = defaultdict(list)
        self._found: set[int] = set()
        self._numbers: dict[Hashable, int] = {}
        self._count = itertools.count()
        # By source: itself and the sources it is mixed from; the inverse of that; and the sources
        # that are in it more than once.
        self._made_of: dict[int, _Values] = {}
        self._made_from: dict[int, set[int]] = defaultdict(set)
        self._twice: dict[int, _Values] = {}
        # The loop that is followed. An operation in a loop is not shared with one outside, so it
        # gets another number.
        self._loop = 0

    def to_keep(self) -> _Values:
        """The values that must be computed once.

        A value that is in a mixture twice, as in ``concatenate([y, y])``, is one of them: two loops
        of one kernel would compute it.
        """
        parts = _all(self._made_of[n] for n in self._found)
        return _all(self._twice.get(n, _NONE) for n in parts) | self._found

    def unknown(self, variables: Sequence[Any]) -> list[_Facts]:
        """Facts for variables of which nothing is known: a new number for each."""
        return [_Facts(next(self._count)) for _ in variables]

    def program(self, jaxpr: Jaxpr, facts: Sequence[_Facts], is_call: bool = False) -> list[_Facts]:
        """Follow a program."""
        read_here = {v for eqn in jaxpr.eqns for v in eqn.invars if not is_literal(v)}
        env: dict[Any, _Facts] = dict(zip(jaxpr.invars, facts, strict=True))
        env.update(zip(jaxpr.constvars, self.unknown(jaxpr.constvars), strict=True))

        def read(atom: object) -> _Facts:
            return self._literal(atom) if is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
            for var, fact in zip(eqn.outvars, outs, strict=True):
                if not is_call or var in read_here:
                    self.numbers[var].append(fact.number)
        return [read(v) for v in jaxpr.outvars]

    # --- numbers and sources ---

    def _literal(self, atom: Any) -> _Facts:
        bits = np.asarray(atom.val).tobytes()
        return _Facts(self._number("literal", str(atom.aval), bits))

    def _number(self, *key: Hashable) -> int:
        """The number of a value that is computed as the key says."""
        if key not in self._numbers:
            self._numbers[key] = next(self._count)
        return self._numbers[key]

    def _is_made(self, number: int, parts: _Values = _NONE) -> int:
        """Note that this value is a source, mixed from ``parts``. Returns its number."""
        if number not in self._made_of:
            self._made_of[number] = parts | {number}
            for part in self._made_of[number]:
                self._made_from[part].add(number)
        return number

    def _is_mixture(self, number: int, sources: Iterable[int]) -> int:
        """Note that this value is a source which one kernel mixes from others; its number."""
        if number in self._made_of:
            return number
        parts, twice = _NONE, _NONE
        for source in sources:
            twice |= parts & self._made_of[source]
            parts |= self._made_of[source]
        if twice:
            self._twice[number] = self._latest(twice)
        return self._is_made(number, parts)

    def _shared(self, one: int | None, other: int | None) -> _Values:
        """The latest sources that two sources have in common."""
        if one is None or other is None:
            return _NONE
        return self._latest(self._made_of[one] & self._made_of[other])

    def _latest(self, parts: _Values) -> _Values:
        """The sources among these that none of the others is mixed from."""
        found = set()
        while parts:
            latest = max(parts)  # a mixture has a larger number than its parts
            found.add(latest)
            parts -= self._made_of[latest]
        return frozenset(found)

    def _near(self, one: _Facts, other: _Facts) -> _Values:
        """The sources in one operand that something in the other one was chosen among."""
        alike = {source for source, _ in one.origins & other.origins}
        return (
            self._among(one, other)
            | self._among(other, one)
            | (alike & (one.chosen | other.chosen))
        )

    def _among(self, value: _Facts, other: _Facts) -> _Values:
        """The sources of a value that something in the other value was chosen among."""
        if value.source is None or not other.chosen:
            return _NONE
        related = _all(self._made_from[n] for n in self._made_of[value.source])
        return _all(self._shared(value.source, n) for n in other.chosen & related)

    # --- equations ---

    def _equation(self, eqn: JaxprEqn, ins: Sequence[_Facts]) -> Sequence[_Facts]:
        name = name_of(eqn)
        if name in CALLS:
            inner = open_jaxpr(called_jaxpr(eqn.params))[0]
            if len(inner.invars) == len(ins):
                return self.program(inner, ins, is_call=True)
        chosen = _all(f.chosen for f in ins)
        bodies = list(jaxprs.bodies(eqn))
        if bodies or name in _CHOICES:  # a loop may choose, element by element
            chosen |= {f.source for f in ins if f.source is not None}
        if name in _LOOPS:
            outs = self._inside(_LOOPS[name], eqn, ins)
            return [f._replace(chosen=f.chosen | chosen) for f in outs]
        for body in bodies:  # of a primitive that is neither a call nor a known loop
            self.program(body, self.unknown(body.invars))
        near = self._near(*ins) if name in _DECIDE_BY_TWO else _NONE
        self._read(eqn, name, ins, near)
        # Elementwise operations and moves carry a difference on.
        nearly = _all(f.nearly for f in ins) if name in _KEEP_DIFFERENCES else _NONE
        if name in _DIFFERENCES:
            nearly |= near
        facts = []
        for i, out in enumerate(eqn.outvars):
            number = self._number_of(eqn, name, i, ins, bool(bodies))
            if _is_inexact(out) or _keeps_bits(eqn, name):
                source, origins = self._source(number, name, i, ins), _origins(name, ins)
                facts.append(_Facts(number, source, chosen, nearly, origins))
            else:
                facts.append(_Facts(number, None, chosen))
        return facts

    def _read(self, eqn: JaxprEqn, name: str, ins: Sequence[_Facts], near: _Values) -> None:
        """Note the values whose last bit may decide the result of an equation."""
        cut_off = name == "convert_element_type" and not _is_inexact(eqn.outvars[0])
        if name in _READ_SIGNS or cut_off:
            self._found |= _all(f.nearly for f in ins)
        if name == "div":
            self._found |= ins[1].nearly
        if name == "rem":
            self._found |= near
        if name in _COMPARISONS and ins[0].number != ins[1].number:  # ``y != y`` asks for NaN
            self._found |= near | self._shared(ins[0].source, ins[1].source)

    def _number_of(
        self, eqn: JaxprEqn, name: str, i: int, ins: Sequence[_Facts], has_bodies: bool
    ) -> int:
        # A primitive without a name is not one of JAX's, so nothing is known of its results.
        if not name or name in _ANEW or has_bodies or eqn.effects:
            return next(self._count)
        operands = (f.number for f in ins)
        return self._number(self._loop, name, _params(eqn), str(eqn.outvars[i].aval), i, *operands)

    def _source(self, number: int, name: str, i: int, ins: Sequence[_Facts]) -> int | None:
        if name in _MOVES or name in _MOVES_OF_EACH:
            return ins[i if name in _MOVES_OF_EACH else 0].source
        if name in _MIXTURES:
            given = ins[1:] if name == "select_n" else ins
            return self._is_mixture(number, [f.source for f in given if f.source is not None])
        return self._is_made(number) if name in _COMPUTED else None

    # --- loops and branches ---

    def _inside(
        self, follow: Callable[..., list[_Facts]], eqn: JaxprEqn, ins: Sequence[_Facts]
    ) -> list[_Facts]:
        """Follow a loop or branches. Returns facts about the results, without sources inside."""
        before, around = next(self._count), self._loop
        self._loop = before
        try:
            outs = follow(self, eqn, ins)
        finally:
            self._loop = around
        return [self._mixed([f], before) for f in outs]

    def _mixed(self, facts: Sequence[_Facts], before: int | None = None) -> _Facts:
        """Facts about a value in memory that is one of several."""
        number = next(self._count)
        sources = [f.source for f in facts if f.source is not None]
        parts = _all(self._made_of[n] for n in sources)
        chosen, nearly = _all(f.chosen for f in facts), _all(f.nearly for f in facts)
        if before is not None:
            parts, chosen, nearly = (
                frozenset(n for n in values if n < before) for values in (parts, chosen, nearly)
            )
        return _Facts(number, self._is_made(number, parts) if sources else None, chosen, nearly)

    def _branches(self, eqn: JaxprEqn, ins: Sequence[_Facts]) -> list[_Facts]:
        bodies = [open_jaxpr(branch)[0] for branch in eqn.params["branches"]]
        outs = [self.program(body, ins[1:]) for body in bodies]
        return [self._mixed(facts) for facts in zip(*outs, strict=True)]

    def _scan(self, eqn: JaxprEqn, ins: Sequence[_Facts]) -> list[_Facts]:
        (body,) = jaxprs.bodies(eqn)
        at, carries = scan_arity(eqn.params)
        # A row has numbers of its array, but is another value: it gets a new number.
        rows = [f._replace(number=next(self._count)) for f in ins[at + carries :]]
        carried, outs = self._repeated(
            ins[at : at + carries], lambda carried: self.program(body, [*ins[:at], *carried, *rows])
        )
        return [*carried, *outs[carries:]]

    def _while(self, eqn: JaxprEqn, ins: Sequence[_Facts]) -> list[_Facts]:
        of_condition, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        condition, body = (open_jaxpr(eqn.params[name])[0] for name in ("cond_jaxpr", "body_jaxpr"))
        consts, first = ins[of_condition : of_condition + of_body], ins[of_condition + of_body :]

        def once(carried: Sequence[_Facts]) -> list[_Facts]:
            self.program(condition, [*ins[:of_condition], *carried])
            return self.program(body, [*consts, *carried])

        return self._repeated(first, once)[0]

    def _repeated(
        self, first: Sequence[_Facts], once: Callable[[Sequence[_Facts]], list[_Facts]]
    ) -> tuple[list[_Facts], list[_Facts]]:
        """Follow a loop."""
        carried = [self._mixed([f]) for f in first]
        for _ in range(2):  # the second turn reads what the first one computed
            outs = once(carried)
            carried = [self._mixed(pair) for pair in zip(first, outs, strict=False)]
        return carried, outs


_LOOPS: Mapping[str, Callable[..., list[_Facts]]] = {
    "cond": _Following._branches,
    "scan": _Following._scan,
    "while": _Following._while,
}


def _keeps_bits(eqn: JaxprEqn, name: str) -> bool:
    """Whether an equation returns the bits of floats as integers, or moves such integers."""
    if name == "bitcast_convert_type":
        return True
    return name in _MOVES_BITS and not _is_inexact(eqn.invars[0])


def _origins(name: str, ins: Sequence[_Facts]) -> _Origins:
    """The origins of a result; see `_Facts`."""
    if name in _MOVES:
        return ins[0].origins
    if name not in _FUNCTIONS:
        return frozenset()
    known = [(i, f.origins | {(f.source, ())}) for i, f in enumerate(ins) if f.source is not None]
    return frozenset(
        (source, (*steps, (name, i)))
        for i, origins in known
        for source, steps in origins
        if len(steps) < _STEPS
    )


def _is_inexact(var: Atom) -> bool:
    return jnp.issubdtype(getattr(var.aval, "dtype", np.dtype(bool)), np.inexact)


def _params(eqn: JaxprEqn) -> Hashable:
    """A key that is equal only if parameters are. Text is in it, since ``0.0 == -0.0``."""
    params = tuple(sorted(eqn.params.items()))
    try:
        hash(params)
    except TypeError:  # an array, whose text may be abridged: equal to nothing
        return object()
    return params, str(params)


def _all(sets: Iterable[Iterable[int]]) -> _Values:
    return _NONE.union(*sets)
