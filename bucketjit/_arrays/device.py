"""Pad and unpad arrays on an accelerator, without copying them to the host.

    array:f32[12]  ->  view:f32[8] of elements 0 to 7,  view:f32[8] of elements 4 to 11
                   ->  one program for 8 to 15 elements writes both views into zeros:f32[16]

An XLA program is compiled for the sizes of its operands, so a program that took an array of the
logical size would be compiled once per size. DLPack can present the memory of an array in another
shape without a copy. Two overlapping views cover an array of any size; each has the size of the
largest power of two that fits. A program over such views serves every size between two powers of
two. The result of an executable is cut to its logical size by a view that ends earlier.

JAX handles the streams of the device: a view passes on the stream that ``jax.dlpack.from_dlpack``
names.

An array that a mesh cuts is padded shard by shard. Then one program a bucket moves the rows that
are in another shard of the padded array.
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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bucketjit._jax.arrays import is_on_several_devices, other_memory, sharding_for
from bucketjit._raised import WithoutErrors

_ALIGNMENT = 16  # bytes; XLA refuses operands whose address is not a multiple of it
_MOST = 2**31 - 1  # the largest int32; the programs below count elements in int32
_UNVERSIONED = (0, 8)  # the newest DLPack without a version, and a read-only flag, in its structure


class _Tensor(ctypes.Structure):
    """``DLTensor`` of DLPack, the first field of an unversioned ``DLManagedTensor``."""

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
    """The address of the ``DLManagedTensor`` in a DLPack capsule."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(get(capsule, b"dltensor") or 0)


class _View:
    """Part of an array's memory in another shape, as an object that DLPack accepts.

    The shape has at most as many axes as the array: the exported structure has room for no more.
    Each export makes a new structure, so it may be changed without changing the array. The export
    keeps the memory alive until its consumer releases it.
    """

    def __init__(self, array: jax.Array, shape: tuple[int, ...], offset: int = 0) -> None:
        self._array: Any = array
        self._shape = shape
        self._offset = offset

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, *, stream: object = None, **_: object) -> Any:
        capsule = self._array.__dlpack__(stream=stream, max_version=_UNVERSIONED)
        tensor = _Tensor.from_address(_pointer_of(capsule))
        tensor.ndim = len(self._shape)
        stride = 1
        for axis in reversed(range(len(self._shape))):
            tensor.shape[axis] = self._shape[axis]
            if tensor.strides:  # a null pointer means row-major
                tensor.strides[axis] = stride
            stride *= self._shape[axis]
        tensor.byte_offset += self._offset * self._array.dtype.itemsize
        return capsule


def _view(array: jax.Array, shape: tuple[int, ...], offset: int = 0) -> jax.Array:
    """A view of an array from element ``offset`` on, as a ``jax.Array``."""
    # DLPack has one number for all devices of a CPU, so a view may have to move to its device.
    return jax.dlpack.from_dlpack(_View(array, shape, offset), device=_device_of(array))


def _device_of(array: jax.Array) -> Any:
    return next(iter(array.sharding.device_set))


def can_view(array: jax.Array) -> bool:
    """Whether the memory of an array can be viewed in another shape."""
    return (
        array.ndim > 0  # `_View` has no room for the shape of a view of a scalar
        and _is_in_device_memory(array.sharding)
        and _exports(array.dtype, _device_of(array).platform)
    )


@functools.lru_cache(maxsize=256)
def _is_in_device_memory(sharding: Any) -> bool:
    """Whether an array is in the memory that its devices use; pinned host memory is not."""
    is_cut_by_mesh = isinstance(sharding, NamedSharding) or not is_on_several_devices(sharding)
    return sharding.is_fully_addressable and is_cut_by_mesh and not other_memory(sharding)


@functools.lru_cache(maxsize=256)
def _exports(dtype: np.dtype[Any], platform: str) -> bool:
    """Whether arrays of a dtype can be exported by DLPack, in row-major order, on a platform."""
    if platform not in ("cpu", "gpu", "cuda", "rocm"):
        return False
    with WithoutErrors():  # a dtype that DLPack lacks raises one of several exceptions
        probe: Any = jnp.zeros((2, 2), dtype, device=jax.local_devices(backend=platform)[0])
        capsule = probe.__dlpack__(max_version=_UNVERSIONED)
        strides = _Tensor.from_address(_pointer_of(capsule)).strides
        return not strides or (strides[0], strides[1]) == (2, 1)
    return False


def can_pad(array: jax.Array, shape: tuple[int, ...]) -> bool:
    """Whether `pad` can pad an array to a shape: it counts elements in int32."""
    several = is_on_several_devices(array.sharding)
    fits = not several or sharding_for(array.sharding, shape) is array.sharding
    return fits and array.size > 0 and math.prod(shape) <= _MOST and can_view(array)


def can_unpad(array: jax.Array, shape: tuple[int, ...]) -> bool:
    """Whether `unpad` can cut an array to a shape."""
    is_front = array.shape[1:] == shape[1:]
    return 0 not in shape and (is_front or array.size <= _MOST) and can_view(array)


def can_view_from(array: jax.Array, row: int) -> bool:
    """Whether the memory of an array can be viewed from a row of its leading axis on."""
    row_bytes = array.dtype.itemsize * math.prod(array.shape[1:])
    is_whole = array.size > 0 and not is_on_several_devices(array.sharding)
    return is_whole and can_view(array) and row * row_bytes % _ALIGNMENT == 0


