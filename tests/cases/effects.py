"""Callbacks whose results matter; tests/masking/rules/test_effects.py tests what they see."""

import jax
import numpy as np
from jax import lax
from jax.experimental import io_callback

from tests.harness import family

case = family()


def _on_host(function, call=jax.pure_callback, **options):
    def fn(x):
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return call(lambda y: function(np.asarray(y)), out, x, **options)

    return fn


def _sort(x):
    return np.sort(x, axis=-1)


def _reshaped(x):
    out = jax.ShapeDtypeStruct((x.size, 2), x.dtype)
    return jax.pure_callback(lambda y: np.stack([np.ravel(y)] * 2, 1), out, x).mean(0)


def _debugged(x):
    jax.debug.callback(lambda y: None, x)
    jax.debug.print("{}", x.mean())
    return x - x.mean()


CASES = [
    case("pure_callback", _on_host(_sort), covers="pure_callback"),
    case("pure_callback_special", _on_host(_sort), "s", domains=("mixed", "special")),
    case("pure_callback_uint8", _on_host(_sort), "uint8[s, b] 0:200"),
    case("pure_callback_bool", _on_host(np.logical_not), "bool[b]"),
    case("pure_callback_reshaped", _reshaped, covers="pure_callback"),
    case(
        "pure_callback_in_scan",
        lambda x: lax.map(_on_host(_sort), x),
        covers="pure_callback scan",
        domains=("mixed",),
    ),
    case("io_callback", _on_host(_sort, io_callback), covers="io_callback"),
    case(
        "debug_callback",
        _debugged,
        covers="debug_callback debug_print",
        grad=True,
        domains=("mixed",),
    ),
]
