import json
import sys

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


def test_table(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(bench, "_WAYS", {"by hand": bench._by_hand})
    assert main(SMALL) == 0
    out = capsys.readouterr().out
    assert "6 calls of" in out and "warm median" in out and "by hand" in out


def test_nothing_is_measured_for_a_table_that_cannot_be_printed(capsys, monkeypatch):
    for module in [m for m in sys.modules if m.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(bench, "_measure", lambda *args: pytest.fail("it was measured"))
    assert main(SMALL) == 1
    assert "tables need rich" in capsys.readouterr().err


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
