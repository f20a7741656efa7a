"""The compiler options that select what XLA's CPU backend leaves to its library YNN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def library_options(side_by_side: bool, without_reductions: bool) -> Mapping[str, Any]:
    """The options of XLA that select what its CPU backend leaves to its library.

    By default the library (YNN) computes reductions, matrix products and convolutions, each in one
    kernel. The option is experimental: if a compile fails with an error in which `refused_option`
    finds it, the compile is repeated without it.

    Args:
        side_by_side: Whether several executables run at the same time. The library then gets no
            matrix products and convolutions: its products took up to 1.3 times as long for two side
            by side (transformers, jaxlib 0.10 and 0.12).
        without_reductions: Whether the library would get reductions of the program wrong. XLA then
            compiles kernels for them, and the compile takes 1.1 to 1.5 times as long (transformers;
            20 ms more for an MLP).

    Returns:
        The options; empty for XLA's defaults.
    """
    reductions = () if without_reductions else ("REDUCE",)
    others = () if side_by_side else ("INDIVIDUAL_DOT", "INDIVIDUAL_CONVOLUTION")
    if reductions and others:
        return {}
    kinds = ",".join(f"LIBRARY_FUSION_TYPE_{kind}" for kind in (*reductions, *others))
    return {"xla_cpu_experimental_ynn_fusion_type": kinds}
