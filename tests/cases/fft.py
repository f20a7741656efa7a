"""Fourier transforms over static and open axes."""

from typing import Any

import jax
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


FROM_2 = ({"b": 1, "s": 2}, {"b": 4, "s": 5}, {"b": 3, "s": 8})

CASES = [
    _case("batch", jnp.fft.fft, Arg("b, 6", COMPLEX)),
    _case("batch_real", jnp.fft.rfft, "b, 7", grad=True),
    _case("batch_inverse_real", lambda x: jnp.fft.irfft(x, 6), Arg("b, s, 4", COMPLEX)),
    _case("open", jnp.fft.fft, Arg("b, s", COMPLEX)),
    _case("open_inverse", jnp.fft.ifft, Arg("s", COMPLEX)),
    _case("open_first", lambda x: jnp.fft.fft(x, axis=0), Arg("s, 3", COMPLEX)),
    _case("open_of_real", jnp.fft.fft, "b, s", grad=True),
    _case("open_real", jnp.fft.rfft, "b, s", grad=True),
    _case("open_inverse_real", jnp.fft.irfft, Arg("b, s", COMPLEX), sizes=FROM_2),
    _case("length", lambda x, y: jnp.fft.fft(x, y.shape[0]), Arg("b, 5", COMPLEX), "s"),
    _case("power", power, "b, s", grad=True, atol=3e-3),
    _case("low_pass", low_pass, "b, s", grad=True),
    _case("two_axes", jnp.fft.fft2, Arg("b, s, t", COMPLEX), buckets={"t": 6}),
    _case("two_axes_one_open", jnp.fft.ifft2, Arg("s, 3", COMPLEX)),
    _case("two_axes_real", jnp.fft.rfft2, "s, 5", grad=True),
    _case("two_axes_real_open", jnp.fft.rfft2, "5, s", grad=True),
    _case(
        "two_axes_inverse_real",
        lambda x: jnp.fft.irfft2(x, (x.shape[0], 4)),
        Arg("s, 3", COMPLEX),
    ),
    _case("half_symmetric", jnp.fft.hfft, Arg("s", COMPLEX), sizes=({"s": 2}, {"s": 5}, {"s": 8})),
    _case("large", jnp.fft.fft, Arg("s", COMPLEX), buckets={"s": 300}, atol=2e-4),
    _case("vmap", jax.vmap(jnp.fft.fft), Arg("b, s", COMPLEX)),
]
