"""The one walk of all analyses: follow facts about values through a program.

An analysis that asks which values are never negative has a ``bool`` for each value:

    b:f32[3] = exp a               table: no result of exp is negative      b: True
    c:f32[3] = mul b b             table: both factors are known            c: True
    d:f32[3] = cond p c a          join:  both branches must agree          d: False
    e:f32[3] = custom_thing c      default: nothing is known                e: False

So an analysis is a lattice value, a `join`, and a `table` from the names of primitives to transfer
functions. This module does the rest: it keeps the environment, reads literals and constants, enters
calls, joins branches, and carries loops to a fixed point. Facts flow forwards only, from arguments
to results. No pass of bucketjit needs the other direction.

To write an analysis:

* its values are immutable and have ``==``, by which a loop finds that it has settled;
* joining changes a value only a few times, or the loop does not settle and gets the default;
* the table comes before anything else, so an analysis may treat a call or a loop in its own way.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from bucketjit._ir.expressions import Shape, groups, is_symbolic
from bucketjit._jax.jaxprs import (
    CALLS,
    Atom,
    bodies,
    called_jaxpr,
    name_of,
    open_jaxpr,
    scan_arity,
    shape_of,
)
from bucketjit._jax.tracers import equation_of


def listed(*texts: str) -> tuple[str, ...]:
    """The names in texts: of primitives, dtypes."""
    return tuple(" ".join(texts).split())


ELEMENTWISE = listed(
    # arithmetic
    "add add_any sub mul mulhi div rem neg abs sign max min pow integer_pow square sqrt rsqrt cbrt",
    "nextafter polynomial floor ceil round is_finite reduce_precision one_minus_square",
    # exponentials and trigonometry
    "exp exp2 expm1 log log2 log1p logistic sin cos tan asin acos atan atan2 sinh cosh tanh asinh",
    "acosh atanh",
    # special functions
    "erf erfc erf_inv lgamma digamma polygamma zeta igamma igammac igamma_grad_a",
    "regularized_incomplete_beta bessel_i0e bessel_i1e",
    # complex numbers and bits
    "complex real imag conj and or xor not population_count clz",
    "shift_left shift_right_arithmetic shift_right_logical",
    # comparison and choice; one operand in, the same out
    "eq ne lt le gt ge eq_to lt_to le_to select_n clamp convert_element_type copy stop_gradient",
)


V = TypeVar("V")
T = TypeVar("T")

#: From an equation and the values of its operands to the values of its results.
Transfer = Callable[[JaxprEqn, Sequence[V]], Sequence[V]]

# Turns of a loop that are followed for each carried value (and once more): the steps that a value
# can take up its lattice. A loop that has not settled then gets the default.
_STEPS = 8


class Analysis(ABC, Generic[V]):
    """An analysis: the type ``V`` of its values, and how equations make new ones.

    Attributes:
        table: The transfer function of each primitive that the analysis knows, by name.
        most_turns: The most turns of a loop that are followed, for analyses that need not reach a
            fixed point; None to follow it until it settles.
    """

    table: Mapping[str, Transfer[V]] = {}
    most_turns: int | None = None

    @abstractmethod
    def unknown(self, atom: Atom) -> V:
        """The value of an atom of which only the type is known."""

    def literal(self, atom: Literal) -> V:
        """The value of a literal, a number written into an equation."""
        return self.unknown(atom)

    def join(self, left: V, right: V) -> V:
        """The value of an array that is one of two arrays, it is not known which."""
        raise NotImplementedError(
            f"{type(self).__name__} neither joins nor has a table of branches"
        )

    def default(self, eqn: JaxprEqn, ins: Sequence[V]) -> Sequence[V]:
        """The values of the results of an equation that is not in the table: unknown ones.

        Programs among its parameters are followed too, for analyses that collect what they meet.
        """
        follow_inside(self, eqn)
        return [self.unknown(var) for var in eqn.outvars]

    def row(self, value: V, var: Var) -> V:
        """The value of the row of an array that one turn of a ``scan`` gets."""
        return self.unknown(var)

    def stacked(self, value: V, var: Var) -> V:
        """The value of the array that a ``scan`` stacks from the rows of its turns."""
        return self.unknown(var)


def follow(
    analysis: Analysis[V],
    jaxpr: Jaxpr,
    arguments: Sequence[V],
    constants: Mapping[Atom, V] | None = None,
) -> list[V]:
    """Follow an analysis through a program."""
    env: dict[Atom, V] = dict(zip(jaxpr.invars, arguments, strict=True))
    env.update(constants or {})

    def read(atom: Atom) -> V:
        if isinstance(atom, Literal):
            return analysis.literal(atom)
        # A constant. It gets one value for all reads: `unknown` may return a new one each time.
        if atom not in env:
            env[atom] = analysis.unknown(atom)
        return env[atom]

    for eqn in jaxpr.eqns:
        outs = _results(analysis, eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _results(analysis: Analysis[V], eqn: Any, ins: Sequence[V]) -> Sequence[V]:
    """The values of the results of an equation: by the table, or by what the equation runs."""
    transfer = analysis.table.get(name_of(eqn))
    return through(analysis, eqn, ins) if transfer is None else transfer(eqn, ins)


def through(analysis: Analysis[V], eqn: JaxprEqn, ins: Sequence[V]) -> Sequence[V]:
    """Follow an analysis through the programs that an equation runs, ignoring its table entry.

    A transfer function may call this for the standard treatment.
    """
    name = name_of(eqn)
    if name in CALLS:
        called = open_jaxpr(called_jaxpr(eqn.params))[0]
        # A call whose program takes other operands gets the default.
        if len(called.invars) == len(ins) and len(called.outvars) == len(eqn.outvars):
            return follow(analysis, called, ins)
    step = _THROUGH.get(name)
    outs = None if step is None else step(analysis, eqn, ins)
    return analysis.default(eqn, ins) if outs is None else outs


def follow_inside(analysis: Analysis[V], eqn: JaxprEqn) -> list[V]:
    """Follow an analysis through the programs in an equation's parameters, at unknown arguments."""
    results: list[V] = []
    for body in bodies(eqn):
        results += follow(analysis, body, [analysis.unknown(var) for var in body.invars])
    return results


