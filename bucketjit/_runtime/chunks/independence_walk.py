"""Walks a program for the independence proof and applies the rule of each equation.

`independence` says what is proven, `independence_rules` has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from bucketjit._ir.opaque import looked_inside
from bucketjit._jax.jaxprs import first_effect, is_jaxpr, open_jaxpr
from bucketjit._jax.primitives import name_of
from bucketjit._jax.user_code import source_line
from bucketjit._sizes.expressions import Dim, Shape, is_multiple, is_symbolic, variables_of
from bucketjit._tracing.program import Program
from bucketjit.errors import MaskingError

Axis = int | None  # where a value has its axis of the variable's size; None if it has none


class _Refusal(MaskingError):
    """A refusal of an equation, with the user's line that made the equation."""

    def __init__(self, reason: str, remedy: str, line: str) -> None:
        super().__init__(reason, remedy)
        self.line = line


Rule = Callable[["Step"], object]


class Rules(NamedTuple):
    """The rule tables of the proof.

    Attributes:
        rules: The rule of each plain primitive.
        control: The rule of each primitive that holds programs; ``shown`` does not apply to them.
        shown: The parameters that may contain the variable, by name of the primitive.
    """

    rules: Mapping[Any, Rule]
    control: Mapping[Any, Rule]
    shown: Mapping[str, frozenset[str]]


class Proof:
    """The walk over a program.

    Args:
        variable: The dimension variable that calls are cut along.
        rules: The rule tables.

    Attributes:
        variable: The dimension variable that calls are cut along.
    """

    def __init__(self, variable: str, rules: Rules) -> None:
        self.variable = variable
        self._rules = rules
        self._mentions: dict[int, tuple[Any, bool]] = {}
        self._looking_inside: list[Any] = []

    def whole(self, program: Program) -> None:
        """Check a program: its effects, unfitted sizes, arguments, outputs and equations.

        Args:
            program: The program.

        Raises:
            MaskingError: The claim cannot be proven. The reason names the user's line, if known.
        """
        v = self.variable
        if program.jaxpr.effects:
            what = first_effect(program.jaxpr)
            raise MaskingError(
                "it has effects (io_callback, debug.print) or references that it writes to, which "
                f"chunks would repeat: {what}",
                "leave the effect out, or return what it tells",
            )
        if program.unfitted:
            raise MaskingError(f"it has sizes that are no expression of {v}: {program.unfitted[0]}")
        for what, shapes in (("argument", program.in_shapes), ("output", program.out_shapes)):
            for i, shape in enumerate(shapes):
                try:
                    self.axis(shape)
                except MaskingError as error:
                    raise MaskingError(f"{what} {i}: {error.reason}", error.remedy) from None
        try:
            self.check(program.jaxpr)
        except _Refusal as error:
            where = f" [{error.line}]" if error.line else ""
            raise MaskingError(error.reason + where, error.remedy) from None

    # --- what names the variable ---

    def _named(self, dim: Dim) -> bool:
        return is_symbolic(dim) and self.variable in variables_of(str(dim))

    def axis(self, shape: Shape) -> Axis:
        """The axis whose size contains the variable.

        Args:
            shape: The shape of a value.

        Returns:
            The axis; None if there is none.

        Raises:
            MaskingError: There are several, or the size is no multiple of it, such as ``b + 1``.
        """
        named = [i for i, d in enumerate(shape) if self._named(d)]
        if not named:
            return None
        shown = ", ".join(map(str, shape))
        if len(named) > 1:
            raise MaskingError(f"an array of shape ({shown}) has {self.variable} along two axes")
        if not is_multiple(str(shape[named[0]]), self.variable):
            raise MaskingError(
                f"an array of shape ({shown}) has an axis that is no multiple of {self.variable}"
            )
        return named[0]

    def mentions(self, value: Any) -> bool:
        """Whether a parameter of an equation contains the variable, at any depth."""
        if is_symbolic(value):
            return self._named(value)
        if value is None or isinstance(value, bool | int | float | complex | str):
            return False
        if is_jaxpr(value):
            if id(value) not in self._mentions:
                inner = open_jaxpr(value)[0]
                named = any(map(self._equation_mentions, inner.eqns))
                self._mentions[id(value)] = (value, named)
            return self._mentions[id(value)][1]
        if isinstance(value, tuple | list):
            return any(map(self.mentions, value))
        if isinstance(value, Mapping):
            return any(map(self.mentions, value.values()))
        leaves = jax.tree_util.tree_leaves(value, is_leaf=is_jaxpr)
        return not (len(leaves) == 1 and leaves[0] is value) and any(map(self.mentions, leaves))

    def _equation_mentions(self, eqn: JaxprEqn) -> bool:
        shapes = (getattr(v.aval, "shape", ()) for v in (*eqn.invars, *eqn.outvars))
        return any(self._named(d) for shape in shapes for d in shape) or any(
            map(self.mentions, eqn.params.values())
        )

    # --- the walk ---

    def check(self, jaxpr: Jaxpr) -> None:
        """Check every equation of an open jaxpr that contains the variable.

        Args:
            jaxpr: The jaxpr.

        Raises:
            MaskingError: The rule of an equation refuses it, or there is none.
        """
        for eqn in jaxpr.eqns:
            if self._equation_mentions(eqn):
                self._equation(eqn)

    def inside(self, jaxpr: Jaxpr) -> None:
        """Check a jaxpr among the parameters of an equation.

        Args:
            jaxpr: The jaxpr, open or closed.

        Raises:
            MaskingError: See `check`.
        """
        self.check(open_jaxpr(jaxpr)[0])

    def _equation(self, eqn: JaxprEqn) -> None:
        try:
            step = Step(self, eqn)
            if (control := self._rules.control.get(eqn.primitive)) is not None:
                control(step)
                return
            rule = self._rules.rules.get(eqn.primitive)
            if rule is None:
                self.look_inside(eqn)
                return
            rule(step)
            shown = self._rules.shown.get(name_of(eqn), ())
            for param, value in eqn.params.items():
                if param not in shown and self.mentions(value):
                    step.refuse(f"its parameter {param} depends on {self.variable}")
        except _Refusal as error:  # of an inner equation
            raise _Refusal(error.reason, error.remedy, error.line or source_line(eqn)) from None
        except MaskingError as error:
            reason = f"{eqn.primitive.name}: {error.reason}"
            raise _Refusal(reason, error.remedy, source_line(eqn)) from None

    def look_inside(self, eqn: JaxprEqn) -> None:
        """Check the implementation of an equation whose primitive has no rule.

        Args:
            eqn: The equation.

        Raises:
            MaskingError: The implementation is refused, is not known, or uses its own primitive.
        """
        if any(p is eqn.primitive for p in self._looking_inside):
            raise MaskingError(f"nothing is known of what it does along {self.variable}")
        try:
            inner, _ = looked_inside(eqn)
        except MaskingError:
            raise MaskingError(f"nothing is known of what it does along {self.variable}") from None
        self._looking_inside.append(eqn.primitive)
        try:
            self.check(inner)
        finally:
            self._looking_inside.pop()


