"""Random draws: exactly the bits of the exact run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import random

from tests.harness import family

WORDS = "0:4294967296"
BOTH = ({"b": 3, "s": 5}, {"b": 4, "s": 1})


def draw(name, fn, args="key[]; b, s", covers="random_bits", **options):
    """A case of a draw, at few sizes: the values of other arguments hardly matter."""
    case = family(covers, "random_", domains=("mixed",), **options)(name, fn, args)
    if case.variables == ["b", "s"] and "sizes" not in options:
        return dataclasses.replace(case, sizes=BOTH)
    return case


split = functools.partial(draw, covers="random_split")
gamma = functools.partial(draw, covers="random_gamma")
permuted = functools.partial(draw, covers="sort")
drawn_of_few = functools.partial(draw, covers="")


def sampler(name, fn, *params):
    """A sampler of ``jax.random`` over an open leading and an open inner axis."""
    return draw(name, lambda k, x: fn(k, *params, shape=x.shape))


def by_total(fn):
    """The same under the older numbering of threefry's counters."""

    @functools.wraps(fn)
    def wrapped(*args):
        with jax.threefry_partitionable(False):
            return fn(*args)

    return wrapped


_CONSTANT = random.key(11)


def _bits(dtype):
    return lambda k, x: random.bits(k, x.shape, dtype)


def _dropout(k, x):
    keep = random.bernoulli(k, 0.7, x.shape)
    return jnp.where(keep, x / 0.7, 0).mean(-1)


def _layers(k, x):
    for i in range(2):
        k, now = random.split(k)
        x = x + 0.1 * random.normal(now, x.shape) * random.uniform(random.fold_in(now, i))
    return x


def _per_example(k, x):
    return jax.vmap(lambda key, row: row + random.normal(key, row.shape))(
        random.split(k, x.shape[0]), x
    )


def _positive(sample):
    return lambda k, x: sample(k, jnp.abs(x) + 0.5)


BITS = [
    draw("bits_lead", lambda k, x: random.bits(k, x.shape), "key[]; b, 3"),
    draw("bits_inner", lambda k, x: random.bits(k, (2, *x.shape, 3)), "key[]; s"),
    draw("bits_both", _bits(jnp.uint32)),
    draw("bits_8", _bits(jnp.uint8)),
    draw("bits_16", _bits(jnp.uint16)),
    draw(
        "bits_raw_key",
        _bits(jnp.uint32),
        f"uint32[2] {WORDS}; b, s",
        covers="random_bits random_wrap",
    ),
    draw("bits_constant_key", lambda x: random.bits(_CONSTANT, x.shape), "b, s"),
    draw("bits_expression", lambda k, x: random.bits(k, (x.size, 2 * x.shape[1]))),
    draw(
        "bits_per_key", lambda k, x: jax.vmap(lambda key: random.bits(key, x.shape))(k), "key[b]; s"
    ),
    draw("bits_key_batch", jax.vmap(lambda k: random.bits(k, (3,))), "key[b]"),
    draw(
        "bits_key_square",
        lambda k, x: jax.vmap(jax.vmap(lambda key: random.bits(key, x.shape)))(k),
        "key[2, b]; s",
    ),
    split("split", lambda k, x: random.split(k, x.shape[0]), "key[]; b"),
    draw(
        "split_raw",
        lambda k, x: random.split(k, x.shape[0]),
        f"uint32[2] {WORDS}; s",
        covers="random_split random_wrap random_unwrap",
    ),
    split("split_both", lambda k, x: random.split(k, x.shape)),
    split("split_keys", jax.vmap(random.split), "key[b]"),
    split(
        "split_keys_many",
        lambda k, x: jax.vmap(lambda key: random.split(key, x.shape[0]))(k),
        "key[b]; s",
    ),
    draw("fold_in", jax.vmap(random.fold_in), "key[b]; uint32[b]", covers="random_fold_in"),
    draw(
        "fold_in_size",
        lambda k, x: random.key_data(random.fold_in(k, x.shape[0])) + x[0].astype(jnp.uint32),
        "key[]; b",
        covers="random_fold_in",
    ),
    draw("seed", jax.vmap(random.key), f"uint32[b] {WORDS}", covers="random_seed"),
    draw(
        "wrap",
        lambda words: random.wrap_key_data(words),
        f"uint32[b, 2] {WORDS}",
        covers="random_wrap",
    ),
    draw("unwrap", lambda k: random.key_data(k), "key[b]", covers="random_unwrap"),
    draw("clone", lambda k: random.clone(k), "key[b]", covers="random_clone"),
    draw(
        "threefry",
        lambda words: jax.extend.random.threefry_2x32(words[0, :2], words.ravel()),
        f"uint32[b, 2] {WORDS}",
        covers="threefry2x32",
    ),
    split(
        "split_rbg",
        lambda x: random.key_data(random.split(random.key(7, impl="rbg"), x.shape)),
        "b, s",
    ),
    *(
        draw(
            f"generator_{name}",
            lambda x, impl=name: random.normal(random.key(7, impl=impl), x.shape),
            "b, s",
        )
        for name in ("philox2x32", "philox4x32", "threefry4x32")
    ),
]

