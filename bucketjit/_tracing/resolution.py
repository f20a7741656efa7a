"""What a signature knows of calls of some shapes: their sizes and the program that serves them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bucketjit._ir.dynamic_axes import Tokens, places_of
from bucketjit._ir.expressions import variables_of
from bucketjit._ir.interface import NO_SIZE_CONSTANTS, Interface, SizeConstants
from bucketjit._ir.program import TraceRefused


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
