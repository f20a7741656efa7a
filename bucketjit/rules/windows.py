"""Reductions over sliding windows (pooling), and what their gradients are made of.

Padding that a logical window reads holds the neutral element. Where there is none to be had (a
user's own reducer, or an order that NaN is part of), a flag beside each element says whether it
is real, and the reducer passes over what is not: XLA passes over padding in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core

from bucketjit import _jax
from bucketjit._dims import Shape, is_symbolic
from bucketjit._rule import Rule, RuleContext
from bucketjit.rules._monoids import Identity, all_ones, highest, lowest, one, zero
from bucketjit.rules._sliding import Slide, along, fit, unfold, zeros

Reducer = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]

_LISTS = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")


def slides_of(ctx: RuleContext, shape: Shape, out: Shape) -> list[Slide]:
    """How the window of this equation slides along each axis of an array of this shape."""
    params = ctx.symbolic_params
    ones = (1,) * len(shape)
    slides = [
        Slide(size, window, stride, low, high, base, apart, count)
        for size, window, stride, (low, high), base, apart, count in zip(
            shape,
            params["window_dimensions"],
            params["window_strides"],
            params["padding"],
            params.get("base_dilation", ones),
            params.get("window_dilation", ones),
            out,
            strict=True,
        )
    ]
    for slide in slides:
        slide.check(ctx)
    return slides


class Layout:
    """Operands laid out so that windows with static parameters read what logical ones read.

    Attributes:
        params: Window parameters to bind with.
        identical: True if the operands are as they came.
    """

    def __init__(self, ctx: RuleContext, slides: Sequence[Slide]) -> None:
        self._ctx = ctx
        self._slides = slides
        self._unfolded: dict[int, tuple[Any, Any]] = {}
        self._placed: list[int] = []
        self.filled = [
            i for i, s in enumerate(slides) if not s.is_static and self._reads_padding(s)
        ]
        lists = {
            name: [getattr(s, field) for s in slides]
            for name, field in zip(
                _LISTS, ("window", "stride", "", "base_dilation", "window_dilation"), strict=True
            )
            if field
        }
        lists["padding"] = [(s.low, s.high) for s in slides]
        for i, slide in enumerate(slides):
            if slide.is_static or slide.is_pointwise:
                continue
            static: tuple[Any, ...]
            if is_symbolic(slide.window) or is_symbolic(slide.stride):
                raise NotImplementedError
        self.params = {name: tuple(values) for name, values in lists.items()}
