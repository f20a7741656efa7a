"""Files by themselves: what is written is read again, and nothing else is."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
import struct
import subprocess
import sys
import textwrap
import time
import tracemalloc
import zlib

import pytest

from bucketjit._persistence import file_format, files
from bucketjit._persistence.file_format import MAGIC, Damaged, Header
from bucketjit._persistence.files import Distrusted

PAYLOAD = bytes(range(256)) * 8
HEADER = Header(
    key="ab" * 32,
    name="f",
    sizes={"b": 8},
    exact=False,
    parts={"program": "1", "constants": "2", "call": "3"},
    environment={"jax": "1.0"},
    kept=(0, 2),
    seconds=0.5,
    created=1e9,
    nbytes=len(PAYLOAD),
)
NAME = files.file_name("0" * 16, HEADER.key)


def sealed(body: bytes) -> bytes:
    """A file whose digest is right."""
    return MAGIC + hashlib.sha256(body).digest() + body


def body_of(header: object, payload: bytes = PAYLOAD) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<I", len(text)) + text + zlib.compress(payload)


def test_what_is_packed_is_unpacked():
    assert file_format.unpack(file_format.pack(HEADER, PAYLOAD)) == (HEADER, PAYLOAD)


def test_every_truncation_is_found():
    data = file_format.pack(HEADER, PAYLOAD)
    for length in range(len(data)):
        with pytest.raises(Damaged):
            file_format.unpack(data[:length])
    with pytest.raises(Damaged):
        file_format.unpack(data + b"\0")


def test_every_flipped_bit_is_found():
    data = file_format.pack(HEADER, PAYLOAD)
    for i in range(len(data)):
        broken = bytearray(data)
        broken[i] ^= 1 << (i % 8)
        with pytest.raises(Damaged):
            file_format.unpack(bytes(broken))


def test_another_version_is_told_apart():
    data = file_format.pack(HEADER, PAYLOAD)
    with pytest.raises(Damaged, match="of another version"):
        file_format.unpack(data.replace(b" 1\n", b" 2\n", 1))
    with pytest.raises(Damaged, match="no executable of bucketjit"):
        file_format.unpack(b"\x80\x04N." + data)


GOOD = dataclasses.asdict(HEADER)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "other fields"),
        ({**GOOD, "more": 1}, "other fields"),
        ({k: v for k, v in GOOD.items() if k != "kept"}, "other fields"),
        ({**GOOD, "kept": "0"}, "kept '0'"),
        ({**GOOD, "kept": [-1]}, "other types"),
        ({**GOOD, "kept": [0.0]}, "other types"),
        ({**GOOD, "sizes": {"b": "8"}}, "other types"),
        ({**GOOD, "exact": 1}, "exact 1"),
        ({**GOOD, "nbytes": True}, "nbytes True"),
        ({**GOOD, "environment": {"jax": 1}}, "other types"),
        ({**GOOD, "nbytes": len(PAYLOAD) - 1}, "bytes that its header says"),
        ({**GOOD, "nbytes": len(PAYLOAD) + 1}, "bytes that its header says"),
        ({**GOOD, "nbytes": file_format.LARGEST + 1}, "none has more than 2147483647"),
        ({**GOOD, "nbytes": file_format.LARGEST}, "which a file of .* bytes cannot hold"),
        ({**GOOD, "nbytes": 10**30}, "other types"),
        ({**GOOD, "sizes": {"b": 2**63}}, "other types"),
        ({**GOOD, "created": math.inf}, "other types"),
        ({**GOOD, "created": 10**400}, "other types"),
        ({**GOOD, "created": -1}, "other types"),
        ({**GOOD, "seconds": math.nan}, "other types"),
        ({**GOOD, "seconds": 10**400}, "other types"),
        ({**GOOD, "seconds": 1e300}, "other types"),
        ({**GOOD, "name": ["x" * 10**6]}, r"name \['x+\.\.\.x+'\]$"),
    ],
)
def test_a_header_that_is_none_is_refused_with_the_right_digest_too(header, message):
    with pytest.raises(Damaged, match=message):
        file_format.unpack(sealed(body_of(header)))


def test_a_payload_that_is_none_is_refused_with_the_right_digest_too():
    text = json.dumps(GOOD).encode()
    with pytest.raises(Damaged, match="cannot be unpacked"):
        file_format.unpack(sealed(struct.pack("<I", len(text)) + text + b"nonsense"))
    with pytest.raises(Damaged, match="not JSON"):
        file_format.unpack(sealed(struct.pack("<I", 2) + b"{'" + zlib.compress(b"")))
    with pytest.raises(Damaged, match="not JSON"):
        file_format.unpack(sealed(struct.pack("<I", 100_000) + b"[" * 100_000))
    with pytest.raises(Damaged, match="not JSON"):  # or too large an int for Python
        file_format.unpack(sealed(struct.pack("<I", 5000) + b"9" * 5000))
    with pytest.raises(Damaged, match="no header"):
        file_format.unpack(sealed(b""))
    with pytest.raises(Damaged, match="its header would have 16777217 bytes"):
        file_format.unpack(sealed(struct.pack("<I", (1 << 24) + 1)))
    with pytest.raises(Damaged, match="2048 bytes that its header says"):  # more follows
        file_format.unpack(sealed(body_of(GOOD) + b"x"))


def test_a_bomb_is_not_unpacked():
    zeros = bytes(1 << 24)
    for claimed, message in (
        (10, "longer than its header says"),
        (len(zeros) - 1, "16777215 bytes that its header says"),
    ):
        bomb = body_of({**GOOD, "nbytes": claimed}, zeros)
        with pytest.raises(Damaged, match=message):
            file_format.unpack(sealed(bomb))


def taken(call) -> int:
    """The most bytes of memory that Python takes during a call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_files_are_checked_in_pieces(tmp_path):
    """However much they unpack to, and however long they are."""
    path = tmp_path / NAME
    zeros, noise = bytes(32 << 20), os.urandom(16 << 20)
    for payload in (zeros, noise):
        header = dataclasses.replace(HEADER, nbytes=len(payload))
        files.write(path, file_format.pack(header, payload))
        assert files.load(path) == (header, payload)
        assert taken(lambda: files.check(path)) < 5 << 20
        assert taken(lambda: files.entries(tmp_path)) < 5 << 20
    assert taken(lambda: files.load(path)) < 3 * len(noise)


