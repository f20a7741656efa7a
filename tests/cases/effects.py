"""Callbacks whose results matter; tests/masking/rules/test_effects.py tests what they see."""

import jax
import numpy as np
from jax import lax
from jax.experimental import io_callback

from tests.harness import Arg, Case


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
    Case("pure_callback", _on_host(_sort), ("b, s",), ("pure_callback",)),
    Case("pure_callback_special", _on_host(_sort), ("s",), domains=("mixed", "special")),
    Case("pure_callback_uint8", _on_host(_sort), (Arg("s, b", "uint8", low=0, high=200),)),
    Case("pure_callback_bool", _on_host(np.logical_not), (Arg("b", "bool"),)),
    Case("pure_callback_reshaped", _reshaped, ("b, s",), ("pure_callback",)),
    Case(
        "pure_callback_in_scan",
        lambda x: lax.map(_on_host(_sort), x),
        ("b, s",),
        ("pure_callback", "scan"),
        domains=("mixed",),
    ),
    Case("io_callback", _on_host(_sort, io_callback), ("b, s",), ("io_callback",)),
    Case(
        "debug_callback",
        _debugged,
        ("b, s",),
        ("debug_callback", "debug_print"),
        grad=True,
        domains=("mixed",),
    ),
]
