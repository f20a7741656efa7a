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

from bucketjit._jax.jaxprs import is_jaxpr, is_literal, is_plain, open_jaxpr, rebuilt_jaxpr

# Bytes from which on copies are shared. Smaller arrays are many, and a look-up takes longer than
# a copy.
_SHARED = 4096

# Copies, by the address and layout of the original. Programs that close over one array, and traces
# of it at several sizes, share one copy, as long as the original still has the same contents.
_COPIES: weakref.WeakValueDictionary[Hashable, np.ndarray] = weakref.WeakValueDictionary()


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
        shared = _COPIES.get(key)
        if shared is not None:
            from bucketjit._tracing.skeleton import same_constant

            if same_constant(shared, value):
                return shared
    copy = value.copy()
    copy.setflags(write=False)
    if key is not None:
        _COPIES[key] = copy
    return copy


def own_constants(
    original: Any, consts: Sequence[Any], inner: dict[int, Any] | None = None
) -> tuple[Any, Sequence[Any]]:
    """A program whose constants nobody else can write to, in its inner programs too.

    An inner program that is called twice stays one object, so that JAX lowers it once: `inner` has
    each by its id, with the program, whose id no other object gets then.
    """
    programs = {} if inner is None else inner
    jaxpr, _ = open_jaxpr(original)

    def of(value: Any) -> Any:
        if is_literal(value):
            constant = _own(value.val)
            return value if constant is value.val else type(value)(constant, value.aval)
        if not is_jaxpr(value):
            return _own(value)
        if id(value) not in programs:
            programs[id(value)] = value, own_constants(value, open_jaxpr(value)[1], programs)[0]
        return programs[id(value)][1]

    def within(values: Any) -> Any:
        leaves, tree = jax.tree.flatten(values, lambda x: not isinstance(x, tuple | list | dict))
        owned = [of(x) for x in leaves]
        same = all(x is y for x, y in zip(owned, leaves, strict=True))
        return values if same else jax.tree_util.tree_unflatten(tree, owned)

    eqns = []
    for eqn in jaxpr.eqns:
        invars = within(eqn.invars) if any(map(is_literal, eqn.invars)) else eqn.invars
        params = eqn.params if all(map(is_plain, eqn.params.values())) else within(eqn.params)
        same = invars is eqn.invars and params is eqn.params
        eqns.append(eqn if same else eqn.replace(invars=invars, params=params))
    owned, outvars = [of(x) for x in consts], within(jaxpr.outvars)
    pairs = [*zip(owned, consts, strict=True), *zip(eqns, jaxpr.eqns, strict=True)]
    if outvars is jaxpr.outvars and all(x is y for x, y in pairs):
        return original, consts
    return rebuilt_jaxpr(original, jaxpr.constvars, owned, jaxpr.invars, outvars, eqns), owned