BY_TOTAL = [
    draw("total_bits_lead", by_total(_bits(jnp.uint32)), "key[]; b, 3"),
    draw("total_bits_both", by_total(_bits(jnp.uint32))),
    draw("total_bits_8", by_total(_bits(jnp.uint8))),
    draw("total_bits_16", by_total(_bits(jnp.uint16))),
    draw("total_normal", by_total(lambda k, x: random.normal(k, x.shape))),
    draw(
        "total_bits_per_key",
        by_total(lambda k, x: jax.vmap(lambda key: random.bits(key, x.shape))(k)),
        "key[b]; s",
    ),
    split("total_split", by_total(lambda k, x: random.split(k, x.shape[0])), "key[]; b"),
    split("total_split_both", by_total(lambda k, x: random.split(k, x.shape))),
    split(
        "total_split_rbg",
        by_total(lambda x: random.key_data(random.split(random.key(7, impl="rbg"), x.shape[0]))),
        "b",
    ),
]

SAMPLERS = [
    sampler("uniform", random.uniform),
    sampler("uniform_range", lambda k, shape: random.uniform(k, shape, minval=-3, maxval=5)),
    sampler("uniform_bfloat16", lambda k, shape: random.uniform(k, shape, jnp.bfloat16)),
    sampler("normal", random.normal),
    sampler("normal_complex", lambda k, shape: random.normal(k, shape, jnp.complex64)),
    sampler("bernoulli", random.bernoulli, 0.3),
    sampler("randint", lambda k, shape: random.randint(k, shape, -4, 9)),
    sampler("randint_uint8", lambda k, shape: random.randint(k, shape, 3, 200, jnp.uint8)),
    sampler("gumbel", random.gumbel),
    sampler("exponential", random.exponential),
    sampler("laplace", random.laplace),
    sampler("cauchy", random.cauchy),
    sampler("logistic", random.logistic),
    sampler("rademacher", random.rademacher),
    sampler("truncated_normal", random.truncated_normal, -2.0, 1.5),
    sampler("rayleigh", random.rayleigh, 1.5),
    sampler("weibull_min", random.weibull_min, 1.5, 2.0),
    sampler("maxwell", random.maxwell),
    sampler("geometric", random.geometric, 0.3),
    sampler("triangular", random.triangular, 0.0, 0.3, 1.0),
    draw("uniform_limits", lambda k, x: random.uniform(k, x.shape, minval=-x, maxval=x)),
    drawn_of_few("randint_size", lambda k, x: random.randint(k, (5,), 0, x.shape[0]), "key[]; s"),
    draw("categorical", lambda k, x: random.categorical(k, x)),
    draw("categorical_axis", lambda k, x: random.categorical(k, x, axis=0)),
    drawn_of_few("choice", lambda k, x: random.choice(k, x, (5,)), "key[]; s"),
    drawn_of_few("choice_of_a_count", lambda k, x: random.choice(k, x.shape[0], (5,)), "key[]; s"),
    drawn_of_few(
        "choice_by_weight",
        lambda k, x: [
            random.choice(k, x, (5,), p=jax.nn.softmax(x)),
            random.choice(k, x.shape[0], (5,), p=jax.nn.softmax(x)),
        ],
        "key[]; s",
    ),
    drawn_of_few(
        "choice_without_replacement",
        lambda k, x: [
            random.choice(k, x, (1,), replace=False),
            random.choice(k, x, (x.shape[0],), replace=False, p=jax.nn.softmax(x[:, 0])),
        ],
        "key[]; s, 2",
    ),
    permuted("permutation", lambda k, x: random.permutation(k, x), "key[]; s"),
    permuted("permutation_of_rows", lambda k, x: random.permutation(k, x)),
    permuted(
        "permutation_of_columns",
        lambda k, x: [
            random.permutation(k, x, axis=1),
            random.permutation(k, x, axis=1, independent=True),
            random.permutation(k, x.shape[1]),
        ],
    ),
    draw("choice_many", lambda k, x: random.choice(k, 7, x.shape)),
    draw(
        "multivariate_normal",
        lambda k, m: random.multivariate_normal(k, m, jnp.eye(3)),
        "key[]; b, 3",
        rtol=1e-4,
    ),
    draw("dropout", _dropout, grad=True),
    draw("layers", _layers, grad=True),
    draw("per_example", _per_example, covers="random_bits random_split"),
    draw(
        "reparameterised",
        lambda k, m, s: (m + jnp.exp(s) * random.normal(k, m.shape)).mean(),
        "key[]; b, s; b, s",
        grad=True,
    ),
]

