"""The layout of a ``.bkt`` file: a zip archive that is read into memory and never extracted.

The file is read once, and then let go: another program may write over it at any time. Constants
are stored as they are, aligned to 64 bytes, so that other programs can map them. All else is
deflated. Every member is named in the manifest with its size and digest. Sizes are checked before
anything is decompressed, so a file cannot take more memory than its manifest is allowed to name.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bucketjit._artifact import manifest as manifests
from bucketjit._artifact.manifest import Manifest, Member
from bucketjit._persistence.files import remove_unfinished, write_with
from bucketjit._raised import in_one_line
from bucketjit.errors import ArtifactError, SpecError

MAGIC = b"PK\3\4"  # the first bytes of a zip archive
SIGNATURE = "signature.sig"
CONSTANTS = "constants/"
EXECUTABLES = "executables/"

_ALIGNMENT = 64  # bytes: XLA on CPU takes an array at such an address without a copy
_LARGEST_MANIFEST = 64 * 2**20  # bytes
_LARGEST_DEFLATED = 512 * 2**20  # bytes of a member, decompressed
_MOST_MEMBERS = 100_000
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest of the zip format: equal contents make equal files
_PADDING_FIELD = 0xB1C7  # an extra field of a header that aligns the data behind it

Contents = Callable[[], bytes | memoryview]


def write_archive(
    path: Path, manifest: Manifest, contents: Mapping[str, Contents], key: bytes | None
) -> None:
    """Write a file; it replaces an old one only when it is complete."""
    raw = manifest.encoded()

    def fill(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            _add(archive, file, manifests.NAME, raw)
            if key is not None:
                _add(archive, file, SIGNATURE, _signature(raw, key).encode())
            for name in sorted(contents):
                _add(archive, file, name, contents[name]())

    remove_unfinished(path.parent)
    write_with(path, fill, is_private=False)


def checked_path(path: object, what: str) -> Path:
    """The path of a file."""
    try:
        found = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        raise SpecError(
            f"{what}: path must be the name of a file, such as 'f.bkt', got {type(path).__name__}"
            + ("; it comes before the arguments of the function" if what == "save" else "")
        ) from None
    if not found:
        raise SpecError(f"{what}: path is empty; name a file, such as 'f.bkt'")
    if os.path.isdir(found) or not os.path.basename(found):
        raise IsADirectoryError(
            errno.EISDIR, f"{what}: path is a directory; name a file in it, such as 'f.bkt'", found
        )
    return Path(found)


def member_of(data: bytes | memoryview) -> Member:
    """What a manifest says of a member."""
    return Member(len(data), hashlib.sha256(data).hexdigest())


def checked_key(key: object) -> bytes | None:
    """A secret as bytes."""
    if key is None:
        return None
    if not isinstance(key, str | bytes) or not key:
        raise SpecError(f"key must be bytes or text that is not empty, got {type(key).__name__}")
    return key.encode() if isinstance(key, str) else key


def _signature(raw: bytes, key: bytes) -> str:
    """The signature of a manifest. It covers all members, whose digests the manifest has."""
    return hmac.new(key, raw, hashlib.sha256).hexdigest()


def _add(archive: zipfile.ZipFile, file: BinaryIO, name: str, data: bytes | memoryview) -> None:
    info = zipfile.ZipInfo(name, _TIME)
    info.external_attr = 0o644 << 16
    if name.startswith(CONSTANTS):
        info.compress_type = zipfile.ZIP_STORED
        # Four bytes of its own header, then as many as bring the data to the next multiple.
        begin = file.tell() + _LOCAL_HEADER.size + len(name.encode()) + 4
        info.extra = struct.pack("<HH", _PADDING_FIELD, -begin % _ALIGNMENT)
        info.extra += bytes(-begin % _ALIGNMENT)
    else:
        info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, data)


class Archive:
    """A ``.bkt`` file that was opened, and whose members have the digests of its manifest.

    Attributes:
        path: The file.
        manifest: What it holds.
    """

    def __init__(
        self, path: str | os.PathLike[str], key: object = None, data: bytes | None = None
    ) -> None:
        """Open a file, and check every member."""
        secret = checked_key(key)
        self.path = Path(path) if data is not None else checked_path(path, "load")
        try:
            with open(self.path, "rb") if data is None else io.BytesIO(data) as file:
                self._infos = _listed(file)
                self._data = _aligned(file)
            raw = self._read(manifests.NAME, _LARGEST_MANIFEST)
            if secret is not None:
                self._check_signature(raw, secret)
            self.manifest = manifests.decoded(raw)
            self._check_members()
        except ArtifactError as error:
            raise ArtifactError(f"{self.path}: {error}") from None

    def close(self) -> None:
        """Free the bytes of the file. No member can be read after that."""
        self._data = memoryview(b"")

    @property
    def is_signed(self) -> bool:
        """Whether it has a signature. It was checked if a key was given."""
        return SIGNATURE in self._infos

    def read(self, name: str) -> bytes:
        """The bytes of a member."""
        return self._read(name, self.manifest.members[name].size)

    def view(self, name: str) -> memoryview:
        """The bytes of a constant, in place."""
        return self._stored(self._infos[name])

    def _read(self, name: str, most: int) -> bytes:
        """The bytes of a member, at most ``most`` of them."""
        info = self._infos[name]
        if info.file_size > most:
            raise ArtifactError(
                f"{name} claims {info.file_size} bytes, and at most {most} are expected; the file "
                "is damaged or was altered"
            )
        if info.compress_type == zipfile.ZIP_STORED:
            return bytes(self._stored(info))
        if info.compress_type != zipfile.ZIP_DEFLATED:
            raise ArtifactError(f"{name} is compressed in a way that no .bkt file is")
        expander = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            # One byte more than is allowed, to find out whether there is more.
            data = expander.decompress(self._raw(info), info.file_size + 1)
        except zlib.error as error:
            raise ArtifactError(f"{name} is damaged ({error}); save the file again") from None
        if len(data) != info.file_size or zlib.crc32(data) != info.CRC:
            raise ArtifactError(f"{name} is damaged; save the file again")
        return data

    def _stored(self, info: zipfile.ZipInfo) -> memoryview:
        raw = self._raw(info)
        if len(raw) != info.file_size or info.compress_type != zipfile.ZIP_STORED:
            raise ArtifactError(f"{info.filename} is damaged; save the file again")
        return raw

    def _raw(self, info: zipfile.ZipInfo) -> memoryview:
        """The bytes of a member as they are in the file."""
        view, at = self._data, info.header_offset
        try:
            header = _LOCAL_HEADER.unpack_from(view, at)
        except struct.error:
            raise ArtifactError(f"{info.filename} is not in the file; it is truncated") from None
        begin = at + _LOCAL_HEADER.size + header[9] + header[10]
        name = bytes(view[at + _LOCAL_HEADER.size :][: header[9]])
        end = begin + info.compress_size
        if header[0] != MAGIC or name != info.filename.encode() or end > len(view):
            raise ArtifactError(f"{info.filename} is damaged; save the file again")
        return view[begin:end]

    def _check_signature(self, raw: bytes, key: bytes) -> None:
        if SIGNATURE not in self._infos:
            raise ArtifactError(
                f"it is not signed ({SIGNATURE} is missing), and a key was given; save it with "
                "this key, or load it without one"
            )
        found = self._read(SIGNATURE, 1024)
        if not hmac.compare_digest(found, _signature(raw, key).encode()):
            raise ArtifactError(f"{SIGNATURE} is not of this key, or {manifests.NAME} was altered")

    def _check_members(self) -> None:
        named = self.manifest.members
        there = self._infos.keys() - {manifests.NAME, SIGNATURE}
        if missing := sorted(named.keys() - there):
            raise ArtifactError(f"the member {missing[0]} is missing; save the file again")
        if added := sorted(there - named.keys()):
            raise ArtifactError(
                f"the member {added[0]} is not in {manifests.NAME}; the file was altered"
            )
        for name, expected in named.items():
            info = self._infos[name]
            if info.file_size != expected.size:
                raise ArtifactError(f"{name} is damaged: it has another size; save the file again")
            data: bytes | memoryview
            if name.startswith(CONSTANTS):
                data = self._stored(info)
            else:
                data = self._read(name, _LARGEST_DEFLATED)
            if hashlib.sha256(data).hexdigest() != expected.sha256:
                raise ArtifactError(f"{name} is damaged or was altered; save the file again")


def _listed(file: BinaryIO) -> dict[str, zipfile.ZipInfo]:
    """The entries of the archive by name."""
    try:
        with zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
    except Exception as error:  # zipfile raises much else than BadZipFile for damaged files
        raise ArtifactError(
            f"it is no .bkt file, or it is truncated ({in_one_line(error)}); save it again"
        ) from None
    if len(infos) > _MOST_MEMBERS:
        raise ArtifactError(f"it has {len(infos)} members; no .bkt file has so many")
    found: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        name = info.filename
        if name in found:
            raise ArtifactError(f"the member {name!r} is there twice; the file was altered")
        parts = name.split("/")
        if name != info.orig_filename or {"", ".", ".."} & set(parts) or "\\" in name:
            raise ArtifactError(f"the member {name!r} is no name of a member; it was altered")
        if info.flag_bits & 1:
            raise ArtifactError(f"the member {name!r} is encrypted; no .bkt file has that")
        found[name] = info
    if manifests.NAME not in found:
        raise ArtifactError(f"there is no member {manifests.NAME}; it is no .bkt file")
    return found


def _aligned(file: Any) -> memoryview:
    """The bytes of a file, at an address at which JAX takes its constants without a copy."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    data: Any = raw[-raw.ctypes.data % _ALIGNMENT :][:size]
    return memoryview(data)[: file.readinto(data)]
