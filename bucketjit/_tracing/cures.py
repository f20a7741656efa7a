"""What to pass in the place of an argument that is refused, or that the function cannot use.

Libraries are recognized by the methods of the value, so none of them is imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_leaves, tree_leaves_with_path

from bucketjit._ir.lists_of_numbers import cure_of_list, is_list_of_numbers
from bucketjit._raised import text_of
from bucketjit.errors import BucketJitError

_OTHERWISE = "pass other values as static arguments (static_argnums, static_argnames)"

# A library, the class of its modules, and the function that takes them.
_WRAPPERS = (
    ("equinox", "Module", "bucketjit.integrations.equinox.filter_jit"),
    ("flax.nnx", "Module", "bucketjit.integrations.nnx.jit"),
)

# The methods of a value, and what to pass in its place; the first row that fits counts.
_BY_METHODS = (
    ("columns to_numpy", "pass {0}.to_numpy(), or a dict of its columns as arrays"),
    ("detach numpy", "pass {0}.detach().cpu().numpy(), or jnp.from_dlpack({0})"),
    ("to_numpy", "pass {0}.to_numpy()"),
    ("numpy", "pass {0}.numpy()"),
    ("toarray", "pass {0}.toarray()"),
    ("__dlpack__", "pass jnp.from_dlpack({0})"),
    ("__array__", "pass np.asarray({0})"),
    ("typecode", "pass np.asarray({0})"),
    ("isdisjoint", "pass np.array(sorted({0}))"),
    ("__next__", "pass np.array(list({0}))"),
)

# The kinds of a NumPy dtype that JAX does not have, and what to pass in the place of the array.
_BY_DTYPE = {
    "O": "rows of different length do not form an array: pad them, or give the list of rows to "
    "map; numbers in an array of objects are np.asarray({0}.tolist())",
    **dict.fromkeys("mM", "pass numbers, such as {0}.astype('int64')"),
    **dict.fromkeys("SU", "encode text as numbers (tokens, say), or pass it as a static argument"),
}


def described(value: object) -> str:
    """The type of a value, with the package of a class that is not built in."""
    kind = type(value)
    package = kind.__module__.split(".")[0]
    return kind.__name__ if package in ("builtins", "__main__") else f"{kind.__name__} ({package})"


def cure(value: Any, path: str) -> str:
    """What to pass in the place of a value that is neither an array nor a Python scalar."""
    if isinstance(value, str | bytes):
        return (
            "encode text as an array of numbers (of tokens, say), or pass it as a static argument "
            "(static_argnums, static_argnames)"
        )
    if isinstance(value, type) or (callable(value) and not hasattr(value, "__array__")):
        return _OTHERWISE
    for methods, text in _BY_METHODS:
        if all(hasattr(value, method) for method in methods.split()):
            return text.format(path)
    if isinstance(value, range | bytearray | memoryview):
        return f"pass np.array(list({path}))"
    return _OTHERWISE


def cure_of_dtype(array: np.ndarray[Any, Any] | np.generic, path: str) -> str:
    """What to pass in the place of a NumPy array whose dtype JAX does not have."""
    fields = "pass the fields as arrays of their own, such as a dict of {0}[name]"
    return _BY_DTYPE.get(array.dtype.kind, fields).format(path)


def remedy_for(values: object) -> str | None:
    """What an error advises for a module of a library, inside of some arguments."""
    for library, kind, wrapper in _WRAPPERS:
        module = getattr(sys.modules.get(library), kind, None)
        if module is not None and _holds(values, module):
            return f"use {wrapper}, which takes such modules"
    return None


def _holds(tree: object, kind: type) -> bool:
    """Whether an object of a class is in a pytree, which may be a pytree itself."""

    def is_one(value: object) -> bool:
        return isinstance(value, kind)

    return any(map(is_one, tree_leaves(tree, is_leaf=is_one)))


_TRACED_AS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
)


def note_arguments(error: Exception, args: Mapping[str, object]) -> None:
    """Add a note to an error of a function, if one of its arguments explains it."""
    if isinstance(error, BucketJitError) or any(
        note.startswith("bucketjit: ") for note in getattr(error, "__notes__", ())
    ):
        return
    note = None
    if isinstance(error, _TRACED_AS_VALUE):
        note = _of_scalars(text_of(error), args)
    elif isinstance(error, TypeError | AttributeError):
        note = _of_lists(args)
    if note is not None:
        error.add_note(f"bucketjit: {note}")


def _of_lists(args: Mapping[str, object]) -> str | None:
    """A list of numbers is a tree of scalars, of which a function may ask what only arrays have."""
    for name, value in args.items():
        if is_list_of_numbers(value):
            return (
                f"{name}: as under jax.jit, a list is a tree of scalars; where an array is meant: "
                f"{cure_of_list(value, name)}"
            )
    return None


def _of_scalars(message: str, args: Mapping[str, object]) -> str | None:
    """A Python scalar is traced, and the function may need its value."""
    for name, value in args.items():
        for keys, leaf in tree_leaves_with_path(value):
            path = name + keystr(keys)
            # JAX's message names the arguments that the value depends on.
            named = re.search(rf"argument.*[ ,]{re.escape(path)}(?!\w|\[|\.\w)", message)
            if not isinstance(leaf, bool | int | float | str) or not named:
                continue
            what = f"{path} is a Python {type(leaf).__name__}, which is traced like an array"
            if not keys:
                return f"{what}; if the function needs its value: static_argnames={path!r}"
            cure = remedy_for(list(args.values())) or "pass it as a static argument of its own"
            return f"{what}, and the function needs its value; {cure}"
    return None
