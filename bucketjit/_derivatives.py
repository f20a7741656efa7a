"""Calls under ``jax.grad`` and its kin: which of them are bucketed, and how they are served."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from bucketjit import _autodiff, _jax
from bucketjit._axes import STATIC
from bucketjit._config import Config
from bucketjit._dims import is_symbolic, variables_of
from bucketjit._engine import Engine
from bucketjit._errors import MaskingError
from bucketjit._family import Call
from bucketjit._results import Out
from bucketjit._signing import Signed
from bucketjit._trace import Program

Make = Callable[[Config], Callable[..., Any]]


class Derivatives:
    """The differentiable functions of an executor.

    Args:
        engine: Serves its calls.
        make: Makes an executor that shares cache and counters with this one.
    """

    def __init__(self, engine: Engine, make: Make) -> None:
        self._engine = engine
        self._make = make
        self._functions: dict[Any, _autodiff.Bucketed] = {}

    def clear(self) -> None:
        """Forget them."""
        self._functions.clear()

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
        """What makes a call that is differentiated; None if it is not bucketed.

        Raises:
            FallbackError: It is not, and the policy is to raise.
        """
        engine = self._engine
        with _jax.eval_context():
            signed = engine.signer.sign(args, kwargs)
            call = engine.resolve(signed)
        program = call.program
        refusal: MaskingError | None = call.refusal
        if program is not None:
            refusal = engine.refused.get(program) or _refused(signed, program)
        if refusal is not None:
            engine.note_fallback(refusal)
        if program is None or refusal is not None:
            return None
        tree = program.out_tree
        with engine.lock:
            key = (signed.family, call.tokens, program)
            fn = self._functions.get(key)
            if fn is None:
                fn = self._functions[key] = self._differentiable(signed, call, program)
        return lambda: tree.unflatten(_autodiff.call(fn, signed.leaves))

    def _differentiable(self, signed: Signed, call: Call, program: Program) -> _autodiff.Bucketed:
        signed = dataclasses.replace(signed, leaves=[])  # kept, and the arguments need not be
        engine, family = self._engine, signed.family

        def flat(*leaves: Any) -> list[Any]:
            args, kwargs = signed.tree.unflatten(leaves)
            return jax.tree_util.tree_leaves(family.fn(*args, **kwargs))

        def execute(*leaves: Any) -> list[Any]:
            shapes = [np.shape(x) for x in leaves]
            given = dataclasses.replace(signed, leaves=list(leaves), shapes=shapes)
            return jax.tree_util.tree_leaves(engine.serve(given))

        def derive(fn: Callable[..., list[Any]], ins: _autodiff.Shapes) -> Callable[..., list[Any]]:
            names = {v for row in ins for t in row if t != STATIC for v in variables_of(t)}
            return self._make(
                dataclasses.replace(
                    engine.config,
                    fn=fn,
                    per_dim={v: s for v, s in engine.config.per_dim.items() if v in names},
                    overflow_per_dim={
                        v: p for v, p in engine.config.overflow_per_dim.items() if v in names
                    },
                    dynamic_axes=tuple(", ".join(row) if row else None for row in ins),
                    constraints=(),
                    static_argnums=(),
                    static_argnames=(),
                    donate_argnums=(),
                    out=Out.JAX,
                )
            )

        flat.__name__ = engine.name
        _autodiff.register()
        outs = tuple(
            tuple(str(d) if is_symbolic(d) else STATIC for d in shape)
            for shape in program.out_shapes
        )
        ins = tuple(tuple(STATIC if t.isdigit() else t for t in row) for row in call.tokens)
        # An executable that donates its arguments must not be given those of a derivative, and
        # results are differentiated as arrays.
        as_it_is = not signed.donate and engine.config.out is Out.JAX
        run = execute if as_it_is else derive(flat, ins)
        dtypes = tuple(dtype for dtype, _ in program.out_types)
        return _autodiff.Bucketed(flat, run, ins, outs, derive, dtypes)


def _refused(signed: Signed, program: Program) -> MaskingError | None:
    """Why derivatives of a program are not bucketed, if they are not."""
    if any(t.dtype is None for t in signed.family.types):
        return MaskingError(
            "a function of a size argument is not differentiated in buckets",
            "open an axis of an array in its place, or make an executor of its gradient",
        )
    if program.jaxpr.effects:
        return MaskingError(
            "a derivative in buckets would run the function's effects (io_callback, debug.print) "
            "once more",
            "make an executor of the gradient",
        )
    return None
