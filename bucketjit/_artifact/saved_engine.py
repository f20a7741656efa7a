"""The parts of an engine that serves calls from a file: signatures, programs, buckets, requests.

`bucketjit._runtime.engine.Engine` does all else, as for a function that is traced: the fast path,
the cache, padding, counters, background compiles.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax

from bucketjit._artifact.dtypes import dtype_of
from bucketjit._artifact.manifest import Leaf, SavedFunction
from bucketjit._artifact.saved_executables import SavedBodies
from bucketjit._artifact.saved_program import LoadedProgram, Source, loaded_programs
from bucketjit._compile.requests import Requests
from bucketjit._config import Config, Fallback, Out
from bucketjit._events import shown
from bucketjit._runtime.buckets import Buckets, Exactly
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.engine_parts import Parts
from bucketjit._runtime.shared_state import SharedState
from bucketjit._signature.axis_guesses import Shapes
from bucketjit._signature.leaf_types import LeafType
from bucketjit._signature.mismatches import (
    ArgumentFacts,
    facts_made_for,
    facts_of_call,
    in_words,
    mismatches,
)
from bucketjit._signature.resolved_call import ResolvedCall, variables_in
from bucketjit._signature.signature import Signature
from bucketjit._signature.signer import SignedCall, Signer
from bucketjit._signature.traced_programs import NO_SIZES, Traced, TracedPrograms
from bucketjit._signature.why_traced import Key
from bucketjit._sizes.dynamic_axes import Tokens
from bucketjit._sizes.expressions import evaluate_text
from bucketjit._sizes.holding import smallest_holding
from bucketjit._tracing.interface import Interface
from bucketjit.errors import ArgumentError, ArtifactError, BucketOverflowError
from bucketjit.strategies import Boundaries

_OF_BACKENDS = {"gpu": "cuda"}  # what JAX calls platforms of devices, and of modules


class LoadedFunction:
    """A function of a file: what its calls are compared with, and its programs.

    Attributes:
        source: See above.
        record: See above.
        tree: Tree of ``(args, kwargs)`` without static arguments.
        programs: Its programs.
        types: Type of each leaf of the arguments.
        facts: The arguments in the form that errors are made from.
    """

    def __init__(self, source: Source, record: SavedFunction) -> None:
        self.source, self.record = source, record
        place = f"{source.archive.path}: manifest.json"
        self.tree = cast(Any, source.module(record.tree).in_tree)
        if self.tree.num_leaves != len(record.leaves):
            raise ArtifactError(f"{place}: the tree of the arguments does not fit their number")
        self.programs = loaded_programs(source, record)
        self.types = tuple(
            LeafType(None, True, 1)
            if leaf.dtype is None
            else LeafType(dtype_of(leaf.dtype, place), leaf.weak_type, len(leaf.axes))
            for leaf in record.leaves
        )
        positional, keywords = record.statics
        self.facts: ArgumentFacts = facts_made_for(
            self.tree,
            self.types,
            [leaf.axes for leaf in record.leaves],
            self.name_of,
            {name: _Text(text) for name, text in positional.items()},
            {name: _Text(text) for name, text in keywords.items()},
        )

    def name_of(self, position: int) -> str:
        """How errors name a positional argument."""
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

    @property
    def variables(self) -> tuple[str, ...]:
        """The dimension variables that calls have sizes of."""
        found = dict.fromkeys(
            v
            for program in self.programs
            for v in program.record.variables
            if v not in program.unfitted
        )
        return tuple(found)

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

    def config(self, **changes: Any) -> Config:
        """The configuration of an engine for its calls."""
        sizes: dict[str, set[int]] = {}
        for program in self.programs:
            for bucket in program.record.buckets:
                for variable in bucket.sizes.keys() & set(self.variables):
                    sizes.setdefault(variable, set()).add(bucket.sizes[variable])
        of_file = {
            "fn": self.stub(),
            "fallback": Fallback.ERROR,
            "out": Out(self.source.archive.manifest.out),
            "donate_argnums": self.record.donated,
            "per_dim": {v: Boundaries(sorted(found)) for v, found in sizes.items()},
        }
        return Config(**{**of_file, **changes})

    def like(self, sizes: Mapping[str, int]) -> Any:
        """The positional and the keyword arguments of a call of some sizes, as types."""
        every = {**dict.fromkeys(self.variables, 0), **sizes}
        return self.tree.unflatten([_value(leaf, every) for leaf in self.record.leaves])

    def engine(self, config: Config, shared: SharedState[Engine] | None = None) -> Engine:
        """An engine that serves its calls."""
        return Engine(
            config,
            shared,
            parts=Parts(
                functools.partial(_Signer, self),
                functools.partial(Requests, bodies=SavedBodies),
                _Buckets,
            ),
        )


def _value(leaf: Leaf, sizes: Mapping[str, int]) -> Any:
    """A type, or a size, as an argument of a call at some sizes."""
    shape = tuple(
        axis if isinstance(axis, int) else evaluate_text(axis, sizes) for axis in leaf.axes
    )
    if leaf.dtype is None:
        return shape[0]
    return jax.ShapeDtypeStruct(shape, dtype_of(leaf.dtype, leaf.path), weak_type=leaf.weak_type)


class _Text(str):
    """The text of a static argument; its ``repr`` is the text itself."""

    def __repr__(self) -> str:
        return str(self)


class _Signer(Signer):
    """Takes the arguments that a function was saved for, and no others."""

    def __init__(self, function: LoadedFunction, config: Config) -> None:
        super().__init__(config)
        self._function = function

    def sign(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SignedCall:
        """Flatten the arguments of a call and find their signature."""
        try:
            signed = super().sign(args, kwargs)
        except ArgumentError:
            self._refuse(args, kwargs)
            raise
        if any(kind.dtype is None for kind in self._function.types):  # NumPy's ints are as good
            typed = zip(signed.leaves, self._function.types, strict=True)
            leaves = [int(x) if kind.dtype is None else x for x, kind in typed]
            signed = dataclasses.replace(signed, leaves=leaves)
        rows = zip(self._function.record.leaves, signed.shapes, strict=True)
        for leaf, shape in rows:
            if any(isinstance(a, int) and a != n for a, n in zip(leaf.axes, shape, strict=True)):
                self._refuse(args, kwargs)
        return signed

    def arguments_with_open_axes(
        self, count: int, keywords: Sequence[str]
    ) -> tuple[set[int], set[str]]:
        """The arguments that had open axes, or were sizes, when the function was saved."""
        args, kwargs = self._function.tree.unflatten(self._function.record.leaves)

        def is_open(argument: Any) -> bool:
            leaves: list[Leaf] = jax.tree_util.tree_leaves(argument)
            return any(
                leaf.dtype is None or any(isinstance(axis, str) for axis in leaf.axes)
                for leaf in leaves
            )

        return (
            {i for i, argument in enumerate(args[:count]) if is_open(argument)},
            {name for name in keywords if name in kwargs and is_open(kwargs[name])},
        )

    def _refuse(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise an error that names the arguments that do not fit, if there are any."""
        function = self._function
        called = facts_of_call(args, kwargs, function.name_of)
        if lines := mismatches(function.facts, called, "saved for"):
            raise ArgumentError(f"{function.record.name}: {in_words(lines)}{self._remark()}")

    def _remark(self) -> str:
        """What to do if arguments differ because 64-bit types were on when the file was saved."""
        name = "jax_enable_x64"
        saved = self._function.source.archive.manifest.config.get(name)
        if saved in (None, str(jax.config.values.get(name))):
            return ""
        return f"; the file was saved with {name}={saved}, and here it is {saved == 'False'}"

    def _new_signature(
        self, key: Key, positions: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Signature:
        function = self._function
        fits = key.tree == function.tree and all(
            own == given or (own.dtype is None and given.rank == 0 and _is_int(given))
            for own, given in zip(function.types, key.types, strict=True)
        )
        if not fits:
            self._refuse(args, kwargs)
            raise ArgumentError(
                f"{function.record.name}: saved for other arguments than {key.tree} of "
                f"{', '.join(str(t.dtype) for t in key.types)}"
            )
        paths = [leaf.path for leaf in function.record.leaves]
        tokens = tuple(tuple(map(str, leaf.axes)) for leaf in function.record.leaves)
        specs = [", ".join(row) or None for row in tokens]
        given = self._config.fn, key.tree, function.types, paths
        return Signature(*given, specs, (), traced=_Programs(*given, tokens, function.programs))


def _is_int(kind: LeafType) -> bool:
    return bool(jax.numpy.issubdtype(kind.dtype, jax.numpy.integer))


class _Programs(TracedPrograms):
    """The programs of a file, in the place of programs that are traced."""

    def __init__(
        self,
        fn: Callable[..., Any],
        in_tree: Any,
        types: Sequence[LeafType],
        paths: Sequence[str],
        tokens: Tokens,
        programs: Sequence[LoadedProgram],
    ) -> None:
        super().__init__(fn, in_tree, types, paths, ())
        self._tokens = tokens
        self._saved = programs
        self._found: dict[frozenset[str], Traced] = {}  # by variables: others are 0
        for program in programs:
            own = frozenset(program.record.variables).difference(program.unfitted)
            self.add(program, self._found.setdefault(own, Traced()))

    def at(self, tokens: Tokens, shapes: Shapes) -> Traced:
        """The programs of the open axes: static sizes were compared when the call was signed."""
        return self._found.get(frozenset(variables_in(tokens)), Traced())

    def every(self) -> list[tuple[Any, Interface]]:
        """The programs, each with what tells it from others; here nothing has to."""
        return [((self._tokens, ()), program) for program in self._saved]

    def release(self, program: Interface) -> None:
        """Nothing: without the source no program can be made again."""

    def attempt(
        self, tokens: Tokens, shapes: Shapes, presumed: Mapping[str, int] = NO_SIZES
    ) -> ResolvedCall:
        """Say why no program serves the sizes of a call, or those that it computes."""
        if presumed:
            told = "; ".join(" and ".join(map(str, p.presumed)) for p in self._saved if p.presumed)
            raise ArtifactError(
                f"the function decides by sizes that it computes, and the call computes "
                f"{', '.join(f'{v} - 1 = {n - 1}' for v, n in presumed.items())}, which takes a "
                f"program that was not saved: the file has programs for {told}. If the function "
                "does not raise there, call the bucketed function so before the function is saved"
            )
        every = variables_in(self._tokens)
        if empty := [v for v in every if v not in variables_in(tokens)]:
            raise ArtifactError(
                f"shapes {[tuple(s) for s in shapes]} take a program that was not saved, as "
                f"{' and '.join(f'{v} is 0' for v in empty)}: save the function with such sizes, "
                f"as in sizes=[{{..., {empty[0]!r}: 8}}, {{..., {empty[0]!r}: 0}}]"
            )
        held = "; ".join(
            ", ".join(
                [
                    *map(str, program.guards),
                    *(f"{v} == 0" for v in every if v not in program.record.variables),
                ]
            )
            or "sizes whose constants were tabulated"
            for program in self._saved
        )
        raise ArtifactError(
            f"shapes {[tuple(s) for s in shapes]} take a program that was not saved: the file has "
            f"programs for {held}; save the function with such sizes"
        )


class _Buckets(Buckets):
    """Chooses among the buckets of a file."""

    def of(self, program: Interface, call: ResolvedCall) -> dict[str, int]:
        """The smallest saved bucket that holds a call."""
        assert isinstance(program, LoadedProgram)
        sizes = dict(zip(call.variables, call.ordered, strict=True))
        found = _smallest(program, sizes)
        if found is not None:
            return dict(found)
        if program.record.dynamic is not None:
            return sizes
        raise _overflow(program, sizes)

    def beyond(self, program: Interface, sizes: Mapping[str, int]) -> Exactly | None:
        """Whether a call is beyond the saved buckets, and the file has a module for it."""
        assert isinstance(program, LoadedProgram)
        if program.record.dynamic is None or _smallest(program, sizes) is not None:
            return None
        reason = f"no saved bucket holds {shown(sizes)}; the module of all sizes runs it"
        return Exactly(reason, True)


def _smallest(program: LoadedProgram, sizes: Mapping[str, int]) -> Mapping[str, int] | None:
    return smallest_holding((bucket.sizes for bucket in program.record.buckets), sizes)


def _overflow(program: LoadedProgram, sizes: Mapping[str, int]) -> BucketOverflowError:
    saved = [bucket.sizes for bucket in program.record.buckets]
    remedy = "save the function with larger sizes, or with dynamic=True"
    for variable, size in sizes.items():
        largest = max(bucket[variable] for bucket in saved)
        if size > largest:
            error = BucketOverflowError(size, largest, variable)
            error.args = (
                f"dimension {variable!r} has size {size}, beyond the largest saved bucket "
                f"{largest}; {remedy}",
            )
            return error
    variable, size = next(iter(sizes.items()))
    error = BucketOverflowError(size, max(bucket[variable] for bucket in saved), variable)
    listed = "; ".join(shown(bucket) for bucket in saved[-8:])
    error.args = (f"no saved bucket holds {shown(sizes)}, there are {listed}; {remedy}",)
    return error
