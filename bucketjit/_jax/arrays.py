"""Make ``jax.Array``s from host memory, place them like others, and read their types and shardings.

`bucketjit._arrays` pads and cuts with these functions.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, cast

import jax
import numpy as np
from jax.extend import backend as jex_backend

from bucketjit._jax import names

_xla_bridge = names.module("xla_bridge")


@functools.lru_cache(maxsize=256)
def device_name(device: jax.Device) -> str:
    """The platform of a device and its number in its process, such as ``"cpu:0"``.

    It is the same in another process, and in all processes of a job, where ``device.id`` counts on
    from one process to the next. ``"cpu of process 1:2048"`` is a device of another process.
    """
    local = device.client.local_devices()
    if is_of_topology((device,)):  # as its process would count it
        every = device.client.devices()
        local = [d for d in every if d.process_index == device.process_index]
    if device in local:
        return f"{device.platform}:{local.index(device)}"
    return f"{device.platform} of process {device.process_index}:{device.id}"


@functools.cache
def only_on_cpu() -> bool:
    """Whether the CPU is the only platform of this process.

    Then a program need not be traced for other platforms, which takes time. ``jax.devices`` lists
    the devices of one platform only (``xla_bridge.backends``, since 0.2).
    """
    return set(jex_backend.backends()) == {"cpu"}


def on_one_cpu() -> bool:
    """Whether all programs of this process run on one CPU device, so that they move whole arrays.

    A loop over parts of an array that is cut over devices would send each part to all of them.
    """
    return platform() == "cpu" and len(jax.local_devices()) == jax.process_count() == 1


def is_started() -> bool:
    """Whether XLA has started here: a child that is forked afterwards cannot compile.

    The public ``backends`` takes a lock, which a child may find locked for ever, so its table is
    read directly (``xla_bridge._backends``, since 0.2).
    """
    return bool(_xla_bridge._backends)


_target: ContextVar[tuple[Set[str], bool]]
_target = ContextVar("_target", default=(frozenset(), False))


@contextmanager
def traced_for(platforms: Set[str], alone: bool = True) -> Iterator[None]:
    """A context in which programs are traced for devices of these platforms.

    Unless ``alone``, the trace may run on other devices, too: JAX keeps it for all of them.
    """
    token = _target.set((platforms, alone))
    try:
        yield
    finally:
        _target.reset(token)


def platform() -> str | None:
    """The platform that programs are traced for; None if that is not known, or not one."""
    platforms = _target.get()[0] or ({"cpu"} if only_on_cpu() else {})
    return next(iter(platforms)) if len(platforms) == 1 else None


def by_platform(*operands: object, cpu: Callable[..., Any], default: Callable[..., Any]) -> Any:
    """``lax.platform_dependent``, which traces one function alone where the platform is known."""
    if (target := platform()) is not None and (only_on_cpu() or _target.get()[1]):
        return (cpu if target == "cpu" else default)(*operands)
    return jax.lax.platform_dependent(*operands, cpu=cpu, default=default)


def devices_of(sharding: Any) -> Set[jax.Device]:
    """The devices of a sharding; none of None, and of an abstract mesh."""
    with suppress(ValueError):
        return getattr(sharding, "device_set", frozenset())
    return frozenset()


def platforms_of(leaves: Iterable[Any]) -> set[str]:
    """The platforms that arguments, or their types, are on; the default one if none says."""
    arrays = (getattr(x, "array", x) for x in leaves if not isinstance(x, jax.core.Tracer))
    placed = (getattr(x, "sharding", None) for x in arrays if getattr(x, "committed", True))
    # A call runs on the devices of any argument that is committed to some.
    devices = next(filter(None, map(devices_of, placed)), {jex_backend.get_default_device()})
    return {device.platform for device in devices}


def is_of_topology(devices: Iterable[jax.Device]) -> bool:
    """Whether devices are those of a topology (``jax.experimental.topologies``), not of a job."""
    return any(device.client not in jex_backend.backends().values() for device in devices)


def other_memory(sharding: Any) -> str:
    """The memory of a sharding; empty for the one where devices put arrays by themselves."""
    return "" if sharding.memory_kind in (None, "device") else str(sharding.memory_kind)


def names_of(devices: Iterable[jax.Device]) -> str:
    """Devices in words, such as ``"4 x TPU v5 lite"``."""
    kinds = Counter(device.device_kind for device in devices)
    return ", ".join(kind if n == 1 else f"{n} x {kind}" for kind, n in kinds.items())


def other_platforms(leaves: Sequence[Any], target: Any) -> set[str]:
    """The platforms that arguments are on, or that a target has; empty if that is the CPU."""
    if target is None and only_on_cpu():
        return set()
    devices = devices_of(target)
    return ({d.platform for d in devices} if devices else platforms_of(leaves)) - {"cpu"}


_array = names.module("array")
_random = names.module("random.core")
_xla_client = names.module("lib").xla_client
_flags: Any = jax.config  # its flags are public, but have no types


def with_type(x: Any, dtype: np.dtype[Any], weak_type: bool) -> Any:
    """Convert ``x`` to this dtype and weak type.

    ``lax.convert_element_type`` always returns a strong type; the primitive makes weak ones. Values
    of extended dtypes, such as typed keys, are returned unchanged: they have no weak type.
    """
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return x
    if weak_type and getattr(x, "weak_type", False) and getattr(x, "dtype", None) == dtype:
        return x
    strong = jax.lax.convert_element_type(x, dtype)
    if not weak_type:
        return strong
    return jax.lax.convert_element_type_p.bind(
        strong, new_dtype=np.dtype(dtype), weak_type=True, sharding=None
    )


class NotPlaced(ValueError):
    """An array of this shape cannot have the sharding it should have: its parts are unequal."""


def array_from_host(
    host: np.ndarray, weak_type: bool, like: jax.Array, exactly: bool = False
) -> jax.Array:
    """An array with the contents of ``host`` on the devices of ``like``; see `host_placer`."""
    return host_placer(host.shape, host.dtype, weak_type, like, exactly)(host)


def host_placer(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    weak_type: bool,
    like: jax.Array,
    exactly: bool = False,
) -> Callable[[np.ndarray], jax.Array]:
    """A function from host arrays of one type to ``jax.Array``s on the devices of ``like``.

    ``jnp.asarray`` copies (21 us for 16 KiB) and ``device_put`` takes 32 us. Both end in
    ``xla_client.batched_device_put`` (since 0.4.9), which takes 3 us and does not copy an aligned
    view. The ``jax.Array`` keeps the base of the view alive.

    On several devices the arrays get the sharding of ``like``, without the axes of the mesh that
    would cut unequal parts: JAX demands equal ones.
    """
    single = _single_device(like.sharding)
    if single is None:
        placed = sharding_for(like.sharding, shape)
        if exactly and placed is not like.sharding:
            raise NotPlaced(f"shape {shape} cannot be cut as {like.sharding} tells")
        # `device_put` makes strong types only.
        return lambda host: with_weak_type(jax.device_put(host, placed), weak_type)
    sharding, devices = single
    aval, committed = array_type(shape, dtype, weak_type), like.committed
    put = _xla_client.batched_device_put
    return lambda host: put(aval, sharding, [host], devices, committed)


def array_of_parts(
    shape: tuple[int, ...],
    sharding: Any,
    parts: Sequence[np.ndarray],
    devices: Sequence[jax.Device],
    weak_type: bool = False,
) -> jax.Array:
    """An array on several devices, and perhaps processes, from the parts of this process.

    ``jax.make_array_from_single_device_arrays`` needs each part on its device first, which takes 60
    us a part. Both end in ``xla_client.batched_device_put`` (since 0.4.9).
    """
    dtype = jax.dtypes.canonicalize_dtype(parts[0].dtype)
    aval = array_type(shape, dtype, weak_type)
    hosts = [np.asarray(part, dtype) for part in parts]
    array: jax.Array = _xla_client.batched_device_put(aval, sharding, hosts, list(devices), True)
    return array


def with_weak_type(array: jax.Array, weak_type: bool) -> jax.Array:
    """An array that is weakly typed or not, with the same buffers (``ArrayImpl``, since 0.4).

    ``lax.convert_element_type`` would compile a program.
    """
    if getattr(array, "weak_type", False) == weak_type:  # typed keys have no such attribute
        return array
    aval = cast(Any, jax.typeof(array)).update(weak_type=weak_type)
    return _array.ArrayImpl(aval, array.sharding, cast(Any, array)._arrays, committed=True)


def on_default_device(host: object) -> Any:
    """``jax.device_put(host)``, for one NumPy array in 3 us instead of 21.

    The array may be shared with the result, so nobody may write to it afterwards.
    """
    if not isinstance(host, np.ndarray):
        return jax.device_put(host)
    put = _default_placer(_flags.jax_default_device, host.shape, host.dtype)
    if _flags.jax_transfer_guard_host_to_device not in ("disallow", "log"):
        return put(host)
    with jax.transfer_guard_host_to_device("allow"):  # as of `device_put`, which is no accident
        return put(host)


@functools.lru_cache(maxsize=4096)
def _default_placer(
    device: jax.Device, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Callable[..., jax.Array]:
    like = _on_default_device(device, dtype)
    return jax.device_put if like.committed else host_placer(shape, dtype, False, like)


@functools.lru_cache(maxsize=256)
def _on_default_device(device: jax.Device, dtype: np.dtype[Any]) -> jax.Array:
    """An array that JAX has put on ``device``, the default one; cached, as that takes 100 us."""
    with jax.ensure_compile_time_eval():
        return jax.device_put(np.zeros((), dtype))


def sharding_for(sharding: Any, shape: tuple[int, ...]) -> Any:
    """A sharding over several devices, without the axes of its mesh that would cut unequal parts.

    A sharding that is not a ``NamedSharding`` and does not fit is replaced by one that replicates.
    """
    try:
        sharding.shard_shape(shape)
    except ValueError:
        if not isinstance(sharding, jax.sharding.NamedSharding):
            devices = sorted(sharding.device_set, key=lambda device: device.id)
            mesh = jax.sharding.Mesh(np.array(devices), ("devices",))
            return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        kept = []
        # Drop the last mesh axes of each array axis until its size is a multiple of the parts.
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
    """The buffer of ``array`` as a new array, with the sharding and commitment of ``like``.

    On several devices it has a sharding of its own. ``jax.dlpack.from_dlpack`` lets the caller
    choose neither the commitment nor the weak type (``ArrayImpl``, since 0.4).
    """
    if is_on_several_devices(array.sharding):
        return with_weak_type(array, weak_type)
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
    if isinstance(sharding, jax.sharding.NamedSharding | SINGLE_DEVICE_SHARDING):
        return sharding, devices
    return jax.sharding.SingleDeviceSharding(devices[0]), devices


SINGLE_DEVICE_SHARDING = jax.sharding.SingleDeviceSharding
CONCRETE_ARRAY = _array.ArrayImpl  # the class of concrete arrays; `type(x) is` needs no call

KEY_ARRAY = _random.prng.PRNGKeyArray  # the class of typed random keys, which wrap an array


def is_key(value: Any) -> bool:
    """Whether an array, or what has the dtype of one, holds typed keys."""
    return jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


@functools.lru_cache(maxsize=256)
def key_impl(dtype: Any) -> Any:
    """``jax.random.key_impl`` of keys of this dtype; it takes an array only."""
    impls: list[Any] = []
    key = jax.ShapeDtypeStruct((), dtype)
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), key)
    return impls[0]


def key_shape(dtype: Any) -> tuple[int, ...]:
    """Shape of the raw words of one typed key: ``(2,)`` for threefry.

    ``jax.random.key_data`` takes an array; a rule may have only the dtype (``prng.KeyTy``).
    """
    return dtype._impl.key_shape


def key_generator(dtype: Any) -> Any:
    """The generator of a typed key dtype, with its functions ``random_bits``, ``split``, ...

    They work on raw words (``prng.PRNGImpl``, since 0.4.16). The primitives ``random_bits`` and
    ``random_split`` run them; no public name returns them for a dtype.
    """
    return dtype._impl


def explicit_sharding(array: object) -> Any | None:
    """The sharding over a mesh with explicit axes (since 0.7), a part of types; None for others."""
    is_type = isinstance(array, jax.core.ShapedArray | jax.ShapeDtypeStruct)
    sharding = getattr(array if is_type else jax.typeof(array), "sharding", None)
    kinds = getattr(getattr(sharding, "mesh", None), "axis_types", ())
    return sharding if jax.sharding.AxisType.Explicit in kinds else None


def is_on_several_devices(sharding: Any) -> bool:
    """Whether a sharding names more than one device; False for None and for an abstract mesh."""
    return len(devices_of(sharding)) > 1


def on_one_device(value: Any) -> Any | None:
    """The type of a concrete array on one device, whose type names no mesh; None for any other.

    For such an array `explicit_sharding` and `partitions` return None. Nearly all arrays are such,
    and this function takes a tenth of the time of those two.
    """
    if type(value) is not CONCRETE_ARRAY or type(value.sharding) is not SINGLE_DEVICE_SHARDING:
        return None
    aval = value.aval
    return aval if aval.sharding.mesh.empty else None


def partitions(array: Any) -> tuple[int, ...] | None:
    """The number of equal parts into which devices cut each axis; None if no axis is cut.

    For an array that is being differentiated outside of ``jit``, the sharding of its value counts
    (its ``primal``): such a tracer has no sharding itself. All other tracers give None.
    """
    while isinstance(array, jax.core.Tracer) and hasattr(array, "primal"):
        array = array.primal
    is_array = isinstance(array, jax.Array | jax.ShapeDtypeStruct)
    if not is_array or isinstance(array, jax.core.Tracer):
        return None
    sharding = array.sharding
    if not is_on_several_devices(sharding):
        return None
    shard = sharding.shard_shape(array.shape)
    counts = tuple(n // part if part else 1 for n, part in zip(array.shape, shard, strict=True))
    return counts if any(count > 1 for count in counts) else None
