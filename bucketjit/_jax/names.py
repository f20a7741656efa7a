"""The names of ``jax._src`` that bucketjit uses, and their look-up when the package is imported.

JAX moves names of ``jax._src`` without notice. If one is missing, the import fails with one error
for all such names. The other files of `bucketjit._jax` take their modules of ``jax._src`` from
here. Each name has a comment: what it is for, since which version of JAX it is there, and until
when it is needed.
"""

from __future__ import annotations

import importlib
import operator
import re
from types import ModuleType
from typing import Any

import jax

from bucketjit._events import logger
from bucketjit._version import __version__
from bucketjit.errors import VersionError

# The releases that the tests run with. pyproject.toml, README.md and CI name the same.
OLDEST, NEWEST = "0.10.2", "0.12"
REMEDY_OF_VERSIONS = "upgrade bucketjit or pin jax"

# Modules below ``jax._src`` with the names of each; ``a|b`` for names that are in one or the other,
# by the version of JAX. An attribute of a name follows it after a dot.
USES = (
    # What traces with symbolic sizes leave behind in JAX: contexts and shardings.
    # Since 0.8. Until JAX's caches hold symbolic sizes weakly.
    ("core", "current_jaxpr_eqn_context get_sharding update_aval_with_sharding"),
    # What traces with symbolic sizes leave behind in JAX: traces and types.
    # Since 0.8. Until JAX's caches hold symbolic sizes weakly.
    ("interpreters.partial_eval", "_cached_abstract_eval trace_to_jaxpr"),
    # What traces with symbolic sizes leave behind in JAX: shapes.
    # Since 0.4. Until JAX's caches hold symbolic sizes weakly.
    ("lax.lax", "_broadcast_shapes_cached"),
    # What traces with symbolic sizes leave behind in JAX: calls.
    # Since 0.4. Until JAX's caches hold symbolic sizes weakly.
    ("pjit", "_check_and_canonicalize_out_shardings _infer_params"),
    # What traces with symbolic sizes leave behind in JAX: their shardings.
    # Since 0.4. Until JAX's caches hold symbolic sizes weakly.
    ("pjit", "_process_in_axis_resources create_meta_ty"),
    # What traces with symbolic sizes leave behind in JAX: shardings.
    # Since 0.4. Until JAX's caches hold symbolic sizes weakly.
    ("sharding_impls", "canonicalize_sharding"),
    # The check for NaNs of a thread.
    # Since 0.6. Until `jax.debug_nans` leaves it as it was.
    ("api", "_post_hook_state"),
    # Concrete arrays of a given type, sharding and commitment, weak types included.
    # Since 0.4. Until a public constructor takes a weak type.
    ("array", "ArrayImpl"),
    # The configuration of a thread: its key, and what another thread has to set to have it, too.
    # Since 0.4.36. Until a public function hands the configuration of a thread over.
    ("config", "config_ext config_states trace_context"),
    # The mesh that a backward pass sets, unset again so that traces are found in JAX's caches.
    # Since 0.5. Until no version is served that distinguishes an empty mesh from none (0.12).
    ("config|mesh", "abstract_mesh_context_manager"),
    # The trace of the thread, the key of what is made once per trace, and the check of each call.
    # Since 0.4.36. Until the state of `jax.extend.core.get_opaque_trace_state` can be hashed.
    ("core", "trace_ctx trace_state_strong_ref"),
    # A named axis while a function of one shard is traced.
    # Since 0.4.36. Until a public context names an axis, as `make_jaxpr(axis_env=)` does.
    ("core", "extend_axis_env_nd"),
    # Shapes whose sizes the program computes, as in jnp.ones((k,)).
    # Since 0.4.14. Until JAX has arrays whose size is computed.
    ("core", "_canonicalize_dimension concrete_dim_or_error"),
    # The size for -1 in a reshape.
    # Since 0.2. Until JAX finds -floordiv(n, -2) and n // 2 equal.
    ("core", "divide_shape_sizes"),
    # The store that the processes of a job share.
    # Since 0.4. Until `jax.distributed` has a client.
    ("distributed", "global_state.client"),
    # The custom calls that may be in a module.
    # Since 0.4.30. Until `jax.export` checks modules that it reads.
    ("export._export", "_CUSTOM_CALL_TARGETS_GUARANTEED_STABLE"),
    # Constraints such as n != 3 in exported modules.
    # Since 0.4.14. Until the constraints of `jax.export` can say it.
    ("export.shape_poly", "shape_assertion"),
    # A bound of the steps that a comparison of sizes takes.
    # Since 0.4.27. Until JAX has one.
    ("export.shape_poly_decision", "_DecisionByElimination._bounds_for_sorted_terms"),
    ("export.shape_poly_decision", "_DecisionByElimination.combine_constraint_with_existing"),
    # A linearization that knows whether reverse mode runs it.
    # Since 0.5. Until `jax.custom_vjp` or a public rule tells.
    ("interpreters.ad", "fallback_linearize_rule primitive_linearizations"),
    # Traces that fail are freed, and traces that end are told of.
    # Since 0.7. Until a trace that fails is freed with its constants.
    ("interpreters.partial_eval", "DynamicJaxprTrace finalize"),
    # The lines that JAX has seen functions defined on: it says that ours are defined repeatedly.
    # Since 0.5. Until it looks at `__fun_debug_info__`.
    ("interpreters.partial_eval", "callsites_with_tracing_cache_miss"),
    # Hijax equations are expanded, as jit does.
    # Since 0.7. Until 0.12 is the oldest version: there `jax.interpreters.partial_eval` has it.
    ("interpreters.partial_eval", "lower_jaxpr2"),
    # Executables of bytes, without a pickle.
    # Since 0.4.30. Until `jax.experimental.serialize_executable` reads bytes that nobody can forge.
    ("interpreters.pxla", "UnloadedMeshExecutable"),
    # psum of sizes, whatever name the user gave psum.
    # Since 0.10. Until a symbolic size is no constant to psum.
    ("lax.parallel", "_psum_is_async"),
    # Arrays on their devices in 3 us instead of 32.
    # Since 0.4.9. Until `jax.device_put` is as fast.
    ("lib", "xla_client.batched_device_put"),
    # Explicit padding that is symbolic.
    # Since 0.4. Until conv_general_dilated takes it.
    ("lax.convolution", "operator"),
    # psum(1) over an open axis, and derivatives of products.
    # Since 0.2. Until they take an axis of symbolic size.
    ("lax.lax", "_const _reduce_jvp"),
    # The type of indices into an open axis.
    # Since 0.7. Until JAX takes int32 for it.
    ("lax.utils", "int_dtype_for_dim"),
    # Fourier transforms of a symbolic length.
    # Since 0.2. Until jnp.fft.fft takes it.
    ("numpy.fft", "operator"),
    # A search in an array of symbolic size.
    # Since 0.10. Until jnp.searchsorted takes it.
    ("numpy.hijax", "searchsorted"),
    # Indices with sizes, computed slices and computed masks.
    # Since 0.8. Until JAX has arrays whose size is computed, and takes a size as an index.
    ("numpy.indexing", "NDIndexer.expand_bool_indices NDIndexer.expand_scalar_bool_indices"),
    ("numpy.indexing", "_parse_indices rewriting_take"),
    # The module whose functions compare len(x).
    # Since 0.1. Until jnp.convolve takes arrays of symbolic size.
    ("numpy.lax_numpy", "convolve"),
    # Sets of computed sizes, and updates of computed slices.
    # Since 0.4. Until JAX has arrays whose size is computed.
    ("numpy.setops", "core"),
    ("ops.scatter", "_scatter_update"),
    # The class of typed keys, which a warm call compares with.
    # Since 0.4.16. Until `jax.random` has it.
    ("random.core", "prng.PRNGKeyArray"),
    # Shuffles of an open axis.
    # Since 0.1. Until jax.random.permutation takes it.
    ("random.core", "_shuffle"),
    # Errors without the frames of bucketjit and JAX.
    # Since 0.2.1. Until a public function shortens an error of a library on JAX.
    ("traceback_util", "_filtering_mode api_boundary include_filename register_exclusion"),
    # Parameters of equations that JAX's caches do not keep alive.
    # Since 0.10. Until a public name adds a type.
    ("util", "weakref_cache_key_types"),
    # Whether XLA has started, without the lock that a forked child may find locked.
    # Since 0.2. Until `jax.extend.backend` tells without a lock.
    ("xla_bridge", "_backends"),
)


