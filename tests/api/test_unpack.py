import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit._api.commands.app import main
from tests.alone import run_python

pytest.importorskip("flatbuffers", reason="it serializes exported modules")


@pytest.fixture
def run(capsys):
    def command(*words):
        code = main(["unpack", *map(str, words)])
        return code, *capsys.readouterr()

    return command


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "total.bkt"
    executor = BucketedExec(lambda x: x.sum(), dynamic_axes="n").with_pow2()
    executor.save(path, np.ones(3, np.float32), sizes={"n": [4, 8]}, key="secret")
    return path


def test_the_command(saved, tmp_path, run):
    code, out, error = run(saved, tmp_path / "new" / "folder")
    assert (code, error) == (0, "")
    assert out.startswith("wrote 3 files, ") and out.count("\n") == 1
    names = {str(p.relative_to(tmp_path / "new" / "folder")) for p in files(tmp_path / "new")}
    places = {"modules/function/n=4.mlirbc", "modules/function/n=8.mlirbc"}
    assert names == places | {"layout.json"}


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_modules_as_text(saved, tmp_path, run):
    assert run(saved, tmp_path / "u", "--text")[0] == 0
    text = (tmp_path / "u" / "modules" / "function" / "n=4.mlir").read_text()
    assert "func.func public @main(%arg0: tensor<1xi32>, %arg1: tensor<4xf32>)" in text
    assert "loc(" not in text and "?" not in text


def test_a_directory_with_files_is_left_alone(saved, tmp_path, run):
    folder = tmp_path / "u"
    folder.mkdir()
    assert run(saved, folder)[0] == 0  # it is empty
    before = {path: path.read_bytes() for path in files(folder)}
    (folder / "mine").write_text("mine")
    code, out, error = run(saved, folder)
    assert code == 1 and out == "" and error.count("\n") == 1 and "is not empty" in error
    (folder / "layout.json").write_text("old")
    assert run(saved, folder, "--force")[0] == 0
    assert {p: p.read_bytes() for p in files(folder)} == {**before, folder / "mine": b"mine"}
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_an_altered_module_is_not_unpacked(saved, tmp_path, run):
    raw = bytearray(saved.read_bytes())
    raw[len(raw) // 2] ^= 1
    saved.write_bytes(raw)
    code, out, error = run(saved, tmp_path / "u")
    assert code == 1 and out == "" and error.count("\n") == 1
    assert "ArtifactError" in error and not (tmp_path / "u").exists()


def test_a_key_is_checked(saved, tmp_path, run):
    (tmp_path / "key").write_text("secret\n")
    assert run(saved, tmp_path / "u", "--key-file", tmp_path / "key")[0] == 0
    (tmp_path / "key").write_text("another")
    code, _, error = run(saved, tmp_path / "v", "--key-file", tmp_path / "key")
    assert code == 1 and "signature.sig" in error and not (tmp_path / "v").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["NONE", "DIR"], 1, "cannot open NONE: No such file or directory"),
        (["FILE", ""], 2, "DIR: expected a name"),
        (["FILE"], 2, "required: DIR"),
        (["FILE", "FILE"], 1, "is no directory"),
        (["FILE", "DIR", "--platform", "abacus"], 1, "has modules for cpu, not for 'abacus'"),
    ],
)
def test_wrong_options(words, code, message, saved, tmp_path, run, capsys):
    given = {"FILE": saved, "DIR": tmp_path / "u"}
    try:
        found, _, error = run(*(given.get(word, word) for word in words))
    except SystemExit as end:
        found, error = end.code, capsys.readouterr().err
    assert found == code and message in error and error.count("\n") == 1
    assert not (tmp_path / "u").exists()


def test_no_device_is_needed(saved, tmp_path):
    words = "-m", "bucketjit", "unpack", str(saved), str(tmp_path / "u")
    done = run_python(*words, JAX_PLATFORMS="abacus")  # looking for a device would fail
    assert (done.returncode, done.stderr) == (0, "")
