"""The parameters of the user's function, its static arguments, and static leaves of others."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bucketjit._jax.tracebacks import like_without
from bucketjit.errors import ArgumentError, SpecError


class Parameters:
    """The parameters of the user's function: their names, and which are static or donated.

    Attributes:
        positional: Names of the parameters that may be passed by position.
        keyword_only: Names of the others; None if any name is accepted.
        variadic: Whether any number of positional arguments is accepted.
        static_nums: Positions of static arguments, those given by name included.
        static_names: Names of static arguments, those given by position included.
        donated: Positions of donated arguments.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        static_argnums: int | Sequence[int] | None,
        static_argnames: str | Sequence[str] | None,
        donate_argnums: int | Sequence[int] | None,
    ) -> None:
        self._fn = fn
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.positional = [p.name for p in parameters if p.kind in kinds]
        only = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        self.keyword_only = None if takes_any or not parameters else only
        self.variadic = not parameters or any(
            p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters
        )
        names = _several(static_argnames)
        if wrong := [n for n in names if not isinstance(n, str)]:
            raise SpecError(f"static_argnames: expected names of parameters, got {wrong[0]!r}")
        # As in `jax.jit`, a static argument may be passed by position or by name.
        nums = self._numbers(static_argnums, "static_argnums")
        if self.keyword_only is not None:
            every = {p.name for p in parameters}
            if unknown := [n for n in names if n not in every]:
                raise SpecError(f"static_argnames {unknown} are not parameters of {sorted(every)}")
        self.static_nums = nums | {i for i, n in enumerate(self.positional) if n in names}
        self.static_names = set(names) | {
            self.positional[i] for i in nums if i < len(self.positional)
        }
        self.donated = self._numbers(donate_argnums, "donate_argnums")
        if both := self.donated & self.static_nums:
            raise SpecError(f"arguments {sorted(both)} are both static and donated")

    def _numbers(self, option: int | Sequence[int] | None, name: str) -> set[int]:
        numbers, count = _several(option), len(self.positional)
        for n in numbers:
            if not isinstance(n, int) or not (self.variadic or -count <= n < count):
                raise SpecError(f"{name}: {n!r} is not one of the {count} positional arguments")
        return {n % count if n < 0 and count else n for n in numbers}

    def name(self, position: int) -> str:
        """How errors name a positional argument."""
        return self.positional[position] if position < len(self.positional) else f"args[{position}]"

    def name_of_dynamic(self, position: int) -> str:
        """How errors name an argument that is not static, by its position among these."""
        return self.name(self.first_dynamic(position + 1)[-1])

    def first_dynamic(self, count: int) -> list[int]:
        """Positions of the first ``count`` arguments that are not static."""
        return self.dynamic_positions(count + len(self.static_nums))[:count]

    def named(self, statics: Statics) -> list[tuple[str, Any]]:
        """Static arguments with their names."""
        positional = [(self.name(i), value) for i, value in statics.positional.items()]
        return [*positional, *statics.keyword.items()]

    def names(self, count: int) -> list[str]:
        """Names of the first ``count`` positional arguments, and of those after them."""
        return [self.name(i) for i in range(max(count, len(self.positional)))]

    def check_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse arguments that the function has no parameters for."""
        try:
            signature = inspect.signature(self._fn)
        except (TypeError, ValueError):
            return
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            name = getattr(self._fn, "__name__", "the function")
            raise ArgumentError(
                f"{name}: {error}; its parameters are {', '.join(signature.parameters) or 'none'}"
            ) from None

    def split(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Statics]:
        """Separate the static arguments from the others."""
        if not self.static_nums and not self.static_names:
            return args, dict(kwargs), NO_STATICS
        statics = Statics(
            {i: a for i, a in enumerate(args) if i in self.static_nums},
            {k: v for k, v in kwargs.items() if k in self.static_names},
        )
        for what, value in self.named(statics):
            try:
                hash(value)
            except TypeError as error:
                form = _hashable_form(value)
                instead = f"{form.format(what)}, or " if form else ""
                raise ArgumentError(
                    f"{what}: static arguments must be hashable, got {type(value).__name__} "
                    f"({error}); pass {instead}a hashable object, such as one of a class under "
                    "@dataclass(frozen=True), or make it a traced argument"
                ) from error
        rest = tuple(a for i, a in enumerate(args) if i not in statics.positional)
        return rest, {k: v for k, v in kwargs.items() if k not in statics.keyword}, statics

    def dynamic_positions(self, count: int) -> list[int]:
        """Positions of the arguments that are not static, among ``count`` positional ones."""
        return [i for i in range(count) if i not in self.static_nums]


# By type, what to pass in the place of a static argument, and what makes it.
_HASHABLE: Mapping[type, tuple[str, Callable[[Any], Any]]] = {
    dict: ("tuple({0}.items())", lambda value: tuple(value.items())),
    set: ("frozenset({0})", frozenset),
    list: ("tuple({0})", tuple),
    np.ndarray: ("tuple({0}.tolist())", lambda value: tuple(value.tolist())),
}


def _hashable_form(value: Any) -> str:
    """What to pass in the place of a static argument; ``""`` if no such form is hashable."""
    for kind, (form, make) in _HASHABLE.items():
        if isinstance(value, kind):
            with contextlib.suppress(TypeError):
                hash(make(value))
                return form
    return ""


def _several(option: object) -> tuple[Any, ...]:
    if isinstance(option, Iterable) and not isinstance(option, str):
        return tuple(option)
    return () if option is None else (option,)


def positions_of(
    fn: Callable[..., Any], names: str | Sequence[str] | None, option: str
) -> tuple[int, ...]:
    """The positions of parameters that are given by name."""
    wanted = _several(names)
    if not wanted:
        return ()
    positional = Parameters(fn, None, None, None).positional
    if unknown := [n for n in wanted if n not in positional]:
        raise SpecError(f"{option} {unknown} are not positional parameters of {positional}")
    return tuple(map(positional.index, wanted))


PLAIN_STATICS = (bool, int, float, str, type(None))  # types whose ``repr`` determines the value


class Statics:
    """Static arguments by position and by name. Hashable.

    Two are equal if all values are equal and of equal types: ``1``, ``1.0`` and ``True`` differ.
    """

    def __init__(self, positional: Mapping[int, Any], keyword: Mapping[str, Any]) -> None:
        self.positional = dict(positional)
        self.keyword = dict(keyword)
        self._key = (
            tuple((i, type(v), v) for i, v in sorted(self.positional.items())),
            tuple((k, type(v), v) for k, v in sorted(self.keyword.items())),
        )

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Statics) and self._key == other._key

    def bind(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Put the static arguments back in their places."""
        if not self.positional and not self.keyword:
            return fn
        positional, keyword = self.positional, self.keyword

        def bound(*args: object, **kwargs: object) -> Any:
            rest = iter(args)
            merged = [
                positional[i] if i in positional else next(rest)
                for i in range(len(args) + len(positional))
            ]
            return fn(*merged, **kwargs, **keyword)

        return like_without(bound, fn, positional, keyword)


class Key(NamedTuple):
    """What identifies a signature.

    Attributes:
        tree: Tree of ``(args, kwargs)`` without static arguments.
        types: The `LeafType` of each leaf.
        statics: The static arguments.
        context: The configuration of JAX that traces depend on.
    """

    tree: Any
    types: tuple[Any, ...]
    statics: Statics
    context: Any


NO_STATICS = Statics({}, {})


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """A pytree without leaves, which holds a static value.

    As in `jax.jit`, values of different types differ: ``1``, ``1.0``, ``True``.
    """

    value: Any

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or bool(self.value == other.value)


def without_static(leaf: Any) -> Any:
    """A leaf, or the static value that is in its place."""
    return leaf.value if isinstance(leaf, Static) else leaf
