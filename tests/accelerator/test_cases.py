"""All that is masked compiles for TPUs and GPUs, and so do modules with bounds.

``make accelerator-compilers`` runs it, in the environment that has their compilers. With
``ARGS=--sample`` the slow cases are left out.
"""

import json
import multiprocessing
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compilers

if not compilers.VARIABLES.items() <= os.environ.items():
    pytest.skip("make accelerator-compilers runs it", allow_module_level=True)

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.backend import get_compile_options
from jax.sharding import SingleDeviceSharding

import bucketjit
from bucketjit._ir.expressions import evaluate_text
from bucketjit._jax import stablehlo
from bucketjit._jax.serialization import device_list
from tests.harness import Arg, Case
from tests.test_cases import CASES, QUICK

RESULTS = Path(compilers.ROOT, "benchmarks", "results", "cases.json")
outcomes: dict[str, dict[str, str]] = {target: {} for target in compilers.TARGETS}


def placed(arg: Arg, sizes: Any, target: str) -> Any:
    shape = tuple(evaluate_text(text, sizes) for text in arg.sizes)
    dtype = jax.random.key(0).dtype if arg.dtype == "key" else jnp.dtype(arg.dtype)
    sharding = SingleDeviceSharding(compilers.device(target))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def outcome(name: str, target: str, is_plain: bool = False) -> str:
    """What becomes of a case in its bucket, or of its plain program at these sizes."""
    (case,) = (case for case in CASES if case.name == name)
    args = [placed(arg, case.bucket, target) for arg in case.arguments]
    executor = bucketjit.jit(
        case.fn,
        dynamic_axes=tuple(arg.shape or None for arg in case.arguments),
        buckets={v: [n] for v, n in case.bucket.items()},
        constraints=case.constraints,
    )
    try:
        with warnings.catch_warnings(action="ignore"):
            lowered: Any = (jax.jit(case.fn) if is_plain else executor).lower(*args)
        lowered.compile()
    except Exception:
        return "not compiled"
    return "exact" if getattr(lowered, "exact", True) else "masked"


class Apart:
    """A process that compiles, as compilers may end the one that they run in."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def outcome(self, *asked: Any) -> str:
        context = multiprocessing.get_context("spawn")
        self._pool = self._pool or ProcessPoolExecutor(1, mp_context=context)
        try:
            return self._pool.submit(outcome, *asked).result()
        except BrokenProcessPool:
            self._pool = None
            return "not compiled"


apart = Apart()


@pytest.fixture(scope="module", autouse=True)
def written() -> Iterator[None]:
    """What the compilers took, for the page of coverage; written by a run of all cases."""
    yield
    if all(len(names) == len(CASES) for names in outcomes.values()):
        kept = {
            target: {
                "cases": Counter(names.values()),
                "primitives": sorted(
                    {p for case in CASES if names[case.name] == "masked" for p in case.covers}
                ),
            }
            for target, names in outcomes.items()
        }
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


@pytest.mark.parametrize("target", compilers.TARGETS)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case in QUICK[::2] else pytest.mark.slow)
        for case in CASES
    ],
)
def test_case_compiles(case: Case, target: str) -> None:
    became = apart.outcome(case.name, target)
    outcomes[target][case.name] = became
    if became == "not compiled" and not case.eager:  # jit cannot trace what computes sizes
        assert apart.outcome(case.name, target, True) == became


def attention(x: Any) -> Any:
    return jax.nn.softmax(x @ jnp.swapaxes(x, 1, 2)) @ x


PROGRAMS: dict[str, tuple[Any, Any, Any]] = {
    "sorts": (lambda x, y: (jnp.sort(x, 0), x @ y.T), ("a, _", "b, _"), ((10, 4), (5, 4))),
    "loop": (lambda x: jax.lax.scan(lambda c, r: (c + r, c * r), x[0], x), "b, _", ((5, 4),)),
    "gradient": (
        lambda w, x: jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w),
        *((None, "b, _"), ((4, 4), (5, 4))),
    ),
    "attention": (attention, "b, s, _", ((5, 6, 4),)),
    "its gradient": (jax.grad(lambda x: attention(x).sum()), "b, s, _", ((5, 6, 4),)),
    "reverse": (lambda x: jnp.cumsum(x, 0)[::-1], "b, _", ((5, 4),)),
    "joined": (lambda x, y: jnp.concatenate([x, y]), ("a, _", "b, _"), ((3, 4), (5, 4))),
}


@pytest.mark.parametrize("target", compilers.TARGETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_modules_with_bounds_compile(name: str, target: str) -> None:
    fn, axes, shapes = PROGRAMS[name]
    arrays = [np.ones(shape, np.float32) for shape in shapes]
    raw = bucketjit.jit(fn, dynamic_axes=axes, buckets=[16]).export_bounded(*arrays)
    device = compilers.device(target)
    executable = device.client.compile(
        stablehlo.read_module(raw),
        executable_devices=device_list((device,)),
        compile_options=get_compile_options(1, 1),
    )
    entry, *_ = (text := executable.hlo_modules()[0].to_string()).splitlines()
    assert "<=16" in entry and "PadToStatic" in text
