"""Random draws: exactly the bits of the exact run."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import random

from tests.harness import Arg, Case

KEY = Arg("", "key")
KEYS = Arg("b", "key")
WORDS = {"low": 0, "high": 1 << 32}
RAW = Arg("2", "uint32", **WORDS)
BOTH = ({"b": 3, "s": 5}, {"b": 4, "s": 1})


def draw(name, fn, args, covers=("random_bits",), **options):
    """A case of a draw, at few sizes: the values of other arguments hardly matter."""
    arguments = [a if isinstance(a, Arg) else Arg(a) for a in args]
    variables = {t for a in arguments for t in a.sizes if not t.isdigit()}
    options.setdefault("sizes", BOTH if variables == {"b", "s"} else None)
    return Case(f"random_{name}", fn, tuple(arguments), covers, domains=("mixed",), **options)


def sampler(name, fn, *params, dtype="float32", **options):
    """A sampler of ``jax.random`` over an open leading and an open inner axis."""
    return draw(
        name, lambda k, x: fn(k, *params, shape=x.shape), (KEY, Arg("b, s", dtype)), **options
    )


def by_total(fn):
    """The same under the older numbering of threefry's counters."""

    @functools.wraps(fn)
    def wrapped(*args):
        with jax.threefry_partitionable(False):
            return fn(*args)

    return wrapped


def _bits(dtype):
    return lambda k, x: random.bits(k, x.shape, dtype)


def _layers(k, x):
    for i in range(2):
        k, now = random.split(k)
        x = x + 0.1 * random.normal(now, x.shape) * random.uniform(random.fold_in(now, i))
    return x


def _positive(sample):
    return lambda k, x: sample(k, jnp.abs(x) + 0.5)


BITS = [
    draw("bits_raw_key", _bits(jnp.uint32), (RAW, "b, s"), ("random_bits", "random_wrap")),
    draw("bits_key_batch", jax.vmap(lambda k: random.bits(k, (3,))), (KEYS,)),
    draw("fold_in", jax.vmap(random.fold_in), (KEYS, Arg("b", "uint32")), ("random_fold_in",)),
    draw("seed", jax.vmap(random.key), (Arg("b", "uint32", **WORDS),), ("random_seed",)),
    draw(
        "wrap",
        lambda words: random.wrap_key_data(words),
        (Arg("b, 2", "uint32", **WORDS),),
        ("random_wrap",),
    ),
    draw("clone", lambda k: random.clone(k), (KEYS,), ("random_clone",)),
    draw(
        "threefry",
        lambda words: jax.extend.random.threefry_2x32(words[0, :2], words.ravel()),
        (Arg("b, 2", "uint32", **WORDS),),
        ("threefry2x32",),
    ),
    draw(
        "split_rbg",
        lambda x: random.key_data(random.split(random.key(7, impl="rbg"), x.shape)),
        ("b, s",),
        ("random_split",),
    ),
    *(
        draw(
            f"generator_{name}",
            lambda x, impl=name: random.normal(random.key(7, impl=impl), x.shape),
            ("b, s",),
        )
        for name in ("philox2x32", "philox4x32", "threefry4x32")
    ),
]

BY_TOTAL = [
    draw("total_bits_both", by_total(_bits(jnp.uint32)), (KEY, "b, s")),
    draw("total_bits_8", by_total(_bits(jnp.uint8)), (KEY, "b, s")),
    draw("total_bits_16", by_total(_bits(jnp.uint16)), (KEY, "b, s")),
    draw(
        "total_bits_per_key",
        by_total(lambda k, x: jax.vmap(lambda key: random.bits(key, x.shape))(k)),
        (KEYS, "s"),
    ),
    draw(
        "total_split",
        by_total(lambda k, x: random.split(k, x.shape[0])),
        (KEY, "b"),
        ("random_split",),
    ),
    draw(
        "total_split_both",
        by_total(lambda k, x: random.split(k, x.shape)),
        (KEY, "b, s"),
        ("random_split",),
    ),
    draw(
        "total_split_rbg",
        by_total(lambda x: random.key_data(random.split(random.key(7, impl="rbg"), x.shape[0]))),
        ("b",),
        ("random_split",),
    ),
]

SAMPLERS = [
    sampler("uniform_bfloat16", lambda k, shape: random.uniform(k, shape, jnp.bfloat16)),
    sampler("randint", lambda k, shape: random.randint(k, shape, -4, 9)),
    sampler("cauchy", random.cauchy),
    sampler("truncated_normal", random.truncated_normal, -2.0, 1.5),
    draw("permutation", lambda k, x: random.permutation(k, x), (KEY, "s"), ("sort",)),
    draw("choice_many", lambda k, x: random.choice(k, 7, x.shape), (KEY, "b, s")),
]

FEW = ({"b": 3, "s": 2},)
SMALL = {"sizes": FEW, "buckets": {"b": 4, "s": 4}}

REJECTION = [
    draw(
        "gamma",
        _positive(random.gamma),
        (KEY, "b, s"),
        ("random_gamma",),
        **SMALL,
    ),
    draw(
        "gamma_gradient",
        lambda k, x: jax.grad(lambda y: jnp.sum(random.gamma(k, jnp.exp(y)) ** 2))(x),
        (KEY, "b, s"),
        ("random_gamma",),
        rtol=1e-4,
        **SMALL,
    ),
    draw(
        "gamma_per_key",
        lambda k, x: jax.vmap(random.gamma)(k, jnp.abs(x) + 0.5),
        (KEYS, "b, s"),
        ("random_gamma",),
        **SMALL,
    ),
    draw(
        "dirichlet",
        _positive(random.dirichlet),
        (KEY, "b, s"),
        ("random_gamma",),
        **SMALL,
    ),
    draw("poisson", lambda k, x: random.poisson(k, jnp.abs(x) * 4), (KEY, "b, s"), **SMALL),
    draw(
        "poisson_per_key",
        lambda k, x: jax.vmap(random.poisson)(k, jnp.abs(x) * 4),
        (KEYS, "b, s"),
        ("while",),
        **SMALL,
    ),
]

CASES = BITS + BY_TOTAL + SAMPLERS + REJECTION