def test_what_no_file_can_hold_is_not_unpacked(tmp_path, monkeypatch):
    """A header that claims too much costs nothing."""
    path = tmp_path / NAME
    files.write(path, sealed(body_of({**GOOD, "nbytes": 64 << 20}, b"\0" * 1000)))
    with pytest.raises(Damaged, match="cannot hold"):
        files.load(path)
    files.write(path, sealed(body_of({**GOOD, "nbytes": 64 << 20}, b"\0" * (64 << 20))))
    assert len(files.load(path)[1]) == 64 << 20  # zlib makes that of 64 KiB
    monkeypatch.setattr(file_format, "LARGEST", 1 << 20)
    with pytest.raises(Damaged, match="none has more than 1048576"):
        files.load(path)
    assert taken(lambda: pytest.raises(Damaged, files.load, path)) < 5 << 20


def test_a_file_is_no_longer_than_its_header_says(tmp_path):
    """Not all of it is read."""
    path = tmp_path / NAME
    files.write(path, file_format.pack(HEADER, PAYLOAD))
    os.truncate(path, 1 << 40)  # a hole, which takes no room
    with pytest.raises(Damaged, match="longer than its header says"):
        files.load(path)
    files.write(path, sealed(struct.pack("<I", 2) + b"{'" + zlib.compress(b"")))
    os.truncate(path, 1 << 40)
    with pytest.raises(Damaged, match="not JSON"):
        files.load(path)


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
    files.write(path, file_format.pack(HEADER, PAYLOAD))
    path.chmod(0o664)
    with pytest.raises(Distrusted, match="chmod go-w"):
        files.load(path)
    path.chmod(0o600)
    assert files.load(path) == (HEADER, PAYLOAD)
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


