"""What an executor has compiled, as JSON: enough to get the same ready in another process."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit import _jax
from bucketjit._autodiff import equations
from bucketjit._autodiff.derivatives import Derived
from bucketjit._compile.executable import Executable, Origin
from bucketjit._errors import SpecError
from bucketjit._persistence import files
from bucketjit._persistence.environment import environment
from bucketjit._persistence.fingerprint import NoDigest
from bucketjit._persistence.store import environment_changes, part_changes
from bucketjit._runtime.engine import Engine
from bucketjit._signature.leaf_types import PLAIN_STATICS
from bucketjit._signature.signer import Signed
from bucketjit._sizes.dynamic_axes import STATIC
from bucketjit._sizes.expressions import evaluate_text, variables_of

_FORMAT = 1
_EXPRESSION = re.compile(r"[\w+\-*^(), ]{1,1000}")
# Powers of powers take for ever, and all memory: JAX writes ``b^2``.
_POWERS = re.compile(r"\*\*|\^(?!\d(?![\d^]))|(\^.*){5}|\d{20}")
_LONGEST_PATH = 4  # derivatives of derivatives take ever longer to trace


class DerivativeOf(NamedTuple):
    """Which derivative calls are of.

    Attributes:
        path: How it comes about.
        args: Positional arguments of the function that it is a derivative of, as in `Entry`.
        kwargs: Its keyword arguments.
    """

    path: equations.Path
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Entry(NamedTuple):
    """Calls of one signature to warm up.

    Attributes:
        args: Positional arguments: ``jax.ShapeDtypeStruct`` for arrays, at the first of the sizes.
        kwargs: Keyword arguments.
        sizes: Sizes of the dimension variables, one mapping for each bucket; empty if the call has
            no open axes.
        fingerprint: Digests of the program and its constants; None if they had none.
        problem: Why there are no arguments: what they need is not in this process.
        derivative: Which derivative is called, if it is one.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sizes: tuple[Mapping[str, int], ...]
    fingerprint: Mapping[str, str] | None
    problem: str | None = None
    derivative: DerivativeOf | None = None