def part(array: jax.Array, start: int, stop: int) -> jax.Array:
    """Rows ``start`` to ``stop`` of the leading axis, as a view."""
    rest = array.shape[1:]
    return _view(array, (stop - start, *rest), start * math.prod(rest))


def pad(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """``array`` with zeros after its end along each axis that is shorter than ``shape``.

    A program is compiled once per power of two of elements, shape and dtype, not per size. If rows
    are not multiples of 16 bytes, it is compiled once per remainder as well.
    """
    sharding = array.sharding
    if is_on_several_devices(sharding):
        part = sharding.shard_shape(shape)
        sizes = sharding.shard_shape(array.shape)
        padded = _of_shards(shape, sharding, [pad(shard, part) for shard in _shards(array)])
        return _moved(padded, array.shape, sizes, sharding, True)
    if array.shape == shape:
        return array
    total = array.size
    width = 1 << (total.bit_length() - 1)
    step = max(1, _ALIGNMENT // array.dtype.itemsize)
    # The second view begins at an aligned element, so up to `step - 1` elements remain at the end.
    # They are the third view, which begins aligned, too.
    second = (total - width) // step * step
    tail = total % step if total > width else 0
    views = [_view(array, (width,)), _view(array, (width,), second)]
    if tail:
        views.append(_view(array, (tail,), total - tail))
    numbers = on_device((second, total - tail, *array.shape), _device_of(array))
    inner = array.shape[1:] != shape[1:]
    return _padding_program(width, tail, shape, inner)(numbers, *views)


def unpad(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The logical part of ``array``, as a view.

    If the logical part is no prefix of the array, a program first moves its elements to the front.
    That program is compiled once per padded shape.
    """
    sharding = array.sharding
    if is_on_several_devices(sharding):
        sharding = sharding_for(sharding, shape)
        part = sharding.shard_shape(shape)
        moved = _moved(array, shape, part, sharding, False)
        return _of_shards(shape, sharding, [unpad(shard, part) for shard in _shards(moved)])
    if array.shape[1:] != shape[1:]:
        numbers = on_device(shape, _device_of(array))
        array = _compacting_program(array.shape)(numbers, array)
    return _view(array, shape)


_of_shards = jax.make_array_from_single_device_arrays


def _shards(array: jax.Array) -> list[jax.Array]:
    return [shard.data for shard in array.addressable_shards]


@functools.lru_cache(maxsize=256)
def _without_types(sharding: Any) -> NamedSharding:
    """A sharding on a mesh without explicit axes, which indices could not cut."""
    mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    return NamedSharding(mesh, sharding.spec)


def _moved(
    array: jax.Array,
    shape: tuple[int, ...],
    part: tuple[int, ...],
    sharding: Any,
    is_padding: bool,
) -> jax.Array:
    """A padded array whose logical elements are moved to, or from, their places among all shards.

    On the one side each shard begins with the logical elements of a shard of the unpadded array, of
    the shape ``part``. On the other side they come first in the whole array, whose shape without
    padding is ``shape``.
    """
    shards = sharding.shard_shape(array.shape)
    axes = [i for i, n in enumerate(shards) if n != array.shape[i] and n != part[i]]
    if not axes and sharding == array.sharding:
        return array
    before, after = _without_types(array.sharding), _without_types(sharding)
    numbers = on_device((*shape, *part), NamedSharding(after.mesh, PartitionSpec()))
    places = tuple((i, shards[i]) for i in axes)
    program = _moving_program(places, is_padding, after)
    moved = program(numbers, _of_shards(array.shape, before, _shards(array)))
    return _of_shards(array.shape, sharding, _shards(moved))


def sizes_beside(array: jax.Array, sizes: tuple[int, ...]) -> Any:
    """Sizes as an int32 vector beside ``array``: NumPy's in each call would be a transfer."""
    devices = getattr(getattr(array, "sharding", None), "device_set", ())
    if len(devices) != 1 or next(iter(devices)).platform == "cpu":
        return np.array(sizes, np.int32)
    return on_device(sizes, next(iter(devices)))


@functools.lru_cache(maxsize=4096)
def on_device(numbers: tuple[int, ...], device: jax.Device | NamedSharding) -> jax.Array:
    """Integers as an int32 array on a device or a mesh, kept for the next call."""
    return jax.device_put(np.array(numbers, np.int32), device)


@functools.lru_cache(maxsize=256)
def _padding_program(
    width: int, tail: int, shape: tuple[int, ...], inner: bool
) -> Callable[..., jax.Array]:
    """The program that joins the views of an array and moves its elements to their places."""
    count = math.prod(shape)

    @jax.jit
    def padded(numbers: jax.Array, *views: jax.Array) -> jax.Array:
        # `numbers` holds where the second and third view begin, then the logical shape.
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
    """The program that moves the logical elements of an array of this shape to its front."""

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


@functools.lru_cache(maxsize=256)
def _moving_program(
    places: tuple[tuple[int, int], ...], is_padding: bool, sharding: NamedSharding
) -> Callable[..., jax.Array]:
    """The program of `_moved`, for some axes and the padded sizes of their shards."""

    @functools.partial(jax.jit, out_shardings=sharding)
    def moved(numbers: jax.Array, array: jax.Array) -> jax.Array:
        for axis, padded in places:
            size, part = numbers[axis], numbers[array.ndim + axis]
            at = lax.iota(jnp.int32, array.shape[axis])
            sources = at // padded * part + at % padded
            if is_padding:
                sources = jnp.where(at < size, at // part * padded + at % part, array.shape[axis])
            array = jnp.take(array, sources, axis, mode="fill", fill_value=0)
        return array

    return moved
