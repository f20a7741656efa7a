"""bucketjit: the function without masks, and a strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import bucketjit
from benchmarks.contenders import SMALLEST_LENGTH, Contender
from benchmarks.contenders.jax_encoder import encode
from benchmarks.encoder import Sizes
from bucketjit import Fallback, strategies
from examples.compile_counter import CompileCounter


def bucketed(
    weights: Any, sizes: Sizes, buckets: Callable[[Any, Sizes], Any], background: bool = False
) -> Contender:
    """The encoder with open batch and length; ``buckets`` makes its buckets."""
    counter = CompileCounter()
    weights = jax.device_put(weights)
    executor = bucketjit.jit(
        encode,
        dynamic_axes=(None, "b, s"),
        buckets=buckets(strategies, sizes),
        fallback=Fallback.ERROR,
    )
    if background:
        executor = executor.with_background_compile()

    def run(tokens: np.ndarray) -> np.ndarray:
        return np.asarray(executor(weights, tokens))

    def note() -> str:
        return f"padding {executor.stats().padding_waste:.0%}"

    return Contender(run, lambda: counter.compiles, note)


def by_rows(weights: Any, sizes: Sizes) -> Contender:
    """The encoder of one row, whose calls give their rows to `map`."""
    counter = CompileCounter()
    weights = jax.device_put(weights)

    def encode_row(weights: Any, tokens: Any) -> Any:
        return encode(weights, tokens[None])[0]

    executor = bucketjit.jit(
        encode_row,
        dynamic_axes=(None, "s"),
        buckets=strategies.Pow2(min=SMALLEST_LENGTH),
        fallback=Fallback.ERROR,
    )

    def run(tokens: np.ndarray) -> np.ndarray:
        return np.stack(executor.map(weights, list(tokens), in_axes=(None, 0), out="numpy"))

    def note() -> str:
        return f"padding {executor.stats().padding_waste:.0%}"

    return Contender(run, lambda: counter.compiles, note)
