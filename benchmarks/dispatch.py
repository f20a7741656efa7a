"""What a warm call costs, beside what an expert writes by hand for the same bucket; and a cold one.

The floor: NumPy zero-fill and copy, the compiled executable of a hand-masked function with the size
as an argument, and a part of its result in the form that is asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import bucketjit
from benchmarks import masking
from benchmarks.contenders import padded
from benchmarks.measuring import in_turn, paired_ratio
from benchmarks.sections import Column, Options, Row, Section, print_sections

WIDTH, LARGEST = 512, 64
Calls = Mapping[str, Callable[..., Any]]


def tiny(x: Any) -> Any:
    """The function that leaves nothing but dispatch to measure."""
    return jnp.sin(x) + 1


def bucket_of(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


class Expert:
    """Padding and masking by hand, one executable per power of two."""

    def __init__(self) -> None:
        self._masked = {
            b: jax.jit(self._mask(b)) for b in (1 << i for i in range(LARGEST.bit_length()))
        }
        self._cuts: dict[tuple[int, int], Any] = {}

    @staticmethod
    def _mask(bucket: int) -> Callable[[Any, Any], Any]:
        def masked(n: Any, x: Any) -> Any:
            real = lax.broadcasted_iota(jnp.int32, (bucket, 1), 0) < n
            return jnp.where(real, tiny(x), 0)

        return masked

    def padded(self, x: Any) -> Any:
        """The result with its padding."""
        n = len(x)
        b = bucket_of(n)
        host = np.asarray(x)
        if n != b:
            padded = np.zeros((b, WIDTH), np.float32)
            padded[:n] = host
            x = padded
        return self._masked[b](np.int32(n), x)

    def numpy(self, x: Any) -> Any:
        """The result as a host array."""
        return np.asarray(self.padded(x))[: len(x)]

    def jax_by_host(self, x: Any) -> Any:
        """The result as a jax.Array, by way of the host: no compile per size."""
        return jax.device_put(self.numpy(x))

    def jax_by_slice(self, x: Any) -> Any:
        """The result as a jax.Array, by a compiled slice per size, compiled beforehand."""
        n = len(x)
        y = self.padded(x)
        key = len(y), n
        if key not in self._cuts:
            self._cuts[key] = jax.jit(lambda y: y[:n])
        return self._cuts[key](y)


def _waiting(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: jax.block_until_ready(call(*args))


def rows_of(group: str, calls: Calls, arguments: list[tuple[Any, ...]], rounds: int) -> list[Row]:
    """Times of calls that take turns; ratios to the first, round by round."""
    waiting = {name: _waiting(call) for name, call in calls.items()}
    for call in waiting.values():
        for given in arguments:
            for _ in range(3):
                call(*given)
    drawn = random.Random(0).choices(arguments, k=rounds)
    times = in_turn(waiting, drawn)
    return _compared(group, times)


def _compared(group: str, times: Mapping[str, list[float]]) -> list[Row]:
    floor = next(iter(times))
    return [
        {
            "group": group,
            "way": name,
            "us": median(times[name]) * 1e6,
            "over": median(a - b for a, b in zip(times[name], times[floor], strict=True)) * 1e6,
            "ratio": paired_ratio(times, name, floor),
        }
        for name in times
    ]


def warm(options: Options) -> list[Row]:
    """Warm calls of the tiny function by kind of argument and form of result."""
    rounds = 20 if options.quick else 5_000
    expert = Expert()
    forms = {
        out: bucketjit.jit(tiny, out=out, buckets="pow2") for out in ("numpy", "padded", "jax")
    }
    host = [(np.ones((n, WIDTH), np.float32),) for n in range(1, LARGEST + 1)]
    device = [(jax.device_put(x),) for (x,) in host]
    found = []
    for kind, arguments in (("NumPy", host), ("jax.Array", device)):
        floors: dict[str, Calls] = {
            "host array": {"by hand": expert.numpy, "bucketjit": forms["numpy"]},
            "padded": {"by hand": expert.padded, "bucketjit": forms["padded"]},
            "jax.Array": {
                "by hand, compiled slice per size": expert.jax_by_slice,
                "by hand, device_put": expert.jax_by_host,
                "bucketjit": forms["jax"],
            },
        }
        for form, calls in floors.items():
            found += rows_of(f"{kind} in, {form} out, sizes 1 to 64", calls, arguments, rounds)
    jitted = jax.jit(tiny)
    for kind, arguments in (("NumPy", host), ("jax.Array", device)):
        for n in (8, 64):
            title = f"{kind} in, size {n} is the bucket"
            calls = {"jit": jitted, "bucketjit": forms["jax"]}
            found += rows_of(title, calls, [arguments[n - 1]], rounds)
    return found + _with_leaves(options)


def _with_leaves(options: Options) -> list[Row]:
    found = []
    for leaves in (100, 400):

        def step(params: Any, x: Any) -> Any:
            return jax.tree.map(lambda p: p + 1e-6 * x.sum(), params), x.sum()

        params = {f"p{i}": jnp.ones(16) for i in range(leaves)}
        jitted = jax.jit(step)
        ours = bucketjit.jit(step, dynamic_axes=(None, "b, _"), buckets="pow2")
        full = np.ones((8, WIDTH), np.float32)
        calls = {
            "jit at the bucket's shape": lambda x, f=jitted, p=params, full=full: f(p, full),
            "bucketjit": lambda x, f=ours, p=params: f(p, x),
        }
        sizes = [(np.ones((n, WIDTH), np.float32),) for n in (5, 6, 7, 8)]
        rounds = 10 if options.quick else 2_000
        found += rows_of(f"training step with {leaves} parameter leaves", calls, sizes, rounds)
    return found


def ahead(options: Options) -> list[Row]:
    """Warm calls of what was compiled ahead of time, beside calls of its executor."""
    rounds = 20 if options.quick else 5_000
    found = []
    for out in ("numpy", "jax"):
        executor = bucketjit.jit(tiny, dynamic_axes="b, _", out=out, buckets="pow2")
        host = [(np.ones((n, WIDTH), np.float32),) for n in range(33, 65)]
        device = [(jax.device_put(x),) for (x,) in host]
        calls = {"executor": executor, "compiled": executor.lower(*host[0]).compile()}
        for kind, arguments in (("NumPy", host), ("jax.Array", device)):
            found += rows_of(f"{kind} in, {out} out, sizes 33 to 64", calls, arguments, rounds)
    executor = bucketjit.jit(tiny, dynamic_axes="b", buckets="pow2")
    small = [(np.ones(n, np.float32),) for n in range(5, 9)]
    calls = {"executor": executor, "compiled": executor.lower(*small[0]).compile()}
    return found + rows_of("NumPy in, jax out, 5 to 8 floats", calls, small, rounds)


def new_sizes(options: Options) -> list[Row]:
    """Calls of sizes that were not there before, in a bucket that was."""
    bucket, width = 1024, 16
    sizes = range(bucket // 2 + 1, bucket // 2 + (20 if options.quick else 500))
    arguments = [(np.ones((n, width), np.float32),) for n in sizes]
    found = []
    for leaves in (1, 100):
        params = [jnp.ones(16) for _ in range(leaves)]

        def shifted(params: Any, x: Any) -> Any:
            return tiny(x) + sum(p[0] for p in params)

        def masked(params: Any, n: Any, x: Any, fn: Any = shifted) -> Any:
            real = lax.broadcasted_iota(jnp.int32, (bucket, 1), 0) < n
            return jnp.where(real, fn(params, x), 0)

        jitted = jax.jit(masked)

        def by_hand(x: Any, params: Any = params, jitted: Any = jitted) -> Any:
            result = jitted(params, np.int32(len(x)), padded(x, (bucket, width)))
            return np.asarray(result)[: len(x)]

        known, new = (
            bucketjit.jit(shifted, dynamic_axes=(None, "b, _"), out="numpy", buckets="pow2")
            for _ in range(2)
        )
        by_hand(*arguments[0])
        for executor in (known, new):
            for n in (bucket, bucket - 1, bucket - 2):
                executor(params, np.ones((n, width), np.float32))
        for (x,) in arguments:
            known(params, x)
        calls = {
            "by hand": by_hand,
            "bucketjit, a size again": lambda x, e=known, p=params: e(p, x),
            "bucketjit, a new size": lambda x, e=new, p=params: e(p, x),
        }
        group = f"{leaves} parameter leaves" if leaves > 1 else "one parameter leaf"
        found += _compared(group, in_turn(calls, arguments))
    return found


COLUMNS = (
    Column("way", "way"),
    Column("us", "p50, us", ".1f"),
    Column("over", "over, us", "+.1f"),
    Column("ratio", "ratio", ".3f"),
)
SECTIONS = (
    Section(
        "dispatch",
        "Dispatch",
        "Warm calls of `sin(x) + 1` on `(b, 512)` floats, beside what an expert writes by hand for "
        "the same bucket, or `jax.jit` at the bucket's shape. Each call waits for its result. "
        "*Over* and *ratio* are medians of differences and ratios to the first row.",
        COLUMNS,
        "benchmarks.dispatch:warm",
        group="group",
    ),
    Section(
        "ahead",
        "Ahead of time",
        "Warm calls of `executor.lower(x).compile()`, beside those of the executor: of "
        "`sin(x) + 1` on `(b, 512)` floats, all sizes of one bucket in random order, and on a few "
        "floats, where nothing but dispatch is left.",
        COLUMNS,
        "benchmarks.dispatch:ahead",
        group="group",
    ),
    Section(
        "new-sizes",
        "New sizes",
        "Calls of a size that was not there before, in a bucket whose executable was: what a "
        "stream of ever new sizes pays for each, once. NumPy in, host array out, about 500 sizes.",
        COLUMNS,
        "benchmarks.dispatch:new_sizes",
        group="group",
    ),
    Section(
        "cold",
        "A new bucket",
        "Time until the executable of a new bucket is there: `jit(masked).lower(...).compile()` of "
        "the hand-masked function, and a bucket of bucketjit's after the first, which is when the "
        "function was traced. *Ratio* is the median of pairs.",
        (
            Column("way", "way"),
            Column("ms", "p50, ms", ".0f"),
            Column("ratio", "ratio", ".3f"),
        ),
        "benchmarks.dispatch:cold",
        group="group",
    ),
)


def cold(options: Options) -> list[Row]:
    """Time to executables of one bucket after another, by hand and derived."""
    makers = (masking.transformer_forward, masking.transformer_step, masking.cnn_step)
    found = []
    for make in makers[:1] if options.quick else makers:
        model = make(np.random.default_rng(0))
        axes = [", ".join(map(str, shape)) for shape in model.shapes]
        executor = bucketjit.jit(model.plain, dynamic_axes=(None, *axes), buckets="pow2")
        first = dict.fromkeys(model.bucket, 2)
        executor.warmup(model.params, *_like(model, first), sizes=[first], progress=False)
        buckets = [
            {v: n << i for v, n in first.items()} for i in range(1, 2 if options.quick else 7)
        ]
        calls = {
            "jit(masked by hand).lower().compile()": lambda at, m=model: _compile_by_hand(m, at),
            "bucketjit": lambda at, e=executor, m=model: e.warmup(
                m.params, *_like(m, at), sizes=[at], progress=False
            ),
        }
        times = in_turn(calls, [(at,) for at in buckets])
        by_hand = next(iter(calls))
        found += [
            {
                "group": model.name,
                "way": name,
                "ms": median(times[name]) * 1e3,
                "ratio": paired_ratio(times, name, by_hand),
            }
            for name in calls
        ]
    return found


def _like(model: masking.Model, sizes: Mapping[str, int]) -> list[jax.ShapeDtypeStruct]:
    """The arguments at these sizes."""
    return [
        jax.ShapeDtypeStruct(tuple(sizes.get(n, n) for n in shape), array.dtype)
        for shape, array in zip(model.shapes, model.arrays, strict=True)
    ]


def _compile_by_hand(model: masking.Model, sizes: Mapping[str, int]) -> None:
    numbers = [jax.ShapeDtypeStruct((), np.int32) for _ in model.sizes]

    def masked(*args: Any) -> Any:  # a function of its own, so that nothing is found in a cache
        return model.by_hand(*args)

    jax.jit(masked).lower(model.params, *_like(model, sizes), *numbers).compile()


if __name__ == "__main__":
    print_sections(SECTIONS, __doc__)
