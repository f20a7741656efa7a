"""PyTorch: eager, and compiled once for open sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks.contenders import Contender
from benchmarks.encoder import HEADS, WIDTH, Sizes


class Encoder(torch.nn.Module):
    """The encoder, with the attention that PyTorch brings along."""

    def __init__(self, weights: Any) -> None:
        super().__init__()
        self.tokens = _parameter(weights["tokens"])
        self.positions = _parameter(weights["positions"])
        self.layers = torch.nn.ModuleList(
            torch.nn.ParameterDict({name: _parameter(w) for name, w in layer.items()})
            for layer in weights["layers"]
        )

    def forward(self, tokens: Any) -> Any:
        batch, length = tokens.shape
        x = functional.embedding(tokens, self.tokens) + self.positions[:length]
        for layer in self.layers:
            h = (_norm(x) @ layer["qkv"]).view(batch, length, 3, HEADS, WIDTH // HEADS)
            q, k, v = h.permute(2, 0, 3, 1, 4).unbind(0)
            h = functional.scaled_dot_product_attention(q, k, v)
            x = x + h.transpose(1, 2).reshape(batch, length, WIDTH) @ layer["out"]
            up = _norm(x) @ layer["up"]
            x = x + functional.gelu(up, approximate="tanh") @ layer["down"]
        return _norm(x)


def _parameter(array: np.ndarray) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.from_numpy(array), requires_grad=False)


def _norm(x: Any) -> Any:
    return functional.layer_norm(x, (WIDTH,), eps=1e-5)


def eager(weights: Any, sizes: Sizes) -> Contender:
    """Nothing is compiled."""
    return Contender(_runner(Encoder(weights)), lambda: 0)


def compiled(weights: Any, sizes: Sizes) -> Contender:
    """``torch.compile`` with open sizes; it specialises on some all the same, and recompiles."""
    from torch._dynamo.utils import counters

    def graphs() -> int:
        return counters["stats"]["unique_graphs"]

    return Contender(_runner(torch.compile(Encoder(weights), dynamic=True)), graphs)


def _runner(model: Any) -> Any:
    def run(tokens: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return model(torch.from_numpy(tokens)).numpy()

    return run
