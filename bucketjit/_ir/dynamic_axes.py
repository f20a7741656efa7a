"""Parse ``dynamic_axes``: all its forms become one token per axis of each argument leaf.

    before   ("b, s", {"mask": {0: "b"}})  for  f(x, opts), x: f32[8, 64], mask: bool[8, 3]
    after    (("b", "s"), ("b", "_"))

A token is text: ``"_"`` for a static axis, else a dimension variable or an expression of some
(``"2*b + 1"``). `Anonymous` is for axes that are open without a name, as in GoMLX's
``SetDynamicAxes`` and in the default rule: the sizes of the first call choose their variables.
"""

from __future__ import annotations

import functools
import keyword
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export

from bucketjit._ir.expressions import split_at_commas
from bucketjit._raised import is_of_machine
from bucketjit.errors import ArgumentError, SpecError

STATIC = "_"
# What expressions of sizes may call.
_FUNCTIONS = ("floordiv", "max", "min", "mod", "non_negative")
Tokens = tuple[tuple[str, ...], ...]  # for each leaf, one token for each of its axes


class Place(NamedTuple):
    """An axis of an argument leaf, which goes by its position, with its token."""

    leaf: int
    axis: int
    token: str


class Places(NamedTuple):
    """The axes of the leaves of a call that are not static, and those that are."""

    opened: tuple[Place, ...]
    static: tuple[Place, ...]


@functools.lru_cache(maxsize=1024)
def places_of(tokens: Tokens) -> Places:
    """The open and the static axes of all leaves; cached, as calls of new sizes ask for them."""
    every = [Place(i, axis, t) for i, row in enumerate(tokens) for axis, t in enumerate(row)]
    opened = tuple(place for place in every if place.token != STATIC)
    return Places(opened, tuple(place for place in every if place.token == STATIC))


@dataclass(frozen=True)
class Anonymous:
    """Open axes without names.

    Attributes:
        axes: The axes, possibly negative.
        is_guessed: Whether bucketjit takes them to be open, which is given up if the function
            cannot be traced so.
    """

    axes: tuple[int, ...]
    is_guessed: bool = False


LeafSpec = Any  # of one leaf: text, Anonymous, names by axis, a tuple of names, or None


def is_leaf_entry(entry: object) -> bool:
    """True for an entry that describes arrays, False for a container of such entries."""
    if entry is None or isinstance(entry, str | Anonymous):
        return True
    if not isinstance(entry, Mapping | list):
        return False
    return bool(entry) and all(isinstance(axis, int) for axis in entry)


def opens(entry: Any) -> bool:
    """Whether an entry, or an entry in a container of entries, opens an axis."""
    if isinstance(entry, str):
        return any(t not in (STATIC, "...", "") and not t.isdigit() for t in _split(entry))
    if isinstance(entry, Anonymous):
        return bool(entry.axes)
    if is_leaf_entry(entry):
        return entry is not None
    return any(map(opens, entry.values() if isinstance(entry, Mapping) else entry))


def names_in(spec: object) -> list[str]:
    """The variables that ``dynamic_axes``, or an entry of it, names, in their order."""
    if isinstance(spec, str):
        words = re.findall(r"[^\W\d]\w*", spec)
        return list(dict.fromkeys(w for w in words if w not in (STATIC, *_FUNCTIONS)))
    if jax.tree_util.all_leaves([spec]) or spec is None:
        return []
    return list(dict.fromkeys(n for _, child in _children(spec) for n in names_in(child)))


