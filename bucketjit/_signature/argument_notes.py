"""Notes on errors of the user's function: what about its arguments may have led to them.

The error is that of ``jax.jit``, so it stays as it is; a note says what to pass instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import jax
from jax.tree_util import keystr, tree_leaves_with_path

from bucketjit._signature.foreign_values import remedy_for
from bucketjit._sizes.lists_of_numbers import cure_of_list, is_list_of_numbers
from bucketjit.errors import BucketJitError

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
        note = _of_scalars(str(error), args)
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
