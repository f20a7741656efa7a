"""Convolutions whose padding, and Fourier transforms whose length, are symbolic."""

from __future__ import annotations

import operator
from typing import Any

from jax.export import is_symbolic_dim

from bucketjit._jax import names
from bucketjit._jax.patches.patch import Patch, Reasons


class OperatorOfSizes:
    """The module ``operator`` with an ``index`` that returns a symbolic size unchanged.

    It replaces the name ``operator`` in a module of JAX whose functions call ``operator.index``.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(operator, name)

    @staticmethod
    def index(value: Any) -> Any:
        return value if is_symbolic_dim(value) else operator.index(value)


def _operator(module: str, why: str, since: str, delete_when: str) -> Patch:
    reasons = Reasons(why=why, since=since, delete_when=delete_when)
    return Patch(names.module(module), "operator", lambda original: OperatorOfSizes(), reasons)


SYMBOLIC_INDICES = (
    _operator(
        "lax.convolution",
        "The primitive takes symbolic padding, and padding='SAME' makes it, but explicit padding "
        "passes through operator.index. So does every gradient of a convolution.",
        "lax.convolution.conv_general_dilated, 0.4",
        "conv_general_dilated takes explicit padding that is symbolic",
    ),
    _operator(
        "numpy.fft",
        "The primitive takes symbolic lengths; operator.index does not.",
        "numpy.fft, 0.2",
        "jax.numpy.fft.fft takes a symbolic length",
    ),
)
