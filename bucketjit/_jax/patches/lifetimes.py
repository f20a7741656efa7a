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
from jax.export import is_symbolic_dim

from bucketjit._jax import names
from bucketjit._jax.config import same_nan_checks
from bucketjit._jax.patches.patch import Patch, patch
from bucketjit._jax.tracers import traces_are_unshared
from bucketjit._jax.transformations import hold_weakly

_core = names.module("core")
_partial_eval = names.module("interpreters.partial_eval")
_pjit = names.module("pjit")
_util = names.module("util")
_FlatTree = names.module("tree_util").FlatTree

_here = threading.local()


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """A context that drops what this thread traced with symbolic sizes, and looks for NaNs again."""
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
    if copies is None or not (_is_open(values) or traces_are_unshared()):
        return original
    if original not in copies:
        copies[original] = copy(original)
    return copies[original]


def _is_open(value: object) -> bool:
    """Whether a value, or one in it, is a symbolic size or of a symbolic shape."""
    if isinstance(value, tuple | _FlatTree):
        return any(map(_is_open, value))
    shape = getattr(value, "shape", ())
    return is_symbolic_dim(value) or (isinstance(shape, tuple) and any(map(is_symbolic_dim, shape)))


def _same_function(function: Any) -> Any:
    """Another object that is the same function to JAX."""
    return functools.update_wrapper(functools.partial(function), function)


class _SamePrimitive:
    """Another object that is the same primitive to the cache of types, which holds it weakly."""

    def __init__(self, primitive: Any) -> None:
        self.abstract_eval = primitive.abstract_eval


hold_weakly(_SamePrimitive)


def _empty(cache: Any) -> Any:
    """A cache of the same function."""
    return _util.cache()(cache.__wrapped__)


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


class _Traces:
    """Functions that loops trace are copies, too; see `inner_functions`.

    Since 0.8. Until JAX's caches hold symbolic sizes weakly.
    """

    _copy: Callable[[Any], Any] = staticmethod(_same_function)

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __call__(self, key: Any, *args: Any, **kwargs: Any) -> Any:
        key = _copied(key, self._copy, *args, *kwargs.values())
        return self._cache(key, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class _Types(_Traces):
    """Types of results of primitives are kept by a copy of the primitive.

    Since 0.7. Until JAX's caches hold symbolic sizes weakly.
    """

    _copy = _SamePrimitive


class _Small(_Traces):
    """A cache of other things has a copy, with the results of one trace.

    Since 0.4. Until JAX's caches hold symbolic sizes weakly.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _copied(self._cache, _empty, *args)(*args, **kwargs)


class _Shardings(_Traces):
    """A cache that knows static arguments, such as sizes, is left out: it saves next to nothing.

    Since 0.4. Until JAX's caches hold symbolic sizes weakly.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        used = getattr(_here, "copies", None) is None
        return (self._cache if used else self._cache.__wrapped__)(*args, **kwargs)


CACHES = (
    inner_functions,
    Patch(_partial_eval, "trace_to_jaxpr", _Traces),
    Patch(names.module("ad_checkpoint"), "_trace_to_jaxpr", _Traces),
    Patch(_partial_eval, "_cached_abstract_eval", _Types),
    Patch(_pjit, "_process_in_axis_resources", _Shardings),
    Patch(_pjit, "_check_and_canonicalize_out_shardings", _Shardings),
    Patch(_pjit, "create_meta_ty", _Small),
    Patch(_core, "current_jaxpr_eqn_context", _Small),
    Patch(_core, "get_sharding", _Small),
    Patch(_core, "update_aval_with_sharding", _Small),
    Patch(names.module("lax.lax"), "_broadcast_shapes_cached", _Small),
    Patch(names.module("sharding_impls"), "canonicalize_sharding", _Small, everywhere=True),
)
