"""Convolutions whose padding is computed from symbolic sizes."""

from __future__ import annotations

import operator
from typing import Any

from jax.export import is_symbolic_dim

from bucketjit._jax import names
from bucketjit._jax.patches.patch import Patch

_convolution = names.module("lax.convolution")


class OperatorOfSizes:
    """The module ``operator`` with an ``index`` that returns a symbolic size unchanged.

    It replaces the name ``operator`` in a module of JAX whose functions call ``operator.index``.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(operator, name)

    @staticmethod
    def index(value: Any) -> Any:
        return value if is_symbolic_dim(value) else operator.index(value)


def convolution_padding() -> list[Patch]:
    """Convolutions accept explicit padding that is symbolic.

    JAX rejects it (``lax.convolution.conv_general_dilated``, since 0.4), though the primitive takes
    it.
    """
    return [
        Patch(
            _convolution,
            "operator",
            OperatorOfSizes(),
            why="The primitive takes symbolic padding, and padding='SAME' makes it, but explicit "
            "padding passes through operator.index. So does every gradient of a convolution.",
            since="lax.convolution.conv_general_dilated, 0.4",
            delete_when="conv_general_dilated takes explicit padding that is symbolic",
        )
    ]
