import json

import pytest

from bucketjit._api.commands import sizes
from bucketjit._api.commands.app import main

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
