"""What every test relies on: fallbacks are errors, XLA compiles fast and is counted."""

from __future__ import annotations

import gc
import itertools
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

# Nearly all the time of the suite goes into LLVM, for programs that run once. What XLA itself
# does to a program stays as it is. Read when JAX starts its backend; set it to say otherwise.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
)

import jax
import pytest

# A call that quietly runs exact would pass every comparison with the exact run. A test that
# expects a fallback says so with `pytest.warns(FallbackWarning)`.
FILTERS = ("error::bucketjit.FallbackWarning",)

ROOT = Path(__file__).parent.parent

# The core of the suite, which runs on each release of JAX that is promised (`make test-jax`): of
# the tests in these files, or folders, those without parameters, and every fourth set of parameters.
# (Of the masking cases `--every` picks.)
CORE = (
    "persistence",
    "test_cases.py",
    "test_exec.py",
    "test_guards.py",
    "test_paired.py",
    "test_results.py",
    "test_supply.py",
    "test_transformations.py",
    "test_versions.py",
)

_backend_compiles: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="run every Nth of the masking cases and models",
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` picks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every, count = config.getoption("every"), itertools.count()
    dropped = [
        i
        for i in items
        if i.path.name in ("test_cases.py", "test_models.py") and next(count) % every
    ]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        left_out = set(dropped)
        items[:] = [i for i in items if i not in left_out]
    met: Counter[tuple[Path, str]] = Counter()
    for item in items:
        if not set(CORE).isdisjoint(item.path.relative_to(ROOT).parts):
            of = item.path, getattr(item, "originalname", item.name)
            if item.path.name == "test_cases.py" or met[of] % 4 == 0:
                item.add_marker("core")
            met[of] += 1


def pytest_configure(config: pytest.Config) -> None:
    for line in FILTERS:
        config.addinivalue_line("filterwarnings", line)


def _record(event: str, duration: float, **details: object) -> None:
    if "backend_compile" in event:
        _backend_compiles.append(event)


@pytest.fixture(scope="session", autouse=True)
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_record)


@pytest.fixture
def xla_compiles() -> Callable[[], int]:
    """Counts XLA compiles since the test began, whoever caused them."""
    began = len(_backend_compiles)
    return lambda: len(_backend_compiles) - began


@pytest.fixture
def live_executables() -> Callable[[], int]:
    """Counts executables alive in the backend that were not there when the test began.

    Those that were there are held: an earlier test's worker may let go of one at any time.
    """
    client = jax.devices()[0].client
    gc.collect()
    before = client.live_executables()

    def count() -> int:
        gc.collect()
        return len(client.live_executables()) - len(before)

    return count
