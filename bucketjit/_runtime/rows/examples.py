"""Read the arguments of `BucketedExec.map`: which are lists of examples, and what is in them.

    encode.map(params, [ids_0, ids_1, ids_2])        params is shared, the other argument is mapped
    example 1                                        encode(params, ids_1)

A mapped argument may be any sequence or iterator; an array gives its rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bucketjit._arrays.padded import Padded
from bucketjit._arrays.padding import copied
from bucketjit._raised import is_of_machine
from bucketjit._runtime.rows.stacked import Ragged
from bucketjit._tracing.call import Call
from bucketjit._tracing.signer import Signer
from bucketjit.errors import ArgumentError, SpecError

Name = int | str  # of an argument: its position, or its keyword
Values = tuple[Any, ...]  # the mapped arguments of one example, in the order of `Examples.mapped`

_MISSING = object()

# What holds its examples, so that nobody writes to one before all are read.
_KEEPS = (list, tuple, np.ndarray, jax.Array)


@dataclass(frozen=True)
class Examples:
    """The arguments of a call of `map`.

    Attributes:
        arguments: All arguments; those that are mapped are sequences or iterators.
        mapped: The mapped arguments.
        words: How errors name each argument.
        unsaid: What nobody has called shared, and has as many rows as the number says.
        fn: The function, which is asked whether such an argument may be a list.
    """

    arguments: Mapping[Name, Any]
    mapped: tuple[Name, ...]
    words: Mapping[Name, str]
    unsaid: Mapping[Name, int]
    fn: Callable[..., Any]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.words[name] for name in self.mapped)

    def call(self, values: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
        every = {**self.arguments, **dict(zip(self.mapped, values, strict=True))}
        args = tuple(value for name, value in every.items() if isinstance(name, int))
        return args, {name: value for name, value in every.items() if isinstance(name, str)}

    @functools.cached_property
    def count(self) -> int | None:
        """How many examples there are; None if an iterator has to be asked."""
        every = {
            name: len(self.arguments[name])
            for name in self.mapped
            if isinstance(self.arguments[name], Sequence | np.ndarray)
        }
        for name, length in every.items():
            first = next(iter(every))
            if length != every[first]:
                raise _unequal(self.words[first], every[first], self.words[name], length)
        return length if len(every) == len(self.mapped) else None

    def __iter__(self) -> Iterator[Values]:
        """The mapped arguments of each example.

        What an iterator or a lazy sequence gives is copied: it may write to the same array for
        the next example.
        """
        copy_of = functools.partial(jax.tree_util.tree_map, copied)
        lists = [
            iter(values) if isinstance(values, _KEEPS) else map(copy_of, values)
            for values in (self.arguments[name] for name in self.mapped)
        ]
        first: Values = ()
        for index in itertools.count():
            row = tuple(next(iterator, _MISSING) for iterator in lists)
            ended = [value is _MISSING for value in row]
            if all(ended):
                if self.count is None:  # else it is known before anything runs
                    self.refuse_unsaid(index, first)
                return
            first = first or row
            if any(ended):
                short, long = ended.index(True), ended.index(False)
                at_least = f"at least {index + 1}"
                raise _unequal(self.names[short], index, self.names[long], at_least)
            yield row

    def refuse_unsaid(self, count: int | None, first: Values) -> None:
        """Refuse an argument that may be shared or a list, as it is as long as the lists."""
        for name, length in self.unsaid.items():
            if length == count and self._may_be_list(name, first):
                raise ArgumentError(
                    f"map: {self.words[name]} has {length} rows and there are {length} examples, "
                    f"so it may be a list of examples or shared by all; say {self._said(name, 0)} "
                    f"if each example has its own, or {self._said(name, None)} if all share it"
                )

    def _may_be_list(self, name: Name, first: Values) -> bool:
        """Whether the function takes one entry of an argument in its place."""
        mapped_too = dataclasses.replace(self, mapped=(*self.mapped, name))
        tree: Any
        entry = next(iter(self.arguments[name]))
        leaves, tree = jax.tree_util.tree_flatten(mapped_too.call((*first, entry)))
        arrays = {i: x for i, x in enumerate(leaves) if hasattr(x, "dtype")}

        def call(traced: Mapping[int, Any]) -> Any:
            args, kwargs = tree.unflatten([traced.get(i, x) for i, x in enumerate(leaves)])
            return self.fn(*args, **kwargs)

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
        chosen = dict.fromkeys(self.mapped, 0) | {name: axis}
        if all(isinstance(n, int) for n in chosen):
            return f"in_axes={tuple(chosen.get(n) for n in self.arguments if isinstance(n, int))}"
        named = {self.words[n]: axis for n, axis in chosen.items()}
        return f"in_axes={named}"


def examples_of(
    signer: Signer, args: tuple[Any, ...], kwargs: Mapping[str, Any], in_axes: object
) -> Examples:
    """Find the mapped arguments of a call of `map`."""
    arguments: dict[Name, Any] = dict([*enumerate(args), *kwargs.items()])
    words = {n: signer.name(n) if isinstance(n, int) else n for n in arguments}
    for name, value in arguments.items():
        is_tree = isinstance(value, list | tuple | Mapping) or not isinstance(value, Iterable)
        if is_tree and any(isinstance(x, Ragged) for x in jax.tree_util.tree_leaves(value)):
            raise ArgumentError(
                f"{words[name]}: expected a list of examples, got {type(value).__name__} of Ragged,"
                " each of which is such a list; pass each as an argument of its own"
            )
    mapped_names = _mapped(signer, arguments, in_axes)
    mapped = tuple(name for name in arguments if name in mapped_names)
    if not mapped:
        raise SpecError(
            "map: no argument is a list of examples: none has open axes in dynamic_axes; say by "
            "in_axes which are, such as in_axes=(None, 0)"
        )
    unsaid = {
        name: len(value)
        for name, value in arguments.items()
        if name not in mapped
        # A mapping names all; a tuple, all positional ones.
        and not (isinstance(in_axes, Mapping) or (in_axes is not None and isinstance(name, int)))
        and not signer.is_static(name)
        and _is_array_or_numbers(value)
    }
    lists = {name: _rows_of(arguments[name], words[name]) for name in mapped}
    examples = Examples({**arguments, **lists}, mapped, words, unsaid, signer.fn)
    if examples.count:  # it raises if lists are not equally long
        first = tuple(examples.arguments[name][0] for name in mapped)
        examples.refuse_unsaid(examples.count, first)
    return examples


def is_number(value: Any) -> bool:
    """Whether a value is a number, or an array without axes."""
    return isinstance(value, int | float | complex) or getattr(value, "ndim", 1) == 0


def _is_array_or_numbers(value: Any) -> bool:
    if type(value) not in (list, tuple):
        return getattr(value, "ndim", 0) > 0
    return bool(value) and all(map(is_number, value))


def mapped_leaves(
    signer: Signer, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], in_axes: Any
) -> frozenset[int]:
    """The leaves of a call of one example that examples have their own of."""
    arguments: dict[Name, Any] = dict([*enumerate(args), *kwargs.items()])
    if in_axes is None and signer.arguments_with_open_axes(len(args), list(kwargs)) is None:
        mapped = {name for name, value in arguments.items() if getattr(value, "ndim", 0)}
    else:
        mapped = _mapped(signer, arguments, in_axes)
    places = places_of_arguments(call)
    return frozenset(leaf for name in mapped for leaf in jax.tree_util.tree_leaves(places[name]))


def places_of_arguments(call: Call) -> dict[Name, Any]:
    """Each argument of a call, with the positions of its leaves in their place."""
    positional, named = call.tree.unflatten(range(len(call.leaves)))
    return {old: positional[new] for new, old in enumerate(call.dynamic)} | named


def _mapped(signer: Signer, arguments: Mapping[Name, Any], in_axes: object) -> set[Name]:
    """The arguments for which ``in_axes`` has 0; those that it does not name go by default.

    By default the arguments with open axes are lists; without ``dynamic_axes``, those that look
    like lists.
    """
    positions = [name for name in arguments if isinstance(name, int)]
    named = [name for name in arguments if isinstance(name, str)]
    default: set[Name] = set()
    if in_axes is None or (named and not isinstance(in_axes, Mapping)):
        opened = signer.arguments_with_open_axes(len(positions), named)
        default = _lists_among(signer, arguments) if opened is None else {*opened[0], *opened[1]}
    entries: dict[Name, Any]
    if in_axes is None:
        return default
    if isinstance(in_axes, Mapping):
        places: dict[Any, Name] = {signer.name(i): i for i in positions} | {k: k for k in named}
        if unknown := [k for k in in_axes if k not in places]:
            raise SpecError(
                f"map: in_axes names {unknown[0]!r}, which is no argument of this call; it has "
                f"{[*places]}"
            )
        entries = {places[k]: entry for k, entry in in_axes.items()}
    elif isinstance(in_axes, tuple | list):
        if len(in_axes) != len(positions):
            raise SpecError(
                f"map: in_axes has {len(in_axes)} entries for {len(positions)} positional "
                "arguments; give one for each: 0 for a list of examples, None for what all share"
            )
        entries = dict(enumerate(in_axes))
    else:
        entries = dict.fromkeys(positions, in_axes)
    for name, entry in entries.items():
        what = signer.name(name) if isinstance(name, int) else name
        if entry is not None and (isinstance(entry, bool) or entry != 0):
            raise SpecError(
                f"map: in_axes of {what}: expected 0 for a list of examples, or None for what all "
                f"share, got {entry!r}"
            )
        if entry is not None and signer.is_static(name):
            raise SpecError(f"map: in_axes of {what}: a static argument is shared; give None")
    return {n for n, entry in entries.items() if entry is not None} | (default & {*named})


def _lists_among(signer: Signer, arguments: Mapping[Name, Any]) -> set[Name]:
    no_lists = (str, bytes, bytearray, Mapping, Padded, jax.Array, np.generic)

    def is_list(value: object) -> bool:
        if isinstance(value, np.ndarray):
            return value.dtype == object
        is_sequence = isinstance(value, Sequence | Iterator) and not isinstance(value, no_lists)
        return is_sequence and not _is_record(value)

    return {n for n, value in arguments.items() if not signer.is_static(n) and is_list(value)}


def _is_record(value: object) -> bool:
    """Whether a value is a named tuple: one example, or parameters, but no list."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _rows_of(values: Any, name: str) -> Any:
    """A mapped argument as a sequence or an iterator of what each example has of it."""
    if isinstance(values, Ragged):
        return values.to_list()
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
        what = type(values).__name__
        what += "; a dict of lists is no list of dicts" if isinstance(values, Mapping) else ""
        raise ArgumentError(f"{name}: expected a list of examples, got {what}")
    if isinstance(values, Sequence | Iterator):
        return values
    if isinstance(values, Iterable) and not isinstance(values, jax.ShapeDtypeStruct):
        return iter(values)
    raise ArgumentError(
        f"{name}: expected a list of examples, or an iterator, got {type(values).__name__}; "
        "in_axes=None shares an argument"
    )


def _unequal(first: str, length: object, second: str, rows: object) -> ArgumentError:
    return ArgumentError(
        f"map: lists of examples must be equally long: {first} has {length} and {second} has {rows}"
    )
