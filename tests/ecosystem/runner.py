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
import pytest

import tests.ecosystem.libraries
from bucketjit import BucketedExec
from bucketjit._ir.program import TraceRefused
from bucketjit._tracing import traced_programs
from bucketjit.errors import FallbackWarning
from tests.comparison import assert_close
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
        with warnings.catch_warnings(action="ignore", category=FallbackWarning):
            got = executor(*args)
        assert_close(got, want, tolerance, is_scaled=True)
        # Typed keys have no such attribute.
        weak = [[getattr(x, "weak_type", 0) for x in jax.tree.leaves(t)] for t in (got, want)]
        assert weak[0] == weak[1], f"weak types {weak[0]}, exact {weak[1]}"
    except Exception as error:
        return "".join(traceback.format_exception(error)).strip()
    return ""


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
