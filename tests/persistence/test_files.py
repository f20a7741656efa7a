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
import zlib

import pytest

from bucketjit._persistence import files
from bucketjit._persistence.files import MAGIC, Damaged, Distrusted, Header

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
    assert files.unpack(files.pack(HEADER, PAYLOAD)) == (HEADER, PAYLOAD)


def test_every_truncation_is_found():
    data = files.pack(HEADER, PAYLOAD)
    for length in range(len(data)):
        with pytest.raises(Damaged):
            files.unpack(data[:length])
    with pytest.raises(Damaged):
        files.unpack(data + b"\0")


def test_every_flipped_bit_is_found():
    data = files.pack(HEADER, PAYLOAD)
    for i in range(len(data)):
        broken = bytearray(data)
        broken[i] ^= 1 << (i % 8)
        with pytest.raises(Damaged):
            files.unpack(bytes(broken))


def test_another_version_is_told_apart():
    data = files.pack(HEADER, PAYLOAD)
    with pytest.raises(Damaged, match="of another version"):
        files.unpack(data.replace(b" 1\n", b" 2\n", 1))
    with pytest.raises(Damaged, match="no executable of bucketjit"):
        files.unpack(b"\x80\x04N." + data)


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
        ({**GOOD, "nbytes": 10**30}, "cannot be unpacked"),
        ({**GOOD, "created": math.inf}, "other types"),
        ({**GOOD, "seconds": math.nan}, "other types"),
    ],
)
def test_a_header_that_is_none_is_refused_with_the_right_digest_too(header, message):
    with pytest.raises(Damaged, match=message):
        files.unpack(sealed(body_of(header)))


def test_a_payload_that_is_none_is_refused_with_the_right_digest_too():
    text = json.dumps(GOOD).encode()
    with pytest.raises(Damaged, match="cannot be unpacked"):
        files.unpack(sealed(struct.pack("<I", len(text)) + text + b"nonsense"))
    with pytest.raises(Damaged, match="not JSON"):
        files.unpack(sealed(struct.pack("<I", 2) + b"{'" + zlib.compress(b"")))
    with pytest.raises(Damaged, match="not JSON"):
        files.unpack(sealed(struct.pack("<I", 100_000) + b"[" * 100_000))
    with pytest.raises(Damaged, match="no header"):
        files.unpack(sealed(b""))


def test_a_bomb_is_not_unpacked():
    bomb = body_of({**GOOD, "nbytes": 10}, b"\0" * (1 << 24))
    with pytest.raises(Damaged, match="10 bytes"):
        files.unpack(sealed(bomb))


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
    assert files.read(path) == b"second"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == [NAME]


def test_who_may_write_decides_what_is_trusted(tmp_path, monkeypatch):
    path = tmp_path / NAME
    files.write(path, b"x")
    path.chmod(0o664)
    with pytest.raises(Distrusted, match="chmod go-w"):
        files.read(path)
    path.chmod(0o600)
    assert files.read(path) == b"x"
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
    for look in (lambda: files.read(path), lambda: files.check_directory(tmp_path)):
        with pytest.raises(Distrusted, match="belongs to another user"):
            look()


def test_links_are_not_followed(tmp_path):
    files.write(tmp_path / "real", b"x")
    (tmp_path / NAME).symlink_to(tmp_path / "real")
    with pytest.raises(Distrusted, match=f"{NAME} is a symbolic link"):
        files.read(tmp_path / NAME)


def test_a_directory_is_made_for_its_owner_alone(tmp_path):
    files.make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    files.make_directory(tmp_path / "a" / "b")


def test_the_list_tells_what_is_wrong(tmp_path):
    def put(name: str, data: bytes, used: float) -> None:
        files.write(tmp_path / name, data)
        os.utime(tmp_path / name, (used, used))

    good = files.pack(HEADER, PAYLOAD)
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
    from bucketjit._persistence import files
    from tests.persistence.test_files import HEADER, NAME, PAYLOAD
    path = Path(sys.argv[1]) / NAME
    files.write(path, files.pack(HEADER, PAYLOAD))
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            for _ in range(20):
                files.write(path, files.pack(HEADER, PAYLOAD))
                assert files.unpack(files.read(path))[1] == PAYLOAD
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
