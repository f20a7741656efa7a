"""Calls inside transformations: derivatives in buckets, and calls of the function itself.

`bucketjit._runtime.equations` has what JAX sees of a call under ``jax.grad`` and the like. Inside
``jit``, ``vmap`` and the like the function itself runs, which is counted and warned of.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit._arrays.padding import copied
from bucketjit._config import Config, Out
from bucketjit._events import Event, emit, warn
from bucketjit._ir.dynamic_axes import STATIC
from bucketjit._ir.expressions import is_symbolic, variables_of
from bucketjit._ir.program import Program
from bucketjit._jax import config as jax_config
from bucketjit._jax.jaxprs import first_effect
from bucketjit._jax.tracebacks import derived
from bucketjit._runtime.counters import Counters
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.runs import OF_TRACERS
from bucketjit._tracing.call import Call
from bucketjit._tracing.computed.sizes import Noticing
from bucketjit._tracing.mutations import is_traced_here, refusing_mutations
from bucketjit._tracing.parameters import Static, Statics, without_static
from bucketjit._tracing.signer import Signer
from bucketjit.errors import InlinedWarning, MaskingError, SelectionError

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
        self._functions.clear()

    def engine_at(self, call: Call, path: equations.Path) -> Engine:
        """The engine that serves the calls of a derivative."""
        call = self._engine.resolve(call)
        if (refusal := self.refusal(call)) is not None:
            raise refusal.without_frames()
        if not isinstance(call.program, Program):
            raise MaskingError("it has no open axes", "name them in dynamic_axes")
        derivative = self._function(call, call.program)
        for step, key in path:
            derivative = getattr(derivative, step)(*key)
        return getattr(derivative.execute, "_engine", self._engine)

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
        """What makes a differentiated call in buckets; None if the call is not bucketed."""
        from bucketjit._runtime import equations

        engine = self._engine
        with jax_config.eval_context():
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
            function = self._functions.get(key)
            if function is None:
                function = self._functions[key] = self._differentiable(call, program)
        return function

    def _differentiable(self, call: Call, program: Program) -> equations.Bucketed:
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
            bound = dataclasses.replace(call, leaves=list(leaves), shapes=shapes)
            return jax.tree_util.tree_leaves(engine.serve(bound))

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


# --- calls inside jit, vmap and the like ---

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
    if jax_config.only_shapes() or not counters.inlined():
        return
    where = jax_config.innermost_transformation()
    why = f"is called inside {where}, {what}"
    emit(Event("inlined", name, detail=why), config.listeners)
    if not config.always_exact and not is_traced_here():
        warn(f"{name} {why}", InlinedWarning)


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
    """A function inside ``jit`` and the like; it sees what it would see under ``jax.jit`` there."""

    def __init__(self, fn: Callable[..., Any], name: str, signer: Signer, **options: Any) -> None:
        self._fn, self._name, self._signer = fn, name, signer
        refusing = refusing_mutations(fn, signer.parameters.names(0))
        self._nested = nested(refusing, signer, inline=True, **options)
        self._eager: set[Statics] = set()  # of calls that compute sizes

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the function; without ``jit`` if it computes sizes, as under `jax.grad`."""
        statics = self._signer.parameters.split(args, kwargs)[2]
        if not (jax_config.only_differentiated() and statics in self._eager):
            try:
                return self._nested(args, kwargs)
            except OF_TRACERS:
                from bucketjit._ir.jax_patches import forgetful_jax, selecting_jax

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
