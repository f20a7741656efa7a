"""Convolutions whose padding, and Fourier transforms whose length, are symbolic."""

from __future__ import annotations

import operator
from typing import Any

from jax.export import is_symbolic_dim

from bucketjit._jax import names
from bucketjit._jax.patches.patch import Patch


class OperatorOfSizes:
    """The module ``operator`` with an ``index`` that returns a symbolic size unchanged.

    It replaces the name ``operator`` in modules of JAX whose functions call ``operator.index``. The
    primitives take symbolic lengths and padding. Explicit padding, which every gradient of a
    convolution has, and the lengths of transforms pass through ``operator.index``. Since
    lax.convolution, 0.4, and numpy.fft, 0.2. Until jnp.fft.fft takes a symbolic length, and
    conv_general_dilated symbolic padding.
    """

    def __init__(self, original: Any = None) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(operator, name)

    @staticmethod
    def index(value: Any) -> Any:
        return value if is_symbolic_dim(value) else operator.index(value)


SYMBOLIC_INDICES = tuple(
    Patch(names.module(name), "operator", OperatorOfSizes)
    for name in ("lax.convolution", "numpy.fft")
)
