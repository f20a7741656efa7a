"""Fourier transforms over static and open axes."""

from typing import Any

import jax
import jax.numpy as jnp

from tests.harness import cases, family

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

TABLE = {
    "batch": case(jnp.fft.fft, f"{COMPLEX}[b, 6]"),
    "batch_real": smooth(jnp.fft.rfft, "b, 7"),
    "batch_inverse_real": case(lambda x: jnp.fft.irfft(x, 6), f"{COMPLEX}[b, s, 4]"),
    "open": case(jnp.fft.fft, f"{COMPLEX}[b, s]"),
    "open_inverse": case(jnp.fft.ifft, f"{COMPLEX}[s]"),
    "open_first": case(lambda x: jnp.fft.fft(x, axis=0), f"{COMPLEX}[s, 3]"),
    "open_of_real": smooth(jnp.fft.fft),
    "open_real": smooth(jnp.fft.rfft),
    "open_inverse_real": case(jnp.fft.irfft, f"{COMPLEX}[b, s]", sizes=FROM_2),
    "length": case(lambda x, y: jnp.fft.fft(x, y.shape[0]), f"{COMPLEX}[b, 5]; s"),
    "power": smooth(power, atol=3e-3),
    "low_pass": smooth(low_pass),
    "two_axes": case(jnp.fft.fft2, f"{COMPLEX}[b, s, t]", buckets={"t": 6}),
    "two_axes_one_open": case(jnp.fft.ifft2, f"{COMPLEX}[s, 3]"),
    "two_axes_real": smooth(jnp.fft.rfft2, "s, 5"),
    "two_axes_real_open": smooth(jnp.fft.rfft2, "5, s"),
    "two_axes_inverse_real": case(lambda x: jnp.fft.irfft2(x, (x.shape[0], 4)), f"{COMPLEX}[s, 3]"),
    "half_symmetric": case(jnp.fft.hfft, f"{COMPLEX}[s]", sizes=({"s": 2}, {"s": 5}, {"s": 8})),
    "large": case(jnp.fft.fft, f"{COMPLEX}[s]", buckets={"s": 300}, atol=2e-4),
    "vmap": case(jax.vmap(jnp.fft.fft), f"{COMPLEX}[b, s]"),
}
CASES = cases(TABLE)
