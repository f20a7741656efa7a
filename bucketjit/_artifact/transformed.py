"""Calls of a loaded function inside ``jax.jit``, ``jax.grad`` and ``jax.vmap``.

A module has no rule for ``grad`` or ``vmap``. So a loaded function is differentiated by its
pullback, which is saved as a function of its own, and is mapped one example at a time:

    grad     custom_vjp: the function, and the pullback of the file
    vmap     lax.map over the examples
    jit      pad, call the kernel of a bucket, slice: for the sizes of the traced call
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bucketjit._arrays.padding import copied, fresh, of_words, without_padding
from bucketjit._artifact.saved_engine import LoadedFunction
from bucketjit._artifact.saved_program import LoadedProgram
from bucketjit._compile.executable import sizes_argument
from bucketjit._config import Out
from bucketjit._ir.expressions import evaluate
from bucketjit._jax.arrays import is_key, with_type
from bucketjit._jax.config import eval_context, only_differentiated
from bucketjit._runtime.decisions import Masked
from bucketjit._runtime.derivatives import note_inlined
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.equations import is_differentiable
from bucketjit._tracing.call import Call
from bucketjit.errors import ArtifactError

_INLINED = (
    "so it is a part of the program there: it is compiled once more for each size, with what is "
    "around it, and jax.vmap runs one example after the other. Call the loaded function outside, "
    "or its map in the place of jax.vmap."
)

Sizes = tuple[tuple[int, int], ...]  # the arguments that are sizes: position and value


class Transformed:
    """A loaded function and its pullbacks, as JAX transforms them."""

    def __init__(self, functions: Sequence[LoadedFunction], engines: Sequence[Engine]) -> None:
        self._functions, self._engines = functions, engines
        self._function = functools.cache(self._made)

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the function; one inside of another transformation than a derivative is noted."""
        function, engine = self._functions[0], self._engines[0]
        args, kwargs = without_padding((args, dict(kwargs)))
        call = engine.signer.sign(args, kwargs)
        if not only_differentiated():
            note_inlined(engine.config, engine.name, engine.counters, _INLINED)
        leaves = list(zip(call.leaves, function.types, strict=True))
        # A size cannot be an array of JAX, so it is a part of the function.
        sizes = tuple((i, int(x)) for i, (x, kind) in enumerate(leaves) if kind.dtype is None)
        arrays = [x for x, kind in leaves if kind.dtype is not None]
        return function.programs[0].out_tree.unflatten(self._function(0, sizes)(*arrays))

    def _made(self, order: int, sizes: Sizes) -> Callable[..., Any]:
        """A function of flat arrays, with the rule of its derivative, and of a map."""
        # JAX caches the function for later maps. It must not keep the loaded function alive.
        alive = weakref.ref(self)

        def inlined(*arrays: Any) -> tuple[Any, ...]:
            transformed = alive()
            if transformed is None:
                raise ArtifactError("the loaded function is gone; keep it as long as it is mapped")
            call = transformed._signed(order, sizes, arrays)
            return _inlined(transformed._engines[order], call)

        mapped = jax.custom_batching.sequential_vmap(inlined)

        @jax.custom_vjp
        def serve(*arrays: Any) -> tuple[Any, ...]:
            if any(isinstance(x, jax.core.Tracer) for x in arrays):
                return mapped(*arrays)
            with eval_context(), jax.disable_jit(False):
                if self._functions[order].record.donated:  # the derivative needs them, too
                    arrays = tuple(map(fresh, arrays))
                call = self._signed(order, sizes, arrays)
                result = self._engines[order].serve(call, out=Out.JAX)
                return tuple(jax.tree_util.tree_leaves(result))

        def forward(*arrays: Any) -> Any:
            if order + 1 >= len(self._functions):
                saved = len(self._functions) - 1
                raise ArtifactError(
                    f"{self._functions[0].record.name}: the file was saved with derivatives="
                    f"{saved}; save it with derivatives={order + 1} to differentiate it so often"
                )
            return serve(*arrays), tuple(map(copied, arrays))

        def backward(arrays: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
            # A cotangent has the weak type of its result; the pullback is saved without.
            floats = [with_type(ct, ct.dtype, False) for ct in cotangents if is_differentiable(ct)]
            pulled = iter(self._function(order + 1, ())(*arrays, *floats))
            return tuple(
                next(pulled) if is_differentiable(x) else np.zeros(np.shape(x), jax.dtypes.float0)
                for x in arrays
            )

        serve.defvjp(forward, backward)
        return serve

    def _signed(self, order: int, sizes: Sizes, arrays: Sequence[Any]) -> Call:
        """The call of flat arrays, with its sizes in their places."""
        leaves = list(arrays)
        for position, size in sizes:  # in increasing order
            leaves.insert(position, size)
        return self._engines[order].signer.sign(*self._functions[order].tree.unflatten(leaves))


def _inlined(engine: Engine, call: Call) -> tuple[Any, ...]:
    """The flat results at the sizes of a traced call: pad, call the kernel, slice."""
    call, decision = engine.chosen(call)
    program = call.program
    if isinstance(program, LoadedProgram) and program.counts:
        raise ArtifactError(
            f"{engine.name}: it computes sizes, which are not known inside of what JAX traces; "
            "call it outside"
        )
    leaves = [
        x if kind.dtype is None or is_key(kind) else jnp.asarray(x, kind.dtype)
        for x, kind in zip(call.leaves, call.signature.types, strict=True)
    ]
    call = call.with_leaves(leaves)
    lead: tuple[Any, ...] = ()
    if isinstance(decision, Masked):
        kernel = engine.requests.kernel(call, decision.bucket)
        lead = (sizes_argument(call, kernel.size_constant_shapes),)
    else:
        kernel = engine.requests.kernel(call)
    for i, shape in kernel.pads:
        leaves[i] = _padded(leaves[i], shape)
    args, kwargs = call.tree.unflatten(leaves)
    with jax.disable_jit(False):
        outs = jax.tree_util.tree_leaves(kernel.function.inlined(*lead, *args, **kwargs))
    if not lead or program is None:
        return tuple(outs)
    logical = dict(zip(call.variables, call.ordered, strict=True))
    return tuple(
        lax.slice(out, (0,) * len(shape), [evaluate(d, logical) for d in shape])
        for out, shape in zip(outs, program.out_shapes, strict=True)
    )


def _padded(value: Any, shape: Sequence[int]) -> Any:
    if is_key(value):
        return of_words(value, lambda words: _padded(words, (*shape, *words.shape[value.ndim :])))
    return jnp.pad(value, [(0, n - m) for n, m in zip(shape, value.shape, strict=True)])
