"""The only door to non-public JAX.

Every function here says why the public API does not do, and since which version of JAX the
name behind it exists. Nothing else in the package imports ``jax._src``.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import dis
import functools
import gc
import inspect
import io
import itertools
import linecache
import math
import numbers
import operator
import os
import re
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType, FunctionType, TracebackType
from typing import Any, NoReturn, TypeVar, cast

import jax
import jaxlib
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.errors import InconclusiveDimensionOperation
from jax.export import is_symbolic_dim
from jax.extend import backend as jex_backend
from jax.extend import core as jex_core
from jax.extend import source_info_util as jex_source_info
from jax.interpreters import ad, batching, mlir, partial_eval

from bucketjit import _jax_names
from bucketjit._errors import in_one_line, is_of_machine
from bucketjit._jax_names import REMEDY_OF_VERSIONS as REMEDY_OF_VERSIONS
from bucketjit._jax_names import Without as Without
from bucketjit._jax_names import lacking as lacking
from bucketjit._jax_names import trouble_of_versions as trouble_of_versions

_ad = _jax_names.module("interpreters.ad")
_api_util = _jax_names.module("api_util")
_array = _jax_names.module("array")
_config = _jax_names.module("config")
_convolution = _jax_names.module("lax.convolution")
_core = _jax_names.module("core")
_decision = _jax_names.module("export.shape_poly_decision")
_effects = _jax_names.module("effects")
_indexing = _jax_names.module("numpy.indexing")
_lax = _jax_names.module("lax.lax")
_lax_fft = _jax_names.module("lax.fft")
_lax_numpy = _jax_names.module("numpy.lax_numpy")
_lax_utils = _jax_names.module("lax.utils")
_linalg = _jax_names.module("lax.linalg")
_mesh = _jax_names.module("mesh")
_mlir = _jax_names.module("interpreters.mlir")
_numpy_fft = _jax_names.module("numpy.fft")
_numpy_hijax = _jax_names.module("numpy.hijax")
_partial_eval = _jax_names.module("interpreters.partial_eval")
_pxla = _jax_names.module("interpreters.pxla")
_random = _jax_names.module("random.core")
_shape_poly = _jax_names.module("export.shape_poly")
_sharding_impls = _jax_names.module("sharding_impls")
_source_info_util = _jax_names.module("source_info_util")
_tree_util = _jax_names.module("tree_util")
_util = _jax_names.module("util")
_xla_bridge = _jax_names.module("xla_bridge")
_xla_client = _jax_names.module("lib").xla_client

_PACKAGE = os.path.dirname(__file__) + os.sep
_flags: Any = jax.config  # whose flags are public, and not typed
Jaxpr = Any  # ClosedJaxpr, or since 0.11 the merged Jaxpr
_T = TypeVar("_T")


def trace_context() -> Hashable:
    """Every configuration state that changes what is traced (x64, matmul precision, ...).

    Non-public because JAX offers no key of its configuration; it is the very key that ``jit``
    caches traces by (``config.trace_context``, since 0.4.36).
    """
    return _config.trace_context()


def thread_config() -> Hashable:
    """Every configuration state of this thread that changes what a compiled call does.

    Non-public because a context such as ``jax.debug_nans(True)`` holds for the thread that entered
    it, and JAX has no way to ask for all of them (states of ``config``, since 0.4.36).
    """
    return (
        _config.trace_context(),
        _flags.jax_debug_nans,
        _flags.jax_debug_infs,
        _flags.jax_transfer_guard_host_to_device,
        _flags.jax_transfer_guard_device_to_device,
        _flags.jax_transfer_guard_device_to_host,
    )


class ThreadConfig:
    """What contexts such as ``jax.enable_x64`` and ``jax.set_mesh`` have set for this thread.

    Another thread has none of it, and would trace and compile something else there. JAX has no
    way to hand it over (the local values of ``config`` and ``mesh``, since 0.4.36).
    """

    def __init__(self) -> None:
        self._context = _config.trace_context()
        self._local = [(config, config.get_local()) for config in _configs()]

    def run(self, work: Callable[..., _T], *args: Any) -> _T:
        """Call ``work`` in this thread as it would be in the one that made this.

        Raises:
            RuntimeError: Something was set that cannot be handed over.
            Exception: Whatever ``work`` raises.
        """
        with ExitStack() as before:
            for config, value in self._local:
                if (now := config.get_local()) is not value:
                    before.callback(_set_local, config, now)
                    _set_local(config, value)
            if _config.trace_context() != self._context:
                raise RuntimeError(
                    "a context of jax.make_user_context holds for the thread that entered it; "
                    "compile outside of it, or in the call"
                )
            return work(*args)


_UNSET = _config.config_ext.unset


@functools.cache
def _configs() -> tuple[Any, ...]:
    """Everything that a context can set, transformations aside."""
    contexts = [
        value
        for module in (_config, _mesh)
        for value in vars(module).values()
        if isinstance(value, _config.config_ext.Config)
    ]
    return tuple({id(c): c for c in [*_config.config_states.values(), *contexts]}.values())


def _set_local(config: Any, value: Any) -> None:
    config.set_local(value)
    hook = getattr(config, "_update_thread_local_hook", None)
    if hook is not None:
        hook(None if value is _UNSET else value)


def only_differentiated() -> bool:
    """True inside ``grad``, ``jvp`` and the like, as many as there are, but nothing else.

    Non-public: nothing tells which transformations a call is under (``ad.JVPTrace`` and
    ``ad.LinearizeTrace``, since 0.4.36 and 0.5).
    """
    trace = _core.trace_ctx.trace
    while isinstance(trace, ad.JVPTrace | _ad.LinearizeTrace):
        trace = trace.parent_trace
    return trace is _core.eval_trace and _core.trace_ctx.axis_env is _core.top_axis_env


@contextmanager
def eval_context() -> Iterator[None]:
    """Leave all transformations for a while (``core.eval_context``, since 0.4.36).

    The backward pass of ``grad`` sets the mesh that an equation was traced under, also where there
    was none, and what is set is part of what ``jit`` knows its traces by. So an empty one is left,
    too: what runs here finds what was compiled outside of a backward pass. (JAX 0.12 takes unset
    for empty; ``config.abstract_mesh_context_manager``, since 0.5, in ``mesh`` since 0.11.2.)
    """
    name = "abstract_mesh_context_manager"
    mesh: Any = getattr(_config, name, None) or getattr(_mesh, name)
    local = mesh.get_local()
    is_empty = isinstance(local, jax.sharding.AbstractMesh) and local.empty
    with jax.core.eval_context():
        if is_empty:
            _set_local(mesh, _UNSET)
        try:
            yield
        finally:
            if is_empty:
                _set_local(mesh, local)


def hold_weakly(kind: type) -> None:
    """Let JAX forget equations whose parameters are of this kind when those are gone.

    It keeps the result types of 2,048 equations by their parameters, and would keep what those
    hold with them (``util.weakref_cache_key_types``, in 0.10 and 0.12).
    """
    if not lacking(Without.FORGETTING):
        _util.weakref_cache_key_types.add(kind)


def set_linearization(primitive: Any, rule: Callable[..., Any]) -> None:
    """Give a primitive a rule that is told whether reverse mode asks (``ad``, since 0.5).

    The public rule of forward mode does not know. The rule gets whether reverse mode asks, which
    arguments have tangents and the arguments; it returns the results, which of them have tangents,
    residuals, and a function of the residuals and the tangents that gives the tangents of the
    results; or None for what JAX does without the rule. Since 0.11.1 there is a second kind of
    residuals, which is left empty. Where JAX has something else in their place, it does without
    the rule.
    """
    count = 0 if lacking(Without.GRADIENTS) else _parts_of_a_linearization()
    if count not in (4, 5):
        return

    def linearize(in_reverse: bool, nonzero: Sequence[bool], *primals: Any, **params: Any) -> Any:
        found = rule(in_reverse, nonzero, *primals, **params)
        if found is None:
            return _ad.fallback_linearize_rule(primitive, in_reverse, nonzero, *primals, **params)
        outs, with_tangent, residuals, linear = found
        if count == 4:
            return outs, with_tangent, residuals, linear
        return outs, with_tangent, residuals, None, lambda r, _, *tangents: linear(r, *tangents)

    _ad.primitive_linearizations[primitive] = linearize


def _parts_of_a_linearization() -> int:
    """How many values a linearization rule returns: as many as JAX's own rule for the identity."""
    identity = jex_core.Primitive("identity")
    ad.primitive_jvps[identity] = lambda primals, tangents: (primals[0], tangents[0])
    try:
        with jax.core.eval_context():
            return len(_ad.fallback_linearize_rule(identity, True, [True], np.float32(0)))
    finally:
        del ad.primitive_jvps[identity]


def struct_of(aval: Any, shape: Sequence[Any] | None = None) -> jax.ShapeDtypeStruct:
    """An argument to trace with, of this abstract value, or of another shape."""
    weak = bool(getattr(aval, "weak_type", False))
    shape = getattr(aval, "shape", ()) if shape is None else shape
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=weak)


def shaped(struct: Any) -> Any:
    """The abstract value of an array like this ``ShapeDtypeStruct`` (``core.ShapedArray``)."""
    weak = bool(getattr(struct, "weak_type", False))
    return jax.core.ShapedArray(struct.shape, struct.dtype, weak_type=weak)


def current_trace() -> Hashable:
    """The trace that operations are recorded in now (``core.trace_ctx``, since 0.4.36).

    Non-public because nobody else need tell them apart; a value made in one trace may be used
    again in the same one, but never in another.
    """
    return _core.trace_ctx.trace


# What ``THREAD_TRACE.value`` is outside every transformation: ``core.trace_state_clean``, six times
# faster, and no tracer has to be looked for among all leaves.
# (Since 0.4.36, None since 0.12. No transformation makes an axis environment without a trace.)
THREAD_TRACE = _core.trace_state_strong_ref
NO_TRACE = (_core.eval_trace, None)


def jit_disabled() -> bool:
    """Whether ``jax.disable_jit`` is in force (the public flag is not typed)."""
    return bool(_config.disable_jit.value)


def with_type(x: Any, dtype: Any, weak_type: bool) -> Any:
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
    shape: tuple[int, ...], dtype: Any, weak_type: bool, like: jax.Array, exactly: bool = False
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
        weak = _aval(shape, dtype, True)
        return lambda host: _array.ArrayImpl(
            weak, placed, jax.device_put(host, placed)._arrays, committed=True
        )
    sharding, devices = single
    aval, committed = _aval(shape, dtype, weak_type), like.committed
    put = _xla_client.batched_device_put
    return lambda host: put(aval, sharding, [host], devices, committed)


