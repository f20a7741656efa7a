"""How executables are compressed: by zstandard where it is there, by zlib elsewhere."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from bucketjit import BucketedExec
from bucketjit._persistence import codecs, file_format, files
from bucketjit._persistence.file_format import Damaged
from bucketjit.errors import PersistenceWarning
from bucketjit.types import Event
from tests.comparison import ramp
from tests.persistence.test_files import GOOD, HEADER, NAME, PAYLOAD, sealed, taken

zstandard = pytest.importorskip("zstandard")


@pytest.fixture
def without_zstandard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)  # type: ignore[arg-type]


def packed_as(codec: object, payload: bytes, **changes: object) -> bytes:
    """A file whose digest is right."""
    text = json.dumps({**GOOD, **changes, "codec": codec}).encode()
    return sealed(struct.pack("<I", len(text)) + text + payload)


def zstd(payload: bytes, **options: object) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(payload)


def test_zstandard_is_used_where_it_is() -> None:
    data = file_format.pack(HEADER, PAYLOAD)
    assert b'"codec": "zstd"' in data
    assert file_format.unpack(data) == (HEADER, PAYLOAD)


def test_zlib_is_used_where_it_is_not(without_zstandard: None) -> None:
    data = file_format.pack(HEADER, PAYLOAD)
    assert b'"codec": "zlib"' in data
    assert file_format.unpack(data) == (HEADER, PAYLOAD)


def test_every_truncation_and_flipped_bit_is_found() -> None:
    data = file_format.pack(HEADER, PAYLOAD[:64])
    for i in range(len(data)):
        broken = bytearray(data)
        broken[i] ^= 1 << (i % 8)
        for wrong in (data[:i], bytes(broken)):
            with pytest.raises(Damaged):
                file_format.unpack(wrong)


@pytest.mark.parametrize(
    ("codec", "payload", "message"),
    [
        ("lz4", zstd(PAYLOAD), "codec 'lz4'"),
        (3, zstd(PAYLOAD), "codec 3"),
        (["zstd"], zstd(PAYLOAD), r"codec \['zstd'\]"),
        (None, zstd(PAYLOAD), "other fields"),
        ("zlib", zstd(PAYLOAD), "cannot be unpacked"),
        ("zstd", b"nonsense", "cannot be unpacked"),
        ("zstd", zstd(PAYLOAD)[:-1], "2048 bytes that its header says"),
        ("zstd", zstd(PAYLOAD[:-1]), "2048 bytes that its header says"),
        ("zstd", zstd(PAYLOAD) + zstd(b"x"), "2048 bytes that its header says"),
        ("zstd", zstd(PAYLOAD) + b"x" * 20, "cannot be unpacked"),
        ("zstd", zstd(bytes(1 << 24)), "2048 bytes that its header says"),
    ],
)
def test_what_is_not_as_the_header_says(codec: object, payload: bytes, message: str) -> None:
    with pytest.raises(Damaged, match=message):
        file_format.unpack(packed_as(codec, payload))


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    """However much the bytes would become, no more is unpacked than the header claims."""
    path = tmp_path / NAME
    files.write(path, packed_as("zstd", zstd(bytes(1 << 28))))
    assert os.path.getsize(path) < 1 << 16
    # A frame that asks for more memory than any of bucketjit's.
    options = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    large = zstandard.ZstdCompressor(compression_params=options).compressobj()
    window = large.compress(b"x") + large.flush()
    assert taken(lambda: pytest.raises(Damaged, files.load, path)) < 5 << 20
    files.write(path, packed_as("zstd", window, nbytes=1))
    with pytest.raises(Damaged, match="cannot be unpacked"):
        files.load(path)
    files.write(path, packed_as("zstd", zstd(b""), nbytes=1 << 30))
    with pytest.raises(Damaged, match="cannot hold"):
        files.load(path)


def test_it_is_checked_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / NAME
    for payload in (bytes(32 << 20), os.urandom(8 << 20)):
        header = dataclasses.replace(HEADER, nbytes=len(payload))
        files.write(path, file_format.pack(header, payload))
        assert files.load(path) == (header, payload)
        assert taken(lambda: files.check(path)) < 5 << 20


def test_a_file_that_needs_zstandard_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Event] = []

    def call() -> list[str]:
        told.clear()
        executor = BucketedExec(jnp.sin).with_pow2().with_persistence(tmp_path)
        executor.with_on_event(told.append)(ramp(5))
        return [event.kind for event in told if event.kind in ("compile", "load", "unreadable")]

    assert call() == ["compile"]
    assert call() == ["load"]
    (entry,) = files.entries(tmp_path)
    assert not entry.problem
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "zstandard", None)
        (entry,) = files.entries(tmp_path)
        assert not entry.damaged and "zstandard, which is not installed" in entry.problem
        message = r"compressed with zstandard, which is not installed; .*bucketjit\[compression\]"
        with pytest.warns(PersistenceWarning, match=message):
            assert call() == ["unreadable", "compile"]
        assert call() == ["load"]  # what was compiled has replaced the file
        broken = file_format.pack(HEADER, PAYLOAD).replace(b"zlib", b"zstd")
        with pytest.raises(Damaged, match="digest"):  # which is told without the library too
            file_format.unpack(broken)
    assert call() == ["load"]
    assert codecs.best() == "zstd"
