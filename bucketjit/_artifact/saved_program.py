"""A program that was read from a file: its interface, and a module for each of its buckets."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.export  # an attribute of jax only after this import
import numpy as np

from bucketjit._artifact import modules
from bucketjit._artifact.archive import EXECUTABLES, Archive
from bucketjit._artifact.dtypes import dtype_of, from_bytes
from bucketjit._artifact.expressions import sides_of
from bucketjit._artifact.manifest import Axes, Bucket, SavedProgram, SizeTable
from bucketjit._compile.workarounds import Workarounds
from bucketjit._ir.computed_sizes import Computed
from bucketjit._ir.expressions import Shape, evaluate_text
from bucketjit._ir.guards import Guard
from bucketjit._ir.interface import Interface, SizeConstants
from bucketjit._ir.jax_patches import lenient_jax
from bucketjit._jax.config import eval_context
from bucketjit.errors import ArtifactError


class Source:
    """What is read from a file when it is loaded. What is wrong with it is found then.

    Attributes:
        archive: The file; it may be closed once its functions are made.
        path: Its path.
        manifest: What it holds.
        modules: Its modules by member, checked.
        constants: The arrays that programs close over, which all buckets share.
        executables: Its executables by member; none if the file is not trusted.
    """

    def __init__(self, archive: Archive, trusted: bool) -> None:
        self.archive, self.path, self.manifest = archive, archive.path, archive.manifest
        names = self.manifest.members
        self.modules = {
            name: modules.deserialized(archive.read(name), f"{self.path}: {name}", trusted)
            for name in names
            if name.endswith(".stablehlo")
        }
        self.executables = {
            name: archive.read(name) for name in names if trusted and name.startswith(EXECUTABLES)
        }
        # Inside of ``jit`` they would be tracers. `jnp.asarray` would compile for each shape.
        with eval_context():
            arrays = map(self._array, range(len(self.manifest.constants)))
            self.constants = [jax.device_put(x) for x in arrays]

    def _array(self, position: int) -> np.ndarray:
        record = self.manifest.constants[position]
        place = f"{self.path}: {record.member}"
        dtype = dtype_of(record.dtype, place)
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise ArtifactError(
                f"{place}: it is of {record.dtype}, and 64-bit types are off in this process; "
                "jax.config.update('jax_enable_x64', True) before the file is loaded"
            )
        return from_bytes(self.archive.view(record.member), dtype, record.shape, place)


@dataclass(frozen=True, eq=False, kw_only=True)
class LoadedProgram(Interface):
    """A program of a file.

    Attributes:
        record: What the manifest says of it.
        source: The file.
        constants: The arrays that it closes over.
    """

    record: SavedProgram
    source: Source
    constants: list[Any]

    def bucket(self, sizes: Mapping[str, int]) -> Bucket:
        """The record of a bucket."""
        return next(b for b in self.record.buckets if dict(b.sizes) == dict(sizes))

    @functools.cached_property
    def workarounds(self) -> Workarounds:
        """What XLA needs to compute its modules correctly."""
        return Workarounds(self.record.avoids_reductions)


@dataclass(frozen=True)
class LoadedPairing:
    """The concrete traces that a program was made from, as far as a file has them.

    Attributes:
        samples: The sizes that the traces were made at.
        why: Why the function was not traced with symbolic sizes.
        buckets: The buckets of the program.
        table: The constants that depend on the logical sizes; None if there are none.
        constants: Constants by logical sizes.
        variables: The variables of these.
    """

    samples: Sequence[Mapping[str, int]]
    why: str
    buckets: Sequence[Bucket]
    table: SizeTable | None
    constants: Mapping[tuple[int, ...], SizeConstants] = field(default_factory=dict)
    variables: tuple[str, ...] = ()
    nests_by_size: bool = False

    @property
    def num_size_constants(self) -> int:
        """How many constants depend on the logical sizes."""
        return 0 if self.table is None else len(self.table.members)

    def size_constants(self, sizes: Mapping[str, int]) -> SizeConstants | None:
        """The size constants at these logical sizes; None if the file has none."""
        if self.table is None:
            return SizeConstants()
        return self.constants.get(tuple(sizes[v] for v in self.variables))

    def unfitted_sizes(self, sizes: Mapping[str, int]) -> dict[str, int] | None:
        """The unfitted sizes of a bucket."""
        if self.table is None:
            return {}
        for bucket in self.buckets:
            if all(bucket.sizes[v] == sizes[v] for v in self.variables):
                return {name: bucket.sizes[name] for name in self.table.unfitted}
        return None


def loaded_program(source: Source, record: SavedProgram, out_tree: Any) -> LoadedProgram:
    """A program of a function."""
    place = f"{source.path}: manifest.json"
    guards = tuple(map(_guard, record.guards))
    with lenient_jax():
        scope = jax.export.SymbolicScope([str(g) for g in guards if g.op != "!="])
        shape_of = functools.partial(_shape, scope=scope)
        table = record.table
        program = LoadedProgram(
            in_shapes=tuple(map(shape_of, record.inputs)),
            out_shapes=tuple(shape_of(out.axes) for out in record.outputs),
            out_types=tuple((dtype_of(out.dtype, place), out.weak_type) for out in record.outputs),
            out_tree=out_tree,
            guards=guards,
            lower=record.lower,
            reshapes={(shape_of(a), shape_of(b)): "" for a, b in record.reshapes},
            computed={
                made.variable: Computed(str(made.bound[0]), made.line, made.is_checked)
                for made in record.computed
            },
            counts=record.counts,
            presumed=tuple(map(_guard, record.presumed)),
            roomy=record.roomy,
            unfitted=() if table is None else table.unfitted,
            size_constant_shapes=() if table is None else tuple(map(shape_of, table.axes)),
            pairing=_pairing(source, record) if record.samples or table is not None else None,
            record=record,
            source=source,
            constants=[source.constants[i] for i in record.constants],
        )
    if not record.buckets or out_tree.num_leaves != len(record.outputs):
        raise ValueError("its results do not fit its tree, or it has no bucket")
    for bucket in record.buckets:
        _check_module(program, bucket)
    return program


def _check_module(program: LoadedProgram, bucket: Bucket) -> None:
    """Refuse a bucket whose module takes or returns other arrays than the manifest tells."""
    record, module = program.record, program.source.modules[bucket.module]
    names, by_size = len(record.variables), len(program.size_constant_shapes)
    takes = [tuple(a.shape) for a in module.in_avals]
    before = [*(tuple(x.shape) for x in program.constants), (names,)]
    first = len(before) + by_size
    dtypes = [
        *(dtype for dtype, _ in program.out_types),
        *[np.dtype(np.int32)] * len(record.counts),
    ]
    returns = list(zip(bucket.results, dtypes, strict=True))
    ranks = [len(shape) for shape in (*program.in_shapes, *program.out_shapes)]
    told = [len(shape) for shape in (*bucket.arguments, *bucket.results[: len(record.outputs)])]
    if (
        bucket.sizes.keys() != set(record.variables)
        or takes[: len(before)] + takes[first:] != [*before, *bucket.arguments]
        or [(tuple(a.shape), a.dtype) for a in module.out_avals] != returns
        or ranks != told
    ):
        raise ValueError(f"{bucket.module} takes or returns other arrays than the manifest tells")


def _guard(text: str) -> Guard:
    sides = sides_of(text)
    assert sides is not None  # the manifest was checked
    return Guard(*sides)


def _shape(axes: Axes, scope: Any) -> Shape:
    if all(isinstance(axis, int) for axis in axes):
        return axes
    text = ", ".join(map(str, axes)) + ("," if len(axes) == 1 else "")
    return tuple(jax.export.symbolic_shape(text, scope=scope))


def shape_at(axes: Axes, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A shape at some sizes."""
    return tuple(axis if isinstance(axis, int) else evaluate_text(axis, sizes) for axis in axes)


