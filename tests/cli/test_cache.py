import dataclasses
import hashlib
import json
import os
import struct
import time
import zlib

import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit._cli.app import main
from bucketjit._persistence import file_format, files


@pytest.fixture
def directory(tmp_path):
    """Two executables; that of the bucket 4 was of use three days ago."""
    executor = BucketedExec(lambda x: x.sum(axis=1)).with_pow2().with_persistence(tmp_path / "d")
    executor(np.ones((3, 2), np.float32))
    [old] = (tmp_path / "d").glob("*.bjx")
    executor(np.ones((5, 2), np.float32))
    os.utime(old, (time.time() - 3 * 86400,) * 2)
    return tmp_path / "d"


@pytest.fixture
def run(capsys):
    def command(*words):
        code = main(["cache", *map(str, words)])
        return code, *capsys.readouterr()

    return command


def buckets(directory):
    return sorted(e.header.sizes["batch"] for e in files.entries(directory) if e.header)


def break_one(directory):
    path = min(directory.glob("*.bjx"), key=lambda p: p.stat().st_mtime)
    times = path.stat().st_mtime
    path.write_bytes(path.read_bytes()[:-1])
    os.utime(path, (times, times))
    return path


def put(directory, at=None, **fields):
    """A file whose header has other fields than that of the latest, and its digest is right."""
    header, raw = file_format.unpack(
        max(directory.glob("*.bjx"), key=lambda p: p.stat().st_mtime).read_bytes()
    )
    told = {**dataclasses.asdict(header), "key": f"{len(fields):064x}", **fields}
    text = json.dumps(told).encode()
    body = struct.pack("<I", len(text)) + text + zlib.compress(raw)
    at = at or f"{'0' * 16}-{told['key']}.bjx"
    files.write(directory / at, file_format.MAGIC + hashlib.sha256(body).digest() + body)
    os.utime(directory / at, (1e9, 1e9))
    return at


ODD = {
    "no version": {"environment": {"bucketjit": "", "jax": " "}},
    "no environment": {"environment": {}},
    "escapes": {"name": "\x1b[2J\ud800\n<b>", "environment": {"jax": "\x1b]0;x\x07"}},
    "long": {
        "name": "n" * 10**6,
        "sizes": {"s" * 10**6: 2**63 - 1},
        "environment": {"jax": "9" * 10**6},
    },
    "an int that no float holds": {"created": 10**400},
    "another": {"seconds": -(10**400)},
    "a size that no array has": {"sizes": {"b": 10**4000}},
    "deep": {"parts": {"program": [[[[[[[[[[0] * 9] * 9]]]]]]]]}},
    "large": {"nbytes": 2**62},
}


@pytest.mark.parametrize("what", ODD)
def test_one_file_hides_no_other(directory, run, what):
    """Whatever is in it."""
    pytest.importorskip("rich")
    name = put(directory, **ODD[what])
    [*_, odd] = files.entries(directory)
    assert odd.path.name == name
    code, out, _ = run("list", directory)
    assert code == 0 and out.startswith("3 executables") and len(out) < 10_000
    assert out.count("<lambda>") >= 2 and "\x1b" not in out and "\ud800" not in out
    code, out, _ = run("list", directory, "--json")
    assert code == 0 and [told["problem"] for told in json.loads(out)][:2] == [None, None]
    code, _, error = run("verify", directory)
    assert code == bool(odd.problem) and error.count("\n") == code and len(error) < 1000
    code, out, _ = run("prune", directory)
    assert code == 0 and f"removed {int(odd.damaged)} of 3 files" in out
    assert (directory / name).exists() is not odd.damaged
    assert odd.damaged is (what not in ("no version", "no environment", "escapes", "long"))
    code, out, _ = run("prune", directory, "--other-versions")
    assert code == 0 and len(out) < 10_000
    assert buckets(directory) == [4, 8]


@pytest.mark.skipif(os.name == "nt", reason="no such names")
def test_names_of_files_command_no_terminal(directory, run):
    pytest.importorskip("rich")
    put(directory, "\x1b[2J\x07.bjx")
    put(directory, "\udcff\n\u202e.bjx")
    (directory / ".writing-\x1b[2J").touch()
    os.utime(directory / ".writing-\x1b[2J", (1, 1))
    names = ["\\x1b[2J\\x07.bjx", "\\udcff \\u202e.bjx", ".writing-\\x1b[2J"]
    shown = [run(*words, directory) for words in (["list"], ["verify"], ["prune", "--dry-run"])]
    assert [code for code, _, _ in shown] == [0, 1, 0]
    for _, out, error in shown:
        assert all(c.isprintable() or c == "\n" for c in out + error)
    assert any(name in shown[1][2] for name in names)
    assert all(f"would remove {name}: " in shown[2][1] for name in names)
    assert len(json.loads(run("list", directory, "--json")[1])) == 4
    assert "removed 3 of 5 files" in run("prune", directory)[1]
    assert buckets(directory) == [4, 8]


