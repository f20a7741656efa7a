"""How to serve an unpacked file, as an object of JSON that programs in any language can follow.

It repeats what the manifest says, without what only bucketjit needs, and spelled out: every size is
a tree (see `size_trees`), every argument of a module has its kind, element type and padded shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bucketjit._artifact import manifest as manifests
from bucketjit._artifact.dtypes import dtype_of
from bucketjit._artifact.manifest import (
    Axes,
    Bucket,
    Manifest,
    SavedFunction,
    SavedProgram,
    SizeTable,
)
from bucketjit._events import shown
from bucketjit._jax.stablehlo import Tensor, element_of
from bucketjit._sizes.expressions import variables_of
from bucketjit._unpack.size_trees import comparison, product_of, solutions, tree_of, value_of
from bucketjit.errors import ArtifactError

FORMAT = "bucketjit-unpacked"
VERSION = 2

_KEY = "key:"  # the dtype of random keys begins with it

Json = dict[str, Any]


class Unpacked(NamedTuple):
    """What was written for a bucket.

    Attributes:
        modules: The file of its module for each platform.
        inputs: Types of the arguments of ``main``.
        outputs: Types of its results.
        custom_calls: What the module calls outside of itself, for each platform.
    """

    modules: Mapping[str, str]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    custom_calls: Mapping[str, Sequence[str]]


def layout_of(
    manifest: Manifest,
    platforms: Sequence[str],
    constants: Sequence[str],
    tables: Mapping[str, str],
    buckets: Mapping[str, Unpacked],
    names: Sequence[Sequence[str]],
) -> Json:
    """The layout of an unpacked file."""
    made = [
        {
            "file": file,
            **_kind(constant.dtype),
            "shape": list(constant.shape),
            "bytes": manifest.members[constant.member].size,
            "sha256": manifest.members[constant.member].sha256,
        }
        for file, constant in zip(constants, manifest.constants, strict=True)
    ]
    return {
        "format": FORMAT,
        "version": VERSION,
        "made_by": dict(manifest.versions),
        "platforms": list(platforms),
        "padding": 0,
        "constants": made,
        "functions": [
            _function(function, made, tables, buckets, results)
            for function, results in zip(manifest.functions, names, strict=True)
        ],
    }


def _function(
    function: SavedFunction,
    constants: Sequence[Json],
    tables: Mapping[str, str],
    buckets: Mapping[str, Unpacked],
    names: Sequence[str],
) -> Json:
    arguments: list[Json] = []
    for leaf in function.leaves:
        if leaf.dtype is None:
            arguments.append({"name": leaf.path, "is_size": True})
        else:
            arguments.append({"name": leaf.path, "is_size": False, **_kind(leaf.dtype)})
    first = function.programs[0]
    return {
        "name": function.name,
        "arguments": arguments,
        "results": [
            {"name": name, **_kind(out.dtype)}
            for name, out in zip(names, first.outputs, strict=True)
        ],
        "programs": [
            _Program(function, program, constants, tables, buckets).made()
            for program in function.programs
        ],
    }


def _kind(dtype: str) -> Json:
    """The dtype of the elements of an array; random keys are arrays of words."""
    dtype_of(dtype, manifests.NAME)
    if dtype.startswith(_KEY):
        return {"dtype": "uint32", "random_keys": dtype.removeprefix(_KEY)}
    return {"dtype": dtype}


class _Program:
    """Makes the object of one program."""

    def __init__(
        self,
        function: SavedFunction,
        program: SavedProgram,
        constants: Sequence[Json],
        tables: Mapping[str, str],
        buckets: Mapping[str, Unpacked],
    ) -> None:
        self._function, self._program = function, program
        self._constants, self._tables, self._buckets = constants, tables, buckets
        self._arrays = [i for i, leaf in enumerate(function.leaves) if leaf.dtype is not None]

    def made(self) -> Json:
        """The object."""
        program = self._program
        table = program.table
        listed = sorted(
            program.buckets, key=lambda b: (math.prod(b.sizes.values()), tuple(b.sizes.values()))
        )
        buckets = [self._bucket(bucket) for bucket in listed]
        # Words of random keys stand behind the sizes, so shapes are completed by the modules'.
        like = self._buckets[listed[0].module]
        arrays = like.inputs[len(like.inputs) - len(self._arrays) :]
        shapes: list[Any] = [tree_of(leaf.axes[0]) if leaf.axes else None for leaf in self._leaves]
        for position, axes, kind in zip(self._arrays, program.inputs, arrays, strict=True):
            shapes[position] = _shape(axes, kind)
        return {
            "variables": list(program.variables),
            "sizes": self._sizes(),
            "guards": self._guards(),
            "arguments": shapes,
            "results": [
                _shape(out.axes, kind)
                for out, kind in zip(program.outputs, like.outputs, strict=False)
            ],
            "size_constants": None if table is None else self._table(table),
            "computed_sizes": self._computed_sizes(),
            "presumed": [comparison(text) for text in program.presumed],
            "buckets": buckets,
        }

    def _computed_sizes(self) -> list[Json]:
        """The sizes that its modules return after the results."""
        program = self._program
        made = {one.variable: one for one in program.computed}
        known = {*program.variables, *program.counts}
        return [
            {
                "variable": variable,
                "output": len(program.outputs) + number,
                # The size that it is chosen from may be one that is not returned.
                "bound": tree_of(made[variable].bound[0])
                if known >= set(variables_of(str(made[variable].bound[0])))
                else None,
                "is_checked": made[variable].is_checked,
            }
            for number, variable in enumerate(program.counts)
        ]

    @property
    def _leaves(self) -> Any:
        return self._function.leaves

    def _sizes(self) -> list[Json]:
        """Where the size of each variable comes from."""
        table = self._program.table
        unfitted = () if table is None else table.unfitted
        # Not those of the program: where a guard fixes a size, they have its number.
        axes = [leaf.axes for leaf in self._leaves]
        found = solutions(axes, [v for v in self._program.variables if v not in unfitted])
        for place in found.values():
            if self._leaves[place["argument"]].dtype is None:
                place["axis"] = None  # the argument itself is the size
        return [{"variable": v, **place} for v, place in found.items()]

    def _guards(self) -> list[Json]:
        program = self._program
        lower = [f"{v} >= {program.lower.get(v, 1)}" for v in program.variables]
        guards = [comparison(text) for text in dict.fromkeys((*lower, *program.guards))]
        for before, after in program.reshapes:
            left, right = (" * ".join(f"({d})" for d in side) or "1" for side in (before, after))
            trees = {"left": product_of(before), "op": "==", "right": product_of(after)}
            guards.append({"text": f"{left} == {right}", **trees})
        return guards

    def _bucket(self, bucket: Bucket) -> Json:
        written = self._buckets[bucket.module]
        kinds = iter(written.inputs)
        inputs: list[Json] = []
        try:
            for position in self._program.constants:
                constant = self._constants[position]
                made = {"kind": "constant", "constant": position}
                inputs.append(made | _typed(next(kinds), constant["dtype"], constant["shape"]))
            made = {"kind": "sizes"}
            inputs.append(made | _typed(next(kinds), "int32", [len(self._program.variables)]))
            table = self._program.table
            for number, dtype in enumerate(() if table is None else table.dtypes):
                made = {"kind": "size_constant", "size_constant": number}
                inputs.append(made | _typed(next(kinds), dtype))
            for position, shape in zip(self._arrays, bucket.arguments, strict=True):
                made = {"kind": "argument", "argument": position}
                dtype = self._leaves[position].dtype
                inputs.append(made | _typed(next(kinds), dtype, shape))
            dtypes = [out.dtype for out in self._program.outputs]
            dtypes += ["int32"] * len(self._program.counts)
            outputs = [
                _typed(kind, dtype, shape)
                for kind, dtype, shape in zip(written.outputs, dtypes, bucket.results, strict=True)
            ]
            if next(kinds, None) is not None:
                raise ValueError("there are more")
        except (ValueError, StopIteration) as error:
            raise ArtifactError(
                f"{bucket.module}: its arguments or results are not those of manifest.json "
                f"({error}); the file is damaged or was altered"
            ) from None
        return {
            "sizes": dict(bucket.sizes),
            "name": shown(bucket.sizes) or "all",
            "modules": dict(written.modules),
            "inputs": inputs,
            "outputs": outputs,
            "custom_calls": {p: list(names) for p, names in written.custom_calls.items()},
        }

    def _table(self, table: SizeTable) -> Json:
        own = [v for v in self._program.variables if v not in table.unfitted]
        itemsizes = [dtype_of(dtype, manifests.NAME).itemsize for dtype in table.dtypes]
        offsets = [0] * len(table.members)
        rows: list[Json] = []
        for row, extra in zip(table.rows, table.extra, strict=True):
            rows.append({"sizes": list(row), "more_sizes": list(extra), "offsets": list(offsets)})
            at = dict(zip((*own, *table.unfitted), (*row, *extra), strict=True))
            for number, axes in enumerate(table.axes):
                count = math.prod(value_of(tree_of(axis), at) for axis in axes)
                offsets[number] += count * itemsizes[number]
        return {
            "arrays": [
                {"file": self._tables[member], "dtype": dtype, "shape": list(map(tree_of, axes))}
                for member, dtype, axes in zip(table.members, table.dtypes, table.axes, strict=True)
            ],
            "variables": own,
            "more_variables": list(table.unfitted),
            "rows": rows,
        }


def _shape(axes: Axes, kind: Tensor) -> list[Any]:
    return [*map(tree_of, axes), *kind.shape[len(axes) :]]


def _typed(kind: Tensor, dtype: str, shape: Sequence[int] | None = None) -> Json:
    """The type of an argument or result of a module, which the manifest gives this type."""
    plain = _kind(dtype)["dtype"]
    fits = kind.element == element_of(dtype_of(plain, manifests.NAME))
    if not (fits and kind.is_static):
        raise ValueError(f"{kind} where the type is {dtype}")
    if shape is not None and list(kind.shape[: len(shape)]) != list(shape):
        raise ValueError(f"{kind} where the shape is {list(shape)}")
    return {"element": kind.element, "shape": list(kind.shape)}
