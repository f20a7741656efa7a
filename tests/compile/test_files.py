"""Files by themselves: what is written is read again, and nothing else is."""

import errno
import os
import sys
from typing import Any

import jax.numpy as jnp
import pytest

from bucketjit import BucketedExec
from bucketjit._compile.files import directory as files
from bucketjit._compile.files import record
from bucketjit._compile.files.directory import Distrusted
from bucketjit._compile.files.record import Damaged, Record
from bucketjit.errors import PersistenceWarning
from bucketjit.types import Event
from tests.comparison import ramp

PAYLOAD = bytes(range(256)) * 8
RECORD = Record(
    call="ab" * 32,
    program="cd" * 32,
    name="f",
    sizes={"b": 8},
    exact=False,
    environment={"jax": "1.0"},
    kept=[0, 2],
    seconds=0.5,
)
NAME = RECORD.file_name


@pytest.fixture(params=["zstandard", "zlib"])
def codec(request: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "zlib":
        monkeypatch.setitem(sys.modules, "zstandard", None)  # type: ignore[arg-type]
    else:
        pytest.importorskip("zstandard")
    return request.param


def test_what_is_packed_is_unpacked_and_no_damage_is(codec):
    for payload in (PAYLOAD, b"", os.urandom(1000)):
        assert record.unpack(record.pack(RECORD, payload)) == (RECORD, payload)
    data = record.pack(RECORD, PAYLOAD)
    assert (b"\x28\xb5\x2f\xfd" in data) == (codec == "zstandard")
    for i in range(len(data)):
        broken = bytearray(data)
        broken[i] ^= 1 << (i % 8)
        for wrong in (data[:i], bytes(broken)):
            with pytest.raises(Damaged):
                record.unpack(wrong)
    for wrong in (data + b"\0", b"\x80\x04N." + data, data.replace(b" 3\n", b" 2\n", 1)):
        with pytest.raises(Damaged):
            record.unpack(wrong)


def test_a_file_that_needs_zstandard_where_it_is_missing(tmp_path, monkeypatch):
    pytest.importorskip("zstandard")
    told: list[Event] = []

    def call() -> list[str]:
        told.clear()
        executor = BucketedExec(jnp.sin).with_pow2().with_persistence(tmp_path)
        executor.with_on_event(told.append)(ramp(5))
        return [event.kind for event in told if event.kind in ("compile", "load", "unreadable")]

    assert (call(), call()) == (["compile"], ["load"])
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "zstandard", None)
        message = r"compressed with zstandard, which is not installed; .*bucketjit\[compression\]"
        with pytest.warns(PersistenceWarning, match=message):
            assert call() == ["unreadable", "compile"]
        assert call() == ["load"]  # what was compiled has replaced the file
    assert call() == ["load"]


def test_nothing_is_left_of_a_write_that_fails(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, full)
            with pytest.raises(OSError, match="No space"):
                files.write(tmp_path / NAME, b"x")
        assert list(tmp_path.iterdir()) == []


def test_a_write_replaces_the_whole_file(tmp_path):
    path = tmp_path / NAME
    files.write(path, b"first, and longer")
    files.write(path, b"second")
    assert path.read_bytes() == b"second"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == [NAME]


def test_who_may_write_decides_what_is_trusted(tmp_path, monkeypatch):
    path = tmp_path / NAME
    files.write(path, record.pack(RECORD, PAYLOAD))
    path.chmod(0o664)
    with pytest.raises(Distrusted, match="chmod go-w"):
        files.load(path)
    path.chmod(0o600)
    assert files.load(path) == (RECORD, PAYLOAD)
    tmp_path.chmod(0o777)
    with pytest.raises(Distrusted, match="can be written by other users"):
        files.check_directory(tmp_path)
    tmp_path.chmod(0o755)
    files.check_directory(tmp_path)
    owner = tmp_path.stat().st_uid
    if owner == 0:  # what is root's is trusted
        os.chown(path, 12345, -1)
        os.chown(tmp_path, 12345, -1)
        owner = 12345
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    for look in (lambda: files.load(path), lambda: files.check_directory(tmp_path)):
        with pytest.raises(Distrusted, match="belongs to another user"):
            look()


def test_each_file_is_listed_for_itself(tmp_path, monkeypatch):
    """Whatever is wrong with one, the others are there."""
    good = record.pack(RECORD, PAYLOAD)
    files.write(tmp_path / NAME, good)
    files.write(tmp_path / "README", b"")
    files.write(tmp_path / "renamed.bjx", good)
    files.write(tmp_path / "short.bjx", good[:-1])
    (tmp_path / "linked.bjx").symlink_to(tmp_path / NAME)
    (tmp_path / "dangling.bjx").symlink_to(tmp_path / "nothing")
    (tmp_path / "circle.bjx").symlink_to(tmp_path / "circle.bjx")
    (tmp_path / "folder.bjx").mkdir()
    os.mkfifo(tmp_path / "pipe.bjx")
    (tmp_path / "long.bjx").touch()
    os.truncate(tmp_path / "long.bjx", 1 << 40)  # a hole, which takes no room
    found = {e.path.stem: e.record for e in files.entries(tmp_path)}
    assert found.pop(NAME[:-4]) == RECORD
    assert {name: str(why).split(":")[0].rpartition("/")[2] for name, why in found.items()} == {
        "renamed": "its name is not that of its contents",
        "short": "its digest does not match",
        "linked": "linked.bjx is not a file (links are not followed)",
        "dangling": "dangling.bjx is not a file (links are not followed)",
        "circle": "circle.bjx is not a file (links are not followed)",
        "folder": "folder.bjx is not a file (links are not followed)",
        "pipe": "pipe.bjx is not a file (links are not followed)",
        "long": "it is longer than any executable",
    }
    damaged = {name for name, why in found.items() if isinstance(why, Damaged)}
    assert damaged == {"renamed", "short", "long"}

    def fails(path):
        raise ZeroDivisionError("no reader is perfect")

    monkeypatch.setattr(files, "load", fails)
    assert [type(e.record) for e in files.entries(tmp_path)] == [ZeroDivisionError] * 9
