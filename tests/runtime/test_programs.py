"""Every family of rules in batches: each row has the result of the function alone, to its check."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec, Check
from tests.comparison import assert_close

LENGTHS = [5, 17, 1, 8, 3, 9, 5]
EVERY_LENGTH = [5, 17, 1, 8, 3, 16, 9, 2, 4, 7, 6, 12, 15, 10, 11, 13, 14, 5]
D = 6
RANDOM = np.random.default_rng(7)
W = RANDOM.standard_normal((D, D)).astype(np.float32)


def rows(lengths: list[int] = LENGTHS) -> list[np.ndarray]:
    return [RANDOM.standard_normal((n, D)).astype(np.float32) for n in lengths]


def attention(x: Any) -> Any:
    return jax.nn.softmax((x @ W) @ x.T, -1) @ x


def recurrent(x: Any) -> Any:
    return jax.lax.scan(lambda c, a: (jnp.tanh(c @ W + a), c), jnp.zeros(D), x)


def steps(x: Any) -> Any:
    def more(c: Any) -> Any:
        return (c[0] < 10.0) & (c[1] < 50)

    return jax.lax.while_loop(more, lambda c: (c[0] + jnp.abs(x).sum() * 0.01, c[1] + 1), (0.0, 0))


def until_small(x: Any) -> Any:
    """Halved until the sum is small: on padding alone it would end at once, or never."""
    return jax.lax.while_loop(lambda y: jnp.sum(y * y) > 1e-3, lambda y: y / 2, x)


def branches(x: Any) -> Any:
    return jax.lax.cond(x.sum() > 0, lambda x: x.sum(0), lambda x: -x.max(0), x)


def looping_branches(x: Any) -> Any:
    """A branch that would loop for ever where the other one is taken."""

    def halved(x: Any) -> Any:
        return jax.lax.while_loop(
            lambda n: n > 1.0, lambda n: n / jnp.where(x[0, 0] > 0, 2.0, 1.0), 9.0
        )

    return jax.lax.cond(x[0, 0] > 0, halved, lambda x: x[0, 0], x)


def gru(x: Any) -> Any:
    return jax.lax.fori_loop(0, x.shape[0], lambda i, h: jnp.tanh(h @ W + x[i]), jnp.zeros(D))


def strided(x: Any) -> Any:
    return jax.lax.conv_general_dilated(x.T[None], jnp.ones((4, D, 3), np.float32), (2,), "SAME")


def positive(x: Any) -> Any:
    return x @ x.T + D * jnp.eye(x.shape[0])


def histogram(x: Any) -> Any:
    return jnp.zeros(8).at[(jnp.abs(x[:, 0]) * 3).astype(int)].add(1.0)


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.max(0),
    "sort": lambda x: jnp.sort(x, 0),
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "attention": attention,
    "scan": recurrent,
    "flip": lambda x: x[::-1],
    "last": lambda x: x[-1],
    "median": lambda x: jnp.median(x, 0),
    "argmax": lambda x: jnp.argmax(x, 0),
    "layer norm": lambda x: (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5),
    "logsumexp": lambda x: jax.nn.logsumexp(x, 0),
    "convolution": strided,
    "cholesky": lambda x: jnp.linalg.cholesky(positive(x)),
    "determinant": lambda x: jnp.linalg.slogdet(positive(x))[1],
    "top k": lambda x: jax.lax.top_k(x.reshape(-1), 3)[0],
    "cumulative logsumexp": lambda x: jax.lax.cumlogsumexp(x, 0),
    "while": steps,
    "while by data": until_small,
    "cond": branches,
    "cond with loops": looping_branches,
    "fori": gru,
    "associative scan": lambda x: jax.lax.associative_scan(jnp.add, x),
    "merge": lambda x: jnp.sort(x.reshape(-1)),
    "dropout": lambda x: x * jax.random.bernoulli(jax.random.key(1), 0.5, x.shape),
    "gradient": jax.grad(lambda x: jnp.mean(jnp.log1p(x**2))),
    "scatter": histogram,
    "fft": lambda x: jnp.abs(jnp.fft.fft(x, axis=0)),
    "roll": lambda x: jnp.roll(x, 2, 0),
    "diff": lambda x: jnp.diff(x, axis=0),
    "norm": lambda x: jnp.linalg.norm(x, axis=0),
    "searchsorted": lambda x: jnp.searchsorted(jnp.sort(x[:, 0]), 0.3),
    "branch on the size": lambda x: x.max() if x.shape[0] > 6 else x.sum(),
    "by the number of rows": lambda x: x.sum() / x.shape[0] + jnp.arange(x.shape[0]).sum(),
    "tree": lambda x: {"a": x * 2, "b": (x.sum(), x[:, 0])},
    "integers": lambda x: jnp.round(x).astype(jnp.int32).sum(0),
    "half": lambda x: x.astype(jnp.bfloat16).max(0),
    "selection": lambda x: (x[x > 0].sum(), jnp.cumsum(x[x[:, 0] > 0], 0).sum()),
    "selection set": lambda x: x.at[x > 0].set(-x[x > 0]),
    "selection, its gradient": jax.grad(lambda x: (x[x > 0] ** 3).sum()),
    "unique": lambda x: jnp.unique(jnp.round(x)).sum(),
    "slice by data": lambda x: x[: jnp.argmax(x[:, 0]) + 1].sum(0),
}

COMPUTED = {n for n in PROGRAMS if n.startswith(("selection", "unique", "slice by data"))}


@pytest.mark.sampled(2, "cond with loops")
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_row_is_as_alone(name: str) -> None:
    fn = PROGRAMS[name]
    exact = fn if name in COMPUTED else jax.jit(fn)
    examples = rows([5, 17, 2, 8, 5])
    executor = BucketedExec(fn, dynamic_axes="s, _", check=Check.POISON).with_pow2(min=8)
    got = executor.map(examples)
    assert len(got) == len(examples)
    for example, result in zip(examples, got, strict=True):
        assert_close(result, exact(jnp.asarray(example)), 1e-4)
    stats = executor.stats()
    assert stats.rows == len(examples) and not stats.rows_alone and not stats.fallback_calls


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "sort", "fori", "while by data"])
def test_every_length(name: str) -> None:
    fn = PROGRAMS[name]
    examples = rows(EVERY_LENGTH)
    executor = BucketedExec(fn, dynamic_axes="s, _", check=Check.POISON).with_pow2(min=8)
    for example, result in zip(examples, executor.map(examples), strict=True):
        assert_close(result, fn(jnp.asarray(example)), 1e-4)
    assert executor.stats().rows == len(examples)


def test_the_exact_run_agrees() -> None:
    executor = BucketedExec(
        lambda x: (jnp.sort(x, 0), recurrent(x)), dynamic_axes="s, _", check=Check.EXACT_ALWAYS
    ).with_pow2(min=8)
    assert len(executor.map(rows([3, 9, 4]))) == 3


def test_a_wrong_rule_is_found() -> None:
    executor = (
        BucketedExec(lambda x: jnp.sum(x, 0), dynamic_axes="s, _", check=Check.POISON)
        .with_pow2(min=8)
        .with_rules({jax.lax.reduce_sum_p: lambda ctx, x: ctx.bind(x)})
    )
    with pytest.raises(Exception, match="reduce_sum"):
        executor.map(rows([3, 5]))
