import json
import re

import pytest

from bucketjit._cli import bench
from bucketjit._cli.app import main

SMALL = ["bench", "--calls", "6", "--largest", "6"]


def test_json(capsys):
    assert main([*SMALL, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["calls"] == 6 and told["versions"].keys() == {"bucketjit", "jax", "python"}
    compiles = {way["way"]: way["compiles"] for way in told["ways"]}
    assert list(compiles) == ["by hand", "jax.jit", "bucketjit"]
    assert compiles["jax.jit"] == told["different_sizes"]
    assert compiles["by hand"] == compiles["bucketjit"] <= compiles["jax.jit"]
    for way in told["ways"]:
        assert way["cold_seconds"] > 0 and 0 < way["median_us"] <= way["p99_us"]


def test_table_and_sentence(capsys, monkeypatch):
    monkeypatch.setattr(bench, "_WAYS", {"by hand": bench._by_hand, "bucketjit": bench._bucketed})
    assert main(SMALL) == 0
    out, err = capsys.readouterr()
    assert "6 calls of" in out and "warm median" in out and "by hand" in out
    *_, empty, sentence = out.splitlines()
    assert empty == "" and re.fullmatch(
        r"On this machine bucketjit served 6 ragged calls of \d sizes in \d+\.\d s, "
        r"padding and masks written by hand in \d+\.\d s; compiles are included\.",
        sentence,
    )
    assert [line.partition(", ")[0] for line in err.splitlines()] == [
        "by hand: 6 of 6 calls",
        "bucketjit: 6 of 6 calls",
    ]


def test_progress_before_the_end(capsys, monkeypatch):
    monkeypatch.setattr(bench, "_SILENCE", 0.0)
    monkeypatch.setattr(bench, "_WAYS", {"by hand": bench._by_hand})
    assert main(SMALL) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in lines] == ["1", "2", "3", "4", "5", "6"]
    assert re.fullmatch(r"by hand: 1 of 6 calls, 1 compile, \d+\.\d s", lines[0])


def test_a_way_that_computes_something_else_is_not_measured(capsys, monkeypatch):
    wrong = (lambda x: bench._pooled(x) + 1, lambda: 1)
    monkeypatch.setattr(bench, "_WAYS", {"wrong": lambda: wrong})
    assert main(SMALL) == 1
    error = capsys.readouterr().err
    assert "wrong computes something else" in error and error.count("\n") == 1


def test_wrong_options(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", "--calls", "0"])
    assert caught.value.code == 2
    assert "--calls: expected a positive int, got '0'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        (("--largest", 100_000), "--largest must be at most 16,384"),
        (
            ("--largest", 16_384, "--calls", 5_000),
            "times --largest must be at most 16,777,216",
        ),
    ],
)
def test_more_than_memory_holds_is_refused(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", *map(str, words)])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
