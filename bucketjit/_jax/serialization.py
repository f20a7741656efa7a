"""Executables as bytes and back, and JAX's own compilation cache.

`bucketjit._compile.files` writes the bytes to files; `compiler` keeps what XLA cannot write again.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Layout
from jax.extend.backend import get_compile_options
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef

from bucketjit._jax import names
from bucketjit._jax.arrays import is_of_topology, other_memory
from bucketjit._jax.config import looks_for_nans
from bucketjit._jax.names import Forwarding
from bucketjit._raised import in_one_line, is_of_machine

_pxla = names.module("interpreters.pxla")
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
    """Where an executable runs.

    Attributes:
        devices: The devices, in the order in which the executable counts them.
        mesh: The mesh of its arguments and results; None if all are on the only device.
    """

    devices: tuple[Any, ...]
    mesh: Any = None

    @classmethod
    def on(cls, device: jax.Device) -> Placement:
        """Everything is on one device."""
        return cls((device,))

    @property
    def device(self) -> Any:
        """A device of this process."""
        here = self.devices[0].client.process_index()
        return next(d for d in self.devices if d.process_index == here)

    def shardings(self, specs: Sequence[Any], count: int) -> list[Any]:
        """The shardings of some arguments or results, whose specs `serialized` has returned."""
        if self.mesh is None:
            return [jax.sharding.SingleDeviceSharding(self.device)] * count
        if len(specs) != count:
            raise ValueError(f"{len(specs)} specs for {count} arrays")
        return [NamedSharding(self.mesh, _spec(entries)) for entries in specs]


class NotPlain(Exception):
    """An executable cannot be kept in a file; the message says why."""


def serialized(
    compiled: Any, placement: Placement
) -> tuple[bytes, tuple[int, ...], list[list[Any]] | None]:
    """The bytes of a compiled executable, and the positions of the arguments that it takes.

    The third item are the partition specs of these arguments and of the results, in lists as JSON
    has them; none on one device. The compiler chooses those of which nothing is said.

    ``jax.experimental.serialize_executable`` pickles JAX's object around the bytes, and reading a
    pickle can run any code. For a plain executable (its placement is known, no effects, no
    callbacks) that object can be made again from the types of its arguments
    (``pxla.UnloadedMeshExecutable``, since 0.4.30), so only the bytes are needed.
    """
    around = getattr(compiled._executable, "_unloaded_executable", None)
    if around is None:
        raise NotPlain("it is of a kind that cannot be written")
    if around.unordered_effects or around.ordered_effects or around.host_callbacks:
        raise NotPlain("it calls back into Python")
    if around.keepalive or around.mut is not None or compiled._params.const_args:
        raise NotPlain("it holds objects of this process")
    specs = _specs(around, placement)
    if any(layout is not None for layout in around.dispatch_in_layouts):
        raise NotPlain("it has layouts of its own")
    try:
        xla = around.xla_executable
        if is_of_topology(placement.devices):
            raw = xla.serialize()
        else:
            raw = around.backend.serialize_executable(xla)
    except Exception as error:
        raise NotPlain(in_one_line(error)) from error
    return bytes(raw), tuple(sorted(around.kept_var_idx)), specs


def device_list(devices: Sequence[jax.Device]) -> Any:
    """Devices in the form that XLA's clients take them (``jaxlib``'s ``DeviceList``)."""
    sharding: Any = jax.sharding.SingleDeviceSharding(devices[0])
    return type(sharding._internal_device_list)(tuple(devices))


def _spec(entries: Sequence[Any]) -> PartitionSpec:
    """A partition spec of lists."""
    return PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in entries))


def _specs(around: Any, placement: Placement) -> list[list[Any]] | None:
    """The specs of an executable's arguments and results; raises if they are placed elsewhere."""
    sides = [[*around.input_shardings], [*around.output_shardings]]
    kind = jax.sharding.SingleDeviceSharding if placement.mesh is None else NamedSharding
    if tuple(around.device_list) != placement.devices or not all(
        isinstance(s, kind) and not other_memory(s) for s in itertools.chain(*sides)
    ):
        raise NotPlain("its arguments or results are placed elsewhere")
    if placement.mesh is None:
        return None
    return [[_entries(sharding, placement.mesh) for sharding in side] for side in sides]


