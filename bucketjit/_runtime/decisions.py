"""Decides what a call does: masked in a bucket, or at its exact shape.

Calls, `explain` and warm-up all ask here, so they cannot disagree. Deciding
compiles and runs nothing. So building the executable may still find that the program cannot be
masked; that is noted in `Refusals`, and the next decision is `Unpadded`.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from bucketjit._compile.argument_types import padded_leaf_shapes
from bucketjit._compile.requests import Requests
from bucketjit._events import shown
from bucketjit._ir.interface import Interface
from bucketjit._ir.program import Program
from bucketjit._jax.arrays import key_impl
from bucketjit._jax.jaxprs import all_equations, name_of
from bucketjit._runtime.buckets import ChoosesBuckets
from bucketjit._tracing.call import Call
from bucketjit._tracing.computed.sizes import Noticing, SizeIsComputed
from bucketjit.errors import ArgumentError, MaskingError


class Refusals:
    """The refusals found when executables were built.

    Keys are those of executables: a program, and the padded sizes of its bucket.

    Attributes:
        eager: The signatures whose function ``jit`` cannot trace, as it computes sizes.
        batches: Why programs that were looked at take one example at a time; None for one that
            takes several.
        version: Grows whenever a program is refused: decisions from before may not hold any more.
    """

    def __init__(self) -> None:
        self.version = 0
        self.eager: weakref.WeakSet[Any] = weakref.WeakSet()
        self.batches = weakref.WeakKeyDictionary[Interface, MaskingError | None]()
        # By the padded sizes of a bucket; None stands for all buckets.
        self._by_bucket = weakref.WeakKeyDictionary[Interface, dict[Hashable, MaskingError]]()

    def note(self, key: tuple[Interface, Hashable], refusal: MaskingError) -> None:
        program, bucket = key
        place = bucket if refusal.in_bucket else None
        self._by_bucket.setdefault(program, {})[place] = refusal.without_frames()
        self.version += 1

    def of_program(self, program: Interface) -> MaskingError | None:
        """Why a program cannot be masked in any bucket; None if it may be possible."""
        return self._by_bucket.get(program, {}).get(None) or program.refusal

    def of(self, key: tuple[Interface, Hashable]) -> MaskingError | None:
        """Why a program cannot be masked in a bucket; None if it may be possible."""
        program, bucket = key
        refusals = self._by_bucket.get(program, {})
        return refusals.get(None) or refusals.get(bucket)

    def note_batches(self, program: Interface, refusal: MaskingError | None) -> None:
        """Remember whether a program takes several examples at a time."""
        self.batches[program] = None if refusal is None else refusal.without_frames()
        self.version += refusal is not None

    def of_batches(
        self, program: Interface, call: Call, mapped: Collection[int]
    ) -> MaskingError | None:
        """Why the examples of a program run one by one; None if they can run in batches."""
        if not isinstance(program, Program):
            return OF_FILE
        if any(call.signature.types[i].dtype == jax.dtypes.float0 for i in mapped):
            return MaskingError("an argument is of dtype float0")
        if program not in self.batches:
            why, remedy = _why_not(program), "leave that out of the function, or call it alone"
            self.note_batches(program, None if why is None else MaskingError(why, remedy))
        return self.batches.get(program)

    def compiled_exact(self, call: Call, compile: Callable[[], Any]) -> Any | None:
        """What compiles the exact shape of a call; None if the function runs without ``jit``."""
        is_presumed = call.program is not None and call.program.presumed
        if is_presumed or getattr(call.refusal, "computes_sizes", False):
            self.eager.add(call.signature)
        if call.signature not in self.eager:
            try:
                with Noticing().active():
                    return compile()
            except SizeIsComputed:
                self.eager.add(call.signature)
        return None

    def clear(self) -> None:
        self._by_bucket.clear()
        self.batches.clear()
        self.version += 1


_REMEDY = (
    "choose a bucket of that size (explain() shows the bucket), or give the rows of each process "
    "to a bucketed function made by .with_processes(mesh, axis)"
)


def refuse_global(call: Call, bucket: Mapping[str, int]) -> None:
    """Refuse a call with an array of several processes that would have to be padded."""
    if jax.process_count() == 1:
        return
    spread = [
        i
        for i, leaf in enumerate(call.leaves)
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    ]
    if not spread:
        return
    signature = call.signature
    pads = dict(padded_leaf_shapes(call, bucket))
    for i in spread:
        shape = tuple(call.shapes[i])
        if pads.get(i, shape) != shape:
            raise ArgumentError(
                f"{signature.paths[i]}: an array of shape {shape} on the devices of several "
                f"processes cannot be padded to {pads[i]}, as no process holds all of it; {_REMEDY}"
            )
    assert call.program is not None
    if call.program.open_outs and any(bucket[v] != n for v, n in call.sizes.items()):
        raise ArgumentError(
            f"{signature.paths[spread[0]]}: an array on the devices of several processes makes "
            f"results that are spread over them too, and results of the bucket {shown(bucket)} "
            f"would have to be cut to {shown(call.sizes)}; {_REMEDY}"
        )


@dataclass(frozen=True)
class Masked:
    """The call is padded to a bucket; ``beyond`` says why some variables keep their size."""

    program: Interface
    bucket: Mapping[str, int]
    beyond: str | None = None

    @property
    def key(self) -> tuple[Interface, Hashable]:
        return Requests.masked_key(self.program, self.bucket)


class Because(enum.Enum):
    """The kinds of reasons for which a call runs at its exact shape."""

    NO_OPEN_AXIS = "no axis is open"
    EMPTY = "all open axes have size 0"
    BEYOND = "the user wants sizes beyond the largest bucket exact"
    UNMASKED = "the program cannot be masked"


@dataclass(frozen=True)
class Unpadded:
    """The call runs at its exact shape; only `Because.UNMASKED` is a fallback."""

    because: Because
    why: MaskingError


Decision = Masked | Unpadded

NO_STRATEGY = MaskingError(
    "there is no strategy: every size has an executable of its own",
    'choose buckets, such as bucketjit.jit(fn, buckets="pow2")',
)
_NO_OPEN_AXIS = MaskingError("no axis is open")
_EMPTY = MaskingError("an axis of size 0 has no bucket")


class Decisions:
    """Decides the calls of one configuration."""

    def __init__(self, buckets: ChoosesBuckets, refusals: Refusals) -> None:
        self._buckets = buckets
        self._refusals = refusals

    def decide(self, call: Call) -> Decision:
        program = call.program
        if program is None:
            if call.refusal is not None:
                return Unpadded(Because.UNMASKED, call.refusal)
            if any(0 in shape for shape in call.shapes):
                return Unpadded(Because.EMPTY, _EMPTY)
            return Unpadded(Because.NO_OPEN_AXIS, _NO_OPEN_AXIS)
        program.check_reshapes(call.sizes)
        # Refusals of the program come before the bucket: a call that runs exact anyway must not
        # raise because its size is beyond the largest bucket.
        if (refusal := self._refusals.of_program(program)) is not None:
            return Unpadded(Because.UNMASKED, refusal)
        bucket = self._buckets.of(program, call)
        # `Overflow.EXACT` has left sizes beyond the largest bucket in `bucket` as they are. If that
        # is all of them, there is nothing to mask.
        beyond, is_unpadded = self._buckets.beyond(program, call.sizes) or (None, False)
        if beyond is not None and is_unpadded:
            return Unpadded(Because.BEYOND, MaskingError(beyond))
        refuse_global(call, bucket)
        masked = Masked(program, bucket, beyond)
        if (refusal := self._refusals.of(masked.key)) is not None:
            return Unpadded(Because.UNMASKED, refusal)
        return masked


# --- many examples at once ---

# Random bits of this generator depend on the key alone. The others draw the bits of all rows from
# one key under `vmap`.
_PER_KEY = "threefry2x32"

OF_FILE = MaskingError("a function from a file has modules for one example at a time")


def _why_not(program: Program) -> str | None:
    """Why a program does more for each example than compute its results alone; None if not."""
    if program.counts:
        return "its results or decisions depend on sizes that it computes, each example its own"
    if program.jaxpr.effects:
        kinds = sorted(type(effect).__name__ for effect in program.jaxpr.effects)
        return f"the program has effects ({', '.join(dict.fromkeys(kinds))})"
    for eqn in all_equations(program.jaxpr):
        if name_of(eqn) in ("rng_bit_generator", "rng_uniform"):
            return f"{name_of(eqn)} draws other numbers in a batch"
        for atom in (*eqn.invars, *eqn.outvars):
            dtype = getattr(atom.aval, "dtype", None)
            is_key = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
            if is_key and (generator := key_impl(dtype)) != _PER_KEY:
                return f"keys of {generator} draw other numbers in a batch"
    return None
