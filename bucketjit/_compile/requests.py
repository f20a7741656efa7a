"""Compile requests: the key of an executable, how to build it, and its place among files.

`RequestFactory` makes the requests of an engine, `bucketjit._compile.provider` fulfils them.
"""

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
from bucketjit._errors import SpecError, first_line
from bucketjit._events import emit
from bucketjit._ir.jax_patches import forgetful_jax
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

# At most so many sizes name an exact shape that has no dimension variables: a model has hundreds.
_MOST_UNNAMED = 8


class Lowering(NamedTuple):
    """A function that is lowered, and not compiled.

    Attributes:
        made: The function.
        lowered: What it was lowered to.
    """

    made: Masked
    lowered: jax.stages.Lowered


class RequestFactory:
    """Makes the compile requests of one engine.

    Args:
        config: The configuration.
        name: Name of the function.
        cache: The compiled executables, among which a stand-in is looked for.
        preloading: The executables that are loaded from files before they are requested.

    Attributes:
        rules: Returns the rule table. It is called late: importing the rules takes 50 ms.
        files: Where executables are kept in files.
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
        # Neither function holds `self`: without a reference cycle, an executor that is dropped
        # frees its executables at once.
        self.rules = functools.cache(functools.partial(_rules_with, config.rules))
        told = functools.partial(emit, listeners=config.listeners)
        self.files = ExecutableFiles(config.persistence, config.rules, name, told, preloading)
        self._takes_options = True  # whether XLA takes bucketjit's own options; see `_built`
        self._workarounds: weakref.WeakKeyDictionary[Program, Workarounds]
        self._workarounds = weakref.WeakKeyDictionary()

    @staticmethod
    def masked_key(program: Program, bucket: Mapping[str, int]) -> tuple[Program, Hashable]:
        """The cache key of a bucket's executable: the program and the padded sizes."""
        return program, tuple(bucket.values())

    @staticmethod
    def exact_key(signed: SignedCall) -> Any:
        """The cache key of the executable of an exact shape: the signature and the shapes."""
        return signed.signature, tuple(signed.shapes)

    def expect(self, signed: SignedCall) -> None:
        """Begin to load the executables that a signature may need while its function is traced.

        Args:
            signed: The first call of the signature.
        """
        device_of_chunks(self._config.chunks)  # starts its threads, before loading starts others
        if self._config.check is Check.OFF:
            self.files.expect(signed, self._config.chunks)

    def masked(
        self, signed: SignedCall, call: ResolvedCall, bucket: Mapping[str, int]
    ) -> CompileRequest:
        """The request for the executable of a bucket.

        Args:
            signed: The call.
            call: The same call, resolved.
            bucket: Padded size of each variable.

        Raises:
            StrategyContractError: A padded argument would be larger than any array can be.
        """
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
            needed.avoids_reductions = True  # later buckets of the program are compiled so at once
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

    def lower_masked(
        self, signed: SignedCall, call: ResolvedCall, bucket: Mapping[str, int]
    ) -> Lowering:
        """Lower the program of a call for a bucket.

        Args:
            signed: The call.
            call: The same call, resolved.
            bucket: Padded size of each variable.

        Raises:
            MaskingError: The program cannot be masked.
        """
        program = call.program
        assert program is not None
        pads = padded_leaf_shapes(call, signed.signature, bucket, signed.shapes)
        given = (without_values(signed), call, bucket, pads, self.rules, self._config.check)
        made = masked_function(*given, {}, 0, self._needed(program).after)
        with forgetful_jax():  # if tracing fails, JAX must not keep the trace alive
            return Lowering(made, made.function.lower(made.sizes, *made.args, **made.kwargs))

    def exact(self, signed: SignedCall, sizes: Mapping[str, int]) -> CompileRequest:
        """The request for the executable of the exact shape of a call.

        Args:
            signed: The call.
            sizes: Its size of each dimension variable; empty if it has none.
        """
        shown = sizes or _unnamed_sizes(signed)
        known = without_values(signed)
        check = self._config.check

        @functools.cache
        def made() -> Exact:
            # A checked executor compares masked results with these, so these must be right.
            options = self._options(exact_options(check is not Check.OFF))
            return exact_function(known, check, options)

        def build(compile: Compile) -> Executable:
            return self._built(lambda: build_exact(known, shown, made(), compile), made.cache_clear)

        kept = None
        if check is Check.OFF:
            kept = self.files.place(StoredExact, known, shown, made)
        return CompileRequest(self.exact_key(signed), shown, sizes, build, lambda: None, kept)

    def _smallest_stored(self, program: Program, call: ResolvedCall) -> Any:
        """The key of the smallest compiled bucket of a program that holds the sizes of a call."""
        wanted = dict(zip(call.variables, call.ordered, strict=True))
        fitting = [
            (math.prod(entry.sizes.values()), key)
            for key, entry in self._cache.items()
            if key[0] is program and all(entry.sizes[v] >= n for v, n in wanted.items())
        ]
        return min(fitting, key=lambda pair: pair[0])[1] if fitting else None

    def _needed(self, program: Program) -> Workarounds:
        """The workarounds that the program needs for XLA to compute it correctly."""
        known = self._workarounds.get(program)
        if known is None:
            known = workarounds(program.jaxpr, program.consts)
            self._workarounds[program] = known
        return known

    def _must_rebuild(self, built: Executable) -> bool:
        """Whether XLA computes the executable wrongly, and a compile with other options can help.

        It cannot if XLA takes none of bucketjit's options, or if the user has set one of them.
        """
        is_ours = self._takes_options and OPTIONS.isdisjoint(self._config.compiler_options)
        return is_ours and must_rebuild(built.compiled)

    def _options(self, ours: Mapping[str, Any]) -> Mapping[str, Any]:
        """Options of XLA; those of the user override bucketjit's."""
        return {**(ours if self._takes_options else {}), **self._config.compiler_options}

    def _built(
        self, build: Callable[[], Executable], forget: Callable[[], None] = lambda: None
    ) -> Executable:
        """Compile; if XLA refuses one of bucketjit's options, compile without them from then on.

        Args:
            build: Compiles.
            forget: Drops the function made with the refused options, so that `build` makes another.

        Raises:
            SpecError: XLA refuses one of the user's ``compiler_options``.
            Exception: Whatever `build` raised.
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
            # The options were read before the compile: another thread may have given them up since.
            if not had_options or refused not in OPTIONS:
                raise
        self._takes_options = False
        forget()
        return build()


def _unnamed_sizes(signed: SignedCall) -> dict[str, int]:
    """Sizes of some axes, by path, that name an exact shape without dimension variables.

    They are those of arrays that are arguments by themselves, or else of the last leaves. Such an
    array is more likely a batch, which differs between calls, than a parameter of a model.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(
        signed.tree.unflatten(range(len(signed.leaves)))
    )
    axes = [
        (leaf, f"{path}[{i}]", size)
        for leaf, path in enumerate(signed.signature.paths)
        for i, size in enumerate(signed.shapes[leaf])
    ]
    bare = {leaf for path, leaf in paths if len(path) == 2}  # a path of args[i] or kwargs[name]
    likely = [axis for axis in axes if axis[0] in bare] or axes
    return {name: size for _, name, size in likely[-_MOST_UNNAMED:]}