def on_default_device(host: Any, weak_type: bool = False) -> Any:
    """``jax.device_put(host)``; of one array, which nobody writes to again, in less time.

    3 us in place of 21 (``config.default_device`` is not typed among the public flags).
    """
    if not isinstance(host, np.ndarray):
        return jax.device_put(host)
    return _default_placer(_config.default_device.value, host.shape, host.dtype, weak_type)(host)


@functools.lru_cache(maxsize=4096)
def _default_placer(
    device: Any, shape: tuple[int, ...], dtype: Any, weak_type: bool
) -> Callable[..., jax.Array]:
    like = _on_default_device(device, dtype)
    if like.committed:
        return lambda host: with_type(jax.device_put(host), host.dtype, weak_type)
    return host_placer(shape, dtype, weak_type, like)


@functools.lru_cache(maxsize=256)
def _on_default_device(device: Any, dtype: Any) -> jax.Array:
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
    aval = _aval(array.shape, array.dtype, weak_type)
    return _array.ArrayImpl(aval, like.sharding, [cast(Any, array)], like.committed)


@functools.lru_cache(maxsize=4096)
def _aval(shape: tuple[int, ...], dtype: Any, weak_type: bool) -> Any:
    return jax.core.ShapedArray(shape, dtype, weak_type=weak_type)


@functools.lru_cache(maxsize=256)
def _single_device(sharding: Any) -> tuple[Any, list[Any]] | None:
    devices = list(sharding.device_set)
    if len(devices) != 1:
        return None
    if isinstance(sharding, jax.sharding.NamedSharding):  # over a mesh of one
        return sharding, devices
    return jax.sharding.SingleDeviceSharding(devices[0]), devices


_SINGLE = jax.sharding.SingleDeviceSharding
CONCRETE_ARRAY = _array.ArrayImpl  # the class of concrete arrays: `type(x) is` takes no call
KEY_ARRAY = _random.prng.PRNGKeyArray  # that of typed random keys, which wrap one


def is_concrete_array(x: Any) -> bool:
    """True for a concrete ``jax.Array`` (typed keys are not one: they wrap one)."""
    return isinstance(x, _array.ArrayImpl)


def signature_counter(function: Any) -> Callable[[], int]:
    """Counts the argument signatures that a jitted function knows, placement included.

    Not the method itself: through one of nanobind's, as jaxlib 0.10 has them, the garbage collector
    does not see the function, so an executor that its own function knows would never be freed.
    """
    return lambda: function._cache_size()


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


# --- primitives ---------------------------------------------------------------------------


def _find_primitives() -> dict[str, Any]:
    """Every primitive JAX has imported, by name (``jax.extend`` lists only some of them)."""
    found: dict[str, Any] = {}
    for name, module in _modules().items():
        if name.startswith("jax."):
            for value in vars(module).copy().values():
                if isinstance(value, jex_core.Primitive):
                    found.setdefault(value.name, value)
    return found


def _modules() -> dict[str, Any]:
    """What is imported now.

    A copy is made at one go. While a list of the items is made, memory is asked for, garbage is
    collected, and another thread may import something.
    """
    return {name: m for name, m in sys.modules.copy().items() if m is not None}


_primitives: dict[str, Any] = {}


def primitive(name: str) -> Any | None:
    """The primitive called ``name``, or None where this JAX has none of that name."""
    if name not in _primitives:
        _primitives.update(_find_primitives())
    return _primitives.get(name)


def name_of(eqn: Any) -> str:
    """The name of the primitive of an equation, if it is JAX's; not of another one of that name."""
    return _name_of(eqn.primitive)


@functools.lru_cache(maxsize=4096)
def _name_of(prim: Any) -> str:
    name = str(prim.name)
    return name if primitive(name) is prim else ""


# Names of the primitives that call back into Python.
CALLBACKS = frozenset(("pure_callback", "io_callback", "debug_callback"))


def primitives(*names: str) -> list[Any]:
    """The primitives of these names that this version of JAX has."""
    return [p for p in map(primitive, names) if p is not None]


def explicit_sharding(array: Any) -> Any | None:
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
    if type(value) is not CONCRETE_ARRAY or type(value.sharding) is not _SINGLE:
        return None
    aval = value.aval
    return aval if aval.sharding.mesh.empty else None


def partitions(array: Any) -> tuple[int, ...] | None:
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


# --- jaxprs -------------------------------------------------------------------------------


_JAXPR_TYPES = (jex_core.Jaxpr, jex_core.ClosedJaxpr)  # one since 0.11


def open_jaxpr(jaxpr: Jaxpr) -> tuple[Any, Sequence[Any]]:
    """``(jaxpr, consts)`` of a closed jaxpr; 0.11 merged the two classes into one."""
    if hasattr(jaxpr, "jaxpr"):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, getattr(jaxpr, "consts", ())


_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr", "fwd_jaxpr", "callee", "call")


# Names of the primitives that do nothing but run the program that they hold, on their operands.
CALLS = frozenset(
    (
        *("jit", "pjit", "call", "closed_call", "core_call", "remat2", "checkpoint"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
        *("custom_vmap_call", "remat_opt"),
    )
)


def called_jaxpr(params: Mapping[str, Any]) -> Any:
    """The program that an equation calls; its parameter has a name of its own in each primitive."""
    return next(params[name] for name in _CALLED if name in params)


_LOWERED_BY_FUNCTION = mlir.lower_fun(lambda: None).__code__  # shared by all that it returns


def implementation(primitive: Any) -> tuple[Callable[..., Any], bool] | None:
    """The function in JAX that a primitive stands for, if there is one.

    That is its ``impl``, or where this only runs the primitive by itself, what ``mlir.lower_fun``
    made its lowering from (``mlir._lowerings``, since 0.4; for all platforms, those of one may be
    library calls).

    Returns:
        The function of operands and parameters, and whether it returns a list.
    """
    run = primitive.impl
    if not (isinstance(run, functools.partial) and run.func.__name__ == "apply_primitive"):
        return run, primitive.multiple_results
    if lacking(Without.INSIDE):
        return None
    rule: Any = getattr(_mlir._lowerings.get(primitive), "rule", None)
    if getattr(rule, "__code__", None) is not _LOWERED_BY_FUNCTION:
        return None
    held = inspect.getclosurevars(rule).nonlocals
    return held["fun"], held["multiple_results"]


def evaluate_jaxpr(jaxpr: Any, *args: Any) -> list[Any]:
    """Evaluate an open jaxpr without constvars (``core.eval_jaxpr``, since 0.2)."""
    return jax.core.eval_jaxpr(jaxpr, (), *args)


def is_jaxpr(value: Any) -> bool:
    """True for a jaxpr, closed or not."""
    return isinstance(value, _JAXPR_TYPES)


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of an open jaxpr, and of the programs among their parameters."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in bodies(eqn):
            yield from all_equations(body)


def is_literal(atom: Any) -> bool:
    """Whether an operand is a number that is written into its equation."""
    return isinstance(atom, jex_core.Literal)


def bodies(eqn: Any) -> Iterator[Any]:
    """The programs among the parameters of an equation, as open jaxprs."""
    for value in jax.tree_util.tree_leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
        if is_jaxpr(value):
            yield open_jaxpr(value)[0]


def variables_read(jaxpr: Any) -> Set[Any]:
    """The variables of an open jaxpr that an equation of it, or its outputs, read."""
    atoms = itertools.chain(jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns))
    return {atom for atom in atoms if not is_literal(atom)}


def without_dead_code(jaxpr: Any) -> Any:
    """An open jaxpr without equations whose outputs nothing reads, inside its calls too.

    ``jit`` does the same to what it compiles (``partial_eval.dce_jaxpr``, since 0.2.9): an
    equation that cannot be masked matters only if its result does. All inputs stay.
    """
    return partial_eval.dce_jaxpr(jaxpr, True, instantiate=True)[0]


def without_hi_primitives(closed: Jaxpr) -> Jaxpr:
    """A program whose equations name themselves: a hijax one hides its function in an object.

    ``jit`` lowers a program in the same way (``partial_eval.lower_jaxpr2``, since 0.7).
    """
    return _partial_eval.lower_jaxpr2(closed) if closed.is_high else closed


def is_shaped(aval: Any) -> bool:
    """True for the abstract value of an array (``core.ShapedArray``, since 0.2)."""
    return type(aval) is jax.core.ShapedArray


def variable(aval: Any) -> Any:
    """A new variable of a jaxpr (``core.Var`` takes an aval alone since 0.7)."""
    return jex_core.Var(aval)


def equation(invars: Sequence[Any], outvars: Sequence[Any], primitive: Any, params: Any) -> Any:
    """A new equation without effects (``core.new_jaxpr_eqn``, since 0.2)."""
    effects = jex_core.no_effects
    return jex_core.new_jaxpr_eqn(list(invars), list(outvars), primitive, params, effects)


def rebuilt_jaxpr(
    original: Jaxpr,
    constvars: Sequence[Any],
    consts: Sequence[Any],
    invars: Sequence[Any],
    outvars: Sequence[Any],
    eqns: Sequence[Any],
) -> Jaxpr:
    """A jaxpr with other variables and equations; closed over its constants if the original was.

    ``jax.extend`` can make no jaxpr from another one (``Jaxpr.replace``, since 0.4).
    """
    jaxpr = open_jaxpr(original)[0]
    lists = {
        "constvars": list(constvars),
        "invars": list(invars),
        "outvars": list(outvars),
        "eqns": list(eqns),
    }
    if len(set(_JAXPR_TYPES)) == 1:
        return jaxpr.replace(**lists, consts=list(consts))
    rebuilt = jaxpr.replace(**lists)
    return (
        original.replace(jaxpr=rebuilt, consts=list(consts)) if original is not jaxpr else rebuilt
    )


