"""The context that a masking rule gets: one equation at padded sizes.

    c:f32[] = reduce_sum[axes=(0,)] a:f32[n]      ctx.fill(a, axes=(0,), value=0)
                                                  ctx.bind(...)

A rule is ``rule(ctx, *operands) -> output`` (a sequence for primitives with several results). It
evaluates one primitive on padded operands and keeps the invariant: along an axis of symbolic size
``d`` the first ``d(logical)`` positions are real, the rest is arbitrary. A rule that reads along an
axis fills its padding first. It relies on nothing that an earlier rule left in the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn

from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._ir.dataflow import SIZE_PARAMS, VALUE_PARAMS
from bucketjit._ir.expressions import Dim, Shape, is_symbolic, symbolic_axes
from bucketjit._jax.arrays import by_platform, is_key, key_impl, key_shape, platform
from bucketjit._jax.jaxprs import AnyJaxpr, name_of, open_jaxpr
from bucketjit._masking.array_ops import can_be_zeroed, in_every_row, select, zeroed
from bucketjit._masking.padding import Padding
from bucketjit._masking.padding_facts import CERTAIN, Fact, open_axes
from bucketjit._masking.padding_plan import fills_of_product, summed_pairs
from bucketjit.errors import MaskingError

Rule = Callable[..., Any]

RuleTable = Mapping[Any, Rule]  # keys are primitives, or names of primitives


class RuleContext:
    """One equation, seen at padded sizes.

    There is one for each equation. A rule reads the attributes and calls the methods.

    Args:
        eqn: The equation.
        operands: The operands of the equation, as its rule receives them.
        ever_read: The variables that the program reads.
        walk: The evaluation of the program, of `bucketjit._masking.interpreter`.

    Attributes:
        primitive: The primitive of the equation.
        params: Its parameters with every symbolic size replaced by its padded size. Sub-programs
            (jaxprs) stay as they are: run them with `evaluate`.
        symbolic_params: The parameters as traced.
        in_shapes: Logical shape of each operand, symbolic.
        out_shapes: Logical shape of each output, symbolic.
        in_avals, out_avals: Abstract values as traced (dtypes, weak types).
        sizes: The padded and logical sizes of the dimension variables.
        eqn: The equation itself.
        padding: What padding is known to hold, for loops and branches.

    Raises:
        MaskingError: A parameter is a symbolic size that no rule of this primitive expects.
    """

    def __init__(
        self,
        eqn: JaxprEqn,
        operands: Sequence[Any],
        ever_read: Set[Any],
        walk: Any,
    ) -> None:
        self.eqn = eqn
        self.sizes: BucketSizes = walk.sizes
        self.padding: Padding = walk.padding
        self._operands, self._ever_read, self._walk = operands, ever_read, walk
        self.primitive = eqn.primitive
        self.symbolic_params: Mapping[str, Any] = eqn.params
        self.params: dict[str, Any] = {
            k: _padded_param(v, self.sizes) for k, v in eqn.params.items()
        }
        self._refuse_sizes_elsewhere()
        self.in_avals: list[Any] = [v.aval for v in eqn.invars]
        self.out_avals: list[Any] = [v.aval for v in eqn.outvars]
        self.in_shapes: list[Shape] = [tuple(getattr(a, "shape", ())) for a in self.in_avals]
        self.out_shapes: list[Shape] = [tuple(getattr(a, "shape", ())) for a in self.out_avals]
        self._as_it_stands: Any = None

    def signs_are_hidden(self) -> bool:
        """Whether no result of the program depends on the signs of this equation's vectors."""
        return self._walk.hidden().get(id(self.eqn)) is self.eqn

    def is_read(self, output: int) -> bool:
        """Whether anything in the program reads this output."""
        return self.eqn.outvars[output] in self._ever_read

    def _refuse_sizes_elsewhere(self) -> None:
        """Refuse a symbolic size in a parameter where no rule expects one.

        `bucketjit._ir.dataflow` lists the parameters in which rules expect sizes.
        """
        symbolic, name = self.symbolic_params, self.primitive.name
        for param, value in self.params.items():
            if value is symbolic[param] or param in SIZE_PARAMS.get(name, ()):
                continue
            if param not in VALUE_PARAMS.get(name, ()) and name_of(self.eqn):
                self.refuse(f"its parameter {param} is {symbolic[param]}, a size")

    # --- sizes ---

    def padded(self, dim: Dim) -> int:
        """The padded size of ``dim``, a Python int.

        Raises:
            MaskingError: The size does not fit into int32 in this bucket.
        """
        return self.sizes.padded(dim)

    def padded_shape(self, shape: Iterable[Dim]) -> tuple[int, ...]:
        """The padded sizes of a symbolic shape.

        Raises:
            MaskingError: A size does not fit into int32 in this bucket.
        """
        return self.sizes.padded_shape(shape)

    def logical(self, dim: Dim) -> Any:
        """The logical size of ``dim``: an int if it is static, else a run-time int32 scalar.

        Raises:
            MaskingError: The size does not fit into int32 in this bucket, or takes integers of more
                than 64 bits to compute.
        """
        return self.sizes.logical(dim)

    def symbolic_axes(self, operand: int = 0) -> tuple[int, ...]:
        """The axes of an operand whose size is symbolic; ``operand`` is its position."""
        return symbolic_axes(self.in_shapes[operand])

    # --- filling ---

    def shape_of(self, operand: Array) -> Shape:
        """The logical shape of an array that is one of this equation's operands.

        Args:
            operand: The operand, the same object that the rule received.

        Returns:
            Its symbolic shape.

        Raises:
            ValueError: The array is not an operand of the equation.
        """
        for received, shape in zip(self._operands, self.in_shapes, strict=True):
            if received is operand:
                return shape
        raise ValueError(
            "this array is not an operand of the equation as it was given to the rule; "
            "pass its logical shape, such as shape=ctx.in_shapes[0]"
        )

    def in_bounds(self, shape: Shape, axes: Iterable[int] | None = None) -> Any | None:
        """The mask of real positions of an array of this logical shape.

        Args:
            shape: The logical shape.
            axes: Axes whose padding counts; all by default.

        Returns:
            A boolean array that broadcasts to the padded shape, True where all these axes are real.
            None if they are all static. See `BucketSizes.in_bounds`.
        """
        return self.sizes.in_bounds(shape, axes)

    def fill(
        self,
        operand: Array,
        *,
        axes: Iterable[int] | None = None,
        value: Any,
        shape: Shape | None = None,
        unfused: bool = False,
    ) -> Any:
        """Write ``value`` into the padding of ``operand``.

        It is replaced by a select, or by bits (`zeroed`), never by a product: 0 * NaN is NaN.

        Args:
            operand: An array at padded size.
            axes: Fill the padding along these axes; along all by default.
            value: A scalar of (or convertible to) the operand's dtype, or an array that broadcasts
                to its shape.
            shape: The logical shape of ``operand``; needed unless it is an operand of the equation
                exactly as the rule received it.
            unfused: Keep XLA's CPU backend from fusing the select into the reader of the result.
                This pays if the reader is fast only when it reads a plain array.

        Returns:
            ``operand`` with its padding replaced; ``operand`` itself if these axes are all static,
            or if its padding is known to hold ``value``.

        Raises:
            MaskingError: ``value`` is 0 and the dtype is float8_e8m0fnu, which has no 0.
            ValueError: ``shape`` is missing, and ``operand`` is not an operand of the equation.
        """
        is_operand = shape is None
        shape = self.shape_of(operand) if shape is None else shape
        axes = tuple(range(len(shape)) if axes is None else axes)
        if not any(is_symbolic(shape[a]) for a in axes):
            return operand
        if self.padding.holds(operand, shape, value):
            return operand
        is_zero = not isinstance(value, jax.Array) and not np.any(value)
        if is_operand and is_zero and self.padding.spares_fill(self.eqn, operand, axes):
            return operand
        if operand.dtype.name == "float8_e8m0fnu" and is_zero:
            self.refuse("padding of 0 in float8_e8m0fnu, which has no 0", "use another dtype")

        def filled(array: Array) -> Any:
            mask = self.sizes.in_bounds(shape, axes, tuple(array.shape))
            by_bits = platform() == "tpu" and not self.padding.around.is_cut_inside
            if is_zero and by_bits and can_be_zeroed(array):
                return zeroed(mask, array)
            if isinstance(value, jax.Array) or is_key(array):
                return select(mask, array, value)
            return select(mask, array, self.sizes.constant(array.shape, array.dtype, value))

        # XLA fuses no conditional with the reader of its result. Without padding it copies nothing.
        def filled_in_a_branch(array: Array) -> Any:
            dims = [shape[a] for a in axes if is_symbolic(shape[a])]
            is_whole = jnp.all(jnp.stack([self.logical(d) == self.padded(d) for d in dims]))
            return lax.cond(in_every_row(is_whole), lambda array: array, filled, array)

        if unfused:
            return by_platform(operand, cpu=filled_in_a_branch, default=filled)

        def noted() -> Any:
            result = filled(operand)
            fact = self.padding.fact(operand, shape)
            fact = fact.zeroed(set(axes).intersection(open_axes(shape)), CERTAIN)
            self.padding.note_fact(result, shape, fact if is_zero else Fact(fact.repeats))
            return result

        if isinstance(value, jax.Array):
            result = noted()
        else:
            scalar = np.asarray(value)
            what = tuple(sorted(axes)), str(scalar.dtype), scalar.tobytes()
            key = id(operand), self.sizes.defined, str(shape), *what
            result = self.padding.once(key, operand, noted)
        if is_operand:
            self.padding.note_filled(self.eqn, operand, shape, result, value)
        return result

    def fill_products(
        self, lhs: Array, rhs: Array, unfused: Sequence[bool] = (False, False)
    ) -> list[Any]:
        """Fill two operands, as the rule received them, whose products are summed, where needed."""
        if not (pairs := summed_pairs(self.eqn)):
            return [lhs, rhs]
        facts = self.padding.facts((lhs, rhs), self.eqn.invars)
        fills = fills_of_product(self.in_shapes, pairs, facts)
        sides = zip(
            (lhs, rhs), zip(*pairs, strict=True), self.in_shapes, fills, unfused, strict=True
        )
        return [
            self.fill(x, axes=axes, value=0, shape=shape, unfused=apart) if is_filled else x
            for x, axes, shape, is_filled, apart in sides
        ]

    def once(self, operand: Array, what: str, make: Callable[[], Any]) -> Any:
        """What equations of these shapes and parameters make of an operand: made for the first."""
        params = sorted((name, str(value)) for name, value in self.symbolic_params.items())
        key = id(operand), self.sizes.defined, what, str(self.in_shapes), str(params)
        return self.padding.once(key, operand, make)

    # --- evaluation ---

    def bind(self, *operands: Array, **overrides: object) -> Any:
        """Run the primitive on these operands with padded parameters.

        Args:
            *operands: Arrays at padded sizes.
            **overrides: Parameters that differ from `params`.

        Returns:
            The output, or a list of outputs for a primitive with several results.
        """
        out = self.primitive.bind(*operands, **{**self.params, **overrides})
        # Remembered for `stands`: this output is what the primitive itself computes.
        if not overrides and list(map(id, operands)) == list(map(id, self._operands)):
            self._as_it_stands = out
        return out

    def stands(self, out: object) -> bool:
        """Whether an output is that of `bind` with the operands and parameters unchanged."""
        return out is self._as_it_stands

    def evaluate(
        self,
        jaxpr: AnyJaxpr,
        *operands: Array,
        sizes: Mapping[str, tuple[int, Any]] | None = None,
        at: BucketSizes | None = None,
    ) -> list[Any]:
        """Run a sub-program (a jaxpr among the parameters), masked, on padded operands.

        Args:
            jaxpr: The sub-program.
            *operands: Its inputs at padded sizes.
            sizes: Padded and run-time logical size of each dimension variable that only the
                sub-program has.
            at: The sizes of the other variables, where the sub-program runs in a trace of its own.

        Returns:
            Its outputs at padded sizes.

        Raises:
            MaskingError: An equation of the sub-program has no rule, or its rule refuses.
        """
        inner, consts = open_jaxpr(jaxpr)
        outs: list[Any] = self._walk.run(inner, consts, operands, sizes, at)
        return outs

    def require_equal(self, one: Shape, other: Shape) -> None:
        """Refuse two shapes whose symbolic sizes must be equal and are not the same expression.

        Not every primitive compares symbolic sizes when it is traced. If the sizes are equal at run
        time, the exact run succeeds; otherwise it raises JAX's own error.

        Args:
            one: A logical shape.
            other: Another one with as many axes.

        Raises:
            MaskingError: Two sizes are not the same expression, and one of them is symbolic.
        """
        for a, b in zip(one, other, strict=True):
            if (is_symbolic(a) or is_symbolic(b)) and str(a) != str(b):
                self.refuse(f"an axis of size {a} meets one of size {b}, which it must equal")

    def refuse(self, reason: str, remedy: str = "", *, in_bucket: bool = False) -> NoReturn:
        """Say that this equation cannot be masked; the call then runs exact, or raises.

        Args:
            reason: One line: which axis, why.
            remedy: What the user can do about it.
            in_bucket: True if the equation is refused in this bucket only, and smaller buckets may
                do. Calls in other buckets are masked all the same.

        Raises:
            MaskingError: Always. The primitive and the source line are added to the reason.
        """
        raise MaskingError(
            f"{self.primitive.name}: {reason}",
            remedy or "leave the axis static (None or _)",
            in_bucket=in_bucket,
        )


def _padded_param(value: object, sizes: BucketSizes) -> Any:
    if is_symbolic(value):
        return sizes.padded(value)
    if isinstance(value, tuple | list) and value:
        parts = [_padded_param(v, sizes) for v in value]
        if all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def zeros(ctx: RuleContext, aval: Any) -> Any:
    """Zeros (or zero keys) of an abstract value, at its padded shape."""
    shape = ctx.padded_shape(aval.shape)
    if not is_key(aval):
        return jnp.zeros(shape, aval.dtype)
    words = jnp.zeros((*shape, *key_shape(aval.dtype)), jnp.uint32)
    return jax.random.wrap_key_data(words, impl=key_impl(aval.dtype))
