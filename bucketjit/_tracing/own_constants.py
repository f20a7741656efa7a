"""Copy the arrays that a program closes over, so that user code cannot change them afterwards.

The constants of a jaxpr are the very arrays that the user closes over. They are read when the
program is compiled. `jax.jit` compiles a program as soon as it is traced. This library compiles it
for a bucket long after that, and again if the executable was evicted. So a NumPy array that
somebody can write to is copied as soon as it is found in a trace::

    { lambda a:f32[4]; b:f32[n,4]. let ...     a is the user's array, wherever it stands:
                                               a constant, a literal, inside of an inner program
    { lambda a:f32[4]; b:f32[n,4]. let ...     a is a copy that nobody can write to
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from bucketjit._jax.jaxprs import is_jaxpr, is_literal, open_jaxpr, rebuilt_jaxpr
from bucketjit._tracing.skeleton import same_constant

# Bytes from which on copies are shared. Smaller arrays are many, and a look-up takes longer than
# a copy.
_SHARED = 4096

# Copies, by the address and layout of the original. Programs that close over one array, and traces
# of it at several sizes, share one copy, as long as the original still has the same contents.
_COPIES: weakref.WeakValueDictionary[Hashable, np.ndarray] = weakref.WeakValueDictionary()


def own_constants(jaxpr: Jaxpr, consts: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """A program whose constants nobody else can write to, in its inner programs too."""
    owned = _Owned().program(jaxpr, jaxpr, consts)
    return (jaxpr, consts) if owned is None else owned


def _may_change(value: Any) -> bool:
    """Whether a value is a NumPy array that somebody may write to, itself or what it views."""
    if not isinstance(value, np.ndarray):
        return False
    while isinstance(value, np.ndarray):
        if value.flags.writeable:
            return True
        value = value.base
    if isinstance(value, memoryview):
        value = value.obj
    # A file mapped read-only may be larger than memory, so it is not copied.
    return not (value is None or isinstance(value, bytes | mmap.mmap | jax.Array))


def _own(value: Any) -> Any:
    """The constant itself, or a read-only copy if somebody may write to it."""
    if not _may_change(value):
        return value
    key = None
    if value.nbytes >= _SHARED:
        place = value.__array_interface__
        key = type(value), place["data"], value.strides, value.shape, value.dtype
        known = _COPIES.get(key)
        if known is not None and same_constant(known, value):
            return known
    copy = value.copy()
    copy.setflags(write=False)
    if key is not None:
        _COPIES[key] = copy
    return copy


class _Owned:
    """Walks a program and replaces constants.

    `program` returns None, and the other methods their argument, if there is nothing to copy.
    """

    def __init__(self) -> None:
        # By identity. An inner program that is called twice stays one object, so that JAX lowers
        # it once; the pair holds it, so that its id is not reused.
        self._programs: dict[int, tuple[Any, Any]] = {}

    def program(
        self, original: Any, jaxpr: Jaxpr, consts: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]] | None:
        owned = [_own(x) for x in consts]
        outvars = [self._atom(atom) for atom in jaxpr.outvars]
        eqns = [self._equation(eqn) for eqn in jaxpr.eqns]
        pairs = ((owned, consts), (outvars, jaxpr.outvars), (eqns, jaxpr.eqns))
        if all(x is y for new, old in pairs for x, y in zip(new, old, strict=True)):
            return None
        args = jaxpr.constvars, owned, jaxpr.invars, outvars, eqns
        return rebuilt_jaxpr(original, *args), owned

    def _equation(self, eqn: JaxprEqn) -> Any:
        invars = [self._atom(atom) for atom in eqn.invars]
        params = {name: self._param(value) for name, value in eqn.params.items()}
        if all(x is y for x, y in zip(invars, eqn.invars, strict=True)) and all(
            value is eqn.params[name] for name, value in params.items()
        ):
            return eqn
        return eqn.replace(invars=invars, params=params)

    def _atom(self, atom: object) -> Any:
        if not is_literal(atom):
            return atom
        owned = _own(atom.val)
        return atom if owned is atom.val else type(atom)(owned, atom.aval)

    def _param(self, value: Any) -> Any:
        if is_jaxpr(value):
            known = self._programs.get(id(value))
            if known is None:
                owned = self.program(value, *open_jaxpr(value))
                known = self._programs[id(value)] = value, value if owned is None else owned[0]
            return known[1]
        if isinstance(value, np.ndarray):
            return _own(value)
        if isinstance(value, tuple | list):
            parts = [self._param(v) for v in value]
            if all(x is y for x, y in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, dict):
            inner = {k: self._param(v) for k, v in value.items()}
            return value if all(inner[k] is v for k, v in value.items()) else inner
        return value
