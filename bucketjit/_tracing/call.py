"""A call: its typed leaves, and once they are resolved its sizes and the program that serves it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from bucketjit._ir.dynamic_axes import Tokens, places_of
from bucketjit._ir.expressions import variables_of
from bucketjit._ir.interface import NO_SIZE_CONSTANTS, Interface, SizeConstants
from bucketjit._ir.program import TraceRefused
from bucketjit._tracing.parameters import Statics

if TYPE_CHECKING:
    from bucketjit._tracing.signature import Signature


@dataclass(frozen=True)
class Resolution:
    """The sizes of calls, and the program that serves them.

    Attributes:
        tokens: A token per axis of each leaf.
        sizes: Logical size of each dimension variable.
        program: The program, or None if the call must run exact.
        refusal: Why the function was not traced; None if there is a program, or if nothing was
            tried (an empty array, no open axis).
        size_constants: What the program needs besides the sizes.
        presumed: Computed sizes that an earlier run of this call has returned; None in the first.
    """

    tokens: Tokens
    sizes: dict[str, int]
    program: Interface | None
    refusal: TraceRefused | None = None
    size_constants: SizeConstants = NO_SIZE_CONSTANTS
    presumed: Mapping[str, int] | None = None

    @functools.cached_property
    def variables(self) -> tuple[str, ...]:
        """The dimension variables, with the unfitted sizes of the program at the end."""
        own = () if self.program is None else self.program.unfitted
        return (*variables_in(self.tokens), *own)

    @property
    def out_tree(self) -> Any:
        """The tree of the outputs. The call must have a program."""
        assert self.program is not None
        return (
            self.program.out_tree
            if self.size_constants.out_tree is None
            else self.size_constants.out_tree
        )

    @functools.cached_property
    def ordered(self) -> tuple[int, ...]:
        """The logical size of each of `variables`."""
        own = map(self.sizes.__getitem__, variables_in(self.tokens))
        return (*own, *self.size_constants.sizes)


UNRESOLVED = Resolution((), {}, None)


@functools.lru_cache(maxsize=1024)
def variables_in(tokens: Tokens) -> tuple[str, ...]:
    """The dimension variables of axes, in order of first appearance."""
    found: dict[str, None] = {}
    for place in places_of(tokens).opened:
        if not place.token.isdigit():
            found.update(dict.fromkeys(variables_of(place.token)))
    return tuple(found)


@dataclass(frozen=True)
class Call(Resolution):
    """One call. `Signer.sign` makes it from the arguments; `Engine.resolve` fills in the rest.

    Attributes:
        signature: The signature of its arguments.
        leaves: The leaves of the dynamic arguments, which are those that are not static.
        shapes: Shape of each leaf; of a size leaf ``(size,)``.
        tree: Tree of ``(args, kwargs)`` without static arguments.
        statics: The static arguments.
        dynamic: Positions, among all positional arguments, of the dynamic ones.
        donate: Positions, among the dynamic arguments, of the donated ones.
    """

    _: KW_ONLY
    signature: Signature
    leaves: list[Any]
    shapes: list[tuple[int, ...]]
    tree: Any
    statics: Statics
    dynamic: list[int]
    donate: list[int]

    @property
    def shape_key(self) -> int:
        """A hash of what `jax.jit` compiles for: shapes, types, static arguments."""
        return hash((self.signature, *self.shapes))

    def with_leaves(self, leaves: list[Any]) -> Call:
        """The same call with other leaves of the same shapes."""
        return dataclasses.replace(self, leaves=leaves)

    def resolved(self, found: Resolution) -> Call:
        """The same call with its sizes and its program."""
        known = {f.name: getattr(found, f.name) for f in dataclasses.fields(Resolution)}
        return dataclasses.replace(self, **known)
