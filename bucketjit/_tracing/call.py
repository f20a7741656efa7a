"""A call: its typed leaves, and once they are resolved its sizes and the program that serves it."""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import jax

from bucketjit._tracing.parameters import Statics
from bucketjit._tracing.resolution import Resolution

if TYPE_CHECKING:
    from bucketjit._tracing.signature import Signature


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

    @property
    def donated_leaves(self) -> set[int]:
        """Positions of the leaves of donated arguments."""
        args, _ = self.tree.unflatten(range(len(self.leaves)))
        return {i for place in self.donate for i in jax.tree_util.tree_leaves(args[place])}

    def with_leaves(self, leaves: list[Any]) -> Call:
        """The same call with other leaves of the same shapes."""
        return dataclasses.replace(self, leaves=leaves)

    def resolved(self, resolution: Resolution) -> Call:
        """The same call with its sizes and its program."""
        names = [field.name for field in dataclasses.fields(Resolution)]
        return dataclasses.replace(self, **{name: getattr(resolution, name) for name in names})
