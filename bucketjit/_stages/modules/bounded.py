"""Write the bucket of a masked program into the types of its module.

    masked    func masked(%sizes: tensor<1xi32>, %x: tensor<8x4xf32>) -> tensor<8x4xf32>
    bounded   func main(%x: tensor<?x4xf32, #stablehlo.bounds<8, ?>>)
                  -> tensor<?x4xf32, #stablehlo.bounds<8, ?>>

The new ``main`` reads the sizes of its arguments, makes the arguments whole buffers with zeros
behind them, calls the masked function, and gives the results their sizes. So the masks are those of
bucketjit, and everything within the masked function is static: a compiler need not know how to pad.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from bucketjit._events import shown
from bucketjit._ir import expressions
from bucketjit._ir.bucket_sizes import is_wide
from bucketjit._ir.dynamic_axes import places_of
from bucketjit._ir.expressions import evaluate_text, parsed, symbolic_axes, variables_of
from bucketjit._ir.guards import Guard, parse_constraint
from bucketjit._ir.program import Program
from bucketjit._jax.stablehlo import BadModule, Module, copy_of, func, hlo, kept_arguments
from bucketjit._stages.modules import building
from bucketjit._stages.modules.building import Building, Value
from bucketjit._stages.modules.dynamic import refuse_what_python_computes
from bucketjit._tracing.call import Call
from bucketjit.errors import ExportError, MaskingError, ShapeCheckError

_MOST_SIZES = 1 << 16  # combinations of sizes in a bucket that are looked at
_MOST_TRACES = 1 << 10  # and, of a program of concrete traces, traced at


def bounded_module(
    lowered: jax.stages.Lowered,
    call: Call,
    bucket: Mapping[str, int],
    constraints: Sequence[str] = (),
) -> Module:
    """The module of a masked program, with bounded types.

    Its function ``main`` takes the leaves of the user's arguments in order, also those that the
    program does not read. An argument that is itself a size is an int32 scalar. Where several
    arguments have the size of a variable, the first of them decides, and others are cut to it or
    filled up with 0: StableHLO has no operation that compares them and fails. The attribute
    ``bucketjit.shape`` of each argument and result names its sizes.
    """
    program = call.program
    if not isinstance(program, Program):
        raise ExportError("the call is not masked, so its module has no bucket")
    if (why := program.why_not_apart()) is not None:
        raise ExportError(f"cannot export: {why}")
    refuse_what_python_computes(program)
    _check_sizes(program, bucket, constraints)
    try:
        module = copy_of(lowered.compiler_ir())
        with building.new_main(module, "masked") as build:
            _Main(build, program, call, bucket, lowered).add()
    except BadModule as error:
        raise ExportError(f"the masked module cannot have bounds: {error}") from error
    return module


# --- which programs -------------------------------------------------------------------------


def _check_sizes(program: Program, bucket: Mapping[str, int], constraints: Sequence[str]) -> None:
    """Refuse a program that does not serve all sizes of its bucket: bounds have no lower end."""
    promised = [parse_constraint(text) for text in constraints]
    guards = [guard for guard in program.guards if guard not in promised]
    needed = {v for guard in guards for v in guard.variables}
    reshaped = itertools.chain(*itertools.chain(*program.reshapes))
    needed |= expressions.variables_in(reshaped)
    names = [v for v in bucket if v in needed or program.pairing is not None]
    promised = [guard for guard in promised if guard.variables <= set(names)]
    most = _MOST_SIZES if program.pairing is None else _MOST_TRACES
    if math.prod(bucket[v] for v in names) > most:
        raise ExportError(
            f"the program holds under guards ({', '.join(map(str, guards)) or 'its traces'}), and "
            f"the bucket has more than {most} combinations of sizes to check them at; choose a "
            "smaller bucket"
        )
    for row in itertools.product(*(range(1, bucket[v] + 1) for v in names)):
        sizes = dict(zip(names, row, strict=True))
        if not all(guard.holds(sizes) for guard in promised):
            continue
        if why := _not_at(program, guards, {**dict.fromkeys(bucket, 1), **sizes}):
            raise ExportError(
                f"at {shown(sizes)} {why}, and a module with bounds takes every size up to the "
                "bucket; promise others by constraints=[...], or decide by no size"
            )


def _not_at(program: Program, guards: Sequence[Guard], sizes: Mapping[str, int]) -> str:
    """Why a program does not hold at some sizes; empty if it does."""
    broken = next((guard for guard in guards if not guard.holds(sizes)), None)
    if broken is not None:
        return f"the program fails: it holds for {broken} only"
    try:
        program.check_reshapes(sizes)
    except ShapeCheckError as error:
        return f"a reshape fails: {error}"
    if program.pairing is not None and program.size_constants(sizes) is None:
        return "the function does something else than its program"
    return ""


# --- the new function -----------------------------------------------------------------------


class _Argument(NamedTuple):
    """An argument of the new ``main``.

    Attributes:
        place: Its position in the masked module; None if that does not read it.
        type: Its type in the masked module, without open sizes.
        tokens: The expression of each open axis.
        is_size: Whether it is itself a size.
        sizes: The size of each open axis, once the function is begun.
    """

    place: int | None
    type: Any
    tokens: Mapping[int, str]
    is_size: bool
    sizes: dict[int, Value]


class _Main:
    """Adds the new ``main``."""

    def __init__(
        self, build: Building, program: Program, call: Call, bucket: Any, lowered: Any
    ) -> None:
        self._build, self._program, self._call, self._bucket = build, program, call, bucket
        self._kept = kept = kept_arguments(lowered)
        avals = jax.tree_util.tree_leaves(lowered.in_avals)
        opened: dict[int, dict[int, str]] = {}
        for place in places_of(call.tokens).opened:
            if not place.token.isdigit():
                opened.setdefault(place.leaf, {})[place.axis] = place.token
        self._arguments = []
        for leaf, aval in enumerate(avals[1:]):
            tokens, is_size = opened.get(leaf, {}), leaf in opened and not aval.shape
            position = kept.index(leaf + 1) if leaf + 1 in kept else None
            type = build.scalar_type() if is_size else build.type_of(aval)
            if position is not None and not is_size:
                type = build.inputs[position]
            self._arguments.append(_Argument(position, type, tokens, is_size, {}))

    def add(self) -> None:
        """Add the function."""
        build = self._build
        inputs = [
            x.type if x.is_size else build.bounded(x.type, list(x.tokens)) for x in self._arguments
        ]
        axes = map(symbolic_axes, self._program.out_shapes)
        pairs = zip(build.results, axes, strict=True)
        results = [build.bounded(type, opened) for type, opened in pairs]
        with build.main(inputs, results, *self._attributes(inputs, results)):
            sizes = self._sizes()
            whole: dict[int, Value] = {}
            if 0 in self._kept:
                whole[0] = build.vector([sizes[v] for v in self._call.variables])
            for x, value in zip(self._arguments, build.arguments, strict=True):
                if x.place is not None:
                    whole[x.place] = value if x.is_size else self._whole(x, value, sizes)
            outs = build.call([whole[i] for i in sorted(whole)])
            cut = [
                self._cut(out, shape, type, sizes)
                for out, shape, type in zip(outs, self._program.out_shapes, results, strict=True)
            ]
            func.ReturnOp(cut)

    def _attributes(self, inputs: Sequence[Any], results: Sequence[Any]) -> tuple[Any, Any]:
        """Attributes of the arguments and of the results.

        An argument stays donated to a result of its own type. With bounds, the types may differ
        though those of the whole buffers do not.
        """
        old = self._build
        of_args = []
        for x, type in zip(self._arguments, inputs, strict=True):
            attributes = {} if x.place is None else dict(old.arg_attributes[x.place])
            result = building.aliased_result(attributes)
            if result is not None and results[result] != type:
                del attributes["tf.aliasing_output"]
            of_args.append({**attributes, "bucketjit.shape": self._shape_of(x)})
        pairs = zip(old.result_attributes, self._program.out_shapes, strict=True)
        return of_args, [{**x, "bucketjit.shape": str(tuple(shape))} for x, shape in pairs]

    def _shape_of(self, x: _Argument) -> str:
        if x.is_size:
            return x.tokens[0]
        shape = self._build.shape(x.type)
        dims = [x.tokens.get(i, str(n)) for i, n in enumerate(shape)]
        return f"({dims[0]},)" if len(dims) == 1 else f"({', '.join(dims)})"

    def _whole(self, x: _Argument, value: Value, sizes: Mapping[str, Value]) -> Value:
        """The whole buffer of a bounded argument, with 0 in its padding, as masked programs expect.

        What a compiler has in the padding of a bounded buffer is not defined.
        """
        shape = self._build.shape(x.type)
        left = list(x.tokens)
        for axis in x.tokens:
            left.remove(axis)
            type = self._build.bounded(x.type, left)
            value = self._build.with_size(value, self._build.constant(shape[axis]), axis, type)
        for axis, token in x.tokens.items():
            logical = size = x.sizes[axis]
            if sizes.get(token) is not logical:  # another argument has decided
                size = self._build.binary("minimum", logical, self._expression(token, sizes))
            value = self._build.with_zeros(value, size, axis)
        return value

    def _cut(self, out: Value, shape: Sequence[Any], type: Any, sizes: Mapping[str, Value]) -> Any:
        done: list[int] = []
        whole = out.type
        for axis in symbolic_axes(shape):
            done.append(axis)
            size = self._expression(str(shape[axis]), sizes)
            out = self._build.with_size(out, size, axis, self._build.bounded(whole, done))
        assert out.type == type
        return out

    # --- sizes ---

    def _sizes(self) -> dict[str, Value]:
        """The size of each variable, from the first argument that has it."""
        sizes: dict[str, Value] = {}
        places: list[tuple[str, Value]] = []
        for x, value in zip(self._arguments, self._build.arguments, strict=True):
            for axis, token in x.tokens.items():
                x.sizes[axis] = value if x.is_size else hlo.get_dimension_size(value, axis)
                places.append((token, x.sizes[axis]))
                if token.isidentifier():
                    sizes.setdefault(token, x.sizes[axis])
        while missing := [v for v in self._call.variables if v not in sizes]:
            solved = self._solved(places, sizes)
            if solved is None:
                raise ExportError(
                    f"the size of {', '.join(missing)} does not follow from the shapes of the "
                    "arguments by a linear equation; give an argument that has it as an axis"
                )
            sizes |= solved
        return sizes

    def _solved(
        self, places: Sequence[tuple[str, Value]], sizes: Mapping[str, Value]
    ) -> dict[str, Value] | None:
        """A variable that an expression of known ones determines: ``2*b + 1`` is known, so b is."""
        for token, value in places:
            unknown = [v for v in variables_of(token) if v not in sizes]
            if len(unknown) == 1 and _is_linear(token, unknown[0]):
                values = [
                    self._expression(token, {**sizes, unknown[0]: self._build.constant(n)})
                    for n in (0, 1)
                ]
                slope = self._build.binary("subtract", values[1], values[0])
                rest = self._build.binary("subtract", value, values[0])
                return {unknown[0]: self._build.binary("divide", rest, slope)}
        return None

    def _expression(self, text: str, sizes: Mapping[str, Value]) -> Value:
        """An expression of sizes, in int32; in int64 if it may overflow in this bucket."""
        try:
            box = tuple((v, self._bucket[v]) for v in variables_of(text))
            bits = 64 if is_wide(text, box) else 32
        except MaskingError as error:
            raise ExportError(error.reason) from error
        return self._build.converted(self._computed(parsed(text), sizes, bits), 32)

    def _computed(self, node: ast.expr, sizes: Mapping[str, Value], bits: int) -> Value:
        build = self._build
        match node:
            case ast.Constant(value=int(value)):
                return build.constant(value, bits)
            case ast.Name(id=name):
                return build.converted(sizes[name], bits)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = self._computed(operand, sizes, bits)
                return build.binary("subtract", build.constant(0, bits), value)
            case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))):
                factor = self._computed(left, sizes, bits)
                value = build.constant(1, bits)
                for _ in range(power):
                    value = build.binary("multiply", value, factor)
                return value
            case ast.BinOp(left=left, op=op, right=right):
                operation = _OPERATIONS[type(op)]
            case ast.Call(func=ast.Name(id=name), args=[left, right]):
                operation = {"max": "maximum", "min": "minimum"}.get(name, name)
            case _:
                raise ExportError(f"cannot compute the size {ast.unparse(node)} in a module")
        sides = [self._computed(side, sizes, bits) for side in (left, right)]
        return build.binary(operation, *sides)


_OPERATIONS = {ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply"}


def _is_linear(text: str, variable: str) -> bool:
    """Whether a size is linear in a variable, whatever the others are, and depends on it."""
    calls = [node for node in ast.walk(parsed(text)) if isinstance(node, ast.Call)]
    others = [v for v in variables_of(text) if v != variable]
    for size in (1, 3):
        fixed = dict.fromkeys(others, size)
        values = [evaluate_text(text, {**fixed, variable: n}) for n in range(4)]
        steps = {b - a for a, b in itertools.pairwise(values)}
        if len(steps) != 1 or steps == {0}:
            return False
    return not any(variable in variables_of(ast.unparse(call)) for call in calls)
