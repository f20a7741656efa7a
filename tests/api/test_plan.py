import json

import numpy as np
import pytest

from bucketjit._api.commands import sizes
from bucketjit._api.commands.app import main
from bucketjit._api.commands.command import CommandError
from bucketjit._api.commands.sizes import parse_lengths
from bucketjit.errors import StrategyError
from bucketjit.strategies import Boundaries, Pow2

NAMES = {"Boundaries": Boundaries, "Pow2": Pow2}


@pytest.fixture
def lengths(tmp_path):
    file = tmp_path / "lengths.txt"
    sizes = np.random.default_rng(0).lognormal(4, 0.7, 500).astype(int) + 1
    file.write_text("# a day's requests\n" + "".join(f"{n}\n" for n in sizes))
    return file


@pytest.fixture
def columns(tmp_path):
    file = tmp_path / "lengths.csv"
    rows = [(b, s) for b, s in zip([32, 31, 4, 3] * 5, range(10, 30), strict=True)]
    file.write_text("b, s\n0, 7\n" + "".join(f"{b}, {s}\n" for b, s in rows))
    return file


def as_json(capsys, *words):
    assert main(["plan", *map(str, words), "--json"]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    return json.loads(out)


def test_a_mark_of_the_encoding_is_no_size(lengths, capsys):
    plain = as_json(capsys, lengths)
    lengths.write_text(lengths.read_text(), encoding="utf-8-sig")
    assert as_json(capsys, lengths) == plain


def test_json_tells_the_same_and_the_buckets(lengths, capsys):
    told = as_json(capsys, lengths, "--k", 5)
    assert told["calls"] == 500 and told["k"] == 5
    sizes = parse_lengths(lengths.read_text(), "lengths")["n"]
    assert told["largest"] == {"n": max(sizes)}
    plans = {plan["name"]: plan for plan in told["plans"]}
    for plan in plans.values():
        strategy = eval(plan["strategy"], NAMES)
        assert plan["buckets"] == [{"n": b} for b in sorted({strategy.bucket(n) for n in sizes})]
        assert plan["executables"] == len(plan["buckets"])
        padded = sum(strategy.bucket(n) for n in sizes)
        assert plan["waste"] == pytest.approx((padded - sum(sizes)) / padded, abs=1e-6)
    assert list(plans) == ["pow2", "fitted", "fitted, as pow2"]
    assert plans["fitted"]["executables"] == 5
    assert plans["fitted, as pow2"]["executables"] == plans["pow2"]["executables"]
    assert plans["fitted, as pow2"]["waste"] < plans["pow2"]["waste"]


def test_columns_are_planned_together(columns, capsys):
    told = as_json(capsys, columns, "--k", 3)
    assert told["calls"] == 20, "one with a size 0 does not count"
    plans = {plan["name"]: plan for plan in told["plans"]}
    assert list(plans) == ["pow2", "fitted"]
    assert plans["fitted"]["executables"] == len(plans["fitted"]["buckets"]) <= 3
    assert max(b["s"] for b in plans["fitted"]["buckets"]) == 29
    assert plans["fitted"]["strategy"].startswith("b: Boundaries([")


def test_multiples(lengths, columns, capsys):
    for plan in as_json(capsys, lengths, "--multiple-of", 16)["plans"]:
        assert all(b["n"] % 16 == 0 for b in plan["buckets"])
    for plan in as_json(capsys, columns, "--multiple-of", 4)["plans"]:
        assert all(b["s"] % 4 == 0 and b["b"] % 4 == 0 for b in plan["buckets"])


def test_what_the_library_refuses_is_one_line(tmp_path, capsys):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("999999999999999999\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bucketjit._api.commands.sizes.fit", refuse)
        assert main(["plan", str(lengths)]) == 1
    assert capsys.readouterr().err.endswith("bucketjit plan: StrategyError: no\n")


def refuse(*_, **__):
    raise StrategyError("no")


@pytest.mark.parametrize(
    "text, columns",
    [
        ("3\n\n 4 # four\n", {"n": [3, 4]}),
        ("length\n3\n4", {"length": [3, 4]}),
        ("3,4\n5;6\n7\t8\n", {"dim0": [3, 5, 7], "dim1": [4, 6, 8]}),
        ("# b s\nb s\n3 4\n", {"b": [3], "s": [4]}),
        ("0\n3\n", {"n": [0, 3]}),
    ],
)
def test_files_of_sizes(text, columns):
    assert parse_lengths(text, "f") == columns


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "f holds no sizes; expected one call a line"),
        ("0\n", "f holds no sizes"),
        ("3\n-4\n", "f, line 2: expected a size, got '-4'"),
        ("3\nfour\n", "f, line 2: expected a size, got 'four'"),
        ("3\n\n1_000\n", "f, line 3: expected a size, got '1_000'"),
        ("3 4\n5\n", "f, line 2: expected 2 sizes, got 1"),
        (" ".join(["3"] * 9), "f, line 1: expected one call a line, with a column for each of at"),
        ("b b\n5 5\n", "f, line 1: expected one call a line"),
    ],
)
def test_wrong_files_of_sizes(text, message):
    with pytest.raises(CommandError) as caught:
        parse_lengths(text, "f")
    assert str(caught.value).startswith(message)


# --- bench ---


SMALL = ["bench", "--calls", "6", "--largest", "6"]


def test_json(capsys):
    assert main([*SMALL, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["sizes"]) == 6 and list(told["ways"]) == ["by hand", "jax.jit", "bucketjit"]
    assert all(0 < 1e-6 * way["warm_us"] < way["cold_s"] for way in told["ways"].values())


def test_a_way_that_computes_something_else_is_not_measured(capsys, monkeypatch):
    monkeypatch.setattr(sizes, "_ways", lambda: {"bucketjit": lambda x: sizes._pooled(x)})
    assert main(SMALL) == 0
    out = capsys.readouterr().out
    assert "6 calls of" in out and "warm" in out and "bucketjit" in out
    monkeypatch.setattr(sizes, "_ways", lambda: {"wrong": lambda x: sizes._pooled(x) + 1})
    assert main(SMALL) == 1
    error = capsys.readouterr().err
    assert "wrong computes something else" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "words, code, message",
    [
        (("--calls", "0"), 2, "--calls: expected a positive int, got '0'"),
        (("--largest", "100000"), 1, "--largest must be at most 4,096"),
    ],
)
def test_wrong_options(words, code, message, capsys):
    try:
        assert main(["bench", *words]) == code
    except SystemExit as caught:
        assert caught.code == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
