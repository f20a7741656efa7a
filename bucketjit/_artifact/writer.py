"""Makes a ``.bkt`` file of a function: its programs, a module for each bucket, its constants."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.export  # an attribute of jax only after this import
import jax.numpy as jnp
import numpy as np

from bucketjit._artifact import archive as archives
from bucketjit._artifact import asked_buckets
from bucketjit._artifact import manifest as manifests
from bucketjit._artifact.archive import as_bytes, name_of
from bucketjit._artifact.saved_engine import LoadedFunction
from bucketjit._artifact.saved_program import OF_BACKENDS, Source
from bucketjit._compile.argument_types import at_sizes
from bucketjit._compile.files.environment import versions
from bucketjit._config import is_int_from
from bucketjit._ir.dynamic_axes import Tokens
from bucketjit._ir.expressions import evaluate
from bucketjit._ir.program import Program
from bucketjit._runtime.derivatives import Derivatives
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.equations import Path as Steps
from bucketjit._stages.explain import masked_equations
from bucketjit._stages.modules import saved as modules
from bucketjit._stages.modules.dynamic import check_platforms, refuse_callbacks
from bucketjit._tracing.call import Call
from bucketjit._tracing.resolution import without_empty
from bucketjit.errors import ArtifactError, ExportError, MaskingError, SpecError

_OPTIONS_OF_JAX = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl")


@dataclass(frozen=True)
class SaveOptions:
    """What `BucketedExec.save` was asked for; see its arguments."""

    sizes: object = None
    platforms: Sequence[str] | None = None
    derivatives: int = 0
    dynamic: bool = False
    executables: bool = False
    key: object = None

    def __post_init__(self) -> None:
        order = self.derivatives
        if not is_int_from(order, 0):
            raise SpecError(f"save: derivatives is an order, 0, 1 or more, got {order!r}")
        for name in ("dynamic", "executables"):
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"save: {name} is True or False, got {getattr(self, name)!r}")
        try:
            check_platforms(self.platforms)
        except ExportError as error:
            raise SpecError(f"save: {error}") from None

    def on(self, target: Any) -> SaveOptions:
        """For the platform of a device of a topology, where there is one and none is asked for."""
        if target is None or self.platforms is not None:
            return self
        (platform,) = {device.platform for device in target.device_set}
        return replace(self, platforms=[OF_BACKENDS.get(platform, platform)])


class _Members:
    """The members of the archive that is being made: bytes, records, and each constant once."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes | memoryview] = {}
        self.records: dict[str, manifests.Member] = {}
        self.constants: dict[Any, manifests.Constant] = {}

    def add(self, name: str, data: bytes | memoryview) -> str:
        self.contents[name], self.records[name] = data, archives.member_of(data)
        return name

    def add_constant(self, value: Any) -> int:
        """Add a constant, or find the equal one that is there. Returns its position."""
        array = modules.plain_constant(value)
        data, dtype = as_bytes(array), name_of(array.dtype)
        key = archives.member_of(data).sha256, dtype, array.shape
        if key not in self.constants:
            name = self.add(f"{archives.CONSTANTS}{len(self.constants)}.bin", data)
            self.constants[key] = manifests.Constant(dtype, tuple(array.shape), name)
        return list(self.constants).index(key)


def save(
    engine: Engine,
    derivatives: Derivatives,
    path: Path,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: SaveOptions,
) -> None:
    key = archives.checked_key(options.key)
    if engine.config.always_exact:
        raise ArtifactError(
            "a function without a strategy has no buckets to save: choose them, such as "
            "bucketjit.jit(fn, buckets=[16, 64]), or export one module of all sizes with "
            "export_dynamic"
        )
    call = engine.signer.sign(args, kwargs, structs=True)
    _refuse_placed(call)
    target = call.signature.target
    options, call = options.on(target), engine.resolve(call)
    if call.program is None:
        engine.signer.parameters.check_call(args, kwargs)  # no axis is open without arguments
        why = call.refusal or MaskingError("no axis is open", "name the open axes in dynamic_axes")
        raise asked_buckets.unmasked(why)
    sizes = asked_buckets.sizes_of(engine, call, options.sizes)
    filled = next((row for row in sizes if all(row.values())), None)
    if filled is not None:  # so that the derivatives, too, have all open axes
        call = at_sizes(call, call.signature.open_axes(call, call.shapes)[0], filled)
        call = engine.resolve(call)
    members = _Members()
    writers = [_FunctionWriter(engine, call, options, members, "functions/0")]
    for order in range(1, options.derivatives + 1):
        pulled = _pullback(engine, derivatives, call, order)
        writers.append(_FunctionWriter(*pulled, options, members, f"functions/{order}"))
    functions = tuple(writer.function(sizes) for writer in writers)
    module = writers[0].exported
    assert module is not None
    installed, jax_config = versions(), jax.config.values
    manifest = manifests.Manifest(
        format=manifests.FORMAT,
        versions={n: installed[n].partition(" ")[0] for n in ("bucketjit", "jax", "jaxlib")},
        calling_convention=module.calling_convention_version,
        platforms=tuple(module.platforms),
        out=engine.config.out.value,
        config={name: str(jax_config.get(name)) for name in _OPTIONS_OF_JAX},
        constants=tuple(members.constants.values()),
        functions=functions,
        members=members.records,
    )
    if options.executables:
        file = io.BytesIO()
        archives.pack(file, manifest, members.contents)
        source = Source(archives.Archive(path, data=file.getvalue()), trusted=True)
        functions = tuple(
            LoadedFunction(source, record).with_executables(
                f"{archives.EXECUTABLES}{order}", members.add, target
            )
            for order, record in enumerate(functions)
        )
        manifest = replace(manifest, functions=functions, members=members.records)
    archives.write_archive(path, manifest, members.contents, key)


