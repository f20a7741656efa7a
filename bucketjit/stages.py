"""The stages of ahead-of-time compilation: what `BucketedExec.trace` and ``lower`` return.

As in ``jax.stages``: `Traced` is lowered, `Lowered` is compiled, and `Compiled` is called.
"""

from bucketjit._stages.compiled import Compiled
from bucketjit._stages.lowered import Lowered, Traced

__all__ = ["Compiled", "Lowered", "Traced"]
