"""Pad arguments and unpad results without compiling a program for each logical size.

``jnp.pad(x)``, ``y[:n]`` and ``jnp.asarray(view)`` compile once per size (27-40 ms each), so a
wrapper that used them would gain nothing. NumPy pads and cuts arrays in host memory. Arrays of an
accelerator stay there; `bucketjit._arrays.device` pads and cuts them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bucketjit._arrays import device
from bucketjit._arrays.padded import Padded
from bucketjit._jax.arrays import (
    CONCRETE_ARRAY,
    NotPlaced,
    array_from_host,
    explicit_sharding,
    host_placer,
    is_key,
    is_on_several_devices,
    key_impl,
    placed_like,
)
from bucketjit._jax.config import outside_of_meshes

_ALIGNMENT = 64  # bytes; XLA's CPU backend copies arguments whose address is no multiple of it
_LARGE = 2**15  # bytes from which on XLA's copy takes longer than finding an aligned address


def memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An array with arbitrary contents. If it is large, XLA's CPU backend reads it in place."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE:
        return np.empty(shape, dtype)
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    return np.ndarray(shape, dtype, raw, -raw.ctypes.data % _ALIGNMENT)


def pad(value: Any, shape: tuple[int, ...]) -> Any:
    """``value`` with zeros after its end along each axis that is shorter than ``shape``.

    The result has fresh memory. A call is asynchronous and may alias an aligned NumPy buffer, so a
    buffer that is reused for the next call could be overwritten while it is read.

    An array that is still being computed in host memory is waited for. A `Padded` array of another
    padded shape is waited for only if it holds keys, if it is cut over a mesh with explicit axes,
    or if ``shape`` is its logical shape. Its padding may hold anything.
    """
    if type(value) is np.ndarray:
        return value if value.shape == shape else _pad_host(value, shape)
    if type(value) is Padded and value.sizes == value.array.shape:
        value = value.array
    if type(value) is Padded:
        # `Padded.repadded` compiles once per pair of shapes, so it is not used for a logical shape:
        # that would be once per size. Nor can it pad keys, or keep a sharding over a mesh.
        by_host = is_key(value) or value.sizes == shape or _is_cut_by_type(value.array)
        if not by_host or (value.array.shape == shape and (value.is_clean or not is_key(value))):
            return value.repadded(shape)
        value = unpad(value.array, value.sizes)
    if value.shape == shape:
        return value
    if not isinstance(value, jax.Array):
        return _pad_host(value, shape)
    if type(value) is not CONCRETE_ARRAY and is_key(value):
        return of_words(value, lambda words: pad(words, (*shape, *words.shape[value.ndim :])))
    if not _in_host_memory(value.sharding) and device.can_pad(value, shape):
        with outside_of_meshes():
            return placed_like(device.pad(value, shape), value, False)
    return placed_beside(_pad_host(np.asarray(value), shape), value)


def pad_to_place(value: Any, shape: tuple[int, ...], sharding: Any) -> Any:
    """`pad` for an argument that ``jit`` puts on its devices, wherever it was.

    One on a mesh with explicit axes goes by the host: its type would name another sharding.
    """
    if type(value) is not CONCRETE_ARRAY or value.shape == shape:
        return pad(value, shape)
    is_here = is_on_several_devices(value.sharding) and not _in_host_memory(value.sharding)
    if is_here and explicit_sharding(value) is None and device.can_pad(value, shape):
        return jax.device_put(pad(value, shape), sharding)
    return pad(np.asarray(value), shape)


def placed_beside(padded: np.ndarray, value: Any) -> Any:
    """Put a host array on the device of ``value``, if ``value`` is committed to one."""
    if not getattr(value, "committed", False):
        return padded
    return array_from_host(padded, False, value, exactly=True)


def padder(like: Any, shape: tuple[int, ...]) -> Callable[[Any], Any]:
    """A faster `pad` for arrays of the kind, shape and dtype of ``like``."""
    if type(like) is Padded and like.array.shape == shape:
        return lambda value: value.array if value.is_clean else pad(value, shape)
    if type(like) is np.ndarray:
        return _host_padder(like, shape)
    if type(like) is not CONCRETE_ARRAY or is_key(like):
        return lambda value: pad(value, shape)
    pad_host = _host_padder(like, shape)

    def pad_jax(value: jax.Array) -> Any:
        if not _in_host_memory(value.sharding):
            return pad(value, shape)
        return placed_beside(pad_host(np.asarray(value)), value)

    return pad_jax


def _is_cut_by_type(array: object) -> bool:
    """Whether an array is cut over a mesh with explicit axes, which another size may not allow."""
    sharding = getattr(array, "sharding", None)
    several = is_on_several_devices(sharding)
    return several and explicit_sharding(array) is not None


def _pad_host(host: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return _host_padder(host, shape)(host)


def _host_padder(like: Any, shape: tuple[int, ...]) -> Callable[[np.ndarray], np.ndarray]:
    """Make the function that pads host arrays of one shape and dtype."""
    # All that the shape determines is computed here once; the function below runs in every call.
    dtype, sizes = like.dtype, like.shape
    if dtype.names is not None:  # float0, whose elements have no bytes
        return lambda host: np.zeros(shape, dtype)
    large = math.prod(shape) * dtype.itemsize >= _LARGE
    empty: Any = memory if large else np.empty
    # What is after the end of one axis, inside the axes before it. np.zeros would write all twice.
    inside = tuple(map(slice, sizes))
    after = [(*inside[:i], slice(n, None)) for i, n in enumerate(sizes) if n < shape[i]]
    if len(after) == 1 and len(after[0]) == 1:  # the shortest way for the most frequent case
        rows, more = inside[0], after[0][0]

        def add_rows(host: np.ndarray) -> np.ndarray:
            padded = empty(shape, dtype)
            padded[rows] = host
            padded[more] = 0
            return padded

        return add_rows

    def extend(host: np.ndarray) -> np.ndarray:
        padded = empty(shape, dtype)
        padded[inside] = host
        for place in after:
            padded[place] = 0
        return padded

    return extend


def unpad(value: Any, shape: tuple[int, ...], weak_type: bool = False) -> Any:
    """The logical part of a padded result, as a ``jax.Array`` on the same device.

    A prefix along the leading axis is not copied: it is a view that keeps the padded result alive.
    For a result in host memory this waits until the result is computed. Cutting it asynchronously
    would take a program compiled for the logical size.
    """
    if value.shape == shape:
        return value
    if isinstance(value, np.ndarray):
        return cut(value, shape)
    if is_key(value):
        return of_words(value, lambda words: unpad(words, (*shape, *words.shape[value.ndim :])))
    if not _in_host_memory(value.sharding) and device.can_unpad(value, shape):
        with outside_of_meshes():
            return placed_like(device.unpad(value, shape), value, weak_type)
    # `np.asarray` waits for the result. A prefix stays a view: it is contiguous already.
    return array_from_host(_contiguous(cut(np.asarray(value), shape)), weak_type, value)


def unpadder(
    padded: tuple[int, ...], shape: tuple[int, ...], weak_type: bool
) -> Callable[[Any], Any]:
    """A faster `unpad` for the results of one executable.

    How a result is cut depends on its device and sharding, which are known before it is computed.
    The returned function looks them up while the result is being computed, and keeps the answer for
    the next results with the same sharding.
    """
    by_rows = padded[1:] == shape[1:]
    rows = slice(shape[0])
    known: tuple[Any, bool, Callable[[np.ndarray], jax.Array] | None] = (None, False, None)

    def unpad_result(value: Any) -> Any:
        nonlocal known
        if type(value) is not CONCRETE_ARRAY:
            return unpad(value, shape, weak_type)
        # One read and one write of the tuple: threads that share this function never see a mixture.
        sharding, committed, place = known
        if value.sharding is not sharding or value.committed is not committed:
            sharding, committed, place = value.sharding, value.committed, None
            if _in_host_memory(sharding):
                place = host_placer(shape, value.dtype, weak_type, value)
            known = sharding, committed, place
        if place is None:
            return unpad(value, shape, weak_type)
        host = np.asarray(value)
        return place(host[rows] if by_rows else _contiguous(cut(host, shape)))

    return unpad_result


def part(value: Any, axis: int, start: int, stop: int) -> Any:
    """Positions ``start`` to ``stop`` of an array along an axis, without its padding.

    A NumPy array gives a view. An array of an accelerator gives a view along the leading axis, if
    XLA accepts an operand that begins there. Every other part of a JAX array is cut on the host.
    """
    value = plain(value)
    inside = (slice(None),) * axis + (slice(start, stop),)
    if not isinstance(value, jax.Array):
        return value[inside]
    if is_key(value):
        return of_words(value, lambda words: part(words, axis, start, stop))
    weak = bool(value.weak_type)
    if not _in_host_memory(value.sharding) and axis == 0 and device.can_view_from(value, start):
        return placed_like(device.part(value, start, stop), value, weak)
    host = np.asarray(value)[inside]
    try:
        return array_from_host(_contiguous(host), weak, value, exactly=True)
    except NotPlaced:  # the size of a part need not be divisible over the mesh
        return host


def fresh(value: object) -> Any:
    """A copy of an argument that may be donated in its place; a NumPy array is not copied."""
    if type(value) is Padded:
        return Padded(fresh(value.array), value.sizes)
    if not isinstance(value, jax.Array):
        return value
    if is_key(value):
        return of_words(value, fresh)
    return array_from_host(np.array(value), bool(value.weak_type), value)


def copied(value: object) -> Any:
    """A copy of a NumPy array, which the caller may overwrite later; any other value unchanged."""
    return value.copy() if isinstance(value, np.ndarray) else value


def plain(value: object) -> Any:
    """``value``, without its padding if it is a `Padded` array."""
    return unpad(value.array, value.sizes) if type(value) is Padded else value


def without_padding(tree: Any) -> Any:
    """A pytree with each `Padded` array replaced by its logical part."""
    return jax.tree_util.tree_map(plain, tree)


def cut(host: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The logical part of an array in host memory, as a view."""
    if host.shape[1:] == shape[1:]:
        return host[: shape[0]]
    return host[tuple(map(slice, shape))]


def _contiguous(host: np.ndarray) -> np.ndarray:
    """A host array whose elements lie one after the other; copied only if they do not yet."""
    if host.flags.c_contiguous:
        return host
    copy = memory(host.shape, host.dtype)
    copy[...] = host
    return copy


@functools.lru_cache(maxsize=256)
def _in_host_memory(sharding: Any) -> bool:
    """Whether an array with this sharding is in host memory: all its devices are CPUs."""
    return all(device.platform == "cpu" for device in sharding.device_set)


def of_words(keys: Any, change: Callable[[Any], Any]) -> Any:
    """Typed keys whose words are changed."""
    return jax.random.wrap_key_data(change(jax.random.key_data(keys)), impl=key_impl(keys.dtype))
