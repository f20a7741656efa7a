"""An encoder layer with flash attention: in a bucket, and padded by hand, for a TPU.

tests/accelerator/test_kernels.py compiles both, by the compiler of a TPU that is not here, and
compares their cycles. The kernel of the bucketed layer is a recipe of docs/kernels.md.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.sharding import SingleDeviceSharding

import bucketjit
from benchmarks import compilers

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
    """The types of the parameters and of a sequence, on a TPU."""
    at = SingleDeviceSharding(compilers.device("tpu"))
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=at)  # noqa: E731
    square, wide = of(WIDTH, WIDTH), of(WIDTH, 4 * WIDTH)
    params = {"in": [square] * 3, "out": square, "up": wide, "down": of(4 * WIDTH, WIDTH)}
    return params, of(n, WIDTH)


def in_buckets(attention: Any) -> bucketjit.BucketedExec[..., Any]:
    """The layer with a declared kernel, in buckets."""
    fn = functools.partial(layer, attention)
    return bucketjit.jit(fn, dynamic_axes=(None, "s, _"), buckets="pow2", fallback="error")


def ratio(attention: Any, n: int, bucket: int) -> tuple[float, int, int]:
    """Cycles of the bucketed layer over those of the one by hand; and fused kernels of both."""
    size = jax.ShapeDtypeStruct((), jnp.int32, sharding=structs(n)[1].sharding)
    hand = compilers.figures(jax.jit(by_hand).lower(*structs(bucket), size).compile())
    ours = compilers.figures(in_buckets(attention).lower(*structs(n)).compile())
    print(n, ours["cycles"], hand["cycles"], ours["cycles"] / hand["cycles"])
    return ours["cycles"] / hand["cycles"], ours["fused"], hand["fused"]
