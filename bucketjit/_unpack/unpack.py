"""Unpack a ``.bkt`` file into plain StableHLO modules, raw constants, and how to serve with them.

    model.bkt   ->   model/README.md, layout.json
                     model/constants/0.bin, 1.bin, ...
                     model/modules/function/n=8.mlirbc, n=16.mlirbc, ...

What is written needs neither bucketjit nor JAX: see `layout` and `readme`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.export  # an attribute of jax only after this import

from bucketjit._artifact import modules
from bucketjit._artifact.archive import Archive
from bucketjit._artifact.manifest import Bucket, Manifest, SavedFunction
from bucketjit._export.refine import refine
from bucketjit._jax import stablehlo
from bucketjit._jax.custom_calls import custom_call_targets
from bucketjit._jax.sharding_free import without_sharding
from bucketjit._jax.stablehlo import BadModule, Module
from bucketjit._raised import in_one_line
from bucketjit._unpack import layout
from bucketjit._unpack.layout import Json, Unpacked
from bucketjit._unpack.readme import readme_of
from bucketjit.errors import ArtifactError, ExportError

LAYOUT = "layout.json"
README = "README.md"

_TEMPORARY = ".unpacking-"
_LONGEST = 100  # characters in the name of a module's file


class Written(NamedTuple):
    """What was unpacked.

    Attributes:
        files: The files, relative to the directory, in the order in which they were written.
        nbytes: Their bytes.
    """

    files: tuple[str, ...]
    nbytes: int


def unpack(
    archive: Archive,
    directory: Path,
    platform: str | None = None,
    text: bool = False,
    force: bool = False,
) -> Written:
    """Write what a file holds into a directory, for programs without Python.

    A failure leaves the directory as it was. Where ``force`` writes into one that has files, they
    are replaced after all new ones are complete, and ``layout.json`` comes last.
    """
    known = archive.manifest.platforms
    if platform is not None and platform not in known:
        raise ArtifactError(
            f"{archive.path} has modules for {', '.join(known)}, not for {platform!r}; save it "
            f"with platforms=[..., {platform!r}]"
        )
    _check_target(directory, force)
    with _staged(directory) as stage:
        platforms = known if platform is None else (platform,)
        files = _Writer(archive, stage, platforms, text).write()
        nbytes = sum((stage / name).stat().st_size for name in files)
        _publish(stage, directory, files)
    return Written(tuple(files), nbytes)


def _check_target(directory: Path, force: bool) -> None:
    if not directory.is_dir():
        if directory.exists() or directory.is_symlink():
            raise ArtifactError(f"{directory} is no directory; name another one")
        return
    with os.scandir(directory) as entries:
        if not force and next(entries, None) is not None:
            raise ArtifactError(
                f"{directory} is not empty; name another directory, or write into it with --force"
            )


@contextlib.contextmanager
def _staged(directory: Path) -> Iterator[Path]:
    """A directory beside another one; it is removed afterwards, with what is left in it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=directory.parent))
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _publish(stage: Path, directory: Path, files: Sequence[str]) -> None:
    """Move complete files to where they belong."""
    if not directory.exists() or not any(directory.iterdir()):
        mask = os.umask(0)
        os.umask(mask)
        stage.chmod(0o777 & ~mask)  # a temporary directory is private
        if directory.exists():
            directory.rmdir()
        os.replace(stage, directory)
        return
    (directory / LAYOUT).unlink(missing_ok=True)  # it would describe a mixture
    for name in files:  # the layout is the last
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(stage / name, directory / name)


