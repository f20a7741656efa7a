"""Executables as bytes and back, and JAX's own compilation cache.

`bucketjit._compile.files` writes the bytes to files; `compiler` keeps bytes that XLA cannot write
again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from bucketjit._jax import names
from bucketjit._raised import in_one_line, is_of_machine

_api_util = names.module("api_util")
_linalg = names.module("lax.linalg")
_pxla = names.module("interpreters.pxla")
_tree_util = names.module("tree_util")
_xla_client = names.module("lib").xla_client
_flags: Any = jax.config  # its flags are public, but have no types

_SECONDS_BY_DEFAULT = 1.0  # JAX's default of ``jax_persistent_cache_min_compile_time_secs``


def compilation_cache() -> tuple[str, float, int] | None:
    """The settings of JAX's own persistent cache, if it is in use.

    JAX's default for the least compile time suits all functions, most of which are never compiled
    again. Buckets are compiled again in the next process, so the default counts as 0 seconds here.
    The flags are public, but have no types (since 0.4.1).
    """
    directory = _flags.jax_compilation_cache_dir
    if not directory or not _flags.jax_enable_compilation_cache or "://" in directory:
        return None
    seconds = float(_flags.jax_persistent_cache_min_compile_time_secs)
    if seconds == _SECONDS_BY_DEFAULT:
        seconds = 0.0
    return directory, seconds, int(_flags.jax_compilation_cache_max_size)


def cache_hits() -> int:
    """How many executables this thread has read from JAX's own persistent cache.

    Counting begins with the first call. A compile that raised the count was read from a file, and
    XLA cannot serialize such an executable, at least on CPU. Only an event of ``jax.monitoring``
    (since 0.4.1) reports it.
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


@dataclass(frozen=True)
class Placement:
    """Where an executable runs, and where its arguments and results are.

    Attributes:
        devices: The devices, in the order in which the executable counts them.
        arguments: The sharding of each argument; empty if all are on the only device.
        results: The same of the results.
    """

    devices: tuple[Any, ...]
    arguments: tuple[Any, ...] = ()
    results: tuple[Any, ...] = ()

    @classmethod
    def on(cls, device: jax.Device) -> Placement:
        """Everything is on one device."""
        return cls((device,))

    @property
    def device(self) -> Any:
        """A device of this process."""
        here = self.devices[0].client.process_index()
        return next(d for d in self.devices if d.process_index == here)

    def shardings(self, arguments: int, results: int) -> tuple[list[Any], list[Any]]:
        """The sharding of each argument and of each result."""
        if not self.arguments:
            one = jax.sharding.SingleDeviceSharding(self.device)
            return [one] * arguments, [one] * results
        if (len(self.arguments), len(self.results)) != (arguments, results):
            raise ValueError(f"not {arguments} arguments and {results} results")
        return list(self.arguments), list(self.results)


class NotPlain(Exception):
    """An executable cannot be kept in a file; the message says why."""


def serialized(compiled: Any, placement: Placement) -> tuple[bytes, tuple[int, ...]]:
    """The bytes of a compiled executable, and the positions of the arguments that it takes.

    ``jax.experimental.serialize_executable`` pickles JAX's object around the bytes, and reading a
    pickle can run any code. For a plain executable (its placement is known, no effects, no
    callbacks) that object can be made again from the types of its arguments
    (``pxla.UnloadedMeshExecutable``, since 0.4.30), so only the bytes are needed.
    """
    around = getattr(compiled._executable, "_unloaded_executable", None)
    if around is None or not isinstance(around, _pxla.UnloadedMeshExecutable):
        raise NotPlain("it is of a kind that cannot be written")
    if around.unordered_effects or around.ordered_effects or around.host_callbacks:
        raise NotPlain("it calls back into Python")
    if around.keepalive or around.mut is not None or compiled._params.const_args:
        raise NotPlain("it holds objects of this process")
    if not _is_placed(around, placement):
        raise NotPlain("its arguments or results are placed elsewhere")
    if any(layout is not None for layout in around.dispatch_in_layouts):
        raise NotPlain("it has layouts of its own")
    try:
        raw = around.backend.serialize_executable(around.xla_executable)
    except Exception as error:
        raise NotPlain(in_one_line(error)) from error
    return bytes(raw), tuple(sorted(around.kept_var_idx))


