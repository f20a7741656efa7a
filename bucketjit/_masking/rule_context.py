"""What a masking rule is given: the context of one equation at padded sizes.

A rule is ``rule(ctx, *operands) -> output`` (a sequence for primitives with several results).
It evaluates one primitive on padded operands and keeps the invariant: along an axis of
symbolic size ``d`` the first ``d(logical)`` positions are real, the rest is arbitrary. A rule
that reads along an axis first fills its padding; it trusts nothing that an earlier rule left
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn

from bucketjit._errors import MaskingError
from bucketjit._ir.size_params import SIZE_PARAMS, VALUE_PARAMS
from bucketjit._jax.arrays import key_impl, key_shape
from bucketjit._jax.devices import by_platform
from bucketjit._jax.jaxprs import AnyJaxpr, open_jaxpr
from bucketjit._jax.primitives import name_of
from bucketjit._masking.array_ops import in_every_row, is_key, select
from bucketjit._masking.filled_values import FilledValues
from bucketjit._masking.padding_constants import KnownPadding
from bucketjit._sizes.bucket_sizes import BucketSizes
from bucketjit._sizes.expressions import Dim, Shape, is_symbolic, symbolic_axes

Rule = Callable[..., Any]

RuleTable = Mapping[Any, Rule]  # keys are primitives, or names of primitives

Interpreter = Callable[..., list[Any]]


class RuleContext:
    """One equation, seen at padded sizes.

    Attributes:
        primitive: The primitive of the equation.
        params: Its parameters with every symbolic size replaced by its padded size.
            Sub-programs (jaxprs) stay as they are: run them with `evaluate`.
        symbolic_params: The parameters as traced.
        in_shapes: Logical shape of each operand, symbolic.
        out_shapes: Logical shape of each output, symbolic.
        in_avals, out_avals: Abstract values as traced (dtypes, weak types).
        eqn: The equation itself.
    """

    def __init__(
        self,
        eqn: JaxprEqn,
        sizes: BucketSizes,
        interpret: Interpreter,
        operands: Sequence[Any],
        ever_read: Set[Any],
        known: KnownPadding,
        stand_ins: FilledValues,
        hidden_signs: Callable[[], Mapping[int, Any]] = dict,
    ) -> None:
        self.eqn = eqn
        self.primitive = eqn.primitive
        self.symbolic_params: Mapping[str, Any] = eqn.params
        self.params: dict[str, Any] = {k: _padded_param(v, sizes) for k, v in eqn.params.items()}
        self._refuse_sizes_elsewhere()
        self.in_avals: list[Any] = [v.aval for v in eqn.invars]
        self.out_avals: list[Any] = [v.aval for v in eqn.outvars]
        self.in_shapes: list[Shape] = [tuple(getattr(a, "shape", ())) for a in self.in_avals]
        self.out_shapes: list[Shape] = [tuple(getattr(a, "shape", ())) for a in self.out_avals]
        self._sizes = sizes
        self._interpret = interpret
        self._operands = operands
        self._ever_read = ever_read
        self._known = known
        self._stand_ins = stand_ins
        self._hidden_signs = hidden_signs
        self._as_it_stands: Any = None

    def signs_are_hidden(self) -> bool:
        """Whether no result of the program depends on the signs of this equation's vectors."""
        return self._hidden_signs().get(id(self.eqn)) is self.eqn

    def is_read(self, output: int) -> bool:
        """Whether anything in the program reads this output."""
        return self.eqn.outvars[output] in self._ever_read

    def _refuse_sizes_elsewhere(self) -> None:
        """Refuse a symbolic size where no rule expects one; see `bucketjit._ir.size_params`."""
        symbolic, name = self.symbolic_params, self.primitive.name
        for param, value in self.params.items():
            if value is symbolic[param] or param in SIZE_PARAMS.get(name, ()):
                continue
            if param not in VALUE_PARAMS.get(name, ()) and name_of(self.eqn):
                self.refuse(f"its parameter {param} is {symbolic[param]}, a size")

    # --- sizes ---

    def padded(self, dim: Dim) -> int:
        """The padded size of ``dim``, a Python int."""
        return self._sizes.padded(dim)

    def padded_shape(self, shape: Iterable[Dim]) -> tuple[int, ...]:
        """The padded sizes of a symbolic shape."""
        return self._sizes.padded_shape(shape)

    def logical(self, dim: Dim) -> Any:
        """The logical size of ``dim``: an int if it is static, else an int32 scalar."""
        return self._sizes.logical(dim)

    def symbolic_axes(self, operand: int = 0) -> tuple[int, ...]:
        """The axes of an operand, given by its position, whose size is symbolic."""
        return symbolic_axes(self.in_shapes[operand])

    def size_constant(self, index: int) -> Any:
        """A constant of the program that depends on the logical sizes, at padded size."""
        return self._sizes.size_constants[index]

    # --- filling ---

    def shape_of(self, operand: Array) -> Shape:
        """The logical shape of an array that is one of this equation's operands."""
        for own, shape in zip(self._operands, self.in_shapes, strict=True):
            if own is operand:
                return shape
        raise ValueError(
            "this array is not an operand of the equation as it was given to the rule; "
            "pass its logical shape, such as shape=ctx.in_shapes[0]"
        )

    def in_bounds(self, shape: Shape, axes: Iterable[int] | None = None) -> Any | None:
        """Where an array of this logical shape is real; see `BucketSizes.in_bounds`."""
        return self._sizes.in_bounds(shape, axes)

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

        A select, never a product with a mask: 0 * NaN is NaN.

        Args:
            operand: An array at padded size.
            axes: Fill the padding along these axes; along all by default.
            value: A scalar of (or convertible to) the operand's dtype.
            shape: The logical shape of ``operand``; needed unless it is an operand of the
                equation exactly as the rule received it.
            unfused: Keep XLA's CPU backend from fusing the select into what reads it; for a reader
                that is fast only where it reads a single array.

        Returns:
            ``operand`` with its padding replaced; itself if these axes are all static, or if its
            padding is known to hold ``value``.
        """
        is_operand = shape is None
        shape = self.shape_of(operand) if shape is None else shape
        axes = tuple(range(len(shape)) if axes is None else axes)
        if not any(is_symbolic(shape[a]) for a in axes):
            return operand
        if self._known.holds(operand, shape, value):
            return operand
        is_zero = not isinstance(value, jax.Array) and not np.any(value)
        if operand.dtype.name == "float8_e8m0fnu" and is_zero:
            self.refuse("padding of 0 in float8_e8m0fnu, which has no 0", "use another dtype")

        def filled(array: Array) -> Any:
            mask = self._sizes.in_bounds(shape, axes, tuple(array.shape))
            if isinstance(value, jax.Array) or is_key(array):
                return select(mask, array, value)
            return select(mask, array, self._sizes.constant(array.shape, array.dtype, value))

        def filled_in_a_branch(array: Array) -> Any:
            return lax.cond(self._is_whole(shape, axes), lambda array: array, filled, array)

        if unfused:
            return by_platform(operand, cpu=filled_in_a_branch, default=filled)
        result = filled(operand)
        if is_operand and not self._known.knows(operand, shape):
            self._stand_ins.note(operand, shape, result)
        return result

    def _is_whole(self, shape: Shape, axes: Iterable[int]) -> Any:
        """Whether an array of this logical shape has no padding along these axes, in every row."""
        dims = [shape[a] for a in axes if is_symbolic(shape[a])]
        return in_every_row(jnp.all(jnp.stack([self.logical(d) == self.padded(d) for d in dims])))

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
        same = len(operands) == len(self._operands) and not overrides
        if same and all(x is y for x, y in zip(operands, self._operands, strict=True)):
            self._as_it_stands = out
        return out

    def stands(self, out: object) -> bool:
        """Whether an output is that of the primitive run on its operands as they stand."""
        return out is self._as_it_stands

    def evaluate(
        self, jaxpr: AnyJaxpr, *operands: Array, sizes: Mapping[str, tuple[int, Any]] | None = None
    ) -> list[Any]:
        """Run a sub-program (a jaxpr among the parameters), masked, on padded operands.

        Args:
            jaxpr: The sub-program.
            *operands: Its inputs at padded sizes.
            sizes: Padded and run-time logical size of dimension variables of its own.

        Returns:
            Its outputs at padded sizes.
        """
        inner, consts = open_jaxpr(jaxpr)
        return self._interpret(inner, consts, operands, sizes)

    def require_equal(self, one: Shape, other: Shape) -> None:
        """Refuse sizes that must be equal and are not: not every primitive compares symbolic ones.

        Where they happen to be equal the exact run succeeds, and elsewhere it raises what JAX does.
        """
        for a, b in zip(one, other, strict=True):
            if (is_symbolic(a) or is_symbolic(b)) and str(a) != str(b):
                self.refuse(f"an axis of size {a} meets one of size {b}, which it must equal")

    def refuse(self, reason: str, remedy: str = "", *, in_bucket: bool = False) -> NoReturn:
        """Say that this equation cannot be masked; the call then runs exact, or raises.

        Args:
            reason: One line: which axis, why.
            remedy: What the user can do about it.
            in_bucket: Whether that is so in this bucket, and smaller ones may do. Calls in others
                are masked all the same.

        Raises:
            MaskingError: Always. The primitive and the source line are added to the reason.
        """
        raise MaskingError(
            f"{self.primitive.name}: {reason}",
            remedy or "leave the axis static (None or _)",
            in_bucket=in_bucket,
        )


def _padded_param(value: object, sizes: BucketSizes) -> Any:
    """Replace symbolic sizes in a parameter, inside tuples and lists too."""
    if is_symbolic(value):
        return sizes.padded(value)
    if isinstance(value, tuple | list) and value:
        parts = [_padded_param(v, sizes) for v in value]
        if all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def zeros(ctx: RuleContext, aval: Any) -> Any:
    """Zeros (or zero keys) of this type, at its padded shape."""
    shape = ctx.padded_shape(aval.shape)
    if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.zeros(shape, aval.dtype)
    words = jnp.zeros((*shape, *key_shape(aval.dtype)), jnp.uint32)
    return jax.random.wrap_key_data(words, impl=key_impl(aval.dtype))
