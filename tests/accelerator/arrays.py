"""Arrays stay on the device: compiles per bucket and not per size, and transfers, counted."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit import BucketedExec, Padded
from bucketjit._arrays.device import can_view
from tests.accelerator.on_device import (
    NotShown,
    as_on_an_accelerator,
    compiles,
    is_cpu,
    placed,
    refused,
    same,
    without_transfers,
)

DTYPES = ("float32", "bfloat16", "int8", "bool", "float8_e4m3fn")


def contents(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """Numbers of any dtype, the same for the same shape."""
    values = np.random.default_rng(shape).normal(size=shape) * 3
    return values.astype(jnp.dtype(dtype))


def rows(x: Any) -> Any:
    """Results open along the leading axis, along an inner one, and along none."""
    return jnp.cumsum(x, 0), x.T, jnp.sort(x, 0), x.sum(0)


def moved(x: Any) -> Any:
    """What is defined for every dtype, with results open along the leading and an inner axis."""
    return jnp.flip(x, 1), x.T


def check_compiles() -> str:
    """A stream of sizes compiles for each bucket, and padding and cutting for none of the sizes."""
    executor = BucketedExec(rows, dynamic_axes="n, _").with_pow2(min=32)
    inner = BucketedExec(lambda x: x * x, dynamic_axes="_, s").with_pow2(min=32)
    flat = BucketedExec(lambda x: x * x, dynamic_axes="n").with_pow2(min=32)

    def call(n: int) -> None:
        x, y, z = contents((n, 8)), contents((4, n)), contents((n,))
        got = executor(placed(x))
        same(got, (np.cumsum(x, 0), x.T, np.sort(x, 0), x.sum(0)), 1e-4)
        same((inner(placed(y)), flat(placed(z))), (y * y, z * z))

    with as_on_an_accelerator():
        first = (17, 18, 19, 20, 32, 33, 34, 35, 36, 64)
        for n in first:
            call(n)
        before = compiles()
        others = [n for n in range(17, 65, 3) if n not in first]
        for n in others:
            call(n)
    found = compiles() - before
    buckets = (2, 2, 2)
    ours = tuple(e.stats().compiles for e in (executor, inner, flat))
    assert ours == buckets, f"{ours} compiles for {buckets} buckets"
    assert not found, f"{found} compiles for {len(others)} new sizes of compiled buckets"
    return f"{sum(buckets)} buckets, {len(others)} more sizes compile nothing"


def check_transfers() -> str:
    """Warm calls with arrays on the device transfer nothing, whatever their dtype."""
    left_out = []
    with as_on_an_accelerator():
        for dtype in DTYPES:
            executor = BucketedExec(moved, dynamic_axes="n, s").with_pow2(min=8)
            shapes = ((5, 8), (7, 8), *(((6, 7),) if dtype == "float32" else ()))
            hosts = [contents(shape, dtype) for shape in shapes]
            arrays = list(map(placed, hosts))
            if not can_view(arrays[0]):
                left_out.append(dtype)
                continue
            for x in arrays:
                executor(x)
            with without_transfers():
                got = [jax.block_until_ready(executor(x)) for x in arrays]
            for result, x in zip(got, hosts, strict=True):
                same(result, (np.flip(x, 1), x.T))
    assert set(left_out) <= {"float8_e4m3fn"}, f"no DLPack view of {left_out}"
    return _counted(f"{len(DTYPES) - len(left_out)} dtypes")


def check_new_sizes() -> str:
    """A new size of a compiled bucket puts its numbers on the device, by request, and no more."""
    executor = BucketedExec(moved, dynamic_axes="n, _").with_pow2(min=16)
    arrays = [placed(contents((n, 8))) for n in (9, 10, 12)]
    with as_on_an_accelerator():
        for x in arrays[:2]:
            executor(x)
        with without_transfers("disallow"):
            got = jax.block_until_ready(executor(arrays[2]))
        with without_transfers():
            again = jax.block_until_ready(executor(arrays[2]))
    for result in (got, again):
        same(result, moved(arrays[2]))
    return _counted("sizes and places go to the device, explicitly, once a size")


def check_padded() -> str:
    """Results that keep their padding go into other functions without a transfer, or a cut."""
    first = BucketedExec(rows, dynamic_axes="n, _", out="padded").with_pow2(min=16)
    same_buckets = BucketedExec(lambda x: x * 2, dynamic_axes="n, _").with_pow2(min=16)
    others = BucketedExec(lambda x: x * 2, dynamic_axes="n, _").with_linear(12)
    beyond = BucketedExec(lambda x: x * 2, dynamic_axes="n, _").with_pow2(max=4, overflow="exact")

    def call(x: Any) -> Any:
        kept = first(x)[2]
        return [f(kept) for f in (same_buckets, others)]

    host = contents((11, 8))
    x = placed(host)
    own = Padded(placed(contents((16, 8))), {0: 11})  # its padding holds anything
    with as_on_an_accelerator():
        for _ in range(2):
            call(x), others(own), beyond(own)
        with without_transfers():
            got, got_own = jax.block_until_ready((call(x), others(own)))
        with without_transfers("disallow"):  # a call at its exact size is not remembered
            got_exact = jax.block_until_ready(beyond(own))
    same(got, [np.sort(host, 0) * 2] * 2)
    same((got_own, got_exact), [np.asarray(own) * 2] * 2)
    return _counted("the same buckets, others, and an exact size")


def check_guard() -> str:
    """The guard that the other checks use refuses what comes to the host."""
    x = placed(contents((3, 3)))
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        assert refused(lambda: jax.device_put(contents((3, 3)))), "nothing to a device is counted"
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        counts = refused(lambda: jnp.asarray(np.asarray(x + 1)))
    if is_cpu():
        raise NotShown("on CPU the guard does not count what comes to the host")
    assert counts, "nothing to the host is counted"
    return "both ways"


def _counted(what: str) -> str:
    return what + ("; to the host: by what is called, not counted" if is_cpu() else "")