def test_links_are_not_followed(tmp_path):
    files.write(tmp_path / "real", b"x")
    (tmp_path / NAME).symlink_to(tmp_path / "real")
    with pytest.raises(Distrusted, match=f"{NAME} is a symbolic link"):
        files.load(tmp_path / NAME)


def test_a_directory_is_made_for_its_owner_alone(tmp_path):
    files.make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    files.make_directory(tmp_path / "a" / "b")


def test_the_list_tells_what_is_wrong(tmp_path):
    def put(name: str, data: bytes, used: float) -> None:
        files.write(tmp_path / name, data)
        os.utime(tmp_path / name, (used, used))

    good = file_format.pack(HEADER, PAYLOAD)
    put(NAME, good, 3)
    put(f"{'0' * 16}-{'cd' * 32}.bjx", good, 2)
    put("x.bjx", good[:-1], 1)
    put("README", b"", 0)
    found = files.entries(tmp_path)
    assert [e.header is not None for e in found] == [True, False, False]
    assert [e.problem[:30] for e in found] == [
        "",
        "its name is not that of its ke",
        "its digest does not match: it ",
    ]


def test_each_file_is_listed_for_itself(tmp_path, monkeypatch):
    """Whatever is wrong with one, the others are there."""
    files.write(tmp_path / NAME, file_format.pack(HEADER, PAYLOAD))
    (tmp_path / "dangling.bjx").symlink_to(tmp_path / "nothing")
    (tmp_path / "circle.bjx").symlink_to(tmp_path / "circle.bjx")
    (tmp_path / "folder.bjx").mkdir()
    os.mkfifo(tmp_path / "pipe.bjx")
    (tmp_path / "empty.bjx").touch()
    files.write(tmp_path / "huge.bjx", sealed(body_of({**GOOD, "created": 10**400})))
    found = {e.path.stem: e.problem for e in files.entries(tmp_path)}
    assert found.pop(NAME[:-4]) == ""
    assert {name: why.split(":")[0].rpartition("/")[2] for name, why in found.items()} == {
        "dangling": "dangling.bjx is a symbolic link, which is not followed",
        "circle": "circle.bjx is a symbolic link, which is not followed",
        "folder": "folder.bjx is not a file",
        "pipe": "pipe.bjx is not a file",
        "empty": "it is no executable of bucketjit",
        "huge": "its header has values of other types",
    }

    def fails(path):
        raise ZeroDivisionError("no reader is perfect")

    monkeypatch.setattr(files, "check", fails)
    found = files.entries(tmp_path)
    assert len(found) == 7
    assert {e.problem for e in found} == {"ZeroDivisionError: no reader is perfect"}
    assert not any(e.damaged for e in found)


def test_a_bound_drops_what_was_of_use_longest_ago(tmp_path):
    for i in range(4):
        files.write(tmp_path / f"{i}.bjx", bytes(100))
        os.utime(tmp_path / f"{i}.bjx", (i, i))
    assert [p.name for p in files.bound(tmp_path, 250)] == ["1.bjx", "0.bjx"]
    assert files.bound(tmp_path, 250) == []


def test_only_old_unfinished_files_are_abandoned(tmp_path):
    for name, age in ((".writing-old", 7200), (".writing-new", 0)):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    assert [p.name for p in files.abandoned(tmp_path)] == [".writing-old"]
    assert files.entries(tmp_path) == []


_FORKED = """
    import os, sys
    from pathlib import Path
    from bucketjit._persistence import file_format, files
    from tests.persistence.test_files import HEADER, NAME, PAYLOAD
    path = Path(sys.argv[1]) / NAME
    files.write(path, file_format.pack(HEADER, PAYLOAD))
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            for _ in range(20):
                files.write(path, file_format.pack(HEADER, PAYLOAD))
                assert files.load(path)[1] == PAYLOAD
            os._exit(0)
        children.append(child)
    assert [os.waitpid(c, 0)[1] for c in children] == [0] * 4
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forked_processes_write_one_file(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_FORKED), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=os.getcwd())
    assert done.returncode == 0, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == [NAME]
