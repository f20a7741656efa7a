"""Make a program of a decomposed one, with other sizes and with constants left open.

`bucketjit._tracing.skeleton` decomposes programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr

from bucketjit._ir.expressions import Dim, Shape
from bucketjit._ir.host_functions import Hosts, SizedHost
from bucketjit._ir.primitive_facts import SIZE_PARAMS
from bucketjit._ir.sized import size_constant_p
from bucketjit._jax.jaxprs import (
    equation,
    is_jaxpr,
    is_literal,
    is_shaped,
    open_jaxpr,
    rebuilt_jaxpr,
    variable,
)
from bucketjit._tracing.skeleton import IDLE, is_host, is_int


def recompose(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    sizes: Sequence[Dim],
    size_constants: Sequence[int | None],
    depends_on: Dim,
    hosts: Hosts,
) -> tuple[Any, Sequence[Any], tuple[Shape, ...]]:
    """Rebuild a program with other sizes, and with size constants in place of some constants.

    A size constant is filled in at run time. It is the result of an equation of `size_constant_p`.
    """
    work = _Together(iter(sizes), iter(size_constants), depends_on, hosts)
    together, kept = work.program(jaxpr, jaxpr, consts)
    return together, kept, tuple(shape for _, shape in sorted(work.shapes.items()))


class _Together:
    """Rebuilds a program. It must walk it in the same order as `_Apart`.

    Attributes:
        shapes: Shape of each size constant, by its number.
    """

    def __init__(
        self,
        sizes: Iterator[Dim],
        size_constants: Iterator[int | None],
        depends_on: Dim,
        hosts: Hosts,
    ) -> None:
        self._hosts = hosts
        self._sizes = sizes
        self._size_constants = size_constants
        self._depends_on = depends_on
        self.shapes: dict[int, Shape] = {}

    def program(
        self, original: Any, jaxpr: Jaxpr, consts: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        env: dict[Any, Any] = {}
        eqns: list[Any] = []
        kept: list[Any] = []
        constvars: list[Any] = []
        for var, value in zip(jaxpr.constvars, consts, strict=False):
            aval = self._aval(var.aval)
            index = next(self._size_constants)
            if index is None:  # it is equal in all traces, so it stays a constant
                env[var] = variable(aval)
                constvars.append(env[var])
                kept.append(value)
            else:
                env[var] = self._given(index, aval, eqns)
        for var in (*jaxpr.constvars[len(consts) :], *jaxpr.invars):
            env[var] = variable(self._aval(var.aval))
        constvars += [env[v] for v in jaxpr.constvars[len(consts) :]]
        for eqn in jaxpr.eqns:
            operands = [self._atom(atom, env, eqns) for atom in eqn.invars]
            slots = SIZE_PARAMS.get(eqn.primitive.name, ())
            params = {}
            for name in sorted(eqn.params):
                value = eqn.params[name]
                if is_host(eqn, name):
                    params[name] = self._host(value)
                else:
                    params[name] = value if name in IDLE else self._param(value, name in slots)
            for var in eqn.outvars:
                env[var] = type(var)(self._aval(var.aval))
            outs = [env[v] for v in eqn.outvars]
            eqns.append(eqn.replace(invars=operands, outvars=outs, params=params))
        results = [self._atom(atom, env, eqns) for atom in jaxpr.outvars]
        inputs = [env[v] for v in jaxpr.invars]
        return rebuilt_jaxpr(original, constvars, kept, inputs, results, eqns), kept

    def _host(self, function: object) -> Any:
        index = next(self._size_constants)
        if index is None:
            return function
        self.shapes[index] = ()
        return SizedHost(index, self._depends_on, self._hosts)

    def _given(self, index: int, aval: Any, eqns: list[Any]) -> Any:
        var = variable(aval)
        self.shapes[index] = tuple(aval.shape)
        params = {"index": index, "aval": aval, "depends_on": self._depends_on}
        eqns.append(equation([], [var], size_constant_p, params))
        return var

    def _atom(self, atom: object, env: Mapping[Any, Any], eqns: list[Any]) -> Any:
        if not is_literal(atom):
            return env[atom]
        aval = self._aval(atom.aval)
        index = next(self._size_constants)
        return atom if index is None else self._given(index, aval, eqns)

    def _aval(self, aval: Any) -> Any:
        if not is_shaped(aval):
            return aval
        # Sizes come in the order in which `_Apart._aval` has listed them.
        shape = tuple(next(self._sizes) for _ in aval.shape)
        return aval if shape == tuple(aval.shape) else aval.update(shape=shape)

    def _param(self, value: Any, slot: bool) -> Any:
        if slot and is_int(value):
            return next(self._sizes)
        if is_jaxpr(value):
            return self.program(value, *open_jaxpr(value))[0]
        if isinstance(value, tuple | list):
            parts = [self._param(v, slot) for v in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, dict):
            return {k: self._param(v, slot) for k, v in value.items()}
        if is_shaped(value):
            return self._aval(value)
        return value
