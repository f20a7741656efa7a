"""The type and the shape of each argument leaf; values that are no arrays are refused.

Errors say what to pass in the place of such a value. Libraries are recognized by the methods of the
value, so none of them is imported.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr, tree_leaves, tree_leaves_with_path

from bucketjit._arrays.padded import Padded
from bucketjit._ir.dynamic_axes import cure_of_list, is_list_of_numbers
from bucketjit._ir.expressions import is_symbolic
from bucketjit._jax import arrays
from bucketjit._jax.arrays import explicit_sharding, on_one_device
from bucketjit._raised import first_line, text_of
from bucketjit.errors import ArgumentError, BucketJitError


class LeafType(NamedTuple):
    """Everything that a program depends on of a leaf, except for its sizes.

    Attributes:
        dtype: JAX dtype; None for a Python int that is itself a size.
        weak_type: JAX's weak type (True for Python scalars other than bool).
        rank: Number of axes.
        sharding: How the leaf is sharded over explicit axes of a mesh, which are part of JAX's
            types; None if it is not.
        partitions: The number of equal parts that each axis is cut into over several devices, which
            must divide padded sizes too; None if no axis is cut.
        target: The sharding of a struct on devices of a topology, which are in no process; None for
            all other leaves.
    """

    dtype: Any
    weak_type: bool
    rank: int
    sharding: Any = None
    partitions: tuple[int, ...] | None = None
    target: Any = None


_SCALARS: dict[type, np.dtype[Any]] = {kind: np.dtype(kind) for kind in (bool, int, float, complex)}

# Signing a call then costs one dict look-up a leaf, in place of a new tuple.
_leaf_type = functools.lru_cache(maxsize=1024)(LeafType)


_TOO_LARGE = 2**63  # bytes of an array: XLA counts them in 64 bits with a sign


def can_be(shape: Sequence[int], dtype: Any) -> bool:
    """Whether an array of this shape has less than 2^63 bytes. Beyond, XLA aborts the process."""
    return math.prod(shape) * int(dtype.itemsize) < _TOO_LARGE


def leaf_type(
    value: object, path: str, remedy: str | None = None, *, structs: bool = False
) -> tuple[LeafType, tuple[int, ...]]:
    """The type and the logical shape of an argument leaf, which may be a struct if ``structs``."""
    if (plain := on_one_device(value)) is not None:
        return _leaf_type(plain.dtype, plain.weak_type, len(plain.shape)), plain.shape
    if isinstance(value, jax.Array):
        weak = bool(getattr(value.aval if hasattr(value, "aval") else value, "weak_type", False))
        placed = explicit_sharding(value), arrays.partitions(value)
        return LeafType(value.dtype, weak, value.ndim, *placed), value.shape
    if structs and isinstance(value, jax.ShapeDtypeStruct):
        return _type_of_struct(value, path)
    if isinstance(value, Padded):
        counts = arrays.partitions(value.array)
        sharding = explicit_sharding(value.array)
        if counts and any(n % count for n, count in zip(value.sizes, counts, strict=True)):
            counts = sharding = None  # JAX cannot cut the logical sizes, so the type is not cut
        more = value.weak_type, value.ndim, sharding, counts
        return LeafType(_canonical(value.dtype, path), *more), value.sizes
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype == jax.dtypes.float0:  # JAX's dtype for tangents of integers
            return LeafType(value.dtype, False, value.ndim), value.shape
        # The kind of bfloat16 and of others of `ml_dtypes` is that of void.
        if value.dtype.kind in "OSUMm" or issubclass(value.dtype.type, np.void):
            raise ArgumentError(
                f"{path}: expected a numeric array, got a NumPy array of dtype {value.dtype}; "
                f"{_BY_DTYPE.get(value.dtype.kind, _FIELDS).format(path)}"
            )
        if isinstance(value, np.ma.MaskedArray):
            raise ArgumentError(
                f"{path}: expected an array, got a NumPy masked array; pass {path}.filled(0), and "
                f"{path}.mask as an argument of its own"
            )
        return LeafType(_canonical(value.dtype, path), False, value.ndim), value.shape
    for kind in type(value).__mro__:  # subclasses too: an IntEnum is an int
        if (dtype := _SCALARS.get(kind)) is not None:
            return LeafType(jax.dtypes.canonicalize_dtype(dtype), kind is not bool, 0), ()
    raise ArgumentError(
        f"{path}: expected an array or a Python scalar, got {described(value)}; "
        f"{remedy or cure(value, path)}"
    )


def _type_of_struct(value: jax.ShapeDtypeStruct, path: str) -> tuple[LeafType, tuple[int, ...]]:
    if any(map(is_symbolic, value.shape)):
        raise ArgumentError(
            f"{path}: expected the sizes of a call, got the symbolic shape {value.shape}; "
            "dynamic_axes opens axes, and export_dynamic exports the function for all sizes"
        )
    if not can_be(value.shape, value.dtype):
        raise ArgumentError(f"no array of {value.dtype} can have the shape {value.shape}")
    try:
        placed = explicit_sharding(jax.typeof(value)), arrays.partitions(value)
    except ValueError as error:
        raise ArgumentError(f"{value}: {first_line(error)}") from error
    devices = arrays.devices_of(value.sharding)
    target = value.sharding if arrays.is_of_topology(devices) else None
    more = bool(value.weak_type), len(value.shape), *placed, target
    return LeafType(_canonical(value.dtype, path), *more), tuple(value.shape)


def _canonical(dtype: np.dtype[Any], path: str) -> Any:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    if not dtype.isnative:
        raise ArgumentError(
            f"{path}: expected native byte order, got a NumPy array of {dtype!r}; pass "
            f"{path}.astype({path}.dtype.newbyteorder('='))"
        )
    if dtype.kind in "fc" and dtype.itemsize > (8 if dtype.kind == "f" else 16):
        raise ArgumentError(
            f"{path}: expected an array of a dtype that JAX has, got {dtype}; pass "
            f"{path}.astype('{'float64' if dtype.kind == 'f' else 'complex128'}')"
        )
    return jax.dtypes.canonicalize_dtype(dtype)


def with_paths(
    names: Sequence[str], values: Sequence[Any], is_leaf: Any = None
) -> list[tuple[str, Any]]:
    """The leaves of some arguments, in the order of ``jax.tree_util``, with their paths."""
    return [
        (name + jax.tree_util.keystr(keys), leaf)
        for name, value in zip(names, values, strict=True)
        for keys, leaf in jax.tree_util.tree_flatten_with_path(value, is_leaf)[0]
    ]


# --- what to pass instead ---

_OTHERWISE = "pass other values as static arguments (static_argnums, static_argnames)"

# A library, the class of its modules, and the function that takes them.
_WRAPPERS = (
    ("equinox", "Module", "bucketjit.integrations.equinox.filter_jit"),
    ("flax.nnx", "Module", "bucketjit.integrations.nnx.jit"),
)

# The methods of a value, and what to pass in its place; the first row that fits counts.
_BY_METHODS = (
    ("columns to_numpy", "pass {0}.to_numpy(), or a dict of its columns as arrays"),
    ("detach numpy", "pass {0}.detach().cpu().numpy(), or jnp.from_dlpack({0})"),
    ("to_numpy", "pass {0}.to_numpy()"),
    ("numpy", "pass {0}.numpy()"),
    ("toarray", "pass {0}.toarray()"),
    ("__dlpack__", "pass jnp.from_dlpack({0})"),
    ("__array__", "pass np.asarray({0})"),
    ("typecode", "pass np.asarray({0})"),
    ("isdisjoint", "pass np.array(sorted({0}))"),
    ("__next__", "pass np.array(list({0}))"),
)

_FIELDS = "pass the fields as arrays of their own, such as a dict of {0}[name]"

# The kinds of a NumPy dtype that JAX does not have, and what to pass in the place of the array.
_BY_DTYPE = {
    "O": "rows of different length do not form an array: pad them, or give the list of rows to "
    "map; numbers in an array of objects are np.asarray({0}.tolist())",
    **dict.fromkeys("mM", "pass numbers, such as {0}.astype('int64')"),
    **dict.fromkeys("SU", "encode text as numbers (tokens, say), or pass it as a static argument"),
}


def described(value: object) -> str:
    """The type of a value, with the package of a class that is not built in."""
    kind = type(value)
    package = kind.__module__.split(".")[0]
    return kind.__name__ if package in ("builtins", "__main__") else f"{kind.__name__} ({package})"


def cure(value: Any, path: str) -> str:
    """What to pass in the place of a value that is neither an array nor a Python scalar."""
    if isinstance(value, str | bytes):
        return (
            "encode text as an array of numbers (of tokens, say), or pass it as a static argument "
            "(static_argnums, static_argnames)"
        )
    if isinstance(value, type) or (callable(value) and not hasattr(value, "__array__")):
        return _OTHERWISE
    for methods, text in _BY_METHODS:
        if all(hasattr(value, method) for method in methods.split()):
            return text.format(path)
    if isinstance(value, range | bytearray | memoryview):
        return f"pass np.array(list({path}))"
    return _OTHERWISE


def remedy_for(values: object) -> str | None:
    """What an error advises for a module of a library, inside of some arguments."""
    for library, kind, wrapper in _WRAPPERS:
        module = getattr(sys.modules.get(library), kind, None)
        if module is not None and _holds(values, module):
            return f"use {wrapper}, which takes such modules"
    return None


def _holds(tree: object, kind: type) -> bool:
    """Whether an object of a class is in a pytree, which may be a pytree itself."""

    def is_module(value: object) -> bool:
        return isinstance(value, kind)

    return any(map(is_module, tree_leaves(tree, is_leaf=is_module)))


_TRACED_AS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
)


def note_arguments(error: Exception, args: Mapping[str, object]) -> None:
    """Add a note to an error of a function, if one of its arguments explains it."""
    if isinstance(error, BucketJitError) or any(
        note.startswith("bucketjit: ") for note in getattr(error, "__notes__", ())
    ):
        return
    note = None
    if isinstance(error, _TRACED_AS_VALUE):
        note = _of_scalars(text_of(error), args)
    elif isinstance(error, TypeError | AttributeError):
        # A list of numbers is a tree of scalars, of which a function may ask what only arrays have.
        notes = (
            f"{name}: as under jax.jit, a list is a tree of scalars; where an array is meant: "
            f"{cure_of_list(value, name)}"
            for name, value in args.items()
            if is_list_of_numbers(value)
        )
        note = next(notes, None)
    if note is not None:
        error.add_note(f"bucketjit: {note}")


def _of_scalars(message: str, args: Mapping[str, object]) -> str | None:
    """A Python scalar is traced, and the function may need its value."""
    for name, value in args.items():
        for keys, leaf in tree_leaves_with_path(value):
            path = name + keystr(keys)
            # JAX's message names the arguments that the value depends on.
            named = re.search(rf"argument.*[ ,]{re.escape(path)}(?!\w|\[|\.\w)", message)
            if not isinstance(leaf, bool | int | float | str) or not named:
                continue
            what = f"{path} is a Python {type(leaf).__name__}, which is traced like an array"
            if not keys:
                return f"{what}; if the function needs its value: static_argnames={path!r}"
            cure = remedy_for(list(args.values())) or "pass it as a static argument of its own"
            return f"{what}, and the function needs its value; {cure}"
    return None
