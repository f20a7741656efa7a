"""Keras 3 on its JAX backend, by `stateless_call`."""

import os

import jax
import pytest

from tests.ecosystem.model import Model, floats, ints

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is imported

keras = pytest.importorskip("keras", reason="keras is not installed")
if keras.backend.backend() != "jax":
    pytest.skip("Keras runs on another backend", allow_module_level=True)

from keras import layers  # noqa: E402


def variables(model):
    return [
        [v.value for v in group]
        for group in (model.trainable_variables, model.non_trainable_variables)
    ]


def forward(make):
    def build():
        keras.utils.set_random_seed(0)
        model = make()

        def apply(trainable, fixed, *inputs):
            inputs = inputs if len(inputs) > 1 else inputs[0]
            return model.stateless_call(trainable, fixed, inputs)[0]

        return apply, *variables(model)

    return build


def training(make):
    """The step of Keras' guide to custom training loops in JAX."""

    def build():
        keras.utils.set_random_seed(0)
        model = make()
        optimiser = keras.optimizers.SGD(0.1, momentum=0.9)
        optimiser.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def step(trainable, fixed, slots, x, y):
            def loss(trainable):
                logits, changed = model.stateless_call(trainable, fixed, x, training=True)
                return loss_of(y, logits), changed

            (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(trainable)
            trainable, slots = optimiser.stateless_apply(slots, grads, trainable)
            return value, trainable, changed, slots

        return step, *variables(model), [v.value for v in optimiser.variables]

    return build


def mlp():
    return keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(12, activation="relu"),
            layers.Dropout(0.3),
            layers.LayerNormalization(),
            layers.Dense(5),
        ]
    )


def cnn(height=None, width=None):
    return keras.Sequential(
        [
            layers.Input((height, width, 3)),
            layers.Conv2D(6, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.MaxPooling2D(2),
            layers.GlobalAveragePooling2D(),
            layers.Dense(5),
        ]
    )


def separable():
    x = image = keras.Input((None, None, 3))
    for stride in (1, 2):
        y = layers.SeparableConv2D(6, 3, strides=stride, padding="same")(x)
        y = layers.GroupNormalization(2)(y)
        x = layers.Activation("swish")(y)
    x = layers.UpSampling2D(2)(x)
    return keras.Model(image, layers.Conv2DTranspose(1, 2, strides=2)(x))


def rnn(layer):
    def make():
        tokens = keras.Input((None,), dtype="int32")
        x = layers.Embedding(11, 6, mask_zero=True)(tokens)
        return keras.Model(tokens, layers.Dense(3)(layer()(x)))

    return make


def plain_rnn():
    x = keras.Input((None, 6))
    return keras.Model(x, layers.GRU(8, return_sequences=True)(x))


def transformer():
    tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(11, 8)(tokens)
    h = layers.LayerNormalization()(x)
    h = layers.MultiHeadAttention(2, 4, dropout=0.0)(h, h, use_causal_mask=True)
    x = layers.Add()([x, h])
    h = layers.Dense(8)(layers.Dense(16, activation="gelu")(layers.LayerNormalization()(x)))
    return keras.Model(tokens, layers.Dense(11)(layers.Add()([x, h])))


def pooled_convolutions():
    x = keras.Input((None, 6))
    y = layers.Conv1D(8, 3, padding="causal", activation="relu")(x)
    y = layers.Concatenate()([layers.GlobalMaxPooling1D()(y), layers.GlobalAveragePooling1D()(y)])
    return keras.Model(x, layers.Dense(3)(y))


MODELS = [
    Model("MLP with dropout, training", training(mlp), (floats("b, 8"), ints("b", 5))),
    Model(
        "CNN, BatchNorm training", training(lambda: cnn(8, 8)), (floats("b, 8, 8, 3"), ints("b", 5))
    ),
    Model("CNN, BatchNorm training", training(cnn), (floats("b, h, w, 3"), ints("b", 5))),
    Model("separable convolutions, up again", forward(separable), (floats("b, 2*h, 2*w, 3"),)),
    Model("LSTM with mask_zero", forward(rnn(lambda: layers.LSTM(8))), (ints("b, s", 11),)),
    Model(
        "bidirectional GRU with mask_zero",
        forward(rnn(lambda: layers.Bidirectional(layers.GRU(4)))),
        (ints("b, s", 11),),
    ),
    Model("GRU over sequences", forward(plain_rnn), (floats("b, s, 6"),)),
    Model("transformer, training", training(transformer), (ints("b, s", 11), ints("b, s", 11))),
    Model("convolutions pooled over time", forward(pooled_convolutions), (floats("b, s, 6"),)),
]