@dataclass(frozen=True)
class Manifest:
    """What an executor has compiled. `BucketedExec.manifest` makes one.

    Attributes:
        function: Name of the function.
        environment: Versions, device and flags of the process that made it.
        signatures: What was compiled, as JSON values: ``args`` and ``kwargs`` (trees of arrays by
            dtype, shape, and how they are sharded), ``variables``, ``buckets`` (each with the
            ``sizes`` that asked for it), ``fingerprint``, whether it is ``exact``, and for calls
            of a ``derivative`` how it comes about, and of which arguments of the function.
        left_out: What cannot be written down, and why.

    Examples:
        >>> import numpy as np
        >>> from bucketjit import BucketedExec
        >>> double = BucketedExec(lambda x: 2 * x).with_pow2()
        >>> _ = double(np.ones((3, 2), np.float32)), double(np.ones((7, 2), np.float32))
        >>> manifest = Manifest.parse(double.manifest().text())
        >>> [entry] = manifest.entries()
        >>> [dict(sizes) for sizes in entry.sizes], entry.args[0].dtype.name
        ([{'batch': 3}, {'batch': 7}], 'float32')
        >>> manifest.changes()  # the same versions, device and flags
        []
    """

    function: str
    environment: Mapping[str, str]
    signatures: tuple[Mapping[str, Any], ...]
    left_out: tuple[str, ...] = ()

    def text(self) -> str:
        """The manifest as JSON."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, of which nobody ever sees a part.

        A link is followed, and into what is no file, such as a pipe, it is written.

        Raises:
            OSError: It cannot be written.
        """
        place, text = Path(path).absolute(), self.text().encode()
        if place.exists() and not place.is_file():
            place.write_bytes(text)
        else:
            files.write(Path(os.path.realpath(place)), text, is_private=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Manifest:
        """Read it from a file.

        Raises:
            SpecError: The file is no manifest, or damaged.
            OSError: It cannot be read.
        """
        try:
            return cls.parse(Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            raise SpecError(f"{path} is no manifest: it is not text") from None
        except SpecError as error:
            raise SpecError(f"{path} is no manifest: {error}") from None

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """Read it from JSON. Nothing in it is run.

        Raises:
            SpecError: The text is no manifest.
        """
        try:
            given = json.loads(text)
        except ValueError as error:
            raise SpecError(f"not JSON ({error})") from None
        except RecursionError:
            raise SpecError("its JSON is nested too deeply") from None
        if not isinstance(given, dict) or given.get("format") != _FORMAT:
            raise SpecError(f"expected an object with 'format': {_FORMAT}")
        try:
            made = cls(
                _text("function", given["function"]),
                _texts("environment", given["environment"]),
                tuple(given["signatures"]),
                tuple(_text("left_out", why) for why in given["left_out"]),
            )
            list(made.entries())
        except SpecError:
            raise
        except Exception as error:
            raise SpecError(f"its fields are not as expected: {error!r}") from None
        return made

    def entries(self) -> list[Entry]:
        """What to warm up: arguments, and the sizes to do it with.

        Raises:
            SpecError: A field is not as expected.
        """
        return [_entry(signature) for signature in self.signatures]

    def changes(self) -> list[str]:
        """What of the process that made it is another in this one, in words.

        Where this is not empty, executables that were kept in files are not found again, and
        warming up compiles.
        """
        return environment_changes(self.environment, environment(_jax.default_device()))


def manifest_of(engine: Engine, derivatives: Iterable[Derived]) -> Manifest:
    """What the cache of an engine holds.

    Args:
        engine: The engine.
        derivatives: Those that share the cache with it.
    """
    owners: dict[int, Derived | None] = dict.fromkeys(map(id, engine.signer.families()))
    for made in derivatives:
        owners |= dict.fromkeys(map(id, made.engine.signer.families()), made)
    groups: dict[Any, list[tuple[Origin, Executable, Any]]] = {}
    left_out: list[str] = []
    for key, entry in engine.cache.items():
        origin = entry.origin
        if origin is None or id(origin.signed.family) not in owners:
            left_out.append(f"{dict(entry.sizes)}: where it comes from is not known")
            continue
        # Buckets of a program may have been made for calls that are placed otherwise.
        placed = tuple(getattr(x, "sharding", None) for x in origin.signed.leaves)
        group = key[0], entry.exact, origin.tokens, placed
        groups.setdefault(group, []).append((origin, entry, key[0]))
    signatures = []
    for members in groups.values():
        derived = owners[id(members[0][0].signed.family)]
        # Without open axes every shape is a signature.
        parts = [[m] for m in members] if members[0][1].exact else [members]
        for part in parts:
            try:
                signatures.append(_signature(engine, derived, part))
            except _CannotWrite as error:
                left_out.append(str(error))
    name = engine.name
    surroundings = dict(environment(_jax.default_device()))
    return Manifest(name, surroundings, tuple(signatures), tuple(dict.fromkeys(left_out)))


def changes_of(engine: Engine, signed: Signed, fingerprint: Mapping[str, str] | None) -> list[str]:
    """What of a program is another now than when its fingerprint was taken, in words."""
    if fingerprint is None or engine.always_exact:
        return []
    program = engine.resolve(signed).program
    if program is None:
        return ["the call has no program that is masked"]
    try:
        return part_changes(fingerprint, engine.orders.shelf.digests_of(program))
    except NoDigest as error:
        return [f"its program cannot be compared: {error}"]


class _CannotWrite(Exception):
    pass


class _NotHere(SpecError):
    """A signature that is as it should be, but not for this process."""


def _signature(
    engine: Engine, derived: Derived | None, members: Sequence[tuple[Origin, Executable, Any]]
) -> dict[str, Any]:
    origin, entry, program = members[0]
    fingerprint = None
    if not entry.exact:
        try:
            fingerprint = dict(engine.orders.shelf.digests_of(program))
        except NoDigest:
            fingerprint = None
    return {
        **_written_arguments(origin),
        "buckets": [{"bucket": dict(e.sizes), "sizes": dict(o.sizes)} for o, e, _ in members],
        "fingerprint": fingerprint,
        "exact": entry.exact,
        "derivative": None if derived is None else _written_derivative(engine, derived),
    }


def _written_derivative(engine: Engine, derived: Derived) -> dict[str, Any]:
    if len(derived.path) > _LONGEST_PATH:
        raise _CannotWrite(f"a derivative of {engine.name} of order {len(derived.path)}")
    if derived.origin is None:
        raise _CannotWrite(
            f"a derivative of {engine.name} by arrays that are sharded is not written down: make "
            "an executor of the derivative, and warm that up"
        )
    return {
        "path": [[step, *map(list, key)] for step, key in derived.path],
        "sizes": dict(derived.origin.sizes),
        **_written_arguments(derived.origin),
    }


def _written_arguments(origin: Origin) -> dict[str, Any]:
    """The arguments of calls like one, and the dimension variables that they have."""
    signed = origin.signed
    leaves = [
        _written_leaf(origin, i, kind.dtype, kind.weak_type)
        for i, kind in enumerate(signed.family.types)
    ]
    args, kwargs = signed.tree.unflatten([_Leaf(x) for x in leaves])
    paths = dict(zip(signed.dynamic, args, strict=True))
    count = len(signed.dynamic) + len(signed.statics.positional)
    return {
        "args": [
            _written(paths[i], f"args[{i}]")
            if i in paths
            else _written_static(signed.statics.positional[i], f"args[{i}]")
            for i in range(count)
        ],
        "kwargs": {
            **{k: _written(v, k) for k, v in kwargs.items()},
            **{k: _written_static(v, k) for k, v in signed.statics.keyword.items()},
        },
        "variables": _variables(leaves),
    }


class _Leaf:
    """A leaf as it is written, told from the containers around it."""

    def __init__(self, written: dict[str, Any]) -> None:
        self.written = written


def _written_leaf(origin: Origin, leaf: int, dtype: Any, weak: bool) -> dict[str, Any]:
    shape: tuple[int, ...] = tuple(origin.signed.shapes[leaf])
    row = (STATIC,) * len(shape) if origin.tokens is None else origin.tokens[leaf]
    sizes = [n if t == STATIC or t.isdigit() else t for t, n in zip(row, shape, strict=True)]
    if strange := [t for t in sizes if isinstance(t, str) and not _is_plain(t)]:
        path = origin.signed.family.paths[leaf]
        raise _CannotWrite(f"{path}: the size {strange[0]} is not written down")
    if dtype is None:
        return {"size": sizes[0]}
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        impl = _jax.key_impl(dtype)
        if not isinstance(impl, str):
            raise _CannotWrite(f"{origin.signed.family.paths[leaf]}: keys of {dtype}")
        written: dict[str, Any] = {"key": impl, "shape": sizes}
    else:
        written = {"dtype": dtype.name, "weak": weak, "shape": sizes}
    sharding = getattr(origin.signed.leaves[leaf], "sharding", None)
    if _jax.is_on_several_devices(sharding):
        written["sharding"] = _written_sharding(sharding, origin.signed.family.paths[leaf])
    elif sharding is not None:  # committed, which jit compiles otherwise
        [device] = sharding.device_set
        written["device"] = [device.platform, device.id]
    return written


def _written_sharding(sharding: Any, path: str) -> dict[str, Any]:
    """A sharding over a mesh, whose devices are written by their numbers."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        raise _CannotWrite(f"{path}: a {type(sharding).__name__} is not written down")
    mesh = sharding.mesh
    spec = [list(x) if isinstance(x, tuple) else x for x in sharding.spec]
    if any(type(x) not in (str, list, type(None)) for x in spec):
        raise _CannotWrite(f"{path}: the sharding {sharding.spec} is not written down")
    return {
        "mesh": [
            [name, size, kind.name]
            for (name, size), kind in zip(mesh.shape.items(), mesh.axis_types, strict=True)
        ],
        "devices": [device.id for device in mesh.devices.flat],
        "spec": spec,
    }


def _written(value: Any, path: str) -> Any:
    if isinstance(value, _Leaf):
        return value.written
    if value is None:
        return {"none": True}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_written(x, f"{path}[{i}]") for i, x in enumerate(value)]}
    if _is_named_tuple(type(value)):
        cls = type(value)
        fields = list(cls._fields)
        items = [_written(x, f"{path}.{name}") for name, x in zip(fields, value, strict=True)]
        return {"namedtuple": [cls.__module__, cls.__qualname__, fields], "items": items}
    if type(value) is dict and all(type(k) is str for k in value):
        return {"dict": {k: _written(x, f"{path}[{k!r}]") for k, x in value.items()}}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    what = "a dict with keys other than text" if type(value) is dict else f"a {kind}"
    raise _CannotWrite(f"{path}: {what} is no dict, list or tuple, and is not written down")


def _is_named_tuple(cls: Any) -> bool:
    """Whether a class is a named tuple, such as optax's states, that its name leads to."""
    is_one = isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")
    return is_one and _imported(cls.__module__, cls.__qualname__) is cls


def _imported(module: str, name: str) -> Any:
    """What a module that is imported has under a name, or None. Nothing is imported for it."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _written_static(value: Any, path: str) -> Any:
    if type(value) not in PLAIN_STATICS:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise _CannotWrite(f"{path}: a static argument of type {kind} is not written down")
    return {"static": value}


def _variables(leaves: Iterable[Mapping[str, Any]]) -> list[str]:
    found: dict[str, None] = {}
    for leaf in leaves:
        for size in leaf.get("shape", [leaf.get("size")]):
            if isinstance(size, str):
                found.update(dict.fromkeys(variables_of(size)))
    return list(found)


# --- reading ------------------------------------------------------------------------------------


def _entry(signature: Mapping[str, Any]) -> Entry:
    variables = signature["variables"]
    sizes = tuple(_sizes(bucket["sizes"], variables) for bucket in signature["buckets"])
    fingerprint = signature["fingerprint"]
    if fingerprint is not None:
        fingerprint = _texts("fingerprint", fingerprint)
    asked = sizes if variables else ()
    try:
        args, kwargs = _arguments(signature, sizes[0] if sizes else {})
        derivative = _derivative(signature["derivative"])
    except _NotHere as error:
        return Entry((), {}, asked, fingerprint, str(error))
    return Entry(args, kwargs, asked, fingerprint, derivative=derivative)


def _arguments(
    written: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = tuple(_read(x, sizes) for x in written["args"])
    return args, {str(k): _read(x, sizes) for k, x in written["kwargs"].items()}


def _derivative(written: Any) -> DerivativeOf | None:
    if written is None:
        return None
    path = []
    if len(written["path"]) > _LONGEST_PATH:
        raise SpecError(f"expected a derivative of at most order {_LONGEST_PATH}")
    for step, *key in written["path"]:
        if equations.STEPS.get(step) != len(key):
            raise SpecError(f"expected how a derivative comes about, got {written['path']!r}")
        path.append((step, tuple(tuple(map(_whole, positions)) for positions in key)))
    args, kwargs = _arguments(written, _sizes(written["sizes"], written["variables"]))
    return DerivativeOf(tuple(path), args, kwargs)


def _sizes(written: Mapping[str, Any], variables: Sequence[str]) -> dict[str, int]:
    return {v: _whole(written[v]) for v in variables}


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise SpecError(f"{name}: expected text, got {value!r}")
    return value


def _texts(name: str, values: Any) -> Mapping[str, str]:
    if not isinstance(values, dict):
        raise SpecError(f"{name}: expected texts by name, got {values!r}")
    return {key: _text(f"{name}[{key!r}]", value) for key, value in values.items()}


def _read(value: Any, sizes: Mapping[str, int]) -> Any:
    match value:
        case {"none": True}:
            return None
        case {"tuple": list(items)}:
            return tuple(_read(x, sizes) for x in items)
        case {"list": list(items)}:
            return [_read(x, sizes) for x in items]
        case {"dict": dict(items)}:
            return {k: _read(x, sizes) for k, x in items.items()}
        case {"namedtuple": [str(module), str(name), list(fields)], "items": list(items)}:
            cls, values = _imported(module, name), [_read(x, sizes) for x in items]
            if not _is_named_tuple(cls) or list(cls._fields) != fields or len(items) != len(fields):
                raise _NotHere(
                    f"an argument has a {module}.{name} with the fields "
                    f"{', '.join(map(str, fields))}, and no such named tuple is imported; import "
                    "what defines it before the warm-up"
                )
            return tuple.__new__(cls, values)  # its constructor is not run: nothing in a file is
        case {"static": bool() | int() | float() | str() | None as static}:
            return static
        case {"size": int() | str() as size}:
            return _size(size, sizes)
        case {"key": str(impl), "shape": list(shape)}:
            dtype = jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
            return jax.ShapeDtypeStruct(_shape(shape, sizes), dtype, sharding=_placement(value))
        case {"dtype": str(name), "weak": bool(weak), "shape": list(shape)}:
            given = {"weak_type": weak, "sharding": _placement(value)}
            return jax.ShapeDtypeStruct(_shape(shape, sizes), jnp.dtype(name), **given)
    raise SpecError(f"expected an array, a container or a static value, got {value!r}")


def _placement(written: Mapping[str, Any]) -> jax.sharding.Sharding | None:
    """Where an array was committed to be, if it was."""
    match written:
        case {"sharding": sharding}:
            return _sharding(sharding)
        case {"device": [str(platform), int(number)]}:
            try:
                here = {device.id: device for device in jax.devices(platform)}
            except RuntimeError:  # no such platform
                here = {}
            if number not in here:
                raise _NotHere(f"an array was on the device {platform}:{number}, which is not here")
            return jax.sharding.SingleDeviceSharding(here[number])
        case {"device": other}:
            raise SpecError(f"expected a platform and a number, got {other!r}")
    return None


def _sharding(written: Any) -> jax.sharding.NamedSharding:
    match written:
        case {"mesh": list(axes), "devices": list(ids), "spec": list(spec)}:
            here = {device.id: device for device in jax.devices()}
            if missing := [i for i in ids if i not in here]:
                raise _NotHere(f"an array was on the device {missing[0]}, which is not here")
            names, shape, kinds = zip(*axes, strict=True)
            mesh = jax.sharding.Mesh(
                np.array([here[i] for i in ids]).reshape([_whole(n) for n in shape]),
                names,
                axis_types=tuple(jax.sharding.AxisType[kind] for kind in kinds),
            )
            entries = [tuple(x) if isinstance(x, list) else x for x in spec]
            return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*entries))
    raise SpecError(f"expected a sharding, got {written!r}")


def _shape(shape: Sequence[Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(_size(n, sizes) for n in shape)


def _size(size: int | str, sizes: Mapping[str, int]) -> int:
    if not isinstance(size, str):
        return _whole(size)
    if not _is_plain(size) or not set(variables_of(size)) <= sizes.keys():
        raise SpecError(f"expected an expression of {', '.join(sizes)}, got {size!r}")
    return _whole(evaluate_text(size, sizes))


def _is_plain(size: str) -> bool:
    """Whether an expression may become Python code: no other characters may get there."""
    return _EXPRESSION.fullmatch(size) is not None and _POWERS.search(size) is None


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise SpecError(f"expected a size, got {str(value)[:50]!r}")
    return value
