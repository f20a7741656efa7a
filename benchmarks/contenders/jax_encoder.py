"""The encoder in JAX: as one writes it, and with the mask that an expert adds for padding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.encoder import HEADS


def norm(x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def encode(weights: Any, tokens: Any, real: Any | None = None) -> Any:
    """States of shape (batch, length, width); ``real`` is False where tokens are padding."""
    return transform(
        weights, weights["tokens"][tokens] + weights["positions"][: tokens.shape[1]], real
    )


def transform(weights: Any, x: Any, real: Any | None = None) -> Any:
    """The layers of the encoder, of embedded tokens to states."""
    batch, length, width = x.shape
    for layer in weights["layers"]:
        h = norm(x) @ layer["qkv"]
        q, k, v = (
            h[..., i * width : (i + 1) * width].reshape(batch, length, HEADS, width // HEADS)
            for i in range(3)
        )
        scores = jnp.einsum("bshd,bthd->bhst", q, k) / (width // HEADS) ** 0.5
        if real is not None:
            scores = jnp.where(real[:, None, None, :], scores, -1e30)
        h = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores, axis=-1), v)
        x = x + h.reshape(batch, length, width) @ layer["out"]
        x = x + jax.nn.gelu(norm(x) @ layer["up"]) @ layer["down"]
    return norm(x)


def is_real(b: Any, s: Any, shape: tuple[int, int]) -> Any:
    """Where an array of padded ``shape`` holds ``b`` rows of ``s`` tokens."""
    return (jnp.arange(shape[0])[:, None] < b) & (jnp.arange(shape[1])[None, :] < s)


def encode_masked(weights: Any, tokens: Any, b: Any, s: Any) -> Any:
    """The expert's function of padded tokens, of which ``b`` rows of ``s`` are real."""
    real = is_real(b, s, tokens.shape)
    return jnp.where(real[..., None], encode(weights, tokens, real), 0)
