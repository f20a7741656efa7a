"""Typed access to the values of a JSON text, with errors that name the place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from bucketjit.errors import ArtifactError

_LARGEST = 2**63  # sizes and positions are below

T = TypeVar("T")


class Fields:
    """The fields of a JSON object.

    Args:
        value: The object.
        place: Where it stands, for errors.

    Attributes:
        place: See above.

    Raises:
        ArtifactError: The value is no object. Every method raises it for a field that is missing or
            of another kind.
    """

    def __init__(self, value: object, place: str) -> None:
        self.place = place
        if not isinstance(value, dict):
            raise self.error(f"expected an object, got {_kind(value)}")
        self._value: dict[str, Any] = value

    def error(self, what: str) -> ArtifactError:
        """An error about this object.

        Args:
            what: What is wrong.

        Returns:
            The error.
        """
        return ArtifactError(f"{self.place}: {what}; the file is damaged or was altered")

    def _get(self, name: str, check: Callable[[object, str], T]) -> T:
        if name not in self._value:
            raise self.error(f"there is no {name!r}")
        return check(self._value[name], f"{self.place}: {name}")

    def text(self, name: str) -> str:
        """A text."""
        return self._get(name, _text)

    def optional_text(self, name: str) -> str | None:
        """A text, or None."""
        return self._get(name, lambda v, at: None if v is None else _text(v, at))

    def number(self, name: str) -> int:
        """A whole number, 0 or more."""
        return self._get(name, _number)

    def flag(self, name: str) -> bool:
        """True or False."""
        return self._get(name, _flag)

    def one_of(self, name: str, known: Sequence[str]) -> str:
        """One of several texts."""
        found = self.text(name)
        if found not in known:
            raise self.error(f"{name} is {found!r}, expected one of {', '.join(known)}")
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts."""
        return self._get(name, _list_of(_text))

    def numbers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        return self._get(name, _list_of(_number))

    def lists_of_numbers(self, name: str) -> tuple[tuple[int, ...], ...]:
        """A list of lists of whole numbers."""
        return self._get(name, _list_of(_list_of(_number)))

    def axes(self, name: str) -> tuple[int | str, ...]:
        """A list of sizes: numbers or texts."""
        return self._get(name, _list_of(_axis))

    def lists_of_axes(self, name: str) -> tuple[tuple[int | str, ...], ...]:
        """A list of lists of sizes."""
        return self._get(name, _list_of(_list_of(_axis)))

    def pairs_of_axes(
        self, name: str
    ) -> tuple[tuple[tuple[int | str, ...], tuple[int | str, ...]], ...]:
        """A list of pairs of lists of sizes."""
        found = self._get(name, _list_of(_list_of(_list_of(_axis))))
        for pair in found:
            if len(pair) != 2:
                raise self.error(f"{name}: expected pairs")
        return tuple((pair[0], pair[1]) for pair in found)

    def texts_by_name(self, name: str) -> Mapping[str, str]:
        """An object of texts."""
        return self._get(name, _object_of(_text))

    def numbers_by_name(self, name: str) -> Mapping[str, int]:
        """An object of whole numbers."""
        return self._get(name, _object_of(_number))

    def all_numbers(self) -> Mapping[str, int]:
        """This object itself, as one of whole numbers."""
        return _object_of(_number)(self._value, self.place)

    def pair_of_texts_by_name(self, name: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """A list of two objects of texts."""
        found = self._get(name, _list_of(_object_of(_text)))
        if len(found) != 2:
            raise self.error(f"{name}: expected two objects")
        return found[0], found[1]

    def members_with_positions(self, name: str) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """An object of pairs: a text, and a list of whole numbers."""

        def pair(value: object, at: str) -> tuple[str, tuple[int, ...]]:
            if not isinstance(value, list) or len(value) != 2:
                raise _wrong(at, "a pair", value)
            return _text(value[0], at), _list_of(_number)(value[1], at)

        return self._get(name, _object_of(pair))

    def records(self, name: str) -> list[Fields]:
        """A list of objects."""
        return list(self._get(name, _list_of(Fields)))

    def optional_record(self, name: str) -> Fields | None:
        """An object, or None."""
        return self._get(name, lambda v, at: None if v is None else Fields(v, at))

    def records_by_name(self, name: str) -> Mapping[str, Fields]:
        """An object of objects."""
        return self._get(name, _object_of(Fields))


def _wrong(at: str, expected: str, value: object) -> ArtifactError:
    return ArtifactError(
        f"{at}: expected {expected}, got {_kind(value)}; the file is damaged or was altered"
    )


def _kind(value: object) -> str:
    """A value in few words."""
    text = repr(value)
    return text if len(text) <= 40 else f"{type(value).__name__} {text[:40]}..."


def _text(value: object, at: str) -> str:
    if not isinstance(value, str):
        raise _wrong(at, "text", value)
    return value


def _number(value: object, at: str) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise _wrong(at, "a whole number, 0 or more", value)
    return value


def _flag(value: object, at: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(at, "true or false", value)
    return value


def _axis(value: object, at: str) -> int | str:
    return value if isinstance(value, str) else _number(value, at)


def _list_of(check: Callable[[object, str], T]) -> Callable[[object, str], tuple[T, ...]]:
    def checked(value: object, at: str) -> tuple[T, ...]:
        if not isinstance(value, list | tuple):
            raise _wrong(at, "a list", value)
        return tuple(check(one, f"{at}[{i}]") for i, one in enumerate(value))

    return checked


def _object_of(check: Callable[[object, str], T]) -> Callable[[object, str], dict[str, T]]:
    def checked(value: object, at: str) -> dict[str, T]:
        if not isinstance(value, dict):
            raise _wrong(at, "an object", value)
        return {name: check(one, f"{at}.{name}") for name, one in value.items()}

    return checked