def entries_of_arguments(
    spec: object,
    n_positional: int,
    names: Sequence[str],
    keywords: Sequence[str],
    keyword_only: Sequence[str] | None = (),
) -> tuple[list[Any], dict[str, Any]]:
    """Split ``dynamic_axes`` into an entry per positional argument and per keyword."""
    if is_leaf_entry(spec):
        if (count := n_positional + len(keywords)) != 1:
            remedy = "; for several, give a tuple with one entry per argument" if count else ""
            raise SpecError(
                f"dynamic_axes={_shown(spec)} describes one argument, but the call has "
                f"{count or 'none'}{remedy}"
            )
        return ([spec], {}) if n_positional else ([], {keywords[0]: spec})
    if isinstance(spec, Mapping):
        accepted = [*names, *keywords, *(keyword_only or ())]
        unknown = [k for k in spec if k not in accepted]
        if unknown and names and keyword_only is not None:
            by_number = all(type(axis) is int for axis in spec.values())
            remedy = "; axes of one argument go by their number: {0: 'b'}" if by_number else ""
            raise SpecError(
                f"dynamic_axes names arguments {unknown}; this function has "
                f"{list(dict.fromkeys(accepted))}{remedy}"
            )
        return [spec.get(n) for n in names[:n_positional]], {k: spec.get(k) for k in keywords}
    if not isinstance(spec, tuple | list):
        raise SpecError(
            "dynamic_axes must be a tuple with one entry per argument, a dict by argument name, "
            f"or one entry for a function of one argument; got {spec!r}"
        )
    entries, by_name = list(spec), {}
    # A last entry ``{"name": ...}`` beyond the positional ones is for keyword arguments.
    has_names = len(entries) > n_positional and _is_keyword_entry(entries, names, keywords)
    if has_names:
        by_name = dict(entries.pop())
    for name, entry in zip(names[n_positional:], entries[n_positional:], strict=False):
        by_name.setdefault(name, entry)
    if len(spec) > max(len(names), n_positional) + has_names:
        raise SpecError(
            f"dynamic_axes has {len(spec)} entries, but the function takes {n_positional} "
            "positional arguments in this call; give one entry per argument (None: static); the "
            "axes of one argument are one text, such as 'b, s'"
        )
    entries += [None] * (n_positional - len(entries))
    return entries[:n_positional], {k: by_name.get(k) for k in keywords}


def _is_keyword_entry(
    entries: Sequence[Any], names: Sequence[str], keywords: Sequence[str]
) -> bool:
    """Whether the keys of the last entry are argument names, not keys of a container argument."""
    last = entries[-1]
    if not isinstance(last, Mapping) or not all(isinstance(k, str) for k in last):
        return False
    return len(entries) > len(names) or all(k in names or k in keywords for k in last)


def leaf_entries(entry: object, value: object, path: str) -> list[LeafSpec]:
    """One entry per leaf of an argument; the entry is matched as a prefix of its tree."""
    if jax.tree_util.all_leaves([value]):
        return [_leaf_spec(entry, path)]
    if value is None:
        return []
    children = _children(value)
    # ``{0: ...}`` is an entry for arrays (names by axis), unless the argument has ints as keys.
    int_keyed = isinstance(value, dict) and any(isinstance(k, int) for k in value)
    if is_leaf_entry(entry) and not (isinstance(entry, Mapping) and int_keyed):
        if opens(entry) and is_list_of_numbers(value):
            raise ArgumentError(
                f"{path}: expected an array, by dynamic_axes {_shown(entry)}, "
                f"{cure_of_list(value, path)}"
            )
        return [spec for key, x in children for spec in leaf_entries(entry, x, path + key)]
    entries = dict(_children(entry)) if not jax.tree_util.all_leaves([entry]) else {}
    keys = [key for key, _ in children]
    if isinstance(value, dict) and isinstance(entry, Mapping) and set(entries) < set(keys):
        missing = {key: child for key, child in children if key not in entries}
        _refuse_missing_keys(entry, missing, keys, path)
        entries |= dict.fromkeys(missing)
    if isinstance(value, dict) and (unknown := [key for key in entries if key not in keys]):
        raise SpecError(
            f"dynamic_axes of {path}: {entry!r} has an entry for "
            f"{', '.join(key[1:-1] for key in unknown)}, which the argument does not have; the "
            f"argument has {', '.join(key[1:-1] for key in keys) or 'no keys'}"
        )
    if set(entries) != set(keys):
        raise SpecError(
            f"dynamic_axes of {path}: {entry!r} does not match its structure; expected an entry "
            f"for each of {', '.join(keys)} (or one entry for all of it)"
        )
    return [spec for key, x in children for spec in leaf_entries(entries[key], x, path + key)]