class _Writer:
    """Writes the files of one unpacked archive into an empty directory."""

    def __init__(self, archive: Archive, stage: Path, platforms: Sequence[str], text: bool) -> None:
        self._archive, self._stage = archive, stage
        self._platforms, self._text = platforms, text
        self._files: list[str] = []

    def write(self) -> list[str]:
        """Write all files."""
        manifest = self._archive.manifest
        constants = [f"constants/{i}.bin" for i in range(len(manifest.constants))]
        for name, constant in zip(constants, manifest.constants, strict=True):
            self._add(name, self._archive.view(constant.member))
        tables = self._tables(manifest)
        written = self._modules(manifest)
        names = [self._results(function) for function in manifest.functions]
        try:
            made = layout.layout_of(manifest, self._platforms, constants, tables, written, names)
            readme = readme_of(made, manifest, self._archive.path.name)
        except (ArithmeticError, RecursionError) as error:
            raise ArtifactError(
                f"{self._archive.path}: manifest.json: its sizes cannot be computed "
                f"({in_one_line(error)}); the file is damaged or was altered"
            ) from None
        self._add(README, readme.encode())
        self._add(LAYOUT, _json(made))
        return self._files

    def _add(self, name: str, data: bytes | memoryview) -> str:
        path = self._stage / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self._files.append(name)
        return name

    def _tables(self, manifest: Manifest) -> dict[str, str]:
        members = [
            member
            for function in manifest.functions
            for program in function.programs
            if program.table is not None
            for member in program.table.members
        ]
        return {
            member: self._add(f"size_constants/{i}.bin", self._archive.read(member))
            for i, member in enumerate(members)
        }

    def _results(self, function: SavedFunction) -> list[str]:
        """The names of the results: where they stand in what the Python function returns."""
        count = len(function.programs[0].outputs)
        place = f"{self._archive.path}: {function.tree}"
        try:
            tree = modules.deserialized(self._archive.read(function.tree), place).out_tree
            nested = jax.tree_util.tree_unflatten(tree, range(count))
            found = [
                jax.tree_util.keystr(path) or "result"
                for path, _ in jax.tree_util.tree_flatten_with_path(nested)[0]
            ]
        except ArtifactError:  # a class of the user's, which is not registered here
            found = []
        return found if len(found) == count else [f"[{i}]" for i in range(count)]

    def _modules(self, manifest: Manifest) -> dict[str, Unpacked]:
        found: dict[str, Unpacked] = {}
        for order, function in enumerate(manifest.functions):
            folder = "function" if order == 0 else f"derivative{order}"
            for number, program in enumerate(function.programs):
                place = folder if len(function.programs) == 1 else f"{folder}/{number}"
                for i, bucket in enumerate(program.buckets):
                    found[bucket.module] = self._module(bucket, f"{place}/{_name(bucket, i)}")
        return found

    def _module(self, bucket: Bucket, name: str) -> Unpacked:
        raw = self._archive.read(bucket.module)
        place = f"{self._archive.path}: {bucket.module}"
        exported = modules.deserialized(raw, place)
        files: dict[str, str] = {}
        calls: dict[str, Sequence[str]] = {}
        for platform in self._platforms:
            artifact, module = _plain(raw, exported, platform, place)
            folder = "modules" if len(exported.platforms) == 1 else f"modules/{platform}"
            files[platform] = self._add(f"{folder}/{name}.mlirbc", artifact)
            calls[platform] = custom_call_targets(artifact)
            if self._text:
                text = stablehlo.text_of(module).rstrip("\n") + "\n"
                self._add(f"{folder}/{name}.mlir", text.encode())
        return Unpacked(
            files,
            stablehlo.arguments_of(module),
            stablehlo.results_of(module),
            calls,
        )


def _plain(
    raw: bytes, exported: jax.export.Exported, platform: str, place: str
) -> tuple[bytes, Module]:
    """An exported module for one platform, as a portable artifact of StableHLO alone."""
    artifact = bytes(exported.mlir_module_serialized)
    try:
        if len(exported.platforms) > 1:  # then the first argument is the number of the platform
            artifact = refine(raw, {}, platform)
        module = stablehlo.read_module(artifact)
        if without_sharding(module):
            artifact = stablehlo.write_module(module)
    except (BadModule, ExportError) as error:
        raise ArtifactError(f"{place}: it cannot be unpacked for {platform}: {error}") from error
    return artifact, module


def _name(bucket: Bucket, number: int) -> str:
    """The name of the files of a bucket."""
    name = ",".join(f"{variable}={size}" for variable, size in bucket.sizes.items())
    return name if name and name.isascii() and len(name) <= _LONGEST else f"bucket{number}"


def _json(value: Json) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
