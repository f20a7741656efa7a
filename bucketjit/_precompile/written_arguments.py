"""Writes the arguments of a call as JSON values for a manifest, and reads them again.

A manifest may come from anybody. So reading imports nothing, runs no constructor, and evaluates
only expressions of sizes that `_is_plain` accepts.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit._autodiff import equations
from bucketjit._autodiff.derivatives import Derived
from bucketjit._compile.executable import Origin
from bucketjit._jax.arrays import is_on_several_devices, key_impl
from bucketjit._runtime.engine import Engine
from bucketjit._signature.parameters import PLAIN_STATICS
from bucketjit._sizes.dynamic_axes import STATIC
from bucketjit._sizes.expressions import evaluate_text, variables_of
from bucketjit.errors import SpecError

_EXPRESSION = re.compile(r"[\w+\-*^(), ]{1,1000}")

# Refused in expressions, because evaluating it could take unbounded time and memory: ``**``, powers
# of powers, exponents of two digits, five powers, and numbers of 20 digits. JAX writes ``b^2``.
_POWERS = re.compile(r"\*\*|\^(?!\d(?![\d^]))|(\^.*){5}|\d{20}")

_LONGEST_PATH = 4  # order of derivatives; tracing takes longer with each order


class DerivativeOf(NamedTuple):
    """A derivative of a function.

    Attributes:
        path: The steps that lead from the function to the derivative.
        args: Positional arguments of the function that it is a derivative of, as in `Entry`.
        kwargs: Keyword arguments of that function.
    """

    path: equations.Path
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class CannotWrite(Exception):
    """A manifest cannot hold this argument."""


class NotHere(SpecError):
    """A well-formed signature needs a device or a class that this process does not have."""


def written_derivative(engine: Engine, derived: Derived) -> dict[str, Any]:
    """A derivative as JSON values."""
    if len(derived.path) > _LONGEST_PATH:
        raise CannotWrite(f"a derivative of {engine.name} of order {len(derived.path)}")
    if derived.origin is None:
        raise CannotWrite(
            f"a derivative of {engine.name} by arrays that are sharded is not written down: make "
            "a bucketed function of the derivative, and warm that up"
        )
    return {
        "path": [[step, *map(list, key)] for step, key in derived.path],
        "sizes": dict(derived.origin.sizes),
        **written_arguments(derived.origin),
    }


def written_arguments(origin: Origin) -> dict[str, Any]:
    """The arguments of calls like one, as JSON values."""
    signed = origin.signed
    # Written leaves are put into the tree of the arguments, which is then written around them.
    leaves = [
        _written_leaf(origin, i, kind.dtype, kind.weak_type)
        for i, kind in enumerate(signed.signature.types)
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
    """A written leaf. The class distinguishes it from a dict that is a container."""

    def __init__(self, written: dict[str, Any]) -> None:
        self.written = written


def _written_leaf(origin: Origin, leaf: int, dtype: Any, weak: bool) -> dict[str, Any]:
    shape: tuple[int, ...] = tuple(origin.signed.shapes[leaf])
    row = (STATIC,) * len(shape) if origin.tokens is None else origin.tokens[leaf]
    sizes = [n if t == STATIC or t.isdigit() else t for t, n in zip(row, shape, strict=True)]
    if strange := [t for t in sizes if isinstance(t, str) and not _is_plain(t)]:
        path = origin.signed.signature.paths[leaf]
        raise CannotWrite(f"{path}: the size {strange[0]} is not written down")
    if dtype is None:
        return {"size": sizes[0]}
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        impl = key_impl(dtype)
        if not isinstance(impl, str):
            raise CannotWrite(f"{origin.signed.signature.paths[leaf]}: keys of {dtype}")
        written: dict[str, Any] = {"key": impl, "shape": sizes}
    else:
        written = {"dtype": dtype.name, "weak": weak, "shape": sizes}
    sharding = getattr(origin.signed.leaves[leaf], "sharding", None)
    if is_on_several_devices(sharding):
        written["sharding"] = _written_sharding(sharding, origin.signed.signature.paths[leaf])
    elif sharding is not None:  # committed to a device, for which jit has another executable
        [device] = sharding.device_set
        written["device"] = [device.platform, device.id]
    return written


def _written_sharding(sharding: object, path: str) -> dict[str, Any]:
    """A sharding over a mesh, as JSON values; devices are written by their numbers."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        raise CannotWrite(f"{path}: a {type(sharding).__name__} is not written down")
    mesh = sharding.mesh
    spec = [list(x) if isinstance(x, tuple) else x for x in sharding.spec]
    if any(type(x) not in (str, list, type(None)) for x in spec):
        raise CannotWrite(f"{path}: the sharding {sharding.spec} is not written down")
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
    # Exact types only: a subclass could not be made again without running its constructor.
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
    raise CannotWrite(f"{path}: {what} is no dict, list or tuple, and is not written down")


