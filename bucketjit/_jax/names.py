"""The table of names that JAX may move, and their look-up when the package is imported.

JAX moves names of ``jax._src``, ``jax.extend`` and ``jax.interpreters`` without notice. If an
essential name is missing, the import fails, with one error for all such names. If other names are
missing, one warning lists the features that are left out. The other files of `bucketjit._jax` take
their modules of ``jax._src`` from here, and ask `lacking` before they use the names of a feature.
"""

from __future__ import annotations

import enum
import importlib
import re
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax

from bucketjit._events import logger
from bucketjit._version import __version__
from bucketjit.errors import VersionError, VersionWarning

# The releases that the tests run with. pyproject.toml, README.md and CI name the same.
OLDEST, NEWEST = "0.10.2", "0.12"
REMEDY_OF_VERSIONS = "upgrade bucketjit or pin jax"


class Without(enum.StrEnum):
    """The features that can be left out, each with the text of what happens without it."""

    AGREEMENT = "several processes cannot agree on a bucket"
    CALLBACKS = "jax.debug callbacks that are mapped over an open axis run exact"
    CONSTANTS = "jax.numpy.take(mode='wrap') and the like are traced at each size"
    COUNTS = "functions of one shard call jax.lax.psum of a size by that name only"
    CONVOLUTIONS = "convolutions whose padding depends on sizes are traced at each size"
    DECISIONS = "comparisons of sizes may take long"
    EXPORT = "functions are not exported or saved, and modules are not refined"
    FFT = "jax.numpy.fft along open axes is traced at each size"
    FFT_GRADIENTS = "gradients of real Fourier transforms compile for even and for odd sizes"
    FILES = "executables are not kept in files"
    FORGETTING = "programs of traces that fail may stay in memory"
    GRADIENTS = "a loss and its gradient are two executables"
    INDICES = "a size as an index, as in x[n - 1], is traced at each size"
    INSIDE = "primitives that have no masking rule run exact"
    LENGTHS = "jax.numpy.convolve, correlate and digitize are traced at each size"
    LINES = "messages may name no line of code"
    REDUCTIONS = "derivatives of products along open axes run exact"
    RESHAPES = "reshapes of open axes to a size of -1 may be traced at each size"
    SEARCHES = "jax.numpy.searchsorted in an open axis is traced at each size"
    SELECTIONS = "selections by a mask, jnp.unique and the like raise, as under jax.jit"
    SHUFFLES = "random permutations of an open axis are traced at each size"
    TRACEBACKS = "errors show frames of bucketjit and JAX"


class Use(NamedTuple):
    """Names of one module that bucketjit uses.

    Attributes:
        module: The module, below ``jax._src`` unless it begins with ``jax.``; ``a|b`` for names
            that are in one or the other, by the version of JAX.
        names: The names, separated by spaces; an attribute of a name follows it after a dot.
        without: The feature that is left out if a name is missing; None if the names are essential.
    """

    module: str
    names: str
    without: Without | None = None


