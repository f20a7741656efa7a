"""Follow what is known of each value through a program: the one walk of every analysis.

An analysis that asks which values are never negative knows a ``bool`` of each:

    b:f32[3] = exp a               table: no result of exp is negative      b: True
    c:f32[3] = mul b b             table: both factors are known            c: True
    d:f32[3] = cond p c a          join:  both branches must agree          d: False
    e:f32[3] = custom_thing c      default: nothing is known                e: False

So an analysis is a lattice value, a `join`, and a `table` from the names of primitives to transfer
functions. This module does the rest: it keeps the environment, reads literals and constants, enters
calls, joins branches, and carries loops to a fixed point. Values only flow forwards, from arguments
to results. No pass of this package needs the other direction.

What a newcomer has to know to write one:

* a value is immutable and has ``==``, which is how a loop notices that it has settled;
* joining may change a value a few times only, so that a loop settles; what does not is unknown;
* an entry of the table is asked before anything else, so an analysis may treat a call or a loop in
  its own way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from bucketjit._jax.jaxprs import Atom, bodies, open_jaxpr, scan_arity
from bucketjit._jax.primitives import CALLS, called_jaxpr, name_of

V = TypeVar("V")
T = TypeVar("T")

#: From an equation and what is known of its operands to what is known of each of its results.
Transfer = Callable[[JaxprEqn, Sequence[V]], Sequence[V]]

_STEPS = 8  # of a lattice, one a turn and a carried value; a loop that climbs more gets the default


class Analysis(ABC, Generic[V]):
    """What an analysis knows of one value, and how an equation passes it on.

    Attributes:
        table: The transfer function of each primitive that the analysis knows, by name.
    """

    table: Mapping[str, Transfer[V]] = {}

    @abstractmethod
    def unknown(self, atom: Atom) -> V:
        """What is known of a value of which nothing is known but its type."""

    def literal(self, atom: Literal) -> V:
        """What is known of a number that is written into an equation."""
        return self.unknown(atom)

    def join(self, one: V, other: V) -> V:
        """What is known of a value that is one of two, whichever."""
        raise NotImplementedError(
            f"{type(self).__name__} neither joins nor has a table of branches"
        )

    def default(self, eqn: JaxprEqn, ins: Sequence[V]) -> Sequence[V]:
        """What an equation makes that the table does not know; its programs are followed too."""
        follow_inside(self, eqn)
        return [self.unknown(var) for var in eqn.outvars]

    def row(self, value: V, var: Var) -> V:
        """What a turn of a ``scan`` gets of an array, of whose rows it gets one."""
        return self.unknown(var)

    def stacked(self, value: V, var: Var) -> V:
        """What is known of the array of the rows that the turns of a ``scan`` make."""
        return self.unknown(var)


def follow(
    analysis: Analysis[V],
    jaxpr: Jaxpr,
    arguments: Sequence[V],
    constants: Mapping[Atom, V] | None = None,
) -> list[V]:
    """Follow what is known of a program's arguments to its results.

    Args:
        analysis: What is followed.
        jaxpr: An open jaxpr.
        arguments: What is known of each of its arguments.
        constants: What is known of its constants; of one that is left out, nothing is.

    Returns:
        What is known of each of its results.
    """
    env: dict[Atom, V] = dict(zip(jaxpr.invars, arguments, strict=True))
    env.update(constants or {})

    def read(atom: Atom) -> V:
        if isinstance(atom, Literal):
            return analysis.literal(atom)
        if atom not in env:  # a constant, which stays the same value however often it is read
            env[atom] = analysis.unknown(atom)
        return env[atom]

    for eqn in jaxpr.eqns:
        transfer = analysis.table.get(name_of(eqn))
        ins = [read(atom) for atom in eqn.invars]
        outs = through(analysis, eqn, ins) if transfer is None else transfer(eqn, ins)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def through(analysis: Analysis[V], eqn: JaxprEqn, ins: Sequence[V]) -> Sequence[V]:
    """Follow an equation through the programs that it runs, whatever the table has for it.

    Args:
        analysis: What is followed.
        eqn: A call, branch or loop; any other equation gets the analysis' default.
        ins: What is known of its operands.

    Returns:
        What is known of each of its results.
    """
    name = name_of(eqn)
    if name in CALLS:
        called = open_jaxpr(called_jaxpr(eqn.params))[0]
        if len(called.invars) == len(ins) and len(called.outvars) == len(eqn.outvars):
            return follow(analysis, called, ins)
    step = _THROUGH.get(name)
    outs = None if step is None else step(analysis, eqn, ins)
    return analysis.default(eqn, ins) if outs is None else outs


def follow_inside(analysis: Analysis[V], eqn: JaxprEqn) -> list[V]:
    """Follow the programs among an equation's parameters, knowing nothing of their arguments.

    Args:
        analysis: What is followed.
        eqn: An equation that may run them in any way, or not at all.

    Returns:
        What is known of all their results.
    """
    results: list[V] = []
    for body in bodies(eqn):
        results += follow(analysis, body, [analysis.unknown(var) for var in body.invars])
    return results


def table(rows: Mapping[str, T]) -> dict[str, T]:
    """A table of which a row may name several primitives, with spaces in between."""
    return {name: entry for names, entry in rows.items() for name in names.split()}


def single(transfer: Callable[[JaxprEqn, Sequence[V]], V]) -> Transfer[V]:
    """The transfer function of primitives that make one result, from what is known of that."""
    return lambda eqn, ins: [transfer(eqn, ins)]


# --- branches and loops ---------------------------------------------------------------------


def _cond(analysis: Analysis[V], eqn: JaxprEqn, ins: Sequence[V]) -> list[V]:
    branches = [open_jaxpr(branch)[0] for branch in eqn.params["branches"]]
    first, *others = [follow(analysis, branch, ins[1:]) for branch in branches]
    for outs in others:
        first = _joined(analysis, first, outs)
    return first


def _scan(analysis: Analysis[V], eqn: JaxprEqn, ins: Sequence[V]) -> list[V] | None:
    body = open_jaxpr(eqn.params["jaxpr"])[0]
    num_consts, num_carry = scan_arity(eqn.params)
    start = num_consts + num_carry
    rows = list(map(analysis.row, ins[start:], body.invars[start:]))

    def turn(carry: Sequence[V]) -> list[V]:
        return follow(analysis, body, [*ins[:num_consts], *carry, *rows])

    outs = _settled(analysis, turn, ins[num_consts:start])
    if outs is None:
        return None
    return [*outs[:num_carry], *map(analysis.stacked, outs[num_carry:], eqn.outvars[num_carry:])]


def _while(analysis: Analysis[V], eqn: JaxprEqn, ins: Sequence[V]) -> list[V] | None:
    condition, body = (open_jaxpr(eqn.params[k])[0] for k in ("cond_jaxpr", "body_jaxpr"))
    of_condition = eqn.params["cond_nconsts"]
    start = of_condition + eqn.params["body_nconsts"]

    def turn(carry: Sequence[V]) -> list[V]:
        follow(analysis, condition, [*ins[:of_condition], *carry])
        return follow(analysis, body, [*ins[of_condition:start], *carry])

    return _settled(analysis, turn, ins[start:])


def _settled(
    analysis: Analysis[V], turn: Callable[[Sequence[V]], list[V]], first: Sequence[V]
) -> list[V] | None:
    """What a loop carries in whichever turn, and what a turn makes beside; None if it climbs on.

    Args:
        analysis: What is followed.
        turn: Follows the body once, from what is carried to what it makes.
        first: What the loop is started with, which is its result if it takes no turn.
    """
    carry = list(first)
    for _ in range(_STEPS * (len(carry) + 1)):
        outs = turn(carry)
        joined = _joined(analysis, carry, outs[: len(carry)])
        if joined == carry:
            return [*carry, *outs[len(carry) :]]
        carry = joined
    return None


def _joined(analysis: Analysis[V], ones: Sequence[V], others: Sequence[V]) -> list[V]:
    return [analysis.join(one, other) for one, other in zip(ones, others, strict=True)]


_THROUGH: Mapping[str, Callable[[Analysis[Any], JaxprEqn, Sequence[Any]], list[Any] | None]] = {
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
