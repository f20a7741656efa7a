"""Flax linen."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from tests.ecosystem.model import SEQUENCE, Model, flags, floats, initialised, ints

pytest.importorskip("flax", reason="flax is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")

from flax import linen as nn  # noqa: E402
from flax.training import train_state  # noqa: E402


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(5)(nn.relu(nn.LayerNorm()(nn.Dense(16)(x))))


def mlp_training():
    model = MLP()
    state = train_state.TrainState.create(
        apply_fn=model.apply, params=initialised(model.init, jnp.zeros((1, 8))), tx=optax.adam(1e-3)
    )

    def step(state, x, y):
        def loss(params):
            logits = state.apply_fn(params, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

        (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == y)
        return state.apply_gradients(grads=grads), {"loss": value, "accuracy": accuracy}

    return step, state


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        for features in (4, 8):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), strides=(2, 2))
        return nn.Dense(5)(x.mean(axis=(1, 2)))


class ResNetBlock(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        y = nn.relu(norm()(nn.Conv(8, (3, 3), (2, 2), use_bias=False)(x)))
        y = norm(scale_init=nn.initializers.ones)(nn.Conv(8, (3, 3), use_bias=False)(y))
        x = norm()(nn.Conv(8, (1, 1), (2, 2), use_bias=False)(x))
        return nn.Dense(5)(nn.relu(x + y).mean(axis=(1, 2)))


def image_training(model):
    def build():
        init = partial(model.init, train=False)
        variables = initialised(init, jnp.zeros((1, 8, 8, 3)))
        optimiser = optax.sgd(0.1, momentum=0.9)

        def step(params, stats, opt, x, y):
            def loss(params):
                logits, changed = model.apply(
                    {"params": params, "batch_stats": stats}, x, train=True, mutable=["batch_stats"]
                )
                labels = jax.nn.one_hot(y, 5)
                return optax.softmax_cross_entropy(logits, labels).mean(), changed

            (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(params)
            updates, new = optimiser.update(grads, opt, params)
            return optax.apply_updates(params, updates), changed["batch_stats"], new, value

        params = variables["params"]
        return step, params, variables["batch_stats"], optimiser.init(params)

    return build


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        down = []
        for features in (4, 8):
            x = nn.silu(nn.GroupNorm(2)(nn.Conv(features, (3, 3))(x)))
            down.append(x)
            x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = nn.silu(nn.Conv(8, (3, 3))(x))
        for features, skip in zip((8, 4), reversed(down), strict=True):
            x = nn.ConvTranspose(features, (2, 2), strides=(2, 2))(x)
            x = nn.silu(nn.Conv(features, (3, 3))(jnp.concatenate([x, skip], axis=-1)))
        return nn.Conv(1, (1, 1))(x)


def segmentation():
    model = UNet()
    params = initialised(model.init, jnp.zeros((1, 8, 8, 3)))

    def loss(params, x, y):
        logits = model.apply(params, x)[..., 0]
        return optax.sigmoid_binary_cross_entropy(logits, y).mean(), nn.sigmoid(logits) > 0.5

    return jax.value_and_grad(loss, has_aux=True), params


def applied(model, *shape, dtype=float):
    """A forward pass."""
    return lambda: (model.apply, initialised(model.init, jnp.zeros(shape, dtype)))


def lstm_training():
    model = nn.RNN(nn.OptimizedLSTMCell(8), return_carry=True)
    params = initialised(model.init, jnp.zeros((1, 4, 6)))

    def loss(params, x, lengths, y):
        lengths = 1 + lengths % x.shape[1]
        (_, last), _ = model.apply(params, x, seq_lengths=lengths)
        return jnp.mean((last - y) ** 2)

    return jax.value_and_grad(loss), params


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x, mask=None):
        return nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=8)(x, x, mask=mask)


def masked_attention():
    params = initialised(Attention().init, jnp.zeros((1, 4, 8)))

    def apply(params, x, valid):
        mask = nn.combine_masks(
            nn.make_causal_mask(x[..., 0]), nn.make_attention_mask(valid, valid)
        )
        return Attention().apply(params, x, mask)

    return apply, params


def rope(x):
    """Rotary embedding of (batch, length, heads, features)."""
    half = x.shape[-1] // 2
    frequency = 1.0 / (10_000 ** (jnp.arange(half) / half))
    angle = jnp.arange(x.shape[1])[:, None] * frequency
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class DecoderBlock(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        h = nn.RMSNorm()(x)
        q, k, v = jnp.split(nn.DenseGeneral((6, 4))(h), 3, axis=2)
        causal = nn.make_causal_mask(x[..., 0])
        h = nn.dot_product_attention(rope(q), rope(k), v, mask=causal)
        h = nn.DenseGeneral(8, axis=(-2, -1))(h)
        x = x + nn.Dropout(0.2, deterministic=not train)(h)
        h = nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.RMSNorm()(x))))
        return x + nn.Dropout(0.2, deterministic=not train)(h)


class LanguageModel(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, tokens, train=False):
        embed = nn.Embed(11, 8)
        x = embed(tokens)
        block = nn.remat(DecoderBlock, static_argnums=(2,)) if self.remat else DecoderBlock
        x = block()(x, train)
        return embed.attend(nn.LayerNorm()(x))


def language_model(**options):
    def build():
        model = LanguageModel(**options)
        params = initialised(model.init, jnp.zeros((1, 4), jnp.int32))

        def loss(params, key, tokens):
            rngs = {"dropout": key}
            logits = model.apply(params, tokens[:, :-1], train=True, rngs=rngs)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return losses.mean()

        return jax.value_and_grad(loss), params, jax.random.key(1)

    return build


class ScannedLayers(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            ScannedLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        return layers()(x, None)[0]


class ScannedLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(8)(nn.LayerNorm()(x)), None


def scanned_layers():
    model = ScannedLayers()
    params = initialised(model.init, jnp.zeros((1, 4, 8)))
    return jax.grad(lambda params, x: (model.apply(params, x) ** 2).mean()), params


class DecodeStep(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=8, decode=True)(x, x)


def decode():
    """One token with Flax's own cache, which holds the batch."""
    model = DecodeStep()
    params = initialised(model.init, jnp.zeros((1, 12, 8)))["params"]

    def step(params, x):
        cache = model.init(jax.random.key(0), jnp.zeros((x.shape[0], 12, 8)))["cache"]
        for i in range(3):
            y, changed = model.apply(
                {"params": params, "cache": cache}, x[:, i : i + 1], mutable=["cache"]
            )
            cache = changed["cache"]
        return y, cache

    return step, params