def bind_equation(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Run one equation as it stands, sub-programs included (as ``core.eval_jaxpr`` does)."""
    out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


class EquationScopes:
    """Enters the names and configuration that an equation was traced under.

    ``core.eval_jaxpr`` does it for every equation. Configurations are interned (since 0.10), and
    nearly all equations have the current one, which need not be entered again.
    """

    def __init__(self) -> None:
        self._names = jex_source_info.current_name_stack()
        self._context = _core.current_jaxpr_eqn_context()

    def __call__(self, eqn: Any) -> AbstractContextManager[Any]:
        """The scope of one equation."""
        source = eqn.source_info
        names = jex_source_info.user_context(
            source.traceback, name_stack=self._names + source.name_stack
        )
        if eqn.ctx is self._context:
            return names
        both = ExitStack()
        both.enter_context(names)
        both.enter_context(eqn.ctx.manager)
        return both


def source_line(eqn: Any, within: Sequence[Any] = ()) -> str:
    """``file:line (function)`` of the user's code that made the equation, or ``""``.

    That is the innermost line outside of JAX and of this package, whose functions stand in for some
    of JAX's while it traces (``source_info_util.user_frames``, since 0.2.21). The equations of a
    program that JAX jits by itself (``jnp.roll``) have none.

    Args:
        eqn: The equation.
        within: The equations around it, outermost first. The innermost that has a line is told.
    """
    lines = map(_line_of_equation, (eqn, *reversed(within)))
    return next(filter(None, lines), "")


def _line_of_equation(eqn: Any) -> str:
    try:
        frames = _source_info_util.user_frames(eqn.source_info.traceback)
        of_user = (f for f in frames if not f.file_name.startswith(_PACKAGE))
        return _source_info_util._summarize_frame(next(of_user))
    except Exception:  # a summary is a courtesy: never let it hide the real message
        return ""


_LONGEST_CODE = 60  # characters of an expression that is told
_STATUS = re.compile(r"[A-Z_]+: ")


def failed_running(error: Exception) -> bool:
    """Whether a call of an executable came as far as running it, and failed there.

    In a callback, for want of memory, at a NaN where ``jax_debug_nans`` looks for them. Jit's fast
    path raises what the runtime reports as a ``ValueError`` that starts with its status code; what
    has another text is about the arguments.
    """
    if isinstance(error, ValueError):
        return _STATUS.match(str(error)) is not None
    return isinstance(error, jax.errors.JaxRuntimeError | FloatingPointError)


def first_effect(jaxpr: Any) -> str:
    """The first equation of an open jaxpr that has an effect, with its line; ``""`` if none has."""
    found = next((eqn for eqn in all_equations(jaxpr) if eqn.effects and not [*bodies(eqn)]), None)
    if found is None:
        return ""
    line = source_line(found, equations_around(jaxpr, found))
    return f"{found.primitive.name} [{line}]" if line else str(found.primitive.name)


def equations_around(jaxpr: Any, eqn: Any) -> tuple[Any, ...]:
    """The equations of an open jaxpr, outermost first, whose sub-programs hold this equation."""
    for other in jaxpr.eqns:
        if other is eqn:
            return ()
        for body in bodies(other):
            if eqn in all_equations(body):
                return (other, *equations_around(body, eqn))
    return ()


def raising_line(error: BaseException) -> str:
    """``file:line (function)`` of the user's code that an error came of, or ``""``.

    That is the innermost line outside of JAX, of NumPy and of this package.
    """
    step = _raised_by_user(error)
    return "" if step is None else _place(step.tb_frame, step.tb_lineno)


def raising_code(error: BaseException) -> str:
    """What the same line does there, such as ``range(x.shape[0])``; ``""`` if it is not known."""
    step = _raised_by_user(error)
    if step is None:
        return ""
    code = step.tb_frame.f_code
    places = itertools.islice(code.co_positions(), step.tb_lasti // 2, None)
    line, last, start, end = next(places, (None,) * 4)
    if line is None or line != last or start is None or end is None:
        return ""
    text = linecache.getline(code.co_filename, line, step.tb_frame.f_globals)
    told = text.encode()[start:end].decode(errors="ignore")
    return told if len(told) <= _LONGEST_CODE else ""


def _raised_by_user(error: BaseException) -> TracebackType | None:
    found, step = None, error.__traceback__
    while step is not None:
        if _place(step.tb_frame, step.tb_lineno):
            found = step
        step = step.tb_next
    return found


def defining_line(function: Callable[..., Any]) -> str:
    """``file:line (function)`` of where a function is defined, or ``""``."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__"):
        function = getattr(type(function), "__call__", function)  # noqa: B004
    code = getattr(function, "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno} ({code.co_qualname})"


def _line_of_user(frame: FrameType | None) -> str:
    """The same of the code that runs now."""
    line = ""
    while frame is not None and not line:
        line = _place(frame, frame.f_lineno)
        frame = frame.f_back
    return line


def _place(frame: FrameType, number: int) -> str:
    """A line of the user's code in words; ``""`` for code of others."""
    code = frame.f_code
    if not (_is_of_user(frame) and _source_info_util.is_user_filename(code.co_filename)):
        return ""
    return f"{code.co_filename}:{number} ({code.co_qualname})"


# --- comparisons of symbolic sizes ---------------------------------------------------------

# Modules of JAX that decide *what* to compute by comparing sizes (``jnp.array_equal``,
# ``jnp.linalg.det``), as user code does. In the others a wrong "not equal" only misses a
# short cut, or raises where exact would broadcast.
_DECIDING = ("numpy", "scipy", "nn", "image", "random", "ops", "ode", "third_party")


_DEFINITELY_EQUAL = _core.definitely_equal.__code__


def _caller_decides(depth: int) -> bool:
    frame = sys._getframe(depth)
    name = frame.f_globals.get("__name__", "")
    if frame.f_code is _DEFINITELY_EQUAL:  # JAX means "or unknown" by it, but for one place
        caller: Any = frame.f_back  # `jax.image.resize` leaves out what has its size
        return caller.f_globals.get("__name__", "").startswith("jax._src.image.")
    if name.startswith("jax._src."):
        return name.split(".")[2] in _DECIDING
    return not (name == "jax" or name.startswith("jaxlib."))


def _caller_caches(depth: int) -> bool:
    """True for libraries that look sizes up in a cache of their own, which decides nothing.

    JAX is one: ``jit`` hashes static arguments if all others are concrete, as in
    ``jax.random.normal(constant_key, x.shape)``.
    """
    return sys._getframe(depth).f_globals.get("__name__", "").startswith(("einops.", "jax."))


def _caller_is_user(depth: int) -> bool:
    """True for code outside JAX, and for NumPy if it was called from there: JAX calls it too."""
    frame: Any = sys._getframe(depth)
    while frame.f_globals.get("__name__", "").startswith("numpy.") and frame.f_back:
        frame = frame.f_back
    return _is_of_user(frame)


def _is_of_user(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return not name.startswith(("jax.", "jaxlib.", "numpy.", "bucketjit.")) and name != "jax"


_watching = threading.local()
_hook_lock = threading.Lock()
_hook_users = 0


@contextmanager
def watch_equalities(
    found: Callable[[Any, Any], None],
    used_as_key: Callable[[Any], None],
    used_as_text: Callable[[str], None],
    raised: Callable[[Exception], None],
) -> Iterator[None]:
    """Report every ``==`` of sizes that decides something and gets an unsound False from JAX.

    ``n == 4`` on a symbolic size cannot raise (hashing uses it), so JAX says False where the
    truth is "unknown". Only a hook on ``_DimExpr.__eq__`` (since 0.4.14) sees those answers.
    Two more decide without a comparison: ``if n % 2`` (every symbolic size is true, so it is
    reported as different from 0), and ``{4: w}.get(n)`` (its hash is no int's, so it is never
    compared with the keys).
    User code may also catch what a size raises (``try: k = int(n)``), or a number computed of
    sizes, which is why that is reported too, and ask for the class of a size, which is ``int`` to
    it, as in the exact run.
    The hooks are installed while some thread watches, and report to the thread that compares.

    Args:
        found: Told of two sizes, at least one symbolic, that were taken to be different.
        used_as_key: Told of a symbolic size that was hashed.
        used_as_text: Told where user code made a text of a symbolic size, of a type that has one in
            its shape, or of a number that is computed of sizes; see `raising_line`.
        raised: Told of each error that user code gets from a size, which it may catch.
    """
    global _hook_users
    with _hook_lock:
        if _hook_users == 0:
            _install_hook()
        _hook_users += 1
    told = {
        "report": found,
        "report_key": used_as_key,
        "report_text": used_as_text,
        "report_raised": raised,
    }
    previous = {name: getattr(_watching, name, None) for name in told}
    vars(_watching).update(told)
    try:
        yield
    finally:
        vars(_watching).update(previous)
        with _hook_lock:
            _hook_users -= 1
            if _hook_users == 0:
                _remove_hook()


_plain_eq = _shape_poly._DimExpr.__eq__
_plain_hash = _shape_poly._DimExpr.__hash__


def _reporting_eq(self: Any, other: Any) -> Any:
    return _reported_answer(self, other)


def _reporting_ne(self: Any, other: Any) -> Any:
    answer = _reported_answer(self, other)
    return not answer if isinstance(answer, bool) else ~answer


def _reported_answer(size: Any, other: Any) -> Any:
    """What ``size == other`` says, to code that is three frames up."""
    report = getattr(_watching, "report", None)
    if report is not None and isinstance(other, jax.Array | np.ndarray):
        return _equal_to_array(size, other)
    answer = _plain_eq(size, other)
    if report is not None and answer is False and _caller_decides(3):
        report(size, other)
    return answer


def _equal_to_array(size: Any, array: Any) -> Any:
    """As an int compares: elementwise, where JAX says that a size is no array."""
    if isinstance(array, np.ndarray):
        equal = [_reported_equal(size, x) for x in array.ravel().tolist()]
        return np.array(equal, bool).reshape(array.shape)
    return jax.numpy.equal(_core.dimension_as_value(size), array)


def _reported_equal(size: Any, number: Any) -> bool:
    answer = _plain_eq(size, number)
    if answer is False:
        _watching.report(size, number)
    return answer


def _raising(plain: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of sizes that reports what it raises for user code."""

    @functools.wraps(plain)
    def reporting(*operands: Any) -> Any:
        try:
            return plain(*operands)
        except InconclusiveDimensionOperation as error:
            _report_raised(error)
            raise

    return reporting


# Marks of numbers that are computed of sizes; the second is for the nearest to that of Python.
NUMBER_OF_SIZES, ROUNDED_ONCE = "bucketjit: a number of sizes", "bucketjit: the same, rounded once"
_LEAST_FLOAT, _MOST_FLOAT = map(float, (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


def _marked(value: Any, is_rounded_once: bool) -> Any:
    """Say of an array that the unpadded run has a number of Python in its place."""
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, np.inexact):
        return checkpoint_name(value, ROUNDED_ONCE if is_rounded_once else NUMBER_OF_SIZES)
    return value


def _is_power_of_2(number: Any) -> bool:
    return isinstance(number, float) and abs(math.frexp(number)[0]) == 0.5


def _is_number(other: Any) -> bool:
    return isinstance(other, numbers.Number) and not isinstance(other, numbers.Integral)


def _is_left_alone(other: Any) -> bool:
    """Whether a hook has nothing to say: nobody watches, or the operation is one of arrays."""
    return getattr(_watching, "report", None) is None or isinstance(other, jax.Array | np.ndarray)


def _smooth(name: str) -> Callable[..., Any]:
    """An operation of sizes and numbers, the result of which is as good as 24 bits are.

    With 64-bit types it is exact. Numbers that no float32 holds are refused.
    """
    plain = getattr(_shape_poly._DimExpr, name)
    divides = name == "__truediv__"

    @functools.wraps(plain)
    def operation(self: Any, other: Any) -> Any:
        if _is_left_alone(other):
            return plain(self, other)
        is_whole = isinstance(other, int | np.integer | _shape_poly._DimExpr)
        if not is_whole and not _is_number(other):
            return _or_report(plain, self, other)
        if divides or name == "__rtruediv__":
            if divides and type(other) in (int, float) and other == 0:  # NumPy's give infinity
                raise ZeroDivisionError("division by zero")
            _report_zero(other if divides else self)
        elif is_whole:
            return plain(self, other)
        if not _caller_is_user(2) or jax.dtypes.canonicalize_dtype(float) == np.float64:
            return plain(self, other)
        if not is_whole and other and not _LEAST_FLOAT <= abs(other) <= _MOST_FLOAT:
            _fail(TypeError(f"a size and the number {other!r} are used as numbers of Python"))
        is_once = is_whole or ("add" not in name and "sub" not in name and _is_power_of_2(other))
        return _marked(_or_report(plain, self, other), is_once)

    return operation


def _whole(name: str) -> Callable[..., Any]:
    """A division with a whole result. By numbers of Python it jumps, so they are refused."""
    plain = getattr(_shape_poly._DimExpr, name)
    divides = not name.startswith("__r")

    @functools.wraps(plain)
    def operation(self: Any, other: Any) -> Any:
        if _is_left_alone(other):
            return plain(self, other)
        if _is_number(other):
            _fail(TypeError(f"a size is divided by, or into, the number {other!r}"))
        _report_zero(other if divides else self)
        return plain(self, other)

    return operation


def _report_zero(divisor: Any) -> None:
    """A size is divided by, which JAX takes for different from 0."""
    if isinstance(divisor, _shape_poly._DimExpr) and not is_positive(divisor):
        _watching.report(divisor, 0)


def _or_report(plain: Callable[..., Any], *operands: Any) -> Any:
    """Run an operation, to report what it raises for code that is three frames up."""
    try:
        return plain(*operands)
    except (TypeError, ValueError) as error:
        _report_raised(error, 4)
        raise


def _power(self: Any, power: Any, modulo: Any = None) -> Any:
    if _is_left_alone(power):
        return _plain_pow(self, power, modulo)
    return _or_report(_plain_pow, self, power, modulo)


def _exponent(self: Any, base: Any, modulo: Any = None) -> Any:
    """``2 ** n`` wraps, and ``0.999 ** n`` is off by more than a rounding."""
    if _is_left_alone(base) or not _caller_is_user(2):
        return _plain_rpow(self, base, modulo)
    _fail(TypeError(f"a size is the exponent of {base!r}"))


def _missing(name: str) -> Callable[..., Any]:
    """An operator that ints have and sizes have not."""

    def operator(self: Any, *others: Any) -> Any:
        if any(isinstance(x, jax.Array | np.ndarray) for x in others):
            return NotImplemented
        _fail(TypeError(f"a symbolic size has no {name}"))

    return operator


def _no_index(self: Any) -> int:
    _fail(TypeError("'_DimExpr' object cannot be interpreted as an integer"))


class LengthIsInt(TypeError):
    """``len(x)`` of an array whose axis 0 is open: Python wants an int."""


_plain_len = jax.core.Tracer.__len__


def _length(self: Any) -> Any:
    size = _plain_len(self)
    if isinstance(size, _shape_poly._DimExpr) and getattr(_watching, "report", None) is not None:
        _fail(LengthIsInt("len() of an array is always an int"))
    return size


class SizeAttributeError(AttributeError):
    """User code asks a symbolic size for an attribute that it does not have."""


def _no_attribute(self: Any, name: str) -> Any:
    error = SizeAttributeError(f"a symbolic size has no attribute {name!r}")
    if hasattr(int, name) or isinstance(getattr(np, name, None), np.ufunc):  # which asks for it
        _report_raised(error)
    raise error


def _fail(error: Exception) -> NoReturn:
    """Raise from a hook, and tell of it if the code that is three frames up is the user's."""
    _report_raised(error, 4)
    raise error


def _report_raised(error: Exception, depth: int = 3) -> None:
    """Tell of what a hook is about to raise, if the code so many frames up is the user's."""
    report = getattr(_watching, "report_raised", None)
    if report is not None and _caller_is_user(depth):
        report(error)


def _class_of_size(self: Any) -> type:
    """``int`` for user code that is being traced: it has to take the branch that exact takes."""
    if getattr(_watching, "report", None) is not None and _caller_is_user(2):
        return int
    return _shape_poly._DimExpr


def _let_sizes_pass_for_ints() -> None:
    """Make ``isinstance(size, int)`` ask `_class_of_size`.

    ``isinstance`` looks at ``__class__`` where the type does not answer. To assign it to a class
    would change the class of the class; only its own dict, behind the proxy, takes a property.
    """
    (own,) = gc.get_referents(vars(_shape_poly._DimExpr))
    own["__class__"] = property(_class_of_size)
    # An ordinary change of the class drops what the interpreter has cached of it.
    setattr(_shape_poly._DimExpr, "_passes_for_int", True)  # noqa: B010


def _reporting_bool(self: Any) -> bool:
    # Anyone decides here, JAX too: the gradient of rfft asks ``not n % 2``.
    report = getattr(_watching, "report", None)
    if report is not None and not is_positive(self):
        report(self, 0)
    return True


def is_positive(size: Any) -> bool:
    """Whether a size is at least 1 whatever its variables are."""
    try:
        return bool(size >= 1)
    except InconclusiveDimensionOperation:
        return False


def _reporting_hash(self: Any) -> int:
    report = getattr(_watching, "report_key", None)
    if report is not None and _caller_decides(2) and not _caller_caches(2):
        report(self)
    return _plain_hash(self)


def _text_of(
    kind: type, name: str, tells_a_size: Callable[[Any], bool] = lambda value: True
) -> Callable[..., str]:
    """A text that is reported if it is made by user code, of what tells a size."""
    plain = getattr(kind, name)

    @functools.wraps(plain)
    def text(self: Any, *args: Any, **kwargs: Any) -> str:
        report = getattr(_watching, "report_text", None)
        if report is not None and _caller_is_user(2) and tells_a_size(self):
            report(_line_of_user(sys._getframe(1)))
        told: str = plain(self, *args, **kwargs)
        return told

    return text


_plain_pow, _plain_rpow = _shape_poly._DimExpr.__pow__, _shape_poly._DimExpr.__rpow__
_COMPARISONS = ("__ge__", "__le__", "__gt__", "__lt__", "__int__")
_SMOOTH = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv")
_WHOLE = ("floordiv", "rfloordiv", "mod", "rmod", "divmod", "rdivmod")
_ONLY_OF_INTS = (
    *("lshift", "rlshift", "rshift", "rrshift", "and", "rand", "or", "ror", "xor", "rxor"),
    *("invert", "round", "trunc", "ceil", "floor", "float", "complex", "abs", "pos"),
)
_HOOKS: dict[str, Callable[..., Any]] = {
    "__eq__": _reporting_eq,
    "__ne__": _reporting_ne,
    "__bool__": _reporting_bool,
    "__hash__": _reporting_hash,
    "__str__": _text_of(_shape_poly._DimExpr, "__str__"),
    "__repr__": _text_of(_shape_poly._DimExpr, "__repr__"),
    "__index__": _no_index,
    "__getattr__": _no_attribute,
    "__pow__": _power,
    "__rpow__": _exponent,
    **{name: _raising(getattr(_shape_poly._DimExpr, name)) for name in _COMPARISONS},
    **{name: _smooth(name) for name in (f"__{name}__" for name in _SMOOTH)},
    **{name: _whole(name) for name in (f"__{name}__" for name in _WHOLE)},
    **{
        name: _missing(name)
        for name in (f"__{name}__" for name in _ONLY_OF_INTS)
        if not hasattr(_shape_poly._DimExpr, name)
    },
}


def _type_hooks(kind: Any) -> dict[str, Callable[..., Any]]:
    """Hooks of a class that tells shapes: what user code compares or looks up by it, it decides by.

    JAX compares and hashes types for its own ends all the time, so only a caller that is the user's
    counts; the shapes are then compared, or hashed, once more from here, as if by the user.
    """
    plain_eq, plain_hash = kind.__eq__, kind.__hash__

    def eq(self: Any, other: Any) -> Any:
        if _is_watched_user() and self is not other and type(other) is type(self):
            _ = self.shape == other.shape
        return plain_eq(self, other)

    def hashed(self: Any) -> int:
        if _is_watched_user():
            hash(self.shape)
        return plain_hash(self)

    names = ("__repr__", "__str__", "str_short")
    own = [name for name in names if isinstance(getattr(kind, name, None), FunctionType)]
    texts = {name: _text_of(kind, name, _has_open_shape) for name in own}
    return {"__eq__": eq, "__hash__": hashed, **texts}


def _has_open_shape(kind: Any) -> bool:
    return any(map(is_symbolic_dim, kind.shape))


def _is_watched_user() -> bool:
    return getattr(_watching, "report", None) is not None and _caller_is_user(3)


def _is_number_of_sizes(value: Any) -> bool:
    """Whether a tracer is computed of sizes alone: the unpadded run has a number in its place."""
    if getattr(value.aval, "shape", None) != ():
        return False
    seen: set[int] = set()
    pending, has_size = [value], False
    while pending:
        tracer = pending.pop()
        if not isinstance(tracer, jax.core.Tracer) or id(tracer) in seen:
            continue
        seen.add(id(tracer))
        if not isinstance(tracer, partial_eval.DynamicJaxprTracer):
            return False
        if tracer.parent is not None:
            has_size |= tracer.parent.primitive.name == "dim_as_value"
            pending += tracer.parent.in_tracers
        elif not isinstance(tracer.val, jex_core.Literal):
            const = tracer._trace.frame.constvar_to_val.get(tracer.val)
            if const is None:  # an argument
                return False
            pending.append(const)
    return has_size


def _convertible(name: str) -> Callable[..., Any]:
    """What a number of Python answers, and a tracer refuses to: user code may catch the refusal."""
    plain = getattr(jax.core.Tracer, name)

    @functools.wraps(plain)
    def reporting(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return plain(self, *args, **kwargs)
        except (TypeError, AttributeError) as error:
            if getattr(_watching, "report", None) is not None and _is_number_of_sizes(self):
                _report_raised(error)
            raise

    return reporting


_OF_NUMBERS = ("float", "int", "bool", "complex", "round", "hash", "array", "getattr")
_EVERY_HOOK: dict[type, dict[str, Callable[..., Any]]] = {
    _shape_poly._DimExpr: _HOOKS,
    jax.core.ShapedArray: _type_hooks(jax.core.ShapedArray),
    jax.ShapeDtypeStruct: _type_hooks(jax.ShapeDtypeStruct),
    jax.core.Tracer: {
        # The text of an array is one of a tracer in the unpadded run, too.
        "__repr__": _text_of(jax.core.Tracer, "__repr__", _is_number_of_sizes),
        "__len__": _length,
        **{name: _convertible(name) for name in (f"__{name}__" for name in _OF_NUMBERS)},
    },
}
_PLAIN = {
    kind: {name: vars(kind).get(name) for name in hooks} for kind, hooks in _EVERY_HOOK.items()
}


def _install_hook() -> None:
    if not hasattr(_shape_poly._DimExpr, "_passes_for_int"):
        _let_sizes_pass_for_ints()
    for kind, hooks in _EVERY_HOOK.items():
        for name, hook in hooks.items():
            setattr(kind, name, hook)


def _remove_hook() -> None:
    for kind, plain_ones in _PLAIN.items():
        for name, plain in plain_ones.items():
            if plain is None:
                delattr(kind, name)
            else:
                setattr(kind, name, plain)


# --- sub-programs of particular primitives -------------------------------------------------


def stage(fn: Callable[..., Any], operands: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Trace ``fn`` at these operands: an open jaxpr, and the values of its leading inputs.

    What ``fn`` closes over (run-time sizes, say) becomes those inputs, as primitives such as
    ``remat`` want it. ``jax.make_jaxpr`` leaves it in constvars, and only
    ``partial_eval.convert_constvars_jaxpr`` (since 0.2) moves it in every version.
    """
    closed = jax.make_jaxpr(fn)(*operands)
    return _partial_eval.convert_constvars_jaxpr(open_jaxpr(closed)[0]), list(closed.consts)


def scan_arity(params: Mapping[str, Any]) -> tuple[int, int]:
    """Number of constants and of carried values of a ``scan`` equation.

    0.10 keeps two ints; since 0.12 they are the lengths of the groups of ``ft_in``.
    """
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def expand_hi_primitive(prim: Any, avals: Sequence[Any]) -> Any:
    """The jaxpr of what a ``call_hi_primitive`` (since 0.12) expands to at these avals.

    The expansion is the primitive's own definition; it takes and returns trees that only its
    ``in_tree`` and ``out_tree`` describe.
    """

    def flat(*values: Any) -> list[Any]:
        return jax.tree_util.tree_leaves(
            prim.expand(*jax.tree_util.tree_unflatten(prim.in_tree, values))
        )

    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    return jax.make_jaxpr(flat)(*structs)


def fft_name(fft_type: Any) -> str:
    """Name of the kind of a Fourier transform (``"RFFT"``); the enum itself is not public."""
    return fft_type.name


# --- symbolic sizes where JAX wants ints ----------------------------------------------------


class _OperatorOfSizes:
    """The ``operator`` module, with an ``index`` that lets symbolic sizes through."""

    def __getattr__(self, name: str) -> Any:
        return getattr(operator, name)

    @staticmethod
    def index(value: Any) -> Any:
        return value if is_symbolic_dim(value) else operator.index(value)


def convolution_padding() -> list[tuple[Any, str, Any]]:
    """``(module, name, replacement)`` that lets convolutions have symbolic explicit padding.

    The primitive takes it, and ``padding="SAME"`` makes it, but ``conv_general_dilated``
    (since 0.4) passes explicit padding through ``operator.index``. So does every gradient of a
    convolution, which therefore does not trace with symbolic spatial sizes.
    """
    return [(_convolution, "operator", _OperatorOfSizes())]


def has_ordered_effect(eqn: Any) -> bool:
    """True if the equation has an effect that JAX keeps in program order.

    ``effects.ordered_effects`` (since 0.3.10) is the only list of them.
    """
    return bool(_effects.ordered_effects.filter_in(eqn.effects))


def fft_lengths() -> list[tuple[Any, str, Any]]:
    """``(module, name, replacement)`` that lets ``jnp.fft`` have symbolic lengths.

    As with convolutions, the primitive takes them and ``operator.index`` does not.
    """
    return [(_numpy_fft, "operator", _OperatorOfSizes())]


def real_fft_transposes() -> list[tuple[Any, str, Any]]:
    """``(module, name, replacement)`` for gradients of real transforms of symbolic length.

    JAX's own (``lax.fft``, since 0.2) ask in Python whether the length is even, which makes one
    program for even lengths and one for odd.
    """
    to_half, from_half = _lax_fft._rfft_transpose, _lax_fft._irfft_transpose

    def weight(half: Any, lengths: Any) -> Any:
        """Twice for frequencies that stand for two; the last axis of ``half`` is the half."""
        k = jax.lax.broadcasted_iota(np.int32, half.shape, half.ndim - 1)
        single = (k == 0) | (2 * k == _core.dimension_as_value(lengths[-1]))
        return jax.numpy.where(single, 1.0, 2.0).astype(half.dtype)

    def rfft_transpose(t: Any, lengths: Any) -> Any:
        if not is_symbolic_dim(lengths[-1]):
            return to_half(t, lengths)
        spectrum = jax.lax.conj(t) / weight(t, lengths)
        return _product(lengths) * jax.lax.fft(spectrum, "IRFFT", lengths)

    def irfft_transpose(t: Any, lengths: Any) -> Any:
        if not is_symbolic_dim(lengths[-1]):
            return from_half(t, lengths)
        half = jax.lax.fft(t, "RFFT", lengths)
        return jax.lax.conj(weight(half, lengths) * half / _product(lengths))

    return [
        (_lax_fft, "_rfft_transpose", rfft_transpose),
        (_lax_fft, "_irfft_transpose", irfft_transpose),
    ]


def _product(sizes: Sequence[Any]) -> Any:
    total = 1
    for size in sizes:
        total = total * size
    return _core.dimension_as_value(total)


def lengths() -> list[tuple[Any, str, Any]]:
    """``(module, name, replacement)`` that lets ``jax.numpy`` ask ``len`` of an open axis.

    ``jnp.convolve``, ``correlate`` and ``digitize`` compare ``len(x)``, which Python insists
    must be an int. The name is looked up in the module's globals (``lax_numpy``, since 0.1)
    before the builtins.
    """

    def length(x: Any) -> Any:
        shape = getattr(x, "shape", ())
        return shape[0] if shape and is_symbolic_dim(shape[0]) else len(x)

    return [(_lax_numpy, "len", length)]


def inferred_sizes() -> list[tuple[Any, str, Any]]:
    """``(module, name, replacement)`` for the size that a reshape to ``(2, -1)`` leaves open.

    JAX divides by -2 and takes the result negative (``core.divide_shape_sizes``, since 0.2). To it
    ``-floordiv(n, -2)`` is not the ``n // 2`` that the user wrote elsewhere.
    """
    plain = _core.divide_shape_sizes

    def divided(before: Sequence[Any], after: Sequence[Any]) -> Any:
        sizes = (*before, *after)
        closed = [d for d in sizes if not is_symbolic_dim(d)]
        if len(closed) == len(sizes) or 0 in closed or -1 not in closed:
            return plain(before, after)
        return -plain(before, [d for d in after if is_symbolic_dim(d) or d != -1])

    return [(_core, "divide_shape_sizes", divided)]


def fresh_dimension(like: Any, name: str) -> Any:
    """A new dimension variable in the scope of a symbolic size (its ``scope``, since 0.4.24)."""
    return jax.export.symbolic_shape(name, scope=like.scope)[0]


def open_scans() -> list[tuple[Any, str, Any]]:
    """``(module, name, replacement)`` for scans of a symbolic length over nothing else.

    ``lax.scan(f, c, None, length=n)`` insists on an int (``loops.scan``, since 0.1), but scans
    over an array of as many steps, whose elements nobody looks at.
    """
    original = jax.lax.scan

    @functools.wraps(original)
    def scan(f: Any, init: Any, xs: Any = None, length: Any = None, *more: Any, **kw: Any) -> Any:
        if not is_symbolic_dim(length):
            return original(f, init, xs, length, *more, **kw)
        if jax.tree_util.tree_leaves(xs):
            return original(f, init, xs, None, *more, **kw)
        steps = jax.lax.broadcasted_iota(np.int32, (length,), 0)
        return original(lambda carry, _: f(carry, xs), init, steps, *more, **kw)

    return [(module, name, scan) for module, name in _holding("scan", original)]


def _holding(name: str, value: Any) -> list[tuple[Any, str]]:
    """The modules that have a function under its name: user code may have imported it."""
    modules = _modules().values()
    return [(m, name) for m in modules if getattr(m, "__dict__", {}).get(name) is value]


def open_searches() -> list[tuple[Any, str, Any]]:
    """``(module, name, replacement)`` for ``jnp.searchsorted`` in an array of symbolic size.

    JAX unrolls the binary search into as many steps as the size has bits, a Python int
    (``numpy.hijax``, since 0.10). This one counts the bits at run time, and takes the same steps.
    """

    def searching(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def search(array: Any, query: Any, /, **options: Any) -> Any:
            dimension, batch_dims = options.get("dimension", 0), options.get("batch_dims", 0)
            if (dimension, batch_dims) != (0, 0) or not is_symbolic_dim(array.shape[0]):
                return original(array, query, **options)
            return _search(array, query, options.get("side", "left"), options["dtype"])

        return search

    names = ("searchsorted", "searchsorted_via_expand")
    found = [(name, vars(_numpy_hijax).get(name)) for name in names]
    return [(_numpy_hijax, name, searching(f)) for name, f in found if f is not None]


def _search(array: Any, query: Any, side: str, dtype: Any) -> Any:
    compare = _lax._sort_le_comparator if side == "left" else _lax._sort_lt_comparator
    array, query = jax.lax.stop_gradient(array), jax.lax.stop_gradient(query)
    size = _core.dimension_as_value(array.shape[0]).astype(np.int32)

    def halve(_: Any, ends: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = ends
        middle = low + (high - low) // 2
        left = compare(query, array.at[middle].get(mode="clip"))
        return jax.numpy.where(left, low, middle), jax.numpy.where(left, middle, high)

    ends = (jax.numpy.zeros(query.shape, np.int32), jax.numpy.full(query.shape, size))
    return jax.lax.fori_loop(0, 32 - jax.lax.clz(size), halve, ends)[1].astype(dtype)


def open_shuffles() -> list[tuple[Any, str, Any]]:
    """``(module, name, replacement)`` for permutations of an axis of symbolic size.

    JAX shuffles in rounds, one more for each power of the size, and asks for a Python int
    (``random.core``, since 0.1). Comparisons with the sizes where the number changes do as well:
    they become guards of the program. Counts as arguments become arrays of as many numbers.
    """
    shuffle, permutation, choice = _random._shuffle, jax.random.permutation, jax.random.choice

    @functools.wraps(shuffle)
    def open_shuffle(key: Any, x: Any, axis: int) -> Any:
        if not is_symbolic_dim(x.size):
            return shuffle(key, x, axis)
        rounds = 0
        while x.size > _largest_shuffled_in(rounds):
            rounds += 1
        for _ in range(rounds):
            key, subkey = jax.random.split(key)
            _, x = jax.lax.sort_key_val(jax.random.bits(subkey, x.shape, np.uint32), x, axis)
        return x

    @functools.wraps(permutation)
    def open_permutation(key: Any, x: Any, *more: Any, **options: Any) -> Any:
        return permutation(key, _numbers(x), *more, **options)

    @functools.wraps(choice)
    def open_choice(key: Any, a: Any, *more: Any, **options: Any) -> Any:
        return choice(key, _numbers(a), *more, **options)

    return [
        (_random, "_shuffle", open_shuffle),
        *((m, n, open_permutation) for m, n in _holding("permutation", permutation)),
        *((m, n, open_choice) for m, n in _holding("choice", choice)),
    ]


def _numbers(count: Any) -> Any:
    return jax.numpy.arange(count) if is_symbolic_dim(count) else count


@functools.lru_cache(maxsize=64)
def _largest_shuffled_in(rounds: int) -> int:
    """The largest size for which JAX's formula gives this many rounds."""

    def needed(size: int) -> int:
        return int(np.ceil(3 * np.log(max(1, size)) / np.log(np.iinfo(np.uint32).max)))

    low, high = 1, 1 << 62
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= rounds else (low, middle)
    return low


def open_reductions() -> list[tuple[Any, str, Any]]:
    """``(module, name, replacement)`` for derivatives of products and of other reductions.

    JAX halves the reduced axes again and again (``lax._reduce_jvp``, since 0.2), which it can do
    only where no size at all is symbolic. Closed axes are halved in the same way here. A product
    over an open axis is the last of its running products.
    """
    original = _lax._reduce_jvp

    def reduce_jvp(reducer: Any, init: Any, primals: Any, tangents: Any, axes: Any) -> Any:
        shape = primals[0].shape
        opened = [a for a in axes if is_symbolic_dim(shape[a])]
        if not any(map(is_symbolic_dim, shape)):
            return original(reducer, init, primals, tangents, axes)
        if opened and getattr(reducer, "__module__", "") != "jax._src.lax.lax":
            # JAX counts the start in now and then, by the size: only the run itself can tell.
            return original(reducer, init, primals, tangents, axes)
        kept = [a for a in range(len(shape)) if a not in axes]

        def flat(x: Any) -> Any:
            for a in opened:
                running = jax.lax.cumprod(x, axis=a)
                x = jax.lax.dynamic_slice_in_dim(running, x.shape[a] - 1, 1, axis=a)
            x = jax.lax.transpose(x, (*axes, *kept))
            return jax.lax.reshape(x, (math.prod(x.shape[: len(axes)]), *x.shape[len(axes) :]))

        rows = reducer
        for _ in range(len(kept) + 1):
            rows = jax.vmap(rows)

        def halved(*xs: Any) -> Any:
            xs = tuple(map(flat, xs))
            while (n := xs[0].shape[0]) > 1:
                half = (n + 1) // 2
                first = [x[:half] for x in xs]
                second = [x[half:] for x in xs]
                if n % 2:
                    config = [(0, 1, 0), *[(0, 0, 0)] * len(kept)]
                    pairs = zip(second, init, strict=True)
                    second = [jax.lax.pad(x, i, config) for x, i in pairs]
                xs = rows(*first, *second)
            return tuple(jax.lax.squeeze(x, (0,)) for x in xs)

        return jax.jvp(halved, tuple(primals), tuple(tangents))

    return [(_lax, "_reduce_jvp", reduce_jvp)]


def open_debug_callbacks() -> list[tuple[Any, Any, Any]]:
    """``(table, primitive, replacement)`` for debugging callbacks mapped over an open axis.

    JAX makes one equation for every row (``batching.fancy_primitive_batchers``,
    since 0.4.31); an open axis is scanned.
    """

    def rolled(prim: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def rule(axis: Any, args: Any, dims: Any, **params: Any) -> Any:
            mapped = [i for i, d in enumerate(dims) if d is not None]
            if not (mapped and is_symbolic_dim(axis.size)):
                return original(axis, args, dims, **params)

            def step(carry: Any, rows: Any) -> Any:
                every = list(args)
                for i, row in zip(mapped, rows, strict=True):
                    every[i] = row
                prim.bind(*every, **params)
                return carry, None

            fronted = [jax.numpy.moveaxis(args[i], dims[i], 0) for i in mapped]
            jax.lax.scan(step, None, fronted)
            return [], ()

        return rule

    table = batching.fancy_primitive_batchers
    found = primitives("debug_callback", "debug_print")
    return [(table, p, rolled(p, table[p])) for p in found]


def open_constants() -> list[tuple[Any, str, Any]]:
    """``(module, name, replacement)`` that lets a symbolic size be a constant beside an array.

    ``jnp.take(mode="wrap")`` and others make one by ``lax._const`` (since 0.1) of NumPy's.
    """
    original = _lax._const

    def const(example: Any, value: Any) -> Any:
        if not is_symbolic_dim(value):
            return original(example, value)
        weak = bool(jax.typeof(example).weak_type)
        return with_type(_core.dimension_as_value(value), jax.typeof(example).dtype, weak)

    return [(_lax, "_const", const)]


def open_index_types() -> list[tuple[Any, str, Any]]:
    """``(module, name, replacement)``: indices into a symbolic axis have the exact run's dtype.

    JAX takes the default integer (``lax.utils``, since 0.7), which is int64 with x64 enabled; for
    every size that an executable here can have, the exact run takes int32.
    """

    def for_dim(original: Callable[..., Any]) -> Callable[..., Any]:
        def dtype(size: Any, *, signed: bool) -> Any:
            if is_symbolic_dim(size):
                return np.dtype(np.int32 if signed else np.uint32)
            return original(size, signed=signed)

        return dtype

    def for_shape(original: Callable[..., Any]) -> Callable[..., Any]:
        def dtype(shape: Any, *, signed: bool) -> Any:
            return original([d for d in shape if not is_symbolic_dim(d)], signed=signed)

        return dtype

    return [
        (_lax_utils, "int_dtype_for_dim", for_dim(_lax_utils.int_dtype_for_dim)),
        (_lax_utils, "int_dtype_for_shape", for_shape(_lax_utils.int_dtype_for_shape)),
    ]


def clamped_indices() -> list[tuple[Any, str, Any]]:
    """``(module, name, replacement)``: ``x[i]`` with axes that stay symbolic clamps as of a size.

    JAX makes a `lax.dynamic_slice` of it where the size is known (``numpy.indexing``, since 0.8),
    and a gather that promises to stay inside, whose derivative drops what is outside, where it is
    not. A gather that clamps does what the slice does.
    """
    original = _indexing.rewriting_take
    mode_of = jax.lax.GatherScatterMode.from_any
    clamping = (None, jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS)

    @functools.wraps(original)
    def take(arr: Any, idx: Any, *, mode: Any = None, **options: Any) -> Any:
        parsed = None if mode is None else mode_of(mode)
        strategy = options.get("strategy", _indexing.IndexingStrategy.AUTO)
        if (
            parsed in clamping
            and strategy is _indexing.IndexingStrategy.AUTO
            and any(map(is_symbolic_dim, arr.shape))
        ):
            indexer = _indexing.NDIndexer.from_raw_indices(idx, arr.shape)
            if all(map(_slices_one, indexer.indices)):
                if _flags.jax_check_static_indices:
                    by_end = options.get("normalize_indices", True)
                    indexer.validate_static_indices(normalize_indices=by_end)
                mode = "clip"
        return original(arr, idx, mode=mode, **options)

    return [(_indexing, "rewriting_take", take)]


def _slices_one(part: Any) -> bool:
    """Whether part of an index may be part of that of a `lax.dynamic_slice`."""
    kinds = _indexing.IndexType
    if part.typ is kinds.ARRAY:
        return np.shape(part.index) == ()
    if part.typ is kinds.DYNAMIC_SLICE:
        return bool(part.index.stride == 1)
    return part.typ is not kinds.BOOLEAN and getattr(part.index, "step", None) in (None, 1, -1)


def repeats_by_size(error: BaseException) -> bool:
    """Whether an error comes of ``[x] * n`` with a symbolic size, as in ``for row in array``.

    JAX raises something else about it (``shape_poly._DimExpr.__rmul__``, 0.10 and 0.12).
    """
    kinds = TypeError | AttributeError | InconclusiveDimensionOperation
    if not isinstance(error, kinds):
        return False
    step = _raised_by_user(error)
    if step is not None:
        operation = dis.opname[step.tb_frame.f_code.co_code[step.tb_lasti]]
        if operation in ("GET_ITER", "FOR_ITER"):
            return True
    by_size = _shape_poly._DimExpr.__rmul__.__code__
    return any(frame.f_code is by_size for frame, _ in traceback.walk_tb(error.__traceback__))


def associative_scans() -> tuple[Callable[..., Any], list[Any]]:
    """``lax.associative_scan`` and the modules that hold it under its name.

    JAX calls it by its name in ``control_flow.loops`` for the derivatives of ``cumprod``,
    ``cummax`` and the like.
    """
    original = jax.lax.associative_scan
    return original, [module for module, _ in _holding("associative_scan", original)]


class _TooLong(Exception):
    """A comparison of sizes takes too many steps."""


# Steps of one comparison of sizes, of which most take fewer than 100; and of those that follow
# where several have taken too many.
_MOST_STEPS, _FEWER_STEPS, _PATIENCE = 2000, 100, 3
_deciding = threading.local()


_MOST_CONSTRAINTS = 300  # beyond which nothing is derived from them


def brief_decisions() -> list[tuple[Any, str, Any]]:
    """``(class, name, replacement)`` for the procedure that compares symbolic sizes.

    It tries all ways to combine an expression with what is known of its terms, and each constraint
    with all others (``shape_poly_decision``, since 0.4.27), which takes minutes for sizes that are
    halved five times over, each half compared with 1. What takes too long is not known, as far as
    anybody else can tell: then the sizes at hand decide, and a guard is kept.
    """
    owner = _decision._DecisionByElimination
    combine: Callable[..., set[Any]] = owner.combine_constraint_with_existing
    original = owner._bounds_for_sorted_terms

    @functools.wraps(combine)
    def combined(self: Any, *constraint: Any) -> set[Any]:
        known = sum(map(len, self._expr_constraints.values()))
        return set() if known > _MOST_CONSTRAINTS else combine(self, *constraint)

    given_up: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @functools.wraps(original)
    def bounds(self: Any, scope: Any, terms: Any, i: int, precision: Any) -> tuple[Any, Any]:
        left = getattr(_deciding, "left", None)
        if left is None:
            is_late = given_up.get(scope, 0) >= _PATIENCE
            _deciding.left = _FEWER_STEPS if is_late else _MOST_STEPS
            try:
                return original(self, scope, terms, i, precision)
            except _TooLong:
                given_up[scope] = given_up.get(scope, 0) + 1
                return -math.inf, math.inf
            finally:
                _deciding.left = None
        if left == 0:
            raise _TooLong
        _deciding.left = left - 1
        return original(self, scope, terms, i, precision)

    return [
        (owner, "_bounds_for_sorted_terms", bounds),
        (owner, "combine_constraint_with_existing", combined),
    ]


def weak_finalizers() -> list[tuple[Any, str, Any]]:
    """``(module, name, replacement)`` for what lets go of a trace's constants, with their tracers.

    JAX has ``weakref.finalize`` hold the trace as long as the tracer of a constant is there, which
    the trace holds in turn: one that fails, by a decision about sizes, say, would stay for ever,
    and the arrays that the function closed over with it (``partial_eval.finalize``, 0.10 and 0.12).
    """

    def finalize(tracer: Any, method: Any, *args: Any) -> Any:
        weak = weakref.WeakMethod(method)

        def called(*args: Any) -> None:
            alive = weak()
            if alive is not None:
                alive(*args)

        return weakref.finalize(tracer, called, *args)

    return [(_partial_eval, "finalize", finalize)]


# --- executables in files -------------------------------------------------------------------


def jaxlib_version() -> str:
    """The version of jaxlib, which no module of ``jax`` tells (``jaxlib.__version__``)."""
    return str(jaxlib.__version__)


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


def device_name(device: jax.Device) -> str:
    """The platform and number of a device, by which another process knows it."""
    return f"{device.platform}:{device.id}"


def context_of_keys() -> Sequence[Any]:
    """`trace_context`, in values that are equal in another process.

    The environment of named axes is an object of its own (``core.AxisEnv``, since 0.4.36); outside
    of every mapping it is the empty one. A device (``jax.default_device``) is told by its number.
    """

    def told(value: Any) -> Any:
        if value is _core.top_axis_env:
            return "no axes"
        return device_name(value) if isinstance(value, jax.Device) else value

    return list(map(told, cast(tuple[Any, ...], trace_context())))


def looks_for_nans() -> bool:
    """Whether JAX looks for NaNs or infinities in results (the flags are not typed)."""
    return bool(_flags.jax_debug_nans or _flags.jax_debug_infs)


_TELLING = frozenset(
    {
        "jax._src.export.shape_poly._DimExpr",
        "jax._src.layout.AutoLayout",
        "jax._src.layout.Layout",
        "jax._src.memory.Space",
        "jax._src.mesh.AbstractMesh",
        "jax._src.named_sharding.UnspecifiedValue",
        "jax._src.partition_spec.PartitionSpec",
        "jax._src.core.ManualAxisType",
        "jax._src.sharding_impls.UnspecifiedValue",
    }
)


def parts_of(value: Any) -> Sequence[Any] | None:
    """What a value of JAX's is made of, or None where `text_of` may know it.

    Literals know their dtype (``literals.TypedInt``, since 0.7), and some parameters are
    dataclasses, trees (``flattree``, since 0.9) or hijax primitives (``numpy.hijax``, since 0.10).
    """
    kind = type(value)
    if kind.__module__ == "jax._src.literals" and kind.__mro__[1] in (int, float, complex):
        return [kind.__mro__[1](value), value.dtype]
    if kind.__module__ == "jax._src.flattree":
        return list(value.elts) if kind.__name__ == "FTTuple" else [len(value), *value.vals]
    if kind.__module__ == "jax._src.numpy.hijax" and isinstance(getattr(value, "params", 0), dict):
        return [kind.__name__, value.in_avals, value.params]
    if (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and _is_of_jax(kind.__module__)
        and kind not in (jax.core.ShapedArray, _random.PRNGImpl)
    ):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def text_of(value: Any) -> str | None:
    """All that an object of JAX's says of a program, as text that is equal in every process.

    Non-public: these are the types of what equations hold, and no public name has them (``core``,
    ``sharding_impls`` and ``shape_poly``, since 0.4.36).

    Returns:
        The text; None for an object that is not known to tell all by it.
    """
    kind = type(value)
    if kind is jax.core.ShapedArray:
        dtype = text_of(value.dtype)
        if dtype is None:
            return None
        parts = [repr(getattr(value, name, None)) for name in _SHAPED_FIELDS if name != "dtype"]
        text = f"array {tuple(map(str, value.shape))} {dtype} {' '.join(parts)}"
    elif isinstance(value, np.dtype):
        text = f"dtype {value.name} {value.str}"
    elif kind is _random.prng.KeyTy:
        text = f"key {value}"
        if not _is_known(value._impl):
            return None
    elif kind is _core.JaxprEqnContext:
        text = "context " + " ".join(repr(getattr(value, name, None)) for name in _CONTEXT_FIELDS)
    elif isinstance(value, _random.PRNGImpl):
        text = f"generator {value.name}"
        if not _is_known(value):
            return None
    elif isinstance(value, FunctionType):
        text = f"function {value.__module__}.{value.__qualname__}"
        if not _is_of_jax(value.__module__) or "<" in value.__qualname__:
            return None
    elif isinstance(value, jax.sharding.Mesh):
        if not value.empty:  # its text does not tell which devices it is made of
            return None
        text = "empty mesh"
    elif isinstance(value, jax.sharding.NamedSharding):
        if isinstance(value.mesh, jax.sharding.Mesh) and not value.mesh.empty:
            return None
        text = repr(value)
    elif isinstance(value, jax.tree_util.PyTreeDef):
        text = f"tree {value}"
        if "CustomNode" in text:
            return None
    elif f"{kind.__module__}.{kind.__qualname__}" in _TELLING:
        text = f"{kind.__qualname__} {value!r}"
    else:
        return None
    return None if " at 0x" in text else text


_SHAPED_FIELDS = [
    n for n in jax.core.ShapedArray.__slots__ if not n.startswith("_") and n != "shape"
]
# Interned dicts of configuration ("configs") follow from the other fields.
_CONTEXT_FIELDS = [
    n for n in _core.JaxprEqnContext.__slots__ if not n.startswith("_") and n != "configs"
]


def _is_known(generator: Any) -> bool:
    """Whether a generator of random bits is one of JAX's own."""
    known: Any = _random.prng.prngs.get(generator.name)
    return known is generator and _is_of_jax(known.random_bits.__module__)


def _is_of_jax(module: str) -> bool:
    return module == "jax" or module.startswith("jax.")


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
    def note(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            _cache_hits.count = getattr(_cache_hits, "count", 0) + 1

    jax.monitoring.register_event_listener(note)


class NotPlain(Exception):
    """An executable that does not go into a file; the message says why."""


def serialized(compiled: Any, device: Any) -> tuple[bytes, tuple[int, ...]]:
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


class NotElsewhere(Exception):
    """A program cannot be compiled elsewhere, and can be here; the message says why."""


def compile_here(lowered: Any) -> Any:
    """Compile a lowered program, as `compile_elsewhere` does elsewhere.

    What JAX has in its own persistent cache is read from there. XLA does not write an executable
    again as a whole that it has read, at least on CPU, so the bytes that were read are kept for
    `serialized`, until `forget_bytes`.
    """
    arguments = lowered._lowering.compile_args
    client = arguments.get("backend")
    if compilation_cache() is None or not _is_cpu_of_one_host(client):
        return lowered.compile()
    arguments["backend"] = _Remembering(client)
    try:
        return lowered.compile()
    finally:
        arguments["backend"] = client


def _is_cpu_of_one_host(client: Any) -> bool:
    return getattr(client, "platform", None) == "cpu" and jax.process_count() == 1


def compile_elsewhere(compile: Callable[[bytes, bytes, int, int], bytes], lowered: Any) -> Any:
    """What ``lowered.compile()`` returns, from an executable that is compiled somewhere else.

    That takes part in all that JAX does around a compile, its events and its persistent cache,
    with another client in the place of the one that the program was lowered for
    (``MeshComputation.compile_args``, since 0.4). Only the bytes that come back hold all of an
    executable: XLA does not write one again as a whole that it has read. So JAX's own cache is not
    written to, and `serialized` finds those bytes, until `forget_bytes`.

    Args:
        compile: Is given the program as MLIR bytecode, XLA's options as a protocol buffer, how
            many devices the host has and which of them it is for; returns the executable's bytes.
        lowered: The program.

    Returns:
        The compiled program.

    Raises:
        NotElsewhere: Said by ``compile``, or the program is not for one CPU, or calls back.
        Exception: Whatever ``lowered.compile()`` raises before it asks XLA.
    """
    if lack := lacking(Without.ELSEWHERE):
        raise NotElsewhere(lack)
    arguments = lowered._lowering.compile_args
    client = arguments.get("backend")
    if not _is_cpu_of_one_host(client):
        raise NotElsewhere("it is not for a CPU of one host")
    arguments["backend"] = _Elsewhere(client, compile)
    try:
        with _config.persistent_cache_min_compile_time_secs(math.inf):
            return lowered.compile()
    except NotElsewhere:
        arguments["backend"] = client
        raise


def forget_bytes(compiled: Any) -> None:
    """Drop the bytes that `compile_here` and `compile_elsewhere` have kept."""
    client = _client_of(compiled)
    if isinstance(client, _Remembering):
        client.raw = None


def has_bytes(compiled: Any) -> bool:
    """Whether the bytes of an executable are kept."""
    client = _client_of(compiled)
    return isinstance(client, _Remembering) and client.raw is not None


def _client_of(compiled: Any) -> Any:
    around = getattr(compiled._executable, "_unloaded_executable", None)
    return getattr(around, "backend", None)


def compile_to_bytes(module: bytes, options: bytes, devices: int, device: int) -> bytes:
    """Compile a program for a device of a host like this one; see `compile_elsewhere`.

    Raises:
        Exception: Whatever XLA says of the program.
    """
    if b"lapack_" in module:
        _linalg.initialize_lapack()
    client = _cpu_client(devices)
    executable = client.compile_and_load(
        module,
        executable_devices=_xla_client.DeviceList((client.local_devices()[device],)),
        compile_options=_xla_client.CompileOptions.ParseFromString(options),
    )
    return bytes(client.serialize_executable(executable))


@functools.cache
def _cpu_client(devices: int) -> Any:
    return _xla_client.make_cpu_client(num_devices=devices)


class _Remembering:
    """A client that knows the bytes of the executable that it has read."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._executable: Any = None
        self.raw: bytes | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def deserialize_executable(self, raw: bytes, *args: Any, **kwargs: Any) -> Any:
        self._executable = self._client.deserialize_executable(raw, *args, **kwargs)
        self.raw = raw
        return self._executable

    def serialize_executable(self, executable: Any) -> bytes:
        if executable is self._executable and self.raw is not None:
            return self.raw
        return bytes(self._client.serialize_executable(executable))


class _Elsewhere(_Remembering):
    """A client whose executables are compiled elsewhere, and are its own from then on."""

    def __init__(self, client: Any, compile: Callable[[bytes, bytes, int, int], bytes]) -> None:
        super().__init__(client)
        self._compile = compile

    def compile_and_load(
        self, module: Any, executable_devices: Any, compile_options: Any, **others: Any
    ) -> Any:
        devices, known = list(executable_devices), self._client.local_devices()
        if len(devices) != 1 or devices[0] not in known:
            raise NotElsewhere("it is not for one device of this host")
        if others:
            raise NotElsewhere("it calls back into Python")
        written = io.BytesIO()
        module.operation.write_bytecode(written)
        where = len(known), known.index(devices[0])
        raw = self._compile(written.getvalue(), compile_options.SerializeAsString(), *where)
        if b"lapack_" in raw:
            _linalg.initialize_lapack()
        try:
            return self.deserialize_executable(raw, executable_devices=executable_devices)
        except Exception as error:
            raise NotElsewhere(in_one_line(error)) from error


def run_once(compiled: Any, argument: Callable[[int, Any], Any]) -> None:
    """Run an executable, wait until it is done, and drop what it returns.

    A jitted function must be given arguments of the placement that it will have later, or it
    compiles twice. What is behind it (``MeshExecutable.unsafe_call``, since 0.4) takes any.

    Args:
        compiled: What ``lower().compile()`` returns, or what is behind it.
        argument: Makes an argument, of its position among all and its type.

    Raises:
        NotPlain: It holds arguments of its own.
        Exception: Whatever running it raises.
    """
    if getattr(getattr(compiled, "_params", None), "const_args", None):
        raise NotPlain("it holds objects of this process")
    executable = getattr(compiled, "_executable", compiled)
    args: list[Any] = [None] * (1 + max(executable._kept_var_idx, default=-1))
    for i, aval in zip(sorted(executable._kept_var_idx), executable.in_avals, strict=True):
        args[i] = argument(i, aval)
    jax.block_until_ready(executable.unsafe_call(*args))


_REFUSED_OPTION = re.compile(r"No such compile option: '([^']*)'|setting option ([^\s,]+)")


def library_options(side_by_side: bool, without_folds: bool) -> Mapping[str, Any]:
    """Options of XLA: what its CPU backend leaves to its library YNN.

    That is as a rule folds, matrix products and convolutions, each of them a kernel. The option is
    experimental: whoever uses it goes on without where `refused_option` names it.

    Args:
        side_by_side: Several executables run at the same time. Of the library, matrix products took
            up to 1.3 times as long for two side by side (transformers, jaxlib 0.10 and 0.12).
        without_folds: The library gets folds of the program wrong; see `bucketjit._xla_defects`.
            XLA compiles kernels for them then, which takes 1.1 to 1.5 times as long (transformers;
            of an MLP 20 ms more).
    """
    folds = () if without_folds else ("REDUCE",)
    others = () if side_by_side else ("INDIVIDUAL_DOT", "INDIVIDUAL_CONVOLUTION")
    if folds and others:
        return {}
    kinds = ",".join(f"LIBRARY_FUSION_TYPE_{kind}" for kind in (*folds, *others))
    return {"xla_cpu_experimental_ynn_fusion_type": kinds}


def is_defect_of_xla(error: Exception) -> bool:
    """Whether a program failed to lower or compile by no fault of its arguments.

    That is an error that XLA calls internal, or a program that MLIR does not take.
    """
    if isinstance(error, jax.errors.JaxRuntimeError):
        return str(error).startswith(("INTERNAL", "UNIMPLEMENTED"))
    return isinstance(error, ValueError) and str(error).startswith("Cannot lower jaxpr")


def refused_option(error: Exception) -> str | None:
    """The option that XLA did not take, if that is the error (as texts of jaxlib 0.10 to 0.12)."""
    found = _REFUSED_OPTION.search(str(error))
    return None if found is None else found[found.lastindex or 0]


@functools.cache
def only_on_cpu() -> bool:
    """Whether this process can run programs on CPU only, so that none is lowered for another.

    Tracing a program for each platform takes time (``xla_bridge.backends``, since 0.2).
    """
    return set(jex_backend.backends()) == {"cpu"}


def is_started() -> bool:
    """Whether XLA runs in this process; a fork has none of its threads, and compiles nothing.

    Its lock is not taken, which a fork may find locked (``xla_bridge._backends``, since 0.2).
    """
    return bool(_xla_bridge._backends)


def by_platform(*operands: Any, cpu: Callable[..., Any], default: Callable[..., Any]) -> Any:
    """``lax.platform_dependent``; only one of both is traced where there is nothing but the CPU."""
    if only_on_cpu():
        return cpu(*operands)
    return jax.lax.platform_dependent(*operands, cpu=cpu, default=default)


def default_device() -> Any:
    """Where ``jit`` runs what nobody has placed (``pxla.get_default_device``, since 0.4)."""
    return jex_backend.get_default_device()


def sole_device() -> Any | None:
    """`default_device`; None where a mesh is in its place (``jax.set_mesh``)."""
    return default_device() if _mesh.get_concrete_mesh().empty else None


def single_threaded_device() -> Any | None:
    """A CPU whose programs run in the thread that calls them; None if this system has none.

    It is that of a client of its own (``xla_client.make_cpu_client``, since 0.4), whose arrays no
    program of another one takes. XLA has no option for how many threads share an operation: a
    client has as many as the thread that makes it has cores. So a thread of one core makes this
    one. (``NPROC`` would tell XLA too, but to write to the environment is not safe beside threads
    that read it.)
    """
    if lacking(Without.SINGLE_THREADED):
        return None
    with _one_client:  # a cache lets two threads that come at the same time both make one
        return _make_single_threaded_device()


_one_client = threading.Lock()


@functools.cache
def _make_single_threaded_device() -> Any | None:
    process = os.getpid()
    cores = sorted(os.sched_getaffinity(process)) if hasattr(os, "sched_setaffinity") else []
    if len(cores) < 2 or jax.process_count() > 1:
        return None
    made: list[Any] = []
    tasks = "/proc/self/task"

    def make() -> None:
        before = set(os.listdir(tasks))
        os.sched_setaffinity(0, cores[:1])
        made.append(_xla_client.make_cpu_client(asynchronous=False, num_devices=1))
        # Its threads begin with the cores of the one that makes them. Some of them compile.
        for task in map(int, set(os.listdir(tasks)) - before):
            with contextlib.suppress(OSError):  # another one's, which has ended meanwhile
                if os.sched_getaffinity(task) == set(cores[:1]):
                    os.sched_setaffinity(task, cores)

    def try_to() -> None:
        with contextlib.suppress(OSError, RuntimeError):  # no such rights, no such files
            make()

    with contextlib.suppress(RuntimeError):  # no more threads
        maker = threading.Thread(target=try_to, name="bucketjit-client")
        maker.start()
        maker.join()
    if not made:
        return None
    # A fork has none of its threads, for which it would wait when it is destroyed.
    keep = functools.partial(ctypes.pythonapi.Py_IncRef, ctypes.py_object(made[0]))
    os.register_at_fork(after_in_child=keep)
    return made[0].local_devices()[0]


def can_lend(value: Any, device: Any) -> bool:
    """Whether JAX would run a program that takes an array on a device, or anywhere it likes.

    Not so for a tracer, and for what is committed to another device or several.

    Args:
        value: An array, or the type of one with the place that it is committed to.
        device: The device.
    """
    if isinstance(value, jax.core.Tracer):
        return False
    is_type = isinstance(value, jax.ShapeDtypeStruct)
    placed = value.sharding if is_type or getattr(value, "committed", False) else None
    return placed is None or (type(placed) is _SINGLE and placed.device_set == {device})


def lent(value: Any, device: Any) -> jax.Array:
    """The contents of an array for programs of `single_threaded_device`, without a copy.

    Args:
        value: A ``jax.Array`` in host memory, or an array of NumPy's, which may be copied.
        device: The device.

    Returns:
        The array on the device, to which it is committed.

    Raises:
        RuntimeError: It has been deleted.
    """
    kind = jax.typeof(value)
    if isinstance(value, jax.Array) and not value.is_deleted():
        # NumPy's view holds the object whose memory it shows; this one goes with the view.
        value = placed_like(value, value, kind.weak_type)
    return _placed(np.asarray(value, kind.dtype), kind.weak_type, device, True)


def given_back(array: jax.Array, device: Any, committed: bool) -> jax.Array:
    """A result of `single_threaded_device` on a CPU of JAX's own, without a copy."""
    return _placed(np.asarray(array), array.weak_type, device, committed)


def _placed(host: np.ndarray, weak_type: bool, device: Any, committed: bool) -> jax.Array:
    aval, there = _aval(host.shape, host.dtype, weak_type), _sharding_of(device)
    return cast(jax.Array, _xla_client.batched_device_put(aval, there, [host], [device], committed))


@functools.cache
def _sharding_of(device: Any) -> Any:
    return jax.sharding.SingleDeviceSharding(device)


def placed_on(struct: Any, device: Any | None) -> jax.ShapeDtypeStruct:
    """The type of an array, committed to a device or to none."""
    kind, placed = jax.typeof(struct), None if device is None else _sharding_of(device)
    weak = bool(getattr(kind, "weak_type", False))
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=placed, weak_type=weak)


def is_place(value: Any) -> bool:
    """Whether a parameter of an equation says where something is to be: not so an empty mesh."""
    if isinstance(value, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        return not value.empty
    return isinstance(value, jax.Device | jax.sharding.Sharding)


def deserialized(raw: bytes, device: Any) -> Any:
    """The executable in the bytes that `serialized` made; XLA reads it without Python's lock.

    Raises:
        Exception: The bytes are no executable for this device.
    """
    if device.platform == "cpu" and b"lapack_" in raw:
        # Lowering does; without it, a factorisation jumps to nowhere. It imports scipy (100 ms).
        _linalg.initialize_lapack()
    devices = _xla_client.DeviceList((device,))
    return device.client.deserialize_executable(raw, executable_devices=devices)


def is_for(executable: Any, device: Any) -> bool:
    """Whether a loaded executable runs on a device, of the same client."""
    return list(executable.local_devices()) == [device]


def loaded_function(
    xla: Any,
    kept: Sequence[int],
    name: str,
    in_avals: Sequence[Any],
    out_avals: Sequence[Any],
    out_tree: Any,
    device: Any,
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
        xla: Any,
        kept: Sequence[int],
        name: str,
        in_avals: Sequence[Any],
        out_avals: Sequence[Any],
        out_tree: Any,
        device: Any,
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

    def without_jit(self, *args: Any, **kwargs: Any) -> Any:
        """Serve a call where ``jax.disable_jit`` is in force."""
        self._check(args, kwargs)
        return self._fresh(*args, **kwargs)

    def meet(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
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


def out_types(jaxpr: Jaxpr) -> list[Any]:
    """The types of the results of a closed jaxpr (``out_avals``, since 0.2)."""
    return list(jaxpr.out_avals)
