"""Change StableHLO modules: a new ``main`` around the old one; none of what partitioners add.

No public name of JAX builds StableHLO operations; jaxlib's MLIR bindings do (``jaxlib.mlir``).
`bucketjit._jax.stablehlo` has them, and reads and writes modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from jax.interpreters import mlir

from bucketjit._jax.arrays import is_key, key_shape
from bucketjit._jax.stablehlo import MAIN, BadModule, Module, func, hlo, ir

Value = Any  # an `ir.Value` of jaxlib


class Building:
    """The body of a new ``main``. Every method adds operations, and returns their result.

    The old ``main`` becomes a private function, without its attributes, which name its results.

    Attributes:
        inputs: Types of the arguments of the old ``main``.
        results: Types of its results.
        arg_attributes: Attributes of each of its arguments, by name.
        result_attributes: Attributes of each of its results, by name.
        arguments: The arguments of the new ``main``.
    """

    def __init__(self, module: Module, name: str) -> None:
        table = ir.SymbolTable(module.operation)
        old = table[MAIN]
        self.inputs, self.results = list(old.type.inputs), list(old.type.results)
        self.arg_attributes = _attributes_of(old, "arg_attrs", self.inputs)
        self.result_attributes = _attributes_of(old, "res_attrs", self.results)
        self.arguments: list[Value] = []
        while name in table:
            name = f"{name}_"
        table.set_symbol_name(old, name)
        old.attributes["sym_visibility"] = ir.StringAttr.get("private")
        for which in ("arg_attrs", "res_attrs"):
            if which in old.attributes:
                del old.attributes[which]
        self._module, self._name = module, name

    def shape(self, type: Any) -> tuple[int, ...]:
        """The shape of a type without open sizes."""
        return tuple(ir.RankedTensorType(type).shape)

    def type_of(self, aval: Any) -> Any:
        """The type of an abstract value, as ``jit`` lowers it (``mlir.aval_to_ir_type``).

        JAX's own function takes a context of lowering. Of a random key the type is that of its
        words.
        """
        if is_key(aval):
            words = (*aval.shape, *key_shape(aval.dtype))
            return ir.RankedTensorType.get(words, mlir.dtype_to_ir_type(np.dtype(np.uint32)))
        return ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype))

    def scalar_type(self, bits: int = 32) -> Any:
        """The type of an int scalar, such as a size."""
        return ir.RankedTensorType.get([], ir.IntegerType.get_signless(bits))

    def bounded(self, type: Any, axes: Sequence[int]) -> Any:
        """A type whose sizes along these axes become open, with the sizes so far as bounds."""
        if not axes:
            return type
        ranked = ir.RankedTensorType(type)
        dynamic = ir.ShapedType.get_dynamic_size()
        sizes = [dynamic if i in axes else n for i, n in enumerate(ranked.shape)]
        bounds = [n if i in axes else dynamic for i, n in enumerate(ranked.shape)]
        encoding = hlo.TypeExtensions.get(bounds)
        return ir.RankedTensorType.get(sizes, ranked.element_type, encoding)

    @contextmanager
    def main(
        self,
        inputs: Sequence[Any],
        results: Sequence[Any],
        arg_attributes: Sequence[Mapping[str, Any]],
        result_attributes: Sequence[Mapping[str, Any]],
    ) -> Iterator[None]:
        """Add the function; the operations of its body are added within this context.

        The last one is that which returns.
        """
        with ir.InsertionPoint.at_block_begin(self._module.body):
            kind = ir.FunctionType.get(list(inputs), list(results))
            function = func.FuncOp("main", kind, visibility="public")
        function.arg_attrs = ir.ArrayAttr.get([_attributes(a) for a in arg_attributes])
        function.result_attrs = ir.ArrayAttr.get([_attributes(a) for a in result_attributes])
        block = function.add_entry_block()
        self.arguments = list(block.arguments)
        with ir.InsertionPoint(block):
            yield

    def constant(self, value: int, bits: int = 32) -> Value:
        """An int scalar."""
        dtype = np.int32 if bits == 32 else np.int64
        return hlo.constant(ir.DenseElementsAttr.get(np.array(value, dtype)))

    def with_size(self, value: Value, size: Value, axis: int, type: Any) -> Value:
        """A value with another size along an axis: a bounded one, or the whole buffer."""
        return hlo.SetDimensionSizeOp(value, size, axis, results=[type]).result

    def with_zeros(self, value: Value, size: Value, axis: int) -> Value:
        """A whole buffer with 0 behind the logical size along an axis."""
        type = ir.RankedTensorType(value.type)
        shape = list(type.shape)
        none = ir.DenseI64ArrayAttr.get([])
        counts = ir.RankedTensorType.get(shape, ir.IntegerType.get_signless(32))
        positions = hlo.iota(counts, ir.IntegerAttr.get(ir.IntegerType.get_signless(64), axis))
        real = self._compared(positions, "LT", hlo.broadcast_in_dim(counts, size, none))
        zero = self.constant(0)
        scalar = ir.RankedTensorType.get([], type.element_type)
        zero = zero if zero.type == scalar else hlo.convert(scalar, zero)
        return hlo.select(real, value, hlo.broadcast_in_dim(type, zero, none))

    @staticmethod
    def _compared(left: Value, how: str, right: Value) -> Value:
        signed = hlo.ComparisonTypeAttr.get("SIGNED")
        direction = hlo.ComparisonDirectionAttr.get(how)
        return hlo.compare(left, right, direction, compare_type=signed)

    def vector(self, sizes: Sequence[Value]) -> Value:
        """A vector of int32 scalars."""
        row = ir.RankedTensorType.get([1], ir.IntegerType.get_signless(32))
        return hlo.concatenate([hlo.reshape(row, size) for size in sizes], 0)

    def converted(self, value: Value, bits: int) -> Value:
        """An int scalar of this many bits."""
        kind = self.scalar_type(bits)
        return value if value.type == kind else hlo.convert(kind, value)

    def binary(self, operation: str, left: Value, right: Value) -> Value:
        """``add``, ``subtract``, ``multiply``, ``maximum``, ``minimum`` or ``divide``, which cuts.

        ``floordiv`` and ``mod`` round down, as Python does.
        """
        if operation not in ("floordiv", "mod"):
            return getattr(hlo, operation)(left, right)
        quotient, rest = hlo.divide(left, right), hlo.remainder(left, right)
        zero, compared = hlo.subtract(left, left), self._compared
        apart = hlo.xor(compared(rest, "LT", zero), compared(right, "LT", zero))
        rounds = hlo.and_(compared(rest, "NE", zero), apart)
        if operation == "mod":
            return hlo.select(rounds, hlo.add(rest, right), rest)
        unit = self.constant(1, ir.IntegerType(ir.RankedTensorType(left.type).element_type).width)
        return hlo.select(rounds, hlo.subtract(quotient, unit), quotient)

    def call(self, operands: Sequence[Value]) -> list[Value]:
        """The results of the old function."""
        name = ir.FlatSymbolRefAttr.get(self._name)
        return list(func.CallOp(self.results, name, list(operands)).results)


def _attributes(attributes: Mapping[str, Any]) -> Any:
    texts = {
        name: ir.StringAttr.get(value) if isinstance(value, str) else value
        for name, value in attributes.items()
    }
    return ir.DictAttr.get(texts)


def _attributes_of(function: Any, which: str, types: Sequence[Any]) -> list[dict[str, Any]]:
    """The attributes of each argument or result, by name; the function may have none."""
    if which not in function.attributes:
        return [{} for _ in types]
    return [{a.name: a.attr for a in each} for each in ir.ArrayAttr(function.attributes[which])]


def aliased_result(attributes: Mapping[str, Any]) -> int | None:
    """The result whose memory a donated argument may give; None if it gives none."""
    output = attributes.get("tf.aliasing_output")
    return None if output is None else int(ir.IntegerAttr(output).value)


@contextmanager
def new_main(module: Module, name: str) -> Iterator[Building]:
    """Replace ``main``, which becomes a private function, and verify the module at the end."""
    with module.context, ir.Location.unknown():
        yield Building(module, name)
        try:
            module.operation.verify()
        except Exception as error:
            raise BadModule(str(error)) from error


# --- sharding -------------------------------------------------------------------------------------

_SHARDY = "sdy."  # the dialect
_SHARDING = "mhlo.sharding"
_FRONTEND = "mhlo.frontend_attributes"  # a dict; where Shardy's dialect is not written, it is here
_OF_SHARDY = "xla.sdy."
_OF_ARGUMENTS = ("arg_attrs", "res_attrs")
_SEVERAL = ("SPMDFullToShardShape", "SPMDShardToFullShape")  # custom calls


def without_sharding(module: Module) -> bool:
    """Remove what says how a module is sharded, in Shardy's dialect or in the form before it.

    JAX writes it for functions on one device too, for random keys and for calls of LAPACK. There
    it means nothing, but readers that know StableHLO alone refuse it. No public name of JAX
    changes a module; jaxlib's bindings of MLIR do.
    """
    needless: list[Any] = []
    changed = False

    def look(operation: Any) -> Any:
        nonlocal changed
        changed |= _strip(operation.attributes)
        if operation.name.startswith(_SHARDY) or _target(operation) in ("Sharding", *_SEVERAL):
            needless.append(operation)
        return ir.WalkResult.ADVANCE

    with module.context, ir.Location.unknown():
        module.operation.walk(look)
        for operation in needless:
            name = _target(operation) or operation.name
            if name in ("Sharding", "sdy.sharding_constraint"):
                operation.results[0].replace_all_uses_with(operation.operands[0])
            elif name != "sdy.mesh":
                raise BadModule(f"it is for several devices, as it has {name!r}")
            operation.erase()
    return changed or bool(needless)


def _target(operation: Any) -> str | None:
    if operation.name != "stablehlo.custom_call":
        return None
    return str(ir.StringAttr(operation.attributes["call_target_name"]).value)


def _strip(attributes: Any) -> bool:
    """Remove attributes of an operation; return whether there were any."""
    changed = False
    for name in [name for name in attributes if _is_of_sharding(name)]:
        del attributes[name]
        changed = True
    if _FRONTEND in attributes and _OF_SHARDY in str(attributes[_FRONTEND]):
        kept = _stripped(attributes[_FRONTEND])
        if len(kept):
            attributes[_FRONTEND] = kept
        else:
            del attributes[_FRONTEND]
        changed = True
    for name in _OF_ARGUMENTS:
        if name in attributes:
            before = list(ir.ArrayAttr(attributes[name]))
            after = [_stripped(attribute) for attribute in before]
            if after != before:
                attributes[name] = ir.ArrayAttr.get(after)
                changed = True
    return changed


def _stripped(attributes: Any) -> Any:
    kept = {a.name: a.attr for a in ir.DictAttr(attributes) if not _is_of_sharding(a.name)}
    return ir.DictAttr.get(kept)


def _is_of_sharding(name: str) -> bool:
    return name == _SHARDING or name.startswith((_SHARDY, _OF_SHARDY))
