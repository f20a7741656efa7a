"""Who runs the stream: a list of names, and how each one is made.

Nothing is imported before it is asked for: the process of one contender holds one framework.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.encoder import Sizes

# Floors save compiles at little padding. All that use powers of two have the same buckets.
SMALLEST_BATCH, SMALLEST_LENGTH = 4, 16


@dataclass(frozen=True)
class Contender:
    """One way of running the encoder.

    Attributes:
        run: Takes token numbers of shape (batch, length); returns the states on the host.
        compiles: How many programs have been compiled so far.
        note: What a reader of its row has to know.
    """

    run: Callable[[np.ndarray], np.ndarray]
    compiles: Callable[[], int]
    note: Callable[[], str] = lambda: ""


@dataclass(frozen=True)
class Entry:
    """A row of the table.

    Attributes:
        name: What the row is called.
        maker: ``"module:function"`` in this package; called as ``function(weights, sizes)``.
        package: The distribution whose version the row names.
        peer: Whether it runs in the environment of the peers.
        options: Further arguments of the function.
    """

    name: str
    maker: str
    package: str = "jax"
    peer: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def load(self) -> Callable[..., Contender]:
        """Import what it needs.

        Returns:
            The function that makes it, of weights and sizes.
        """
        module, function = self.maker.split(":")
        maker = getattr(importlib.import_module(f"{__name__}.{module}"), function)
        return functools.partial(maker, **self.options)


def _bucketjit(name: str, buckets: Callable[[Any, Sizes], Any], **more: Any) -> Entry:
    options = {"buckets": buckets, **more}
    return Entry(f"bucketjit, {name}", "with_bucketjit:bucketed", options=options)


ENTRIES = (
    Entry("jax.jit per shape", "with_jax:jit_per_shape"),
    Entry("naive pow2: jnp.pad, y[:n]", "with_jax:naive"),
    Entry("pad to the largest", "with_jax:pad_to_largest"),
    Entry("expert pow2", "with_jax:expert"),
    _bucketjit(
        "pow2",
        lambda by, _: {"b": by.Pow2(min=SMALLEST_BATCH), "s": by.Pow2(min=SMALLEST_LENGTH)},
    ),
    _bucketjit("linear", lambda by, _: {"b": by.Linear(4), "s": by.Linear(32)}),
    _bucketjit(
        "exponential",
        lambda by, _: {"b": by.Exponential(2, min=4), "s": by.Exponential(1.4, min=16)},
    ),
    Entry("bucketjit, rows by map", "with_bucketjit:by_rows"),
    Entry("torch eager", "with_torch:eager", "torch", peer=True),
    Entry("torch.compile(dynamic=True)", "with_torch:compiled", "torch", peer=True),
    Entry("onnxruntime, dynamic axes", "with_onnxruntime:session", "onnxruntime", peer=True),
    Entry("IREE, open sizes", "with_iree:open_sizes", "iree-base-compiler", peer=True),
    Entry("IREE, one per pow2 bucket", "with_iree:per_bucket", "iree-base-compiler", peer=True),
    Entry("TensorFlow tf.function", "with_tensorflow:function", "tensorflow-cpu", peer=True),
)


# Plans that know the sizes of the stream, beside powers of two without floors, as they come.
PLANS = (
    Entry("expert pow2, no floors", "with_jax:expert_without_floors"),
    Entry("expert pow2", "with_jax:expert"),
    _bucketjit("pow2, no floors", lambda *_: "pow2"),
    _bucketjit("auto", lambda *_: "auto"),
    _bucketjit("12 fitted buckets", lambda by, sizes: by.fit(_by_variable(sizes), 12)),
    _bucketjit(
        "12 fitted, in the background",
        lambda by, sizes: by.fit(_by_variable(sizes), 12),
        background=True,
    ),
)


def _by_variable(sizes: Sizes) -> dict[str, list[int]]:
    return {"b": [b for b, _ in sizes], "s": [s for _, s in sizes]}


def entry(name: str) -> Entry:
    """The entry of a name."""
    for candidate in (*ENTRIES, *PLANS):
        if candidate.name == name:
            return candidate
    raise ValueError(f"no contender {name!r}; there are {[e.name for e in ENTRIES]}")


def pow2_bucket(batch: int, length: int) -> tuple[int, int]:
    """The bucket of all who use powers of two."""
    return (
        max(SMALLEST_BATCH, 1 << (batch - 1).bit_length()),
        max(SMALLEST_LENGTH, 1 << (length - 1).bit_length()),
    )


def padded(tokens: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """The tokens with zeros behind, as fast as NumPy does it."""
    out = np.zeros(shape, tokens.dtype)
    out[: tokens.shape[0], : tokens.shape[1]] = tokens
    return out
