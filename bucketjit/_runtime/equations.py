"""Differentiate a bucketed function outside ``jit``, so that its derivatives are bucketed as well.

Under ``jax.grad`` and ``jax.jvp`` a call becomes one equation of the primitive `bucketed_p`. Its
derivative is another equation of the same primitive: of the function's pushforward or pullback,
which has its own bucketed function that traces, masks and compiles it per bucket. So a function is
differentiated first and masked after. (Masking first gives NaN where the derivative of a padded
``log`` or ``sqrt`` is infinite.) Derivatives of derivatives are made in the same way:

    call        y = bucketed[f] x
    jvp         y = bucketed[f] x            t = bucketed[pushforward of f] x dx
    transpose   ct_x = bucketed[pullback of f] x ct_y

In reverse mode, a function and the gradient of its first result run together, as one executable:
where a scalar first result is differentiated in that mode, it is mostly a loss. If it is not, or if
the loss is scaled, the gradient is not used. The backward equation then starts from the primal
arguments and computes again what it needs of the forward pass, as ``jax.checkpoint`` does.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from bucketjit._jax.config import eval_context, hold_weakly, set_linearization
from bucketjit._jax.jaxprs import shaped, struct_of
from bucketjit._jax.tracebacks import derived

Flat = Callable[..., list[Any]]  # arrays -> a list of arrays
Shapes = tuple[tuple[str, ...], ...]  # a token per axis of each argument or result
# The steps from a function to a derivative of some order: methods of `Bucketed`, with arguments.
Path = tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
_REMEMBERED = 64  # backward passes


def _kept(make: Callable[..., Bucketed]) -> Callable[..., Bucketed]:
    """Make each derivative once, so that its executables are found again."""

    @functools.wraps(make)
    def kept(self: Bucketed, *key: tuple[int, ...]) -> Bucketed:
        derivative = self.derivatives.get((make.__name__, key))
        if derivative is None:
            derivative = make(self, *key)
        # Another thread may have made it meanwhile: the first one stays.
        return self.derivatives.setdefault((make.__name__, key), derivative)

    return kept


@dataclass(frozen=True, eq=False)
class Bucketed:
    """A function of arrays, and how to run it in buckets.

    Attributes:
        flat: The function itself, from arrays to a list of arrays.
        execute: The same function, run in buckets.
        ins: The token of each axis of each argument: an expression, or ``_`` for a static axis.
        outs: The same of the results.
        derive: Makes the ``execute`` of another function, from the function and its ``ins``.
        dtypes: The dtypes of the results if the user calls this function; None for a derivative.
        of: If this is a pushforward: the function it was made of, the positions of the arguments
            with tangents, and those of the float results. None otherwise.
        used: Whether each of the last gradients that were computed with the function was used.
        derivatives: The derivatives made so far, by step.
    """

    flat: Flat
    execute: Flat
    ins: Shapes
    outs: Shapes
    derive: Callable[[Flat, Shapes], Flat]
    dtypes: tuple[Any, ...] | None = None
    of: tuple[Bucketed, tuple[int, ...], tuple[int, ...]] | None = None
    used: deque[bool] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    derivatives: dict[Any, Bucketed] = field(default_factory=dict)

    def _of(self, wrt: Sequence[int], primals: Sequence[Any], chosen: Sequence[Any]) -> list[Any]:
        """The results, with the arguments at the positions ``wrt`` replaced."""
        every = list(primals)
        for i, value in zip(wrt, chosen, strict=True):
            every[i] = value
        return self.flat(*every)

    def _only(self, wrt: Sequence[int], primals: Sequence[Any]) -> Callable[..., list[Any]]:
        """The float results as a function of the arguments at the positions ``wrt``."""
        return lambda *chosen: [x for x in self._of(wrt, primals, chosen) if is_differentiable(x)]

    def _made(self, flat: Flat, what: str, ins: Shapes, outs: Shapes, of: Any = None) -> Bucketed:
        derived(flat, self.flat, f"{what} of {self.flat.__name__}")
        return Bucketed(flat, self.derive(flat, ins), ins, outs, self.derive, of=of)

    @_kept
    def pushforward(self, wrt: tuple[int, ...], floats: tuple[int, ...]) -> Bucketed:
        """The function from arguments and tangents to the tangents of the float results."""
        count = len(self.ins)

        def pushforward(*values: object) -> list[Any]:
            primals, tangents = values[:count], values[count:]
            chosen = [primals[i] for i in wrt]
            return list(jax.jvp(self._only(wrt, primals), chosen, list(tangents))[1])

        ins = (*self.ins, *(self.ins[i] for i in wrt))
        outs = tuple(self.outs[i] for i in floats)
        return self._made(pushforward, "pushforward", ins, outs, (self, wrt, floats))

    @_kept
    def pullback(self, wrt: tuple[int, ...], floats: tuple[int, ...]) -> Bucketed:
        """The function from arguments and cotangents of the float results to those of arguments."""
        count = len(self.ins)

        def pullback(*values: object) -> list[Any]:
            primals, cotangents = values[:count], values[count:]
            chosen = [primals[i] for i in wrt]
            return list(jax.vjp(self._only(wrt, primals), *chosen)[1](list(cotangents)))

        ins = (*self.ins, *(self.outs[i] for i in floats))
        return self._made(pullback, "pullback", ins, tuple(self.ins[i] for i in wrt))

    @_kept
    def with_gradient(self, wrt: tuple[int, ...]) -> Bucketed:
        """What returns the results, and the gradient of the first one, a float scalar."""

        def with_gradient(*primals: object) -> list[Any]:
            def loss(chosen: Sequence[Any]) -> tuple[Any, list[Any]]:
                outs = self._of(wrt, primals, chosen)
                return outs[0], outs

            chosen = [jnp.asarray(primals[i]) for i in wrt]
            (_, outs), gradient = jax.value_and_grad(loss, has_aux=True)(chosen)
            return [*outs, *gradient]

        outs = (*self.outs, *(self.ins[i] for i in wrt))
        return self._made(with_gradient, "value and gradient", self.ins, outs)


def is_differentiable(value: object) -> bool:
    """Whether an array or a Python scalar has a tangent."""
    return bool(jnp.issubdtype(jax.typeof(value).dtype, jnp.inexact))


def _floats(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(i for i, value in enumerate(values) if is_differentiable(value))


def _tangent_types(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(jax.typeof(value).to_tangent_aval() for value in values)


# --- the equation ----------------------------------------------------------------------------

bucketed_p = jex_core.Primitive("bucketed")


def call(fn: Bucketed, values: Sequence[Any], types: Sequence[Any] | None = None) -> list[Any]:
    """Run a bucketed function on arrays, some of which are being differentiated."""
    return bucketed_p.bind(*values, fn=fn, types=types, gradients=0)


# The equation of a pushforward may have the gradient of the first result as operands in front, of
# the number ``gradients``, for its transpose. All other rules leave them out.


def _run(*values: object, fn: Bucketed, types: object, gradients: int) -> list[Any]:
    with eval_context():
        return list(fn.execute(*values[gradients:]))


def _out_types(*ins: Any, fn: Bucketed, types: Any, gradients: int) -> list[Any]:
    """The types of the results, by a trace if they are not known."""
    if types is not None:
        return list(types)
    outs = jax.eval_shape(fn.flat, *map(struct_of, ins[gradients:]))
    return [shaped(out) for out in outs]


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, fn: Bucketed, types: Any, gradients: int
) -> tuple[Any, Any]:
    """The forward derivative: the same equation, and one of the pushforward."""
    primals, tangents = primals[gradients:], tangents[gradients:]
    outs = call(fn, primals, types)
    floats = _floats(outs)
    wrt = tuple(i for i in _floats(primals) if type(tangents[i]) is not ad.Zero)
    out_types = _tangent_types(outs)
    out_tangents: list[Any] = list(map(ad.Zero, out_types))
    if wrt and floats:
        values = (*primals, *(tangents[i] for i in wrt))
        pushed = call(fn.pushforward(wrt, floats), values, tuple(out_types[i] for i in floats))
        for i, t in zip(floats, pushed, strict=True):
            out_tangents[i] = t
    return outs, out_tangents


def _transpose(
    cotangents: Sequence[Any], *values: object, fn: Bucketed, types: object, gradients: int
) -> list[Any]:
    """The transpose of a pushforward: the gradient if the cotangent is that of `jax.grad`.

    Else it is an equation of the pullback. The arguments of a pushforward are the primal arguments,
    then the tangents. It is linear in the tangents only.
    """
    assert fn.of is not None, "only pushforwards are linear"
    base, wrt, floats = fn.of
    count = gradients + len(base.ins)
    asked = [i for i in range(count, len(values)) if ad.is_undefined_primal(values[i])]
    pulled: list[Any]
    is_used = bool(gradients) and _is_one(cotangents[0])
    is_used = is_used and all(type(ct) is ad.Zero for ct in cotangents[1:])
    if gradients:
        base.used.append(is_used)
    if is_used:
        pulled = [values[i - count] for i in asked]
    else:
        kept, primals = tuple(wrt[i - count] for i in asked), values[gradients:count]
        # In NumPy: JAX would compile zeros for every size.
        whole = [_zeros(ct.aval) if type(ct) is ad.Zero else ct for ct in cotangents]
        pulled_types = _tangent_types([primals[i] for i in kept])
        pulled = call(base.pullback(kept, floats), (*primals, *whole), pulled_types)
    results: list[Any] = [None] * len(values)
    for i, ct in zip(asked, pulled, strict=True):
        results[i] = ct
    return results


def _linearize(
    in_reverse: bool,
    nonzero: Sequence[bool],
    *primals: object,
    fn: Bucketed,
    types: object,
    gradients: int,
) -> tuple[Any, Any, Any, Any] | None:
    """The reverse mode of a likely loss: run the function together with its gradient.

    Returns None, by which JAX uses the ordinary rules, in forward mode, for a derivative, if the
    first result is no float scalar, and if most gradients were not used so far. Otherwise the
    residuals are the gradient and the primal arguments, and the linear function is an equation of
    the pushforward with the gradient in front.
    """
    if not (in_reverse and fn.dtypes and 2 * sum(fn.used) >= len(fn.used)):
        return None
    wrt = tuple(i for i in _floats(primals) if nonzero[i])
    if not wrt or fn.outs[0] or not jnp.issubdtype(fn.dtypes[0], jnp.floating):
        return None
    values = call(fn.with_gradient(wrt), primals)
    outs, gradient = values[: len(fn.outs)], values[len(fn.outs) :]
    floats, out_types = _floats(outs), _tangent_types(outs)
    pushed_types = tuple(out_types[i] for i in floats)

    def linear(residuals: Sequence[Any], *tangents: object) -> list[Any]:
        chosen = [ad.instantiate_zeros(tangents[i]) for i in wrt]
        along = {"fn": fn.pushforward(wrt, floats), "types": pushed_types, "gradients": len(wrt)}
        pushed = bucketed_p.bind(*residuals, *chosen, **along)
        out: list[Any] = list(map(ad.Zero, out_types))
        for i, t in zip(floats, pushed, strict=True):
            out[i] = t
        return out

    with_tangent = [i in floats for i in range(len(outs))]
    return outs, with_tangent, [*gradient, *primals], linear


def _is_one(cotangent: object) -> bool:
    """Whether a cotangent is the 1 that `jax.grad` starts from.

    The gradient is not multiplied by another cotangent: a loss is scaled because its gradient
    underflows in 16 bits, and the unscaled gradient has lost those values.
    """
    if type(cotangent) is ad.Zero or isinstance(cotangent, jax.core.Tracer):
        return False
    return bool(cotangent == 1)


def _zeros(aval: Any) -> np.ndarray:
    return np.zeros(aval.shape, aval.dtype)


def _batch(
    values: Sequence[Any], dims: Sequence[Any], *, fn: Bucketed, types: object, gradients: int
) -> tuple[Any, Any]:
    """Batching: ``vmap`` of the function itself, which is not bucketed."""
    outs = jax.vmap(jax.jit(fn.flat), in_axes=list(dims[gradients:]))(*values[gradients:])
    return outs, [0] * len(outs)


def _lower(*values: object, fn: Bucketed, types: object, gradients: int) -> list[Any]:
    """What is compiled if the equation is inside ``jit``: the function itself, not bucketed."""
    return fn.flat(*values[gradients:])


def register() -> None:
    """Register the rules of the equation with JAX, once, before the first equation is made."""
    if bucketed_p in ad.primitive_jvps:
        return
    hold_weakly(Bucketed)  # JAX caches by equation parameters, and would keep the functions alive
    set_linearization(bucketed_p, _linearize)
    bucketed_p.multiple_results = True
    bucketed_p.def_impl(_run)
    bucketed_p.def_abstract_eval(_out_types)
    ad.primitive_transposes[bucketed_p] = _transpose
    batching.primitive_batchers[bucketed_p] = _batch
    mlir.register_lowering(bucketed_p, mlir.lower_fun(_lower, multiple_results=True))
    # Last: other threads take it as the sign that all is registered.
    ad.primitive_jvps[bucketed_p] = _jvp