def _refuse_missing_keys(
    entry: object, missing: Mapping[str, Any], keys: Sequence[str], path: str
) -> None:
    """Refuse arrays without an entry: each of their sizes would have an executable of its own."""
    arrays = [
        key for key, child in missing.items() if any(map(np.ndim, jax.tree_util.tree_leaves(child)))
    ]
    if arrays:
        named = ", ".join(key[1:-1] for key in arrays)
        raise SpecError(
            f"dynamic_axes of {path}: {entry!r} has no entry for {named}; the argument has "
            f"{', '.join(key[1:-1] for key in keys)}. Give each array an entry, and None to one "
            f"whose sizes never change: {{..., {arrays[0][1:-1]}: None}}"
        )


def _children(node: object) -> list[tuple[str, Any]]:
    pairs = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    return [(jax.tree_util.keystr(keys), child) for keys, child in pairs]


def _leaf_spec(entry: Any, path: str) -> LeafSpec:
    if entry is None or isinstance(entry, str | Anonymous):
        return entry
    if isinstance(entry, Mapping) and all(isinstance(k, int) for k in entry):
        if not all(isinstance(v, str) for v in entry.values()):
            raise SpecError(f"dynamic_axes of {path}: expected {{axis: 'name'}}, got {entry!r}")
        return dict(entry)
    if type(entry) is tuple and all(e is None or isinstance(e, str) for e in entry):
        return tuple(entry)
    if isinstance(entry, list) and all(isinstance(a, int) for a in entry):
        return Anonymous(tuple(entry))
    raise SpecError(
        f"dynamic_axes of {path}: expected a string such as 'b, s, _', a dict {{0: 'b'}}, a tuple "
        f"('b', None), a list of axes [0, 1] or None for this array, got {entry!r}"
    )


def tokens_of(spec: LeafSpec, path: str, shape: Sequence[int]) -> tuple[str, ...]:
    """One token per axis of a leaf of this shape."""
    rank = len(shape)
    if spec is None:
        return (STATIC,) * rank
    if isinstance(spec, dict):
        named = {a % rank if -rank <= a < rank else rank: n for a, n in spec.items()}
        if rank in named:
            raise ArgumentError(
                f"{path}: dynamic_axes {spec!r} names an axis that shape {tuple(shape)} does not "
                "have"
            )
        if len(named) < len(spec):
            raise SpecError(
                f"dynamic_axes of {path}: {spec!r} names one axis of shape {tuple(shape)} twice"
            )
        parts = [named.get(i, STATIC) for i in range(rank)]
    elif isinstance(spec, str):
        parts = _split(spec)
    else:
        assert isinstance(spec, tuple)
        parts = [STATIC if p is None else p for p in spec]
    _refuse_signs(parts, path)
    for part in parts:
        _refuse_missing_commas(part, path)
    if parts.count("...") > 1:
        raise SpecError(f"dynamic_axes of {path}: {spec!r} has more than one '...'")
    if "..." in parts:
        place = parts.index("...")
        parts[place : place + 1] = [STATIC] * (rank - len(parts) + 1)
    if len(parts) != rank:
        shown = spec if isinstance(spec, str) else ", ".join(parts)
        whole = ", ".join([*parts[:rank], *["_"] * (rank - len(parts))])
        remedy = f"an axis is a name, or _ where it is static, as in {whole!r}"
        if not rank:
            remedy = "a scalar has no axes: give None"
        axes = "1 axis" if len(parts) == 1 else f"{len(parts)} axes"
        raise ArgumentError(
            f"{path}: dynamic_axes {shown!r} describes {axes}, but the "
            f"argument has shape {tuple(shape)} of rank {rank}; {remedy}"
        )
    return tuple(_checked(p, path) for p in parts)