def _entries(sharding: Any, mesh: Any) -> list[Any]:
    """The spec of a sharding over a mesh, as lists."""
    entries = [list(e) if isinstance(e, tuple) else e for e in sharding.spec]
    if sharding.mesh == mesh and _spec(entries) == sharding.spec:
        return entries
    raise NotPlain(f"an argument or result is placed by {sharding}")


class ForElsewhere:
    """An executable in a file for a device of a topology, which no process here can look into."""

    _kept_var_idx = ()

    def as_text(self) -> None:
        """XLA does not tell."""

    cost_analysis = memory_analysis = as_text


@functools.cache
def _register_lapack() -> None:
    """Register LAPACK's functions, without which a factorisation calls a null address.

    Lowering does it, and an executable that was read has none. The import of scipy in it takes 100
    ms.
    """
    jax.jit(jax.lax.linalg.cholesky).lower(jax.ShapeDtypeStruct((1, 1), "float32"))


def deserialized(raw: bytes, placement: Placement) -> Any:
    """The executable in the bytes that `serialized` made; XLA reads it without Python's lock.

    No public function reads these bytes alone. They name the device that they were compiled for by
    a number that no other process of a ``jax.distributed`` job has for a device of its own: there
    XLA would read the bytes, and run them on no device. So XLA gets the devices as well, in
    options, as JAX's own cache gives them. The other options are of no use after the compile.
    """
    device = placement.device
    if device.platform == "cpu" and b"lapack_" in raw:
        _register_lapack()
    numbers = np.array([[d.id for d in placement.devices]])
    options = get_compile_options(1, numbers.size, device_assignment=numbers)
    return device.client.deserialize_executable(
        raw, executable_devices=device_list(placement.devices), compile_options=options
    )


_Check = Callable[[tuple[Any, ...], Mapping[str, Any]], None]


_EMPTY = ("unordered_effects", "ordered_effects", "keepalive", "host_callbacks")


def loaded_function(
    xla: Any,
    kept: Sequence[int],
    name: str,
    in_avals: Sequence[Any],
    out_avals: Sequence[Any],
    out_tree: PyTreeDef,
    placement: Placement,
    specs: Sequence[Sequence[Any]] | None,
    check: _Check,
    fresh: Callable[..., Any],
    failed: Callable[[Exception], None],
) -> tuple[Any, Any]:
    """A function around an executable that was read from bytes, and JAX's object of the executable.

    It is ``jax.stages.Compiled``, which does not check weak types, and raises for arguments in
    another placement. So ``check`` runs first for arguments that it has not seen, and ``fresh``, a
    jitted function, serves what the executable cannot.
    """
    positions = sorted(kept)
    layouts = _layouts(xla, positions, in_avals)
    of_arguments, of_results = specs or ((), ())
    ins = placement.shardings(of_arguments, len(positions))
    outs = placement.shardings(of_results, len(out_avals))
    if AxisType.Explicit in getattr(placement.mesh, "axis_types", ()):
        abstract = placement.mesh.abstract_mesh
        types = (NamedSharding(abstract, sharding.spec) for sharding in outs)
        out_avals = [a.update(sharding=s) for a, s in zip(out_avals, types, strict=True)]
    # By whether results are committed to their devices; those of several devices always are.
    executables = {
        committed: _pxla.UnloadedMeshExecutable(
            xla_executable=xla,
            device_list=device_list(placement.devices),
            backend=placement.device.client,
            input_avals=[in_avals[i] for i in positions],
            input_shardings=ins,
            output_avals=out_avals,
            output_shardings=outs,
            committed=committed,
            name=name,
            kept_var_idx=set(positions),
            **{name: [] for name in _EMPTY},
            **dict.fromkeys(("mut", "all_args_info", "pgle_profiler")),
            xla_in_layouts=layouts,
            dispatch_in_layouts=[None] * len(positions),
            xla_out_layouts=[*map(Layout.from_pjrt_layout, xla.get_output_layouts())],
        ).load()
        for committed in ((False, True) if placement.mesh is None else (True,))
    }

    where = functools.partial(_committed, placement, dict(zip(positions, ins, strict=True)))

    def compiled(committed: bool, tree: PyTreeDef) -> jax.stages.Compiled:
        def look(leaves: Sequence[Any]) -> None:
            if where(leaves) is not committed:
                raise _Elsewhere
            check(*tree.unflatten(leaves))

        make: Any = jax.stages.Compiled
        seen: jax.stages.Compiled = make(
            _Looking(executables[committed], look), [], tree.unflatten(in_avals), out_tree
        )
        return seen

    function = _Loaded(functools.lru_cache(compiled), where, check, fresh, failed)
    return function, next(iter(executables.values()))


