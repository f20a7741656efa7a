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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from bucketjit._artifact import manifest as manifests
from bucketjit._artifact import modules
from bucketjit._artifact.archive import Archive
from bucketjit._artifact.dtypes import dtype_of
from bucketjit._artifact.manifest import Bucket, SavedFunction, SavedProgram, SizeTable
from bucketjit._jax import stablehlo
from bucketjit._jax.sharding_free import without_sharding
from bucketjit._jax.stablehlo import BadModule, Module, Tensor, custom_call_targets
from bucketjit._stages.refine import refine
from bucketjit.errors import ArtifactError, ExportError

LAYOUT = "layout.json"

_KEY = "key:"  # the dtype of random keys begins with it
_LONGEST = 100  # characters in the name of a module's file

Json = dict[str, Any]


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

    A failure leaves the directory as it was: files are replaced after all new ones are complete,
    and ``layout.json`` comes last.
    """
    known = archive.manifest.platforms
    if platform is not None and platform not in known:
        raise ArtifactError(
            f"{archive.path} has modules for {', '.join(known)}, not for {platform!r}; save it "
            f"with platforms=[..., {platform!r}]"
        )
    if directory.is_symlink() or directory.exists():
        if not directory.is_dir():
            raise ArtifactError(f"{directory} is no directory; name another one")
        if not force and any(directory.iterdir()):
            raise ArtifactError(
                f"{directory} is not empty; name another directory, or write into it with --force"
            )
    files = _Unpacked(archive, known if platform is None else (platform,), text).files
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
    return Written(tuple(files), sum(map(len, files.values())))


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
            "version": 3,
            "made_by": dict(manifest.versions),
            "platforms": list(platforms),
            "padding": 0,
            "constants": [
                self._array(f"constants/{i}.bin", one.member, one.dtype, one.shape)
                for i, one in enumerate(manifest.constants)
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

    def _array(self, name: str, member: str, dtype: str, shape: Sequence[int | str]) -> Json:
        file = self._add(name, self._archive.view(member))
        return {"file": file, **_kind(dtype), "shape": list(shape)}

    def _function(self, function: SavedFunction, folder: str) -> Json:
        several = len(function.programs) > 1
        outputs = function.programs[0].outputs
        return {
            "name": function.name,
            "arguments": [
                {"name": x.path, **({"is_size": True} if x.dtype is None else _kind(x.dtype))}
                for x in function.leaves
            ],
            "results": [
                {"name": name, **_kind(out.dtype)}
                for name, out in zip(self._results(function), outputs, strict=True)
            ],
            "programs": [
                self._program(function, program, f"{folder}/{i}" if several else folder)
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

    def _program(self, function: SavedFunction, program: SavedProgram, folder: str) -> Json:
        lower = [f"{v} >= {program.lower.get(v, 1)}" for v in program.variables]
        reshapes = [f"{_product(a)} == {_product(b)}" for a, b in program.reshapes]
        made = {one.variable: one for one in program.computed}
        ordered = sorted(program.buckets, key=lambda b: math.prod(b.sizes.values()))
        buckets = [
            self._bucket(function, program, bucket, f"{folder}/{_name(bucket, i)}")
            for i, bucket in enumerate(ordered)
        ]
        # The words of random keys stand behind the sizes, in the modules alone.
        given = {x["argument"]: x["shape"] for x in buckets[0]["inputs"] if "argument" in x}
        pairs = zip(program.outputs, buckets[0]["outputs"], strict=False)
        table = program.table
        return {
            "variables": list(program.variables),
            "guards": list(dict.fromkeys((*lower, *program.guards, *reshapes))),
            "arguments": [
                [*leaf.axes, *given.get(i, ())[len(leaf.axes) :]]
                for i, leaf in enumerate(function.leaves)
            ],
            "results": [[*out.axes, *one["shape"][len(out.axes) :]] for out, one in pairs],
            "size_constants": None if table is None else self._table(table, folder),
            "computed_sizes": [
                {
                    "variable": variable,
                    "output": len(program.outputs) + number,
                    "bound": str(made[variable].bound[0]),
                    "is_checked": made[variable].is_checked,
                }
                for number, variable in enumerate(program.counts)
            ],
            "presumed": list(program.presumed),
            "buckets": buckets,
        }

    def _table(self, table: SizeTable, folder: str) -> Json:
        columns = zip(table.members, table.dtypes, table.axes, strict=True)
        rows = zip(table.rows, table.extra, strict=True)
        return {
            "arrays": [
                self._array(f"size_constants/{folder}/{i}.bin", *column)
                for i, column in enumerate(columns)
            ],
            "more_variables": list(table.unfitted),
            "rows": [{"sizes": list(row), "more_sizes": list(extra)} for row, extra in rows],
        }

    def _bucket(
        self, function: SavedFunction, program: SavedProgram, bucket: Bucket, name: str
    ) -> Json:
        raw = self._archive.read(bucket.module)
        place = f"{self._archive.path}: {bucket.module}"
        exported = modules.deserialized(raw, place)
        files: dict[str, str] = {}
        calls: dict[str, list[str]] = {}
        for platform in self._platforms:
            artifact, module = _plain(raw, exported, platform, place)
            at = "modules" if len(exported.platforms) == 1 else f"modules/{platform}"
            files[platform] = self._add(f"{at}/{name}.mlirbc", artifact)
            calls[platform] = custom_call_targets(artifact)
            if self._text:
                self._add(f"{at}/{name}.mlir", stablehlo.text_of(module).encode())
        constants = self._archive.manifest.constants
        dtypes = () if program.table is None else program.table.dtypes
        kinds: list[tuple[Mapping[str, int], str, str]] = [
            *(({"constant": i}, "constant", constants[i].dtype) for i in program.constants),
            ({}, "sizes", "int32"),
            *(({"size_constant": i}, "size_constant", d) for i, d in enumerate(dtypes)),
            *(
                ({"argument": i}, "argument", leaf.dtype)
                for i, leaf in enumerate(function.leaves)
                if leaf.dtype is not None
            ),
        ]
        outputs = [*(out.dtype for out in program.outputs), *("int32" for _ in program.counts)]
        taken, returned = stablehlo.arguments_of(module), stablehlo.results_of(module)
        try:
            for tensor, shape in zip(reversed(taken), reversed(bucket.arguments), strict=False):
                if tuple(tensor.shape[: len(shape)]) != tuple(shape):
                    raise ValueError(f"{tensor} where the shape is {list(shape)}")
            return {
                "sizes": dict(bucket.sizes),
                "modules": files,
                "custom_calls": calls,
                "inputs": [
                    {"kind": kind, **which, **_typed(tensor, dtype)}
                    for (which, kind, dtype), tensor in zip(kinds, taken, strict=True)
                ],
                "outputs": [_typed(*pair) for pair in zip(returned, outputs, strict=True)],
            }
        except ValueError as error:
            raise ArtifactError(
                f"{place}: its arguments or results are not those of manifest.json ({error}); the "
                "file is damaged or was altered"
            ) from None


def _kind(dtype: str) -> Json:
    """The dtype of the elements of an array; random keys are arrays of words."""
    dtype_of(dtype, manifests.NAME)
    if dtype.startswith(_KEY):
        return {"dtype": "uint32", "random_keys": dtype.removeprefix(_KEY)}
    return {"dtype": dtype}


def _typed(tensor: Tensor, dtype: str) -> Json:
    """The type of an argument or result of a module, which the manifest gives this dtype."""
    plain = _kind(dtype)["dtype"]
    element = stablehlo.element_of(dtype_of(plain, manifests.NAME))
    if tensor.element != element or not tensor.is_static:
        raise ValueError(f"{tensor} where the type is {dtype}")
    return {"dtype": plain, "element": element, "shape": list(tensor.shape)}


def _product(axes: Sequence[int | str]) -> str:
    return " * ".join(f"({axis})" for axis in axes) or "1"


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
    """The name of the files of a bucket."""
    name = ",".join(f"{variable}={size}" for variable, size in bucket.sizes.items())
    return name if name and name.isascii() and len(name) <= _LONGEST else f"bucket{number}"
