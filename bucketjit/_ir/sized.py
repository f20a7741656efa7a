"""The primitive of sizes that a program computes: arrays are cut to their first ``n`` rows.

    b:f32[size_1 - 1] = sized[bound=n dim=size_1 - 1 variable=size_1] k:i32[] a:f32[n]

The variable is new. Its value is ``k + 1``, since dimension variables are at least 1 and ``k`` may
be 0. The masking rule of the primitive stores it, so that all later rules mask by it. The transpose
is `unsized_p`, which adds rows of zeros up to the bound. Other arrays that are cut to the same size
are cut by equations that do not define the variable again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn
from jax.interpreters import ad, batching

from bucketjit._ir.expressions import Dim
from bucketjit.errors import MaskingError

# --- size constant ------------------------------------------------------------------------------

# The primitive of size constants: constants whose value depends on the logical sizes.
#
#     before   a = f32[3]{0.5 1 1.5} at n = 3, f32[4]{...} at n = 4         two programs
#     after    a:f32[n] = size_constant[index=0 aval=f32[n] depends_on=n]   one program
#
# The values are arguments of the executable (`SizeConstants`); ``index`` says which one.

size_constant_p = jex_core.Primitive("size_constant")


@size_constant_p.def_abstract_eval  # type: ignore[untyped-decorator]
def _abstract_eval(*, index: int, aval: object, depends_on: Dim) -> Any:
    return aval


# --- sized --------------------------------------------------------------------------------------

sized_p = jex_core.Primitive("sized")
unsized_p = jex_core.Primitive("unsized")
sized_p.multiple_results = unsized_p.multiple_results = True


def makes_size(eqn: JaxprEqn) -> bool:
    """Whether an equation gives a dimension variable its value."""
    return eqn.primitive is sized_p and bool(eqn.params["defines"])


def _with_rows(array: Any, rows: Dim) -> Any:
    weak = bool(getattr(array, "weak_type", False))
    return jax.core.ShapedArray((rows, *array.shape[1:]), array.dtype, weak_type=weak)


@sized_p.def_abstract_eval  # type: ignore[untyped-decorator]
def _sized_types(n: Any, *arrays: Any, dim: Dim, **_: Any) -> list[Any]:
    return [_with_rows(array, dim) for array in arrays]


@unsized_p.def_abstract_eval  # type: ignore[untyped-decorator]
def _unsized_types(n: Any, *arrays: Any, bound: Dim, **_: Any) -> list[Any]:
    return [_with_rows(array, bound) for array in arrays]


def cut_to_size(n: Any, arrays: Sequence[Any], *, dim: Dim, **params: Any) -> list[Any]:
    """Cut arrays to a size, which is new or is defined already."""
    return list(sized_p.bind(n, *arrays, dim=dim, bound=arrays[0].shape[0], **params))


def extended(n: Any, array: Any, *, dim: Dim, bound: Dim) -> Any:
    """Add rows of zeros to an array of a computed size."""
    (out,) = unsized_p.bind(
        n, array, dim=dim, bound=bound, variable="", is_checked=False, defines=False
    )
    return out


def _jvp(primitive: Any) -> Any:
    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        n, *_ = primals
        outs = primitive.bind(*primals, **params)
        linear = {**params, "defines": False}
        changes = [
            ad.Zero(jax.typeof(out).to_tangent_aval())
            if type(tangent) is ad.Zero
            else primitive.bind(n, tangent, **linear)[0]
            for out, tangent in zip(outs, tangents[1:], strict=True)
        ]
        return outs, changes

    return jvp


def _transpose(inverse: Any) -> Any:
    def transpose(cotangents: Sequence[Any], n: Any, *arrays: Any, **params: Any) -> list[Any]:
        return [
            None,
            *(
                ct
                if type(ct) is ad.Zero or not ad.is_undefined_primal(array)
                else inverse.bind(n, ct, **{**params, "defines": False})[0]
                for ct, array in zip(cotangents, arrays, strict=True)
            ),
        ]

    return transpose


def _batch(primitive: Any) -> Any:
    def batch(operands: Sequence[Any], axes: Sequence[Any], **params: Any) -> Any:
        (n, *arrays), (of_n, *of_arrays) = operands, axes
        if of_n is not None:
            _refuse_rows()
        # The rows stay the first axis.
        moved = [
            x if axis is None else jax.numpy.moveaxis(x, axis, 1)
            for x, axis in zip(arrays, of_arrays, strict=True)
        ]
        outs = primitive.bind(n, *moved, **params)
        return outs, [None if axis is None else 1 for axis in of_arrays]

    return batch


def _refuse_rows() -> NoReturn:
    raise MaskingError(
        "vmap over a selection whose size differs from row to row",
        "use jnp.where with masks, or loop over the rows with jax.lax.map",
    )


ad.primitive_jvps[sized_p] = _jvp(sized_p)
ad.primitive_jvps[unsized_p] = _jvp(unsized_p)
ad.primitive_transposes[sized_p] = _transpose(unsized_p)
ad.primitive_transposes[unsized_p] = _transpose(sized_p)
batching.primitive_batchers[sized_p] = _batch(sized_p)
batching.primitive_batchers[unsized_p] = _batch(unsized_p)
