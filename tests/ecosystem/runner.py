"""Run models through `BucketedExec` and beside it through `jax.jit`."""

import contextlib
import gc
import importlib
import pkgutil
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tests.ecosystem.libraries
from bucketjit import BucketedExec
from bucketjit._ir.program import TraceRefused
from bucketjit._tracing import traced_programs
from bucketjit.errors import FallbackWarning
from tests.ecosystem.model import Model


@dataclass(frozen=True)
class Outcome:
    """How a model fared.

    Attributes:
        way: ``masked``, ``paired`` or ``exact``.
        reason: Why it is not masked with its open axes.
        problem: What is wrong with the results; empty if they equal those of ``jax.jit``.
    """

    way: str
    reason: str = ""
    problem: str = ""


def libraries() -> Iterator[tuple[str, list[Model], str]]:
    """Every library: its name, its models, and why it is skipped if it is."""
    for module in pkgutil.iter_modules(tests.ecosystem.libraries.__path__):
        name = f"{tests.ecosystem.libraries.__name__}.{module.name}"
        if not hasattr(sys.modules.get(name), "MODELS"):
            sys.modules.pop(name, None)  # pytest, looking for doctests, leaves a skipped one behind
        try:
            found = importlib.import_module(name)
        except pytest.skip.Exception as skipped:
            yield module.name, [], str(skipped)
        else:
            yield module.name, found.MODELS, ""


def run(model: Model) -> Outcome:
    """Call a model at all its sizes, bucketed and not."""
    fn, *fixed = model.build()
    axes = (*(None for _ in fixed), *(x.spec() for x in model.inputs))
    executor = BucketedExec(fn, dynamic_axes=axes, constraints=model.constraints).with_pow2(min=4)
    exact = jax.jit(fn)
    problem = ""
    try:
        with _refusals() as refusals:
            for sizes in model.all_sizes():
                args = (*fixed, *model.arguments(sizes))
                problem = _problem(executor, args, exact(*args), model.tolerance)
                if problem:
                    problem = f"at {dict(sizes)}: {problem}"
                    break
        stats = executor.stats()
        if stats.fallback_calls:
            return Outcome("exact", "; ".join(stats.fallback_reasons), problem)
        signatures = executor._engine.signer.signatures()
        if any(p.pairing is not None for one in signatures for _, p in one.programs()):
            return Outcome("paired", "; ".join(refusals), problem)
        return Outcome("masked", "", problem)
    finally:
        # A process has memory maps for some hundred executables.
        executor.cache_clear()
        jax.clear_caches()
        gc.collect()


def _problem(executor: BucketedExec, args: tuple[Any, ...], want: Any, tolerance: float) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            got = executor(*args)
    except Exception as error:
        return "".join(traceback.format_exception(error)).strip()
    return difference(got, want, tolerance)


@contextlib.contextmanager
def _refusals() -> Iterator[dict[str, None]]:
    """Why programs could not be traced with symbolic sizes, while this lasts."""
    seen: dict[str, None] = {}
    trace = traced_programs.trace

    def recorded(*args: Any, **kwargs: Any) -> Any:
        try:
            program = trace(*args, **kwargs)
        except TraceRefused as refused:
            seen[refused.reason] = None
            raise
        seen.update((f"only for {g.left} {g.op} {g.right}", None) for g in program.guards if g.pins)
        return program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced_programs, "trace", recorded)
        yield seen


def difference(got: Any, want: Any, tolerance: float) -> str:
    """What distinguishes two results; empty if nothing does."""
    trees = [jax.tree_util.tree_structure(x) for x in (got, want)]
    if trees[0] != trees[1]:
        return f"tree {trees[0]}, exact {trees[1]}"
    wanted = jax.tree_util.tree_leaves(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), wanted, strict=True):
        for what in ("shape", "dtype", "weak_type"):
            x, y = getattr(a, what, None), getattr(b, what, None)
            if x != y:
                return f"output{jax.tree_util.keystr(path)}: {what} {x}, exact {y}"
        if problem := _values(a, b, tolerance):
            return f"output{jax.tree_util.keystr(path)}: {problem}"
    return ""


def _values(a: Any, b: Any, tolerance: float) -> str:
    if jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    inexact = jnp.issubdtype(b.dtype, jnp.inexact)
    a, b = np.asarray(a), np.asarray(b)
    try:
        if not inexact:
            np.testing.assert_array_equal(a, b)
        else:
            wide = np.complex128 if np.iscomplexobj(b) else np.float64
            a, b = a.astype(wide), b.astype(wide)
            largest = np.max(np.abs(b), initial=0.01, where=np.isfinite(b))
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * largest)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""
