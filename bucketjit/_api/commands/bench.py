"""The command ``bench``: measures what bucketing saves on a stream of ragged calls."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit._api.commands.command import (
    JSON,
    Command,
    CommandError,
    argument,
    positive_int,
    print_table,
)
from bucketjit._api.executor import BucketedExec
from bucketjit._events import counted

_DESCRIPTION = """\
Run one function over a stream of ragged calls in three ways, and compare them:

    by hand     padding to powers of two and masks, both written by hand
    jax.jit     unpadded: one compile for each size
    bucketjit   bucketjit.jit(function): padding and masks derived

Cold is the whole stream, compiles included; warm is the median of a call when the stream comes
again. It takes about 15 seconds.
"""

_WIDTH = 64  # columns of each argument
_LARGEST = 2**12  # rows of an argument at most: attention is quadratic in them


_ARGUMENTS = (
    argument("--calls", type=positive_int, default=60, metavar="N", help="default: 60"),
    argument("--largest", type=positive_int, default=64, metavar="N", help="default: 64"),
    JSON,
)


def _run(options: argparse.Namespace) -> None:
    if options.largest > _LARGEST:
        raise CommandError(f"--largest must be at most {_LARGEST:,}")
    # Distributed like the lengths of sentences: many small sizes, a few large ones.
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(np.log(options.largest / 4), 0.7, options.calls)
    sizes = [min(options.largest, max(1, int(n))) for n in drawn]
    batches = [rng.standard_normal((n, _WIDTH)).astype(np.float32) for n in sizes]
    jax.block_until_ready(jnp.zeros(1))  # start the backend before anything is measured
    ways = {way: _measure(way, run, batches) for way, run in _ways().items()}
    device = str(jax.devices()[0])
    if options.json:
        print(json.dumps({"sizes": sizes, "device": device, "ways": ways}, indent=2))
        return
    title = f"{counted(len(sizes), 'call')} of {counted(len(set(sizes)), 'size')} on {device}"
    rows = [(way, f"{r['cold_s']:.2f} s", f"{r['warm_us']:,.0f} us") for way, r in ways.items()]
    print_table(title, ("way", "cold", "warm"), rows, numeric=("cold", "warm"))


def _measure(way: str, run: Callable[[Any], Any], batches: list[Any]) -> dict[str, float]:
    """Seconds of the first pass over the calls, and microseconds of a call in the second one."""

    def passed() -> list[float]:
        took = []
        for x in batches:
            began = time.perf_counter()
            jax.block_until_ready(run(x))
            took.append(time.perf_counter() - began)
        return took

    cold = sum(passed())
    if not np.allclose(run(batches[0]), _pooled(batches[0]), rtol=1e-2, atol=1e-3):
        raise CommandError(f"{way} computes something else: nothing is measured")
    return {"cold_s": cold, "warm_us": 1e6 * float(np.median(passed()))}


def _pooled(x: Any) -> Any:
    """Attention over the rows, then their mean. The contractions and the softmax need masks too."""
    scores = x @ x.mT / _WIDTH**0.5
    return jnp.mean(jax.nn.softmax(scores, axis=-1) @ x, axis=0)


def _ways() -> dict[str, Callable[[Any], Any]]:
    @jax.jit
    def masked(n: Any, x: Any) -> Any:
        is_real = jnp.arange(x.shape[0]) < n
        scores = jnp.where(is_real, x @ x.mT / _WIDTH**0.5, -jnp.inf)
        rows = jax.nn.softmax(scores, axis=-1) @ x
        return jnp.sum(jnp.where(is_real[:, None], rows, 0), axis=0) / n

    def by_hand(x: Any) -> Any:
        padded = np.zeros((1 << (len(x) - 1).bit_length(), _WIDTH), np.float32)
        padded[: len(x)] = x
        return masked(np.int32(len(x)), padded)

    bucketed = BucketedExec(_pooled).with_pow2()
    return {"by hand": by_hand, "jax.jit": jax.jit(_pooled), "bucketjit": bucketed}


COMMAND = Command(
    "bench",
    "measure bucketing by hand, jax.jit and bucketjit on this machine",
    _DESCRIPTION,
    _ARGUMENTS,
    _run,
)
