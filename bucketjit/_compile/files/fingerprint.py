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
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import Jaxpr, Primitive

from bucketjit._jax import primitives
from bucketjit._jax.fingerprints import is_name_of_axis, parts_of, text_of
from bucketjit._jax.jaxprs import is_jaxpr, is_literal, open_jaxpr
from bucketjit._jax.primitives import CALLBACKS

# Parameters of equations that do not change what a traced program computes: functions that only
# differentiation calls, which has happened before; names; and trees of results, which the program's
# own results contain.
_IDLE = frozenset(
    (
        "jvp_jaxpr_fun",
        "jvp_jaxpr_thunk",
        "fwd_jaxpr_thunk",
        "fwd",
        "bwd",
        "out_trees",
        "name",
        "debug_info",
        "policy",
    )
)
# Primitives whose work is not in the program: a function of the host, or of a library, does it.
_ELSEWHERE = CALLBACKS | {"ffi_call"}


class NoDigest(Exception):
    """There is no sound digest; the message says why."""


class Own(NamedTuple):
    """The objects that bucketjit itself puts into programs. Their code is known.

    Attributes:
        primitives: Its primitives.
        parts: For each of its types, a function that splits an object into the name of the
            dimension variable it introduced and the other parts. Such a name has a running number,
            which differs between processes, so digests replace it.
    """

    primitives: frozenset[Any]
    parts: Mapping[type, Callable[[Any], tuple[str, Sequence[Any]]]]


NOTHING = Own(frozenset(), {})