def _is_named_tuple(cls: Any) -> bool:
    """Whether a class is a named tuple that can be found by its module and name."""
    is_one = isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")
    return is_one and _imported(cls.__module__, cls.__qualname__) is cls


def _imported(module: str, name: str) -> Any:
    """The object of a name in a module; None if there is none or the module is not imported."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _written_static(value: object, path: str) -> Any:
    if type(value) not in PLAIN_STATICS:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise CannotWrite(f"{path}: a static argument of type {kind} is not written down")
    return {"static": value}


def _variables(leaves: Iterable[Mapping[str, Any]]) -> list[str]:
    found: dict[str, None] = {}
    for leaf in leaves:
        for size in leaf.get("shape", [leaf.get("size")]):
            if isinstance(size, str):
                found.update(dict.fromkeys(variables_of(size)))
    return list(found)


def read_arguments(
    written: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read the arguments of a signature."""
    args = tuple(_read(x, sizes) for x in written["args"])
    return args, {str(k): _read(x, sizes) for k, x in written["kwargs"].items()}


def read_derivative(written: Any) -> DerivativeOf | None:
    """Read the derivative of a signature."""
    if written is None:
        return None
    path = []
    if len(written["path"]) > _LONGEST_PATH:
        raise SpecError(f"expected a derivative of at most order {_LONGEST_PATH}")
    for step, *key in written["path"]:
        if equations.STEPS.get(step) != len(key):
            raise SpecError(f"expected how a derivative comes about, got {written['path']!r}")
        path.append((step, tuple(tuple(map(_whole, positions)) for positions in key)))
    args, kwargs = read_arguments(written, read_sizes(written["sizes"], written["variables"]))
    return DerivativeOf(tuple(path), args, kwargs)


def read_sizes(written: Mapping[str, Any], variables: Sequence[str]) -> dict[str, int]:
    """Read the sizes of dimension variables."""
    return {v: _whole(written[v]) for v in variables}


def read_text(name: str, value: object) -> str:
    """Check that a value is text, and return it."""
    if not isinstance(value, str):
        raise SpecError(f"{name}: expected text, got {value!r}")
    return value


def read_texts(name: str, values: object) -> Mapping[str, str]:
    """Check that a value is a dict of texts, and return it."""
    if not isinstance(values, dict):
        raise SpecError(f"{name}: expected texts by name, got {values!r}")
    return {key: read_text(f"{name}[{key!r}]", value) for key, value in values.items()}


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
                raise NotHere(
                    f"an argument has a {module}.{name} with the fields "
                    f"{', '.join(map(str, fields))}, and no such named tuple is imported; import "
                    "what defines it before the warm-up"
                )
            return tuple.__new__(cls, values)  # no constructor runs: the file may be anybody's
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
    """The sharding or device that an array was committed to, or None."""
    match written:
        case {"sharding": sharding}:
            return _sharding(sharding)
        case {"device": [str(platform), int(number)]}:
            try:
                here = {device.id: device for device in jax.devices(platform)}
            except RuntimeError:  # no such platform
                here = {}
            if number not in here:
                raise NotHere(f"an array was on the device {platform}:{number}, which is not here")
            return jax.sharding.SingleDeviceSharding(here[number])
        case {"device": other}:
            raise SpecError(f"expected a platform and a number, got {other!r}")
    return None


def _sharding(written: object) -> jax.sharding.NamedSharding:
    match written:
        case {"mesh": list(axes), "devices": list(ids), "spec": list(spec)}:
            here = {device.id: device for device in jax.devices()}
            if missing := [i for i in ids if i not in here]:
                raise NotHere(f"an array was on the device {missing[0]}, which is not here")
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
    """Whether an expression of sizes is safe to evaluate: its characters, and its powers."""
    return _EXPRESSION.fullmatch(size) is not None and _POWERS.search(size) is None


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise SpecError(f"expected a size, got {str(value)[:50]!r}")
    return value
