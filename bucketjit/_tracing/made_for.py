"""The only arguments that calls may have: those that something was compiled or saved for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bucketjit._ir.dynamic_axes import STATIC
from bucketjit._ir.interface import Interface
from bucketjit._tracing.leaf_types import LeafType
from bucketjit._tracing.mismatches import Shape, facts_made_for, facts_of_call, in_words, mismatches
from bucketjit._tracing.parameters import Key
from bucketjit._tracing.resolution import without_empty
from bucketjit._tracing.signature import Signature
from bucketjit._tracing.traced_programs import Instead
from bucketjit.errors import ArgumentError


class MadeFor:
    """The arguments that something was made for; a `Signer` with it takes no others.

    Attributes:
        tree: Tree of ``(args, kwargs)`` without static arguments.
        types: Type of each leaf.
        shapes: Shape of each leaf, with text where axes are open.
        facts: All that in the form that errors are made from.
    """

    def __init__(
        self,
        verb: str,
        tree: Any,
        types: Sequence[LeafType],
        shapes: Sequence[Shape],
        name: Callable[[int], str],
        statics: tuple[Mapping[str, Any], Mapping[str, Any]],
        likes: Sequence[Any] | None = None,
        remark: Callable[[], str] = lambda: "",
    ) -> None:
        self.tree, self.types, self.shapes = tree, tuple(types), tuple(shapes)
        self._verb, self._name, self._remark = verb, name, remark
        self._likes = [0] * len(self.types) if likes is None else likes
        self.facts = facts_made_for(tree, types, shapes, name, *statics)

    def check_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise an error that names the arguments that do not fit, if there are any."""
        called = facts_of_call(args, kwargs, self._name)
        if lines := mismatches(self.facts, called, self._verb):
            raise ArgumentError(in_words(lines) + self._remark())

    def check_types(self, key: Key, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise an error if the arguments of a call differ, static sizes aside."""
        pairs = zip(self.types, key.types, strict=False)
        if key.tree == self.tree and all(a == b or _is_size(a, b) for a, b in pairs):
            return
        self.check_call(args, kwargs)
        if key.tree != self.tree:
            told = f"the arguments: {self._verb} the tree {self.tree}, called with {key.tree}"
        else:
            told = f"an argument is sharded over another mesh than it was {self._verb}"
        raise ArgumentError(told)

    def checked(self, leaves: Sequence[Any], shapes: Sequence[Sequence[int]]) -> list[Any]:
        """The leaves of a call, whose static sizes must fit; ints that are sizes are all alike.

        ``jit`` tells an int of NumPy from one of Python.
        """
        found = list(leaves)
        for i, (kind, own, given) in enumerate(zip(self.types, self.shapes, shapes, strict=True)):
            if kind.dtype is None:
                like, size = self._likes[i], int(found[i])
                found[i], given = _size_like(like, size), (size,)
            if any(type(n) is int and n != m for n, m in zip(own, given, strict=True)):
                self.check_call(*self.tree.unflatten(leaves))
        return found

    def opened(self, count: int, keywords: Sequence[str]) -> tuple[set[int], set[str]]:
        """The arguments that have open axes, or are sizes."""
        args, kwargs = self.tree.unflatten(range(len(self.shapes)))

        def is_open(argument: Any) -> bool:
            leaves = jax.tree_util.tree_leaves(argument)
            return any(isinstance(axis, str) for i in leaves for axis in self.shapes[i])

        return (
            {i for i, argument in enumerate(args[:count]) if is_open(argument)},
            {name for name in keywords if name in kwargs and is_open(kwargs[name])},
        )


def fixed_signature(
    fn: Callable[..., Any],
    made_for: MadeFor,
    paths: Sequence[str],
    constraints: Sequence[str],
    programs: Iterable[tuple[Interface, frozenset[str]]],
    instead: Instead,
) -> Signature:
    """The one signature of such calls; it has these programs, and traces none.

    Each program has the variables that are 0 in its calls.
    """
    tokens = [[STATIC if type(n) is int else str(n) for n in shape] for shape in made_for.shapes]
    signature = Signature(
        *(fn, made_for.tree, made_for.types, paths),
        *([", ".join(row) or None for row in tokens], constraints),
        instead=instead,
    )
    # Static sizes tell programs apart; those of open axes do not matter here.
    shapes = [tuple(n if type(n) is int else 0 for n in shape) for shape in made_for.shapes]
    opened = signature.declared_tokens(shapes)
    for program, empty in programs:
        signature.add(program, signature.at(without_empty(opened, empty), shapes))
    return signature


def _size_like(like: Any, size: int) -> Any:
    return size if isinstance(like, int) else np.asarray(size).astype(like.dtype)[()]


def _is_size(own: LeafType, given: LeafType) -> bool:
    """Whether an int of Python or NumPy is given for an argument that is a size."""
    is_int = given.rank == 0 and jax.dtypes.issubdtype(given.dtype, np.integer)
    return own.dtype is None and bool(is_int)