def test_list(directory, run):
    pytest.importorskip("rich")
    code, out, error = run("list", directory)
    assert (code, error) == (0, "") and run(directory) == (code, out, error)
    rows = [line.split() for line in out.splitlines()]
    assert rows[0][:2] == ["2", "executables,"]
    assert [r[1] for r in rows if r and r[0] == "<lambda>"] == ["batch=8", "batch=4"]
    assert any("3.0" in r for r in rows)
    total, *sizes = [float(r[i]) for r in rows for i in range(len(r) - 1) if r[i + 1] == "KiB"]
    assert len(sizes) == 2 and sum(sizes) == pytest.approx(total, abs=0.11)


def test_list_as_json(directory, run):
    path = break_one(directory)
    code, out, _ = run("list", directory, "--json")
    good, bad = json.loads(out)
    assert code == 0
    assert (good["function"], good["sizes"], good["problem"]) == ("<lambda>", {"batch": 8}, None)
    assert bad["file"] == path.name and "digest does not match" in bad["problem"]


def test_verify(directory, run):
    pytest.importorskip("rich")
    assert run("verify", directory)[0] == 0
    path = break_one(directory)
    code, _, error = run("verify", directory)
    assert code == 1 and error.count("\n") == 1
    assert path.name in error and "digest does not match" in error
    files.remove(path)
    directory.chmod(0o777)
    code, _, error = run("verify", directory)
    assert code == 1 and "can be written by other users" in error


def test_prune_removes_what_is_damaged(directory, run):
    path = break_one(directory)
    assert run("prune", directory, "--dry-run")[0] == 0
    assert path.exists()
    code, out, _ = run("prune", directory)
    assert code == 0 and f"removed {path.name}" in out and "removed 1 of 2 files" in out
    assert buckets(directory) == [8]


def test_prune_leaves_what_is_not_to_be_trusted(directory, run):
    writable, *_ = sorted(directory.glob("*.bjx"))
    writable.chmod(0o666)
    code, out, _ = run("prune", directory)
    assert code == 0 and writable.exists()
    assert f"left {writable.name}: " in out and "can be written by other users" in out
    _, out, _ = run("prune", directory, "--json")
    assert list(json.loads(out)["problems"]) == [writable.name]
    run("prune", directory, "--max-size", "0")
    assert not writable.exists()


def test_prune_to_more_than_a_float_holds(directory, run):
    code, out, _ = run("prune", directory, "--max-size", "9" * 400)
    assert code == 0 and out.startswith("removed 0 of 2")


def test_prune_by_age(directory, run):
    assert run("prune", directory, "--older-than", 4)[0] == 0
    assert buckets(directory) == [4, 8]
    code, out, _ = run("prune", directory, "--older-than", 2, "--json")
    assert code == 0 and set(json.loads(out)["removed"].values()) == {"of no use for 2 days"}
    assert buckets(directory) == [8]


def test_prune_by_size(directory, run):
    largest = max(p.stat().st_size for p in directory.glob("*.bjx"))
    assert run("prune", directory, "--max-size", f"{largest * 1.5 / 1024}K")[0] == 0
    assert buckets(directory) == [8]


def test_options_may_stand_anywhere(directory, run):
    assert "would remove 2 of 2" in run("prune", "--max-size", "0", "--dry-run", directory)[1]
    assert run("--dry-run", "prune", directory)[0] == 0
    assert len(json.loads(run("list", "--json", directory)[1])) == 2


def test_prune_by_version(directory, run, monkeypatch):
    assert run("prune", directory, "--other-versions")[0] == 0
    assert buckets(directory) == [4, 8]
    from bucketjit._cli import cache

    now = cache.versions()
    monkeypatch.setattr(cache, "versions", lambda: {**now, "jax": "9.9"})
    code, out, _ = run("prune", directory, "--other-versions")
    assert code == 0 and out.count(f"made by jax {now['jax']}") == 2
    assert buckets(directory) == []


def test_prune_takes_away_what_was_left_unfinished(directory, run):
    (directory / ".writing-x").write_bytes(b"")
    os.utime(directory / ".writing-x", (1, 1))
    code, out, _ = run("prune", directory)
    assert code == 0 and "removed .writing-x: unfinished" in out
    assert not (directory / ".writing-x").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["list", "NONE"], 1, "cannot read NONE: No such file or directory"),
        (["list", "NONE", "--dry-run"], 2, "--dry-run is for prune"),
        (["prune", ""], 2, "the directory is an empty text"),
        (["prune", "NONE", "--max-size", "much"], 2, "expected a size such as 500M or 2G"),
        (["prune", "NONE", "--older-than", "-1"], 2, "expected a number of days"),
        (["burn", "NONE"], 2, "invalid choice"),
    ],
)
def test_wrong_options(words, code, message, run, capsys):
    try:
        found, _, error = run(*words)
    except SystemExit as end:
        found, error = end.code, capsys.readouterr().err
    assert found == code and message in error and error.count("\n") == 1
