"""Fourier transforms over static and open axes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from tests.harness import Arg, Case

COMPLEX = "complex64"


def _case(name: str, fn: Any, *args: Any, **options: Any) -> Case:
    options.setdefault("rtol", 1e-4)
    options.setdefault("atol", 1e-4)
    return Case(f"fft_{name}", fn, args, ("fft",), **options)


def power(x: Any) -> Any:
    return jnp.abs(jnp.fft.rfft(x)) ** 2


def low_pass(x: Any) -> Any:
    """Cut frequencies and transform back to the same size."""
    spectrum = jnp.fft.rfft(x)
    keep = jnp.arange(spectrum.shape[-1]) < 3
    return jnp.fft.irfft(jnp.where(keep, spectrum, 0), n=x.shape[-1])


CASES = [
    _case("batch_real", jnp.fft.rfft, "b, 7", grad=True),
    _case("batch_inverse_real", lambda x: jnp.fft.irfft(x, 6), Arg("b, s, 4", COMPLEX)),
    _case("open_of_real", jnp.fft.fft, "b, s", grad=True),
    _case("open_real", jnp.fft.rfft, "b, s", grad=True),
    _case("length", lambda x, y: jnp.fft.fft(x, y.shape[0]), Arg("b, 5", COMPLEX), "s"),
    _case("power", power, "b, s", grad=True, atol=3e-3),
    _case("low_pass", low_pass, "b, s", grad=True),
    _case("two_axes_one_open", jnp.fft.ifft2, Arg("s, 3", COMPLEX)),
    _case("two_axes_real", jnp.fft.rfft2, "s, 5", grad=True),
    _case("two_axes_real_open", jnp.fft.rfft2, "5, s", grad=True),
    _case(
        "two_axes_inverse_real",
        lambda x: jnp.fft.irfft2(x, (x.shape[0], 4)),
        Arg("s, 3", COMPLEX),
    ),
]
