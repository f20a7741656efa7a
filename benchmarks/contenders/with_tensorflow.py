"""TensorFlow: one graph for all sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.contenders import Contender
from benchmarks.encoder import HEADS, WIDTH, Sizes


def function(weights: Any, sizes: Sizes) -> Contender:
    """``tf.function`` with an open batch and length."""
    held = tf.nest.map_structure(tf.constant, weights)

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)])
    def encode(tokens: Any) -> Any:
        batch, length = tf.unstack(tf.shape(tokens))
        x = tf.gather(held["tokens"], tokens) + held["positions"][:length]
        for layer in held["layers"]:
            h = tf.reshape(_norm(x) @ layer["qkv"], (batch, length, 3, HEADS, WIDTH // HEADS))
            q, k, v = tf.unstack(tf.transpose(h, (2, 0, 3, 1, 4)))
            scores = tf.matmul(q, k, transpose_b=True) / (WIDTH // HEADS) ** 0.5
            h = tf.transpose(tf.nn.softmax(scores) @ v, (0, 2, 1, 3))
            x = x + tf.reshape(h, (batch, length, WIDTH)) @ layer["out"]
            x = x + tf.nn.gelu(_norm(x) @ layer["up"], approximate=True) @ layer["down"]
        return _norm(x)

    def run(tokens: np.ndarray) -> np.ndarray:
        return encode(tokens).numpy()

    return Contender(run, encode.experimental_get_tracing_count)


def _norm(x: Any) -> Any:
    centred = x - tf.reduce_mean(x, -1, keepdims=True)
    return centred * tf.math.rsqrt(tf.reduce_mean(centred**2, -1, keepdims=True) + 1e-5)