def table(rows: Mapping[str, T]) -> dict[str, T]:
    """Make a table from rows that may each name several primitives."""
    return {name: entry for names, entry in rows.items() for name in names.split()}


def single(transfer: Callable[[JaxprEqn, Sequence[V]], V]) -> Transfer[V]:
    """Make the transfer function of primitives with one result."""
    return lambda eqn, ins: [transfer(eqn, ins)]


# --- size params --------------------------------------------------------------------------------

# The parameters of JAX's primitives in which a symbolic size may be replaced by a padded size.
#
# User code can put a size into any parameter. In ``lax.integer_pow(x, x.shape[0])`` it is an
# exponent, which padding must not change. So this module lists the parameters that masking rules
# know as sizes, positions or counts along axes. A symbolic size in any other parameter is refused.

SIZE_PARAMS: Mapping[str, frozenset[str]] = {
    name: frozenset(params.split())
    for name, params in table(
        {
            "approx_top_k top_k": "k",
            "broadcast_in_dim empty full iota iota_2x32_shape": "shape",
            "conv_general_dilated": "padding batch_group_count feature_group_count",
            "dynamic_slice gather": "slice_sizes",
            "fft": "fft_lengths",
            "lu_pivots_to_permutation": "permutation_size",
            "pad": "padding_config",
            "random_bits random_gamma random_split rng_bit_generator rng_uniform": "shape",
            "reduce_window reduce_window_max reduce_window_min reduce_window_mul reduce_window_sum "
            "select_and_gather_add select_and_scatter select_and_scatter_add": (
                "window_dimensions window_strides padding"
            ),
            "reshape": "new_sizes",
            "scan": "length",
            "slice": "start_indices limit_indices strides",
            "split": "sizes",
            "tile": "reps",
        }
    ).items()
}

#: Parameters with symbolic sizes whose logical value the rule computes, or which it refuses.
VALUE_PARAMS: Mapping[str, frozenset[str]] = {
    "conv_general_dilated": frozenset({"window_strides", "lhs_dilation", "rhs_dilation"}),
    **dict.fromkeys(("pure_callback", "io_callback", "debug_callback"), frozenset({"callback"})),
    "dim_as_value": frozenset({"dim"}),
    "gather": frozenset({"fill_value"}),
    "size_constant": frozenset({"depends_on"}),
}


# --- which axis of a result is which axis of an operand ----------------------------------------


def kept_axes(eqn: JaxprEqn) -> dict[int, int]:
    """The axes of the first operand that the result has as they are: result -> operand."""
    params, name = eqn.params, name_of(eqn)
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if name == "transpose":
        return dict(enumerate(params["permutation"]))
    if name == "broadcast_in_dim":
        places = params["broadcast_dimensions"]
        return {p: i for i, p in enumerate(places) if str(before[i]) == str(after[p])}
    if name == "reshape":
        return {} if params.get("dimensions") is not None else _not_regrouped(before, after)
    if name in REMOVES:
        removed = params[REMOVES[name]]
        return dict(enumerate(i for i in range(len(before)) if i not in removed))
    touched = params[TOUCHES[name]] if name in TOUCHES else ()
    touched = touched if isinstance(touched, tuple | list) else (touched,)
    if name == "pad":
        touched = [i for i, edges in enumerate(params["padding_config"]) if edges != (0, 0, 0)]
    shapes = [shape_of(v) for v in (*eqn.invars, *eqn.outvars) if shape_of(v)]
    return {
        i: i
        for i in range(len(after))
        if i not in touched and len({str(shape[i]) for shape in shapes}) == 1
    }


