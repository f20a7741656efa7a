"""Differentiate a bucketed function outside ``jit``: its derivatives are bucketed as well.

Under ``jax.grad`` and ``jax.jvp`` a call becomes one equation, and its derivative another one of
the same kind: of the function's pushforward, or pullback, which an executor of its own traces,
masks and compiles per bucket. So a function is differentiated first and masked after. (Masking
first gives NaN where the derivative of a padded ``log`` or ``sqrt`` is infinite.) Derivatives of
derivatives come about in the same way.

A loss is run together with its gradient in reverse mode, as one executable: the first result of a
function that is asked for a derivative in that mode is a scalar mostly because it is a loss. Where
that turns out wrong, or the loss is scaled, the backward equation starts from the primal arguments
and computes what it needs of the forward pass again, as ``jax.checkpoint`` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from bucketjit import _jax

Flat = Callable[..., list[Any]]
Shapes = tuple[tuple[str, ...], ...]


def _kept(make: Callable[..., Bucketed]) -> Callable[..., Bucketed]:
    """A derivative is made once, so that its executables are found again."""

    @functools.wraps(make)
    def kept(self: Bucketed, *key: tuple[int, ...]) -> Bucketed:
        found = self.derivatives.get((make.__name__, key))
        if found is None:
            found = make(self, *key)
        return self.derivatives.setdefault((make.__name__, key), found)

    return kept


@dataclass
class Speculation:
    """Whether gradients computed before they were asked for were the ones asked for."""

    used: int = 0
    wasted: int = 0

    @property
    def pays(self) -> bool:
        """Whether to go on."""
        return self.used >= self.wasted

    def note(self, used: bool) -> None:
        """Count one."""
        if used:
            self.used += 1
        else:
            self.wasted += 1


@dataclass(frozen=True, eq=False)
class Bucketed:
    """A function of arrays, and how to run it in buckets.

    Attributes:
        flat: The function itself: arrays to a list of arrays.
        execute: The same, run in buckets.
        ins, outs: The sizes of each argument and result: names, expressions, or ``_``.
        derive: Makes ``execute`` of another function, given the sizes of its arguments.
        of: The function that this is the pushforward of, and the arguments it pushes forward.
        derivatives: Those made so far.
        plain: Whether this is the function that is called, none of its derivatives.
        speculation: Whether to run the gradient together with the function.
    """

    flat: Flat
    execute: Flat
    ins: Shapes
    outs: Shapes
    derive: Callable[[Flat, Shapes], Flat]
    of: tuple[Bucketed, tuple[int, ...]] | None = None
    plain: bool = False
    speculation: Speculation = field(default_factory=lambda: Speculation())

    derivatives: dict[Any, Bucketed] = field(default_factory=dict)

    def out_types(self, *ins: Any) -> list[Any]:
        """What the results are for arguments of these types."""
        return jax.tree_util.tree_leaves(jax.eval_shape(self.flat, *ins))

    def _only(self, wrt: Sequence[int], primals: Sequence[Any]) -> Callable[..., list[Any]]:
        """The float results as a function of some of the arguments."""

        def some(*chosen: Any) -> list[Any]:
            every = list(primals)
            for i, value in zip(wrt, chosen, strict=True):
                every[i] = value
            return [out for out in self.flat(*every) if is_differentiable(out)]

        return some

    @_kept
    def pushforward(self, wrt: tuple[int, ...], floats: tuple[int, ...]) -> Bucketed:
        """Tangents of the float results, of the arguments and tangents of some of them."""
        count = len(self.ins)

        def pushforward(*values: Any) -> list[Any]:
            primals, tangents = values[:count], values[count:]
            chosen = [primals[i] for i in wrt]
            return list(jax.jvp(self._only(wrt, primals), chosen, list(tangents))[1])

        pushforward.__name__ = f"pushforward of {_name(self.flat)}"
        ins = (*self.ins, *(self.ins[i] for i in wrt))
        outs = tuple(self.outs[i] for i in floats)
        return Bucketed(
            pushforward, self.derive(pushforward, ins), ins, outs, self.derive, (self, wrt)
        )

    @_kept
    def pullback(self, wrt: tuple[int, ...], floats: tuple[int, ...]) -> Bucketed:
        """Cotangents of some arguments, of the arguments and cotangents of the float results."""
        count = len(self.ins)

        def pullback(*values: Any) -> list[Any]:
            primals, cotangents = values[:count], values[count:]
            chosen = [primals[i] for i in wrt]
            return list(jax.vjp(self._only(wrt, primals), *chosen)[1](list(cotangents)))

        pullback.__name__ = f"pullback of {_name(self.flat)}"
        ins = (*self.ins, *(self.outs[i] for i in floats))
        outs = tuple(self.ins[i] for i in wrt)
        return Bucketed(pullback, self.derive(pullback, ins), ins, outs, self.derive)

    @_kept
    def with_gradient(self, wrt: tuple[int, ...]) -> Bucketed:
        """The results, and the gradient of the first one, a float scalar, of some arguments."""

        def with_gradient(*primals: Any) -> list[Any]:
            def loss(chosen: Sequence[Any]) -> tuple[Any, list[Any]]:
                every = list(primals)
                for i, value in zip(wrt, chosen, strict=True):
                    every[i] = value
                outs = self.flat(*every)
                return outs[0], outs

            chosen = [jnp.asarray(primals[i]) for i in wrt]
            (_, outs), gradient = jax.value_and_grad(loss, has_aux=True)(chosen)
            return [*outs, *gradient]

        with_gradient.__name__ = f"value and gradient of {_name(self.flat)}"
        outs = (*self.outs, *(self.ins[i] for i in wrt))
        execute = self.derive(with_gradient, self.ins)
        return Bucketed(with_gradient, execute, self.ins, outs, self.derive)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def is_differentiable(value: Any) -> bool:
    """Whether an array (or its type, or a Python scalar) has a tangent."""
    dtype = value.dtype if hasattr(value, "dtype") else jax.typeof(value).dtype
    return bool(jnp.issubdtype(dtype, jnp.inexact))


# --- the equation ----------------------------------------------------------------------------

bucketed_p = jex_core.Primitive("bucketed")


def call(fn: Bucketed, values: Sequence[Any]) -> list[Any]:
    """Run a bucketed function on arrays, some of which are being differentiated."""
    return bucketed_p.bind(*values, fn=fn)


def _run(*values: Any, fn: Bucketed) -> list[Any]:
    with _jax.eval_context():
        return list(fn.execute(*values))


def _out_types(*ins: Any, fn: Bucketed) -> list[Any]:
    return [_jax.shaped(out) for out in fn.out_types(*map(_struct, ins))]


def _struct(value: Any) -> Any:
    weak = bool(getattr(value, "weak_type", False))
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=weak)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, fn: Bucketed) -> tuple[Any, Any]:
    outs = bucketed_p.bind(*primals, fn=fn)
    floats = tuple(i for i, out in enumerate(outs) if is_differentiable(out))
    wrt = tuple(
        i
        for i, (t, p) in enumerate(zip(tangents, primals, strict=True))
        if type(t) is not ad.Zero and is_differentiable(jax.typeof(p))
    )
    out_tangents: list[Any] = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
    if wrt and floats:
        pushed = bucketed_p.bind(
            *primals, *(tangents[i] for i in wrt), fn=fn.pushforward(wrt, floats)
        )
        for i, t in zip(floats, pushed, strict=True):
            out_tangents[i] = t
    return outs, out_tangents


def _transpose(cotangents: Sequence[Any], *values: Any, fn: Bucketed) -> list[Any]:
    assert fn.of is not None, "only pushforwards are linear"
    base, wrt = fn.of
    count = len(base.ins)
    primals = values[:count]
    asked = [i for i in range(count, len(values)) if ad.is_undefined_primal(values[i])]
    kept = tuple(wrt[i - count] for i in asked)
    types = base.out_types(*map(_struct, map(jax.typeof, primals)))
    floats = tuple(i for i, out in enumerate(types) if is_differentiable(out))
    # Zeros made by JAX would be compiled for every size.
    whole = [_zeros(ct.aval) if type(ct) is ad.Zero else ct for ct in cotangents]
    pulled = bucketed_p.bind(*primals, *whole, fn=base.pullback(kept, floats))
    found: list[Any] = [None] * len(values)
    for i, ct in zip(asked, pulled, strict=True):
        found[i] = ct
    return found


def _linearize(
    in_reverse: bool, nonzero: Sequence[bool], *primals: Any, fn: Bucketed
) -> tuple[Any, Any, Any, Any] | None:
    if not (in_reverse and fn.plain and fn.speculation.pays):
        return None
    types = fn.out_types(*map(_struct, map(jax.typeof, primals)))
    wrt = tuple(
        i
        for i, (t, p) in enumerate(zip(nonzero, primals, strict=True))
        if t and is_differentiable(p)
    )
    if not wrt or not types or types[0].shape or not _is_real(types[0]):
        return None
    floats = tuple(i for i, out in enumerate(types) if is_differentiable(out))
    values = bucketed_p.bind(*primals, fn=fn.with_gradient(wrt))
    outs, gradient = values[: len(types)], values[len(types) :]

    def linear(residuals: Sequence[Any], *tangents: Any) -> list[Any]:
        chosen = [ad.instantiate_zeros(tangents[i]) for i in wrt]
        pushed = along_gradient_p.bind(*residuals, *chosen, fn=fn, wrt=wrt, floats=floats)
        out: list[Any] = [ad.Zero(jax.typeof(v).to_tangent_aval()) for v in outs]
        for i, t in zip(floats, pushed, strict=True):
            out[i] = t
        return out

    with_tangent = [i in floats for i in range(len(types))]
    return outs, with_tangent, [*gradient, *primals], linear


def _is_real(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.floating))


# A pushforward again, which brings the gradient of the first result along for its transposition.
# Its operands are the gradient, the primal arguments, and the tangents.
along_gradient_p = jex_core.Primitive("along_gradient")


def _pushed(values: Sequence[Any], fn: Bucketed, wrt: Any, floats: Any) -> tuple[Any, Any]:
    return values[len(wrt) :], fn.pushforward(wrt, floats)


def _along(*values: Any, fn: Bucketed, wrt: Any, floats: Any) -> list[Any]:
    rest, pushforward = _pushed(values, fn, wrt, floats)
    return bucketed_p.bind(*rest, fn=pushforward)


def _along_types(*ins: Any, fn: Bucketed, wrt: Any, floats: Any) -> list[Any]:
    rest, pushforward = _pushed(ins, fn, wrt, floats)
    return _out_types(*rest, fn=pushforward)


def _along_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, fn: Bucketed, wrt: Any, floats: Any
) -> tuple[Any, Any]:
    rest, pushforward = _pushed(primals, fn, wrt, floats)
    return _jvp(rest, tangents[len(wrt) :], fn=pushforward)


def _along_batch(
    values: Sequence[Any], dims: Sequence[Any], *, fn: Bucketed, wrt: Any, floats: Any
) -> tuple[Any, Any]:
    rest, pushforward = _pushed(values, fn, wrt, floats)
    return _batch(rest, dims[len(wrt) :], fn=pushforward)


def _along_transpose(
    cotangents: Sequence[Any], *values: Any, fn: Bucketed, wrt: Any, floats: Any
) -> list[Any]:
    first, *others = cotangents
    rest, pushforward = _pushed(values, fn, wrt, floats)
    if type(first) is ad.Zero or any(type(ct) is not ad.Zero for ct in others):
        fn.speculation.note(False)
        return [*[None] * len(wrt), *_transpose(cotangents, *rest, fn=pushforward)]
    # `jax.grad` starts from 1. Another cotangent is no factor of the result: loss scaling is there
    # because 16 bits lose what it keeps.
    is_one = not isinstance(first, jax.core.Tracer) and bool(first == 1)
    fn.speculation.note(is_one)
    if not is_one:
        return [*[None] * len(wrt), *_transpose(cotangents, *rest, fn=pushforward)]
    tangents = values[-len(wrt) :]
    found: list[Any] = [None] * len(values)
    for i, t in enumerate(tangents):
        if ad.is_undefined_primal(t):
            found[len(values) - len(wrt) + i] = values[i]
    return found


def _zeros(aval: Any) -> np.ndarray:
    return np.zeros(aval.shape, aval.dtype)


def _batch(values: Sequence[Any], dims: Sequence[Any], *, fn: Bucketed) -> tuple[Any, Any]:
    outs = jax.vmap(fn.flat, in_axes=list(dims))(*values)
    return outs, [0] * len(outs)


def register() -> None:
    """Teach JAX the equations; once, before the first is made."""
    if bucketed_p in ad.primitive_jvps:
        return
    bucketed_p.multiple_results = True
    bucketed_p.def_impl(_run)
    bucketed_p.def_abstract_eval(_out_types)
    ad.primitive_transposes[bucketed_p] = _transpose
    batching.primitive_batchers[bucketed_p] = _batch
    lowered = mlir.lower_fun(lambda *values, fn: fn.flat(*values), multiple_results=True)
    mlir.register_lowering(bucketed_p, lowered)
    _jax.set_linearization(bucketed_p, _linearize)
    along_gradient_p.multiple_results = True
    along_gradient_p.def_impl(_along)
    along_gradient_p.def_abstract_eval(_along_types)
    ad.primitive_jvps[along_gradient_p] = _along_jvp
    ad.primitive_transposes[along_gradient_p] = _along_transpose
    batching.primitive_batchers[along_gradient_p] = _along_batch
    along = mlir.lower_fun(
        lambda *values, fn, wrt, floats: fn.pushforward(wrt, floats).flat(*values[len(wrt) :]),
        multiple_results=True,
    )
    mlir.register_lowering(along_gradient_p, along)
    ad.primitive_jvps[bucketed_p] = _jvp
