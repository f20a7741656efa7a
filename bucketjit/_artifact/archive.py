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
import mmap
import os
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit._artifact import manifest as manifests
from bucketjit._artifact.manifest import Manifest, Member
from bucketjit._compile.files.directory import remove_unfinished, write_with
from bucketjit._jax.arrays import key_impl
from bucketjit._raised import in_one_line
from bucketjit.errors import ArtifactError, SpecError

MAGIC = b"PK\3\4"  # the first bytes of a zip archive
SIGNATURE = "signature.sig"
CONSTANTS = "constants/"
EXECUTABLES = "executables/"

_ALIGNMENT = 64  # bytes: XLA on CPU takes an array at such an address without a copy
_LARGEST_DEFLATED = 512 * 2**20  # bytes of a member, decompressed
_LOCAL_HEADER = 30  # bytes; the lengths of the name and of the extra field are the last four
_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest of the zip format: equal contents make equal files
_PADDING_FIELD = 0xB1C7  # an extra field of a header that aligns the data behind it

Contents = Mapping[str, bytes | memoryview]


def write_archive(path: Path, manifest: Manifest, contents: Contents, key: bytes | None) -> None:
    """Write a file; it replaces an old one only when it is complete."""
    remove_unfinished(path.parent)
    write_with(path, lambda file: pack(file, manifest, contents, key), is_private=False)


def pack(file: BinaryIO, manifest: Manifest, contents: Contents, key: bytes | None = None) -> None:
    raw = manifest.encoded()
    with zipfile.ZipFile(file, "w") as archive:
        _add(archive, file, manifests.NAME, raw)
        if key is not None:
            _add(archive, file, SIGNATURE, _signature(raw, key).encode())
        for name in sorted(contents):
            _add(archive, file, name, contents[name])


def checked_path(path: object, what: str) -> Path:
    try:
        name = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:
        raise SpecError(
            f"{what}: path must be the name of a file, such as 'f.bkt', got {type(path).__name__}"
            + ("; it comes before the arguments of the function" if what == "save" else "")
        ) from None
    if not name:
        raise SpecError(f"{what}: path is empty; name a file, such as 'f.bkt'")
    if os.path.isdir(name) or not os.path.basename(name):
        raise IsADirectoryError(
            errno.EISDIR, f"{what}: path is a directory; name a file in it, such as 'f.bkt'", name
        )
    return Path(name)


def member_of(data: bytes | memoryview) -> Member:
    """What a manifest says of a member."""
    return Member(len(data), hashlib.sha256(data).hexdigest())


def checked_key(key: object) -> bytes | None:
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
        begin = file.tell() + _LOCAL_HEADER + len(name.encode()) + 4
        info.extra = struct.pack("<HH", _PADDING_FIELD, -begin % _ALIGNMENT)
        info.extra += bytes(-begin % _ALIGNMENT)
    else:
        info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, data)


class _Memory(mmap.mmap):
    """The bytes of a file, at the address of a page: JAX takes constants in it without a copy."""

    def seekable(self) -> bool:
        """What `zipfile` asks of a file; Python has the method from 3.13 on."""
        return True