class _FunctionWriter:
    """Adds the members of a function, or of a pullback; ``exported`` is the last module."""

    def __init__(
        self, engine: Engine, call: Call, options: SaveOptions, members: _Members, place: str
    ) -> None:
        self._engine, self._like, self._options = engine, call, options
        self._members, self._place = members, place
        self.exported: jax.export.Exported | None = None
        kinds = [t for t in call.signature.types if t.dtype is not None]
        self._types = [(t.dtype, t.weak_type) for t in kinds]

    def function(self, sizes: Sequence[Mapping[str, int]]) -> manifests.SavedFunction:
        engine = self._engine
        call = engine.resolve(self._like)
        tokens, logical = call.signature.open_axes(call, call.shapes)
        buckets = asked_buckets.buckets_of(
            engine, call, tokens, [{**logical, **row} for row in sizes]
        )
        programs = tuple(
            self._program(f"{self._place}/programs/{number}", program, calls)
            for number, (program, calls) in enumerate(buckets.items())
        )
        opened = {v for calls in buckets.values() for v in calls[0][1].variables}
        positional, keywords = call.tree.unflatten(call.leaves)
        name = engine.signer.name
        return manifests.SavedFunction(
            name=engine.name,
            tree=self._members.add(f"{self._place}/tree.stablehlo", _tree(call)),
            arity=len(positional),
            keywords=tuple(sorted(keywords)),
            names=tuple(map(name, call.dynamic))[: len(positional)],
            leaves=_leaves(call, without_empty(tokens, frozenset(logical) - opened)),
            statics=(
                {name(i): repr(v) for i, v in call.statics.positional.items()},
                {k: repr(v) for k, v in call.statics.keyword.items()},
            ),
            donated=tuple(call.donate),
            programs=programs,
        )

    def _program(
        self, where: str, program: Program, calls: list[asked_buckets.BucketCall]
    ) -> manifests.SavedProgram:
        try:
            refuse_callbacks(program.jaxpr)
        except ExportError as error:
            raise ArtifactError(str(error)) from error
        pairing, table = program.pairing, None
        if pairing is not None:
            if pairing.nests_by_size:
                raise ArtifactError(
                    "the tree of the results depends on the sizes, so it cannot be saved; return a "
                    "tree that is the same at every size"
                )
            table, calls = asked_buckets.table_of(program, calls, self._members.add, where)
        constants = tuple(map(self._members.add_constant, program.consts))
        needed = self._engine.requests.needed(program)
        try:
            masked = masked_equations(program, calls[0][0], self._engine.requests.rules())
            after = needed.after()
            buckets = tuple(self._bucket(where, program, *bucket, after) for bucket in calls)
        except MaskingError as error:
            raise asked_buckets.unmasked(error) from error
        dynamic = None
        if self._options.dynamic:
            sizes, platforms = calls[0][1].sizes, self._options.platforms
            module = modules.dynamic_module(program, sizes, self._types, platforms)
            dynamic = self._members.add(f"{where}/dynamic.stablehlo", modules.serialized(module))
        return manifests.SavedProgram(
            variables=calls[0][1].variables,
            lower=dict(program.lower),
            guards=tuple(map(str, program.guards)),
            reshapes=tuple(
                (asked_buckets.axes_of(a), asked_buckets.axes_of(b)) for a, b in program.reshapes
            ),
            inputs=tuple(map(asked_buckets.axes_of, program.in_shapes)),
            outputs=tuple(
                manifests.Output(name_of(dtype), asked_buckets.axes_of(shape), weak)
                for shape, (dtype, weak) in zip(program.out_shapes, program.out_types, strict=True)
            ),
            constants=constants,
            buckets=buckets,
            avoids_reductions=needed.avoids_reductions,
            table=table,
            samples=() if pairing is None else tuple(dict(s) for s in pairing.samples),
            why="" if pairing is None else pairing.why,
            masked=masked,
            dynamic=dynamic,
            computed=tuple(
                manifests.ComputedSize(v, (size.bound,), size.line, size.is_checked)
                for v, size in program.computed.items()
            ),
            counts=program.counts,
            presumed=tuple(map(str, program.presumed)),
            roomy=program.roomy,
        )

    def _bucket(
        self, where: str, program: Program, bucket: Mapping[str, int], call: Call, after: Any
    ) -> manifests.Bucket:
        rules, platforms = self._engine.requests.rules(), self._options.platforms
        module = modules.bucket_module(program, call, bucket, rules, after, self._types, platforms)
        self.exported = module
        arrays = module.in_avals[len(module.in_avals) - len(self._types) :]
        name = f"{where}/buckets/{','.join(f'{v}={n}' for v, n in bucket.items())}.stablehlo"
        return manifests.Bucket(
            sizes=dict(bucket),
            module=self._members.add(name, modules.serialized(module)),
            arguments=tuple(tuple(a.shape) for a in arrays),
            results=tuple(tuple(a.shape) for a in module.out_avals),
        )


