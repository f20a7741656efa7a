"""Make and describe arrays: from host memory, placed like another one, with a given type."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
from jax.interpreters import ad

from bucketjit._jax import names

_ad = names.module("interpreters.ad")
_array = names.module("array")
_config = names.module("config")
_lax = names.module("lax.lax")
_random = names.module("random.core")
_xla_client = names.module("lib").xla_client


def with_type(x: object, dtype: np.dtype[Any], weak_type: bool) -> Any:
    """Give ``x`` this dtype and weak type (``lax._convert_element_type``, since 0.2).

    ``lax.convert_element_type`` always returns a strong type, so it cannot reproduce the weak
    outputs of a traced program.
    """
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return x
    return _lax._convert_element_type(x, dtype, weak_type=weak_type)


class NotPlaced(ValueError):
    """An array of another size cannot be cut over several devices as this one is."""


def array_from_host(
    host: np.ndarray, weak_type: bool, like: jax.Array, exactly: bool = False
) -> jax.Array:
    """A ``jax.Array`` with the contents of ``host`` on the device of ``like``: `host_placer`."""
    return host_placer(host.shape, host.dtype, weak_type, like, exactly)(host)


def host_placer(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    weak_type: bool,
    like: jax.Array,
    exactly: bool = False,
) -> Callable[[np.ndarray], jax.Array]:
    """A function from host arrays of one type to ``jax.Array``s on the device of ``like``.

    ``jnp.asarray`` copies (21 us for 16 KiB) and ``device_put`` takes 32 us; this is the call
    they end in (3 us), and it takes an aligned view without a copy
    (``xla_client.batched_device_put``, since 0.4.9). The view keeps its base alive.

    On several devices, what ``like`` is cut along is cut likewise as far as that gives equal parts,
    which JAX demands of its arrays.

    Raises:
        NotPlaced: It does not, and ``exactly`` asks for nothing else.
    """
    single = _single_device(like.sharding)
    if single is None:
        placed = sharding_for(like.sharding, shape)
        if exactly and placed is not like.sharding:
            raise NotPlaced(f"shape {shape} cannot be cut as {like.sharding} tells")
        if not weak_type:
            return lambda host: jax.device_put(host, placed)
        weak = array_type(shape, dtype, True)
        return lambda host: _array.ArrayImpl(
            weak, placed, jax.device_put(host, placed)._arrays, committed=True
        )
    sharding, devices = single
    aval, committed = array_type(shape, dtype, weak_type), like.committed
    put = _xla_client.batched_device_put
    return lambda host: put(aval, sharding, [host], devices, committed)


def on_default_device(host: object, weak_type: bool = False) -> Any:
    """``jax.device_put(host)``; of one array, which nobody writes to again, in less time.

    3 us in place of 21 (``config.default_device`` is not typed among the public flags).
    """
    if not isinstance(host, np.ndarray):
        return jax.device_put(host)
    return _default_placer(_config.default_device.value, host.shape, host.dtype, weak_type)(host)


@functools.lru_cache(maxsize=4096)
def _default_placer(
    device: jax.Device, shape: tuple[int, ...], dtype: np.dtype[Any], weak_type: bool
) -> Callable[..., jax.Array]:
    like = _on_default_device(device, dtype)
    if like.committed:
        return lambda host: with_type(jax.device_put(host), host.dtype, weak_type)
    return host_placer(shape, dtype, weak_type, like)


@functools.lru_cache(maxsize=256)
def _on_default_device(device: jax.Device, dtype: np.dtype[Any]) -> jax.Array:
    """An array that JAX has put on ``device``, the default one: it takes 100 us and more."""
    with jax.ensure_compile_time_eval():
        return jax.device_put(np.zeros((), dtype))


def sharding_for(sharding: Any, shape: tuple[int, ...]) -> Any:
    """A sharding over several devices, less the axes of its mesh that would cut unequal parts."""
    try:
        sharding.shard_shape(shape)
    except ValueError:
        if not isinstance(sharding, jax.sharding.NamedSharding):
            devices = sorted(sharding.device_set, key=lambda device: device.id)
            mesh = jax.sharding.Mesh(np.array(devices), ("devices",))
            return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        kept = []
        for n, entry in zip(shape, sharding.spec, strict=False):
            names = (
                entry if isinstance(entry, tuple) else (entry,) if isinstance(entry, str) else ()
            )
            while n % math.prod(sharding.mesh.shape[name] for name in names):
                names = names[:-1]
            kept.append(names or None)
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*kept))
    return sharding


def placed_like(array: jax.Array, like: jax.Array, weak_type: bool) -> jax.Array:
    """``array``, committed to its device or not as ``like`` is, and weakly typed or not.

    Neither can be asked of ``jax.dlpack.from_dlpack`` (``ArrayImpl``, since 0.4).
    """
    aval = array_type(array.shape, array.dtype, weak_type)
    return _array.ArrayImpl(aval, like.sharding, [cast(Any, array)], like.committed)


@functools.lru_cache(maxsize=4096)
def array_type(shape: tuple[int, ...], dtype: np.dtype[Any], weak_type: bool) -> Any:
    """The abstract value of arrays of this shape, dtype and weak type."""
    return jax.core.ShapedArray(shape, dtype, weak_type=weak_type)


@functools.lru_cache(maxsize=256)
def _single_device(sharding: jax.sharding.Sharding) -> tuple[Any, list[Any]] | None:
    devices = list(sharding.device_set)
    if len(devices) != 1:
        return None
    if isinstance(sharding, jax.sharding.NamedSharding):  # over a mesh of one
        return sharding, devices
    return jax.sharding.SingleDeviceSharding(devices[0]), devices


SINGLE_DEVICE_SHARDING = jax.sharding.SingleDeviceSharding

CONCRETE_ARRAY = _array.ArrayImpl  # the class of concrete arrays: `type(x) is` takes no call

KEY_ARRAY = _random.prng.PRNGKeyArray  # that of typed random keys, which wrap one


def is_concrete_array(x: object) -> bool:
    """True for a concrete ``jax.Array`` (typed keys are not one: they wrap one)."""
    return isinstance(x, _array.ArrayImpl)


def key_impl(dtype: Any) -> Any:
    """The generator behind a typed key dtype, as ``wrap_key_data`` takes it.

    That is its name (``"threefry2x32"``), or a ``PRNGSpec`` (since 0.4.26) for a generator that
    the user defined. ``jax.random.key_impl`` wants an array; inside a rule there may be only
    the dtype.
    """
    generator = dtype._impl
    known = generator.name in _random.prng.prngs
    return generator.name if known else _random.PRNGSpec(generator)


def key_shape(dtype: Any) -> tuple[int, ...]:
    """Shape of the raw words of one typed key (``(2,)`` for threefry)."""
    return dtype._impl.key_shape


def key_generator(dtype: Any) -> Any:
    """The generator behind a typed key dtype: functions ``random_bits``, ``split``, ...

    They work on raw words (``prng.PRNGImpl``, since 0.4.16) and are what ``random_bits`` and
    ``random_split`` run; no public name gives them for a dtype.
    """
    return dtype._impl


def explicit_sharding(array: object) -> Any | None:
    """How an array, or a type, is sharded over explicit axes of a mesh; None if it is not.

    Such axes are part of types, and what is put together must be sharded alike (since 0.7).
    """
    is_type = isinstance(array, jax.core.ShapedArray | jax.ShapeDtypeStruct)
    sharding = getattr(array if is_type else jax.typeof(array), "sharding", None)
    kinds = getattr(getattr(sharding, "mesh", None), "axis_types", ())
    return sharding if jax.sharding.AxisType.Explicit in kinds else None


def is_on_several_devices(sharding: Any) -> bool:
    """Whether a sharding names devices, more than one."""
    try:
        return sharding is not None and len(sharding.device_set) > 1
    except ValueError:  # that of an abstract mesh
        return False


def on_one_device(value: Any) -> Any | None:
    """The type of a concrete array that is cut along no axis, nor of a mesh's type; else None.

    What `explicit_sharding` and `partitions` tell of nearly all arrays, in a tenth of the time.
    """
    if type(value) is not CONCRETE_ARRAY or type(value.sharding) is not SINGLE_DEVICE_SHARDING:
        return None
    aval = value.aval
    return aval if aval.sharding.mesh.empty else None


def partitions(array: object) -> tuple[int, ...] | None:
    """Into how many parts of one size each axis is cut over several devices; None if none is.

    Of an array that is differentiated, outside of ``jit``, that is what its value tells.
    """
    while isinstance(array, ad.JVPTracer | _ad.LinearizeTracer):
        array = array.primal
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        return None
    sharding = array.sharding
    if not is_on_several_devices(sharding):
        return None
    shard = sharding.shard_shape(array.shape)
    counts = tuple(n // part if part else 1 for n, part in zip(array.shape, shard, strict=True))
    return counts if any(count > 1 for count in counts) else None
