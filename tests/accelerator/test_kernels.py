"""The recipes of docs/kernels.md, compiled for a TPU and an H100; and what they cost on a TPU.

``make accelerator-compilers ARGS=--sample`` runs it, as it does tests/accelerator/test_targets.py.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest

from benchmarks import compilers

if not compilers.VARIABLES.items() <= os.environ.items():
    pytest.skip("make accelerator-compilers runs it", allow_module_level=True)

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.sharding import SingleDeviceSharding

import bucketjit
from tests.api.test_kernel_recipes import recipe


def lowered(target: str, fn: Any, axes: Any, *shapes: Any) -> Any:
    at = SingleDeviceSharding(compilers.device(target))
    structs = [
        jax.ShapeDtypeStruct(*(x if isinstance(x[0], tuple) else (x, jnp.float32)), sharding=at)
        for x in shapes
    ]
    made = bucketjit.jit(fn, dynamic_axes=axes, buckets="pow2", fallback="error")
    return made.lower(*structs)


def gradient(fn: Any) -> Any:
    return jax.grad(lambda *arrays: (fn(*arrays) ** 2).sum(), (0, 1, 2))


INT = jnp.int32
ON_TPU = {
    "attention": (("_, _, s, _",) * 3, [(1, 2, 200, 64)] * 3, True),
    "splash": ((*("_, s, _",) * 3, "s"), [*[(2, 200, 128)] * 3, ((200,), INT)], True),
    "paged": (
        ("b, _, _", None, None, "b", "b, p"),
        [(5, 8, 128), (1, 32, 16, 128), (1, 32, 16, 128), ((5,), INT), ((5, 6), INT)],
        False,
    ),
    "column_sums": ("n, _", [(20, 128)], False),
}


@pytest.mark.parametrize("name", ON_TPU)
def test_recipes_compile_for_a_tpu(name: str) -> None:
    axes, shapes, has_gradient = ON_TPU[name]
    fn = recipe(name)
    for own, kernels in ((fn, 1), (gradient(fn), 3))[: 1 + has_gradient]:
        compiled = lowered("tpu", own, axes, *shapes).compile()
        # The forward kernel is in the gradient once, with what the backward ones need.
        assert compilers.figures(compiled)["fused"] == kernels


def test_cudnn_compiles_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.cudnn import fused_attention_stablehlo  # JAX asks for a GPU and a cuDNN here

    for name in ("check_cudnn_version", "check_compute_capability"):
        monkeypatch.setattr(fused_attention_stablehlo, name, lambda *_: 91000)
    fn = recipe("cudnn")
    shape = (2, 200, 4, 64), jnp.bfloat16
    made = lowered("cuda", fn, ("_, s, _, _",) * 3, *[shape] * 3)
    text = made.compile().as_text()
    assert "__cudnn$fmhaSoftmax" in text and '"mask_type": "PADDING"' in text


# --- an encoder layer, beside an expert's -----------------------------------------------------

WIDTH, HEADS = 256, 4


def layer(attend: Any, params: Any, x: Any) -> Any:
    """A layer of an encoder on one sequence, with layer norms and a network of two layers."""

    def normed(x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)

    x = x + attend(normed(x), params["in"], HEADS) @ params["out"]
    return x + jax.nn.gelu(normed(x) @ params["up"]) @ params["down"]


def by_hand(params: Any, x: Any, n: Any = None) -> Any:
    """The layer on a padded sequence; without a size on one that is not."""
    ids = None if n is None else (jnp.arange(x.shape[0]) < n).astype(jnp.int32)[None]

    def attend(x: Any, weights: Any, heads: int) -> Any:
        arrays = [(x @ w).reshape(x.shape[0], heads, -1).swapaxes(0, 1)[None] for w in weights]
        segments = None if ids is None else flash.SegmentIds(ids, ids)
        out = flash.flash_attention(*arrays, segment_ids=segments)
        return out[0].swapaxes(0, 1).reshape(x.shape)

    out = layer(attend, params, x)
    return out if ids is None else jnp.where((ids[0] > 0)[:, None], out, 0)


def structs(n: int) -> tuple[Any, Any]:
    at = SingleDeviceSharding(compilers.device("tpu"))
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=at)  # noqa: E731
    square, wide = of(WIDTH, WIDTH), of(WIDTH, 4 * WIDTH)
    params = {"in": [square] * 3, "out": square, "up": wide, "down": of(4 * WIDTH, WIDTH)}
    return params, of(n, WIDTH)


def in_buckets() -> bucketjit.BucketedExec[..., Any]:
    fn = functools.partial(layer, recipe("self_attention"))
    return bucketjit.jit(fn, dynamic_axes=(None, "s, _"), buckets="pow2", fallback="error")


@pytest.mark.parametrize(("n", "bucket"), [(200, 256), (400, 512)])
def test_a_layer_costs_what_it_costs_an_expert(n: int, bucket: int) -> None:
    size = jax.ShapeDtypeStruct((), INT, sharding=structs(n)[1].sharding)
    hand = compilers.figures(jax.jit(by_hand).lower(*structs(bucket), size).compile())
    ours = compilers.figures(in_buckets().lower(*structs(n)).compile())
    print(n, ours["cycles"], hand["cycles"], ours["cycles"] / hand["cycles"])
    assert ours["fused"] == hand["fused"] == 1
    assert ours["cycles"] <= 1.05 * hand["cycles"]


def test_as_many_executables_as_buckets() -> None:
    executor, refused = in_buckets(), 0
    for n in range(1, 513):
        executor.warmup(*structs(n))
        try:
            jax.eval_shape(by_hand, *structs(n))
        except ValueError:
            refused += 1
    assert executor.stats().compiles == 3  # 128, 256, 512
    assert refused == 508
