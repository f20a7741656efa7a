import os
import time

import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit._api.commands.app import main
from bucketjit._compile.files import directory as files
from bucketjit._compile.files import record
from bucketjit._compile.files.record import Record


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
    found = [e.record for e in files.entries(directory)]
    return sorted(x.sizes["batch"] for x in found if isinstance(x, Record))


def break_one(directory):
    path = min(directory.glob("*.bjx"), key=lambda p: p.stat().st_mtime)
    times = path.stat().st_mtime
    path.write_bytes(path.read_bytes()[:-1])
    os.utime(path, (times, times))
    return path


@pytest.mark.parametrize(
    "odd",
    [
        {"environment": {}},
        {"environment": {"bucketjit": "", "jax": "\x1b]0;x\x07"}, "name": "\x1b[2J\ud800\n<b>"},
        {"name": "n" * 10**6, "sizes": {"s" * 10**6: 2**63 - 1}},
    ],
)
def test_one_file_hides_no_other_and_commands_no_terminal(directory, run, odd):
    latest = max(directory.glob("*.bjx"), key=lambda p: p.stat().st_mtime)
    found, raw = record.unpack(latest.read_bytes())
    found = found._replace(call="0" * 64, **odd)
    files.write(directory / found.file_name, record.pack(found, raw))
    (directory / "\x1b[2J\udcff\n.bjx").touch()
    code, out, _ = run("list", directory)
    assert code == 0 and out.startswith("4 executables") and len(out) < 10_000
    assert out.count("<lambda>") >= 2 and "\x1b" not in out and "\ud800" not in out
    assert sum(isinstance(entry.record, Record) for entry in files.entries(directory)) == 3
    code, out, _ = run("prune", directory)
    assert code == 0 and "removed 1 of 4 files" in out
    assert all(c.isprintable() or c == "\n" for c in out)


def test_a_record_of_other_numbers_or_types_is_damaged(directory, run):
    latest = max(directory.glob("*.bjx"), key=lambda p: p.stat().st_mtime)
    good, raw = record.unpack(latest.read_bytes())
    wrong = [{"exact": 3}, {"name": 3}, {"sizes": [3]}, {"environment": None}]
    for odd in (10**400, float("inf"), float("nan"), -1, "3", True, None):
        wrong += [{"seconds": odd}, {"sizes": {"batch": odd}}, {"kept": [odd]}]
    for number, field in enumerate(wrong):
        forged = good._replace(call=f"{number:064}"[::-1], **field)
        name = forged._replace(environment=good.environment).file_name
        files.write(directory / name, record.pack(forged, raw))
    code, out, error = run("list", directory)
    assert code == 0 and not error and out.count("record") == len(wrong)
    assert f"removed {len(wrong)} of {len(wrong) + 2} files" in run("prune", directory)[1]


def test_list(directory, run):
    code, out, error = run("list", directory)
    assert (code, error) == (0, "") and run(directory) == (code, out, error)
    rows = [line.split() for line in out.splitlines()]
    assert rows[0][:2] == ["2", "executables,"]
    assert [r[1] for r in rows if r and r[0] == "<lambda>"] == ["batch=8", "batch=4"]
    assert any("3.0" in r for r in rows)
    total, *sizes = [float(r[i]) for r in rows for i in range(len(r) - 1) if r[i + 1] == "KiB"]
    assert len(sizes) == 2 and sum(sizes) == pytest.approx(total, abs=0.11)


def test_what_is_damaged_is_listed_and_pruned(directory, run):
    path = break_one(directory)
    good, bad = [line for line in run("list", directory)[1].splitlines() if "KiB" in line][1:]
    assert "batch=8" in good and path.name.startswith(bad.split()[0]) and "its digest" in bad
    unfinished = directory / f".writing-{'0' * 32}"  # of a process that was killed
    unfinished.touch()
    os.utime(unfinished, (0, 0))
    code, out, _ = run("prune", directory)
    assert code == 0 and f"removed {path.name}" in out and "removed 1 of 2 files" in out
    assert buckets(directory) == [8] and len(list(directory.iterdir())) == 1


def test_prune_leaves_what_is_not_to_be_trusted(directory, run):
    writable, *_ = sorted(directory.glob("*.bjx"))
    writable.chmod(0o666)
    code, out, _ = run("prune", directory)
    assert code == 0 and writable.exists()
    [entry] = [e for e in files.entries(directory) if e.path == writable]
    assert "can be written by other users" in str(entry.record)
    run("prune", directory, "--max-size", "0")
    assert not writable.exists()


def test_prune_by_age(directory, run):
    assert run("prune", directory, "--older-than", 4)[0] == 0
    assert buckets(directory) == [4, 8]
    code, out, _ = run("prune", directory, "--older-than", 2)
    assert code == 0 and out.count(": of no use for 2 days") == 1
    assert buckets(directory) == [8]


def test_prune_by_size(directory, run):
    assert run("prune", directory, "--max-size", "9" * 400)[1].startswith("removed 0 of 2")
    largest = max(p.stat().st_size for p in directory.glob("*.bjx"))
    assert run("prune", directory, "--max-size", f"{largest * 1.5 / 1024}K")[0] == 0
    assert buckets(directory) == [8]


def test_options_may_stand_anywhere(directory, run):
    assert "removed 2 of 2" in run("--max-size", "0", "prune", directory)[1]
