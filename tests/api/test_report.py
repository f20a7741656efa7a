import io
import json
import sys

import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit._api.commands.app import main


@pytest.fixture(scope="module")
def stats():
    """A snapshot of a real executor, through JSON."""
    executor = BucketedExec(lambda x: x.sum(axis=1)).with_pow2()
    for n in (3, 5, 7):
        executor(np.ones((n, 2), np.float32))
    return json.loads(executor.stats().to_json())


def report(stats, tmp_path, capsys):
    file = tmp_path / "stats.json"
    file.write_text(json.dumps(stats))
    code = main(["report", str(file)])
    return code, *capsys.readouterr()


def piped(stats):
    return io.TextIOWrapper(io.BytesIO(json.dumps(stats).encode()))


def rows(out):
    return [line.split() for line in out.splitlines()]


def test_tells_a_terminal_nothing(stats, tmp_path, capsys):
    stats = json.loads(json.dumps(stats))
    stats["programs"][0]["inputs"] = ["\x1b[31mred\x1b]0;title\x07", "next"]
    code, out, _ = report(stats, tmp_path, capsys)
    assert code == 0
    assert "\\x1b[31mred" in out
    assert all(c.isprintable() or c == "\n" for c in out)


def test_shows_every_field_of_the_snapshot(stats, tmp_path, capsys):
    _, out, _ = report(stats, tmp_path, capsys)
    records = {*stats["buckets"][0], *stats["programs"][0]}
    empty = {"fallback_reasons", "memory", "computed", "rows_alone", "learnt"}
    called_otherwise = {"sizes", "buckets", "programs", "nbytes", "inlined_calls"}
    for name in {*stats, *records} - empty - called_otherwise:
        assert name.replace("_", " ") in out, name
    assert "\nExecutables\n" in out and "\nPrograms\n" in out
    assert ["calls", "3"] in rows(out) and ["padding", "waste", "25.0%"] in rows(out)
    assert [r[:2] for r in rows(out) if r and r[-1] == "no"] == [["4", "0"], ["8", "1"]]


@pytest.mark.parametrize("words", [["-"], []])
def test_from_standard_input(words, stats, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", piped(stats))
    assert main(["report", *words]) == 0
    assert "calls" in capsys.readouterr().out


def test_as_json(stats, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", piped(stats))
    assert main(["report", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == stats


def test_a_field_of_another_version(stats, tmp_path, capsys):
    code, out, _ = report({**stats, "regions": {"a": {"seconds": 1.5}}}, tmp_path, capsys)
    assert code == 0 and "Regions" in out and '{"seconds": 1.5}' in out
    assert report({**stats, "programs": [{}]}, tmp_path, capsys)[0] == 0


@pytest.mark.parametrize("columns", [60, 30])
def test_a_narrow_terminal_loses_nothing(columns, stats, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = report(stats, tmp_path, capsys)[1]
    assert "…" not in shown
    monkeypatch.setenv("COLUMNS", str(max(columns, 40)))
    assert shown == report(stats, tmp_path, capsys)[1]


@pytest.mark.parametrize("text", ["", "{", "NaN calls", "[" * 100_000])
def test_what_is_no_json(text, tmp_path, capsys):
    file = tmp_path / "stats.json"
    file.write_text(text)
    assert main(["report", str(file)]) == 1
    error = capsys.readouterr().err
    assert f"{file} is not JSON" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "wrong",
    [3, [], {}, {"calls": 3}, {"calls": 3, "buckets": 3}, {"calls": 3, "buckets": [{"hits": 1}]}],
    ids=str,
)
def test_what_is_no_snapshot(wrong, tmp_path, capsys):
    code, out, error = report(wrong, tmp_path, capsys)
    assert (code, out) == (1, "")
    assert "is no snapshot of counters: expected an object with 'calls'" in error
    assert error.count("\n") == 1
