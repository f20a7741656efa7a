"""How lean the masked program is beside the same function with an expert's masks.

    python -m benchmarks.lean

Both functions are lowered at the same bucket and compiled in turn. The table has the operations in
the module that XLA gets and in what XLA makes of it, the CPU time of XLA's compile, and the median
of the paired ratios of compiles and of warm calls. Results are compared before anything is timed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contenders.jax_encoder import is_real, norm, transform
from benchmarks.encoder import HEADS, WIDTH, draw_weights
from benchmarks.masking import (
    LAYERS,
    VOCABULARY,
    Model,
    cnn_step,
    logical_part,
    masked,
    transformer_forward,
    transformer_step,
)
from benchmarks.measuring import in_turn, paired_ratio
from benchmarks.sections import Column, Options, Row, Section, print_sections


def _descent(loss: Callable[..., Any], params: Any, *arrays: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(params, *arrays)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value


def _draw(rng: np.random.Generator, *shape: int) -> Any:
    return jnp.asarray(rng.standard_normal(shape) * shape[0] ** -0.5, jnp.float32)


def _padded(rng: np.random.Generator, shape: Sequence[int], real: Sequence[int]) -> Any:
    array = np.zeros(shape, np.float32)
    array[tuple(map(slice, real))] = rng.standard_normal(real)
    return array


def mlp_step(rng: np.random.Generator, width: int = 64) -> Model:
    """A training step of three dense layers over an open batch."""

    def squares(params: Any, x: Any, y: Any) -> Any:
        for w, b in params[:-1]:
            x = jax.nn.gelu(x @ w + b)
        w, b = params[-1]
        return ((x @ w + b - y) ** 2).mean(-1)

    def plain(params: Any, x: Any, y: Any) -> Any:
        return _descent(lambda p: squares(p, x, y).mean(), params)

    def by_hand(params: Any, x: Any, y: Any, n: Any) -> Any:
        real = jnp.arange(len(x)) < n
        return _descent(lambda p: jnp.where(real, squares(p, x, y), 0).sum() / n, params)

    widths = [(32, width), (width, width), (width, 8)]
    params = [(_draw(rng, i, o), jnp.zeros(o)) for i, o in widths]
    arrays = [_padded(rng, (64, 32), (50, 32)), _padded(rng, (64, 8), (50, 8))]
    shapes: list[Any] = [("b", 32), ("b", 8)]
    return Model("MLP, training step", plain, by_hand, params, arrays, shapes, {"b": 50}, {"b": 64})


def gru_step(rng: np.random.Generator, width: int = 64) -> Model:
    """A training step of a gated recurrent unit over an open batch of rows of an open length."""

    def states(params: Any, x: Any) -> Any:
        def step(h: Any, now: Any) -> Any:
            z = jax.nn.sigmoid(now @ params["xz"] + h @ params["hz"])
            r = jax.nn.sigmoid(now @ params["xr"] + h @ params["hr"])
            new = jnp.tanh(now @ params["xn"] + (r * h) @ params["hn"])
            h = (1 - z) * new + z * h
            return h, h

        begin = jnp.zeros((x.shape[0], width), x.dtype)
        return jax.lax.scan(step, begin, x.swapaxes(0, 1))[1].swapaxes(0, 1)

    def squares(params: Any, x: Any, y: Any) -> Any:
        return ((states(params, x) @ params["out"] - y) ** 2).mean(-1)

    def plain(params: Any, x: Any, y: Any) -> Any:
        return _descent(lambda p: squares(p, x, y).mean(), params)

    def by_hand(params: Any, x: Any, y: Any, b: Any, s: Any) -> Any:
        real = is_real(b, s, x.shape[:2])

        def loss(params: Any) -> Any:
            return jnp.where(real, squares(params, x, y), 0).sum() / (b * s)

        return _descent(loss, params)

    params = {f"x{k}": _draw(rng, 32, width) for k in "zrn"} | {"out": _draw(rng, width, 8)}
    params |= {f"h{k}": _draw(rng, width, width) for k in "zrn"}
    arrays = [_padded(rng, (8, 64, 32), (7, 50, 32)), _padded(rng, (8, 64, 8), (7, 50, 8))]
    shapes: list[Any] = [("b", "s", 32), ("b", "s", 8)]
    sizes, bucket = {"b": 7, "s": 50}, {"b": 8, "s": 64}
    return Model("GRU, training step", plain, by_hand, params, arrays, shapes, sizes, bucket)


def decode_step(rng: np.random.Generator, width: int = WIDTH) -> Model:
    """One new token for each row of an open batch, which attends to a cache of an open length."""

    def attended(params: Any, x: Any, keys: Any, values: Any, real: Any | None) -> Any:
        for layer, k, v in zip(params["layers"], keys, values, strict=True):
            h = norm(x) @ layer["qkv"][:, :width]
            q = h.reshape(-1, HEADS, width // HEADS)
            scores = jnp.einsum("bhd,bthd->bht", q, k) / (width // HEADS) ** 0.5
            if real is not None:
                scores = jnp.where(real, scores, -1e30)
            h = jnp.einsum("bht,bthd->bhd", jax.nn.softmax(scores, axis=-1), v)
            x = x + h.reshape(-1, width) @ layer["out"]
            x = x + jax.nn.gelu(norm(x) @ layer["up"]) @ layer["down"]
        return norm(x) @ params["tokens"].T

    def plain(params: Any, x: Any, keys: Any, values: Any) -> Any:
        return attended(params, x, keys, values, None)

    def by_hand(params: Any, x: Any, keys: Any, values: Any, b: Any, t: Any) -> Any:
        return attended(params, x, keys, values, jnp.arange(keys.shape[2]) < t)

    cache = (LAYERS, 8, 64, HEADS, width // HEADS), (LAYERS, 7, 50, HEADS, width // HEADS)
    arrays = [_padded(rng, (8, width), (7, width)), _padded(rng, *cache), _padded(rng, *cache)]
    of_cache = (LAYERS, "b", "t", HEADS, width // HEADS)
    params = jax.device_put(draw_weights(LAYERS, VOCABULARY, width=width))
    shapes: list[Any] = [("b", width), of_cache, of_cache]
    sizes, bucket = {"b": 7, "t": 50}, {"b": 8, "t": 64}
    made = Model("decode step", plain, by_hand, params, arrays, shapes, sizes, bucket)
    return replace(made, is_open=True)


def graph_step(rng: np.random.Generator, width: int = 32) -> Model:
    """A training step of a graph network over open numbers of nodes and edges."""

    def squares(params: Any, x: Any, edges: Any, y: Any, real: Any | None) -> Any:
        for w_self, w_edge in params["layers"]:
            messages = x[edges[:, 0]] @ w_edge
            if real is not None:
                messages = jnp.where(real[:, None], messages, 0)
            x = jax.nn.relu(x @ w_self + jax.ops.segment_sum(messages, edges[:, 1], x.shape[0]))
        return ((x @ params["out"] - y) ** 2).mean(-1)

    def plain(params: Any, x: Any, edges: Any, y: Any) -> Any:
        return _descent(lambda p: squares(p, x, edges, y, None).mean(), params)

    def by_hand(params: Any, x: Any, edges: Any, y: Any, n: Any, e: Any) -> Any:
        real, of_node = jnp.arange(len(edges)) < e, jnp.arange(len(x)) < n

        def loss(params: Any) -> Any:
            return jnp.where(of_node, squares(params, x, edges, y, real), 0).sum() / n

        return _descent(loss, params)

    layers = [(_draw(rng, width, width), _draw(rng, width, width)) for _ in range(3)]
    params = {"layers": layers, "out": _draw(rng, width, 8)}
    edges = np.zeros((256, 2), np.int32)
    edges[:200] = rng.integers(0, 50, (200, 2))
    arrays = [_padded(rng, (64, width), (50, width)), edges, _padded(rng, (64, 8), (50, 8))]
    shapes: list[Any] = [("n", width), ("e", 2), ("n", 8)]
    sizes, bucket = {"n": 50, "e": 200}, {"n": 64, "e": 256}
    return Model("graph, training step", plain, by_hand, params, arrays, shapes, sizes, bucket)


def _as(x: Any, weights: Any) -> Any:
    return jax.tree.map(lambda w: w.astype(x.dtype), weights)


def input_gradient(rng: np.random.Generator, width: int = WIDTH) -> Model:
    """The gradient of an encoder's loss by its input; the weights are closed over."""
    weights = jax.device_put(draw_weights(LAYERS, VOCABULARY, width=width))

    def plain(params: Any, x: Any) -> Any:
        own = _as(x, weights)
        return jax.grad(lambda x: (transform(own, x) ** 2).mean())(x)

    def by_hand(params: Any, x: Any, b: Any, s: Any) -> Any:
        real = is_real(b, s, x.shape[:2])

        def loss(x: Any) -> Any:
            each = (transform(_as(x, weights), x, real) ** 2).mean(-1)
            return jnp.where(real, each, 0).sum() / (b * s)

        return jax.grad(loss)(x)

    x = _padded(rng, (8, 64, width), (7, 50, width))
    shapes: list[Any] = [("b", "s", width)]
    sizes, bucket = {"b": 7, "s": 50}, {"b": 8, "s": 64}
    name = "encoder, gradient by its input"
    return replace(Model(name, plain, by_hand, (), [x], shapes, sizes, bucket), is_open=True)


