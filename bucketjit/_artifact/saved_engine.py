"""A function of a file: what its calls are compared with, its programs, and its engine.

`bucketjit._runtime.engine.Engine` serves its calls as those of a function that is traced. It gets
three parts that know the file: what arguments are taken, bodies of kernels, and buckets.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax

from bucketjit._artifact.archive import dtype_of
from bucketjit._artifact.manifest import SavedFunction
from bucketjit._artifact.saved_program import (
    LoadedProgram,
    SavedBodies,
    Source,
    environment_digest,
    loaded_program,
    shape_at,
)
from bucketjit._compile.argument_types import device_of
from bucketjit._compile.requests import Requests
from bucketjit._config import Config, Fallback, Out
from bucketjit._events import Verbatim, shown
from bucketjit._ir.dynamic_axes import STATIC, Tokens
from bucketjit._ir.expressions import smallest_holding
from bucketjit._ir.interface import Interface
from bucketjit._jax.serialization import NotPlain, Placement, serialized
from bucketjit._raised import in_one_line
from bucketjit._runtime.buckets import ChoosesBuckets
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.engine_parts import Parts, SharedState
from bucketjit._tracing.axis_guesses import Shapes
from bucketjit._tracing.call import Call
from bucketjit._tracing.leaf_types import LeafType
from bucketjit._tracing.made_for import MadeFor, fixed_signature
from bucketjit._tracing.resolution import Resolution, variables_in, without_empty
from bucketjit._tracing.signature import Signature
from bucketjit._tracing.signer import Signer
from bucketjit.errors import ArtifactError, BucketOverflowError
from bucketjit.strategies import Boundaries


class LoadedFunction:
    """A function of a file: what its calls are compared with, and its programs."""

    def __init__(self, source: Source, record: SavedFunction) -> None:
        self.source, self.record = source, record
        place = f"{source.path}: manifest.json"
        try:
            trees: Any = source.modules[record.tree]
            self.tree = trees.in_tree
            self.programs = [loaded_program(source, p, trees.out_tree) for p in record.programs]
            self.types = tuple(
                LeafType(None, True, 1)
                if leaf.dtype is None
                else LeafType(dtype_of(leaf.dtype, place), leaf.weak_type, len(leaf.axes))
                for leaf in record.leaves
            )
            positional, keyword = ({k: Verbatim(v) for k, v in of.items()} for of in record.statics)
            self.arguments = MadeFor(
                "saved for",
                self.tree,
                self.types,
                [leaf.axes for leaf in record.leaves],
                self.name_of,
                (positional, keyword),
                remark=self._remark,
            )
            self.tokens = tuple(
                tuple(STATIC if isinstance(axis, int) else axis for axis in leaf.axes)
                for leaf in record.leaves
            )
            self.like(self.programs[0].record.buckets[0].sizes)
        except ArtifactError:
            raise
        except Exception as error:  # what is there does not fit together
            raise ArtifactError(
                f"{place}: what it tells of {record.name} does not fit ({in_one_line(error)}); the "
                "file is damaged or was altered"
            ) from error

    def name_of(self, position: int) -> str:
        names = self.record.names
        return names[position] if position < len(names) else f"args[{position}]"

    def by_position(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with those by position that were saved so."""
        named, wanted = dict(kwargs), self.record.names[len(args) : self.record.arity]
        if not wanted or not all(name in named for name in wanted):
            return args, named
        return (*args, *(named.pop(name) for name in wanted)), named

    @functools.cached_property
    def variables(self) -> tuple[str, ...]:
        """The dimension variables that calls have sizes of."""
        named = ((p, v) for p in self.programs for v in p.record.variables)
        return tuple(dict.fromkeys(v for p, v in named if v not in p.unfitted))

    def tokens_of(self, program: LoadedProgram) -> Tokens:
        """The open axes of calls of a program; other variables are 0 there."""
        empty = frozenset(self.variables).difference(program.record.variables)
        return without_empty(self.tokens, empty)

    def stub(self) -> Callable[..., Any]:
        """A callable with the name and the parameters of the function, whose source is not here."""

        def stub(*args: object, **kwargs: object) -> Any:
            raise ArtifactError(f"{self.record.name} was loaded from a file, which has no source")

        kinds = inspect.Parameter
        names = [n for n in self.record.names if n.isidentifier()]
        if len(names) == len(set(names)) == self.record.arity:
            parameters = [kinds(n, kinds.POSITIONAL_OR_KEYWORD) for n in names]
            parameters += [
                kinds(n, kinds.KEYWORD_ONLY) for n in self.record.keywords if n not in names
            ]
            stub.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        stub.__name__ = stub.__qualname__ = self.record.name
        return stub

    def like(self, sizes: Mapping[str, int]) -> Any:
        """The positional and the keyword arguments of a call of some sizes, as types."""
        every = {**dict.fromkeys(self.variables, 0), **sizes}
        shapes = [shape_at(leaf.axes, every) for leaf in self.record.leaves]
        return self.tree.unflatten(
            shape[0]
            if kind.dtype is None
            else jax.ShapeDtypeStruct(shape, kind.dtype, weak_type=kind.weak_type)
            for shape, kind in zip(shapes, self.types, strict=True)
        )

    def signature(self, fn: Callable[..., Any]) -> Signature:
        """The one signature of its calls, whose programs are those of the file."""
        paths, every = [leaf.path for leaf in self.record.leaves], frozenset(self.variables)
        programs = [(p, every.difference(p.record.variables)) for p in self.programs]
        instead = functools.partial(_no_program, self)
        return fixed_signature(fn, self.arguments, paths, (), programs, instead)

    def _remark(self) -> str:
        """What to do if arguments differ because 64-bit types were on when the file was saved."""
        name = "jax_enable_x64"
        saved = self.source.manifest.config.get(name)
        if saved in (None, str(jax.config.values.get(name))):
            return ""
        return f"; the file was saved with {name}={saved}, and here it is {saved == 'False'}"

    def engine(self, shared: SharedState | None = None, **changes: Any) -> Engine:
        """An engine that serves its calls, by the options that the user has changed."""
        sizes = [b.sizes for program in self.programs for b in program.record.buckets]
        of_file = {
            "fn": self.stub(),
            "fallback": Fallback.ERROR,
            "out": Out(self.source.manifest.out),
            "donate_argnums": self.record.donated,
            "per_dim": {
                v: Boundaries(sorted({row[v] for row in sizes if v in row})) for v in self.variables
            },
        }
        parts = Parts(
            lambda config: Signer(config, self.arguments, lambda _: self.signature(config.fn)),
            functools.partial(Requests, bodies=SavedBodies),
            lambda config, lock, requests: SavedBuckets(),
        )
        return Engine(Config(**{**of_file, **changes}), shared, parts)

    def with_executables(
        self, place: str, add: Callable[[str, bytes], str], target: Any
    ) -> SavedFunction:
        """Compile every bucket, and add the executables to a file being written.

        They are for the device of a topology, or, without one, for this machine. They are compiled
        from the modules as a process compiles them that loads the file.
        """
        engine, programs = self.engine(), []
        for number, program in enumerate(self.programs):
            buckets = []
            for bucket in program.record.buckets:
                sizes = ",".join(f"{v}={n}" for v, n in bucket.sizes.items())
                if built := self._built(engine, program, bucket.sizes, target):
                    digest, raw, kept = built
                    member = add(f"{place}-{number}/{sizes}-{digest[:8]}.bin", raw)
                    bucket = dataclasses.replace(bucket, executables={digest: (member, kept)})
                buckets.append(bucket)
            programs.append(dataclasses.replace(program.record, buckets=tuple(buckets)))
        return dataclasses.replace(self.record, programs=tuple(programs))

    def _built(
        self, engine: Engine, program: LoadedProgram, bucket: Mapping[str, int], target: Any
    ) -> tuple[str, bytes, tuple[int, ...]] | None:
        """The digest of its environment, the bytes and the arguments of a bucket's executable."""
        sizes = {v: n for v, n in bucket.items() if v not in program.unfitted}
        constants = program.size_constants(sizes)
        if constants is None:  # a guard keeps these sizes from the program
            return None
        args, kwargs = self.like(bucket)
        call = engine.signer.sign(args, kwargs, structs=True)
        if target is not None:
            on_target = operator.methodcaller("update", sharding=target)
            call = call.with_leaves(
                [on_target(x) if hasattr(x, "update") else x for x in call.leaves]
            )
        tokens = self.tokens_of(program)
        call = call.resolved(Resolution(tokens, sizes, program, size_constants=constants))
        entry = engine.requests.of(call, bucket).build()
        device = device_of(call.leaves)
        try:
            raw, kept, _ = serialized(entry.compiled, Placement.on(device))
        except NotPlain as error:
            raise ArtifactError(
                f"the executable of {shown(bucket)} cannot be saved: {error}; save without "
                "executables=True"
            ) from error
        return environment_digest(device), raw, kept


