"""What the stages have in common: the types of arguments and results, and the bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.tree_util import PyTreeDef

from bucketjit._events import shown
from bucketjit._jax.jaxprs import shaped
from bucketjit._stages.subject import Subject


class StageTypes(NamedTuple):
    """The types of arguments and results.

    Attributes:
        ins: Abstract value of each argument leaf.
        out_tree: Tree of the results.
        outs: Type of each result.
    """

    ins: Sequence[Any]
    out_tree: PyTreeDef
    outs: Sequence[jax.ShapeDtypeStruct]


def symbolic_types(subject: Subject) -> StageTypes:
    """The types of a call that is padded: open axes have symbolic sizes."""
    program = subject.program
    shapes = iter(program.in_shapes)
    number = jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(int), weak_type=True)
    ins = [
        number
        if kind.dtype is None
        else jax.ShapeDtypeStruct(next(shapes), kind.dtype, weak_type=kind.weak_type)
        for kind in subject.signed.signature.types
    ]
    outs = [
        jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)
        for shape, (dtype, weak) in zip(program.out_shapes, program.out_types, strict=True)
    ]
    return StageTypes([shaped(x) for x in ins], subject.call.out_tree, outs)


def exact_types(stage: Any) -> StageTypes:
    """The types of a call at its exact shape."""
    ins = jax.tree_util.tree_leaves(stage.in_avals)
    outs = jax.tree_util.tree_leaves(stage.out_info)
    plain = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=_is_weak(x)) for x in outs]
    return StageTypes(ins, jax.tree_util.tree_structure(stage.out_info), plain)


def _is_weak(struct: Any) -> bool:
    return bool(getattr(struct, "weak_type", False))


class Stage:
    """The properties that all stages have.

    Args:
        subject: The call.
        types: The types of its arguments and results.
    """

    _subject: Subject
    _types: StageTypes

    def __init__(self, subject: Subject, types: StageTypes) -> None:
        self._subject = subject
        self._types = types

    @property
    def bucket(self) -> Mapping[str, int]:
        """Padded size of each dimension variable; the logical sizes if `exact`."""
        return MappingProxyType(dict(self._subject.bucket))

    @property
    def variables(self) -> tuple[str, ...]:
        """The dimension variables, in the order of the sizes in argument 0 of the module.

        Sizes that no expression of the others fits follow at the end. Empty if `exact`.
        """
        return () if self.exact else self._subject.call.variables

    @property
    def exact(self) -> bool:
        """Whether it runs at its exact shape, unpadded, and takes that one shape only."""
        return self._subject.exact

    @property
    def in_tree(self) -> PyTreeDef:
        """Tree of the pair of positional and keyword arguments, without static ones."""
        tree: PyTreeDef = self._subject.signed.tree
        return tree

    @property
    def in_avals(self) -> Any:
        """Tree of the abstract arguments, with symbolic sizes where axes are open."""
        return self.in_tree.unflatten(self._types.ins)

    @property
    def out_tree(self) -> PyTreeDef:
        """Tree of the results."""
        return self._types.out_tree

    @property
    def out_info(self) -> Any:
        """Tree of a ``jax.ShapeDtypeStruct`` for each result, with symbolic sizes likewise."""
        return self.out_tree.unflatten(self._types.outs)

    @property
    def computed(self) -> tuple[str, ...]:
        """The sizes that the program computes, such as ``"size_1 - 1 <= n"``, and the lines.

        Results of such a size have it in `out_info`. What the program presumes of them follows.
        """
        return () if self.exact else self._subject.program.computed_in_words()

    @property
    def args_info(self) -> Any:
        """Tree of a ``jax.stages.ArgInfo`` for each argument leaf: its type; whether it is donated.

        Of a donated argument with open axes the padded copy is donated, if a result can reuse it.
        """
        args, kwargs = self.in_tree.unflatten(range(self.in_tree.num_leaves))
        donated = {
            i
            for place in self._subject.signed.donate
            for i in jax.tree_util.tree_leaves(args[place])
        }
        infos = [jax.stages.ArgInfo(aval, i in donated) for i, aval in enumerate(self._types.ins)]
        return jax.tree_util.tree_map(infos.__getitem__, (args, kwargs))

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of the donated leaves among all argument leaves."""
        infos = jax.tree_util.tree_leaves(self.args_info)
        return tuple(i for i, info in enumerate(infos) if info.donated)

    def __repr__(self) -> str:
        where = shown(self.bucket) or "no open axes"
        kind = "exact, " if self.exact else ""
        return f"{type(self).__name__}({self._subject.engine.name}: {kind}{where})"