class Archive:
    """A ``.bkt`` file; a signature was checked if a key was given, and all digests are right."""

    def __init__(
        self, path: str | os.PathLike[str], key: object = None, data: bytes | None = None
    ) -> None:
        secret = checked_key(key)
        self.path = Path(path) if data is not None else checked_path(path, "load")
        with open(self.path, "rb") if data is None else io.BytesIO(data) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            self._memory = _Memory(-1, size or 1)
            with memoryview(self._memory) as view:
                file.readinto(view[:size])
        try:
            self._open()
            raw = bytes(self._member(manifests.NAME))
            self.is_signed = SIGNATURE in self._zip.NameToInfo
            if secret is not None:
                self._check_signature(raw, secret)
            self.manifest = manifests.decoded(raw)
            self._check_members()
        except ArtifactError as error:
            raise ArtifactError(f"{self.path}: {error}") from None

    def close(self) -> None:
        """Free the bytes of the file. No member can be read after that."""
        del self._zip, self._memory

    def read(self, name: str) -> bytes:
        return bytes(self._member(name))

    def view(self, name: str) -> memoryview:
        """The bytes of a member; those of a constant in place."""
        return memoryview(self._member(name))

    def _open(self) -> None:
        try:
            self._zip = zipfile.ZipFile(self._memory)  # type: ignore[call-overload]
        except Exception as error:  # zipfile raises much else than BadZipFile for damaged files
            raise ArtifactError(
                f"it is no .bkt file, or it is truncated ({in_one_line(error)}); save it again"
            ) from None
        for name in self._zip.namelist():
            if {"", ".", ".."} & set(name.split("/")) or "\\" in name:
                raise ArtifactError(f"the member {name!r} is no name of a member; it was altered")
        if manifests.NAME not in self._zip.NameToInfo:
            raise ArtifactError(f"there is no member {manifests.NAME}; it is no .bkt file")

    def _member(self, name: str) -> bytes | memoryview:
        """The bytes of a member, not compared with their digest."""
        info = self._zip.getinfo(name)
        try:
            if info.compress_type == zipfile.ZIP_STORED:
                begin = info.header_offset + _LOCAL_HEADER
                begin += sum(struct.unpack_from("<2H", self._memory, begin - 4))
                return memoryview(self._memory)[begin : begin + info.file_size]
            if info.file_size > _LARGEST_DEFLATED:
                raise ValueError(f"it claims {info.file_size} bytes")
            with self._zip.open(info) as file:
                return file.read(info.file_size)
        except Exception as error:
            raise ArtifactError(
                f"{name} is damaged ({in_one_line(error)}); save the file again"
            ) from None

    def _check_signature(self, raw: bytes, key: bytes) -> None:
        if not self.is_signed:
            raise ArtifactError(
                f"it is not signed ({SIGNATURE} is missing), and a key was given; save it with "
                "this key, or load it without one"
            )
        if not hmac.compare_digest(self._member(SIGNATURE), _signature(raw, key).encode()):
            raise ArtifactError(f"{SIGNATURE} is not of this key, or {manifests.NAME} was altered")

    def _check_members(self) -> None:
        named, there = self.manifest.members, set(self._zip.namelist())
        if added := there - named.keys() - {manifests.NAME, SIGNATURE}:
            raise ArtifactError(f"{min(added)} is not in {manifests.NAME}; the file was altered")
        if missing := named.keys() - there:
            raise ArtifactError(f"the member {min(missing)} is missing; save the file again")
        for name, expected in named.items():
            if member_of(self._member(name)) != expected:
                raise ArtifactError(f"{name} is damaged or was altered; save the file again")


# --- arrays and their dtypes ---

_KEY = "key:"


def name_of(dtype: Any) -> str:
    """The name of a dtype in files."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        impl = key_impl(dtype)
        if not isinstance(impl, str):
            raise ArtifactError(
                f"random keys of the generator {impl} cannot be saved: only generators of JAX can; "
                "pass jax.random.key_data(key)"
            )
        return f"{_KEY}{impl}"
    return str(np.dtype(dtype).name)


def dtype_of(name: str, place: str) -> Any:
    """The dtype of a name."""
    try:
        if name.startswith(_KEY):
            return jax.eval_shape(lambda: jax.random.key(0, impl=name[len(_KEY) :])).dtype
        dtype = jnp.dtype(name)
        if dtype.name != name or dtype.kind in "OSUMm":
            raise TypeError(name)
    except (TypeError, ValueError, AttributeError):
        raise ArtifactError(
            f"{place}: this version of JAX has no dtype {name!r}; load it with a later one"
        ) from None
    return dtype


def as_bytes(array: np.ndarray) -> memoryview:
    """The values of an array in C order, little endian."""
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    flat = np.ascontiguousarray(array).reshape(-1)
    words: Any = flat.view(np.uint8) if flat.size else np.empty(0, np.uint8)
    return memoryview(words)


def from_bytes(data: memoryview, dtype: Any, shape: tuple[int, ...], place: str) -> np.ndarray:
    """The array in bytes that `as_bytes` made. The array shares their memory."""
    wanted = int(np.prod(shape, dtype=object)) * int(dtype.itemsize)
    if len(data) != wanted:
        raise ArtifactError(
            f"{place}: {len(data)} bytes, and {dtype.name}{list(shape)} has {wanted}; the file is "
            "damaged or was altered"
        )
    return np.frombuffer(data, dtype).reshape(shape)
