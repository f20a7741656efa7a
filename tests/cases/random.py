"""Random draws: exactly the bits of the exact run."""

import functools

import jax
import jax.numpy as jnp
from jax import random

from tests.harness import arguments, cases, family

WORDS = "0:4294967296"
BOTH = ({"b": 3, "s": 5}, {"b": 4, "s": 1})


def draw(fn, args="key[]; b, s", covers="random_bits", **options):
    """A case of a draw, at few sizes: the values of other arguments hardly matter."""
    if {v for a in arguments(args) for v in a.sizes if not v.isdigit()} == {"b", "s"}:
        options = {"sizes": BOTH, **options}
    return family(covers, "random_", domains=("mixed",), **options)(fn, args)


split = functools.partial(draw, covers="random_split")
gamma = functools.partial(draw, covers="random_gamma")
permuted = functools.partial(draw, covers="sort")
drawn_of_few = functools.partial(draw, covers="")


def sampler(fn, *params):
    """A sampler of ``jax.random`` over an open leading and an open inner axis."""
    return draw(lambda k, x: fn(k, *params, shape=x.shape))


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


BITS = {
    "bits_lead": draw(lambda k, x: random.bits(k, x.shape), "key[]; b, 3"),
    "bits_inner": draw(lambda k, x: random.bits(k, (2, *x.shape, 3)), "key[]; s"),
    "bits_both": draw(_bits(jnp.uint32)),
    "bits_8": draw(_bits(jnp.uint8)),
    "bits_16": draw(_bits(jnp.uint16)),
    "bits_raw_key": draw(
        _bits(jnp.uint32), f"uint32[2] {WORDS}; b, s", covers="random_bits random_wrap"
    ),
    "bits_constant_key": draw(lambda x: random.bits(_CONSTANT, x.shape), "b, s"),
    "bits_expression": draw(lambda k, x: random.bits(k, (x.size, 2 * x.shape[1]))),
    "bits_per_key": draw(
        lambda k, x: jax.vmap(lambda key: random.bits(key, x.shape))(k), "key[b]; s"
    ),
    "bits_key_batch": draw(jax.vmap(lambda k: random.bits(k, (3,))), "key[b]"),
    "bits_key_square": draw(
        lambda k, x: jax.vmap(jax.vmap(lambda key: random.bits(key, x.shape)))(k), "key[2, b]; s"
    ),
    "split": split(lambda k, x: random.split(k, x.shape[0]), "key[]; b"),
    "split_raw": draw(
        lambda k, x: random.split(k, x.shape[0]),
        f"uint32[2] {WORDS}; s",
        covers="random_split random_wrap random_unwrap",
    ),
    "split_both": split(lambda k, x: random.split(k, x.shape)),
    "split_keys": split(jax.vmap(random.split), "key[b]"),
    "split_keys_many": split(
        lambda k, x: jax.vmap(lambda key: random.split(key, x.shape[0]))(k), "key[b]; s"
    ),
    "fold_in": draw(jax.vmap(random.fold_in), "key[b]; uint32[b]", covers="random_fold_in"),
    "fold_in_size": draw(
        lambda k, x: random.key_data(random.fold_in(k, x.shape[0])) + x[0].astype(jnp.uint32),
        "key[]; b",
        covers="random_fold_in",
    ),
    "seed": draw(jax.vmap(random.key), f"uint32[b] {WORDS}", covers="random_seed"),
    "wrap": draw(
        lambda words: random.wrap_key_data(words), f"uint32[b, 2] {WORDS}", covers="random_wrap"
    ),
    "unwrap": draw(lambda k: random.key_data(k), "key[b]", covers="random_unwrap"),
    "clone": draw(lambda k: random.clone(k), "key[b]", covers="random_clone"),
    "threefry": draw(
        lambda words: jax.extend.random.threefry_2x32(words[0, :2], words.ravel()),
        f"uint32[b, 2] {WORDS}",
        covers="threefry2x32",
    ),
    "split_rbg": split(
        lambda x: random.key_data(random.split(random.key(7, impl="rbg"), x.shape)), "b, s"
    ),
    **{
        f"generator_{name}": draw(
            lambda x, impl=name: random.normal(random.key(7, impl=impl), x.shape), "b, s"
        )
        for name in ("philox2x32", "philox4x32", "threefry4x32")
    },
}

BY_TOTAL = {
    "total_bits_lead": draw(by_total(_bits(jnp.uint32)), "key[]; b, 3"),
    "total_bits_both": draw(by_total(_bits(jnp.uint32))),
    "total_bits_8": draw(by_total(_bits(jnp.uint8))),
    "total_bits_16": draw(by_total(_bits(jnp.uint16))),
    "total_normal": draw(by_total(lambda k, x: random.normal(k, x.shape))),
    "total_bits_per_key": draw(
        by_total(lambda k, x: jax.vmap(lambda key: random.bits(key, x.shape))(k)), "key[b]; s"
    ),
    "total_split": split(by_total(lambda k, x: random.split(k, x.shape[0])), "key[]; b"),
    "total_split_both": split(by_total(lambda k, x: random.split(k, x.shape))),
    "total_split_rbg": split(
        by_total(lambda x: random.key_data(random.split(random.key(7, impl="rbg"), x.shape[0]))),
        "b",
    ),
}

