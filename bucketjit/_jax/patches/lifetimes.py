"""What traces leave behind in JAX: finalizers of constants, and caches that know symbolic sizes.

A symbolic size belongs to one trace, so what a cache knows of it is of no use after the trace.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from bucketjit._jax import names
from bucketjit._jax.config import hold_weakly, same_nan_checks
from bucketjit._jax.number_hooks import Size
from bucketjit._jax.patches.patch import Patch, patch
from bucketjit._jax.tracers import traces_are_unshared

_core = names.module("core")
_partial_eval = names.module("interpreters.partial_eval")
_pjit = names.module("pjit")
_flags: Any = jax.config  # its flags are public, but have no types
_here = threading.local()


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """A context that drops what this thread traces with symbolic sizes, and keeps NaN checks."""
    outer = getattr(_here, "copies", None)
    _here.copies = {}
    try:
        with same_nan_checks():
            yield
    finally:
        _here.copies = outer


def _copied(original: Any, copy: Callable[[Any], Any], *values: object) -> Any:
    """A copy that goes with the context, if a value is a symbolic size or of a symbolic shape."""
    copies = getattr(_here, "copies", None)
    if copies is None or _flags.jax_check_tracer_leaks:  # copies outlive an inner trace
        return original
    if not (_is_open(values) or traces_are_unshared()):
        return original
    if original not in copies:
        copies[original] = copy(original)
    return copies[original]


def _is_open(value: Any) -> bool:
    value = getattr(value, "vals", value)  # of a tree
    if isinstance(value, tuple):
        return any(map(_is_open, value))
    shape = getattr(value, "shape", ())
    return type(value) is Size or (isinstance(shape, tuple) and Size in map(type, shape))


def _same_function(function: Any) -> Any:
    """Another object that is the same function to JAX."""
    return functools.update_wrapper(functools.partial(function), function)


class _SamePrimitive:
    """Another object that is the same primitive to the cache of types, which holds it weakly."""

    def __init__(self, primitive: Any) -> None:
        hold_weakly(_SamePrimitive)
        self.abstract_eval = primitive.abstract_eval


@patch(_partial_eval, "finalize")
def weak_finalizers(original: Any, tracer: Any, method: Any, *args: Any) -> Any:
    """Finalizers of the tracers of constants reference their trace weakly.

    JAX has weakref.finalize hold the trace as long as the tracer of a constant is there, which the
    trace holds in turn. A trace that fails would stay for ever, and with it the arrays that the
    function closes over. Since interpreters.partial_eval, 0.10. Until such a trace is freed.
    """
    weak = weakref.WeakMethod(method)

    def called(*args: Any) -> None:
        alive = weak()
        if alive is not None:
            alive(*args)

    return original(tracer, called, *args)


@patch(_pjit, "_infer_params")
def inner_functions(original: Any, function: Any, info: Any, args: Any, kwargs: Any) -> Any:
    """Calls of jitted functions with symbolic sizes are traced as calls of a copy.

    JAX keeps what a function was traced to as long as the function, and those of `jax.numpy` are
    there for ever. Since pjit, 0.4. Until JAX's caches hold symbolic sizes weakly.
    """
    leaves = jax.tree_util.tree_leaves((args, kwargs))
    return original(_copied(function, _same_function, *leaves), info, args, kwargs)


class _Traces(names.Forwarding):
    """Functions that loops trace are copies, too; see `inner_functions`.

    Since 0.8. Until JAX's caches hold symbolic sizes weakly.
    """

    _copy: Callable[[Any], Any] = staticmethod(_same_function)

    def __call__(self, key: Any, *args: Any, **kwargs: Any) -> Any:
        return self._original(_copied(key, self._copy, *args, *kwargs.values()), *args, **kwargs)


class _Types(_Traces):
    """Types of results of primitives are kept by a copy of the primitive.

    Since 0.7. Until JAX's caches hold symbolic sizes weakly.
    """

    _copy = _SamePrimitive


class _Unused(_Traces):
    """A cache of what takes microseconds to compute is left out by the threads that trace.

    Since 0.4. Until JAX's caches hold symbolic sizes weakly.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_used = getattr(_here, "copies", None) is None
        return (self._original if is_used else self._original.__wrapped__)(*args, **kwargs)


CACHES = (
    inner_functions,
    Patch(_partial_eval, "trace_to_jaxpr", _Traces),
    Patch(_partial_eval, "_cached_abstract_eval", _Types),
    Patch(_pjit, "_process_in_axis_resources", _Unused),
    Patch(_pjit, "_check_and_canonicalize_out_shardings", _Unused),
    Patch(_pjit, "create_meta_ty", _Unused),
    Patch(_core, "update_aval_with_sharding", _Unused),
    Patch(_core, "current_jaxpr_eqn_context", _Unused),
    Patch(_core, "get_sharding", _Unused),
    Patch(names.module("lax.lax"), "_broadcast_shapes_cached", _Unused),
    Patch(names.module("sharding_impls"), "canonicalize_sharding", _Unused, everywhere=True),
)
