"""Checks the arguments of a compiled call against what it was compiled for.

Every argument is checked, also one that the function does not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from bucketjit._events import shown
from bucketjit._jax.config import trace_context
from bucketjit._signature.binding import bind_sizes
from bucketjit._signature.leaf_types import leaf_type
from bucketjit._signature.mismatches import (
    facts_made_for,
    facts_of_call,
    in_words,
    mismatches,
    open_shapes,
)
from bucketjit._signature.parameters import NO_STATICS
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall
from bucketjit._sizes.dynamic_axes import Tokens
from bucketjit._sizes.expressions import variables_of
from bucketjit._stages.subject import Subject
from bucketjit.errors import ArgumentError


class Arguments:
    """The arguments that a compiled object takes."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        signed = subject.signed
        tokens: Tokens = subject.call.tokens
        if subject.exact:
            tokens = tuple(("_",) * len(shape) for shape in signed.shapes)
        statics = signed.statics
        name = subject.engine.signer.name
        self._shapes = open_shapes(tokens, signed.shapes)
        self._facts = facts_made_for(
            signed.tree,
            signed.signature.types,
            self._shapes,
            subject.name_of,
            {name(i): value for i, value in statics.positional.items()},
            statics.keyword,
        )
        self._context = trace_context()

    def with_statics(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a compiled call as the function takes them, static ones included."""
        statics = self._subject.signed.statics
        rest = iter(args)
        count = len(args) + len(statics.positional)
        merged = tuple(
            statics.positional[i] if i in statics.positional else next(rest) for i in range(count)
        )
        return merged, {**kwargs, **statics.keyword}

    def sign(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SignedCall:
        """Check the types of all arguments, and the sizes of static axes."""
        made = self._subject.signed
        leaves, tree = jax.tree_util.tree_flatten((args, dict(kwargs)))
        shapes = self._fitting_shapes(leaves) if tree == made.tree else None
        if shapes is None:
            called = facts_of_call(args, kwargs, self._subject.name_of)
            lines = mismatches(self._facts, called)
            raise ArgumentError(in_words(lines) or self._other_placement(tree))
        kinds = zip(made.signature.types, made.leaves, leaves, strict=True)
        return SignedCall(
            made.signature,
            [x if kind.dtype is not None else _size_like(like, x) for kind, like, x in kinds],
            shapes,
            tree,
            NO_STATICS,
            list(range(len(args))),
            made.donate,
        )

    def _fitting_shapes(self, leaves: list[Any]) -> list[tuple[int, ...]] | None:
        """The shapes of the leaves if they are of the compiled types, or None."""
        found: list[tuple[int, ...]] = []
        types = self._subject.signed.signature.types
        for value, kind, made in zip(leaves, types, self._shapes, strict=True):
            if kind.dtype is None:  # a size
                if isinstance(value, bool) or not isinstance(value, int | np.integer):
                    return None
                shape: tuple[int, ...] = (int(value),)
            else:
                try:
                    given, shape = leaf_type(value, "")
                except ArgumentError:
                    return None
                if given != kind:
                    return None
            if any(isinstance(n, int) and n != m for n, m in zip(made, shape, strict=True)):
                return None
            found.append(shape)
        return found

    def _other_placement(self, tree: object) -> str:
        """What is said of a call whose difference has no other words."""
        made = self._subject.signed
        if tree != made.tree:
            return f"the arguments: compiled for the tree {made.tree}, called with {tree}"
        return "an argument is sharded over another mesh than the one that was compiled for"

    def changed_otherwise(self) -> ArgumentError:
        """The error of a call that fits, and would have to be compiled again all the same."""
        if trace_context() != self._context:
            return ArgumentError(
                "the configuration of JAX (jax_enable_x64, matmul precision, a mesh) differs from "
                "that at lowering; call it under the same configuration, or lower it again"
            )
        return ArgumentError(
            "once padded, the arguments are sharded in another way than the program was traced "
            "for; give arrays that the mesh cuts into equal parts, padded or not"
        )

    def other_computed_sizes(self, computed: Mapping[str, int]) -> ArgumentError:
        """The error of a call that computes sizes for which the function does something else."""
        program = self._subject.program
        of = {variable: n - 1 for variable, n in computed.items()}
        told = "; ".join(program.computed_in_words())
        return ArgumentError(
            f"the function decides by sizes that it computes ({told}), and here they are "
            f"{', '.join(f'{v} - 1 = {n}' for v, n in of.items())}, which needs another program; "
            "call the bucketed function, which finds it"
        )

    def sizes(self, signed: SignedCall) -> dict[str, int]:
        """The logical sizes of a call that is padded."""
        subject = self._subject
        signature, program = signed.signature, subject.program
        sizes = bind_sizes(subject.call.tokens, signed.shapes, signature.paths)
        beyond = {v: n for v, n in sizes.items() if n > subject.bucket[v]}
        if beyond:
            raise ArgumentError(in_words(list(self._beyond(signed, beyond))))
        if min(sizes.values()) < 1:
            raise ArgumentError(
                f"a size below 1 has no bucket ({shown(sizes)}); call the bucketed function, or "
                "lower it with such arguments"
            )
        signature.check_constraints(signature.open_axes(subject.call, signed.shapes)[1])
        if not program.admits(sizes):
            raise self._other_program(sizes)
        return sizes

    def resolve(self, signed: SignedCall) -> ResolvedCall:
        """Resolve a call that is padded."""
        subject, program = self._subject, self._subject.program
        sizes = self.sizes(signed)
        with subject.engine.lock:  # a program of concrete traces traces here
            constants = program.size_constants(sizes)
        if constants is None:
            raise self._other_program(sizes)
        program.check_reshapes(sizes)
        for name, size in zip(program.unfitted, constants.sizes, strict=True):
            if size > subject.bucket[name]:
                raise ArgumentError(
                    f"at {shown(sizes)} the size {name} of an array inside of the function is "
                    f"{size}, compiled for {name} at most {subject.bucket[name]}; lower it with "
                    "arguments of these sizes"
                )
        return ResolvedCall(subject.call.tokens, sizes, program, size_constants=constants)

    def _beyond(self, signed: SignedCall, beyond: Mapping[str, int]) -> Iterator[str]:
        """A line for each size that is beyond its bucket, at the first argument that has it."""
        args, kwargs = signed.tree.unflatten(signed.leaves)
        given = facts_of_call(args, kwargs, self._subject.name_of).leaves
        for variable, size in beyond.items():
            for made, called in zip(self._facts.leaves, given, strict=True):
                if variable not in _variables_in(made.shape):
                    continue
                shown_size = called.value if made.dtype is None else called
                yield (
                    f"{made.path}: compiled for {made} with {variable} at most "
                    f"{self._subject.bucket[variable]}, called with {shown_size}, where "
                    f"{variable} is {size}"
                )
                break

    def _other_program(self, sizes: Mapping[str, int]) -> ArgumentError:
        program = self._subject.program
        broken = [str(g) for g in program.guards if not g.holds(sizes)]
        broken = broken or list(map(str, program.presumed))
        return ArgumentError(
            f"{shown(sizes)} needs another program: this one holds for "
            f"{' and '.join(broken) or 'sizes at which the function traces alike'}; lower it "
            "again with arguments of these sizes"
        )


def _size_like(made: Any, size: Any) -> Any:
    """An argument that is a size, as an int of the same class: ``jit`` tells NumPy's from Python's.

    The program takes the value from its sizes.
    """
    return int(size) if isinstance(made, int) else np.asarray(int(size)).astype(made.dtype)[()]


def _variables_in(shape: tuple[int | str, ...]) -> set[str]:
    return {v for axis in shape if isinstance(axis, str) for v in variables_of(axis)}