SAMPLERS = {
    "uniform": sampler(random.uniform),
    "uniform_range": sampler(lambda k, shape: random.uniform(k, shape, minval=-3, maxval=5)),
    "uniform_bfloat16": sampler(lambda k, shape: random.uniform(k, shape, jnp.bfloat16)),
    "normal": sampler(random.normal),
    "normal_complex": sampler(lambda k, shape: random.normal(k, shape, jnp.complex64)),
    "bernoulli": sampler(random.bernoulli, 0.3),
    "randint": sampler(lambda k, shape: random.randint(k, shape, -4, 9)),
    "randint_uint8": sampler(lambda k, shape: random.randint(k, shape, 3, 200, jnp.uint8)),
    "gumbel": sampler(random.gumbel),
    "exponential": sampler(random.exponential),
    "laplace": sampler(random.laplace),
    "cauchy": sampler(random.cauchy),
    "logistic": sampler(random.logistic),
    "rademacher": sampler(random.rademacher),
    "truncated_normal": sampler(random.truncated_normal, -2.0, 1.5),
    "rayleigh": sampler(random.rayleigh, 1.5),
    "weibull_min": sampler(random.weibull_min, 1.5, 2.0),
    "maxwell": sampler(random.maxwell),
    "geometric": sampler(random.geometric, 0.3),
    "triangular": sampler(random.triangular, 0.0, 0.3, 1.0),
    "uniform_limits": draw(lambda k, x: random.uniform(k, x.shape, minval=-x, maxval=x)),
    "randint_size": drawn_of_few(lambda k, x: random.randint(k, (5,), 0, x.shape[0]), "key[]; s"),
    "categorical": draw(lambda k, x: random.categorical(k, x)),
    "categorical_axis": draw(lambda k, x: random.categorical(k, x, axis=0)),
    "choice": drawn_of_few(lambda k, x: random.choice(k, x, (5,)), "key[]; s"),
    "choice_of_a_count": drawn_of_few(lambda k, x: random.choice(k, x.shape[0], (5,)), "key[]; s"),
    "choice_by_weight": drawn_of_few(
        lambda k, x: [
            random.choice(k, x, (5,), p=jax.nn.softmax(x)),
            random.choice(k, x.shape[0], (5,), p=jax.nn.softmax(x)),
        ],
        "key[]; s",
    ),
    "choice_without_replacement": drawn_of_few(
        lambda k, x: [
            random.choice(k, x, (1,), replace=False),
            random.choice(k, x, (x.shape[0],), replace=False, p=jax.nn.softmax(x[:, 0])),
        ],
        "key[]; s, 2",
    ),
    "permutation": permuted(lambda k, x: random.permutation(k, x), "key[]; s"),
    "permutation_of_rows": permuted(lambda k, x: random.permutation(k, x)),
    "permutation_of_columns": permuted(
        lambda k, x: [
            random.permutation(k, x, axis=1),
            random.permutation(k, x, axis=1, independent=True),
            random.permutation(k, x.shape[1]),
        ]
    ),
    "choice_many": draw(lambda k, x: random.choice(k, 7, x.shape)),
    "multivariate_normal": draw(
        lambda k, m: random.multivariate_normal(k, m, jnp.eye(3)), "key[]; b, 3", rtol=1e-4
    ),
    "dropout": draw(_dropout, grad=True),
    "layers": draw(_layers, grad=True),
    "per_example": draw(_per_example, covers="random_bits random_split"),
    "reparameterised": draw(
        lambda k, m, s: (m + jnp.exp(s) * random.normal(k, m.shape)).mean(),
        "key[]; b, s; b, s",
        grad=True,
    ),
}

FEW = ({"b": 3, "s": 2},)
SMALL = {"sizes": FEW, "buckets": {"b": 4, "s": 4}}

REJECTION = {
    "gamma": gamma(_positive(random.gamma), **SMALL),
    "gamma_gradient": gamma(
        lambda k, x: jax.grad(lambda y: jnp.sum(random.gamma(k, jnp.exp(y)) ** 2))(x),
        rtol=1e-4,
        **SMALL,
    ),
    "gamma_per_key": gamma(
        lambda k, x: jax.vmap(random.gamma)(k, jnp.abs(x) + 0.5), "key[b]; b, s", **SMALL
    ),
    "loggamma": gamma(_positive(random.loggamma), "key[]; b", sizes=({"b": 3},)),
    "beta": gamma(
        lambda k, x: random.beta(k, jnp.abs(x) + 0.5, 2.0), "key[]; b", sizes=({"b": 3},)
    ),
    "dirichlet": gamma(_positive(random.dirichlet), **SMALL),
    "chisquare": gamma(_positive(random.chisquare), "key[]; b", sizes=({"b": 3},)),
    "t": gamma(lambda k, x: random.t(k, 3.0, x.shape), "key[]; b", sizes=({"b": 3},)),
    "poisson": draw(lambda k, x: random.poisson(k, jnp.abs(x) * 4), **SMALL),
    "poisson_per_key": draw(
        lambda k, x: jax.vmap(random.poisson)(k, jnp.abs(x) * 4),
        "key[b]; b, s",
        covers="while",
        **SMALL,
    ),
    "poisson_large": draw(lambda k, x: random.poisson(k, 20 + jnp.abs(x)), **SMALL),
    "binomial": draw(lambda k, x: random.binomial(k, 10.0, jax.nn.sigmoid(x)), **SMALL),
    "double_sided_maxwell": draw(
        lambda k, x: random.double_sided_maxwell(k, x, 2.0), "key[]; b", sizes=({"b": 3},)
    ),
}

CASES = cases(BITS | BY_TOTAL | SAMPLERS | REJECTION)