class Digest:
    """Takes values one after the other, and returns a digest of them all.

    Each value is written with its kind and its length, so no two sequences of values write the
    same bytes.

    Attributes:
        primitives: The primitives of the programs taken in.
    """

    def __init__(self, own: Own | None = None) -> None:
        self._hash = hashlib.sha256()
        self._own = NOTHING if own is None else own
        self._renamed: dict[str, str] = {}  # dimension variable -> its name in digests
        # By identity, with the object itself, or its identity could be given to another one.
        self._programs: dict[int, tuple[Any, str]] = {}
        self._told: dict[int, tuple[Any, bytes]] = {}
        self.primitives: set[Any] = set()

    def hexdigest(self) -> str:
        """The digest of all values added so far, in hexadecimal."""
        return self._hash.hexdigest()

    def add(self, *values: object) -> Digest:
        """Add values."""
        for value in values:
            self._add(value)
        return self

    def _write(self, kind: str, data: bytes | str = b"") -> None:
        """Add bytes with their kind and length before them."""
        data = data.encode() if isinstance(data, str) else data
        self._hash.update(f"{kind}:{len(data)}:".encode())
        self._hash.update(data)

    def _add(self, value: Any) -> None:
        """Add one value by its type."""
        kind = type(value)
        writer = _SIMPLE.get(kind)
        if writer is not None:
            self._write(kind.__name__, writer(value))
        elif isinstance(value, enum.Enum):
            self._write("enum", f"{_named(kind)}.{value.name}")
        elif isinstance(value, tuple | list):
            self._write("sequence", f"{_named(kind)} {len(value)}")
            self.add(*value)
        elif isinstance(value, Mapping):
            self._write("mapping", str(len(value)))
            for key in sorted(value, key=repr):
                self.add(key, value[key])
        elif isinstance(value, set | frozenset):
            found = sorted(Digest(self._own).add(x).hexdigest() for x in value)
            self._write("set", "".join(found))
        elif is_jaxpr(value):
            self._program(*open_jaxpr(value))
        elif isinstance(value, np.ndarray | np.generic | jax.Array):
            self._array(value)
        elif isinstance(value, jex_core.Primitive):
            self._primitive(value)
        elif isinstance(value, type):
            self._write("type", _named(value))
        elif (parts := self._parts(value)) is not None:
            self._write("parts", f"{_named(kind)} {len(parts)}")
            self.add(*parts)
        else:
            self._write("object", self._object(value))

    def _parts(self, value: object) -> Sequence[Any] | None:
        """The parts of a value, or None. Notes the dimension variable that it introduced."""
        if (parts := self._own.parts.get(type(value))) is not None:
            name, rest = parts(value)
            self._renamed.setdefault(name, f"#{len(self._renamed)}")
            return rest
        return parts_of(value)

    def _object(self, value: object) -> bytes:
        """The text of an object of JAX's. Cached: it takes long to make and is needed often."""
        known = self._told.get(id(value))
        if known is None:
            text = text_of(value)
            if text is None:
                raise NoDigest(f"a program with {_kind_of(value)} in it has no sound digest")
            for name, other in self._renamed.items():
                text = re.sub(rf"\b{re.escape(name)}\b", other, text)
            known = self._told[id(value)] = value, text.encode()
        return known[1]

    def _array(self, value: Any) -> None:
        """Add an array: dtype, shape, weak type and contents."""
        if isinstance(value, jax.core.Tracer):
            raise NoDigest("a program that holds a tracer has no sound digest")
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
            self._write("keys", str(value.dtype))
            value = jax.random.key_data(value)
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            raise NoDigest("a program that closes over an array of other processes has no digest")
        weak = bool(getattr(value, "weak_type", False))
        host = np.asarray(value)
        if host.dtype.hasobject:
            raise NoDigest("a program that holds Python objects has no sound digest")
        self._write("array", f"{host.dtype.name} {host.dtype.str} {host.shape} {weak}")
        # A view of the bytes, which ``tobytes`` would copy.
        flat = np.ascontiguousarray(host).reshape(-1)
        self._hash.update(flat.view(np.uint8).data)

    def _primitive(self, primitive: Primitive) -> None:
        """Add a primitive by name, if it is JAX's or bucketjit's own."""
        name = primitive.name
        if name in _ELSEWHERE:
            raise NoDigest(f"what {name} does is not part of the program")
        if primitive not in self._own.primitives and primitives.primitive(name) is not primitive:
            raise NoDigest(f"the primitive {name} is of another library, whose code is not known")
        self.primitives.add(primitive)
        self._write("primitive", name)

    def _program(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> None:
        """Add a jaxpr and its constants. A jaxpr that occurs several times is walked once."""
        known = self._programs.get(id(jaxpr))
        if known is None:
            inner = Digest(self._own)
            inner._programs, inner._told = self._programs, self._told
            inner._renamed = self._renamed
            inner._walk(jaxpr)
            self.primitives |= inner.primitives
            known = self._programs[id(jaxpr)] = jaxpr, inner.hexdigest()
        self._write("program", known[1])
        self.add(len(consts), *consts)

    def _walk(self, jaxpr: Jaxpr) -> None:
        """Add the equations of a jaxpr. Variables are numbered in the order of their binding."""
        if effects := [e for e in jaxpr.effects if not is_name_of_axis(e)]:
            raise NoDigest(f"a program with effects ({min(map(str, effects))}) is not stored")
        number: dict[Any, int] = {}

        def atoms(all_of_them: Sequence[Any]) -> None:
            self._write("atoms", str(len(all_of_them)))
            for atom in all_of_them:
                if is_literal(atom):
                    self._write("literal", self._object(atom.aval))
                    self._add(atom.val)
                else:
                    self._write("var", str(number[atom]))

        def bind(variables: Sequence[Any]) -> None:
            self._write("binds", str(len(variables)))
            for var in variables:
                number[var] = len(number)
                self._write("aval", self._object(var.aval))

        bind(jaxpr.constvars)
        bind(jaxpr.invars)
        for eqn in jaxpr.eqns:
            self._primitive(eqn.primitive)
            self._write("context", self._object(eqn.ctx))
            atoms(eqn.invars)
            for name in sorted(eqn.params):
                if name in _IDLE or (name == "computation" and "jaxpr" in eqn.params):
                    continue
                self._write("param", name)
                try:
                    self._add(eqn.params[name])
                except NoDigest as error:
                    if " of " in str(error):  # it names a place already
                        raise
                    raise NoDigest(f"{error} (in {name} of {eqn.primitive.name})") from None
            bind(eqn.outvars)
        atoms(jaxpr.outvars)


class ProgramDigest(NamedTuple):
    """The digest of a program.

    Attributes:
        text: The digest, in hexadecimal.
        primitives: The primitives of the program.
    """

    text: str
    primitives: frozenset[Any]


def program_digest(jaxpr: Jaxpr, own: Own | None = None) -> ProgramDigest:
    """The digest of an open jaxpr without its constants."""
    digest = Digest(own)
    digest._program(jaxpr, ())
    return ProgramDigest(digest.hexdigest(), frozenset(digest.primitives))


def _named(kind: type) -> str:
    """A type by module and name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _kind_of(value: object) -> str:
    """What an object is, for messages."""
    name = getattr(value, "__qualname__", None)
    return f"the function {name}" if name and callable(value) else f"a {_named(type(value))}"


def _float(value: float) -> bytes:
    return struct.pack("<d", value)


def _complex(value: complex) -> bytes:
    return struct.pack("<dd", value.real, value.imag)


# By exact type: a subclass may compute with more than its text says.
_SIMPLE: dict[type, Callable[[Any], bytes | str]] = {
    type(None): lambda _: b"",
    bool: str,
    int: str,
    str: str,
    bytes: bytes,
    float: _float,
    complex: _complex,
    slice: repr,
}