REMOVES = {
    "squeeze": "dimensions",
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"), "axes"),
    **dict.fromkeys(("reduce_and", "reduce_or", "argmax", "argmin"), "axes"),
}
# What these do along one axis leaves the others as they are.
TOUCHES = {
    **{"rev": "dimensions", "concatenate": "dimension", "sort": "dimension"},
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), "axis"),
}


def _not_regrouped(before: Shape, after: Shape) -> dict[int, int]:
    """The axes that a reshape leaves as they are: result -> operand."""
    old, new = ([i for i, d in enumerate(s) if is_symbolic(d) or d != 1] for s in (before, after))
    kept: dict[int, int] = {}
    i = j = 0
    for merged, split in groups(tuple(before[k] for k in old), tuple(after[k] for k in new)):
        if len(merged) == len(split) == 1:
            kept[new[j]] = old[i]
        i, j = i + len(merged), j + len(split)
    return kept


def product_axes(eqn: JaxprEqn) -> list[tuple[int | None, int | None]]:
    """The axes of both operands of a ``dot_general`` that each axis of its result comes from."""
    contract, batch = eqn.params["dimension_numbers"]
    left, right = (
        [a for a in range(len(shape_of(v))) if a not in (*contract[i], *batch[i])]
        for i, v in enumerate(eqn.invars)
    )
    return [*zip(*batch, strict=True), *((a, None) for a in left), *((None, a) for a in right)]


# --- branches and loops ---------------------------------------------------------------------


def _cond(analysis: Analysis[V], eqn: JaxprEqn, ins: Sequence[V]) -> list[V]:
    branches = [open_jaxpr(branch)[0] for branch in eqn.params["branches"]]
    outs = [follow(analysis, branch, ins[1:]) for branch in branches]
    return functools.reduce(functools.partial(_joined, analysis), outs)


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
        # The condition has no result to pass on, but an analysis may collect facts in it.
        follow(analysis, condition, [*ins[:of_condition], *carry])
        return follow(analysis, body, [*ins[of_condition:start], *carry])

    return _settled(analysis, turn, ins[start:])


def _settled(
    analysis: Analysis[V], turn: Callable[[Sequence[V]], list[V]], first: Sequence[V]
) -> list[V] | None:
    """The values of a loop's results at a fixed point; None if it does not settle."""
    carry = list(first)
    most = analysis.most_turns
    for turns in range(1, _STEPS * (len(carry) + 1) + 1):
        outs = turn(carry)
        joined = _joined(analysis, carry, outs[: len(carry)])
        if joined == carry or turns == most:
            return [*carry, *outs[len(carry) :]]
        carry = joined
    return None


def _joined(analysis: Analysis[V], left: Sequence[V], right: Sequence[V]) -> list[V]:
    return list(map(analysis.join, left, right))


_THROUGH: Mapping[str, Callable[[Analysis[Any], JaxprEqn, Sequence[Any]], list[Any] | None]] = {
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}


# --- traces ---------------------------------------------------------------------------------


class TraceAnalysis(Analysis[V]):
    """An analysis of a trace that is not finished, which finds the fact about each value once."""

    def __init__(self) -> None:
        self._facts: dict[int, tuple[Any, V]] = {}  # by `id`; the value is kept alive

    @abstractmethod
    def held(self, value: Any) -> V:
        """The fact about a value that no equation has made."""

    def of(self, value: Any) -> V:
        """The fact about a value."""
        stack = [value]  # no recursion: programs are deeper than Python's stack
        while stack:
            eqn = equation_of(stack[-1])
            operands = eqn.operands if eqn else ()
            missing = [x for x in operands if id(x) not in self._facts]
            if missing and id(stack[-1]) not in self._facts:
                stack += missing
                continue
            held = stack.pop()
            if id(held) in self._facts:
                continue
            ins = [self._facts[id(x)][1] for x in operands]
            fact = _results(self, eqn, ins)[eqn.position] if eqn else self.held(held)
            self._facts[id(held)] = held, fact
        return self._facts[id(value)][1]
