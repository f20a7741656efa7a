"""The encoder that every contender of the stream runs: sizes, weights, and results by NumPy.

NumPy alone, so that a process measures the framework of its contender and nothing else.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LAYERS, HEADS, WIDTH, VOCABULARY = 6, 4, 128, 1000
LARGEST_BATCH, SHORTEST, LONGEST = 8, 4, 512

Sizes = list[tuple[int, int]]


def draw_sizes(calls: int, seed: int = 0) -> Sizes:
    """(batch, length) of each call: lengths of sentences are about lognormal.

    Of 1,000 calls about 610 have a pair of their own.
    """
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(np.log(48), 0.7, calls)).round().astype(int)
    batches = rng.integers(1, LARGEST_BATCH + 1, calls)
    return [(int(b), int(s)) for b, s in zip(batches, lengths.clip(SHORTEST, LONGEST), strict=True)]


def draw_tokens(sizes: Sizes, seed: int = 1) -> list[np.ndarray]:
    """Token numbers of each call."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, shape, dtype=np.int32) for shape in sizes]


def draw_weights(
    layers: int = LAYERS, vocabulary: int = VOCABULARY, seed: int = 2, width: int = WIDTH
) -> Any:
    """Weights of a layer by name, and the tables of tokens and positions."""
    rng = np.random.default_rng(seed)

    def dense(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * shape[0] ** -0.5).astype(np.float32)

    def table(rows: int) -> np.ndarray:
        return rng.standard_normal((rows, width)).astype(np.float32)

    shapes = {"qkv": (width, 3 * width), "out": (width, width)}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    return {
        "tokens": table(vocabulary),
        "positions": table(LONGEST),
        "layers": [{name: dense(*shape) for name, shape in shapes.items()} for _ in range(layers)],
    }


def _norm(x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x * x * x)))


def encode(weights: Any, tokens: np.ndarray) -> np.ndarray:
    """What every contender has to return: states of shape (batch, length, width)."""
    batch, length = tokens.shape
    x = weights["tokens"][tokens] + weights["positions"][:length]
    for layer in weights["layers"]:
        qkv = (_norm(x) @ layer["qkv"]).reshape(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.transpose(2, 0, 3, 1, 4)
        scores = q @ k.swapaxes(-1, -2) / (WIDTH // HEADS) ** 0.5
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = scores / scores.sum(-1, keepdims=True) @ v
        x = x + mixed.transpose(0, 2, 1, 3).reshape(batch, length, WIDTH) @ layer["out"]
        x = x + _gelu(_norm(x) @ layer["up"]) @ layer["down"]
    return _norm(x)
