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


def _bucketjit(name: str, configure: Callable[[Any, Sizes], Any]) -> Entry:
    options = {"configure": configure}
    return Entry(f"bucketjit, {name}", "with_bucketjit:bucketed", options=options)


ENTRIES = (
    Entry("jax.jit per shape", "with_jax:jit_per_shape"),
    Entry("naive pow2: jnp.pad, y[:n]", "with_jax:naive"),
    Entry("pad to the largest", "with_jax:pad_to_largest"),
    Entry("expert pow2", "with_jax:expert"),
    _bucketjit(
        "pow2",
        lambda e, _: e.with_pow2("b", min=SMALLEST_BATCH).with_pow2("s", min=SMALLEST_LENGTH),
    ),
    _bucketjit("linear", lambda e, _: e.with_linear(4, "b").with_linear(32, "s")),
    _bucketjit(
        "exponential",
        lambda e, _: e.with_exponential(2, "b", min=4).with_exponential(1.4, "s", min=16),
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
    _bucketjit("pow2, no floors", lambda e, _: e.with_pow2()),
    _bucketjit("auto", lambda e, _: _learning(e)),
    _bucketjit("12 fitted buckets", lambda e, sizes: _fitted(e, sizes, 12)),
    _bucketjit(
        "12 fitted, in the background",
        lambda e, sizes: _fitted(e.with_background_compile(), sizes, 12),
    ),
)


def _by_variable(sizes: Sizes) -> dict[str, list[int]]:
    return {"b": [b for b, _ in sizes], "s": [s for _, s in sizes]}


def _learning(executor: Any) -> Any:
    from bucketjit.strategies import Auto

    return executor.with_strategy(Auto())


def _fitted(executor: Any, sizes: Sizes, k: int) -> Any:
    from bucketjit.strategies import fit

    for dim, strategy in fit(_by_variable(sizes), k).items():
        executor = executor.with_strategy(strategy, dim)
    return executor


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