def _is_placed(around: Any, placement: Placement) -> bool:
    """Whether an executable has a placement."""
    if tuple(around.device_list) != placement.devices:
        return False
    found = [*around.input_shardings, *around.output_shardings]
    if not placement.arguments:
        return all(type(s) is jax.sharding.SingleDeviceSharding for s in found)
    wanted = [placement.arguments[i] for i in sorted(around.kept_var_idx)] + [*placement.results]
    avals = [*around.input_avals, *around.output_avals]
    return all(
        s.is_equivalent_to(want, aval.ndim)
        for s, want, aval in zip(found, wanted, avals, strict=True)
    )


def deserialized(raw: bytes, placement: Placement) -> Any:
    """The executable in the bytes that `serialized` made; XLA reads it without Python's lock.

    No public function reads these bytes alone (``xla_client.DeviceList``). They name the device
    that they were compiled for by a number that no other process of a ``jax.distributed`` job has
    for a device of its own: there XLA would read the bytes, and run them on no device. So XLA
    gets the devices as well, in options, as JAX's own cache gives them (``CompileOptions`` and
    ``DeviceAssignment`` of ``xla_client``). The other options are of no use after the compile.
    """
    device = placement.device
    if device.platform == "cpu" and b"lapack_" in raw:
        # Lowering registers LAPACK's functions. There was no lowering here, and without them a
        # factorisation calls a null address. The import of scipy in it takes 100 ms.
        _linalg.initialize_lapack()
    numbers = np.array([[d.id for d in placement.devices]])
    devices = _xla_client.DeviceList(placement.devices)
    options = _xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = numbers.shape
    options.device_assignment = _xla_client.DeviceAssignment.create(numbers)
    return device.client.deserialize_executable(
        raw, executable_devices=devices, compile_options=options
    )


def loaded_function(
    xla: object,
    kept: Sequence[int],
    name: str,
    in_avals: Sequence[Any],
    out_avals: Sequence[Any],
    out_tree: PyTreeDef,
    placement: Placement,
    check: Callable[[tuple[Any, ...], Mapping[str, Any]], None],
    fresh: Callable[..., Any],
    failed: Callable[[Exception], None],
) -> tuple[Any, Any]:
    """A function around an executable that was read from bytes, to be called like a jitted one.

    The C++ half of the function is that of ``jit`` (``jaxlib``'s ``pjit``, since 0.4.4). It
    dispatches arguments whose types and placements it has seen. Other arguments reach
    `_Loaded.meet`, which checks them first. ``jax.stages.Compiled`` does not check weak types, and
    raises for arguments in another placement.
    """
    taken = xla, kept, name, in_avals, out_avals, out_tree, placement, check, fresh, failed
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
    return function, next(iter(loaded.executables.values()))


