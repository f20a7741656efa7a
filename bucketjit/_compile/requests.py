"""What to ask of the cache: the key of an executable, how to build it, and where it is kept."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import jax

from bucketjit._compile.argument_types import padded_leaf_shapes, without_values
from bucketjit._compile.build import Compile, Masked, build_masked, masked_function
from bucketjit._compile.build_exact import Exact, build_exact, exact_function
from bucketjit._compile.cache import ExecutableCache
from bucketjit._compile.executable import Executable
from bucketjit._compile.files.preload import Preloading
from bucketjit._compile.files.stored import ExecutableFiles, StoredExact, StoredMasked
from bucketjit._config import Check, Config
from bucketjit._cores.placement import device_of_chunks
from bucketjit._errors import (
    SpecError,
    first_line,
)
from bucketjit._events import emit
from bucketjit._jax.compiler import refused_option
from bucketjit._masking.rule_context import Rule
from bucketjit._masking.rules import default_rules
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall
from bucketjit._tracing.program import Program
from bucketjit._xla_defects.workarounds import (
    OPTIONS,
    Workarounds,
    exact_options,
    must_rebuild,
    workarounds,
)

# An exact shape without dimension variables is told by so many sizes: a model has hundreds.
_MOST_UNNAMED = 8


class RequestFactory:
    """Makes the orders of one engine.

    Args:
        config: The configuration.
        name: Name of the function.
        cache: What is compiled already, among which a stand-in may be.
        preloading: What is loaded from files before it is asked for.

    Attributes:
        rules: Gives the rule table; importing it takes 50 ms.
        shelf: Where executables are kept in files.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        cache: ExecutableCache[Any, Executable],
        preloading: Preloading,
    ) -> None:
        self._config = config
        self._cache = cache
        # Neither holds `self`: without a cycle, what an executor holds goes when it does.
        self.rules = functools.cache(functools.partial(_rules_with, config.rules))
        told = functools.partial(emit, listeners=config.listeners)
        self.files = ExecutableFiles(config.persistence, config.rules, name, told, preloading)
        self._takes_options = True  # those of ours, as far as is known; see `_built`
        self._workarounds: weakref.WeakKeyDictionary[Program, Workarounds]
        self._workarounds = weakref.WeakKeyDictionary()

    @staticmethod
    def masked_key(program: Program, bucket: Mapping[str, int]) -> tuple[Program, Hashable]:
        """The key of a bucket's executable."""
        return program, tuple(bucket.values())

    @staticmethod
    def exact_key(signed: SignedCall) -> Any:
        """The key of the executable of an exact shape."""
        return signed.signature, tuple(signed.shapes)

    def expect(self, signed: SignedCall) -> None:
        """Begin to load what calls of a signature may ask for, which is about to be traced."""
        device_of_chunks(self._config.chunks)  # its threads are to start before many others
        if self._config.check is Check.OFF:
            self.files.expect(signed, self._config.chunks)

    def masked(
        self, signed: SignedCall, call: ResolvedCall, bucket: Mapping[str, int]
    ) -> CompileRequest:
        """What to ask for to serve a call in a bucket."""
        program, check = call.program, self._config.check
        assert program is not None
        pads = padded_leaf_shapes(call, signed.signature, bucket, signed.shapes)
        known = without_values(signed)

        def made() -> Masked:
            needed, chunks = self._needed(program), self._config.chunks
            given = (known, call, bucket, pads, self.rules, check)
            options = self._options(needed.options(bool(chunks)))
            return masked_function(*given, options, chunks, needed.after)

        def build_once(compile: Compile) -> Executable:
            return self._built(lambda: build_masked(made(), compile))

        def build(compile: Compile) -> Executable:
            built = build_once(compile)
            needed = self._needed(program)
            if needed.avoids_reductions or not self._must_rebuild(built):
                return built
            needed.avoids_reductions = True
            again = build_once(compile)
            again.compile_seconds += built.compile_seconds
            return again

        def stand_in() -> Any:
            return self._smallest_stored(program, call)

        kept = None
        if check is Check.OFF:
            kept = self.files.place(StoredMasked, known, bucket, made)
        key = self.masked_key(program, bucket)
        return CompileRequest(key, bucket, call.sizes, build, stand_in, kept, program)

    def exact(self, signed: SignedCall, sizes: Mapping[str, int]) -> CompileRequest:
        """What to ask for to run a call at its exact shape."""
        shown = sizes or _unnamed_sizes(signed)
        known = without_values(signed)
        check = self._config.check

        @functools.cache
        def made() -> Exact:
            # What masked runs are compared with is right at every size, as they are.
            options = self._options(exact_options(check is not Check.OFF))
            return exact_function(known, check, options)

        def build(compile: Compile) -> Executable:
            return self._built(lambda: build_exact(known, shown, made(), compile), made.cache_clear)

        kept = None
        if check is Check.OFF:
            kept = self.files.place(StoredExact, known, shown, made)
        return CompileRequest(self.exact_key(signed), shown, sizes, build, lambda: None, kept)

    def _smallest_stored(self, program: Program, call: ResolvedCall) -> Any:
        """Key of the smallest compiled bucket of a program that holds the sizes of a call."""
        wanted = dict(zip(call.variables, call.ordered, strict=True))
        fitting = [
            (math.prod(entry.sizes.values()), key)
            for key, entry in self._cache.items()
            if key[0] is program and all(entry.sizes[v] >= n for v, n in wanted.items())
        ]
        return min(fitting, key=lambda pair: pair[0])[1] if fitting else None

    def _needed(self, program: Program) -> Workarounds:
        """What the program needs to be computed rightly by XLA."""
        known = self._workarounds.get(program)
        if known is None:
            known = workarounds(program.jaxpr, program.consts)
            self._workarounds[program] = known
        return known

    def _must_rebuild(self, built: Executable) -> bool:
        """Whether XLA computes it wrongly, and neither XLA nor the user is in the way."""
        is_ours = self._takes_options and OPTIONS.isdisjoint(self._config.compiler_options)
        return is_ours and must_rebuild(built.compiled)

    def _options(self, ours: Mapping[str, Any]) -> Mapping[str, Any]:
        """Options of XLA; the user's go before ours."""
        return {**(ours if self._takes_options else {}), **self._config.compiler_options}

    def _built(
        self, build: Callable[[], Executable], forget: Callable[[], None] = lambda: None
    ) -> Executable:
        """Compile; an option of ours that this XLA does not take is given up.

        Args:
            build: Compiles.
            forget: Has it ask for the options again.
        """
        had_options = self._takes_options
        try:
            return build()
        except jax.errors.JaxRuntimeError as error:
            refused = refused_option(error)
            if refused in self._config.compiler_options:
                why = first_line(error)
                raise SpecError(
                    f"compiler_options: XLA does not take {refused!r}: {why}"
                ) from error
            if not had_options or refused not in OPTIONS:
                raise
        self._takes_options = False
        forget()
        return build()


