"""Read the arguments of `BucketedExec.map`: which are lists of examples, and what is in them.

    encode.map(params, [ids_0, ids_1, ids_2])        params is shared, the other argument is mapped
    example 1                                        encode(params, ids_1)

A mapped argument may be any sequence or iterator; an array gives its rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bucketjit._arrays.padded import Padded
from bucketjit._arrays.padding import copied
from bucketjit._ragged.stacked import Ragged
from bucketjit._raised import is_of_machine
from bucketjit._signature.signer import SignedCall, Signer
from bucketjit.errors import ArgumentError, SpecError

Name = int | str  # of an argument: its position, or its keyword
Values = tuple[Any, ...]  # the mapped arguments of one example, in the order of `Examples.mapped`

_MISSING = object()

# What holds its examples, so that nobody writes to one before all are read.
_KEEPS = (list, tuple, np.ndarray, jax.Array, Ragged)


@dataclass(frozen=True)
class Examples:
    """The arguments of a call of `map`.

    Attributes:
        args: The positional arguments; those that are mapped are sequences or iterators.
        kwargs: The keyword arguments, likewise.
        mapped: The mapped arguments.
        names: How errors name each of them.
        unsaid: What nobody has called shared, and has so many rows: the name and that number.
        fn: The function, which is asked whether such an argument may be a list.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mapped: tuple[Name, ...]
    names: tuple[str, ...]
    unsaid: Sequence[tuple[Name, str, int]] = ()
    fn: Callable[..., Any] | None = None

    def lists(self) -> list[Any]:
        """The mapped arguments."""
        return [self.args[n] if isinstance(n, int) else self.kwargs[n] for n in self.mapped]

    def call(self, values: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call of one example."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, value in zip(self.mapped, values, strict=True):
            if isinstance(name, int):
                args[name] = value
            else:
                kwargs[name] = value
        return tuple(args), kwargs

    @property
    def count(self) -> int | None:
        """How many examples there are; None if an iterator has to be asked."""
        every = [
            (len(values), name)
            for values, name in zip(self.lists(), self.names, strict=True)
            if isinstance(values, Sequence | np.ndarray)
        ]
        for length, name in every:
            if length != every[0][0]:
                raise _unequal(every[0][1], str(every[0][0]), name, str(length))
        return every[0][0] if len(every) == len(self.mapped) else None

    def __iter__(self) -> Iterator[Values]:
        """The mapped arguments of each example.

        What an iterator or a lazy sequence gives is copied: it may write to the same array for
        the next example.
        """
        lists = [
            iter(values) if isinstance(values, _KEEPS) else map(_copied, values)
            for values in self.lists()
        ]
        first: Values = ()
        for index in itertools.count():
            row = tuple(next(one, _MISSING) for one in lists)
            ended = [value is _MISSING for value in row]
            if all(ended):
                if self.count is None:  # else it is known before anything runs
                    self.refuse_unsaid(index, first)
                return
            first = first or row
            if any(ended):
                short, long = ended.index(True), ended.index(False)
                raise _unequal(
                    self.names[short], str(index), self.names[long], f"at least {index + 1}"
                )
            yield row

    def refuse_unsaid(self, count: int | None, first: Values) -> None:
        """Refuse an argument that may be shared or a list, as it is as long as the lists."""
        for name, words, length in self.unsaid:
            if length == count and self._may_be_list(name, first):
                raise ArgumentError(
                    f"map: {words} has {length} rows and there are {length} examples, so it may be "
                    f"a list of examples or shared by all; say {self._said(name, 0)} if each "
                    f"example has its own, or {self._said(name, None)} if all share it"
                )

    def _may_be_list(self, name: Name, first: Values) -> bool:
        """Whether the function takes one entry of an argument in its place."""
        own = dataclasses.replace(self, mapped=(*self.mapped, name))
        shared = self.args[name] if isinstance(name, int) else self.kwargs[name]
        tree: Any
        leaves, tree = jax.tree_util.tree_flatten(own.call((*first, next(iter(shared)))))
        arrays = {i: x for i, x in enumerate(leaves) if hasattr(x, "dtype")}

        def call(traced: Mapping[int, Any]) -> Any:
            args, kwargs = tree.unflatten([traced.get(i, x) for i, x in enumerate(leaves)])
            return self.fn(*args, **kwargs)  # type: ignore[misc]

        try:
            jax.eval_shape(call, arrays)
        except jax.errors.ConcretizationTypeError:
            return True  # it decides by values, and may take it
        except Exception as error:  # of the function, which does not
            if is_of_machine(error):
                raise
            return False
        return True

    def _said(self, name: Name, axis: int | None) -> str:
        """The ``in_axes`` that say what an argument is."""
        chosen = {n: 0 for n in self.mapped} | {name: axis}
        if all(isinstance(n, int) for n in chosen):
            return f"in_axes={tuple(chosen.get(i) for i in range(len(self.args)))}"
        words = dict(zip(self.mapped, self.names, strict=True))
        words |= {n: word for n, word, _ in self.unsaid}
        named = {words[n]: axis for n, axis in chosen.items()}
        return f"in_axes={named}"


def examples_of(
    signer: Signer, args: tuple[Any, ...], kwargs: Mapping[str, Any], in_axes: object
) -> Examples:
    """Find the mapped arguments of a call of `map`."""
    names: tuple[Name, ...] = (*range(len(args)), *kwargs)
    mapped = (
        _mapped_by_default(signer, args, kwargs)
        if in_axes is None
        else _mapped_by_user(signer, args, kwargs, in_axes)
    )
    chosen = tuple(name for name in names if name in mapped)
    if not chosen:
        raise SpecError(
            "map: no argument is a list of examples: none has open axes in dynamic_axes; say by "
            "in_axes which are, such as in_axes=(None, 0)"
        )
    words = {n: signer.name(n) if isinstance(n, int) else n for n in chosen}
    given = {n: args[n] if isinstance(n, int) else kwargs[n] for n in chosen}
    rows = {n: _rows_of(value, words[n]) for n, value in given.items()}
    examples = Examples(
        tuple(rows.get(i, value) for i, value in enumerate(args)),
        {k: rows.get(k, value) for k, value in kwargs.items()},
        chosen,
        tuple(words.values()),
        () if isinstance(in_axes, Mapping) else _unsaid(signer, args, kwargs, mapped, in_axes),
        signer.fn,
    )
    count = examples.count  # raises if lists are not equally long
    if count:
        examples.refuse_unsaid(count, tuple(values[0] for values in examples.lists()))
    return examples


def _unsaid(
    signer: Signer,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mapped: Set[Name],
    in_axes: object,
) -> list[tuple[Name, str, int]]:
    """The arguments that are arrays or lists of numbers, and of which nobody says what they are."""
    every: list[tuple[Name, Any]] = [*(enumerate(args) if in_axes is None else ()), *kwargs.items()]
    return [
        (name, signer.name(name) if isinstance(name, int) else name, len(value))
        for name, value in every
        if name not in mapped
        and not signer.is_static(name)
        and (
            getattr(value, "ndim", 0) > 0
            or (type(value) in (list, tuple) and value and all(map(_is_number, value)))
        )
    ]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | complex | np.generic) or getattr(value, "ndim", 1) == 0


