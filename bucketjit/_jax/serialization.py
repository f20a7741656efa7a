"""Executables as bytes, and JAX's own compilation cache."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from bucketjit._errors import in_one_line, is_of_machine
from bucketjit._jax import names

_api_util = names.module("api_util")
_array = names.module("array")
_linalg = names.module("lax.linalg")
_pxla = names.module("interpreters.pxla")
_sharding_impls = names.module("sharding_impls")
_tree_util = names.module("tree_util")
_xla_client = names.module("lib").xla_client
_flags: Any = jax.config  # whose flags are public, and not typed

_SECONDS_BY_DEFAULT = 1.0  # of ``jax_persistent_cache_min_compile_time_secs``


def compilation_cache() -> tuple[str, float, int] | None:
    """JAX's own persistent cache, if there is one in use, in a directory of this machine.

    Its directory, the fewest seconds of a compile to keep, and its most bytes (-1: no bound). The
    seconds that JAX has by default are for every function that it compiles, of which most are not
    met again. Buckets are: unless they are set, none is too quick.

    The flags are public, but not typed (since 0.4.1).
    """
    directory = _flags.jax_compilation_cache_dir
    if not directory or not _flags.jax_enable_compilation_cache or "://" in directory:
        return None
    seconds = float(_flags.jax_persistent_cache_min_compile_time_secs)
    if seconds == _SECONDS_BY_DEFAULT:
        seconds = 0.0
    return directory, seconds, int(_flags.jax_compilation_cache_max_size)


def cache_hits() -> int:
    """How many executables this thread has got from JAX's own persistent cache.

    Only counted from the first call on. The event (since 0.4.1) is the one thing that tells; what
    XLA has read from a file it does not write again as a whole, at least on CPU.
    """
    _count_cache_hits()
    return getattr(_cache_hits, "count", 0)


_cache_hits = threading.local()


@functools.cache
def _count_cache_hits() -> None:
    def note(event: str, **_: object) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            _cache_hits.count = getattr(_cache_hits, "count", 0) + 1

    jax.monitoring.register_event_listener(note)


class NotPlain(Exception):
    """An executable that does not go into a file; the message says why."""


def serialized(compiled: Any, device: jax.Device) -> tuple[bytes, tuple[int, ...]]:
    """The bytes of a compiled executable, and the positions of the arguments that it takes.

    ``jax.experimental.serialize_executable`` pickles what is around the bytes, and reading a
    pickle runs whatever it says. What is around a plain executable, on one device, without effects
    and callbacks, can be made again from the types of its arguments
    (``pxla.UnloadedMeshExecutable``, since 0.4.30).

    Raises:
        NotPlain: It is not plain, or cannot be written.
    """
    around = getattr(compiled._executable, "_unloaded_executable", None)
    if around is None or not isinstance(around, _pxla.UnloadedMeshExecutable):
        raise NotPlain("it is of a kind that cannot be written")
    if around.unordered_effects or around.ordered_effects or around.host_callbacks:
        raise NotPlain("it calls back into Python")
    if around.keepalive or around.mut is not None or compiled._params.const_args:
        raise NotPlain("it holds objects of this process")
    single = jax.sharding.SingleDeviceSharding
    shardings = [*around.input_shardings, *around.output_shardings]
    if not all(type(s) is single and s.device_set == {device} for s in shardings):
        raise NotPlain("it is not for one device")
    if any(layout is not None for layout in around.dispatch_in_layouts):
        raise NotPlain("it has layouts of its own")
    try:
        raw = around.backend.serialize_executable(around.xla_executable)
    except Exception as error:
        raise NotPlain(in_one_line(error)) from error
    return bytes(raw), tuple(sorted(around.kept_var_idx))


def deserialized(raw: bytes, device: jax.Device) -> Any:
    """The executable in the bytes that `serialized` made; XLA reads it without Python's lock.

    Raises:
        Exception: The bytes are no executable for this device.
    """
    if device.platform == "cpu" and b"lapack_" in raw:
        # Lowering does; without it, a factorisation jumps to nowhere. It imports scipy (100 ms).
        _linalg.initialize_lapack()
    devices = _xla_client.DeviceList((device,))
    return device.client.deserialize_executable(raw, executable_devices=devices)


def is_for(executable: Any, device: jax.Device) -> bool:
    """Whether a loaded executable runs on a device, of the same client."""
    return list(executable.local_devices()) == [device]


def loaded_function(
    xla: object,
    kept: Sequence[int],
    name: str,
    in_avals: Sequence[Any],
    out_avals: Sequence[Any],
    out_tree: PyTreeDef,
    device: jax.Device,
    check: Callable[[tuple[Any, ...], Mapping[str, Any]], None],
    fresh: Callable[..., Any],
    failed: Callable[[Exception], None],
) -> tuple[Any, Any]:
    """A function around an executable that was not compiled here, to be called like a jitted one.

    Its C++ half is that of ``jit`` (``jaxlib``'s ``pjit``, since 0.4.4): arguments of types and
    placements that it has seen are dispatched at once, others come by ``meet``, which lets the
    caller check them. ``jax.stages.Compiled`` is the same without a check of weak types, and
    raises where arguments are placed in another way.

    Args:
        xla: The executable, `deserialized`.
        kept: Positions of the arguments that it takes, among all.
        name: What profiles call it.
        in_avals: Types of all arguments.
        out_avals: Types of the results.
        out_tree: Tree of the results.
        device: Where it runs.
        check: Is given the positional and keyword arguments in types that are new, and raises if
            they are none it takes.
        fresh: An ordinary function that does the same, for arguments that are placed elsewhere.
        failed: Told of an error of the first run, which ``fresh`` then serves: bytes may be read
            and still lack what running them needs.

    Returns:
        The function, and what tells of the memory and cost of its executable.

    Raises:
        Exception: The executable is none for these types on this device.
    """
    taken = xla, kept, name, in_avals, out_avals, out_tree, device, check, fresh, failed
    loaded = _Loaded(*taken)
    function = _xla_client._xla.pjit(
        name,
        loaded.without_jit,
        loaded.meet,
        [],
        [],
        _pxla.JitGlobalCppCacheKeys(),
        _tree_util.dispatch_registry,
        _pxla.cc_shard_arg,
    )
    return function, loaded.executables[0]


class _Loaded:
    """The Python half of a loaded function. It does not hold the function, so both are freed."""

    def __init__(
        self,
        xla: object,
        kept: Sequence[int],
        name: str,
        in_avals: Sequence[Any],
        out_avals: Sequence[Any],
        out_tree: PyTreeDef,
        device: jax.Device,
        check: Callable[[tuple[Any, ...], Mapping[str, Any]], None],
        fresh: Callable[..., Any],
        failed: Callable[[Exception], None],
    ) -> None:
        self._failed = failed
        self._runs: bool | None = None  # not known yet
        self._check = check
        self._fresh = fresh
        self._out_tree = out_tree
        self._device = device
        self._kept = frozenset(kept)
        self._count = len(in_avals)
        if not self._kept <= set(range(self._count)):
            raise ValueError(f"{self._count} arguments cannot be taken at {sorted(self._kept)}")
        devices = _xla_client.DeviceList((device,))
        avals = [aval for i, aval in enumerate(in_avals) if i in self._kept]
        here = jax.sharding.SingleDeviceSharding(device)
        ins, outs = [here] * len(avals), [here] * len(out_avals)
        nothing: list[Any] = [None] * max(len(avals), len(out_avals))
        in_layouts, out_layouts = _pxla._get_layouts_from_executable(
            xla, nothing[: len(avals)], nothing[: len(out_avals)], 0, avals, out_avals
        )
        dispatched = _pxla.get_dispatch_layouts(in_layouts, ins, avals)
        if any(layout is not None for layout in dispatched):
            raise ValueError("the executable has layouts of its own")
        self.executables = [
            _pxla.UnloadedMeshExecutable(
                xla_executable=xla,
                device_list=devices,
                backend=device.client,
                input_avals=avals,
                input_shardings=ins,
                output_avals=out_avals,
                output_shardings=outs,
                committed=committed,
                name=name,
                unordered_effects=[],
                ordered_effects=[],
                keepalive=[],
                host_callbacks=[],
                kept_var_idx=set(self._kept),
                mut=None,
                xla_in_layouts=in_layouts,
                dispatch_in_layouts=dispatched,
                xla_out_layouts=out_layouts,
                all_args_info=None,
                pgle_profiler=None,
            ).load()
            for committed in (False, True)
        ]

    def without_jit(self, *args: object, **kwargs: object) -> Any:
        """Serve a call where ``jax.disable_jit`` is in force."""
        self._check(args, kwargs)
        return self._fresh(*args, **kwargs)

    def meet(self, *args: object, **kwargs: object) -> tuple[Any, Any, bool]:
        """Serve a call with arguments of types or placements that were not seen before."""
        self._check(args, kwargs)
        leaves = jax.tree_util.tree_leaves((args, kwargs))
        committed = self._placed_here(leaves)
        if committed is None or len(leaves) != self._count or self._runs is False:
            return self._fresh(*args, **kwargs), None, False
        executable = self.executables[committed]
        try:
            flat = executable.unsafe_call(*leaves)
        except jax.errors.JaxRuntimeError as error:
            arrays = [x for x in leaves if isinstance(x, jax.Array)]
            if self._runs or is_of_machine(error) or any(x.is_deleted() for x in arrays):
                raise
            self._runs = False
            self._failed(error)
            return self._fresh(*args, **kwargs), None, False
        except _api_util.InternalFloatingPointError:  # of jax_debug_nans: jit finds out where
            if any(x.is_deleted() for x in leaves if isinstance(x, jax.Array)):
                raise FloatingPointError("a result has a NaN or an infinity") from None
            return self._fresh(*args, **kwargs), None, False
        self._runs = True
        result = jax.tree_util.tree_unflatten(self._out_tree, flat)
        flat, tree = _pxla.reflatten_outputs_for_dispatch(self._out_tree, flat)
        if not all(isinstance(x, _array.ArrayImpl) for x in flat):
            return result, None, False

        def physical(shardings: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
            return [
                _sharding_impls.physical_sharding(a, s)
                if jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended)
                else s
                for s, a in zip(shardings, avals, strict=True)
            ]

        fast = _pxla.MeshExecutableFastpathData(
            executable.xla_executable,
            tree,
            physical(executable._in_shardings, executable.in_avals),
            physical(executable._out_shardings, executable.out_avals),
            [x.aval for x in flat],
            [x.committed for x in flat],
            [i in self._kept for i in range(self._count)],
            executable._dispatch_in_layouts,
            [],
        )
        return result, fast, False

    def _placed_here(self, leaves: Sequence[Any]) -> bool | None:
        """Whether some argument is committed to the device; None if one is somewhere else."""
        committed = False
        for x in leaves:
            if not isinstance(x, jax.Array):
                continue
            if isinstance(x, jax.core.Tracer) or not x.is_fully_addressable:
                return None
            if type(x.sharding) is not jax.sharding.SingleDeviceSharding:
                return None
            if x.committed and x.sharding.device_set != {self._device}:
                return None  # what is not committed is moved
            committed = committed or x.committed
        return committed