def _no_program(function: LoadedFunction, tokens: Tokens, shapes: Shapes) -> Resolution:
    programs, every = function.programs, variables_in(function.tokens)
    empty = [v for v in every if v not in variables_in(tokens)]
    zeros = [[f"{v} == 0" for v in every if v not in p.record.variables] for p in programs]
    held = "; ".join(
        ", ".join([*map(str, p.guards), *more]) or "sizes whose constants were tabulated"
        for p, more in zip(programs, zeros, strict=True)
    )
    why = f"the file has programs for {held}; save the function with such sizes"
    if empty:
        why = (
            f"{' and '.join(f'{v} is 0' for v in empty)}; save the function with such sizes, as in "
            f"sizes=[{{..., {empty[0]!r}: 8}}, {{..., {empty[0]!r}: 0}}]"
        )
    if len(empty) == len(every):
        why = (
            "no call in which all open axes are of size 0 can be saved; call it with at least one "
            "element"
        )
    raise ArtifactError(
        f"shapes {[tuple(s) for s in shapes]} take a program that was not saved: {why}"
    )


class SavedBuckets(ChoosesBuckets):
    """Chooses among the buckets of a file."""

    def of(self, program: Interface, call: Call, learns: bool = True) -> dict[str, int]:
        """The smallest saved bucket that holds a call; its sizes if a module takes all sizes."""
        assert isinstance(program, LoadedProgram)
        sizes = dict(zip(call.variables, call.ordered, strict=True))
        bucket = _smallest(program, sizes)
        if bucket is None and program.record.dynamic is None:
            raise _overflow(program, sizes)
        return dict(sizes if bucket is None else bucket)

    def beyond(self, program: Interface, sizes: Mapping[str, int]) -> tuple[str, bool] | None:
        """See `ChoosesBuckets.beyond`; the module of all sizes runs such calls."""
        assert isinstance(program, LoadedProgram)
        if program.record.dynamic is None or _smallest(program, sizes) is not None:
            return None
        return f"no saved bucket holds {shown(sizes)}; the module of all sizes runs it", True


def _smallest(program: LoadedProgram, sizes: Mapping[str, int]) -> Mapping[str, int] | None:
    return smallest_holding((bucket.sizes for bucket in program.record.buckets), sizes)


def _overflow(program: LoadedProgram, sizes: Mapping[str, int]) -> BucketOverflowError:
    saved = [bucket.sizes for bucket in program.record.buckets]
    largest = {v: max(bucket[v] for bucket in saved) for v in sizes}
    variable = next((v for v, n in sizes.items() if n > largest[v]), None)
    text = f"no saved bucket holds {shown(sizes)}, there are {'; '.join(map(shown, saved[-8:]))}"
    if variable is not None:
        text = (
            f"dimension {variable!r} has size {sizes[variable]}, beyond the largest saved bucket "
            f"{largest[variable]}"
        )
    variable = variable or next(iter(sizes))
    error = BucketOverflowError(sizes[variable], largest[variable], variable)
    error.args = (f"{text}; save the function with larger sizes, or with dynamic=True",)
    return error
