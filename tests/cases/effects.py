"""Callbacks whose results matter; tests/masking/rules/test_effects.py tests what they see."""

import jax
import numpy as np
from jax import lax
from jax.experimental import io_callback

from tests.harness import cases, family

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


TABLE = {
    "pure_callback": case(_on_host(_sort), covers="pure_callback"),
    "pure_callback_special": case(_on_host(_sort), "s", domains=("mixed", "special")),
    "pure_callback_uint8": case(_on_host(_sort), "uint8[s, b] 0:200"),
    "pure_callback_bool": case(_on_host(np.logical_not), "bool[b]"),
    "pure_callback_reshaped": case(_reshaped, covers="pure_callback"),
    "pure_callback_in_scan": case(
        lambda x: lax.map(_on_host(_sort), x), covers="pure_callback scan", domains=("mixed",)
    ),
    "io_callback": case(_on_host(_sort, io_callback), covers="io_callback"),
    "debug_callback": case(
        _debugged, covers="debug_callback debug_print", grad=True, domains=("mixed",)
    ),
}
CASES = cases(TABLE)
