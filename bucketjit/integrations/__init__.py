"""bucketjit in other libraries: a function takes and returns their own objects.

- `bucketjit.integrations.nnx` for Flax NNX: `nnx.jit` in the place of ``flax.nnx.jit``.
- `bucketjit.integrations.equinox` for Equinox: `equinox.filter_jit` in the place of
  ``equinox.filter_jit``.

A module here imports its library when it is used, not before.
"""

from bucketjit.integrations import equinox, nnx

__all__ = ["equinox", "nnx"]
