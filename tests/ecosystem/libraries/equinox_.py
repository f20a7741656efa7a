"""Equinox: modules are pytrees, `jax.vmap` makes batches."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from tests.ecosystem.model import Model, flags, floats, ints

eqx = pytest.importorskip("equinox", reason="equinox is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")


def key(seed=0):
    return jax.random.key(seed)


def applied(make, call=lambda model, *args: model(*args)):
    """A forward pass over a batch."""

    def build():
        params, static = eqx.partition(make(key()), eqx.is_array)

        def apply(params, *args):
            return jax.vmap(partial(call, eqx.combine(params, static)))(*args)

        return apply, params

    return build


def mlp_training():
    """The usual step: filtered gradient, optimiser, `eqx.apply_updates`."""
    model = eqx.nn.MLP(8, 3, 12, 2, key=key())
    optimiser = optax.adamw(1e-3)
    params, static = eqx.partition(model, eqx.is_array)

    def step(params, state, x, y):
        @eqx.filter_value_and_grad
        def loss(model):
            logits = jax.vmap(model)(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        model = eqx.combine(params, static)
        value, grads = loss(model)
        updates, new = optimiser.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.filter(eqx.apply_updates(model, updates), eqx.is_array), new, value

    return step, params, optimiser.init(params)


class CNN(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, k):
        a, b = jax.random.split(k)
        self.conv = eqx.nn.Conv2d(3, 6, 3, padding=1, use_bias=False, key=a)
        self.norm = eqx.nn.BatchNorm(6, axis_name="batch", mode="batch")
        self.out = eqx.nn.Linear(6, 5, key=b)

    def __call__(self, x, state):
        x, state = self.norm(self.conv(x), state)
        x = eqx.nn.MaxPool2d(2, 2)(jax.nn.relu(x))
        return self.out(x.mean(axis=(1, 2))), state


def cnn_training():
    """BatchNorm over a named axis, its statistics in an `eqx.nn.State`."""
    model, state = eqx.nn.make_with_state(CNN)(key())
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, state, x, y):
        model = eqx.combine(params, static)
        batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        logits, state = batched(x, state)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), state

    return jax.value_and_grad(loss, has_aux=True), params, state


class Recurrent(eqx.Module):
    cell: eqx.Module

    def __call__(self, x):
        zeros = jnp.zeros(self.cell.hidden_size)
        lstm = isinstance(self.cell, eqx.nn.LSTMCell)
        start = (zeros, zeros) if lstm else zeros

        def step(carry, row):
            carry = self.cell(row, carry)
            return carry, carry[0] if lstm else carry

        return jax.lax.scan(step, start, x)


def lstm_training():
    params, static = eqx.partition(Recurrent(eqx.nn.LSTMCell(6, 8, key=key())), eqx.is_array)

    def loss(params, x, y):
        _, hidden = jax.vmap(eqx.combine(params, static))(x)
        return jnp.mean((hidden.mean(axis=1) - y) ** 2)

    return jax.value_and_grad(loss), params


class Encoder(eqx.Module):
    embed: eqx.nn.Embedding
    rope: eqx.nn.RotaryPositionalEmbedding
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    out: eqx.nn.Linear
    drop: eqx.nn.Dropout

    def __init__(self, k):
        a, b, c = jax.random.split(k, 3)
        self.embed = eqx.nn.Embedding(11, 8, key=a)
        self.rope = eqx.nn.RotaryPositionalEmbedding(4)
        self.attention = eqx.nn.MultiheadAttention(2, 8, key=b)
        self.norm = eqx.nn.LayerNorm(8)
        self.out = eqx.nn.Linear(8, 11, key=c)
        self.drop = eqx.nn.Dropout(0.2)

    def __call__(self, tokens, valid, k):
        x = jax.vmap(self.embed)(tokens)
        heads = lambda q, k, v: (jax.vmap(self.rope, 1, 1)(q), jax.vmap(self.rope, 1, 1)(k), v)  # noqa: E731
        h = jax.vmap(self.norm)(x)
        mask = jnp.tril(jnp.ones((tokens.shape[0], tokens.shape[0]), bool)) & valid[None, :]
        h = self.attention(h, h, h, mask=mask, process_heads=heads)
        return jax.vmap(self.out)(x + self.drop(h, key=k))


def encoder_training():
    params, static = eqx.partition(Encoder(key()), eqx.is_array)

    def loss(params, k, tokens, valid):
        keys = jax.random.split(k, tokens.shape[0])
        logits = jax.vmap(eqx.combine(params, static))(tokens, valid, keys)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return jnp.mean(losses, where=valid[:, 1:])

    return jax.value_and_grad(loss), params, key(5)


def residual(k):
    a, b = jax.random.split(k)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 8, 3, padding=1, key=a),
            eqx.nn.GroupNorm(2, 8),
            eqx.nn.Lambda(jax.nn.silu),
            eqx.nn.Conv2d(8, 4, 3, stride=2, padding=1, key=b),
            eqx.nn.AvgPool2d(2, 1),
        ]
    )


def adaptive(k):
    return eqx.nn.Sequential([eqx.nn.Conv2d(3, 4, 3, key=k), eqx.nn.AdaptiveAvgPool2d(2)])


def transposed(k):
    return eqx.nn.ConvTranspose1d(6, 4, 4, stride=2, padding=1, key=k)


def multi_head(k):
    return eqx.nn.MultiheadAttention(2, 8, key=k)


def checkpointed_loop():
    """Equinox's own while loop, which can be differentiated backwards."""

    def newton(a, x):
        def body(c):
            i, y = c
            return i + 1, y - (y**3 - x) / (3 * y**2 + a)

        go = lambda c: (c[0] < 8) & jnp.any(jnp.abs(c[1] ** 3 - x) > 1e-3)  # noqa: E731
        start = (0, jnp.ones_like(x))
        _, y = eqx.internal.while_loop(go, body, start, max_steps=8, kind="checkpointed")
        return y.sum()

    return jax.value_and_grad(newton), jnp.float32(0.1)


