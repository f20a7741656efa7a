import json
import os
import subprocess
import sys

import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit._cli.app import main

pytest.importorskip("flatbuffers", reason="it serializes exported modules")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a file."""
    weights = np.ones((8, 4), np.float32)

    def scores(x, flip, k):
        y = (x @ weights).mean(axis=0)
        return y[::-1] * k if flip else y * k

    executor = BucketedExec(
        scores, dynamic_axes=("n, _", None), static_argnames="flip", donate_argnums=0
    )
    path = tmp_path_factory.mktemp("saved") / "scores.bkt"
    executor.with_pow2().save(
        path, np.ones((3, 8), np.float32), True, 2, sizes={"n": [4, 8]}, derivatives=1, key="k"
    )
    return path.read_bytes()


@pytest.fixture
def file(whole, tmp_path):
    path = tmp_path / "scores.bkt"
    path.write_bytes(whole)
    return path


@pytest.fixture
def run(capsys):
    def command(*words):
        code = main(["inspect", *map(str, words)])
        return code, *capsys.readouterr()

    return command


def rows(out):
    return [line.split() for line in out.splitlines()]


@pytest.mark.parametrize("has_rich", [True, False])
def test_tables(file, run, has_rich, request):
    pytest.importorskip("rich")
    if not has_rich:
        request.getfixturevalue("without_rich")
    code, out, error = run(file)
    assert (code, error) == (0, "")
    found = rows(out)
    assert ["function", "scores"] in found
    assert ["x", "float32[n,", "8]"] in found
    assert ["constants", "1", "array,", "128", "B"] in found
    assert ["static", "arguments", "flip=True"] in found
    assert ["derivatives", "up", "to", "order", "1"] in found
    assert ["signature", "not", "checked"] in found
    assert [r[0] for r in found if r and r[0].startswith("n=")] == ["n=4", "n=8"] * 2
    assert "Arguments of derivative 1" in out


def test_json(file, run):
    code, out, _ = run(file, "--json")
    told = json.loads(out)
    assert code == 0
    assert told["bytes"] == file.stat().st_size and told["format"] == 2
    assert told["platforms"] == ["cpu"] and set(told["versions"]) >= {"bucketjit", "jax"}
    assert told["constants"] == {"count": 1, "bytes": 128} and told["derivatives"] == 1
    function = told["functions"][0]
    assert function["arguments"][0] == {"name": "x", "type": "float32[n, 8]"}
    assert function["results"] == ["float32[4]"]
    assert function["statics"] == {"flip": "True"} and function["donated"] == ["x"]
    [program] = function["programs"]
    assert program["variables"] == ["n"] and program["dynamic_bytes"] is None
    assert [b["sizes"] for b in program["buckets"]] == [{"n": 4}, {"n": 8}]
    assert all(b["bytes"] > 0 and b["executables"] == 0 for b in program["buckets"])
    assert program["computed_sizes"] == []


def test_sizes_that_are_computed(tmp_path, run):
    def largest(x):
        return x[x > 0].max()

    path = tmp_path / "largest.bkt"
    BucketedExec(largest, dynamic_axes="n").with_pow2().save(path, np.ones(4, np.float32))
    [program] = json.loads(run(path, "--json")[1])["functions"][0]["programs"]
    [size] = program["computed_sizes"]
    assert (size["size"], size["bound"]) == ("size_1 - 1", "n") and "largest)" in size["line"]
    assert program["guards"] == ["size_1 - 1 >= 1"]
    assert "Computed sizes" in run(path)[1]


def test_a_signature_is_checked(file, tmp_path, run):
    (tmp_path / "key").write_bytes(b"k\n")
    code, out, _ = run(file, "--json", "--key-file", tmp_path / "key")
    assert code == 0 and json.loads(out)["signature"] == "of this key"
    (tmp_path / "key").write_bytes(b"l")
    code, out, error = run(file, "--json", "--key-file", tmp_path / "key")
    assert code == 1 and out == "" and "signature.sig is not of this key" in error


@pytest.mark.parametrize("at", [0.0, 0.2, 0.5, 0.8, 0.999])
def test_a_damaged_file(file, run, at):
    raw = bytearray(file.read_bytes())
    raw[int(len(raw) * at)] ^= 0xFF
    file.write_bytes(raw)
    code, out, error = run(file, "--json")
    if (code, error) == (0, ""):  # this byte is in a part that says nothing, such as a date
        assert json.loads(out)["functions"]
        return
    assert code == 1 and out == "" and error.count("\n") == 1
    assert "ArtifactError" in error and str(file) in error


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"not a file of this kind" * 100])
def test_another_file(file, run, content):
    file.write_bytes(content)
    code, out, error = run(file, "--json")
    assert code == 1 and out == "" and error.count("\n") == 1 and "no .bkt file" in error


def test_half_a_file(file, run):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    code, _, error = run(file)
    assert code == 1 and error.count("\n") == 1 and "truncated" in error


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["NONE"], 1, "cannot read NONE: No such file or directory"),
        ([""], 2, "the name of the file is empty"),
        ([], 2, "required: FILE"),
        (["."], 1, "path is a directory; name a file in it"),
    ],
)
def test_wrong_options(words, code, message, run, capsys):
    try:
        found, _, error = run(*words)
    except SystemExit as end:
        found, error = end.code, capsys.readouterr().err
    assert found == code and message in error and error.count("\n") == 1


def test_no_device_is_needed(file):
    command = [sys.executable, "-m", "bucketjit", "inspect", str(file), "--json"]
    env = {**os.environ, "JAX_PLATFORMS": "abacus"}  # looking for a device would fail
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and json.loads(done.stdout)