def _refuse_placed(call: Call) -> None:
    for path, kind in zip(call.signature.paths, call.signature.types, strict=True):
        on_one = type(kind.target) in (type(None), jax.sharding.SingleDeviceSharding)
        if kind.sharding is not None or kind.partitions is not None or not on_one:
            raise ArtifactError(
                f"{path}: it is sharded over several devices, and a saved function runs on one; "
                "save it with arguments on one device"
            )


def _leaves(call: Call, tokens: Tokens) -> tuple[manifests.SavedLeaf, ...]:
    rows = zip(call.signature.paths, call.signature.types, tokens, call.shapes, strict=True)
    return tuple(
        manifests.SavedLeaf(
            path,
            None if kind.dtype is None else name_of(kind.dtype),
            tuple(n if t == "_" or t.isdigit() else t for t, n in zip(row, shape, strict=True)),
            bool(kind.weak_type),
        )
        for path, kind, row, shape in rows
    )


def _tree(call: Call) -> bytes:
    """The trees of arguments and results, as a module of one number a leaf.

    JAX's own serialization of modules then takes care of classes that users have registered.
    """
    args, kwargs = call.tree.unflatten([jax.ShapeDtypeStruct((), np.int32)] * call.tree.num_leaves)
    out_tree = call.out_tree

    def trees(*args: object, **kwargs: object) -> Any:
        return out_tree.unflatten([jnp.zeros((), np.int32)] * out_tree.num_leaves)

    return modules.serialized(modules.exported(trees, ["cpu"], args, kwargs))


def _pullback(
    engine: Engine, derivatives: Derivatives, call: Call, order: int
) -> tuple[Engine, Call]:
    """The engine of the pullback of an order, and an example of its calls.

    Its arguments are those of the pullback of the order below, flat, then the cotangents of that
    one's float results. Its results are the cotangents of its float arguments.
    """
    if (why := derivatives.refusal(call)) is not None:
        raise ArtifactError(f"its derivatives cannot be saved: {why}")
    assert call.program is not None
    values: list[Any] = [
        jax.ShapeDtypeStruct(shape, kind.dtype, weak_type=kind.weak_type)
        for shape, kind in zip(call.shapes, call.signature.types, strict=True)
    ]
    outs: list[Any] = [
        jax.ShapeDtypeStruct(tuple(evaluate(d, call.sizes) for d in shape), dtype)
        for shape, (dtype, _) in zip(call.program.out_shapes, call.program.out_types, strict=True)
    ]
    steps: Steps = ()
    for _ in range(order):
        wrt = tuple(i for i, x in enumerate(values) if _is_float(x))
        floats = tuple(i for i, x in enumerate(outs) if _is_float(x))
        if not wrt or not floats:
            raise ArtifactError("it has no derivatives: no argument, or no result, is of floats")
        steps = (*steps, ("pullback", (wrt, floats)))
        inner = values
        values = [*values, *(_cotangent(outs[i]) for i in floats)]
        outs = [_cotangent(inner[i]) for i in wrt]
    pulled = derivatives.engine_at(call, steps)
    return pulled, pulled.signer.sign(tuple(values), {}, structs=True)


def _is_float(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


def _cotangent(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)