class _Loaded:
    """The Python half of a loaded function: what runs when the C++ half has not seen the arguments.

    It does not reference the function, so that reference counts alone free both.
    """

    def __init__(
        self,
        xla: object,
        kept: Sequence[int],
        name: str,
        in_avals: Sequence[Any],
        out_avals: Sequence[Any],
        out_tree: PyTreeDef,
        placement: Placement,
        check: Callable[[tuple[Any, ...], Mapping[str, Any]], None],
        fresh: Callable[..., Any],
        failed: Callable[[Exception], None],
    ) -> None:
        self._failed, self._check, self._fresh = failed, check, fresh
        self._runs: bool | None = None  # whether a first run succeeded; None before it
        self._out_tree, self._placement = out_tree, placement
        self._kept = frozenset(kept)
        self._avals, self._count = in_avals, len(in_avals)
        self._servers: dict[tuple[bool, PyTreeDef], Callable[..., tuple[Any, Any, bool]]] = {}
        if not self._kept <= set(range(self._count)):
            raise ValueError(f"{self._count} arguments cannot be taken at {sorted(self._kept)}")
        devices = _xla_client.DeviceList(placement.devices)
        every, outs = placement.shardings(self._count, len(out_avals))
        avals = [aval for i, aval in enumerate(in_avals) if i in self._kept]
        ins = [sharding for i, sharding in enumerate(every) if i in self._kept]
        nothing: list[Any] = [None] * max(len(avals), len(out_avals))
        in_layouts, out_layouts = _pxla._get_layouts_from_executable(
            xla, nothing[: len(avals)], nothing[: len(out_avals)], 0, avals, out_avals
        )
        dispatched = _pxla.get_dispatch_layouts(in_layouts, ins, avals)
        if any(layout is not None for layout in dispatched):
            raise ValueError("the executable has layouts of its own")
        # By whether results are committed to their devices; those of several devices always are.
        self.executables = {
            committed: _pxla.UnloadedMeshExecutable(
                xla_executable=xla,
                device_list=devices,
                backend=placement.device.client,
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
            for committed in ((True,) if placement.arguments else (False, True))
        }

    def without_jit(self, *args: object, **kwargs: object) -> Any:
        """Serve a call under ``jax.disable_jit``, by ``fresh``."""
        self._check(args, kwargs)
        return self._fresh(*args, **kwargs)

    def meet(self, *args: object, **kwargs: object) -> tuple[Any, Any, bool]:
        """Serve a call whose types or placements of arguments the C++ half has not seen."""
        self._check(args, kwargs)
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        committed = self._placed_here(leaves)
        if committed is None or len(leaves) != self._count or self._runs is False:
            return self._fresh(*args, **kwargs), None, False
        try:
            served = self._server(committed, tree)(*args, **kwargs)
        except jax.errors.JaxRuntimeError as error:
            arrays = [x for x in leaves if isinstance(x, jax.Array)]
            # `fresh` cannot run again on donated arguments, and need not after a good first run.
            if self._runs or is_of_machine(error) or any(x.is_deleted() for x in arrays):
                raise
            self._runs = False
            self._failed(error)
            return self._fresh(*args, **kwargs), None, False
        except _api_util.InternalFloatingPointError:  # of jax_debug_nans: `fresh` finds the line
            if any(x.is_deleted() for x in leaves if isinstance(x, jax.Array)):
                raise FloatingPointError("a result has a NaN or an infinity") from None
            return self._fresh(*args, **kwargs), None, False
        self._runs = True
        return served

    def _server(self, committed: bool, tree: PyTreeDef) -> Callable[..., tuple[Any, Any, bool]]:
        """What ``jax.stages.Compiled`` does for arguments that its own C++ half has not seen.

        It runs the executable, and makes the data for a C++ half (``_cache_miss`` of jaxlib's
        ``PjitFunction``). ``Compiled`` itself takes other weak types without a word, and raises
        for arguments in another placement; `meet` comes before it.
        """
        known = self._servers.get((committed, tree))
        if known is None:
            executable = self.executables[committed]
            info = tree.unflatten(self._avals)
            compiled: Any = jax.stages.Compiled(executable, [], info, self._out_tree)
            known = executable.create_cpp_call(compiled._params)._cache_miss
            self._servers[committed, tree] = known
        return known

    def _placed_here(self, leaves: Sequence[Any]) -> bool | None:
        """Whether an argument is committed to the device; None if one is committed elsewhere.

        None is also the answer for tracers, and for arrays over several devices or hosts that are
        not those of the placement.
        """
        if self._placement.arguments:
            return self._are_placed(leaves) or None
        committed = False
        for x in leaves:
            if not isinstance(x, jax.Array):
                continue
            if isinstance(x, jax.core.Tracer) or not x.is_fully_addressable:
                return None
            if type(x.sharding) is not jax.sharding.SingleDeviceSharding:
                return None
            if x.committed and x.sharding.device_set != {self._placement.device}:
                return None  # an uncommitted array is moved to the device instead
            committed = committed or x.committed
        return committed

    def _are_placed(self, leaves: Sequence[Any]) -> bool:
        """Whether all arguments are arrays that are placed as those of the executable."""
        wanted = self._placement.arguments
        return len(leaves) == len(wanted) and all(
            isinstance(x, jax.Array)
            and not isinstance(x, jax.core.Tracer)
            and x.committed
            and x.sharding.is_equivalent_to(sharding, x.ndim)
            for x, sharding in zip(leaves, wanted, strict=True)
        )
