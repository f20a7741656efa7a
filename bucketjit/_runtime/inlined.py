"""Calls inside ``jit``, ``vmap`` and the like, where the function itself runs, and is told of."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from bucketjit._config import Config
from bucketjit._events import LONGEST, Event, emit, printable
from bucketjit._ir.jax_patches import forgetful_jax, selecting_jax
from bucketjit._jax.config import (
    innermost_transformation,
    only_differentiated,
    only_shapes,
)
from bucketjit._jax.patches.patch import Noticing
from bucketjit._raised import frames_inside
from bucketjit._runtime.computed_sizes import OF_TRACERS
from bucketjit._runtime.counters import Counters
from bucketjit._tracing.mutations import is_traced_here, refusing_mutations
from bucketjit._tracing.parameters import Static, Statics, without_static
from bucketjit._tracing.signer import Signer
from bucketjit.errors import InlinedWarning, SelectionError

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
        InlinedWarning: Of the first such call.
    """
    if only_shapes() or not counters.inlined():
        return
    where = innermost_transformation()
    why = f"is called inside {where}, {what}"
    emit(Event("inlined", name, detail=why), config.listeners)
    if not config.always_exact and not is_traced_here():
        message = printable(f"{name} {why}", LONGEST)
        warnings.warn(message, InlinedWarning, stacklevel=frames_inside())


def nested(
    fn: Callable[..., Any], signer: Signer, **options: Any
) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Any]:
    """A call of the function under ``jax.jit``, with its options; sizes among them are static."""

    @functools.wraps(fn, updated=())
    def with_sizes(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = signer.changed(without_static, args, kwargs)
        return fn(*args, **kwargs)

    static = signer.parameters
    numbers, names = sorted(static.static_nums), sorted(static.static_names)
    jitted = jax.jit(with_sizes, static_argnums=numbers, static_argnames=names, **options)

    def call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        args, kwargs = signer.with_static_sizes(args, kwargs)
        return jitted(*args, **kwargs)

    return call


class Inlined:
    """A function inside ``jit``, ``vmap`` and the like, where it is a part of what is around it.

    It sees what it would see under a ``jax.jit`` there. A change of an argument is refused, as in
    buckets.
    """

    def __init__(self, fn: Callable[..., Any], name: str, signer: Signer, **options: Any) -> None:
        self._fn, self._name, self._signer = fn, name, signer
        refusing = refusing_mutations(fn, signer.parameters.names(0))
        self._nested = nested(refusing, signer, inline=True, **options)
        self._eager: set[Statics] = set()  # of calls that compute sizes

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the function; without ``jit`` if it computes sizes, as under `jax.grad`.

        Raises:
            SelectionError: It computes a size inside of another transformation.
        """
        statics = self._signer.parameters.split(args, kwargs)[2]
        if not (only_differentiated() and statics in self._eager):
            try:
                return self._nested(args, kwargs)
            except OF_TRACERS:
                trial, quietly = Noticing(), contextlib.suppress(Exception)
                with quietly, forgetful_jax(), selecting_jax(), trial.active():
                    self._nested(args, kwargs)
                if not trial.noticed:
                    raise
        args, kwargs = self._signer.with_static_sizes(args, kwargs)
        args, kwargs = self._signer.changed(_as_array, args, kwargs)
        try:
            result = self._fn(*args, **kwargs)
        except OF_TRACERS as error:
            what = f"{self._name}: it computes a size inside jax.jit, vmap or scan"
            raise SelectionError(what, "call the bucketed function outside of these") from error
        self._eager.add(statics)
        return result


def _as_array(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Static) else jnp.asarray(leaf)