def _shown(entry: object) -> str:
    return repr(list(entry.axes) if isinstance(entry, Anonymous) else entry)


def _is_sign(part: str) -> bool:
    """Whether a text may be meant as an axis that is static, as in other libraries."""
    return part in ("-1", "None") or not re.search(r"\w|\.\.\.", part)


def _refuse_signs(parts: Sequence[str], path: str) -> None:
    """Raise if an axis is a sign that other libraries use for one without a name."""
    if signs := [part for part in parts if _is_sign(part)]:
        written = ", ".join(STATIC if _is_sign(part) else part for part in parts)
        raise SpecError(
            f"dynamic_axes of {path}: {signs[0]!r} is not a size; write _ for an axis that is "
            f"static, as in {written!r}, and a name for one that varies"
        )


def _refuse_missing_commas(part: str, path: str) -> None:
    """Raise if an axis is two words, as in ``"b s"``, or has a sign that no size has."""
    if re.search(r"\w\s+\w", part) or set(part) & set(";|:?[]") or part.startswith("*"):
        words = re.findall(r"\w+|\.\.\.|(?<!\S)[:*?](?!\S)", part)
        names = [STATIC if _is_sign(word) else word for word in words]
        cure = "write" if len(names) == 1 else "separate axes by commas:"
        raise SpecError(
            f"dynamic_axes of {path}: {part!r} is not a size; {cure} {', '.join(names)!r}"
        )


def _split(text: str) -> list[str]:
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    parts = split_at_commas(text)
    return parts if parts[-1] else parts[:-1]


def _checked(token: str, path: str) -> str:
    if token == STATIC or token.isdigit():
        return token
    if words := [w for w in re.findall(r"\w+", token) if keyword.iskeyword(w)]:
        raise SpecError(
            f"dynamic_axes of {path}: {words[0]!r} is a keyword of Python and cannot name a size; "
            "a static axis is _"
        )
    if (read := unicodedata.normalize("NFKC", token)) != token:  # as identifiers are
        raise SpecError(f"dynamic_axes of {path}: Python reads {token!r} as {read!r}; write that")
    try:
        (dim,) = export.symbolic_shape(token)
    except Exception as error:
        if is_of_machine(error):
            raise
        message = str(error).strip().splitlines()[0]
        raise SpecError(
            f"dynamic_axes of {path}: {token!r} is not a size: {message}; expected a name such "
            "as 'b', an expression such as '2*b + 1', or '_'"
        ) from error
    if type(dim) is int and dim < 0:
        raise SpecError(
            f"dynamic_axes of {path}: {token!r} is not a size; expected a name such as 'b', a "
            "number, or _ where the axis is static"
        )
    return str(dim)


def is_list_of_numbers(value: object) -> bool:
    """Whether a value is a list or tuple of Python numbers, or of such lists.

    To JAX it is a tree of scalars, never an array.
    """
    if type(value) not in (list, tuple) or not value:
        return False
    assert isinstance(value, list | tuple)
    return all(
        is_list_of_numbers(item) or isinstance(item, bool | int | float | complex | np.generic)
        for item in value
    )


def cure_of_list(value: Any, path: str) -> str:
    """What is wrong with a list of numbers where an array is declared, and what to pass instead."""
    kind = type(value).__name__
    of = "lists" if isinstance(value[0], list | tuple) else "numbers"
    try:
        np.asarray(value)
    except ValueError:  # NumPy has no such array
        return (
            f"got a {kind} of {len(value)} {of} of different length, which do not form an array; "
            "pad them, or give a list of arrays to map"
        )
    return f"got a {kind} of {len(value)} {of}; pass np.asarray({path})"
