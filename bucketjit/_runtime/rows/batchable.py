"""Decide whether a program can run for many examples at once.

``jax.vmap`` of a masked program gives each row what it has alone, except for programs that do more
than compute their results, or whose random numbers depend on what else is computed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax

from bucketjit._ir.interface import Interface
from bucketjit._ir.program import Program
from bucketjit._jax.arrays import key_impl
from bucketjit._jax.jaxprs import all_equations, name_of
from bucketjit._runtime.engine import Engine
from bucketjit._tracing.call import Call
from bucketjit.errors import MaskingError

# Random bits of this generator depend on the key alone. The others draw the bits of all rows from
# one key under `vmap`.
_PER_KEY = "threefry2x32"

OF_FILE = MaskingError("a function from a file has modules for one example at a time")


def why_not_batched(
    engine: Engine, program: Interface, call: Call, mapped: Collection[int]
) -> MaskingError | None:
    """Why the examples of a program run one by one; None if they can run in batches."""
    if not isinstance(program, Program):
        return OF_FILE
    kinds = [call.signature.types[i].dtype for i in mapped]
    if any(kind == jax.dtypes.float0 for kind in kinds if kind is not None):
        return MaskingError("an argument is of dtype float0")
    if not engine.refusals.is_known_for_batches(program):
        why, remedy = _why_not(program), "leave that out of the function, or call it alone"
        engine.refusals.note_batches(program, None if why is None else MaskingError(why, remedy))
    return engine.refusals.of_batches(program)


def _why_not(program: Program) -> str | None:
    if program.counts:
        return "its results or decisions depend on sizes that it computes, each example its own"
    if program.jaxpr.effects:
        kinds = sorted(type(effect).__name__ for effect in program.jaxpr.effects)
        return f"the program has effects ({', '.join(dict.fromkeys(kinds))})"
    for eqn in all_equations(program.jaxpr):
        if name_of(eqn) in ("rng_bit_generator", "rng_uniform"):
            return f"{name_of(eqn)} draws other numbers in a batch"
        for atom in (*eqn.invars, *eqn.outvars):
            generator = _generator(atom)
            if generator is not None and generator != _PER_KEY:
                return f"keys of {generator} draw other numbers in a batch"
    return None


def _generator(atom: Any) -> Any:
    """The generator of a typed key; None for any other value."""
    dtype = getattr(atom.aval, "dtype", None)
    if dtype is None or not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return None
    return key_impl(dtype)
