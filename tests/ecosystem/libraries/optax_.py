"""Optax: losses and training steps on plain functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ecosystem.model import Model, flags, floats, ints

optax = pytest.importorskip("optax", reason="optax is not installed")


def linear(features, out, seed=0):
    return {
        "w": jnp.asarray(np.random.default_rng(seed).standard_normal((features, out)), jnp.float32),
        "b": jnp.zeros(out),
    }


def predict(params, x):
    return x @ params["w"] + params["b"]


def trained(optimiser, loss):
    """A step of an optimiser on a linear model."""

    def build():
        params = linear(6, 4)

        def step(params, state, *data):
            value, grads = jax.value_and_grad(loss)(params, *data)
            updates, state = optimiser.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        return step, params, optimiser.init(params)

    return build


def classification(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, x), y).mean()


def gradient_of(loss, features=6, out=4):
    return lambda: (jax.value_and_grad(loss), linear(features, out))


def ctc(params, x, invalid, labels, label_invalid):
    """Speech: frames against transcripts, both padded by the user."""
    logits = predict(params, x)
    paddings = jnp.sort(invalid, axis=1).astype(jnp.float32)
    label_paddings = jnp.sort(label_invalid, axis=1).astype(jnp.float32)
    return optax.ctc_loss(logits, paddings, labels + 1, label_paddings).sum()


def contrastive(params, x, y):
    """CLIP: every row of the one against every row of the other."""
    a, b = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (predict(params, x), y))
    logits = a @ b.T / 0.07
    labels = jnp.arange(x.shape[0])
    there = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    back = optax.softmax_cross_entropy_with_integer_labels(logits.T, labels)
    return (there.mean() + back.mean()) / 2


def ntxent(params, x, y):
    return optax.losses.ntxent(predict(params, x), y, temperature=0.5)


def ranking(params, x, labels, where):
    scores = (x @ params["w"])[..., 0]  # of a bias the loss knows nothing
    return optax.losses.ranking_softmax_loss(scores, labels, where=where)


def robust(params, x, y):
    huber = optax.huber_loss(predict(params, x), y).mean()
    return huber + optax.cosine_distance(predict(params, x), y, epsilon=1e-6).sum()


def focal(params, x, y):
    return optax.sigmoid_focal_loss(
        predict(params, x), y.astype(jnp.float32), alpha=0.25, gamma=2.0
    ).mean()


def lbfgs():
    """A solver with a line search, which evaluates the loss again."""
    params, solver = linear(6, 4), optax.lbfgs(memory_size=3)

    def step(params, state, x, y):
        def loss(params):
            return classification(params, x, y)

        value, grads = optax.value_and_grad_from_state(loss)(params, state=state)
        updates, state = solver.update(grads, state, params, value=value, grad=grads, value_fn=loss)
        return optax.apply_updates(params, updates), value

    return step, params, solver.init(params)


def private():
    """Gradients per example, clipped and noised."""
    params = linear(6, 4)
    optimiser = optax.contrib.dpsgd(0.1, l2_norm_clip=1.0, noise_multiplier=0.5, seed=0)

    def step(params, state, x, y):
        def loss(params, x, y):
            return classification(params, x[None], y[None])

        grads = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(params, x, y)
        updates, state = optimiser.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, params, optimiser.init(params)


def projected():
    return (
        lambda x: (
            optax.projections.projection_simplex(x),
            optax.projections.projection_l1_ball(x, 2.0),
        ),
    )


def matched():
    """The Hungarian algorithm, as in detection losses."""
    return (lambda cost: optax.assignment.hungarian_algorithm(cost),)


CLIPPED = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 100)),
)
X, Y = floats("b, 6"), ints("b", 4)

MODELS = [
    Model("clipped adamw with a schedule", trained(CLIPPED, classification), (X, Y)),
    Model(
        "MultiSteps (accumulated gradients)",
        trained(optax.MultiSteps(optax.sgd(0.1), 2), classification),
        (X, Y),
    ),
    Model("L-BFGS step with line search", lbfgs, (X, Y), tolerance=1e-3),
    Model("DP-SGD, gradients per example", private, (X, Y)),
    Model(
        "CTC loss, gradient",
        gradient_of(ctc),
        (floats("b, 12, 6"), flags("b, 12", 0.3), ints("b, 4", 3), flags("b, 4", 0.3)),
    ),
    Model(
        "CTC loss, gradient",
        gradient_of(ctc),
        (floats("b, s, 6"), flags("b, s", 0.3), ints("b, n", 3), flags("b, n", 0.3)),
        sizes=({"b": 3, "s": 7, "n": 3}, {"b": 4, "s": 8, "n": 4}, {"b": 1, "s": 11, "n": 2}),
    ),
    Model("contrastive loss of all pairs, gradient", gradient_of(contrastive), (X, floats("b, 4"))),
    Model("NT-Xent loss, gradient", gradient_of(ntxent), (X, ints("b", 3))),
    Model(
        "ranking softmax loss, gradient",
        gradient_of(ranking),
        (floats("b, s, 6"), floats("b, s"), flags("b, s")),
    ),
    Model("Huber and cosine losses, gradient", gradient_of(robust), (X, floats("b, 4"))),
    Model("focal loss, gradient", gradient_of(focal), (X, flags("b, 4", 0.3))),
    Model(
        "projections onto simplex and l1 ball",
        projected,
        (floats("s"),),
        ({"s": 3}, {"s": 4}, {"s": 1}, {"s": 7}),
    ),
    Model(
        "Hungarian assignment",
        matched,
        (floats("n, m"),),
        ({"n": 3, "m": 5}, {"n": 4, "m": 8}, {"n": 2, "m": 6}),
    ),
]
