"""Convolutions whose padding is computed of symbolic sizes."""

from __future__ import annotations

import operator
from typing import Any

from jax.export import is_symbolic_dim

from bucketjit._jax import names

_convolution = names.module("lax.convolution")


class OperatorOfSizes:
    """The ``operator`` module, with an ``index`` that lets symbolic sizes through."""

    def __getattr__(self, name: str) -> Any:
        return getattr(operator, name)

    @staticmethod
    def index(value: Any) -> Any:
        return value if is_symbolic_dim(value) else operator.index(value)


def convolution_padding() -> list[tuple[Any, str, Any]]:
    """``(module, name, replacement)`` that lets convolutions have symbolic explicit padding.

    The primitive takes it, and ``padding="SAME"`` makes it, but ``conv_general_dilated``
    (since 0.4) passes explicit padding through ``operator.index``. So does every gradient of a
    convolution, which therefore does not trace with symbolic spatial sizes.
    """
    return [(_convolution, "operator", OperatorOfSizes())]
