"""Pad and unpad arrays where they are, on an accelerator: nothing goes over the bus.

An XLA program is compiled for the sizes of its operands, so a program that took an array of the
logical size would be compiled once per size. DLPack lets an array be looked at in another shape
instead, without a copy: two overlapping views, both of the largest power of two that fits, cover
an array of any size, and a program over those serves every size between two powers of two. The
result of a program is cut to its logical size by a view that ends earlier.

Streams are JAX's own affair: a view hands over the stream that ``jax.dlpack.from_dlpack`` names.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bucketjit._errors import is_of_machine

_ALIGNMENT = 16  # bytes; XLA refuses operands that begin elsewhere
_MOST = 2**31 - 1  # of int32


class _Tensor(ctypes.Structure):
    """``DLTensor`` of the DLPack standard, which opens an unversioned ``DLManagedTensor``."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def _pointer_of(capsule: object) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(get(capsule, b"dltensor") or 0)


class _View:
    """Part of an array's memory, in another shape, as an object that DLPack takes.

    The shape has no more axes than the array. Each export of an array is a structure of its own,
    so it may be changed; it keeps the memory alive until its taker lets go.
    """

    def __init__(self, array: jax.Array, shape: tuple[int, ...], offset: int = 0) -> None:
        self._array: Any = array
        self._shape = shape
        self._offset = offset

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, *, stream: object = None, **_: object) -> Any:
        capsule = self._array.__dlpack__(stream=stream)
        tensor = _Tensor.from_address(_pointer_of(capsule))
        tensor.ndim = len(self._shape)
        stride = 1
        for axis in reversed(range(len(self._shape))):
            tensor.shape[axis] = self._shape[axis]
            if tensor.strides:
                tensor.strides[axis] = stride
            stride *= self._shape[axis]
        tensor.byte_offset += self._offset * self._array.dtype.itemsize
        return capsule


def _view(array: jax.Array, shape: tuple[int, ...], offset: int = 0) -> jax.Array:
    return jax.dlpack.from_dlpack(_View(array, shape, offset))


def _device_of(array: jax.Array) -> Any:
    return next(iter(array.sharding.device_set))


def can_view(array: jax.Array) -> bool:
    """Whether an array's memory can be looked at in another shape."""
    return (
        array.ndim > 0
        and len(array.sharding.device_set) == 1
        and _exports(array.dtype, _device_of(array).platform)
    )


@functools.lru_cache(maxsize=256)
def _exports(dtype: np.dtype[Any], platform: str) -> bool:
    if platform not in ("cpu", "gpu", "cuda", "rocm"):
        return False
    try:
        probe = jnp.zeros((2, 2), dtype)
        capsule = probe.__dlpack__()
        strides = _Tensor.from_address(_pointer_of(capsule)).strides
        return not strides or (strides[0], strides[1]) == (2, 1)
    except Exception as error:  # each dtype that DLPack lacks raises in a way of its own
        if is_of_machine(error):
            raise
        return False


def can_pad(array: jax.Array, shape: tuple[int, ...]) -> bool:
    """Whether `pad` takes an array to a shape: it counts elements in int32."""
    return array.size > 0 and math.prod(shape) <= _MOST and can_view(array)


def can_unpad(array: jax.Array, shape: tuple[int, ...]) -> bool:
    """Whether `unpad` takes an array to a shape."""
    is_front = array.shape[1:] == shape[1:]
    return 0 not in shape and (is_front or array.size <= _MOST) and can_view(array)


def can_view_from(array: jax.Array, row: int) -> bool:
    """Whether the memory of an array can be looked at from a row of its leading axis on."""
    row_bytes = array.dtype.itemsize * math.prod(array.shape[1:])
    return array.size > 0 and can_view(array) and row * row_bytes % _ALIGNMENT == 0


def part(array: jax.Array, start: int, stop: int) -> jax.Array:
    """Rows ``start`` to ``stop`` of the leading axis: a view.

    Args:
        array: One that `can_view_from` agrees to, for ``start``.
        start: The first row.
        stop: The row after the last one.

    Returns:
        An array on the same device.
    """
    rest = array.shape[1:]
    return _view(array, (stop - start, *rest), start * math.prod(rest))


def pad(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """``array`` with zeros after its end along each axis that is shorter than ``shape``.

    Compiles once per power of two of elements, shape and dtype (and, where rows are no multiples
    of 16 bytes, once per remainder), not per size.

    Args:
        array: One that `can_pad` agrees to.
        shape: The padded shape.

    Returns:
        An array on the same device.
    """
    total = array.size
    width = 1 << (total.bit_length() - 1)
    step = max(1, _ALIGNMENT // array.dtype.itemsize)
    second = (total - width) // step * step
    tail = total % step if total > width else 0
    views = [_view(array, (width,)), _view(array, (width,), second)]
    if tail:
        views.append(_view(array, (tail,), total - tail))
    numbers = _on_device((second, total - tail, *array.shape), _device_of(array))
    inner = array.shape[1:] != shape[1:]
    return _padding_program(width, tail, shape, inner)(numbers, *views)


def unpad(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The logical part of ``array``: a view if that is a prefix, else compacted first.

    Args:
        array: One that `can_unpad` agrees to.
        shape: The logical shape.

    Returns:
        An array on the same device.
    """
    if array.shape[1:] != shape[1:]:
        numbers = _on_device(shape, _device_of(array))
        array = _compacting_program(array.shape)(numbers, array)
    return _view(array, shape)


@functools.lru_cache(maxsize=4096)
def _on_device(numbers: tuple[int, ...], device: jax.Device) -> jax.Array:
    return jax.device_put(np.array(numbers, np.int32), device)


@functools.lru_cache(maxsize=256)
def _padding_program(
    width: int, tail: int, shape: tuple[int, ...], inner: bool
) -> Callable[..., jax.Array]:
    """Put the views of an array together, and its elements where they are in ``shape``."""
    count = math.prod(shape)

    @jax.jit
    def padded(numbers: jax.Array, *views: jax.Array) -> jax.Array:
        flat = jnp.zeros(max(2 * width, count), views[0].dtype)
        starts = (jnp.int32(0), numbers[0], numbers[1])
        for view, start in zip(views, starts, strict=False):
            flat = lax.dynamic_update_slice(flat, view, (start,))
        if not inner:
            return flat[:count].reshape(shape)
        logical = numbers[2:]
        index = jnp.zeros(shape, jnp.int32)
        inside = jnp.ones(shape, bool)
        for axis in range(len(shape)):
            at = lax.broadcasted_iota(jnp.int32, shape, axis)
            index = index * logical[axis] + at
            inside &= at < logical[axis]
        return jnp.where(inside, flat.at[index].get(mode="clip"), jnp.zeros((), flat.dtype))

    return padded


@functools.lru_cache(maxsize=256)
def _compacting_program(shape: tuple[int, ...]) -> Callable[..., jax.Array]:
    """Move the logical elements of an array of this shape to its front, in their order."""

    @jax.jit
    def compacted(logical: jax.Array, array: jax.Array) -> jax.Array:
        rest = lax.iota(jnp.int32, math.prod(shape))
        index = jnp.zeros_like(rest)
        stride = 1
        for axis in reversed(range(len(shape))):
            index += rest % logical[axis] * stride
            rest = rest // logical[axis]
            stride *= shape[axis]
        return array.reshape(-1).at[index].get(mode="clip").reshape(shape)

    return compacted