def _rules_with(added: Mapping[Any, Rule]) -> Mapping[Any, Rule]:
    """The rule table, with the user's rules in the place of bucketjit's."""
    return {**default_rules(), **added}


Source = Literal["cache", "file", "compile"]


class StoredPlace(Protocol):
    """The place of an executable among files; see `bucketjit._compile.files.stored`."""

    def load(self) -> Executable | None:
        """The executable, or None if no file has it."""

    def save(self, entry: Executable) -> None:
        """Write the executable to a file.

        Args:
            entry: The executable.
        """


class CompileRequest(NamedTuple):
    """A request for an executable.

    Attributes:
        key: Its key in the cache.
        sizes: Size of each variable: of its bucket, or of the exact shape.
        logical: Logical sizes of the call that needs it.
        build: Builds it; the argument compiles a lowered function.
        stand_in: Returns the key of a stored executable that would do, or None.
        kept: Its place among files; None if executables are not kept in files.
        program: The program it is compiled from; None at an exact shape.
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
        """Stands for `key` where a request is remembered, without keeping its program alive."""
        return key_without_owner(self.key)


def key_without_owner(key: tuple[Any, ...]) -> Hashable:
    """A key with a weak reference in the place of its program or signature.

    Args:
        key: The key: its program or signature, then the sizes.
    """
    owner, *sizes = key
    return weakref.ref(owner), *sizes
