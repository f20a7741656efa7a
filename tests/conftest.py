"""What every test relies on: fallbacks are errors, XLA compiles fast and is counted."""

import gc
import os
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version

# Programs of tests run once, so LLVM does not optimise them. Releases that can do without MLIR emit
# fusions in another way, which takes half the time of a test. What XLA itself does to a program
# stays as it is. Read when JAX starts its backend; set it to say otherwise.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
    + " --xla_cpu_use_fusion_emitters=false"
    * version("jaxlib").startswith("0.10."),
)

import jax
import pytest

from tests.isolated import processes

# A call that quietly runs exact would pass every comparison with the exact run. A test that
# expects a fallback says so with `pytest.warns(FallbackWarning)`.
FILTERS = ("error::bucketjit.errors.FallbackWarning",)

_backend_compiles: list[str] = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is ``sampled(n, *ids)``, other parameters than n and these are slow."""
    tests: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for several in tests.values():
        marker = several[0].get_closest_marker("sampled")
        assert marker is not None
        count, *names = marker.args
        kept = {several[i * len(several) // count] for i in range(count)}
        for item in several:
            if item not in kept and item.callspec.id not in names:  # type: ignore[attr-defined]
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    return processes()


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Collections of garbage pass over what was there before the module."""
    gc.collect()
    gc.freeze()


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
