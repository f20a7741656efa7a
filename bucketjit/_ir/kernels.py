"""Kernels: functions that nobody can look into, each with a declaration of its sizes.

    @bucketjit.kernel("n%8, d", out="n")
    def norms(x, sizes): ...

    y:f32[n] = kernel[call=norms sizes=(('n', n), ('d', 3)) types=(f32[n],)] x:f32[n,3]

In a trace with symbolic sizes a call is one equation, with the types of the declaration. Its rule
calls the function with padded arrays. The pullback of an equation is another one, which
differentiates the function at padded shapes. Cotangents are 0 in the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.interpreters import batching, mlir

from bucketjit._ir.expressions import is_symbolic
from bucketjit._jax.jaxprs import shaped, varies
from bucketjit._jax.tracers import Typed
from bucketjit._raised import in_one_line
from bucketjit.errors import ExportError, MaskingError


@dataclass(frozen=True, eq=False)
class KernelCall:
    """A kernel with its static arguments, or the pullback of one.

    Attributes:
        name: The name of the kernel in messages.
        run: The function of logical sizes by name, and of padded arrays.
        kinds: For each array, what fills its padding, or None, and the axes that must not be open.
        multiples: What padded sizes are to be multiples of, by name.
        pullback_of: The call whose arrays come before the cotangents of its float results.
        before: The call itself, if its pullback is likely to follow.
    """

    name: str
    run: Callable[..., list[Any]]
    kinds: tuple[tuple[Any, tuple[int, ...]], ...]
    multiples: Mapping[str, int]
    pullback_of: KernelCall | None = None
    before: KernelCall | None = None

    def __repr__(self) -> str:
        return self.name

    def __call__(self, arrays: Sequence[Any], sizes: Any, types: tuple[Any, ...]) -> list[Any]:
        """Make the equation of a call, which has a derivative in reverse mode."""

        def forward(*arrays: Any) -> Any:
            return replace(self, before=self)(arrays, sizes, types), arrays

        def backward(arrays: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
            dots = [c for c, t in zip(cotangents, types, strict=True) if _is_float(t)]
            of_floats = tuple(jax.typeof(x).to_tangent_aval() for x in arrays if _is_float(x))
            kinds = *self.kinds, *((0, ()) for _ in dots)
            pullback = KernelCall(self.name, self._pull, kinds, self.multiples, self)
            pulled = iter(pullback([*arrays, *dots], sizes, of_floats))
            return tuple(next(pulled) if _is_float(x) else None for x in arrays)

        more = {"call": self, "sizes": sizes, "types": types}
        call = jax.custom_vjp(lambda *arrays: kernel_p.bind(*arrays, **more))
        call.defvjp(forward, backward)
        return list(call(*arrays))

    def _pull(self, sizes: Mapping[str, Any], *values: Any) -> list[Any]:
        return self.with_pullback(sizes, values[: len(self.kinds)])[1](values[len(self.kinds) :])

    def with_pullback(self, sizes: Any, arrays: Sequence[Any]) -> tuple[list[Any], Any]:
        """The results, and what maps cotangents of the float ones to those of float arrays."""

        def of_floats(floats: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            rest = iter(floats)
            outs = self.run(sizes, *(next(rest) if _is_float(x) else x for x in arrays))
            return [x for x in outs if _is_float(x)], outs

        try:
            _, pull, outs = jax.vjp(of_floats, list(filter(_is_float, arrays)), has_aux=True)
        except (TypeError, ValueError, NotImplementedError) as error:
            why = f"{self.name}: the kernel has no derivative in reverse mode"
            remedy = "give its function one by jax.custom_vjp, at padded shapes"
            raise MaskingError(f"{why} ({in_one_line(error)})", remedy) from error
        return outs, lambda cotangents: list(pull(list(cotangents))[0])


def _is_float(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def name_in_words(eqn: Any) -> str:
    """The name of a kernel, or of the primitive of any other equation."""
    return str(eqn.params["call"] if eqn.primitive is kernel_p else eqn.primitive.name)


def resized(array: Any, shape: Sequence[int], fill: Any = 0) -> Any:
    """An array with more padding at its end, or with less."""
    if array.shape == tuple(shape):
        return array
    more = [(0, max(0, n - m)) for m, n in zip(array.shape, shape, strict=True)]
    return jnp.pad(array, more, constant_values=fill)[tuple(map(slice, shape))]


def _run(*arrays: Any, call: KernelCall, sizes: Any, types: Any) -> list[Any]:
    if any(map(is_symbolic, [dim for x in arrays for dim in x.shape])):
        raise ExportError(f"cannot export the kernel {call.name} without its sizes; use save()")
    return call.run({name: jnp.int32(dim) for name, dim in sizes}, *arrays)


def _types(*avals: Any, types: Any, **_: Any) -> list[Any]:
    # It is not declared over which shards results vary, and where gradients are summed.
    if any(map(varies, map(Typed, avals))):  # type: ignore[arg-type]
        raise MaskingError("a kernel in shard_map", "pass check_vma=False to jax.shard_map")
    return list(types)


def _batch(values: Any, places: Any, *, call: KernelCall, sizes: Any, types: Any) -> Any:
    flags = tuple(place is not None for place in places)
    moved = [x if p is None else jnp.moveaxis(x, p, 0) for x, p in zip(values, places, strict=True)]
    rows = moved[flags.index(True)].shape[0]
    run = jax.vmap(call.run, in_axes=(None, *(0 if flag else None for flag in flags)))
    kinds = zip(call.kinds, flags, strict=True)
    moved_kinds = tuple((fill, tuple(i + flag for i in axes)) for (fill, axes), flag in kinds)
    batched = KernelCall(call.name, run, moved_kinds, call.multiples)
    types = tuple(shaped(jax.ShapeDtypeStruct((rows, *t.shape), t.dtype)) for t in types)
    outs = kernel_p.bind(*moved, call=batched, sizes=sizes, types=types)
    return outs, [0] * len(outs)


def _registered(prim: Any) -> Any:
    prim.multiple_results = True
    prim.def_impl(_run)
    prim.def_abstract_eval(_types)
    batching.primitive_batchers[prim] = _batch
    mlir.register_lowering(prim, mlir.lower_fun(_run, multiple_results=True))
    return prim


kernel_p = _registered(jex_core.Primitive("kernel"))
