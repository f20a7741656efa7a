"""A program that was read from a file: its interface, and a module for each of its buckets."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.export  # an attribute of jax only after this import
import numpy as np

from bucketjit._artifact import modules
from bucketjit._artifact.archive import EXECUTABLES
from bucketjit._artifact.dtypes import dtype_of, from_bytes
from bucketjit._artifact.expressions import sides_of
from bucketjit._artifact.manifest import (
    Axes,
    Bucket,
    Manifest,
    SavedFunction,
    SavedProgram,
    SizeTable,
)
from bucketjit._inspect.explain import MaskedEquation
from bucketjit._ir.computed_sizes import Computed
from bucketjit._ir.jax_patches import lenient_jax
from bucketjit._jax.transformations import eval_context
from bucketjit._raised import in_one_line
from bucketjit._sizes.expressions import Shape, evaluate_text
from bucketjit._sizes.guards import Guard
from bucketjit._tracing.interface import Interface, SizeConstants
from bucketjit.errors import ArtifactError


class Members(Protocol):
    """The members of a file: an `Archive`, or those of a file that is being written."""

    path: Path
    manifest: Manifest

    def read(self, name: str) -> bytes:
        """The bytes of a member."""

    def view(self, name: str) -> memoryview:
        """The bytes of a constant, in place."""

    def close(self) -> None:
        """Free them."""


class Source:
    """An open file, and what was read from it so far. Safe to use from several threads.

    Attributes:
        archive: See above.
        trusted: See above.
    """

    def __init__(self, archive: Members, trusted: bool) -> None:
        self.archive = archive
        self.trusted = trusted
        self._lock = threading.Lock()
        self._constants: dict[int, Any] = {}
        self._modules: dict[str, jax.export.Exported] = {}
        self._executables: dict[str, bytes] = {}

    def module(self, member: str) -> jax.export.Exported:
        """The module of a member, checked."""
        with self._lock:
            if member not in self._modules:
                place = f"{self.archive.path}: {member}"
                raw = self.archive.read(member)
                self._modules[member] = modules.deserialized(raw, place, self.trusted)
            return self._modules[member]

    def read_all(self) -> None:
        """Read all that may be used, so that what is wrong with the file is found at once.

        Nothing more is read later.
        """
        for name in self.archive.manifest.members:
            if name.endswith(".stablehlo"):
                self.module(name)
            elif name.startswith(EXECUTABLES) and self.trusted:
                self._executables[name] = self.archive.read(name)
        self.constants(range(len(self.archive.manifest.constants)))
        self.archive.close()

    def executable(self, member: str) -> bytes | None:
        """The bytes of an executable; None if the file is not trusted."""
        return self._executables.get(member)

    def constants(self, positions: Sequence[int]) -> list[Any]:
        """The constants at some positions, as arrays of JAX that all buckets share."""
        # Inside of ``jit`` they would be tracers, of no use to later calls.
        with self._lock, eval_context():
            for i in positions:
                if i not in self._constants:
                    # `jnp.asarray` would compile a program for each shape.
                    self._constants[i] = jax.device_put(self._array(i))
            return [self._constants[i] for i in positions]

    def _array(self, position: int) -> np.ndarray:
        record = self.archive.manifest.constants[position]
        place = f"{self.archive.path}: {record.member}"
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
    """

    record: SavedProgram
    source: Source

    def bucket(self, sizes: Mapping[str, int]) -> Bucket:
        """The record of a bucket."""
        return next(b for b in self.record.buckets if dict(b.sizes) == dict(sizes))

    @functools.cached_property
    def constants(self) -> list[Any]:
        """The arrays that it closes over."""
        return self.source.constants(self.record.constants)

    @property
    def masked(self) -> tuple[MaskedEquation, ...]:
        """The equations that are masked."""
        return tuple(
            MaskedEquation(e.primitive, e.sizes, e.how, e.fills, e.where)
            for e in self.record.masked
        )