_OPERATORS = (
    *("eq", "hash", "ge", "le", "gt", "lt", "int", "add", "radd", "sub", "rsub", "mul", "rmul"),
    *("truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "divmod", "rdivmod"),
    *("pow", "rpow"),
)

USES = (
    Use("array", "ArrayImpl"),
    Use("config", "config_ext.Config config_ext.unset config_states trace_context"),
    Use("config", "check_tracer_leaks default_device disable_jit"),
    Use("config|mesh", "abstract_mesh_context_manager"),
    Use("core", "JaxprEqnContext current_jaxpr_eqn_context definitely_equal dimension_as_value"),
    Use("core", "eval_trace extend_axis_env_nd top_axis_env trace_ctx trace_state_strong_ref"),
    Use("core", "max_dim"),
    Use(
        "core",
        "Trace.invalidate _canonicalize_dimension concrete_dim_or_error concrete_or_error",
        Without.SELECTIONS,
    ),
    Use("core", "NamedAxisEffect", Without.FILES),
    Use("core", "divide_shape_sizes", Without.RESHAPES),
    Use("distributed", "global_state.client", Without.AGREEMENT),
    Use("effects", "ordered_effects"),
    Use("export.shape_poly", " ".join(f"_DimExpr.__{name}__" for name in _OPERATORS)),
    Use("export._export", "_CUSTOM_CALL_TARGETS_GUARANTEED_STABLE", Without.EXPORT),
    Use("export.shape_poly", "ShapeAssertionEffect shape_assertion", Without.EXPORT),
    Use(
        "lib",
        "_jax.mlir.refine_polymorphic_shapes _jax.mlir.serialize_portable_artifact",
        Without.EXPORT,
    ),
    Use(
        "lib.mlir",
        "ir.Module ir.RankedTensorType ir.StringAttr ir.SymbolTable ir.WalkResult",
        Without.EXPORT,
    ),
    Use("lib.mlir.dialects", "func.FuncOp hlo.deserialize_portable_artifact", Without.EXPORT),
    Use("lib.mlir.dialects", "hlo.get_current_version hlo.get_minimum_version", Without.EXPORT),
    Use("lib.mlir.dialects", "hlo.get_version_from_compatibility_requirement", Without.EXPORT),
    Use("lib.mlir.dialects", "hlo.SetDimensionSizeOp hlo.TypeExtensions", Without.EXPORT),
    Use(
        "export.shape_poly_decision",
        "_DecisionByElimination._bounds_for_sorted_terms"
        " _DecisionByElimination.combine_constraint_with_existing",
        Without.DECISIONS,
    ),
    Use("interpreters.ad", "LinearizeTrace LinearizeTracer"),
    Use("interpreters.ad", "fallback_linearize_rule primitive_linearizations", Without.GRADIENTS),
    Use("interpreters.mlir", "_lowerings", Without.INSIDE),
    Use("interpreters.partial_eval", "callsites_with_tracing_cache_miss", Without.LINES),
    Use("interpreters.partial_eval", "convert_constvars_jaxpr lower_jaxpr2"),
    Use("interpreters.partial_eval", "DynamicJaxprTrace.invalidate", Without.SELECTIONS),
    Use("interpreters.partial_eval", "finalize", Without.FORGETTING),
    Use(
        "interpreters.pxla",
        "JitGlobalCppCacheKeys UnloadedMeshExecutable _get_layouts_from_executable cc_shard_arg"
        " get_dispatch_layouts",
        Without.FILES,
    ),
    Use("api_util", "InternalFloatingPointError", Without.FILES),
    Use("api_util", "debug_info fun_sourceinfo", Without.LINES),
    Use("tree_util", "dispatch_registry", Without.FILES),
    Use("lax.linalg", "initialize_lapack", Without.FILES),
    Use("lax.parallel", "_psum_is_async", Without.COUNTS),
    Use(
        "lib",
        "xla_client.CompileOptions xla_client.DeviceAssignment.create xla_client.DeviceList"
        " xla_client._xla.pjit",
        Without.FILES,
    ),
    Use("lib", "xla_client.batched_device_put"),
    Use("lax.convolution", "operator", Without.CONVOLUTIONS),
    Use("lax.fft", "_irfft_transpose _rfft_transpose", Without.FFT_GRADIENTS),
    Use("lax.lax", "_convert_element_type"),
    Use("lax.lax", "_const", Without.CONSTANTS),
    Use("lax.lax", "_reduce_jvp", Without.REDUCTIONS),
    Use("lax.lax", "_sort_le_comparator _sort_lt_comparator", Without.SEARCHES),
    Use("lax.utils", "int_dtype_for_dim int_dtype_for_shape"),
    Use("numpy.fft", "operator", Without.FFT),
    Use("numpy.hijax", "searchsorted", Without.SEARCHES),
    Use(
        "numpy.indexing",
        "IndexType IndexingStrategy NDIndexer.expand_bool_indices"
        " NDIndexer.expand_scalar_bool_indices"
        " NDIndexer.from_raw_indices"
        " ParsedIndex rewriting_take",
    ),
    Use("numpy.indexing", "_parse_indices", Without.INDICES),
    Use("numpy.setops", "core", Without.SELECTIONS),
    Use("numpy.lax_numpy", "convolve correlate digitize", Without.LENGTHS),
    Use("ops.scatter", "_scatter_update", Without.SELECTIONS),
    Use("random.core", "PRNGImpl PRNGSpec prng.KeyTy prng.PRNGKeyArray prng.prngs"),
    Use("random.core", "_shuffle", Without.SHUFFLES),
    Use("source_info_util", "is_user_filename"),
    Use("source_info_util", "_summarize_frame user_frames", Without.LINES),
    Use(
        "traceback_util",
        "_filtering_mode api_boundary include_filename register_exclusion",
        Without.TRACEBACKS,
    ),
    Use("util", "weakref_cache_key_types", Without.FORGETTING),
    Use("xla_bridge", "_backends"),
    Use("jax.core", "ShapedArray Tracer eval_context eval_jaxpr"),
    Use("jax.extend.backend", "backends get_default_device"),
    Use("jax.extend.core", "ClosedJaxpr Jaxpr Literal Primitive Var new_jaxpr_eqn no_effects"),
    Use("jax.extend.source_info_util", "current_name_stack register_exclusion user_context"),
    Use("jax.interpreters.ad", "JVPTrace JVPTracer primitive_jvps"),
    Use("jax.interpreters.batching", "fancy_primitive_batchers", Without.CALLBACKS),
    Use("jax.interpreters.mlir", "lower_fun register_lowering"),
    Use("jax.interpreters.partial_eval", "DynamicJaxprTracer dce_jaxpr"),
)


def _full(name: str) -> str:
    return name if name.startswith("jax.") else f"jax._src.{name}"


def module(name: str) -> Any:
    """Import a module of `USES`; one that JAX lacks is replaced by an empty module of its name.

    So `_look_up` can list every missing name, instead of the first import failing.
    """
    full = _full(name)
    try:
        return importlib.import_module(full)
    except ModuleNotFoundError:
        return ModuleType(full)


def _is_there(place: str, name: str) -> bool:
    value = module(place)
    try:
        for part in name.split("."):
            value = getattr(value, part)
    except AttributeError:
        return False
    return True


def _looked_up(uses: Sequence[Use]) -> dict[str, list[Without | None]]:
    """The names that are missing, each with the features it is for (None: essential)."""
    missing: dict[str, list[Without | None]] = {}
    for places, names, without in uses:
        for name in names.split():
            # Of "a|b" the error names the module of the newer JAX, which is the last one.
            if not any(_is_there(place, name) for place in places.split("|")):
                full = _full(places.split("|")[-1])
                missing.setdefault(f"{full}.{name}", []).append(without)
    return missing


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def is_tested(version: str) -> bool:
    """Whether a release of JAX is tested: from `OLDEST` to the last patch release of `NEWEST`."""
    newest = _numbers(NEWEST)  # (0, 12): any patch release of it is compared as 0.12
    return _numbers(OLDEST) <= _numbers(version) and _numbers(version)[: len(newest)] <= newest


def _told(missing: Sequence[str]) -> str:
    remedy = REMEDY_OF_VERSIONS if _numbers(jax.__version__) >= _numbers(OLDEST) else "upgrade jax"
    return (
        f"bucketjit {__version__} is tested with jax {OLDEST} to {NEWEST}; this is "
        f"{jax.__version__}: these names are missing: {', '.join(missing)}; {remedy}"
    )


def _look_up() -> dict[Without, list[str]]:
    """Look up all names of `USES`, and warn of the features that are left out."""
    missing = _looked_up(USES)
    if essential := [name for name, withouts in missing.items() if None in withouts]:
        raise VersionError(_told(essential))
    left_out: dict[Without, list[str]] = {}
    for name, withouts in missing.items():
        for without in withouts:
            assert without is not None
            left_out.setdefault(without, []).append(name)
    if left_out:
        told = f"{_told(list(missing))}. Until then: {'; '.join(left_out)}"
        warnings.warn(told, VersionWarning, stacklevel=2)
        for without, names in left_out.items():
            logger.info("%s: jax %s has no %s", without, jax.__version__, ", ".join(names))
    elif not is_tested(jax.__version__):
        logger.info(
            "bucketjit %s is tested with jax %s to %s; this is %s, and it has all names that are "
            "needed",
            *(__version__, OLDEST, NEWEST, jax.__version__),
        )
    return left_out


# At import, so that a missing name is reported before the first call.
LEFT_OUT = _look_up()


def lacking(feature: Without) -> str:
    """Why a feature is left out: a text with the names that it lacks; ``""`` if it is there."""
    names = LEFT_OUT.get(feature)
    return f"jax {jax.__version__} has no {', '.join(names)}" if names else ""


def trouble_of_versions(error: BaseException) -> str:
    """The text for an error that is about a name this JAX lacks; ``""`` for any other error.

    Such an error is about a module of JAX, about a name in one, or about an attribute of an object
    of JAX that a line of `bucketjit._jax` reads.
    """
    if isinstance(error, ImportError):
        is_of_jax = _is_of_jax(error.name or "")
    elif type(error) is AttributeError:  # subclasses are raised on purpose
        owner = error.obj
        if isinstance(owner, ModuleType):
            is_of_jax = _is_of_jax(owner.__name__)
        else:
            kind = owner if isinstance(owner, type) else type(owner)
            is_of_jax = _is_of_jax(kind.__module__) and _is_of_door(error)
    else:
        return ""
    if not is_of_jax:
        return ""
    return (
        f"bucketjit {__version__} is tested with jax {OLDEST} to {NEWEST}; in {jax.__version__}, "
        f"{error}"
    )


def _is_of_jax(name: str) -> bool:
    return name.split(".")[0] in ("jax", "jaxlib")


def _is_of_door(error: BaseException) -> bool:
    """Whether a line of `bucketjit._jax` raised the error: the innermost frame is one."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    name = "" if step is None else step.tb_frame.f_globals.get("__name__", "")
    return bool(name == "bucketjit._jax" or name.startswith("bucketjit._jax."))
