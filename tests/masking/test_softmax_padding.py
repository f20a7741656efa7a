"""A softmax is filled once, and programs that only look like one are filled as ever."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec, Check

RANDOM = np.random.default_rng(5)


def by_hand(x: Any) -> Any:
    shifted = jnp.exp(x - jnp.max(x, -1, keepdims=True))
    return shifted / jnp.sum(shifted, -1, keepdims=True)


def attention(x: Any) -> Any:
    return jax.nn.softmax(x @ x.T, -1) @ x


SOFTMAXES: dict[str, Callable[[Any], Any]] = {
    "jax": lambda x: jax.nn.softmax(x, -1) @ jnp.ones((x.shape[1], 2)),
    "by hand": lambda x: by_hand(x) @ jnp.ones((x.shape[1], 2)),
    "attention": attention,
    "of halves": lambda x: jax.nn.softmax(x.astype(jnp.float16), -1) @ jnp.ones((x.shape[1], 2)),
    "a sum that rounds to 0": lambda x: (
        (y := jax.nn.softmax(x, -1) / 2**11)
        / y.astype(jnp.float8_e4m3fn).astype(jnp.float32).sum(-1, keepdims=True)
    ).sum(-1),
    "a sum to halves": lambda x: (
        (y := jnp.exp(x - x.max(-1, keepdims=True))) / y.sum(-1, keepdims=True).astype(jnp.float16)
    ).sum(-1),
    "logsumexp": lambda x: jax.nn.logsumexp(x, -1),
    "softmax of a row": lambda x: jax.nn.softmax(x[0]) @ jnp.ones(x.shape[1]),
    "logsumexp of all": lambda x: jax.nn.logsumexp(x) + jax.nn.logsumexp(x[0]),
    "log softmax": lambda x: jax.nn.log_softmax(x, -1).max(-1),
    "over both axes": lambda x: jax.nn.softmax(x, (0, 1)).sum(),
    "over one of two": lambda x: jax.nn.softmax(x, (0, 1)).sum(0),
    "along axis 0": lambda x: jnp.ones((3, x.shape[0])) @ jax.nn.softmax(x, 0),
    "gradient": lambda x: jax.grad(lambda y: (jax.nn.softmax(y @ y.T, -1) @ y)[0].sum())(x),
    "in a scan": lambda x: jax.lax.scan(
        lambda c, row: (c + (jax.nn.softmax(row) * row).sum(), None), jnp.zeros(()), x
    )[0],
    "mask": lambda x: jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf), -1) @ jnp.ones(x.shape[1]),
    # These have the equations of a softmax, and are none.
    "another maximum": lambda x: jnp.exp(x - jnp.max(jnp.flip(x, 0), -1, keepdims=True)).sum(-1),
    "along another axis": lambda x: jnp.exp(x - jnp.max(x, 0, keepdims=True)).sum(-1),
    "another sum": lambda x: (by_hand(x) / by_hand(x * 2).sum(0)).sum(-1),
    "of the exponential": lambda x: jnp.exp(jnp.max(x, -1, keepdims=True) - x).sum(-1),
    "a convolution": lambda x: jnp.convolve(by_hand(x)[0], jnp.ones(3), "full"),
    "a cumulative sum": lambda x: jnp.cumsum(by_hand(x)[:, ::-1], -1),
    "a product": lambda x: jnp.prod(by_hand(x), -1),
}

SPECIAL: dict[str, Callable[[np.ndarray], None]] = {
    "finite": lambda x: None,
    "nan": lambda x: x.__setitem__((0, 0), np.nan),
    "inf": lambda x: x.__setitem__((0, -1), np.inf),
    "-inf": lambda x: x.__setitem__((0, slice(1, None)), -np.inf),
    "all -inf": lambda x: x.__setitem__(0, -np.inf),
    "all nan": lambda x: x.__setitem__(0, np.nan),
    "large": lambda x: x.__imul__(1e30),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SOFTMAXES)
def test_results(name: str) -> None:
    fn = SOFTMAXES[name]
    spec = "n, _" if name in ("attention", "gradient") else "n, m"
    executor = BucketedExec(fn, dynamic_axes=spec).with_pow2(min=8)
    exact = jax.jit(fn)
    for n, m in [(3, 5), (1, 1), (5, 8)]:
        for special in SPECIAL.values():
            x = RANDOM.standard_normal((n, 5 if spec == "n, _" else m)).astype(np.float32)
            special(x)
            np.testing.assert_allclose(executor(x), exact(x), rtol=2e-5, atol=1e-6)
    assert executor.stats().fallback_calls == 0
    BucketedExec(fn, dynamic_axes="n, _", check=Check.POISON).with_pow2(min=8)(x)


NOTHING: dict[str, Callable[..., Any]] = {
    "all but the last": lambda x: jax.nn.softmax(x @ x[:-1].T, -1) @ x[:-1],
    "all but the first": lambda x: jax.nn.softmax(x @ x[1:].T, -1).sum(-1),
    "half": lambda x: jax.nn.softmax(x @ x[: x.shape[0] // 2].T, -1) @ x[: x.shape[0] // 2],
    "its gradient": jax.grad(lambda x: (jax.nn.softmax(x @ x[:-1].T, -1) @ x[:-1]).sum()),
    "a selection": lambda x: jax.nn.softmax(x @ x[x[:, 0] > 9].T, 1) @ x[x[:, 0] > 9],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NOTHING)
def test_an_axis_that_has_nothing(name: str) -> None:
    fn = NOTHING[name]
    exact = fn if name == "a selection" else jax.jit(fn)
    executor = BucketedExec(fn, dynamic_axes="n, _").with_pow2(min=8)
    for n in (1, 5):
        x = RANDOM.standard_normal((n, 4)).astype(np.float32)
        want = exact(jnp.asarray(x))
        np.testing.assert_allclose(executor(x), want, rtol=2e-5, atol=1e-6)
        if name != "a selection":  # its examples run one by one
            np.testing.assert_allclose(executor.map([x, x])[1], want, rtol=2e-5, atol=1e-6)


def selects(fn: Callable[..., Any]) -> int:
    executor = BucketedExec(fn, dynamic_axes="n, _").with_pow2(min=8)
    lowered = executor.lower(jax.ShapeDtypeStruct((5, 4), jnp.float32))
    return lowered.as_text().count("stablehlo.select")


def test_a_softmax_is_filled_once() -> None:
    # The scores, and the padding of the result.
    assert selects(attention) == 2
    # Halves are summed as floats.
    assert selects(lambda x: attention(x.astype(jnp.float16)).astype(jnp.float32)) == 2
    # The same where the scores are an argument, whose padding is known to hold 0.
    assert selects(lambda x: jax.nn.softmax(x, 0)) == 2
    # The scores, and 0 in the place of a maximum that is not finite.
    assert selects(lambda x: jax.nn.logsumexp(x @ x.T)) == 2
    # The exponentials are filled again: their sum could be NaN where no real value is.
    assert selects(lambda x: jnp.exp(x @ x.T - jnp.ones((1, x.shape[0]))).sum(-1)) == 2