def _copied(example: Any) -> Any:
    return jax.tree_util.tree_map(copied, example)


def mapped_leaves(
    signer: Signer, signed: SignedCall, args: Sequence[Any], kwargs: Mapping[str, Any], in_axes: Any
) -> frozenset[int]:
    """The leaves of a call of one example that examples have their own of."""
    if in_axes is not None:
        mapped = _mapped_by_user(signer, args, kwargs, in_axes)
    elif signer.arguments_with_open_axes(len(args), list(kwargs)) is not None:
        mapped = _mapped_by_default(signer, args, kwargs)
    else:
        every: list[tuple[Name, Any]] = [*enumerate(args), *kwargs.items()]
        mapped = {name for name, value in every if getattr(value, "ndim", 0)}
    places = places_of_arguments(signed)
    return frozenset(leaf for name in mapped for leaf in jax.tree_util.tree_leaves(places[name]))


def places_of_arguments(signed: SignedCall) -> dict[Name, Any]:
    """Each argument of a call, with the positions of its leaves in their place."""
    given, named = signed.tree.unflatten(range(len(signed.leaves)))
    return {old: given[new] for new, old in enumerate(signed.dynamic)} | named


def _mapped_by_default(signer: Signer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[Name]:
    """The arguments with open axes; without ``dynamic_axes``, those that look like lists."""
    opened = signer.arguments_with_open_axes(len(args), list(kwargs))
    if opened is not None:
        return {*opened[0], *opened[1]}
    every: list[tuple[Name, Any]] = [*enumerate(args), *kwargs.items()]
    return {
        name for name, value in every if not signer.is_static(name) and _is_list_or_iterator(value)
    }


def _is_list_or_iterator(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype == object
    if isinstance(value, str | bytes | bytearray | Mapping | Padded | jax.Array | np.generic):
        return False
    return isinstance(value, Sequence | Iterator) and not _is_record(value)


def _is_record(value: object) -> bool:
    """Whether a value is a named tuple: one example, or parameters, but no list."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _mapped_by_user(
    signer: Signer, args: Sequence[Any], kwargs: Mapping[str, Any], in_axes: object
) -> set[Name]:
    """The arguments for which ``in_axes`` has 0; keywords that it does not name go by default."""
    entries = _entries(signer, args, kwargs, in_axes)
    for name, entry in entries.items():
        what = signer.name(name) if isinstance(name, int) else name
        if entry is not None and (isinstance(entry, bool) or entry != 0):
            raise SpecError(
                f"map: in_axes of {what}: expected 0 for a list of examples, or None for what all "
                f"share, got {entry!r}"
            )
        if entry is not None and signer.is_static(name):
            raise SpecError(f"map: in_axes of {what}: a static argument is shared; give None")
    mapped = {name for name, entry in entries.items() if entry is not None}
    if kwargs and not isinstance(in_axes, Mapping):
        mapped |= _mapped_by_default(signer, args, kwargs) & kwargs.keys()
    return mapped


def _entries(
    signer: Signer, args: Sequence[Any], kwargs: Mapping[str, Any], in_axes: object
) -> dict[Name, Any]:
    """What ``in_axes`` says of each argument that it names; nothing if it is None."""
    if in_axes is None:
        return {}
    if isinstance(in_axes, Mapping):
        positions: dict[str, Name] = {signer.name(i): i for i in range(len(args))}
        if unknown := [k for k in in_axes if k not in positions and k not in kwargs]:
            raise SpecError(
                f"map: in_axes names {unknown[0]!r}, which is no argument of this call; it has "
                f"{[*positions, *kwargs]}"
            )
        return {positions.get(str(k), str(k)): entry for k, entry in in_axes.items()}
    if isinstance(in_axes, tuple | list):
        if len(in_axes) != len(args):
            raise SpecError(
                f"map: in_axes has {len(in_axes)} entries for {len(args)} positional arguments; "
                "give one for each: 0 for a list of examples, None for what all share"
            )
        return dict(enumerate(in_axes))
    return dict.fromkeys(range(len(args)), in_axes)


def _rows_of(values: Any, name: str) -> Any:
    """A mapped argument as a sequence or an iterator of what each example has of it."""
    if isinstance(values, jax.Array | np.ndarray):
        if values.ndim == 0:
            raise ArgumentError(
                f"{name}: expected a list of examples, got an array of rank 0; in_axes=None "
                "shares it"
            )
        if isinstance(values, np.ndarray):
            return values if values.dtype != object else list(values)
        if isinstance(values, jax.core.Tracer):
            return [values[i] for i in range(len(values))]
        is_key = jax.dtypes.issubdtype(values.dtype, jax.dtypes.extended)
        return list(values) if is_key or not values.is_fully_addressable else np.asarray(values)
    is_text = isinstance(values, str | bytes | bytearray)
    if is_text or _is_record(values) or isinstance(values, Mapping | Set | Padded):
        remedy = "a dict of lists is no list of dicts" if isinstance(values, Mapping) else ""
        raise ArgumentError(
            f"{name}: expected a list of examples, got {type(values).__name__}"
            + (f"; {remedy}" if remedy else "")
        )
    if isinstance(values, Sequence | Iterator):
        return values
    if isinstance(values, Iterable) and not isinstance(values, jax.ShapeDtypeStruct):
        return iter(values)
    raise ArgumentError(
        f"{name}: expected a list of examples, or an iterator, got {type(values).__name__}; "
        "in_axes=None shares an argument"
    )


def _unequal(one: str, has: str, other: str, other_has: str) -> ArgumentError:
    return ArgumentError(
        f"map: lists of examples must be equally long: {one} has {has} and {other} has {other_has}"
    )