class VAE(nn.Module):
    @nn.compact
    def __call__(self, x, key):
        mean, log_variance = jnp.split(nn.Dense(6)(nn.relu(nn.Dense(12)(x))), 2, axis=-1)
        z = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(key, mean.shape)
        return nn.Dense(8)(nn.relu(nn.Dense(12)(z))), mean, log_variance


def vae():
    model = VAE()
    params = initialised(model.init, jnp.zeros((1, 8)), jax.random.key(0))

    def loss(params, key, x):
        logits, mean, log_variance = model.apply(params, x, key)
        likelihood = optax.sigmoid_binary_cross_entropy(logits, nn.sigmoid(x)).sum(-1)
        kl = -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), axis=-1)
        return (likelihood + kl).mean()

    return jax.value_and_grad(loss), params, jax.random.key(3)


class ViT(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (4, 4), strides=(4, 4), padding="VALID")(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        cls = self.param("cls", nn.initializers.normal(0.02), (1, 1, 8))
        x = jnp.concatenate([jnp.tile(cls, (x.shape[0], 1, 1)), x], axis=1)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        return nn.Dense(5)(x[:, 0])


class TCN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for dilation in (1, 2):
            y = nn.Conv(6, (3,), kernel_dilation=dilation, padding="CAUSAL")(x)
            x = x + nn.gelu(nn.InstanceNorm()(y))
        return x[:, -1], x.max(axis=1)


class Bag(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        valid = (tokens > 0)[..., None]
        x = nn.Embed(11, 8)(tokens)
        return nn.Dense(3)((x * valid).sum(1) / jnp.maximum(valid.sum(1), 1))


IMAGES, LABELS, SEQUENCES = floats("b, h, w, 3"), ints("b", 5), floats("b, s, 6")
FOURS = ({"b": 3, "h": 8, "w": 12}, {"b": 4, "h": 8, "w": 8}, {"b": 2, "h": 12, "w": 8})
bidirectional = nn.Bidirectional(nn.RNN(nn.GRUCell(4)), nn.RNN(nn.GRUCell(4)))

MODELS = [
    Model("MLP, TrainState step (adam)", mlp_training, (floats("b, 8"), LABELS)),
    Model("CNN, BatchNorm training", image_training(CNN()), (floats("b, 8, 8, 3"), LABELS)),
    Model("CNN, BatchNorm training", image_training(CNN()), (IMAGES, LABELS)),
    Model("ResNet block training", image_training(ResNetBlock()), (IMAGES, LABELS), way="paired"),
    Model("U-Net gradient", segmentation, (floats("b, 8, 8, 3"), flags("b, 8, 8"))),
    Model("U-Net gradient", segmentation, (IMAGES, flags("b, h, w")), FOURS, way="paired"),
    Model(
        "U-Net gradient, sizes declared as multiples",
        segmentation,
        (floats("b, 4*h, 4*w, 3"), flags("b, 4*h, 4*w")),
    ),
    Model("GRU, bidirectional", applied(bidirectional, 1, 4, 6), (SEQUENCES,), way="paired"),
    Model(
        "LSTM with seq_lengths, gradient",
        lstm_training,
        (SEQUENCES, ints("b", 99), floats("b, 8")),
        way="paired",
    ),
    Model("attention", applied(Attention(), 1, 4, 8), (floats("b, s, 8"),)),
    Model(
        "attention, causal and padding mask", masked_attention, (floats("b, s, 8"), flags("b, s"))
    ),
    Model("decoder with RoPE, dropout, gradient", language_model(), (ints("b, s", 11),)),
    Model("the same rematerialised", language_model(remat=True), (ints("b, s", 11),), SEQUENCE[1:]),
    Model("layers under nn.scan, gradient", scanned_layers, (floats("b, s, 8"),)),
    Model("decode steps with the cache", decode, (floats("b, 3, 8"),)),
    Model("VAE gradient", vae, (floats("b, 8"),)),
    Model("ViT", applied(ViT(), 1, 8, 8, 3), (floats("b, 8, 8, 3"),)),
    Model("ViT", applied(ViT(), 1, 8, 8, 3), (IMAGES,), FOURS),
    Model("dilated causal convolutions, InstanceNorm", applied(TCN(), 1, 4, 6), (SEQUENCES,)),
    Model("bag of embeddings", applied(Bag(), 1, 4, dtype=int), (ints("b, s", 11),)),
]
