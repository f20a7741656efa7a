"""Compile requests: the key of an executable, how to build it, and its place among files.

`Requests` makes the requests of an engine, `bucketjit._compile.provider` fulfils them.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import ChainMap
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import jax

from bucketjit._compile.argument_types import ONE, Transform, placement_of, without_values
from bucketjit._compile.cache import ExecutableCache
from bucketjit._compile.executable import Executable
from bucketjit._compile.files import directory
from bucketjit._compile.files.environment import environment
from bucketjit._compile.files.record import Record
from bucketjit._compile.files.store import ExecutableFiles
from bucketjit._config import Config
from bucketjit._events import emit
from bucketjit._ir.interface import Interface
from bucketjit._ir.program import Program
from bucketjit._jax.compiler import refused_option
from bucketjit._jax.serialization import NotPlain
from bucketjit._raised import first_line
from bucketjit._tracing.call import Call
from bucketjit._tracing.resolution import UNRESOLVED
from bucketjit.errors import SpecError

if TYPE_CHECKING:
    from bucketjit._compile.bodies import TracedBodies
    from bucketjit._compile.kernel import Kernel
    from bucketjit._compile.rows import Rows
    from bucketjit._compile.workarounds import Workarounds
    from bucketjit._masking.rule_context import Rule

# At most so many sizes name an exact shape that has no dimension variables: a model has hundreds.
_MOST_UNNAMED = 8

NO_OPTIONS: Mapping[str, Any] = {}


class Requests:
    """Makes the compile requests of one engine; importing the rules late saves 50 ms."""

    def __init__(
        self,
        config: Config,
        name: str,
        cache: ExecutableCache[Any, Executable],
        bodies: Callable[..., Any] | None = None,
        transform: Transform = ONE,
    ) -> None:
        self._config = config
        self._cache = cache
        # Neither function holds `self`: without a reference cycle, a bucketed function that is
        # dropped frees its executables at once.
        self.rules = functools.cache(functools.partial(_rules_with, config.rules))
        tell = functools.partial(emit, listeners=config.listeners)
        self.files = ExecutableFiles(config.persistence, config.rules, name, tell)
        self._make_bodies = bodies
        self._transform = transform
        self._takes_options = True  # whether XLA takes bucketjit's own options; see `_built`

    @functools.cached_property
    def _bodies(self) -> TracedBodies:
        """Where the bodies of kernels come from; by default from the traced function."""
        if self._make_bodies is not None:
            return self._make_bodies(self._config, self.rules)
        from bucketjit._compile.bodies import TracedBodies

        return TracedBodies(self._config, self.rules)

    @staticmethod
    def masked_key(
        program: Interface, bucket: Mapping[str, int], rows: Rows | None = None
    ) -> tuple[Interface, tuple[Any, ...]]:
        """The cache key of a bucket's executable: the program, and the padded sizes after rows."""
        lead = () if rows is None else (rows,)
        return program, (*lead, *bucket.values())

    @staticmethod
    def exact_key(call: Call) -> Any:
        """The cache key of the executable of an exact shape: the signature and the shapes."""
        return call.signature, tuple(call.shapes)

    def kept(self, call: Call) -> list[Record]:
        """The files that have buckets of a call's program."""
        store, program = self.files.store(), call.program
        if store is None or not isinstance(program, Program):
            return []
        try:
            device = placement_of(call.leaves, call.signature.shardings).device
            wanted = self.files.digest_of(program), environment(device)
        except NotPlain:
            return []
        return [
            record
            for record in directory.records(store.directory)
            if not record.exact and (record.program, record.environment) == wanted
        ]

    def needed(self, program: Interface) -> Workarounds:
        """The workarounds that a program needs for XLA to compute it correctly."""
        return self._bodies.workarounds(program)

    def of(
        self,
        call: Call,
        bucket: Mapping[str, int] | None = None,
        rows: Rows | None = None,
        lowered: Kernel | None = None,
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> CompileRequest:
        """The request for a bucket, for rows of examples in it, or without one for an exact shape.

        Its kernel is ``lowered`` if there is one, as long as its options hold.
        """
        transform: Transform = self._transform if rows is None else rows
        if rows is not None:
            self._transform.refuse("map")
        key, sizes, program = self.exact_key(call), call.sizes or _unnamed_sizes(call), None
        if bucket is not None:
            assert (program := call.program) is not None
            key, sizes = self.masked_key(program, bucket, rows), transform.bucket(bucket)
        keeps = not options and not transform.summed
        return CompileRequest(
            key=key,
            sizes=sizes,
            program=program,
            requests=self,
            call=without_values(call),
            bucket=bucket,
            transform=transform,
            options=options,
            latest=lowered,
            kept=self._bodies.place(self.files) if keeps else None,
        )

    def kernel(self, call: Call, bucket: Mapping[str, int] | None = None) -> Kernel:
        """The kernel of a bucket, or without one that of the exact shape. Nothing is lowered."""
        return self.kernel_with(without_values(call), bucket, self._transform, NO_OPTIONS)

    def kernel_with(
        self,
        call: Call,
        bucket: Mapping[str, int] | None,
        transform: Transform,
        options: Mapping[str, Any],
    ) -> Kernel:
        """A kernel with the options that hold now."""
        of_xla = functools.partial(self._options, options)
        if bucket is not None:
            return self._bodies.in_bucket(call, bucket, transform, of_xla)
        self._transform.refuse("an exact shape")
        sizes = call.sizes or _unnamed_sizes(call)
        return self._bodies.exact(call.resolved(UNRESOLVED), sizes, of_xla)

    def smallest(self, request: CompileRequest) -> Hashable | None:
        """The key of the smallest stored bucket or batch of its program that would do, or None."""
        from bucketjit._compile.rows import Rows
        from bucketjit._ir.expressions import holds

        if request.program is None:
            return None
        transform, call = request.transform, request.call
        rows = transform if isinstance(transform, Rows) else None
        sizes = request.sizes
        if rows is None:
            sizes = dict(zip(call.variables, call.ordered, strict=True))
        larger = {
            key: entry.sizes
            for key, entry in self._cache.items()
            if key[0] is request.program
            and (entry.rows is None if rows is None else _is_like(key[1][0], rows))
            and holds(entry.sizes, sizes)
        }
        return min(larger, key=lambda key: math.prod(larger[key].values()), default=None)

    def build(self, request: CompileRequest) -> Executable:
        """Compile a request, again without wrong reductions if XLA has made one.

        That cannot help if XLA takes none of bucketjit's options, or if the user has set one.
        """
        from bucketjit._compile.workarounds import OPTIONS, has_wrong_reductions

        executable = self._built(request)
        needed = None if request.program is None else self.needed(request.program)
        if needed is None or needed.avoids_reductions or not self._takes_options:
            return executable
        by_user = {*self._config.compiler_options, *request.options}
        text = executable.compiled.as_text() if OPTIONS.isdisjoint(by_user) else None
        if not has_wrong_reductions(text or ""):
            return executable
        needed.avoids_reductions = True  # later buckets of the program are compiled so at once
        rebuilt = self._built(request)
        rebuilt.compile_seconds += executable.compile_seconds
        return rebuilt

    def _options(self, more: Mapping[str, Any], ours: Mapping[str, Any]) -> Mapping[str, Any]:
        """Options of XLA; those of the user override bucketjit's, and ``more`` overrides both."""
        defaults = {**ours, **self._transform.options(self.files.store() is not None)}
        return {
            **(defaults if self._takes_options else {}),
            **self._config.compiler_options,
            **more,
        }

    def _built(self, request: CompileRequest) -> Executable:
        """Compile; if XLA refuses one of bucketjit's options, compile without them from then on."""
        had_options = self._takes_options
        try:
            return request.kernel().build()
        except jax.errors.JaxRuntimeError as error:
            from bucketjit._compile.workarounds import OPTIONS

            refused = refused_option(error)
            if refused in {**self._config.compiler_options, **request.options}:
                why = first_line(error)
                raise SpecError(
                    f"compiler_options: XLA does not take {refused!r}: {why}"
                ) from error
            # The options were read before the compile: another thread may have given them up since.
            if not had_options or refused not in {*OPTIONS, *self._transform.options(True)}:
                raise
        self._takes_options = False
        return request.kernel().build()


def _is_like(stored: object, rows: Rows) -> bool:
    """Whether what a key says of its rows differs in their number only."""
    return type(stored) is type(rows) and stored == replace(rows, count=stored.count)


def _unnamed_sizes(call: Call) -> Mapping[str, int]:
    """Sizes of some axes, by path, that name an exact shape without dimension variables.

    They are those of arrays that are arguments by themselves, or else of the last leaves. Such an
    array is more likely a batch, which differs between calls, than a parameter of a model.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(call.tree.unflatten(range(len(call.leaves))))
    axes = [
        (leaf, f"{path}[{i}]", size)
        for leaf, path in enumerate(call.signature.paths)
        for i, size in enumerate(call.shapes[leaf])
    ]
    bare = {leaf for path, leaf in paths if len(path) == 2}  # a path of args[i] or kwargs[name]
    likely = [axis for axis in axes if axis[0] in bare] or axes
    return {name: size for _, name, size in likely[-_MOST_UNNAMED:]}


def _rules_with(added: Mapping[Any, Rule]) -> Mapping[Any, Rule]:
    """The rule table, with the user's rules in the place of bucketjit's."""
    from bucketjit._masking.rules import default_rules

    rules: Any = default_rules()
    return ChainMap(dict(added), rules) if added else rules


Source = Literal["cache", "file", "compile"]


@dataclass(eq=False)
class CompileRequest:
    """A request for an executable: a kernel with a key.

    Attributes:
        key: Its key in the cache.
        sizes: Size of each variable: of its bucket, or of the exact shape.
        program: The program it is compiled from; None at an exact shape.
        call: The call, without its arrays.
        options: Options of XLA that override those of the function.
        latest: The last kernel made, which may be lowered already.
        kept: Its place among files, with `load` and `save`; None if it is not kept.
    """

    key: tuple[Any, ...]
    sizes: Mapping[str, int]
    program: Interface | None
    requests: Requests
    call: Call
    bucket: Mapping[str, int] | None
    transform: Transform
    options: Mapping[str, Any]
    latest: Kernel | None
    kept: Any

    def kernel(self) -> Kernel:
        """Its kernel, made anew when the options of XLA have changed."""
        kernel = self.requests.kernel_with(self.call, self.bucket, self.transform, self.options)
        if self.latest is None or self.latest.options != kernel.options:
            self.latest = kernel
        return self.latest

    def build(self) -> Executable:
        return self.requests.build(self)

    @property
    def mark(self) -> Hashable:
        """Stands for `key` where a request is remembered, without keeping its program alive."""
        owner, *sizes = self.key
        return weakref.ref(owner), *sizes
