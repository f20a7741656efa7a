"""The command ``refine``: exit codes, text and bytes, one line for each error."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import bucketjit
from bucketjit import BucketedExec
from bucketjit._api.commands.app import main
from tests.stages.modules import main_line

ROOT = Path(bucketjit.__file__).parents[1]


@pytest.fixture(scope="module")
def blob():
    executor = BucketedExec(lambda x: x.sum(0), dynamic_axes="b, s", constraints=["b >= 2"])
    struct = jax.ShapeDtypeStruct((3, 8), jnp.float32)
    return bytes(executor.export_dynamic(struct, platforms=["cpu", "cuda"]).serialize())


@pytest.fixture
def file(blob, tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(blob)
    return path


def run(*words):
    return main(["refine", *map(str, words)])


def test_it_writes_a_file(file, blob, tmp_path, capsys):
    out = tmp_path / "fixed.mlirbc"
    assert run(file, "--sizes", "b=16", "s=4", "--platform", "cpu", "-o", out) == 0
    assert out.read_bytes() == bucketjit.refine(blob, {"b": 16, "s": 4}, platform="cpu")
    assert capsys.readouterr() == ("", "")
    # A portable artifact takes the types of its arguments, and stays as it is.
    again = tmp_path / "again.mlirbc"
    assert run(out, "--sizes", "16x4xf32", "--output", again, "--check") == 0
    assert again.read_bytes() == out.read_bytes()


def test_it_writes_text(file, capsys, tmp_path):
    assert run(file, "--text", "--sizes", "b=16", "s=4") == 0
    out, error = capsys.readouterr()
    assert "tensor<16x4xf32>" in out and "?" not in out and out.endswith("}\n") and error == ""
    assert run(file, "--text", "--sizes", "b=16", "s=4", "-o", tmp_path / "text") == 0
    assert (tmp_path / "text").read_text() == out


@pytest.mark.parametrize("output", [[], ["-o", "-"]], ids=["", "-o -"])
def test_bytes_through_pipes(blob, output):
    done = subprocess.run(
        [sys.executable, "-m", "bucketjit", "refine", "-", "--sizes", "b=16", "s=4", *output],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=blob,
        capture_output=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert "tensor<16x4xf32>" in main_line(done.stdout)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sizes", "b=16"], "ExportError: sizes: the size of variable 's' is missing"),
        (["--sizes", "b=16", "s=4", "t=1"], "no variable 't'"),
        (["--sizes", "b=0", "s=4"], "sizes: b: expected a size from 1"),
        (["--sizes", "b=1", "s=4"], "constraint b >= 2"),
        (["--sizes", "3x4"], "expected a dict"),
        (["--sizes", "b=2", "s=4", "--platform", "tpu"], "the module is for cpu, cuda"),
        (["--sizes", "b=2", "s=4", "-o", "/no/such/folder/x"], "cannot open /no/such/folder/x"),
    ],
)
def test_what_fails(file, words, message, capsys):
    assert run(file, "--text", *words) == 1
    out, error = capsys.readouterr()
    assert out == "" and message in error and error.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["--sizes", "b=16", "s=4", "model.bin"]], ids=str)
def test_no_file(words, capsys):
    with pytest.raises(SystemExit) as exit:
        run(*words)
    assert exit.value.code == 2
    assert "name FILE, before --sizes" in capsys.readouterr().err


def test_bytes_are_not_written_to_a_terminal(file, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with pytest.raises(SystemExit) as caught:
        run(file, "--sizes", "b=2", "s=4")
    assert caught.value.code == 2
    assert "name a file with -o, or ask for --text" in capsys.readouterr().err


def test_files_that_cannot_be_read(tmp_path, capsys):
    assert run(tmp_path / "none", "--text") == 1
    assert "cannot open" in capsys.readouterr().err
    (tmp_path / "foreign").write_text("hello")
    assert run(tmp_path / "foreign", "--text") == 1
    assert "expected the bytes of jax.export" in capsys.readouterr().err
