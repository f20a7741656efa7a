"""The call that a stage is about, and what is decided about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bucketjit._compile.argument_types import without_values
from bucketjit._config import is_int_from
from bucketjit._events import shown
from bucketjit._ir.computed_sizes import Noticing, SizeIsComputed
from bucketjit._runtime.decisions import Because, Exact, Masked, Refused
from bucketjit._runtime.engine import Engine
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall
from bucketjit._signature.structs import sign_like
from bucketjit._tracing.program import Program
from bucketjit.errors import MaskingError, SpecError

Inside = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]


@dataclass(frozen=True, eq=False)
class Subject:
    """The call that a stage is about.

    Attributes:
        engine: The engine of the bucketed function.
        inside: Makes a call inside a transformation, as the bucketed function does.
        signed: The call, with types in the place of its arrays.
        call: The same call, resolved.
        bucket: Padded size of each variable; the logical sizes if it is exact.
        exact: Whether it is lowered at its exact shape.
        epoch: The epoch of the provider when it was resolved.
    """

    engine: Engine
    inside: Inside
    signed: SignedCall
    call: ResolvedCall
    bucket: Mapping[str, int]
    exact: bool
    epoch: object

    @property
    def program(self) -> Program:
        """The program. The subject is not exact."""
        assert isinstance(self.call.program, Program)
        return self.call.program

    @property
    def is_cleared(self) -> bool:
        """Whether the cache was cleared since the call was resolved."""
        return self.engine.provider.epoch is not self.epoch

    def name_of(self, position: int) -> str:
        """How errors name a positional argument of compiled calls, which leave static ones out."""
        positions = self.signed.dynamic
        if position < len(positions):
            return self.engine.signer.name(positions[position])
        return self.engine.signer.name(position + len(self.signed.statics.positional))

    @contextmanager
    def without_computed_sizes(self) -> Iterator[None]:
        """A context for a trace by ``jit`` at the exact shape, where sizes cannot be computed."""
        try:
            with Noticing().active():
                yield
        except SizeIsComputed:
            program, call = self.call.program, self.call
            refusals = self.engine.refusals
            why = refusals.of_program(program) if program is not None else call.refusal
            told = f", which is not masked: {why.reason}" if why is not None else ""
            raise MaskingError(
                f"the function computes sizes, so jit cannot take it at its exact shape{told}",
                (why and why.remedy) or "call the bucketed function, which runs it unpadded",
            ) from None

    def as_exact(self) -> Subject:
        """The same call, lowered at its exact shape."""
        return dataclasses.replace(self, bucket=dict(self.call.sizes), exact=True)

    def in_bucket(self, sizes: Mapping[str, int]) -> Subject:
        """The same call, in another bucket."""
        if self.exact:
            raise SpecError(
                "lower: bucket is for calls that are padded; this one runs at its exact shape"
            )
        if not isinstance(sizes, Mapping):
            raise SpecError(f"lower: bucket must be a dict such as {{'n': 16}}, got {sizes!r}")
        known = self.call.sizes
        for variable, size in sizes.items():
            if variable not in known:
                raise SpecError(
                    f"lower: bucket names {variable!r}; the variables are {', '.join(known)}"
                )
            if not is_int_from(size, known[variable]):
                raise SpecError(
                    f"lower: bucket[{variable!r}] must be an int of at least {known[variable]}, "
                    f"the size in the call, got {size!r}"
                )
        bucket = {v: int(sizes.get(v, self.bucket[v])) for v in known}
        program = self.program
        unfitted = program.unfitted_sizes(bucket) if program.fits(bucket) else None
        if unfitted is None:
            raise SpecError(
                f"lower: the program does not hold at {shown(bucket)}: its guards are "
                f"{', '.join(map(str, program.guards)) or 'those of its traces'}"
            )
        logical = dict(zip(program.unfitted, self.call.size_constants.sizes, strict=True))
        room = {v: max(n, unfitted.get(v, 0)) for v, n in logical.items()}
        return dataclasses.replace(self, bucket={**bucket, **room})


def subject_of(
    engine: Engine, inside: Inside, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Subject:
    """Sign, resolve and decide a call, without running it."""
    epoch = engine.provider.epoch
    signed = without_values(sign_like(engine.signer, args, kwargs))
    signature, shapes = signed.signature, signed.shapes
    if engine.config.always_exact:
        sizes = signature.declared_sizes(shapes)
        call = ResolvedCall(signature.declared_tokens(shapes), sizes, None)
        return Subject(engine, inside, signed, call, dict(sizes), True, epoch)
    call = engine.resolve(signed)
    match engine.chosen(signed, call):
        case Masked(_, bucket):
            return Subject(engine, inside, signed, call, dict(bucket), False, epoch)
        case Exact(because, why):
            if because is Because.UNMASKED:
                engine.note_fallback(why, counted=True)
            return Subject(engine, inside, signed, call, dict(call.sizes), True, epoch)
        case Refused(error):
            raise error
