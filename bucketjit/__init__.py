"""JAX on ragged data: one executable per bucket of sizes, with the masks derived for you.

>>> import jax.numpy as jnp, numpy as np
>>> import bucketjit
>>> norm = bucketjit.BucketedExec(jnp.linalg.norm).with_pow2()
>>> round(float(norm(np.ones(9, np.float32))), 3)
3.0
"""

from bucketjit import errors, integrations, metrics, rules, stages, strategies, types
from bucketjit._api.decorator import jit
from bucketjit._api.executor import BucketedExec
from bucketjit._api.loaded import load
from bucketjit._api.refining import refine
from bucketjit._api.sized import sized
from bucketjit._arrays.padded import Padded
from bucketjit._config import Check, CompileBudget, Fallback, Overflow
from bucketjit._precompile.manifest import Manifest
from bucketjit._ragged.stacked import Ragged
from bucketjit._version import __version__

__all__ = [
    "BucketedExec",
    "Check",
    "CompileBudget",
    "Fallback",
    "Manifest",
    "Overflow",
    "Padded",
    "Ragged",
    "__version__",
    "errors",
    "integrations",
    "jit",
    "load",
    "metrics",
    "refine",
    "rules",
    "sized",
    "stages",
    "strategies",
    "types",
]
