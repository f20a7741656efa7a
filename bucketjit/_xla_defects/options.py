"""Compiler options that say what XLA's CPU backend leaves to its library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def library_options(side_by_side: bool, without_reductions: bool) -> Mapping[str, Any]:
    """Options of XLA: what its CPU backend leaves to its library.

    The library (YNN) gets, as a rule, reductions, matrix products and convolutions, each of them a
    kernel. The option is experimental: whoever uses it goes on without it where `refused_option`
    names it.

    Args:
        side_by_side: Several executables run at the same time. Of the library, matrix products took
            up to 1.3 times as long for two side by side (transformers, jaxlib 0.10 and 0.12).
        without_reductions: The library gets reductions of the program wrong.
            XLA compiles kernels for them then, which takes 1.1 to 1.5 times as long (transformers;
            of an MLP 20 ms more).
    """
    reductions = () if without_reductions else ("REDUCE",)
    others = () if side_by_side else ("INDIVIDUAL_DOT", "INDIVIDUAL_CONVOLUTION")
    if reductions and others:
        return {}
    kinds = ",".join(f"LIBRARY_FUSION_TYPE_{kind}" for kind in (*reductions, *others))
    return {"xla_cpu_experimental_ynn_fusion_type": kinds}
