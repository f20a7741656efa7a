"""The compiler options that select what XLA's CPU backend leaves to its library YNN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WITHOUT_REDUCTIONS = (
    "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
)


def library_options(without_reductions: bool) -> Mapping[str, Any]:
    """The options of XLA that select what its CPU backend leaves to its library.

    By default the library (YNN) computes reductions, matrix products and convolutions, each in one
    kernel. The option is experimental: if a compile fails with an error in which `refused_option`
    finds it, the compile is repeated without it.
    """
    if not without_reductions:
        return {}
    return {"xla_cpu_experimental_ynn_fusion_type": _WITHOUT_REDUCTIONS}