@dataclass(frozen=True)
class LoadedPairing:
    """The concrete traces that a program was made from, as far as a file has them.

    Attributes:
        samples: The sizes that the traces were made at.
        why: Why the function was not traced with symbolic sizes.
        buckets: The buckets of the program.
        table: The constants that depend on the logical sizes; None if there are none.
        constants: Constants by logical sizes.
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


def loaded_programs(source: Source, function: SavedFunction) -> list[LoadedProgram]:
    """The programs of a function."""
    out_tree = source.module(function.tree).out_tree
    return [_program(source, record, out_tree) for record in function.programs]


def _program(source: Source, record: SavedProgram, out_tree: Any) -> LoadedProgram:
    place = f"{source.archive.path}: manifest.json"
    if out_tree.num_leaves != len(record.outputs):
        raise ArtifactError(f"{place}: the tree of the results does not fit their number")
    guards = tuple(map(_guard, record.guards))
    try:
        with lenient_jax():
            scope = jax.export.SymbolicScope([str(g) for g in guards if g.op != "!="])
            shape_of = functools.partial(_shape, scope=scope)
            in_shapes = tuple(map(shape_of, record.inputs))
            out_shapes = tuple(shape_of(out.axes) for out in record.outputs)
            reshapes = tuple((shape_of(a), shape_of(b)) for a, b in record.reshapes)
            table = record.table
            by_size = () if table is None else tuple(map(shape_of, table.axes))
    except Exception as error:
        raise ArtifactError(f"{place}: its sizes cannot be read: {in_one_line(error)}") from error
    pairing = None
    if record.samples or table is not None:
        pairing = _pairing(source, record)
    return LoadedProgram(
        in_shapes=in_shapes,
        out_shapes=out_shapes,
        out_types=tuple((dtype_of(out.dtype, place), out.weak_type) for out in record.outputs),
        out_tree=out_tree,
        guards=guards,
        lower=record.lower,
        reshapes=reshapes,
        computed={
            made.variable: Computed(str(made.bound[0]), made.line, made.is_checked)
            for made in record.computed
        },
        counts=record.counts,
        presumed=tuple(map(_guard, record.presumed)),
        unfitted=() if table is None else table.unfitted,
        size_constant_shapes=by_size,
        pairing=pairing,
        record=record,
        source=source,
    )


def _guard(text: str) -> Guard:
    sides = sides_of(text)
    assert sides is not None  # the manifest was checked
    return Guard(*sides)


def _shape(axes: Axes, scope: Any) -> Shape:
    if all(isinstance(axis, int) for axis in axes):
        return axes
    text = ", ".join(map(str, axes)) + ("," if len(axes) == 1 else "")
    return tuple(jax.export.symbolic_shape(text, scope=scope))


def _pairing(source: Source, record: SavedProgram) -> LoadedPairing:
    table = record.table
    if table is None:
        return LoadedPairing(record.samples, record.why, record.buckets, None)
    count = len(record.variables) - len(table.unfitted)
    own = record.variables[:count]
    columns = [
        list(_rows(source, record, table, number, own)) for number in range(len(table.members))
    ]
    rows = zip(table.rows, table.extra, strict=True)
    constants = {
        row: SizeConstants(extra, tuple(column[i] for column in columns))
        for i, (row, extra) in enumerate(rows)
    }
    return LoadedPairing(record.samples, record.why, record.buckets, table, constants, own)


def _rows(
    source: Source, record: SavedProgram, table: SizeTable, number: int, own: Sequence[str]
) -> Any:
    """The values of one tabulated constant, one for each row."""
    member = table.members[number]
    place = f"{source.archive.path}: {member}"
    dtype, raw = dtype_of(table.dtypes[number], place), memoryview(source.archive.read(member))
    begin = 0
    for row, extra in zip(table.rows, table.extra, strict=True):
        sizes = dict(zip(itertools.chain(own, table.unfitted), (*row, *extra), strict=True))
        shape = tuple(
            axis if isinstance(axis, int) else evaluate_text(axis, sizes)
            for axis in table.axes[number]
        )
        end = begin + int(np.prod(shape, dtype=object)) * int(dtype.itemsize)
        if min(shape, default=0) < 0 or end > len(raw):
            raise ArtifactError(f"{place}: it has fewer values than its table; it is damaged")
        yield from_bytes(raw[begin:end], dtype, shape, place)
        begin = end
    if begin != len(raw):
        raise ArtifactError(f"{place}: it has more values than its table; it is damaged")
