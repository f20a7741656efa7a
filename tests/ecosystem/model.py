"""A model as data: what to build, which axes of its inputs are open, and the sizes to try."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

# How a call is served, the best way last.
WAYS = ("exact", "paired", "masked")

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Array:
    """An input: its shape as text, names being open axes, and how to draw its contents."""

    shape: str
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

    def axes(self) -> tuple[str, ...]:
        """Its open axes."""
        return tuple(dict.fromkeys(re.findall(r"[a-z]\w*", self.shape)))

    def spec(self) -> str | None:
        """Its entry of ``dynamic_axes``."""
        return ", ".join("_" if a.isdigit() else a for a in self._tokens()) or None

    def make(self, rng: np.random.Generator, sizes: Sizes) -> np.ndarray:
        """Contents at these sizes."""
        shape = tuple(eval(token, {}, dict(sizes)) for token in self._tokens())
        return self.draw(rng, shape)

    def _tokens(self) -> list[str]:
        return [token.strip() for token in self.shape.split(",") if token.strip()]


def floats(shape: str, scale: float = 1.0) -> Array:
    """Normal numbers."""
    return Array(shape, lambda rng, s: (scale * rng.standard_normal(s)).astype(np.float32))


def uniform(shape: str, low: float = 0.0, high: float = 1.0) -> Array:
    """Numbers of an interval."""
    return Array(shape, lambda rng, s: rng.uniform(low, high, s).astype(np.float32))


def sorted_floats(shape: str, low: float = 0.0, high: float = 1.0) -> Array:
    """Numbers of an interval in ascending order: times."""
    return Array(shape, lambda rng, s: np.sort(rng.uniform(low, high, s)).astype(np.float32))


def ints(shape: str, below: int) -> Array:
    """Labels, tokens."""
    return Array(shape, lambda rng, s: rng.integers(0, below, s).astype(np.int32))


def flags(shape: str, share: float = 0.7) -> Array:
    """Booleans; the first of every row is True."""

    def draw(rng: np.random.Generator, s: tuple[int, ...]) -> np.ndarray:
        drawn = rng.random(s) < share
        drawn[..., 0] = True
        return drawn

    return Array(shape, draw)


BATCH = ({"b": 3}, {"b": 8}, {"b": 1})
SEQUENCE = ({"b": 3, "s": 6}, {"b": 4, "s": 8}, {"b": 1, "s": 11})
IMAGE = ({"b": 3, "h": 6, "w": 7}, {"b": 4, "h": 8, "w": 8}, {"b": 1, "h": 9, "w": 5})
_USUAL = {frozenset(sizes[0]): sizes for sizes in (BATCH, SEQUENCE, IMAGE)}


@dataclass(frozen=True)
class Model:
    """A function a user would bucket.

    Attributes:
        name: What it is.
        build: Makes the function and its leading arguments without open axes (parameters, state).
        inputs: Its other arguments.
        sizes: Sizes to call it at, in turn; None for the usual ones of its axes.
        way: How its calls are served, at the least: ``masked``, ``paired`` or ``exact``.
        tolerance: Of floats, relative to the largest of their array.
        constraints: What always holds of the sizes.
        make: Inputs that depend on each other: a function of a generator and the sizes. The
            inputs then say their axes only.
        defect: Why it does not work yet, where it does not.
    """

    name: str
    build: Callable[[], tuple[Any, ...]]
    inputs: tuple[Array, ...]
    sizes: Sequence[Sizes] | None = None
    way: str = "masked"
    tolerance: float = 2e-5
    constraints: tuple[str, ...] = ()
    make: Callable[[np.random.Generator, Sizes], tuple[Any, ...]] | None = None
    defect: str = ""

    def axes(self) -> tuple[str, ...]:
        """Its open axes."""
        return tuple(dict.fromkeys(a for x in self.inputs for a in x.axes()))

    def all_sizes(self) -> Sequence[Sizes]:
        """The sizes to call it at."""
        return self.sizes if self.sizes is not None else _USUAL[frozenset(self.axes())]

    def arguments(self, sizes: Sizes) -> tuple[Any, ...]:
        """Its inputs at these sizes."""
        rng = np.random.default_rng(sum(sizes.values()))
        if self.make is not None:
            return self.make(rng, sizes)
        return tuple(x.make(rng, sizes) for x in self.inputs)


def initialised(init: Callable[..., Any], *args: Any, seed: int = 0) -> Any:
    """Parameters, by one compile."""
    return jax.jit(init)(jax.random.key(seed), *args)