def _unnamed_sizes(signed: SignedCall) -> dict[str, int]:
    """Sizes of some axes by which to tell an exact shape where none has a name.

    Those of arrays that are arguments by themselves, or else of the last leaves: what differs
    between calls is rather a batch than the parameters of a model.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(
        signed.tree.unflatten(range(len(signed.leaves)))
    )
    axes = [
        (leaf, f"{path}[{i}]", size)
        for leaf, path in enumerate(signed.signature.paths)
        for i, size in enumerate(signed.shapes[leaf])
    ]
    bare = {leaf for path, leaf in paths if len(path) == 2}  # args or kwargs, and which of them
    likely = [axis for axis in axes if axis[0] in bare] or axes
    return {name: size for _, name, size in likely[-_MOST_UNNAMED:]}


def _rules_with(added: Mapping[Any, Rule]) -> Mapping[Any, Rule]:
    return {**default_rules(), **added}


Source = Literal["cache", "file", "compile"]


class StoredPlace(Protocol):
    """The place of an executable among files; see `bucketjit._compile.files.stored`."""

    def load(self) -> Executable | None:
        """The executable, if it is there."""

    def save(self, entry: Executable) -> None:
        """Put it there."""


class CompileRequest(NamedTuple):
    """An executable that is wanted.

    Attributes:
        key: Its key in the cache.
        sizes: Size of each variable: of its bucket, or of the exact shape.
        logical: Those of the call that wants it.
        build: Makes it, by whoever compiles.
        stand_in: The key of a stored executable that would do, or None.
        kept: Its place among files, if executables are kept in files.
        program: What it is compiled from; None at an exact shape.
    """

    key: tuple[Any, ...]
    sizes: Mapping[str, int]
    logical: Mapping[str, int]
    build: Callable[[Compile], Executable]
    stand_in: Callable[[], Hashable | None]
    kept: StoredPlace | None = None
    program: Program | None = None

    @property
    def mark(self) -> Hashable:
        """Stands for the key where something is remembered of it."""
        return key_without_owner(self.key)


def key_without_owner(key: tuple[Any, ...]) -> Hashable:
    """A key that does not keep the program, or the signature, whose executable it is of."""
    owner, *sizes = key
    return weakref.ref(owner), *sizes
