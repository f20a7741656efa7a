"""Programs that serve one size of an axis, because the function uses the size itself.

{512: a}.get(n)        at n = 300 a guard n == 300, at 301 another program: told as a fallback
if n == 1: ...         a program for n == 1, and one for all other sizes: nothing is told
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bucketjit._ir.guards import fixed_by, parse_constraint
from bucketjit._ir.interface import Interface
from bucketjit._ir.program import Leaf, Program, TraceRefused
from bucketjit._tracing.axis_guesses import Shapes
from bucketjit._tracing.concrete import at_other_sizes
from bucketjit._tracing.held_output import keeping_output
from bucketjit._tracing.resolution import Resolution

_OTHERS = (3, 0), (2, 1)  # the sizes that a trace is tried at, each by a factor and a number

_REMEDY = (
    "compare sizes, compute on them with jax.numpy, do not use them as keys; or leave that axis "
    "static"
)


def told(
    program: Program,
    sizes: Mapping[str, int],
    constraints: Sequence[str],
    fn: Callable[..., Any],
    leaves: Sequence[Leaf],
    known: Sequence[Interface],
    resolve: Callable[[Shapes], Resolution],
) -> Program:
    """A program that serves one size, with the reason if other sizes have programs likewise."""
    fixed = fixed_by(program.guards, sizes) - fixed_by(map(parse_constraint, constraints), sizes)
    # JAX computes otherwise along an axis of size 1, so concrete traces differ there.
    if not fixed or program.computed or (program.pairing and all(sizes[v] == 1 for v in fixed)):
        return program
    # Of a function that was told of no other size is tried: a trace of each size is dear enough.
    for factor, more in () if any(p.refusal or p.kept for p in known) else _OTHERS:
        larger = {v: factor * n + more if v in fixed else n for v, n in sizes.items()}
        with keeping_output():  # nobody is shown it
            at_larger = functools.partial(resolve, [leaf.at(larger) for leaf in leaves])
            other = at_other_sizes(at_larger)
        if other and other.program and not fixed & fixed_by(other.program.guards, larger):
            return program
    about = reversed([guard for guard in program.guards if guard.variables & fixed])
    line = next(filter(None, map(program.places.get, about)), "")
    if program.pairing is not None and program.pairing.why:
        line = f": {program.pairing.why}"
    names = ", ".join(sorted(fixed))
    why = TraceRefused(f"each size of {names} has a program of its own{line}", _REMEDY)
    kind = "refusal" if len(fixed) == len(sizes) else "kept"
    return replace(program, **{kind: why.placed(fn)})
