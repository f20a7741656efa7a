"""Checked execution: find a wrong mask before a wrong number is used.

``Check.POISON`` overwrites all padding, in the arguments and in the outputs of every equation, and
runs the call twice. In the first run padding holds NaN and the largest integers, in the second
-infinity and the smallest integers. Both runs must give the same results. ``Check.EXACT`` compares
the masked executable with the function run unpadded. If results differ, both checks name the first
equation whose real part differs. The checks cost time and do not change results; they are meant for
tests and continuous integration.

`bucketjit._runtime.checked_calls` runs the checks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn

from bucketjit._arrays.padded import Padded
from bucketjit._arrays.padding import pad, placed_beside
from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._ir.expressions import evaluate, is_symbolic
from bucketjit._ir.kernels import name_in_words
from bucketjit._ir.program import Program
from bucketjit._jax.arrays import is_key
from bucketjit._jax.user_code import source_line
from bucketjit._masking.interpreter import Hook, interpret
from bucketjit._masking.rule_context import RuleTable
from bucketjit.errors import MaskingError

POISONS = ("nan", "low")


def poison_value(dtype: np.dtype[Any], kind: str) -> Any:
    """The scalar that a poison writes into padding of a dtype."""
    dtype, is_nan = jnp.dtype(dtype), kind == "nan"
    if dtype.kind == "b":
        return np.asarray(is_nan)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return np.asarray(int(info.max if is_nan else info.min)).astype(dtype)
    return np.asarray(np.nan if is_nan else -np.inf).astype(dtype)


def poison_equations(which: object, kinds: Sequence[str] = POISONS) -> Callable[[], Hook]:
    """The hook of `interpret` that overwrites the padding of every output of every equation."""

    def after(eqn: JaxprEqn, outs: list[Any], sizes: BucketSizes) -> list[Any]:
        return [
            _poisoned(out, getattr(v.aval, "shape", ()), sizes, which, kinds)
            for v, out in zip(eqn.outvars, outs, strict=True)
        ]

    return lambda: after


def _poisoned(out: Any, shape: Any, sizes: BucketSizes, which: Any, kinds: Sequence[str]) -> Any:
    """``out`` with the poison outside of its logical shape; typed keys are left as they are."""
    symbolic = [i for i, d in enumerate(shape) if is_symbolic(d)]
    if not symbolic or jax.dtypes.issubdtype(out.dtype, jax.dtypes.extended):
        return out
    values = jnp.stack([jnp.asarray(poison_value(out.dtype, k), out.dtype) for k in kinds])
    inside = [
        lax.broadcasted_iota(jnp.int32, out.shape, i) < sizes.logical(shape[i]) for i in symbolic
    ]
    return jnp.where(functools.reduce(jnp.logical_and, inside), out, values[which])


def pad_poisoned(value: Any, shape: tuple[int, ...], kind: str) -> Any:
    """Pad like `pad`, with a poison in place of zeros.

    Arrays of typed keys are padded with zeros, since a key has no poison.
    """
    if value.shape == shape or jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return pad(value, shape)
    host = np.asarray(value)
    padded = np.full(shape, poison_value(host.dtype, kind), host.dtype)
    padded[tuple(map(slice, host.shape))] = host
    array = value.array if isinstance(value, Padded) else value
    return placed_beside(padded, array)


def compare(got: object, want: object, what: str, exactly: bool) -> str | None:
    """Describe the first output that differs between two results."""
    pairs = jax.tree_util.tree_leaves_with_path(got)
    for (path, a), b in zip(pairs, jax.tree_util.tree_leaves(want), strict=True):
        if problem := _difference(a, b, exactly):
            return f"output{jax.tree_util.keystr(path)} differs from {what}: {problem}"
    return None


def _difference(a: Array, b: Array, exactly: bool) -> str | None:
    """Describe where two arrays differ; None if they agree. `compare` explains ``exactly``."""
    if is_key(a):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    x, y = np.asarray(a), np.asarray(b)
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"{x.dtype}{list(x.shape)} against {y.dtype}{list(y.shape)}"
    if x.size == 0:
        return None
    bad: Any = x != y
    if jnp.issubdtype(x.dtype, jnp.inexact):
        rtol = 0.0 if exactly else _tolerance(x.dtype)
        wide = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
        x, y = x.astype(wide), y.astype(wide)
        scale = np.max(np.abs(y), initial=0.0, where=np.isfinite(y))
        bad = ~np.isclose(x, y, rtol=rtol, atol=rtol * scale, equal_nan=True)
    if not bad.any():
        return None
    place = tuple(int(i) for i in np.argwhere(bad)[0])
    return f"at {place}: {x[place]} against {y[place]} ({int(bad.sum())} of {x.size} differ)"


def _tolerance(dtype: np.dtype[Any]) -> float:
    """The relative error allowed between long sums in different orders: 4e-4 in float32.

    XLA sums types narrower than float32 in float32, and rounds intermediate results now and then.
    """
    eps = float(jnp.finfo(dtype).eps)
    return float(min(64 * eps**0.75, max(4e-4, 5 * eps)))


def blame(
    program: Program,
    rules: RuleTable,
    sizes: Mapping[str, int],
    bucket: Mapping[str, int],
    size_constants: Sequence[Any],
    arguments: Callable[[str | None], Sequence[Any]],
    exact: bool,
) -> str:
    """Name the first equation whose real part depends on padding, or differs from the exact run.

    The program is run twice, equation by equation and without compiling it as a whole. The recorded
    outputs are compared in program order.
    """
    if program.computed:  # the recorded outputs cannot be cut to sizes that are not known here
        return ""
    record = functools.partial(_record, program, rules, sizes, size_constants)
    first = record(bucket, arguments(POISONS[0]), POISONS[0])
    kind = None if exact else POISONS[1]
    second = record(sizes if exact else bucket, arguments(kind), kind)
    # One list may be longer: the function of an associative scan runs more often at a larger size.
    for (eqn, *outs), (_, *expected) in zip(first, second, strict=False):
        if any(_difference(a, b, not exact) for a, b in zip(outs, expected, strict=True)):
            line = source_line(eqn)
            where = f" at {line}" if line else ""
            return f"; the first to differ is {name_in_words(eqn)}{where}"
    return ""


def _record(
    program: Program,
    rules: RuleTable,
    sizes: Mapping[str, int],
    size_constants: Sequence[Any],
    bucket: Mapping[str, int],
    arguments: Sequence[Any],
    kind: str | None,
) -> list[tuple[Any, ...]]:
    """Run a program at these sizes; return each equation with the real part of its outputs.

    Equations whose outputs are traced are left out: those in the bodies of loops and in branches,
    which JAX traces even in an eager run. ``kind`` is the poison written into padding, or None for
    an unpadded run.
    """
    recorded: list[tuple[Any, ...]] = []
    poison = poison_equations(0, (kind,))() if kind else None

    def after(eqn: JaxprEqn, outs: list[Any], padded_sizes: BucketSizes) -> list[Any]:
        if not any(isinstance(o, jax.core.Tracer) for o in outs):
            real = []
            for v, out in zip(eqn.outvars, outs, strict=True):
                cut = tuple(slice(evaluate(d, sizes)) for d in getattr(v.aval, "shape", ()))
                if is_key(out):
                    out = jax.random.key_data(out)
                real.append(np.asarray(out)[cut])
            recorded.append((eqn, *real))
        return poison(eqn, outs, padded_sizes) if poison else outs

    values = {v: np.int32(n) for v, n in sizes.items()}
    smallest = {v: min(n, program.lower.get(v, 1)) for v, n in sizes.items()}
    lower = smallest if kind else dict(sizes)
    shapes = map(BucketSizes(bucket, lower, {}).padded_shape, program.size_constant_shapes)
    constants = list(map(pad, map(np.asarray, size_constants), shapes))
    rooms = program.rooms(bucket) if kind else {}
    all_sizes = BucketSizes(bucket, lower, values, constants, rooms=rooms)
    interpret(program.jaxpr, program.consts, arguments, all_sizes, rules, lambda: after)
    return recorded


def failed(name: str, problem: str, blamed: str) -> MaskingError:
    """Make the error of a check that failed."""
    return MaskingError(
        f"{name}: {problem}{blamed}",
        "this is a defect of a masking rule, or of a kernel's declaration; leave the axis static "
        "until it is mended",
        is_defect=True,
    )