MODELS = (
    *(mlp_step, transformer_forward, transformer_step, cnn_step, gru_step, decode_step),
    *(graph_step, input_gradient),
)


def measure(model: Model, rounds: int) -> Row:
    """Operations of both programs, and paired ratios of the CPU time of compiles and of calls."""
    sizes = [np.int32(n) for n in model.sizes.values()]
    args = (model.params, *map(jnp.asarray, model.arrays), *sizes)
    programs = {"hand": (model.by_hand, {}), "ours": masked(model)}
    compiles: dict[str, list[float]] = {"hand": [], "ours": []}
    lowered: dict[str, Any] = {}
    made: dict[str, Any] = {}
    for _ in range(rounds):
        for name, (run, options) in programs.items():
            # A function that JAX has not seen, as it keeps what it has compiled.
            fresh = jax.jit(functools.partial(run), compiler_options=options)
            lowered[name] = fresh.lower(*args)
            began = time.process_time()
            made[name] = lowered[name].compile()
            compiles[name].append(time.process_time() - began)
    found = (jax.tree_util.tree_leaves(made[name](*args)) for name in ("hand", "ours"))
    for a, b in zip(*found, strict=True):
        real = tuple(map(slice, logical_part(model, a.shape)))
        np.testing.assert_allclose(a[real], b[real], rtol=2e-3, atol=2e-4)
    calls = {name: _waiting(made[name], args) for name in made}
    times = in_turn(calls, [()] * 12 * rounds)
    row: Row = {"model": model.name}
    for name, program in lowered.items():
        row[name] = _operations(program.as_text())
        row[name + "_optimised"] = _operations(made[name].as_text())
        row[name + "_ms"] = median(compiles[name]) * 1e3
    return row | {
        "operations": row["ours"] / row["hand"],
        "optimised": row["ours_optimised"] / row["hand_optimised"],
        "compile": paired_ratio(compiles, "ours", "hand"),
        "calls": paired_ratio(times, "ours", "hand"),
    }


def _waiting(call: Any, args: Sequence[Any]) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(call(*args))


def _operations(text: str) -> int:
    """The lines of a module that compute something."""
    return sum(" = " in line for line in text.splitlines())


def by_model(options: Options) -> list[Row]:
    """A row for each model."""
    chosen, rounds = (MODELS[:1], 2) if options.quick else (MODELS, 5)
    return [measure(make(np.random.default_rng(0)), rounds) for make in chosen]


SECTIONS = (
    Section(
        "lean",
        "How lean the masked program is",
        "The operations of the module that XLA gets, and of what it makes of that, for the same "
        "function masked by hand and derived; the CPU time of XLA's compile. *Compile* and *calls* "
        "are medians of paired ratios.",
        (
            Column("model", "model"),
            Column("hand", "by hand", "d"),
            Column("ours", "derived", "d"),
            Column("operations", "ratio", ".2f"),
            Column("optimised", "optimised, ratio", ".2f"),
            Column("hand_ms", "compile by hand, ms", ".0f"),
            Column("compile", "compile, ratio", ".2f"),
            Column("calls", "calls, ratio", ".2f"),
        ),
        "benchmarks.lean:by_model",
    ),
)

if __name__ == "__main__":
    print_sections(SECTIONS, __doc__)
