"""Calls under ``jax.grad`` and the like: which run in buckets, and which engine serves them.

`bucketjit._runtime.equations` has what JAX sees of such a call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from bucketjit._arrays.padding import copied
from bucketjit._config import Config, Out
from bucketjit._ir.dynamic_axes import STATIC
from bucketjit._ir.expressions import is_symbolic, variables_of
from bucketjit._ir.program import Program
from bucketjit._jax.config import eval_context
from bucketjit._jax.jaxprs import first_effect
from bucketjit._jax.tracebacks import derived
from bucketjit._runtime.engine import Engine
from bucketjit._tracing.call import Call
from bucketjit.errors import MaskingError

if TYPE_CHECKING:
    from bucketjit._runtime import equations

Make = Callable[[Config], Callable[..., list[Any]]]  # a bucketed function


class Derivatives:
    """The differentiable functions of a bucketed function."""

    def __init__(self, engine: Engine, make: Make) -> None:
        self._engine = engine
        self._make = make
        self._functions: dict[Any, equations.Bucketed] = {}

    def clear(self) -> None:
        """Forget all derivatives."""
        self._functions.clear()

    def engine_at(self, call: Call, path: equations.Path) -> Engine:
        """The engine that serves the calls of a derivative."""
        call = self._engine.resolve(call)
        refusal = self.refusal(call)
        program = call.program
        if not isinstance(program, Program) or refusal is not None:
            if refusal is not None:
                raise refusal.without_frames()
            raise MaskingError("it has no open axes", "name them in dynamic_axes")
        derivative = self._function(call, program).at(path)
        engine: Engine = getattr(derivative.execute, "_engine", self._engine)
        return engine

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
        """What makes a differentiated call in buckets; None if the call is not bucketed."""
        from bucketjit._runtime import equations

        engine = self._engine
        with eval_context():
            call = engine.signer.sign(args, kwargs)
            call = engine.resolve(call)
        program, refusal = call.program, self.refusal(call)
        if refusal is not None:
            engine.note_fallback(refusal)
        if not isinstance(program, Program) or refusal is not None:
            return None
        tree, fn = call.out_tree, self._function(call, program)
        return lambda: tree.unflatten(equations.call(fn, call.leaves))

    def refusal(self, call: Call) -> MaskingError | None:
        """Why a call is not differentiated in buckets, or None."""
        if call.program is None:
            return call.refusal
        assert isinstance(call.program, Program)
        return self._engine.refusals.of_program(call.program) or _refused(call, call.program)

    def _function(self, call: Call, program: Program) -> equations.Bucketed:
        """The differentiable function of a call's signature, axes and program. Made once."""
        with self._engine.lock:
            key = (call.signature, call.tokens, program)
            found = self._functions.get(key)
            if found is None:
                found = self._functions[key] = self._differentiable(call, program)
        return found

    def _differentiable(self, call: Call, program: Program) -> equations.Bucketed:
        """Make the differentiable function of a call, with flat arguments and results."""
        from bucketjit._runtime import equations

        # It is kept, and must not keep the arguments.
        call = dataclasses.replace(call, leaves=[])
        engine, signature = self._engine, call.signature

        def flat(*leaves: object) -> list[Any]:
            args, kwargs = call.tree.unflatten(leaves)
            return jax.tree_util.tree_leaves(signature.fn(*args, **kwargs))

        def execute(*leaves: Any) -> list[Any]:
            shapes = [np.shape(x) for x in leaves]
            if engine.config.copy_inputs:
                leaves = tuple(map(copied, leaves))
            given = dataclasses.replace(call, leaves=list(leaves), shapes=shapes)
            return jax.tree_util.tree_leaves(engine.serve(given))

        def derive(fn: Callable[..., list[Any]], ins: equations.Shapes) -> Callable[..., list[Any]]:
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
                    in_shardings=None,
                    out_shardings=None,
                )
            )

        derived(flat, signature.fn, engine.name)
        equations.register()
        outs = tuple(
            tuple(str(d) if is_symbolic(d) else STATIC for d in shape)
            for shape in program.out_shapes
        )
        ins = tuple(tuple(STATIC if t.isdigit() else t for t in row) for row in call.tokens)
        # The bucketed function itself serves the calls only if it donates nothing, as the
        # derivative needs the arguments later, and returns arrays, which JAX can differentiate.
        # Else another one does.
        as_it_is = not call.donate and engine.config.out is Out.JAX
        run = execute if as_it_is else derive(flat, ins)
        dtypes = tuple(dtype for dtype, _ in program.out_types)
        return equations.Bucketed(flat, run, ins, outs, derive, dtypes)


def _refused(call: Call, program: Program) -> MaskingError | None:
    """Why derivatives of a program are not bucketed, or None."""
    kinds = zip(call.signature.paths, call.signature.types, strict=True)
    if sizes := [path for path, kind in kinds if kind.dtype is None]:
        return MaskingError(
            f"a function of an argument that is a size, {sizes[0]}, is not differentiated in "
            "buckets",
            "open an axis of an array in its place, or make a bucketed function of its gradient",
        )
    if program.counts:
        return MaskingError(
            "its results or decisions depend on computed sizes, so its derivative is that of the "
            "function itself",
            "make a bucketed function of the gradient",
        )
    if program.jaxpr.effects:
        return MaskingError(
            "a derivative in buckets would run the function's effects (io_callback, debug.print) "
            f"once more: {first_effect(program.jaxpr)}",
            "make a bucketed function of the gradient",
        )
    return None
