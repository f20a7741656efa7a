"""JAX on ragged data: one executable per bucket of sizes, with the masks derived for you.

>>> import jax.numpy as jnp, numpy as np
>>> import bucketjit
>>> norm = bucketjit.jit(jnp.linalg.norm, buckets="pow2")
>>> round(float(norm(np.ones(9, np.float32))), 3)
3.0
"""

import importlib
from typing import TYPE_CHECKING, Any

from bucketjit._version import __version__

if TYPE_CHECKING:
    from bucketjit import errors, integrations, metrics, rules, stages, strategies, types
    from bucketjit._api.executor import BucketedExec, jit
    from bucketjit._api.kernel import kernel, sized
    from bucketjit._api.loaded import load, refine
    from bucketjit._arrays.padded import Padded
    from bucketjit._config import Check, CompileBudget, Fallback, Overflow
    from bucketjit._runtime.rows.stacked import Ragged

__all__ = [
    "BucketedExec",
    "Check",
    "CompileBudget",
    "Fallback",
    "Overflow",
    "Padded",
    "Ragged",
    "__version__",
    "errors",
    "integrations",
    "jit",
    "kernel",
    "load",
    "metrics",
    "refine",
    "rules",
    "sized",
    "stages",
    "strategies",
    "types",
]

# Where each public name is, imported when it is first used, as NumPy and SciPy do. What is in none
# of these is a module of the package.
_PLACES = {
    "BucketedExec": "_api.executor",
    "Check": "_config",
    "CompileBudget": "_config",
    "Fallback": "_config",
    "Overflow": "_config",
    "Padded": "_arrays.padded",
    "Ragged": "_runtime.rows.stacked",
    "jit": "_api.executor",
    "kernel": "_api.kernel",
    "load": "_api.loaded",
    "refine": "_api.loaded",
    "sized": "_api.kernel",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_PLACES.get(name, name)}")
    found = getattr(module, name) if name in _PLACES else module
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
