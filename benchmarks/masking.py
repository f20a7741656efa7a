"""What derived masks cost beside the masks an expert writes by hand, at the same bucket.

    python -m benchmarks.masking

For each model both functions are compiled for one bucket and called in turn with the same padded
arguments; the table has the median time of each and the median of the paired ratios. Results are
compared before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contenders.jax_encoder import encode, is_real, norm
from benchmarks.encoder import WIDTH, draw_weights
from benchmarks.measuring import in_turn, paired_ratio
from benchmarks.sections import Column, Options, Row, Section, print_sections
from bucketjit._compile.workarounds import workarounds
from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._ir.program import Leaf
from bucketjit._masking.interpreter import interpret
from bucketjit._masking.rules import default_rules
from bucketjit._tracing.symbolic import trace

LAYERS, VOCABULARY = 4, 256


@dataclass
class Model:
    """A function without masks, its hand-masked twin, and arguments at padded size.

    Attributes:
        name: Row of the table.
        plain: ``plain(params, *arrays)``; knows nothing of padding.
        by_hand: ``by_hand(params, *padded arrays, *sizes)``; masks what must be masked.
        params: Parameters.
        arrays: Arguments at padded size.
        shapes: Their symbolic shapes.
        sizes: Logical sizes.
        bucket: Padded sizes.
        is_open: Whether its outputs that are no scalars have the open axes, in order, in front.
    """

    name: str
    plain: Callable[..., Any]
    by_hand: Callable[..., Any]
    params: Any
    arrays: Sequence[Any]
    shapes: Sequence[tuple[int | str, ...]]
    sizes: dict[str, int]
    bucket: dict[str, int]
    is_open: bool = False


def _transformer(params: Any, tokens: Any, real: Any | None) -> Any:
    return encode(params, tokens, real) @ params["tokens"].T


def _transformer_params(width: int) -> Any:
    return jax.device_put(draw_weights(LAYERS, VOCABULARY, width=width))


def transformer_forward(rng: np.random.Generator, width: int = WIDTH) -> Model:
    """Logits of a 4-layer transformer over an open batch and sequence."""

    def plain(params: Any, tokens: Any) -> Any:
        return _transformer(params, tokens, None)

    def by_hand(params: Any, tokens: Any, b: Any, s: Any) -> Any:
        real = is_real(b, s, tokens.shape)
        logits = _transformer(params, tokens, real)
        return jnp.where(real[..., None], logits, 0)

    return replace(_text_model("transformer, forward", plain, by_hand, rng, width), is_open=True)


def transformer_step(rng: np.random.Generator, width: int = WIDTH) -> Model:
    """A step of gradient descent on the next-token loss of the same transformer."""

    def update(params: Any, grads: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)

    def losses(logits: Any, tokens: Any) -> Any:
        picked = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
        return jax.nn.logsumexp(logits, -1) - picked

    def plain(params: Any, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            return losses(_transformer(params, tokens, None), tokens).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return update(params, grads), value

    def by_hand(params: Any, tokens: Any, b: Any, s: Any) -> Any:
        real = is_real(b, s, tokens.shape)

        def loss(params: Any) -> Any:
            each = losses(_transformer(params, tokens, real), tokens)
            return jnp.where(real, each, 0).sum() / (b * s)

        value, grads = jax.value_and_grad(loss)(params)
        return update(params, grads), value

    return _text_model("transformer, training step", plain, by_hand, rng, width)


def _text_model(
    name: str,
    plain: Callable[..., Any],
    by_hand: Callable[..., Any],
    rng: np.random.Generator,
    width: int,
) -> Model:
    tokens = np.zeros((8, 64), np.int32)
    tokens[:7, :50] = rng.integers(0, VOCABULARY, (7, 50))
    sizes, bucket = {"b": 7, "s": 50}, {"b": 8, "s": 64}
    params = _transformer_params(width)
    return Model(name, plain, by_hand, params, [tokens], [("b", "s")], sizes, bucket)


def flat_tokens_step(rng: np.random.Generator) -> Model:
    """A training step of layers over tokens in one merged axis, split again for a mean by row."""

    def pooled(params: Any, x: Any) -> Any:
        flat = x.reshape(-1, WIDTH)
        for layer in params:
            flat = flat + jax.nn.relu(norm(flat) @ layer["up"]) @ layer["down"]
        return flat.reshape(x.shape)

    def update(params: Any, grads: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)

    def plain(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return (pooled(params, x).mean(1) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return update(params, grads), value

    def by_hand(params: Any, x: Any, b: Any, s: Any) -> Any:
        real = is_real(b, s, x.shape[:2])

        def loss(params: Any) -> Any:
            mean = jnp.where(real[..., None], pooled(params, x), 0).sum(1) / s
            return (mean**2).sum() / (b * WIDTH)

        value, grads = jax.value_and_grad(loss)(params)
        return update(params, grads), value

    x = np.zeros((8, 64, WIDTH), np.float32)
    x[:7, :50] = rng.standard_normal((7, 50, WIDTH))
    layers = [
        {k: layer[k] for k in ("up", "down")} for layer in _transformer_params(WIDTH)["layers"]
    ]
    sizes, bucket = {"b": 7, "s": 50}, {"b": 8, "s": 64}
    shapes = [("b", "s", WIDTH)]
    return Model("merged tokens, training step", plain, by_hand, layers, [x], shapes, sizes, bucket)


def cnn_step(rng: np.random.Generator, width: int = 64) -> Model:
    """A training step of a small CNN over an open batch."""

    def logits(params: Any, images: Any) -> Any:
        x = images
        for kernel in params["convs"]:
            x = jax.lax.conv_general_dilated(
                x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        return x.mean((1, 2)) @ params["dense"]

    def losses(params: Any, images: Any, labels: Any) -> Any:
        out = logits(params, images)
        picked = jnp.take_along_axis(out, labels[:, None], -1)[:, 0]
        return jax.nn.logsumexp(out, -1) - picked

    def update(params: Any, grads: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)

    def plain(params: Any, images: Any, labels: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: losses(p, images, labels).mean())(params)
        return update(params, grads), value

    def by_hand(params: Any, images: Any, labels: Any, b: Any) -> Any:
        real = jnp.arange(images.shape[0]) < b

        def loss(params: Any) -> Any:
            return jnp.where(real, losses(params, images, labels), 0).sum() / b

        value, grads = jax.value_and_grad(loss)(params)
        return update(params, grads), value

    def dense(*shape: int) -> Any:
        fan_in = int(np.prod(shape[:-1]))
        return jnp.asarray(rng.standard_normal(shape) * fan_in**-0.5, jnp.float32)

    half = width // 2
    convs = [dense(3, 3, 3, half), dense(3, 3, half, width)]
    params = {"convs": convs, "dense": dense(width, 10)}
    images = np.zeros((64, 32, 32, 3), np.float32)
    images[:50] = rng.standard_normal((50, 32, 32, 3))
    labels = np.zeros(64, np.int32)
    labels[:50] = rng.integers(0, 10, 50)
    return Model(
        "CNN, training step",
        plain,
        by_hand,
        params,
        [images, labels],
        [("b", 32, 32, 3), ("b",)],
        {"b": 50},
        {"b": 64},
    )


def chirp_transform(x: Any, n: Any) -> Any:
    """The Fourier transform of the first ``n`` numbers of a padded axis, the last one."""
    size = x.shape[-1]
    k = jnp.arange(size)
    angle = jnp.pi * ((k * k) % (2 * n)) / n
    chirp = jax.lax.complex(jnp.cos(angle), -jnp.sin(angle))
    kernel = jnp.zeros(2 * size, chirp.dtype).at[:size].set(chirp.conj())
    kernel = kernel.at[size + 1 :].set(chirp.conj()[:0:-1])
    mixed = jnp.fft.ifft(jnp.fft.fft(x * chirp, 2 * size) * jnp.fft.fft(kernel))
    return mixed[..., :size] * chirp


def spectrum_gradient(rng: np.random.Generator) -> Model:
    """A loss of the spectrum of an image, both of its axes open, and the gradient of that."""

    def plain(params: Any, image: Any) -> Any:
        def loss(image: Any) -> Any:
            return (jnp.log1p(jnp.abs(jnp.fft.fft2(image)) ** 2)).mean()

        return jax.value_and_grad(loss)(image)

    def by_hand(params: Any, image: Any, h: Any, w: Any) -> Any:
        real = is_real(h, w, image.shape)

        def loss(image: Any) -> Any:
            rows = chirp_transform(jnp.where(real, image, 0), w)
            spectrum = chirp_transform(rows.T, h).T
            each = jnp.log1p(jnp.abs(jnp.where(real, spectrum, 0)) ** 2)
            return each.sum() / (h * w)

        return jax.value_and_grad(loss)(image)

    image = np.zeros((256, 256), np.float32)
    image[:200, :230] = rng.standard_normal((200, 230))
    sizes, bucket = {"h": 200, "w": 230}, {"h": 256, "w": 256}
    name = "spectrum of an image, gradient"
    return Model(name, plain, by_hand, (), [image], [("h", "w")], sizes, bucket, is_open=True)


def derived(model: Model) -> Any:
    """What bucketjit makes of ``model.plain``, masked and jitted; called like ``by_hand``."""
    run, options = masked(model)
    return jax.jit(run, compiler_options=options)


def masked(model: Model) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The masked function of a model, and the options of XLA that it needs."""
    flat, tree = jax.tree_util.tree_flatten(((model.params, *model.arrays), {}))
    shapes = [x.shape for x in flat[: len(flat) - len(model.arrays)]] + list(model.shapes)
    leaves = [
        Leaf(f"arg{i}", s, x.dtype) for i, (s, x) in enumerate(zip(shapes, flat, strict=True))
    ]
    program = trace(model.plain, tree, leaves, model.sizes)
    needed = workarounds(program.jaxpr)

    def run(*args: Any) -> Any:
        arrays, sizes = args[: -len(model.sizes)], args[-len(model.sizes) :]
        values = dict(zip(model.sizes, sizes, strict=True))
        at = BucketSizes(model.bucket, program.lower, values)
        flat = jax.tree_util.tree_leaves(arrays)
        outs = interpret(
            program.jaxpr, program.consts, flat, at, default_rules(), needed.after(), 0
        )
        return program.out_tree.unflatten(outs)

    return run, dict(needed.options())


