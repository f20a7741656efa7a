"""Fourier transforms over static and open axes."""

from typing import Any

import jax
import jax.numpy as jnp

from tests.harness import family

case, smooth = (family("fft", "fft_", rtol=1e-4, atol=1e-4, grad=g) for g in (False, True))

COMPLEX = "complex64"


def power(x: Any) -> Any:
    return jnp.abs(jnp.fft.rfft(x)) ** 2


def low_pass(x: Any) -> Any:
    """Cut frequencies and transform back to the same size."""
    spectrum = jnp.fft.rfft(x)
    keep = jnp.arange(spectrum.shape[-1]) < 3
    return jnp.fft.irfft(jnp.where(keep, spectrum, 0), n=x.shape[-1])


FROM_2 = ({"b": 1, "s": 2}, {"b": 4, "s": 5}, {"b": 3, "s": 8})

CASES = [
    case("batch", jnp.fft.fft, f"{COMPLEX}[b, 6]"),
    smooth("batch_real", jnp.fft.rfft, "b, 7"),
    case("batch_inverse_real", lambda x: jnp.fft.irfft(x, 6), f"{COMPLEX}[b, s, 4]"),
    case("open", jnp.fft.fft, f"{COMPLEX}[b, s]"),
    case("open_inverse", jnp.fft.ifft, f"{COMPLEX}[s]"),
    case("open_first", lambda x: jnp.fft.fft(x, axis=0), f"{COMPLEX}[s, 3]"),
    smooth("open_of_real", jnp.fft.fft),
    smooth("open_real", jnp.fft.rfft),
    case("open_inverse_real", jnp.fft.irfft, f"{COMPLEX}[b, s]", sizes=FROM_2),
    case("length", lambda x, y: jnp.fft.fft(x, y.shape[0]), f"{COMPLEX}[b, 5]; s"),
    smooth("power", power, atol=3e-3),
    smooth("low_pass", low_pass),
    case("two_axes", jnp.fft.fft2, f"{COMPLEX}[b, s, t]", buckets={"t": 6}),
    case("two_axes_one_open", jnp.fft.ifft2, f"{COMPLEX}[s, 3]"),
    smooth("two_axes_real", jnp.fft.rfft2, "s, 5"),
    smooth("two_axes_real_open", jnp.fft.rfft2, "5, s"),
    case("two_axes_inverse_real", lambda x: jnp.fft.irfft2(x, (x.shape[0], 4)), f"{COMPLEX}[s, 3]"),
    case("half_symmetric", jnp.fft.hfft, f"{COMPLEX}[s]", sizes=({"s": 2}, {"s": 5}, {"s": 8})),
    case("large", jnp.fft.fft, f"{COMPLEX}[s]", buckets={"s": 300}, atol=2e-4),
    case("vmap", jax.vmap(jnp.fft.fft), f"{COMPLEX}[b, s]"),
]