def _layouts(xla: Any, positions: Sequence[int], in_avals: Sequence[Any]) -> list[Layout]:
    count = len(in_avals)
    layouts = [Layout.from_pjrt_layout(layout) for layout in xla.get_parameter_layouts()]
    if not set(positions) <= set(range(count)) or len(layouts) != len(positions):
        raise ValueError(f"{count} arguments cannot be taken at {positions}")
    for layout, aval in zip(layouts, map(in_avals.__getitem__, positions), strict=True):
        is_key = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)  # its words have an axis
        if tuple(layout.major_to_minor) != tuple(range(aval.ndim + is_key)):
            raise ValueError("the executable takes other arguments, or has layouts of its own")
    return layouts


class _Elsewhere(Exception):
    """The arguments are not placed as those of an executable."""


def _not_yet(*args: Any, **kwargs: Any) -> Any:
    """The first call tells where its arguments are, and their tree."""
    raise _Elsewhere


class _Looking(Forwarding):
    """An executable that looks at its arguments before it runs.

    The C++ half of ``jax.stages.Compiled`` calls it only with types and placements of arguments
    that it has not seen.
    """

    def __init__(self, executable: Any, look: Callable[[Sequence[Any]], None]) -> None:
        super().__init__(executable)
        self._look = look

    def call(self, *leaves: Any) -> Any:
        self._look(leaves)
        return self._original.call(*leaves)


class _Loaded:
    """A function around a loaded executable. Nothing in it references it: counts alone free it."""

    def __init__(
        self,
        compiled: Callable[[bool, PyTreeDef], Callable[..., Any]],
        where: Callable[[Sequence[Any]], bool | None],
        check: _Check,
        fresh: Callable[..., Any],
        failed: Callable[[Exception], None],
    ) -> None:
        self._compiled, self._where, self._check = compiled, where, check
        self._fresh, self._failed = fresh, failed
        self._run: Callable[..., Any] = _not_yet
        self._before: Callable[..., Any] = _not_yet  # what ran before it
        self._has_run = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run, before = self._run, self._before
        try:
            try:
                result = run(*args, **kwargs)
            except _Elsewhere:
                result = before(*args, **kwargs)
                self._run, self._before = before, run
        except Exception as error:
            return self._otherwise(error, args, kwargs)
        self._has_run = True
        return result

    def _otherwise(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call that the executable has refused, or failed."""
        self._check(args, kwargs)
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        if isinstance(error, _Elsewhere) and (committed := self._where(leaves)) is not None:
            self._run, self._before = self._compiled(committed, tree), self._run
            return self(*args, **kwargs)
        is_refused = isinstance(error, _Elsewhere | TypeError)
        if not is_refused:
            # `fresh` cannot run again on donated arguments, and need not after a good first run.
            is_gone = any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves)
            if looks_for_nans():  # `fresh` finds the line
                if is_gone:
                    raise FloatingPointError("a result has a NaN or an infinity") from None
            elif self._has_run or is_gone or is_of_machine(error):
                raise error
            else:
                self._failed(error)
                self._run = self._fresh
        return self._fresh(*args, **kwargs)


def _committed(
    placement: Placement, shardings: Mapping[int, Any], leaves: Sequence[Any]
) -> bool | None:
    """Whether an argument is committed to the device; None if one is committed elsewhere.

    None is also the answer for tracers, and for arrays over several devices or hosts that are not
    those of the placement.
    """
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        return None
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    if placement.mesh is not None:
        is_here = all(
            leaves[i].sharding.is_equivalent_to(sharding, leaves[i].ndim)
            for i, sharding in shardings.items()
            if getattr(leaves[i], "committed", False)
        )
        return is_here or None
    for x in arrays:
        if type(x.sharding) is not jax.sharding.SingleDeviceSharding:
            return None
        if x.committed and x.sharding.device_set != {placement.device}:
            return None  # an uncommitted array is moved to the device instead
    return any(x.committed for x in arrays)