def measure(model: Model, rounds: int) -> Row:
    """Median times by hand and derived, and the median of their paired ratios."""
    sizes = [np.int32(n) for n in model.sizes.values()]
    args = (model.params, *map(jnp.asarray, model.arrays), *sizes)
    hand, ours = (f.lower(*args).compile() for f in (jax.jit(model.by_hand), derived(model)))
    for a, b in zip(*(jax.tree_util.tree_leaves(f(*args)) for f in (hand, ours)), strict=True):
        real = tuple(map(slice, logical_part(model, a.shape)))
        np.testing.assert_allclose(a[real], b[real], rtol=2e-3, atol=2e-4)
    calls = {
        "hand": lambda: jax.block_until_ready(hand(*args)),
        "ours": lambda: jax.block_until_ready(ours(*args)),
    }
    in_turn(calls, [()] * 3)
    times = in_turn(calls, [()] * rounds)
    return {
        "model": model.name,
        "hand_ms": median(times["hand"]) * 1e3,
        "ours_ms": median(times["ours"]) * 1e3,
        "ratio": paired_ratio(times, "ours", "hand"),
    }


def logical_part(model: Model, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The logical part of an output."""
    if not model.is_open or not shape:
        return shape
    return (*model.sizes.values(), *shape[2:])


def by_model(options: Options) -> list[Row]:
    """A row for each model."""
    models = (
        *(cnn_step, flat_tokens_step, spectrum_gradient),
        *(transformer_forward, transformer_step),
    )
    chosen, rounds = (models[:1], 3) if options.quick else (models, 60)
    return [measure(make(np.random.default_rng(0)), rounds) for make in chosen]


SECTIONS = (
    Section(
        "masking",
        "Derived masks beside masks by hand",
        "The same bucket, padded arguments and sizes; executables alone, called in turn. *Ratio* "
        "is the median of the paired ratios. On CPU, what is contracted over batch and sequence is "
        "contracted over one axis of both, which XLA does faster: such training steps take less "
        "time than by hand.",
        (
            Column("model", "model"),
            Column("hand_ms", "by hand, ms", ".2f"),
            Column("ours_ms", "derived, ms", ".2f"),
            Column("ratio", "ratio", ".3f"),
        ),
        "benchmarks.masking:by_model",
    ),
)

if __name__ == "__main__":
    print_sections(SECTIONS, __doc__)