FEW = ({"b": 3, "s": 2},)
SMALL = {"sizes": FEW, "buckets": {"b": 4, "s": 4}}

REJECTION = [
    gamma("gamma", _positive(random.gamma), **SMALL),
    gamma(
        "gamma_gradient",
        lambda k, x: jax.grad(lambda y: jnp.sum(random.gamma(k, jnp.exp(y)) ** 2))(x),
        rtol=1e-4,
        **SMALL,
    ),
    gamma(
        "gamma_per_key",
        lambda k, x: jax.vmap(random.gamma)(k, jnp.abs(x) + 0.5),
        "key[b]; b, s",
        **SMALL,
    ),
    gamma("loggamma", _positive(random.loggamma), "key[]; b", sizes=({"b": 3},)),
    gamma(
        "beta", lambda k, x: random.beta(k, jnp.abs(x) + 0.5, 2.0), "key[]; b", sizes=({"b": 3},)
    ),
    gamma("dirichlet", _positive(random.dirichlet), **SMALL),
    gamma("chisquare", _positive(random.chisquare), "key[]; b", sizes=({"b": 3},)),
    gamma("t", lambda k, x: random.t(k, 3.0, x.shape), "key[]; b", sizes=({"b": 3},)),
    draw("poisson", lambda k, x: random.poisson(k, jnp.abs(x) * 4), **SMALL),
    draw(
        "poisson_per_key",
        lambda k, x: jax.vmap(random.poisson)(k, jnp.abs(x) * 4),
        "key[b]; b, s",
        covers="while",
        **SMALL,
    ),
    draw("poisson_large", lambda k, x: random.poisson(k, 20 + jnp.abs(x)), **SMALL),
    draw("binomial", lambda k, x: random.binomial(k, 10.0, jax.nn.sigmoid(x)), **SMALL),
    draw(
        "double_sided_maxwell",
        lambda k, x: random.double_sided_maxwell(k, x, 2.0),
        "key[]; b",
        sizes=({"b": 3},),
    ),
]

CASES = BITS + BY_TOTAL + SAMPLERS + REJECTION
