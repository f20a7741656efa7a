"""Haiku: transformed functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ecosystem.model import Model, flags, floats, initialised, ints

hk = pytest.importorskip("haiku", reason="haiku is not installed", exc_type=ImportError)
optax = pytest.importorskip("optax", reason="optax is not installed")


def applied(forward, *example):
    """A forward pass without state or randomness."""

    def build():
        model = hk.without_apply_rng(hk.transform(forward))
        return model.apply, initialised(model.init, *example)

    return build


def image_training(forward):
    """A step with state: BatchNorm's averages."""

    def build():
        model = hk.transform_with_state(forward)
        params, state = initialised(model.init, jnp.zeros((1, 8, 8, 3)))
        optimiser = optax.sgd(0.1)

        def step(params, state, opt, x, y):
            def loss(params):
                logits, new = model.apply(params, state, None, x)
                return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new

            (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
            updates, opt = optimiser.update(grads, opt)
            return optax.apply_updates(params, updates), new, opt, value

        return step, params, state, optimiser.init(params)

    return build


def cnn(x):
    for channels in (4, 8):
        x = hk.Conv2D(channels, 3, with_bias=False)(x)
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training=True))
        x = hk.MaxPool((2, 2, 1), (2, 2, 1), "SAME")(x)
    return hk.Linear(5)(x.mean(axis=(1, 2)))


def resnet(x):
    block = hk.nets.ResNet.BlockGroup(8, 1, 2, {"decay_rate": 0.9}, False, False, True)
    x = block(x, is_training=True, test_local_stats=False)
    return hk.Linear(5)(x.mean(axis=(1, 2)))


def lstm(x):
    core = hk.LSTM(8)
    out, state = hk.dynamic_unroll(core, x, core.initial_state(x.shape[0]), time_major=False)
    return hk.BatchApply(hk.Linear(3))(out), state


def gru_with_reset(x, reset):
    core = hk.ResetCore(hk.GRU(8))
    xs = (jnp.swapaxes(x, 0, 1), jnp.swapaxes(reset, 0, 1))
    out, state = hk.dynamic_unroll(core, xs, core.initial_state(x.shape[0]))
    return out.mean(axis=0), state


def attention(x, valid):
    causal = np.tril(np.ones((x.shape[1], x.shape[1])))
    mask = valid[:, None, None, :] * causal
    return hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling(1.0))(
        x, x, x, mask=mask
    )


def transformer(tokens):
    """As Haiku's own example has it, its positions a slice of a learned table."""
    x = hk.Embed(11, 8)(tokens)
    places = hk.get_parameter("places", [16, 8], init=hk.initializers.TruncatedNormal())
    x = x + places[: tokens.shape[1]]
    mask = jnp.tril(jnp.ones((1, 1, tokens.shape[1], tokens.shape[1])))
    h = hk.LayerNorm(-1, True, True)(x)
    h = hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling(1.0))(h, h, h, mask=mask)
    x = x + hk.dropout(hk.next_rng_key(), 0.1, h)
    return hk.Linear(11)(hk.LayerNorm(-1, True, True)(x))


def transformer_training():
    model = hk.transform(transformer)
    params = initialised(model.init, jnp.zeros((1, 4), jnp.int32))

    def loss(params, key, tokens):
        logits = model.apply(params, key, tokens[:, :-1])
        onehot = jax.nn.one_hot(tokens[:, 1:], 11)
        return -jnp.sum(onehot * jax.nn.log_softmax(logits)) / tokens[:, 1:].size

    return jax.value_and_grad(loss), params, jax.random.key(2)


def quantised():
    """A VQ-VAE's bottleneck with its moving averages."""
    model = hk.transform_with_state(
        lambda x: hk.nets.VectorQuantizerEMA(4, 8, 0.25, 0.9)(x, is_training=True)
    )
    params, state = initialised(model.init, jnp.zeros((2, 4)))

    def apply(params, state, x):
        out, state = model.apply(params, state, None, x)
        return out["loss"], out["quantize"], out["encoding_indices"], out["perplexity"], state

    return apply, params, state


MODELS = [
    Model("CNN, BatchNorm training", image_training(cnn), (floats("b, h, w, 3"), ints("b", 5))),
    Model("ResNet block training", image_training(resnet), (floats("b, 8, 8, 3"), ints("b", 5))),
    Model("LSTM", applied(lstm, jnp.zeros((1, 4, 6))), (floats("b, s, 6"),)),
    Model(
        "GRU with resets",
        applied(gru_with_reset, jnp.zeros((1, 4, 6)), jnp.zeros((1, 4), bool)),
        (floats("b, s, 6"), flags("b, s", 0.3)),
    ),
    Model(
        "attention, causal and padding mask",
        applied(attention, jnp.zeros((1, 4, 8)), jnp.ones((1, 4), bool)),
        (floats("b, s, 8"), flags("b, s")),
        way="paired",
    ),
    Model("transformer with dropout, gradient", transformer_training, (ints("b, s", 11),)),
    Model("vector quantisation with moving averages", quantised, (floats("b, 4"),)),
]
