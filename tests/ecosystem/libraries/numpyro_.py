"""NumPyro: log densities, their gradients, and draws."""

import jax
import jax.numpy as jnp
import pytest

from tests.ecosystem.model import Model, floats, ints, sorted_floats

numpyro = pytest.importorskip("numpyro", reason="numpyro is not installed")

import numpyro.distributions as dist  # noqa: E402
from numpyro import handlers  # noqa: E402
from numpyro.infer import SVI, Predictive, Trace_ELBO  # noqa: E402
from numpyro.infer.autoguide import AutoNormal  # noqa: E402
from numpyro.infer.util import log_density, potential_energy  # noqa: E402


def regression(x, y=None):
    w = numpyro.sample("w", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, scale), obs=y)


def logistic(x, y=None):
    w = numpyro.sample("w", dist.StudentT(4.0, jnp.zeros(3), 1.0).to_event(1))
    bias = numpyro.sample("bias", dist.Cauchy(0.0, 1.0))
    numpyro.sample("y", dist.Bernoulli(logits=x @ w + bias), obs=y)


def hierarchical(group, y=None):
    """Eight schools, their members in one array."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 5.0))
    spread = numpyro.sample("spread", dist.HalfCauchy(5.0))
    with numpyro.plate("groups", 8):
        offset = numpyro.sample("offset", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", group.shape[0]):
        numpyro.sample("y", dist.Normal(mean + spread * offset[group], 1.0), obs=y)


def mixture(x):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    places = numpyro.sample("places", dist.Normal(jnp.zeros(3), 2.0).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        parts = dist.Normal(places, 0.5)
        numpyro.sample("x", dist.MixtureSameFamily(dist.Categorical(weights), parts), obs=x)


def gaussian_process(x, y):
    """A covariance of all pairs, and its Cholesky factor."""
    length = numpyro.sample("length", dist.LogNormal(0.0, 1.0))
    squared = (x[:, None] - x[None, :]) ** 2
    covariance = jnp.exp(-0.5 * squared / length**2) + 0.1 * jnp.eye(x.shape[0])
    numpyro.sample("y", dist.MultivariateNormal(0.0, covariance), obs=y)


def random_walk(y):
    drift = numpyro.sample("drift", dist.Normal(0.0, 0.1))
    numpyro.sample("y", dist.GaussianRandomWalk(0.5, num_steps=y.shape[-1]), obs=y - drift)


def hidden_markov(states, words):
    with numpyro.plate("rows", 3):
        transition = numpyro.sample("transition", dist.Dirichlet(jnp.ones(3)))
        emission = numpyro.sample("emission", dist.Dirichlet(jnp.ones(5)))
    numpyro.sample("states", dist.Categorical(transition[states[:, :-1]]), obs=states[:, 1:])
    numpyro.sample("words", dist.Categorical(emission[states]), obs=words)


def density(model, **params):
    """Log density of the parameters and the data, with its gradient."""
    params = {name: jnp.asarray(value) for name, value in params.items()}

    def build():
        def value(params, *data):
            return log_density(model, data, {}, params)[0]

        return jax.value_and_grad(value), params

    return build


def potential():
    """What NUTS steps on: unconstrained parameters."""

    def energy(params, x, y):
        return potential_energy(regression, (x, y), {}, params)

    return jax.value_and_grad(energy), {"w": jnp.ones(3), "scale": jnp.float32(0.3)}


def elbo():
    """A step of stochastic variational inference."""
    svi = SVI(logistic, AutoNormal(logistic), numpyro.optim.Adam(1e-3), Trace_ELBO())
    x, y = jnp.ones((2, 3)), jnp.ones(2, jnp.int32)
    state = svi.init(jax.random.key(0), x, y)
    return svi.update, state


def predictive():
    """Draws of the data at new inputs."""
    samples = {"w": jnp.ones((5, 3)), "scale": jnp.full(5, 0.5)}

    def draws(key, samples, x):
        return Predictive(regression, samples)(key, x)["y"]

    return draws, jax.random.key(1), samples


def seeded():
    """A model run forwards under a seed."""

    def run(key, x):
        return handlers.trace(handlers.seed(regression, key)).get_trace(x)["y"]["value"]

    return run, jax.random.key(1)


X = floats("b, 3")
THREE = jnp.full(3, 1 / 3)
HMM = density(hidden_markov, transition=jnp.full((3, 3), 1 / 3), emission=jnp.full((3, 5), 0.2))

MODELS = [
    Model("regression, density", density(regression, w=jnp.ones(3), scale=1.5), (X, floats("b"))),
    Model("regression, potential energy", potential, (X, floats("b"))),
    Model(
        "hierarchical, density",
        density(hierarchical, mean=0.1, spread=0.7, offset=jnp.arange(8.0)),
        (ints("b", 8), floats("b")),
    ),
    Model(
        "mixture, density", density(mixture, weights=THREE, places=jnp.arange(3.0)), (floats("b"),)
    ),
    Model(
        "Gaussian process, density",
        density(gaussian_process, length=0.8),
        (sorted_floats("b", -2, 2), floats("b")),
        tolerance=1e-4,
        way="paired",
    ),
    Model("random walk, density", density(random_walk, drift=0.1), (floats("b, s"),)),
    Model("Markov model, density", HMM, (ints("b, s", 3), ints("b, s", 5))),
    Model("logistic regression, SVI step", elbo, (X, ints("b", 2))),
    Model("predictive draws", predictive, (X,)),
    Model("draws under a seed", seeded, (X,)),
]
