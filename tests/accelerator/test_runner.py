"""The command of `make accelerator`: what it prints, keeps, and leaves out."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import accelerator, table
from tests.accelerator import __main__ as runner
from tests.accelerator import checks, core
from tests.accelerator.on_device import NotShown
from tests.alone import run_python


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that the command sets are those of its process; here other tests follow."""
    for name in runner.VARIABLES:
        monkeypatch.setenv(name, os.environ.get(name, "") or runner.VARIABLES[name])


def fails() -> str:
    raise ValueError("1 is not\n\n2")


def shows_nothing() -> str:
    raise NotShown("there is no such memory")


SOME = {
    "one": lambda: "as it is",
    "two": fails,
    "three": shows_nothing,
    "core: four": lambda: "of a family",
}


def test_a_line_for_each_check(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(checks, "CHECKS", SOME)
    assert runner.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["passed", "failed", "skipped", "passed"]
    assert lines[2].endswith("two: ValueError: 1 is not / 2")
    assert lines[3].endswith("three: there is no such memory")
    assert lines[5] == "There is only a CPU: nothing is measured, and nothing is written."
    assert lines[6].startswith("failed: two; ")
    monkeypatch.setattr(runner, "CORE_UNTIL", 0)
    assert runner.main(["-k", "o"]) == 1
    assert "core: four: no time left" in capsys.readouterr().out
    assert runner.main(["-k", "one"]) == 0


def test_what_is_measured_is_kept_where_one_asks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost() -> Any:
        raise RuntimeError("the device is lost")

    rows = [{"group": "a", "way": "ours", "us": 2.0, "ratio": 1.0}]
    before = table.PAGE.read_text()
    monkeypatch.setattr(checks, "CHECKS", {"one": SOME["one"]})
    monkeypatch.setattr(accelerator, "parts", lambda: (("a", lambda: rows), ("b", lost)))
    assert runner.main(["--any-device", "--results", str(tmp_path)]) == 1
    kept = json.loads((tmp_path / "accelerator.json").read_text())
    assert kept["command"] == "make accelerator" and "cpu" in kept["environment"]["device"]
    assert [row["way"] for row in kept["rows"]] == ["one", "ours", "failed"]
    assert kept["rows"][2]["note"] == "RuntimeError: the device is lost"
    monkeypatch.setattr(runner, "BENCHMARKS_UNTIL", 0)
    assert runner.main(["--any-device"]) == 0
    assert "no time left" in capsys.readouterr().out
    assert not (table.RESULTS / "accelerator.json").exists()
    assert table.PAGE.read_text() == before
    monkeypatch.setattr(table, "SECTIONS", accelerator.SECTIONS)
    assert "`make accelerator`, 20" in table.page(tmp_path)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(runner, "NEEDED", ("jax", "no_such_package"))
    assert runner.main([]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"no_such_package: not importable by {sys.executable}")
    assert "PYTHONPATH=FOLDER make accelerator" in told


def test_the_time_is_over() -> None:
    done = run_python("-m", "tests.accelerator", "--seconds", "0.1")
    assert done.returncode == 1
    assert "failed: no end within 0 s, at work: " in done.stderr


def test_make_bench_leaves_it_to_make_accelerator() -> None:
    with pytest.raises(RuntimeError, match="accelerator skipped: `make accelerator` measures it"):
        accelerator.SECTION.run(accelerator.Options())


def test_ways_are_measured() -> None:
    rows = [*accelerator.of_dispatch(2), *accelerator.of_masks(3, quick=True)]
    assert len({row["group"] for row in rows}) == 4
    assert all(row["us"] > 0 and row["ratio"] > 0 for row in rows)


def test_cases_are_of_all_families() -> None:
    names = [name for name, _ in core.families()]
    assert set(core.DIFFERENTIATED) <= set(names) and len(names) > 20
    assert all(core.differentiated(name).grad for name in core.DIFFERENTIATED)