def checked():
    """`eqx.error_if` and `eqx.filter_jit` inside."""
    layer = eqx.nn.Linear(8, 4, key=key())

    @eqx.filter_jit
    def apply(layer, x):
        x = eqx.error_if(x, jnp.any(jnp.isnan(x)), "a NaN came in")
        return jax.vmap(layer)(x)

    return apply, layer


SEQUENCES = floats("b, s, 6")

MODELS = [
    Model("MLP step (adamw)", mlp_training, (floats("b, 8"), ints("b", 3))),
    Model(
        "CNN, BatchNorm over a named axis, gradient",
        cnn_training,
        (floats("b, 3, 8, 8"), ints("b", 5)),
    ),
    Model(
        "CNN, BatchNorm over a named axis, gradient",
        cnn_training,
        (floats("b, 3, h, w"), ints("b", 5)),
    ),
    Model("GroupNorm, strided convolutions", applied(residual), (floats("b, 3, h, w"),)),
    Model("adaptive average pooling", applied(adaptive), (floats("b, 3, 9, 9"),)),
    Model("transposed convolution", applied(transposed), (floats("b, 6, s"),)),
    Model("LSTM gradient", lstm_training, (SEQUENCES, floats("b, 8"))),
    Model("GRU", applied(lambda k: Recurrent(eqx.nn.GRUCell(6, 8, key=k))), (SEQUENCES,)),
    Model("attention", applied(multi_head, lambda m, x: m(x, x, x)), (floats("b, s, 8"),)),
    Model(
        "decoder with RoPE, masks, dropout, gradient",
        encoder_training,
        (ints("b, s", 11), flags("b, s")),
        way="exact",
    ),
    Model("checkpointed while loop, gradient", checkpointed_loop, (floats("b", 2.0),)),
    Model("error_if under filter_jit", checked, (floats("b, 8"),)),
]
