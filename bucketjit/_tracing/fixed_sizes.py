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
from bucketjit._ir.program import Program, TraceRefused
from bucketjit._tracing.held_output import holding_output
from bucketjit._tracing.resolution import Resolution

_OTHERS = (3, 0), (4, 1)  # the sizes that a trace is tried at, each by a factor and a number

_REMEDY = (
    "compare sizes, compute on them with jax.numpy, do not use them as keys; or leave that axis "
    "static"
)


Again = Callable[[Mapping[str, int]], Resolution]


def refusing_one_size(
    call: Resolution,
    constraints: Sequence[str],
    fn: Any,
    programs: Sequence[Interface],
    run: Callable[[dict[str, int]], object],
    again: Again,
) -> Resolution:
    """A call whose program serves one size, with the reason if other sizes have such programs.

    ``run`` traces as the exact run does; a function that keeps what it makes by size fails there
    (``table[n] = jnp.arange(n)``), so its program serves. ``again`` resolves the call at other
    sizes. It is not asked if one of the programs has such a reason: a trace of each is dear enough.
    """
    program, sizes = call.program, call.sizes
    if not isinstance(program, Program) or program.computed or program.pairing:
        return call
    users = fixed_by(map(parse_constraint, constraints), sizes)
    users |= {v for v, n in sizes.items() if n == 1}  # which broadcasts, in a program of its own
    if not sizes.keys() - users or fixed_by(program.guards, sizes) < sizes.keys():
        return call
    from bucketjit._tracing.concrete import at_other_sizes

    if at_other_sizes(functools.partial(run, sizes)) is None:
        return call
    for factor, more in () if any(p.refusal for p in programs) else _OTHERS:
        ordered = enumerate(sorted(sizes.items()), more)  # no two that are equal stay so
        larger = {v: n if v in users else factor * n + i for i, (v, n) in ordered}
        with holding_output() as output:
            output.is_dropped = True
            other = at_other_sizes(functools.partial(again, larger))
        if other and other.program and fixed_by(other.program.guards, larger) < sizes.keys():
            return call
    line = next(filter(None, map(program.places.get, reversed(program.guards))), "")
    names = ", ".join(sorted(sizes))
    why = TraceRefused(f"each size of {names} has a program of its own{line}", _REMEDY)
    return replace(call, program=replace(program, refusal=why.placed(fn)))
