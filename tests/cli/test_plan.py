import itertools
import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketjit._cli.app import main
from bucketjit._cli.command import CommandError
from bucketjit._cli.comparison import _shares, compare, compare_joint
from bucketjit._cli.lengths import parse_lengths
from bucketjit.errors import StrategyError
from bucketjit.strategies import (
    Boundaries,
    BoundedWaste,
    Exponential,
    Joint,
    Linear,
    Optimal,
    Pow2,
    SizeClasses,
)

NAMES = {
    c.__name__: c
    for c in (Boundaries, BoundedWaste, Exponential, Joint, Linear, Optimal, Pow2, SizeClasses)
}


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


def test_table(lengths, capsys):
    pytest.importorskip("rich")
    assert main(["plan", str(lengths), "--k", "5"]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    assert "500 calls of" in out and "at most 5 executables" in out
    for word in ("pow2", "ladder", "linear", "exponential", "bounded waste", "optimal", "waste"):
        assert word in out
    assert "Optimal([" in out and "%" in out


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
    assert plans["optimal"]["executables"] == 5
    assert plans["optimal, as pow2"]["executables"] == plans["pow2"]["executables"]
    for name in ("linear", "exponential", "bounded waste"):
        assert plans[name]["executables"] <= 5
        assert plans["optimal"]["waste"] <= plans[name]["waste"]


def test_columns_are_planned_together(columns, capsys):
    told = as_json(capsys, columns, "--k", 3)
    assert told["calls"] == 20, "one with a size 0 does not count"
    plans = {plan["name"]: plan for plan in told["plans"]}
    ladders = ["linear", "exponential"]
    assert list(plans) == ["pow2", "ladder", *ladders, "optimal grid", "joint"]
    for name in (*ladders, "optimal grid", "joint"):
        assert plans[name]["executables"] == len(plans[name]["buckets"]) <= 3
        assert set(plans[name]["buckets"][0]) == {"b", "s"}
    joint = eval(plans["joint"]["strategy"], NAMES)
    assert joint.bucket_of({"b": 32, "s": 29}) == {"b": 32, "s": 29}


def test_multiples(lengths, columns, capsys):
    for plan in as_json(capsys, lengths, "--multiple-of", 16)["plans"]:
        assert all(b["n"] % 16 == 0 for b in plan["buckets"])
    multiples = ("--multiple-of", "s=8", "--multiple-of", 2)
    for plan in as_json(capsys, columns, *multiples)["plans"]:
        assert all(b["s"] % 8 == 0 and b["b"] % 2 == 0 for b in plan["buckets"])
    with pytest.raises(SystemExit) as caught:
        main(["plan", str(columns), "--multiple-of", "t=8"])
    assert caught.value.code == 2
    assert "--multiple-of: no variable 't', there are b, s" in capsys.readouterr().err


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=30), st.integers(1, 12))
def test_ladders_keep_to_k(sizes, k):
    for plan in compare(sizes, k, 1):
        if plan.name not in ("pow2", "ladder", "optimal, as pow2"):
            assert plan.assessment.executables <= k, plan


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 9)), min_size=1, max_size=20),
    st.integers(1, 12),
)
def test_ladders_of_several_variables_keep_to_k(calls, k):
    sizes = dict(zip("ab", map(list, zip(*calls, strict=True)), strict=True))
    plans = {plan.name: plan for plan in compare_joint(sizes, k, dict.fromkeys("ab", 1))}
    for name in ("linear", "exponential", "bounded waste"):
        if name == "bounded waste" and name not in plans:
            continue  # no percentage of waste has so few rungs
        assert plans[name].assessment.executables <= k, plans[name]
        assert plans[name].strategy.keys() == sizes.keys()


@pytest.mark.parametrize(
    "sizes",
    ["1\n105726923776836102\n", "103203074396900982 968427680044961202\n1 999999999999999999"],
)
def test_a_ladder_beyond_what_a_shape_can_hold_is_left_out(sizes, tmp_path, capsys):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text(sizes)
    names = [plan["name"] for plan in as_json(capsys, lengths)["plans"]]
    assert names[0] == "pow2" and "bounded waste" not in names
    assert {"optimal", "optimal grid"} & set(names)


def test_what_the_library_refuses_is_one_line(tmp_path, capsys):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("999999999999999999\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bucketjit._cli.plan.compare", refuse)
        assert main(["plan", str(lengths)]) == 1
    assert capsys.readouterr().err.endswith("bucketjit plan: StrategyError: no\n")


def refuse(*_):
    raise StrategyError("no")


def test_the_shares_of_variables():
    for k, count in ((1, 3), (6, 2), (12, 2), (7, 3)):
        every = [c for c in itertools.product(range(1, k + 1), repeat=count) if np.prod(c) <= k]
        largest = [
            c
            for c in every
            if not any((*c[:i], c[i] + 1, *c[i + 1 :]) in every for i in range(count))
        ]
        assert sorted(_shares(k, count)) == largest


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot(lengths, columns, tmp_path, capsys, ending):
    pytest.importorskip("matplotlib")
    for file in (lengths, columns):
        drawing = tmp_path / f"{file.stem}.{ending}"
        as_json(capsys, file, "--plot", drawing, "--k", 3)
        assert drawing.read_bytes().startswith(b"\x89PNG" if ending == "png" else b"<?xml")


def test_a_plot_that_cannot_be_written(lengths, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for path in (tmp_path / "none" / "plot.png", tmp_path / "plot.what"):
        assert main(["plan", str(lengths), "--plot", str(path)]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"python -m bucketjit plan: cannot draw {path}: ")
        assert error.count("\n") == 1


def test_what_is_not_installed_is_named(lengths, capsys, monkeypatch):
    for module in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plan", str(lengths), "--plot", "x.png", "--json"]) == 1
    assert "plots need matplotlib; install it with" in capsys.readouterr().err


def test_json_needs_nothing_more(lengths, capsys, monkeypatch):
    for package in ("rich", "matplotlib"):
        monkeypatch.setitem(sys.modules, package, None)
    as_json(capsys, lengths)


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
        ("b, s\n", "f holds no sizes"),
        ("0\n", "f holds no sizes"),
        ("3\n-4\n", "f, line 2: expected a size, got '-4'"),
        ("3\n4.5\n", "f, line 2: expected a size, got '4.5'"),
        ("3\nfour\n", "f, line 2: expected a size, got 'four'"),
        ("3\n\n1_000\n", "f, line 3: expected a size, got '1_000'"),
        ("3\n99999999999999999999\n", "f, line 2: expected a size"),
        ("3 4\n5\n", "f, line 2: expected 2 sizes, got 1"),
        (" ".join(["3"] * 9), "f, line 1: expected one call a line, with a column for each of at"),
        ("b b\n5 5\n", "f, line 1: each column needs a name of its own"),
    ],
)
def test_wrong_files_of_sizes(text, message):
    with pytest.raises(CommandError) as caught:
        parse_lengths(text, "f")
    assert str(caught.value).startswith(message)
