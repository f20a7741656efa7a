"""Unpack a ``.bkt`` file into plain StableHLO modules, raw constants, and how to serve with them.

    model.bkt   ->   model/layout.json
                     model/constants/0.bin, 1.bin, ...
                     model/modules/function/n=8.mlirbc, n=16.mlirbc, ...

A program in another language needs nothing else; docs/other_languages.md describes ``layout.json``.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from bucketjit._artifact.archive import Archive
from bucketjit._artifact.manifest import Bucket, SavedFunction, SavedProgram
from bucketjit._jax import stablehlo
from bucketjit._jax.arrays import is_key, key_shape
from bucketjit._jax.stablehlo import BadModule, Module, custom_call_targets
from bucketjit._stages.modules import saved as modules
from bucketjit._stages.modules.building import without_sharding
from bucketjit._stages.modules.dynamic import refine
from bucketjit.errors import ArtifactError, ExportError

LAYOUT = "layout.json"

_LONGEST = 100  # characters in the name of a module's file

Json = dict[str, Any]


def unpack(
    archive: Archive,
    directory: Path,
    platform: str | None = None,
    text: bool = False,
    force: bool = False,
) -> dict[str, int]:
    """Write what a file holds into a directory, for programs without Python.

    Returns the bytes of each file, by its name in the directory, in the order of writing.
    A failure leaves the directory as it was: files are replaced after all new ones are complete,
    and ``layout.json`` comes last.
    """
    platforms = archive.manifest.platforms
    if platform is not None and platform not in platforms:
        raise ArtifactError(
            f"{archive.path} has modules for {', '.join(platforms)}, not for {platform!r}; save it "
            f"with platforms=[..., {platform!r}]"
        )
    if directory.is_symlink() or directory.exists():
        if not directory.is_dir():
            raise ArtifactError(f"{directory} is no directory; name another one")
        if not force and any(directory.iterdir()):
            raise ArtifactError(
                f"{directory} is not empty; name another directory, or write into it with --force"
            )
    files = _Unpacked(archive, platforms if platform is None else (platform,), text).files
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=directory.parent) as stage:
        for name, data in files.items():
            (Path(stage) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(stage) / name).write_bytes(data)
        directory.mkdir(exist_ok=True)
        (directory / LAYOUT).unlink(missing_ok=True)  # it would describe a mixture
        for name in files:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(stage) / name, directory / name)
    return {name: len(data) for name, data in files.items()}


class _Unpacked:
    """The files of one archive.

    Attributes:
        files: The bytes of each file; the layout is the last.
    """

    def __init__(self, archive: Archive, platforms: Sequence[str], text: bool) -> None:
        self._archive, self._platforms, self._text = archive, platforms, text
        self.files: dict[str, bytes | memoryview] = {}
        manifest = archive.manifest
        layout = {
            "format": "bucketjit-unpacked",
            "version": 4,
            "made_by": dict(manifest.versions),
            "platforms": list(platforms),
            "padding": 0,
            "constants": [
                {**_some(c, "dtype", "shape"), "file": self._array("constants", i, c.member)}
                for i, c in enumerate(manifest.constants)
            ],
            "functions": [
                self._function(function, f"derivative{order}" if order else "function")
                for order, function in enumerate(manifest.functions)
            ],
        }
        self._add(LAYOUT, (json.dumps(layout, indent=1) + "\n").encode())

    def _add(self, name: str, data: bytes | memoryview) -> str:
        self.files[name] = data
        return name

    def _array(self, folder: str, number: int, member: str) -> str:
        return self._add(f"{folder}/{number}.bin", self._archive.view(member))

    def _function(self, function: SavedFunction, folder: str) -> Json:
        several = len(function.programs) > 1
        return {
            **_some(function, "name", "leaves"),
            "results": self._results(function),
            "programs": [
                self._program(program, f"{folder}/{i}" if several else folder)
                for i, program in enumerate(function.programs)
            ],
        }

    def _results(self, function: SavedFunction) -> list[str]:
        """The names of the results: where they stand in what the Python function returns."""
        count = len(function.programs[0].outputs)
        place = f"{self._archive.path}: {function.tree}"
        try:
            tree = modules.deserialized(self._archive.read(function.tree), place).out_tree
            nested = jax.tree_util.tree_unflatten(tree, range(count))
        except (ArtifactError, ValueError):  # a class of the user's, which is not registered here
            return [f"[{i}]" for i in range(count)]
        paths = jax.tree_util.tree_flatten_with_path(nested)[0]
        return [jax.tree_util.keystr(path) or "result" for path, _ in paths]

    def _program(self, program: SavedProgram, folder: str) -> Json:
        table: Json | None = None
        if program.table is not None:
            table = _some(program.table, "axes", "dtypes", "unfitted", "rows", "extra")
            members = enumerate(program.table.members)
            table["files"] = [self._array(f"size_constants/{folder}", *pair) for pair in members]
        ordered = sorted(program.buckets, key=lambda b: math.prod(b.sizes.values()))
        return {
            **_some(program, "variables", "lower", "guards", "reshapes", "outputs", "constants"),
            **_some(program, "computed", "counts", "presumed"),
            "table": table,
            "buckets": [
                self._bucket(bucket, f"{folder}/{_name(bucket, i)}")
                for i, bucket in enumerate(ordered)
            ],
        }

    def _bucket(self, bucket: Bucket, name: str) -> Json:
        raw = self._archive.read(bucket.module)
        place = f"{self._archive.path}: {bucket.module}"
        exported = modules.deserialized(raw, place)
        record: Json = {
            "sizes": dict(bucket.sizes),
            "inputs": [_typed(aval) for aval in exported.in_avals],
            "outputs": [_typed(aval) for aval in exported.out_avals],
            "modules": {},
            "custom_calls": {},
        }
        for platform in self._platforms:
            artifact, module = _plain(raw, exported, platform, place)
            folder = "modules" if len(exported.platforms) == 1 else f"modules/{platform}"
            record["modules"][platform] = self._add(f"{folder}/{name}.mlirbc", artifact)
            record["custom_calls"][platform] = custom_call_targets(artifact)
            if self._text:
                self._add(f"{folder}/{name}.mlir", str(module).encode())
        return record


def _typed(aval: Any) -> Json:
    """The type of an input or an output of a module; random keys are arrays of words."""
    has_keys = is_key(aval)
    words = key_shape(aval.dtype) if has_keys else ()
    return {"dtype": "uint32" if has_keys else aval.dtype.name, "shape": [*aval.shape, *words]}


def _some(record: Any, *fields: str) -> Json:
    return {field: value for field, value in asdict(record).items() if field in fields}


def _plain(raw: bytes, exported: Any, platform: str, place: str) -> tuple[bytes, Module]:
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
    name = ",".join(f"{variable}={size}" for variable, size in bucket.sizes.items())
    return name if name and name.isascii() and len(name) <= _LONGEST else f"bucket{number}"
