"""What every test relies on: fallbacks are errors, XLA compiles fast and is counted."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

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
FILTERS = ("error::bucketjit.errors.FallbackWarning",)

ROOT = Path(__file__).parent.parent

MANY = 12  # sets of parameters of one test, beyond which --every leaves some out
WHOLE = ("test_layers.py", "test_docs.py")  # a set of parameters is a file here: none is left out

# What one lane alone runs (ONCE in the Makefile), it runs whole.
ONCE = ("strategies", "cli", "examples", "test_benchmarks.py")

_backend_compiles: list[str] = []


def _part(text: str) -> tuple[int, int]:
    which, parts = map(int, text.split("/"))
    if not 1 <= which <= parts:
        raise ValueError(text)
    return which, parts


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="run every Nth of the masking cases and models, and every (N/4)th set of parameters "
        f"of tests that have more than {MANY}",
    )
    parser.addoption(
        "--part",
        type=_part,
        default=(1, 1),
        metavar="K/N",
        help="run part K of N: of each file every Nth test; a test with its sets of parameters is "
        "one",
    )


def _test_of(item: pytest.Item) -> tuple[Path, str]:
    """The test of an item, without its parameters."""
    return item.path, getattr(item, "originalname", item.name)


def _tests_by_file(items: list[pytest.Item]) -> Iterable[dict[tuple[Path, str], None]]:
    """The tests of each file, in order and once each."""
    found: defaultdict[Path, dict[tuple[Path, str], None]] = defaultdict(dict)
    for item in items:
        found[item.path][_test_of(item)] = None
    return found.values()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every, count = config.getoption("every"), itertools.count()
    sets = Counter(map(_test_of, items))
    seen: defaultdict[Any, Iterator[int]] = defaultdict(itertools.count)

    # Who names tests (-k) wants all of them.
    which, parts = (1, 1) if config.getoption("keyword") else config.getoption("part")
    kept: set[tuple[Path, str]] = set()
    for each in map(list, _tests_by_file(items)):
        # The first test of a file is often the longest: it is in another part for each file.
        first = zlib.crc32(each[0][0].relative_to(ROOT).as_posix().encode()) % parts
        kept.update(each[(first + which - 1) % parts :: parts])

    def is_dropped(item: pytest.Item) -> bool:
        is_parted = set(item.path.relative_to(ROOT).parts).isdisjoint((*WHOLE, *ONCE))
        if is_parted and _test_of(item) not in kept:
            return True
        if item.path.name in ("test_cases.py", "test_models.py"):
            return bool(next(count) % every)
        test = _test_of(item)
        if sets[test] <= MANY or item.path.name in WHOLE:
            return False
        return bool(next(seen[test]) % max(1, every // 4))

    dropped = list(filter(is_dropped, items))
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        left_out = set(dropped)
        items[:] = [i for i in items if i not in left_out]


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
def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if rich were not installed."""
    for module in [m for m in sys.modules if m.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "rich", None)  # type: ignore[arg-type]


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
