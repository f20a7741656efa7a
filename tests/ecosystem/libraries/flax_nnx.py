"""Flax NNX, by its functional API."""

import jax
import jax.numpy as jnp
import pytest

from tests.ecosystem.model import Model, flags, floats, ints

pytest.importorskip("flax", reason="flax is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")

from flax import nnx  # noqa: E402


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 6, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.out = nnx.Linear(6, 5, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), strides=(2, 2))
        return self.out(x.mean(axis=(1, 2)))


def cnn_training():
    """As in the tutorials: model, optimiser and metrics split outside, merged inside."""
    model = CNN(nnx.Rngs(0))
    optimiser = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    graph, state = nnx.split((model, optimiser, metrics))

    def step(state, x, y):
        model, optimiser, metrics = nnx.merge(graph, state)

        def loss_of(model):
            logits = model(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

        (loss, logits), grads = nnx.value_and_grad(loss_of, has_aux=True)(model)
        optimiser.update(model, grads)
        metrics.update(loss=loss, logits=logits, labels=y)
        return nnx.state((model, optimiser, metrics)), loss

    return step, state


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 12, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.second = nnx.Linear(12, 3, rngs=rngs)

    def __call__(self, x):
        return self.second(self.drop(nnx.gelu(self.first(x))))


def dropout_training():
    """State is changed by what draws from it."""
    graph, params, rest = nnx.split(MLP(nnx.Rngs(0)), nnx.Param, ...)

    def step(params, rest, x):
        def loss(params):
            model = nnx.merge(graph, params, rest, copy=True)
            value = (model(x) ** 2).mean()
            return value, nnx.state(model, nnx.Not(nnx.Param))

        return jax.value_and_grad(loss, has_aux=True)(params)

    return step, params, rest


def evaluated(make):
    """A forward pass. ``nnx.RNN`` draws from the state, and nobody wants the state after it."""

    def build():
        graph, state = nnx.split(make(nnx.Rngs(0)))
        return lambda state, *args: nnx.merge(graph, state, copy=True)(*args), state

    return build


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)

    def __call__(self, x, valid):
        mask = nnx.combine_masks(
            nnx.make_causal_mask(x[..., 0]), nnx.make_attention_mask(valid, valid)
        )
        return x + self.attention(self.norm(x), mask=mask)


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.place = nnx.Embed(16, 8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.out = nnx.Linear(8, 11, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.place(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        return self.out(x + self.attention(x, mask=mask))


def transformer_training():
    graph, params = nnx.split(Transformer(nnx.Rngs(0)))

    def loss(params, tokens):
        logits = nnx.merge(graph, params)(tokens)[:, :-1]
        valid = tokens[:, 1:] > 0
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return (losses * valid).sum() / jnp.maximum(valid.sum(), 1)

    return jax.value_and_grad(loss), params


def decode():
    """Steps with the cache that NNX keeps in the module."""
    graph, params = nnx.split(nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0)))

    def steps(params, x):
        attention = nnx.merge(graph, params)
        attention.init_cache((x.shape[0], 12, 8))
        outs = [attention(x[:, i : i + 1], decode=True) for i in range(3)]
        return jnp.concatenate(outs, axis=1), nnx.state(attention, nnx.Cache)

    return steps, params


class UNet(nnx.Module):
    def __init__(self, rngs):
        self.down = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.middle = nnx.Conv(4, 8, (3, 3), strides=(2, 2), rngs=rngs)
        self.norm = nnx.GroupNorm(8, num_groups=2, rngs=rngs)
        self.up = nnx.ConvTranspose(8, 4, (2, 2), strides=(2, 2), rngs=rngs)
        self.out = nnx.Conv(8, 1, (1, 1), rngs=rngs)

    def __call__(self, x):
        x = nnx.silu(self.down(x))
        y = self.up(nnx.silu(self.norm(self.middle(x))))
        return self.out(jnp.concatenate([x, y], axis=-1))


def lora(rngs):
    return nnx.LoRA(8, 2, 8, base_module=nnx.Linear(8, 8, rngs=rngs), rngs=rngs)


MODELS = [
    Model("CNN, BatchNorm, optimiser, metrics", cnn_training, (floats("b, 8, 8, 3"), ints("b", 5))),
    Model("CNN, BatchNorm, optimiser, metrics", cnn_training, (floats("b, h, w, 3"), ints("b", 5))),
    Model("MLP with dropout, gradient", dropout_training, (floats("b, 8"),)),
    Model("LSTM", evaluated(lambda r: nnx.RNN(nnx.LSTMCell(6, 8, rngs=r))), (floats("b, s, 6"),)),
    Model("GRU", evaluated(lambda r: nnx.RNN(nnx.GRUCell(6, 8, rngs=r))), (floats("b, 9, 6"),)),
    Model(
        "attention, causal and padding mask",
        evaluated(Attention),
        (floats("b, s, 8"), flags("b, s")),
    ),
    Model("transformer, masked loss, gradient", transformer_training, (ints("b, s", 11),)),
    Model("decode steps with the cache", decode, (floats("b, 3, 8"),)),
    Model("U-Net", evaluated(UNet), (floats("b, 2*h, 2*w, 3"),)),
    Model("LoRA on a linear layer", evaluated(lora), (floats("b, s, 8"),)),
]
