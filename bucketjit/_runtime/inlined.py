"""Tells of calls inside ``jit``, ``vmap`` and the like, where the function itself runs."""

from __future__ import annotations

import warnings

from bucketjit._config import Config
from bucketjit._events import LONGEST, Event, emit, printable
from bucketjit._jax.transformations import innermost_transformation, only_shapes
from bucketjit._raised import frames_inside
from bucketjit._runtime.counters import Counters
from bucketjit.errors import InlinedWarning

INLINED = (
    "so it runs there as it is: nothing is padded, and what is around it compiles for each size. "
    "Call the bucketed function outside, or make it the outermost one: bucketjit.jit in the place "
    "of jax.jit, its map in the place of jax.vmap, and bucketjit.integrations in the place of the "
    "jit of a library."
)


def note_inlined(config: Config, name: str, counters: Counters, what: str = INLINED) -> None:
    """Count a call that is inlined; the first one is an event, and warned of.

    There is no warning without a strategy, as nothing would be padded anyway, nor inside another
    bucketed function, which pads its own arguments. ``jax.eval_shape`` runs nothing, so it does not
    count; nor does a later ``jit`` that has its trace.

    Warns:
        InlinedWarning: See above.
    """
    if only_shapes() or not counters.inlined():
        return
    from bucketjit._tracing.mutations import is_traced_here

    where = innermost_transformation()
    why = f"is called inside {where}, {what}"
    emit(Event("inlined", name, detail=why), config.listeners)
    if not config.always_exact and not is_traced_here():
        message = printable(f"{name} {why}", LONGEST)
        warnings.warn(message, InlinedWarning, stacklevel=frames_inside())