class Forwarding:
    """An object in the place of another one, which has all that it does not have itself."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def module(name: str) -> Any:
    """Import a module of `USES`; one that JAX lacks is replaced by an empty module of its name.

    So `_look_up` can list every missing name, instead of the first import failing.
    """
    try:
        return importlib.import_module(f"jax._src.{name}")
    except ModuleNotFoundError:
        return ModuleType(f"jax._src.{name}")


def _is_there(place: str, name: str) -> bool:
    try:
        operator.attrgetter(name)(module(place))
    except AttributeError:
        return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def is_tested(version: str) -> bool:
    """Whether a release of JAX is tested: from `OLDEST` to the last patch release of `NEWEST`."""
    newest = _numbers(NEWEST)  # (0, 12): any patch release of it is compared as 0.12
    return _numbers(OLDEST) <= _numbers(version) and _numbers(version)[: len(newest)] <= newest


def _tested() -> str:
    return f"bucketjit {__version__} is tested with jax {OLDEST} to {NEWEST}"


def _look_up() -> int:
    # Of "a|b" the error names the module of the newer JAX, which is the last one.
    missing = [
        f"jax._src.{places.split('|')[-1]}.{name}"
        for places, names in USES
        for name in names.split()
        if not any(_is_there(place, name) for place in places.split("|"))
    ]
    if missing:
        is_old = _numbers(jax.__version__) < _numbers(OLDEST)
        remedy = "upgrade jax" if is_old else REMEDY_OF_VERSIONS
        raise VersionError(
            f"{_tested()}; this is {jax.__version__}: these names are missing: "
            f"{', '.join(missing)}; {remedy}"
        )
    if not is_tested(jax.__version__):
        logger.info("%s; this is %s, and it has all names", _tested(), jax.__version__)
    return sum(len(names.split()) for _, names in USES)


# At import, so that a missing name is reported before the first call.
FOUND = _look_up()


def trouble_of_versions(error: BaseException) -> str:
    """The text for an error that is about a name this JAX lacks; ``""`` for any other error.

    Such an error is about a module of JAX, about a name in one, or about an attribute of an object
    of JAX that a line of `bucketjit._jax` reads.
    """
    if isinstance(error, ImportError):
        owner = error.name or ""
    elif type(error) is not AttributeError:  # subclasses are raised on purpose
        return ""
    elif isinstance(error.obj, ModuleType):
        owner = error.obj.__name__
    else:
        kind = error.obj if isinstance(error.obj, type) else type(error.obj)
        owner = kind.__module__ if _is_of_door(error) else ""
    is_of_jax = owner.split(".")[0] in ("jax", "jaxlib")
    return f"{_tested()}; in {jax.__version__}, {error}" if is_of_jax else ""


def _is_of_door(error: BaseException) -> bool:
    """Whether a line of `bucketjit._jax` raised the error: the innermost frame is one."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    name = "" if step is None else step.tb_frame.f_globals.get("__name__", "")
    return f"{name}.".startswith("bucketjit._jax.")
