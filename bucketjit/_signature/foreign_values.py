"""What to do about an argument that is no array: the end of the error that refuses it.

Libraries are recognized by the methods of the value, so none of them is imported.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np

_OTHERWISE = "pass other values as static arguments (static_argnums, static_argnames)"

# A library, the class of its modules, and the function that takes them.
_WRAPPERS = (
    ("equinox", "Module", "bucketjit.integrations.equinox.filter_jit"),
    ("flax.nnx", "Module", "bucketjit.integrations.nnx.jit"),
)

_PYTHON_ARRAYS = (range, bytearray, memoryview, map, filter, zip)


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
    if hasattr(value, "columns") and hasattr(value, "to_numpy"):  # a table
        return f"pass {path}.to_numpy(), or a dict of its columns as arrays"
    if hasattr(value, "detach") and hasattr(value, "numpy"):  # a tensor of PyTorch
        return f"pass {path}.detach().cpu().numpy(), or jnp.from_dlpack({path})"
    if isinstance(getattr(value, "value", None), jax.Array):  # a variable of Keras
        return f"pass {path}.value"
    for method in ("to_numpy", "numpy"):  # a column, an array of Arrow, a tensor of TensorFlow
        if hasattr(value, method):
            return f"pass {path}.{method}()"
    if hasattr(value, "toarray"):  # a sparse matrix of SciPy
        return f"pass {path}.toarray()"
    if hasattr(value, "__dlpack__"):
        return f"pass jnp.from_dlpack({path})"
    if hasattr(value, "__array__") or hasattr(value, "typecode"):
        return f"pass np.asarray({path})"
    if isinstance(value, set | frozenset):
        return f"pass np.array(sorted({path}))"
    if isinstance(value, _PYTHON_ARRAYS) or hasattr(value, "__next__"):
        return f"pass np.array(list({path}))"
    return _OTHERWISE


def cure_of_dtype(array: np.ndarray[Any, Any] | np.generic, path: str) -> str:
    """What to pass in the place of a NumPy array whose dtype JAX does not have."""
    kind = array.dtype.kind
    if kind == "O":
        return (
            "rows of different length do not form an array: pad them, or give the list of rows "
            f"to map; numbers in an array of objects are np.asarray({path}.tolist())"
        )
    if kind in "mM":
        return f"pass numbers, such as {path}.astype('int64')"
    if kind in "SU":
        return "encode text as numbers (tokens, say), or pass it as a static argument"
    return f"pass the fields as arrays of their own, such as a dict of {path}[name]"


def remedy_for(values: object) -> str | None:
    """What an error advises for a value that is no array, inside of some arguments."""
    for library, kind, wrapper in _WRAPPERS:
        module = getattr(sys.modules.get(library), kind, None)
        if module is not None and _holds(values, module):
            return f"use {wrapper}, which takes such modules"
    return None


def _holds(tree: object, kind: type) -> bool:
    """Whether an object of a class is in a pytree, which may be a pytree itself."""

    def is_one(value: object) -> bool:
        return isinstance(value, kind)

    return any(map(is_one, jax.tree_util.tree_leaves(tree, is_leaf=is_one)))