class Step:
    """One equation, as a rule sees it.

    Attributes:
        proof: The walk.
        variable: The dimension variable.
        eqn, params: The equation and its parameters.
        in_shapes, out_shapes: Shapes of operands and results.
        ins, outs: The axis of the variable in each operand and result; None if it has none.
    """

    def __init__(self, proof: Proof, eqn: JaxprEqn) -> None:
        self.proof = proof
        self.variable = proof.variable
        self.eqn = eqn
        self.params = eqn.params
        self.in_shapes = [tuple(getattr(v.aval, "shape", ())) for v in eqn.invars]
        self.out_shapes = [tuple(getattr(v.aval, "shape", ())) for v in eqn.outvars]
        self.ins = list(map(proof.axis, self.in_shapes))
        self.outs = list(map(proof.axis, self.out_shapes))

    def refuse(self, why: str, remedy: str = "") -> NoReturn:
        """Refuse the equation.

        Args:
            why: The reason.
            remedy: What the user can do instead.

        Raises:
            MaskingError: Always.
        """
        raise MaskingError(why, remedy)

    def same_size(self, before: Dim, after: Dim) -> bool:
        """Whether two sizes are the same expression."""
        return str(before) == str(after)

    def aligned(self) -> int:
        """The axis of the variable, which must be the same for all operands and results.

        An operand without the variable must have size 1 at that axis, or no axes at all.

        Raises:
            MaskingError: The axes differ, or their sizes do.
        """
        found = {axis for axis in (*self.ins, *self.outs) if axis is not None}
        if len(found) != 1:
            self.refuse(f"it has {self.variable} along different axes")
        (axis,) = found
        size = next(
            shape[axis]
            for shape, own in zip(
                [*self.in_shapes, *self.out_shapes], [*self.ins, *self.outs], strict=True
            )
            if own is not None
        )
        for shape, own in zip(self.in_shapes, self.ins, strict=True):
            if own is None and shape and not (axis < len(shape) and shape[axis] == 1):
                self.refuse(f"an operand of shape {shape} meets each part along {self.variable}")
            if own is not None and not self.same_size(shape[own], size):
                self.refuse(f"it has sizes {shape[own]} and {size} along one axis")
        for shape, own in zip(self.out_shapes, self.outs, strict=True):
            if own is None or not self.same_size(shape[own], size):
                self.refuse(f"a result of shape {shape} puts parts along {self.variable} together")
        return axis
