"""A digest of a traced program that is equal in two processes only if the programs are equal.

Everything that decides what a program computes is digested by its contents. A program that holds
an object whose contents are not known (a Python function, a handle) has no digest.
"""

from __future__ import annotations

import enum
import hashlib
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import Jaxpr

from bucketjit._ir.associative_scan import associative_scan_p
from bucketjit._ir.combine import Combine
from bucketjit._ir.primitives import COMBINED, size_constant_p, sized_p, unsized_p
from bucketjit._jax import jaxprs
from bucketjit._jax.fingerprints import is_name_of_axis, parts_of, text_of
from bucketjit._jax.jaxprs import CALLBACKS, is_jaxpr, is_literal, open_jaxpr
from bucketjit._jax.serialization import NotPlain

# Parameters of equations that do not change what a traced program computes: functions that only
# differentiation calls, which has happened before; names; and trees of results, which the program's
# own results contain.
_IDLE = frozenset(
    (
        *("jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "fwd", "bwd", "out_trees"),
        *("name", "debug_info", "policy"),
    )
)
# Primitives whose work is not in the program: a function of the host, or of a library, does it.
_ELSEWHERE = CALLBACKS | {"ffi_call", "kernel"}
_OWN = frozenset((size_constant_p, associative_scan_p, sized_p, unsized_p, *COMBINED))


class NoDigest(NotPlain):
    """There is no sound digest; the message says why."""


def digest(*values: object) -> str:
    """The digest of some values, in hexadecimal."""
    return _Digester().of(*values).hex()


def program_digest(jaxpr: Jaxpr, consts: Sequence[Any] = ()) -> tuple[str, set[Any]]:
    """The digest of an open jaxpr and its constants, and the primitives of the program."""
    walk = _Digester()
    return walk.of(walk.program(jaxpr), *consts).hex(), walk.primitives


class _Digester:
    """Digests values by their parts, each once; notes the ``primitives`` of programs."""

    def __init__(self) -> None:
        self.primitives: set[Any] = set()
        # A `Combine` names its length by a dimension variable with a running number, which differs
        # between processes, so digests have another name for it.
        self._renamed: dict[str, str] = {}
        # By identity, with the object itself, or its identity could be given to another one.
        self._digests: dict[int, tuple[Any, bytes]] = {}

    def of(self, *values: object) -> bytes:
        """The digest of a sequence of values, each written with its length and kind before it."""
        hasher = hashlib.sha256()
        for value in values:
            kind, data = self._written(value)
            hasher.update(f"{kind}:{memoryview(data).nbytes}:".encode())
            hasher.update(data)
        return hasher.digest()

    def _written(self, value: Any) -> tuple[str, Any]:
        """The kind of a value, and its bytes or their digest."""
        kind = type(value)
        if kind in _SIMPLE:
            return kind.__name__, _SIMPLE[kind](value)
        if isinstance(value, enum.Enum):
            return f"enum {_named(kind)}", value.name.encode()
        if isinstance(value, tuple | list):
            return f"sequence {_named(kind)}", self.of(*value)
        if isinstance(value, Mapping):
            return "mapping", self.of(*(x for k in sorted(value, key=repr) for x in (k, value[k])))
        if isinstance(value, set | frozenset):
            return "set", b"".join(sorted(map(self.of, value)))
        if is_jaxpr(value):
            jaxpr, consts = open_jaxpr(value)
            return "program", self.of(self.program(jaxpr), *consts)
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            return self._array(value)
        if isinstance(value, jex_core.Primitive):
            return self._primitive(value)
        if isinstance(value, type):
            return "type", _named(value).encode()
        if isinstance(value, Combine):
            self._renamed.setdefault(value.length, f"#{len(self._renamed)}")
            return "combine", self.of(value.jaxpr, value.axis, value.num_consts)
        parts = parts_of(value)
        if parts is not None:
            return f"parts {_named(kind)}", self.of(*parts)
        return "object", self._once(value, self._text)

    def _once(self, value: Any, make: Callable[[Any], bytes]) -> bytes:
        """What ``make`` returns for an object, made once."""
        entry = self._digests.get(id(value))
        if entry is None:
            entry = self._digests[id(value)] = value, make(value)
        return entry[1]

    def _text(self, value: object) -> bytes:
        text = text_of(value)
        if text is None:
            name = getattr(value, "__qualname__", None)
            is_function = name and callable(value)
            what = f"the function {name}" if is_function else f"a {_named(type(value))}"
            raise NoDigest(f"a program with {what} in it has no sound digest")
        for name, replacement in self._renamed.items():
            text = re.sub(rf"\b{re.escape(name)}\b", replacement, text)
        return text.encode()

    def _array(self, value: Any) -> tuple[str, Any]:
        """The dtype, shape and weak type of an array, and its contents."""
        if isinstance(value, jax.core.Tracer):
            raise NoDigest("a program that holds a tracer has no sound digest")
        kind = str(value.dtype)
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
            value = jax.random.key_data(value)
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            raise NoDigest("a program that closes over an array of other processes has no digest")
        weak = bool(getattr(value, "weak_type", False))
        host = np.asarray(value)
        if host.dtype.hasobject:
            raise NoDigest("a program that holds Python objects has no sound digest")
        # A view of the bytes, which ``tobytes`` would copy.
        flat = np.ascontiguousarray(host).reshape(-1).view(np.uint8).data
        return f"array {kind} {host.dtype.str} {host.shape} {weak}", flat

    def _primitive(self, primitive: Any) -> tuple[str, bytes]:
        """The name of a primitive, if it is JAX's or bucketjit's own."""
        name = primitive.name
        if name in _ELSEWHERE:
            raise NoDigest(f"what {name} does is not part of the program")
        if primitive not in _OWN and jaxprs.primitive(name) is not primitive:
            raise NoDigest(f"the primitive {name} is of another library, whose code is not known")
        self.primitives.add(primitive)
        return "primitive", name.encode()

    def program(self, jaxpr: Jaxpr) -> bytes:
        return self._once(jaxpr, self._equations)

    def _equations(self, jaxpr: Jaxpr) -> bytes:
        """The digest of a jaxpr, whose variables are numbered in the order of their binding."""
        if effects := [e for e in jaxpr.effects if not is_name_of_axis(e)]:
            raise NoDigest(f"a program with effects ({min(map(str, effects))}) is not stored")
        number: dict[Any, int] = {}

        def read(atoms: Sequence[Any]) -> list[Any]:
            return [(a.aval, a.val) if is_literal(a) else number[a] for a in atoms]

        def bind(variables: Sequence[Any]) -> list[Any]:
            for var in variables:
                number[var] = len(number)
            return [var.aval for var in variables]

        parts: list[Any] = [bind(jaxpr.constvars), bind(jaxpr.invars)]
        for eqn in jaxpr.eqns:
            parts += [self._primitive(eqn.primitive), eqn.ctx, read(eqn.invars)]
            for name in sorted(eqn.params):
                if name not in _IDLE and (name != "computation" or "jaxpr" not in eqn.params):
                    parts.append((name, self._parameter(eqn, name)))
            parts.append(bind(eqn.outvars))
        return self.of(*parts, read(jaxpr.outvars))

    def _parameter(self, eqn: Any, name: str) -> bytes:
        try:
            return self.of(eqn.params[name])
        except NoDigest as error:
            if " of " in str(error):  # it names a place already
                raise
            raise NoDigest(f"{error} (in {name} of {eqn.primitive.name})") from None


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# By exact type: a subclass may compute with more than its text says.
_SIMPLE: dict[type, Callable[[Any], bytes]] = {
    **dict.fromkeys((type(None), bool, int, slice), lambda x: repr(x).encode()),
    str: str.encode,
    bytes: bytes,
    float: lambda x: struct.pack("<d", x),
    complex: lambda x: struct.pack("<dd", x.real, x.imag),
}
