"""A program that was read from a file: its interface, and a module or an executable of a bucket."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.export
import numpy as np

from bucketjit._artifact.archive import EXECUTABLES, Archive, dtype_of, from_bytes
from bucketjit._artifact.manifest import Axes, Bucket, SavedProgram, SizeTable, guard_of
from bucketjit._compile.argument_types import Body, Transform, device_of, without_values
from bucketjit._compile.bodies import Options
from bucketjit._compile.executable import Executable, Pads
from bucketjit._compile.files.environment import environment
from bucketjit._compile.files.fingerprint import digest
from bucketjit._compile.kernel import Kernel, exact_kernel, kernel, loaded
from bucketjit._compile.workarounds import Workarounds
from bucketjit._config import Config
from bucketjit._events import shown
from bucketjit._ir.expressions import Shape, evaluate_text
from bucketjit._ir.interface import Computed, Interface, SizeConstants
from bucketjit._ir.jax_patches import lenient_jax
from bucketjit._jax.arrays import with_type
from bucketjit._jax.config import eval_context
from bucketjit._jax.serialization import NotPlain, Placement, deserialized
from bucketjit._raised import WithoutErrors
from bucketjit._stages.modules import saved as modules
from bucketjit._tracing.call import Call
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
    """A program of a file, whose manifest has its ``record``; it closes over ``constants``."""

    record: SavedProgram
    source: Source
    constants: list[Any]

    def bucket(self, sizes: Mapping[str, int]) -> Bucket:
        return next(b for b in self.record.buckets if dict(b.sizes) == dict(sizes))

    @functools.cached_property
    def workarounds(self) -> Workarounds:
        """What XLA needs to compute its modules correctly."""
        return Workarounds(self.record.avoids_reductions)


@dataclass(frozen=True)
class LoadedPairing:
    """The concrete traces that a program was made from, as far as a file has them."""

    samples: Sequence[Mapping[str, int]]
    why: str
    buckets: Sequence[Bucket]
    table: SizeTable | None
    constants: Mapping[tuple[int, ...], SizeConstants] = field(default_factory=dict)
    variables: tuple[str, ...] = ()
    nests_by_size: bool = False

    @property
    def num_size_constants(self) -> int:
        return 0 if self.table is None else len(self.table.members)

    def size_constants(self, sizes: Mapping[str, int]) -> SizeConstants | None:
        """The size constants at these logical sizes; None if the file has none."""
        if self.table is None:
            return SizeConstants()
        return self.constants.get(tuple(sizes[v] for v in self.variables))

    def unfitted_sizes(self, sizes: Mapping[str, int]) -> dict[str, int] | None:
        if self.table is None:
            return {}
        for bucket in self.buckets:
            if all(bucket.sizes[v] == sizes[v] for v in self.variables):
                return {name: bucket.sizes[name] for name in self.table.unfitted}
        return None


def loaded_program(source: Source, record: SavedProgram, out_tree: Any) -> LoadedProgram:
    place = f"{source.path}: manifest.json"
    guards = tuple(map(guard_of, record.guards))
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
                size.variable: Computed(str(size.bound[0]), size.line, size.is_checked)
                for size in record.computed
            },
            counts=record.counts,
            presumed=tuple(map(guard_of, record.presumed)),
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
    padded = (*bucket.arguments, *bucket.results[: len(record.outputs)])
    if (
        bucket.sizes.keys() != set(record.variables)
        or takes[: len(before)] + takes[first:] != [*before, *bucket.arguments]
        or [(tuple(a.shape), a.dtype) for a in module.out_avals] != returns
        or ranks != list(map(len, padded))
    ):
        raise ValueError(f"{bucket.module} takes or returns other arrays than the manifest tells")


def _shape(axes: Axes, scope: Any) -> Shape:
    if all(isinstance(axis, int) for axis in axes):
        return axes
    text = ", ".join(map(str, axes)) + ("," if len(axes) == 1 else "")
    return tuple(jax.export.symbolic_shape(text, scope=scope))


def shape_at(axes: Axes, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(axis if isinstance(axis, int) else evaluate_text(axis, sizes) for axis in axes)


def _pairing(source: Source, record: SavedProgram) -> LoadedPairing:
    table = record.table
    if table is None:
        return LoadedPairing(record.samples, record.why, record.buckets, None)
    variables = record.variables[: len(record.variables) - len(table.unfitted)]
    columns = [list(_column(source, table, i, variables)) for i in range(len(table.members))]
    rows = zip(table.rows, table.extra, strict=True)
    constants = {
        row: SizeConstants(extra, tuple(column[i] for column in columns))
        for i, (row, extra) in enumerate(rows)
    }
    return LoadedPairing(record.samples, record.why, record.buckets, table, constants, variables)


def _column(
    source: Source, table: SizeTable, number: int, variables: Sequence[str]
) -> Iterator[np.ndarray]:
    """The values of one tabulated constant, one for each row."""
    member = table.members[number]
    place = f"{source.path}: {member}"
    dtype, raw = dtype_of(table.dtypes[number], place), source.archive.view(member)
    for row, extra in zip(table.rows, table.extra, strict=True):
        sizes = dict(zip(itertools.chain(variables, table.unfitted), (*row, *extra), strict=True))
        shape = shape_at(table.axes[number], sizes)
        size = int(np.prod(shape, dtype=object)) * int(dtype.itemsize)
        yield from_bytes(raw[:size], dtype, shape, place)
        raw = raw[size:]
    from_bytes(raw, dtype, (0,), place)  # nothing is left


# --- saved executables ---

# The bodies of kernels from the modules of a file, and executables that the file has.


OF_BACKENDS = {"gpu": "cuda"}  # what JAX calls platforms of devices, and of modules


class SavedBodies:
    """The bodies of a function that was saved in a file: the modules of its buckets."""

    def __init__(self, config: Config, rules: object) -> None:
        self._check = config.check

    def workarounds(self, program: Interface) -> Workarounds:
        """What XLA needs besides; what hooks add is in the modules already."""
        assert isinstance(program, LoadedProgram)
        return program.workarounds

    def in_bucket(
        self, call: Call, bucket: Mapping[str, int], transform: Transform, options: Options
    ) -> Kernel:
        program = call.program
        assert isinstance(program, LoadedProgram)
        record = program.bucket(bucket)
        arrays = [i for i, kind in enumerate(call.signature.types) if kind.dtype is not None]
        opened = call.signature.open_leaves(call.tokens)
        shapes = zip(arrays, record.arguments, strict=True)
        pads: Pads = tuple((i, shape) for i, shape in shapes if i in opened)

        def body(shared: Sequence[Any]) -> Body:
            def run(
                vector: Any, constants: Sequence[Any], arrays: Sequence[Any], poison: object = None
            ) -> list[Any]:
                return _called(
                    program, record.module, list(shared), vector, list(constants), arrays
                )

            return run

        _check_platform(program, call)
        of_xla = options(program.workarounds.options())
        how = call, record.sizes, pads, self._check, of_xla
        return kernel(transform, body, *how, program.constants)

    def exact(self, call: Call, sizes: Mapping[str, int], options: Options) -> Kernel:
        """The kernel of an exact shape: the module of all sizes serves these calls."""
        program = call.signature.resolve(call.shapes).program
        if not isinstance(program, LoadedProgram):
            raise ArtifactError(
                f"a call with {shown(sizes)}: a saved function takes no call in which all open "
                "axes are of size 0; call it with at least one element"
            )
        member = program.record.dynamic
        assert member is not None
        kinds = call.signature.types

        def run(shared: Sequence[Any], leaves: list[Any], tree: Any) -> Any:
            arrays = [x for x, kind in zip(leaves, kinds, strict=True) if kind.dtype is not None]
            return program.out_tree.unflatten(_called(program, member, list(shared), arrays))

        of_xla = options(program.workarounds.options())
        return exact_kernel(call, run, sizes, call.donate, of_xla, program.constants)

    def place(self, files: object) -> InFile:
        return InFile()


def _called(program: LoadedProgram, member: str, *args: Any) -> list[Any]:
    """The results of a module, with the types of the program; then the counts."""
    outs = program.source.modules[member].call(*args)
    types = program.out_types
    typed = [with_type(x, d, weak) for x, (d, weak) in zip(outs, types, strict=False)]
    return [*typed, *outs[len(types) :]]


def _check_platform(program: LoadedProgram, call: Call) -> None:
    """Refuse a call on a platform that the file has no modules for, before anything is compiled."""
    try:
        device = device_of(without_values(call).leaves)
    except NotPlain:  # on several devices; JAX says why that does not work
        return
    platform = OF_BACKENDS.get(device.platform, device.platform)
    saved = program.source.manifest.platforms
    if platform not in saved:
        raise ArtifactError(
            f"{program.source.path}: it was saved for {', '.join(saved)}, and the call runs on "
            f"{platform}; save it with platforms=[..., {platform!r}]"
        )


def environment_digest(device: jax.Device) -> str:
    """A digest of what an executable for a device depends on besides its program."""
    return digest(sorted(environment(device).items()))[:32]


class InFile:
    """The place of a bucket's executable in the file."""

    def load(self, make: Callable[[], Kernel]) -> Executable | None:
        """The executable; None if the file has none for this machine and these versions."""
        began, kernel = time.perf_counter(), make()
        program = kernel.call.program
        if kernel.is_exact:
            return None
        assert isinstance(program, LoadedProgram)
        bucket = program.bucket(kernel.bucket)
        if not bucket.executables or not program.source.executables:
            return None
        with WithoutErrors():  # its module can be compiled in its place
            placement = Placement.on(device_of([*program.constants, *kernel.leaves]))
            member, kept = bucket.executables[environment_digest(placement.device)]
            xla = deserialized(program.source.executables[member], placement)
            how = kernel.results(), placement, None, lambda error: None, began
            return loaded(kernel, xla, kept, *how)
        return None

    def save(self, entry: Executable) -> None:
        """Nothing: the file is not written to."""