def _pairing(source: Source, record: SavedProgram) -> LoadedPairing:
    table = record.table
    if table is None:
        return LoadedPairing(record.samples, record.why, record.buckets, None)
    own = record.variables[: len(record.variables) - len(table.unfitted)]
    columns = [list(_column(source, table, number, own)) for number in range(len(table.members))]
    rows = zip(table.rows, table.extra, strict=True)
    constants = {
        row: SizeConstants(extra, tuple(column[i] for column in columns))
        for i, (row, extra) in enumerate(rows)
    }
    return LoadedPairing(record.samples, record.why, record.buckets, table, constants, own)


def _column(
    source: Source, table: SizeTable, number: int, own: Sequence[str]
) -> Iterator[np.ndarray]:
    """The values of one tabulated constant, one for each row."""
    member = table.members[number]
    place = f"{source.path}: {member}"
    dtype, raw = dtype_of(table.dtypes[number], place), source.archive.view(member)
    for row, extra in zip(table.rows, table.extra, strict=True):
        sizes = dict(zip(itertools.chain(own, table.unfitted), (*row, *extra), strict=True))
        shape = shape_at(table.axes[number], sizes)
        size = int(np.prod(shape, dtype=object)) * int(dtype.itemsize)
        yield from_bytes(raw[:size], dtype, shape, place)
        raw = raw[size:]
    from_bytes(raw, dtype, (0,), place)  # nothing is left
