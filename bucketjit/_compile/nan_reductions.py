"""Find programs whose results change if XLA's CPU backend loses a NaN in a reduction.

The library YNN computes ``max(nan, x)`` as ``x`` in reductions of 4,096 elements or more: in maxima
and minima, and in elementwise operations that are fused into a sum (``relu``). ``jax.jit`` is
affected too (jaxlib 0.10.2 and 0.12). Padding can take a call of 3,000 elements to such a bucket.
So a program that chooses between floats is compiled without the library's reductions. For a
transformer the compile then takes 1.3 times as long.

A softmax keeps them, since the loss cannot show in its results:

    m = reduce_max x         m may have lost a NaN of its row
    e = exp (x - m)          NaN wherever x is
    s = reduce_sum e         NaN in each row that holds one, whatever m is
    y = e / s                NaN all along that row, as without the loss

The pass knows the operations that JAX emits for softmax, log_softmax and logsumexp. Any other
operation on such a maximum, one of a gradient for example, is assumed to show the loss.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from bucketjit._ir.dataflow import ELEMENTWISE, Analysis, follow
from bucketjit._jax.jaxprs import CALLS, Atom, all_equations, bodies, dtype_of, name_of, shape_of


def named(*texts: str) -> frozenset[str]:
    """The names in texts: of primitives, opcodes, dtypes."""
    return frozenset(" ".join(texts).split())


_EXTREMA = ("reduce_max", "reduce_min")
_CHOICES = named(
    "max min cummax cummin pmax pmin reduce_window_max reduce_window_min scatter-max scatter-min"
)
_ELEMENTWISE = frozenset(ELEMENTWISE)
# Primitives whose result is NaN wherever an operand is. For products see `_is_strict`.
_STRICT = named(
    "add add_any sub div neg abs exp exp2 log log1p copy stop_gradient convert_element_type",
    "integer_pow",
)
# Primitives whose results are not truth values as numbers, and those that keep that.
_NUMBERS = named("exp log tanh")
_KEEP_NUMBERS = named("transpose reshape broadcast_in_dim squeeze neg")
# Primitives whose result depends on the sign or the bits of a NaN.
_READ_SIGNS = named("top_k approx_top_k bitcast_convert_type")


def may_lose_nan(jaxpr: Jaxpr) -> bool:
    """Whether results may change if an operation that chooses between floats loses a NaN."""
    names = {name_of(e) for e in all_equations(jaxpr) if _is_of_floats(e.invars)}
    reads_signs = not names.isdisjoint(_EXTREMA) and not names.isdisjoint(_READ_SIGNS)
    return reads_signs or _shows(jaxpr)


def _is_of_floats(atoms: Sequence[Atom]) -> bool:
    return any(jnp.issubdtype(dtype_of(atom), np.floating) for atom in atoms)


class _Fact(NamedTuple):
    """What is known of a value that is computed from an extremum, or from the rows that it reduces.

    The value has the axes of the extremum's operand, in order, with or without the reduced ones.

    Attributes:
        operand: The operand of the extremum.
        axes: The axes that the extremum reduces.
        differs: Whether the value may differ, along the rows of the operand that hold a NaN, from
            what it would be if no NaN were lost.
        covers: Whether it does not, and is NaN all along these rows.
        marked: Whether it is NaN wherever the operand is.
    """

    operand: Atom
    axes: frozenset[int]
    differs: bool = False
    covers: bool = False
    marked: bool = False

    @property
    def rows(self) -> tuple[Atom, frozenset[int]]:
        """What tells the rows of two facts apart."""
        return self.operand, self.axes

    def has_all_axes(self, atom: Atom) -> bool:
        """Whether a value that is computed from the rows still has the reduced axes."""
        return len(shape_of(atom)) == len(shape_of(self.operand))

    def is_kept_by(self, eqn: JaxprEqn) -> bool:
        """Whether a broadcast only adds the reduced axes, or only repeats along them."""
        shape, after = shape_of(self.operand), shape_of(eqn.outvars[0])
        every = range(len(shape))
        kept = [a for a in every if a not in self.axes]
        to = every if self.has_all_axes(eqn.invars[0]) else kept
        return (
            len(after) == len(shape)
            and list(eqn.params["broadcast_dimensions"]) == list(to)
            and all(str(after[a]) == str(shape[a]) for a in kept)
        )


class _Shown(Exception):
    """The loss of a NaN shows in a result."""


def _shows(jaxpr: Jaxpr) -> bool:
    """Whether the loss shows in the outputs of a program, or of a program inside it."""
    try:
        results = follow(_Loss(), jaxpr, [None] * len(jaxpr.invars))
    except _Shown:
        return True
    return any(map(_differs, results))


class _Loss(Analysis[_Fact | None]):
    """How each value differs from what it would be if no NaN were lost; None if it does not.

    Each inner program is analysed alone: its arguments and its results are taken to be unaffected,
    or the loss shows.
    """

    def __init__(self) -> None:
        # Calls are not followed: the facts name variables, and a program that is called twice has
        # the same variables for two values.
        self.table = dict.fromkeys((*CALLS, "cond", "scan", "while"), self.default)
        self._numbers: set[Atom] = set()

    def unknown(self, atom: Atom) -> None:
        return None

    def default(self, eqn: JaxprEqn, ins: Sequence[_Fact | None]) -> Sequence[_Fact | None]:
        if any(map(_shows, bodies(eqn))) or _chooses(eqn, ins):
            raise _Shown
        fact = _after(eqn, ins, self._numbers)
        variables = [v for v in eqn.invars if not isinstance(v, Literal)]
        are_kept = name_of(eqn) in _KEEP_NUMBERS and variables
        if _makes_numbers(eqn) or (are_kept and self._numbers.issuperset(variables)):
            self._numbers.update(eqn.outvars)
        if fact is None and any(map(_differs, ins)):
            raise _Shown
        return [fact] * len(eqn.outvars)


def _makes_numbers(eqn: JaxprEqn) -> bool:
    """Whether the results are numbers that XLA does not take for truth values."""
    if name_of(eqn) != "dot_general":
        return name_of(eqn) in _NUMBERS
    # A product along an axis of size 1 is one of two numbers, which may be truth values.
    contracted = eqn.params["dimension_numbers"][0][0]
    return any(shape_of(eqn.invars[0])[axis] != 1 for axis in contracted)


def _differs(fact: _Fact | None) -> bool:
    return fact is not None and fact.differs


def _chooses(eqn: JaxprEqn, ins: Sequence[_Fact | None]) -> bool:
    """Whether an equation chooses between floats other than extrema and literals."""
    if name_of(eqn) not in _CHOICES or not _is_of_floats(eqn.outvars):
        return False
    pairs = zip(eqn.invars, ins, strict=True)
    return not all(isinstance(atom, Literal) or _differs(fact) for atom, fact in pairs)


def _after(eqn: JaxprEqn, ins: Sequence[_Fact | None], numbers: Set[Atom]) -> _Fact | None:
    """What is known of the result of an equation; ``numbers`` are no truth values."""
    if not ins:
        return None
    name, first = name_of(eqn), eqn.invars[0]
    if name in _EXTREMA and _is_of_floats(eqn.outvars) and not any(map(_differs, ins)):
        axes = frozenset(eqn.params["axes"])
        return None if isinstance(first, Literal) else _Fact(first, axes, differs=True)
    every = [fact for fact in ins if fact is not None]
    # A fact may be dropped if its value does not differ. So facts of other rows do not matter then.
    of_rows = {fact.rows for fact in list(filter(_differs, every)) or every}
    if len(of_rows) != 1 or len(eqn.outvars) != 1:
        return None
    (rows,) = of_rows
    fact = ins[0]
    if name in _ELEMENTWISE:
        facts = [
            fact if fact and fact.rows == rows else _Fact(*rows, marked=atom is rows[0])
            for atom, fact in zip(eqn.invars, ins, strict=True)
        ]
        is_strict = _is_strict(eqn, name, facts, numbers)
        covers = is_strict and any(f.covers for f in facts)
        marked = is_strict and any(f.marked for f in facts)
        differs = not covers and any(map(_differs, facts))
        return _Fact(*rows, differs, covers, marked) if differs or covers or marked else None
    if fact is None or fact.rows != rows:
        return None
    has_all = fact.has_all_axes(first)
    if name == "broadcast_in_dim" and fact.is_kept_by(eqn):
        return fact._replace(marked=fact.marked and has_all)
    if name == "reduce_sum" and has_all and fact.axes == set(eqn.params["axes"]):
        return _Fact(*rows, covers=True) if fact.marked else fact
    return None


def _is_strict(eqn: JaxprEqn, name: str, facts: Sequence[_Fact], numbers: Set[Atom]) -> bool:
    """Whether the result is NaN wherever an operand is."""
    if name == "mul":  # XLA turns a product with truth values into a select, which drops NaN
        pairs = zip(eqn.invars, facts, strict=True)
        return all(isinstance(v, Literal) or f.marked or f.covers or v in numbers for v, f in pairs)
    if name == "integer_pow" and eqn.params["y"] == 0:
        return False
    # Integers hold no NaN, and not every float of 8 bits does.
    return name in _STRICT and all(
        jnp.issubdtype(dtype, np.floating) and dtype.itemsize > 1
        for dtype in map(dtype_of, (*eqn.invars, *eqn.outvars))
    )
