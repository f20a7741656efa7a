"""The call that a stage is about, what is decided about it, and what all stages tell of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.tree_util import PyTreeDef

from bucketjit._compile.argument_types import without_values
from bucketjit._config import is_int_from
from bucketjit._events import shown
from bucketjit._ir.program import Program
from bucketjit._jax.jaxprs import shaped
from bucketjit._runtime.decisions import Because, Masked
from bucketjit._runtime.engine import Engine
from bucketjit._tracing.call import Call
from bucketjit._tracing.computed.sizes import Noticing, SizeIsComputed
from bucketjit.errors import MaskingError, SpecError

Inside = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]


@dataclass(frozen=True, eq=False)
class Subject:
    """The call that a stage is about.

    Attributes:
        engine: The engine of the bucketed function.
        inside: Makes a call inside a transformation, as the bucketed function does.
        call: The call, resolved, with types in the place of its arrays.
        bucket: Padded size of each variable; the logical sizes if it is exact.
        exact: Whether it is lowered at its exact shape.
        epoch: The epoch of the provider when it was resolved.
    """

    engine: Engine
    inside: Inside
    call: Call
    bucket: Mapping[str, int]
    exact: bool
    epoch: object

    @property
    def program(self) -> Program:
        """The program. The subject is not exact."""
        assert isinstance(self.call.program, Program)
        return self.call.program

    def name_of(self, position: int) -> str:
        """How errors name a positional argument of compiled calls, which leave static ones out."""
        positions = self.call.dynamic
        if position < len(positions):
            return self.engine.signer.name(positions[position])
        return self.engine.signer.name(position + len(self.call.statics.positional))

    @contextmanager
    def without_computed_sizes(self) -> Iterator[None]:
        """A context for a trace by ``jit`` at the exact shape, where sizes cannot be computed."""
        try:
            with Noticing().active():
                yield
        except SizeIsComputed:
            program, refusals = self.call.program, self.engine.refusals
            why = self.call.refusal if program is None else refusals.of_program(program)
            because = f", which is not masked: {why.reason}" if why is not None else ""
            raise MaskingError(
                f"the function computes sizes, so jit cannot take it at its exact shape{because}",
                (why and why.remedy) or "call the bucketed function, which runs it unpadded",
            ) from None

    def in_bucket(self, sizes: Any) -> Subject:
        logical, wrong = self.call.sizes, ""
        if self.exact:
            wrong = "is for calls that are padded; this one runs at its exact shape"
        elif not isinstance(sizes, Mapping):
            wrong = f"must be a dict such as {{'n': 16}}, got {sizes!r}"
        elif unknown := [v for v in sizes if v not in logical]:
            wrong = f"names {unknown[0]!r}; the variables are {', '.join(logical)}"
        if wrong:
            raise SpecError(f"lower: bucket {wrong}")
        for v, size in sizes.items():
            if not is_int_from(size, logical[v]):
                raise SpecError(
                    f"lower: bucket[{v!r}] must be an int of at least {logical[v]}, the size in "
                    f"the call, got {size!r}"
                )
        bucket = {v: int(sizes.get(v, self.bucket[v])) for v in logical}
        program = self.program
        unfitted = program.unfitted_sizes(bucket) if program.fits(bucket) else None
        if unfitted is None:
            raise SpecError(
                f"lower: the program does not hold at {shown(bucket)}: its guards are "
                f"{', '.join(map(str, program.guards)) or 'those of its traces'}"
            )
        constants = zip(program.unfitted, self.call.size_constants.sizes, strict=True)
        room = {v: max(n, unfitted.get(v, 0)) for v, n in constants}
        return dataclasses.replace(self, bucket={**bucket, **room})


def subject_of(engine: Engine, inside: Inside, call: Call) -> Subject:
    """Resolve and decide a call, without running it."""
    epoch = engine.provider.epoch
    call = without_values(call)
    if engine.config.always_exact:
        call = call.resolved(call.signature.declared(call.shapes))
        return Subject(engine, inside, call, dict(call.sizes), True, epoch)
    call, decision = engine.chosen(call)
    if isinstance(decision, Masked):
        return Subject(engine, inside, call, dict(decision.bucket), False, epoch)
    if decision.because is Because.UNMASKED:
        engine.note_fallback(decision.why, counted=True)
    return Subject(engine, inside, call, dict(call.sizes), True, epoch)


class StageTypes(NamedTuple):
    """The abstract value of each argument leaf; the tree of the results, and the type of each."""

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
        for kind in subject.call.signature.types
    ]
    outs = [
        jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)
        for shape, (dtype, weak) in zip(program.out_shapes, program.out_types, strict=True)
    ]
    return StageTypes([shaped(x) for x in ins], subject.call.out_tree, outs)


def exact_types(stage: Any) -> StageTypes:
    ins = jax.tree_util.tree_leaves(stage.in_avals)
    outs = jax.tree_util.tree_leaves(stage.out_info)
    plain = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=bool(getattr(x, "weak_type", False)))
        for x in outs
    ]
    return StageTypes(ins, jax.tree_util.tree_structure(stage.out_info), plain)


class Stage:
    """The properties that all stages have.

    Args:
        subject: The call.
        types: The types of its arguments and results.
    """

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
        return self._subject.call.tree

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

        Of a donated argument that is padded the copy is donated.
        """
        args, kwargs = self.in_tree.unflatten(range(self.in_tree.num_leaves))
        donated = self._subject.call.donated_leaves
        infos = [jax.stages.ArgInfo(aval, i in donated) for i, aval in enumerate(self._types.ins)]
        return jax.tree_util.tree_map(infos.__getitem__, (args, kwargs))

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of the donated leaves among all argument leaves."""
        return tuple(sorted(self._subject.call.donated_leaves))

    def __repr__(self) -> str:
        where = shown(self.bucket) or "no open axes"
        kind = "exact, " if self.exact else ""
        return f"{type(self).__name__}({self._subject.engine.name}: {kind}{where})"
