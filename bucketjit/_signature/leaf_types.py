"""Arguments to signature: leaves with their types, the sizes of a call, static arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bucketjit import _jax
from bucketjit._arrays.padded import Padded
from bucketjit._errors import ArgumentError, SizeMismatchError, SpecError
from bucketjit._sizes.dynamic_axes import Tokens, places_of
from bucketjit._sizes.expressions import evaluate_text, solve, variables_of


class LeafType(NamedTuple):
    """What a program depends on of a leaf, its sizes aside.

    Attributes:
        dtype: JAX dtype; None for a Python int that is itself a size.
        weak_type: JAX's weak type (True for Python scalars).
        rank: Number of axes.
        sharding: How it is sharded over explicit axes of a mesh, which are part of JAX's types;
            None elsewhere.
        partitions: Into how many equal parts each axis is cut over several devices, which has to
            go for padded sizes too; None if none is.
    """

    dtype: Any
    weak_type: bool
    rank: int
    sharding: Any = None
    partitions: tuple[int, ...] | None = None


_leaf_type = functools.lru_cache(maxsize=1024)(LeafType)  # one object is one dict lookup away

_SCALARS = {
    bool: np.dtype(bool),
    int: np.dtype(int),
    float: np.dtype(float),
    complex: np.dtype(complex),
}


def leaf_type(value: Any, path: str) -> tuple[LeafType, tuple[int, ...]]:
    """Type and shape of an argument leaf.

    Raises:
        ArgumentError: It is not an array, and not a scalar.
    """
    if (plain := _jax.on_one_device(value)) is not None:
        return _leaf_type(plain.dtype, plain.weak_type, len(plain.shape)), plain.shape
    if isinstance(value, jax.Array):
        weak = bool(getattr(value.aval if hasattr(value, "aval") else value, "weak_type", False))
        placed = _jax.explicit_sharding(value), _jax.partitions(value)
        return LeafType(value.dtype, weak, value.ndim, *placed), value.shape
    if isinstance(value, Padded):
        counts = _jax.partitions(value.array)
        sharding = _jax.explicit_sharding(value.array)
        if counts and any(n % count for n, count in zip(value.sizes, counts, strict=True)):
            counts = sharding = None  # without its padding it is not cut
        known = value.weak_type, value.ndim, sharding, counts
        return LeafType(_canonical(value.dtype, path), *known), value.sizes
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype == jax.dtypes.float0:  # the tangent of an integer
            return LeafType(value.dtype, False, value.ndim), value.shape
        if value.dtype.kind in "OSUMmV" and not _is_extension(value.dtype):
            raise ArgumentError(
                f"{path}: expected a numeric array, got a NumPy array of dtype {value.dtype}"
                + (
                    "; rows of different length do not form an array"
                    if value.dtype == object
                    else ""
                )
            )
        if isinstance(value, np.ma.MaskedArray):
            raise ArgumentError(f"{path}: expected an array, got a NumPy masked array")
        return LeafType(_canonical(value.dtype, path), False, value.ndim), value.shape
    for kind in type(value).__mro__:  # an IntEnum is an int
        if (dtype := _SCALARS.get(kind)) is not None:
            return LeafType(jax.dtypes.canonicalize_dtype(dtype), kind is not bool, 0), ()
    raise ArgumentError(
        f"{path}: expected an array or a Python scalar, got {type(value).__name__}; pass other "
        "values as static arguments (static_argnums, static_argnames)"
    )


def _canonical(dtype: Any, path: str) -> Any:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    if not dtype.isnative:
        raise ArgumentError(f"{path}: expected native byte order, got a NumPy array of {dtype!r}")
    if dtype.kind in "fc" and dtype.itemsize > (8 if dtype.kind == "f" else 16):
        raise ArgumentError(f"{path}: expected an array of a dtype that JAX has, got {dtype}")
    return jax.dtypes.canonicalize_dtype(dtype)


def _is_extension(dtype: np.dtype) -> bool:
    try:
        return bool(jax.dtypes.issubdtype(dtype, np.number)) and dtype.kind == "V"
    except TypeError:
        return False


class Parameters:
    """The parameters of the user's function: which arguments are static, and their names."""

    def __init__(
        self,
        fn: Callable[..., Any],
        static_argnums: int | Sequence[int] | None,
        static_argnames: str | Sequence[str] | None,
        donate_argnums: int | Sequence[int] | None,
    ) -> None:
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
        names = self._names(static_argnames)
        nums = self._numbers(static_argnums, "static_argnums")
        if self.keyword_only is not None:
            known = {p.name for p in parameters}
            if unknown := [n for n in names if n not in known]:
                raise SpecError(f"static_argnames {unknown} are not parameters of {sorted(known)}")
        self.static_nums = nums | {i for i, n in enumerate(self.positional) if n in names}
        self.static_names = set(names) | {
            self.positional[i] for i in nums if i < len(self.positional)
        }
        self.donated = self._numbers(donate_argnums, "donate_argnums")
        if both := self.donated & self.static_nums:
            raise SpecError(f"arguments {sorted(both)} are both static and donated")

    @staticmethod
    def _names(given: str | Sequence[str] | None) -> tuple[str, ...]:
        if given is None or isinstance(given, str):
            return () if given is None else (given,)
        names = tuple(given) if isinstance(given, Iterable) else (given,)
        if wrong := [n for n in names if not isinstance(n, str)]:
            raise SpecError(f"static_argnames: expected names of parameters, got {wrong[0]!r}")
        return names

    def _numbers(self, given: int | Sequence[int] | None, option: str) -> set[int]:
        if given is None:
            return set()
        numbers = tuple(given) if isinstance(given, Iterable) else (given,)
        count = len(self.positional)
        found = set()
        for n in numbers:
            if not isinstance(n, int) or not (self.variadic or -count <= n < count):
                raise SpecError(f"{option}: {n!r} is not one of the {count} positional arguments")
            found.add(n % count if n < 0 and count else n)
        return found

    def name(self, position: int) -> str:
        """How errors name a positional argument."""
        return self.positional[position] if position < len(self.positional) else f"args[{position}]"

    def names(self, count: int) -> list[str]:
        """Names of the first ``count`` positional arguments, and of those after them."""
        return [self.name(i) for i in range(max(count, len(self.positional)))]

    def split(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Statics]:
        """Take the static arguments out.

        Raises:
            ArgumentError: A static argument is not hashable.
        """
        if not self.static_nums and not self.static_names:
            return args, dict(kwargs), NO_STATICS
        positional = {i: a for i, a in enumerate(args) if i in self.static_nums}
        keyword = {k: v for k, v in kwargs.items() if k in self.static_names}
        for what, value in [
            *((self.name(i), a) for i, a in positional.items()),
            *keyword.items(),
        ]:
            try:
                hash(value)
            except TypeError as error:
                raise ArgumentError(
                    f"{what}: static arguments must be hashable, got {type(value).__name__} "
                    f"({error}); pass a tuple in place of a list, or make it a traced argument"
                ) from error
        rest = tuple(a for i, a in enumerate(args) if i not in positional)
        return (
            rest,
            {k: v for k, v in kwargs.items() if k not in keyword},
            Statics(positional, keyword),
        )

    def dynamic_positions(self, count: int) -> list[int]:
        """Positions, among all arguments, of those that are not static."""
        return [i for i in range(count) if i not in self.static_nums]


def positions_of(
    fn: Callable[..., Any], names: str | Sequence[str] | None, option: str
) -> tuple[int, ...]:
    """Positions of parameters given by name.

    Raises:
        SpecError: A name is none of the function's positional parameters.
    """
    wanted = (names,) if isinstance(names, str) else tuple(names or ())
    if not wanted:
        return ()
    known = Parameters(fn, None, None, None).positional
    if unknown := [n for n in wanted if n not in known]:
        raise SpecError(f"{option} {unknown} are not positional parameters of {known}")
    return tuple(known.index(n) for n in wanted)


PLAIN_STATICS = (bool, int, float, str, type(None))  # whose text tells all


class Statics:
    """Static arguments by position and by name. Hashable; equal means equal and same types."""

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
        """``fn`` with these arguments put back in their places."""
        if not self.positional and not self.keyword:
            return fn
        positional, keyword = self.positional, self.keyword

        def bound(*args: Any, **kwargs: Any) -> Any:
            rest = iter(args)
            merged = [
                positional[i] if i in positional else next(rest)
                for i in range(len(args) + len(positional))
            ]
            return fn(*merged, **kwargs, **keyword)

        return bound


NO_STATICS = Statics({}, {})


def check_declared(token: str, size: int, where: str) -> None:
    """Hold an axis to the number that it was declared with.

    Raises:
        ArgumentError: It has another size.
    """
    if int(token) != size:
        raise ArgumentError(f"{where} has size {size}, declared {token} in dynamic_axes")


def bind_sizes(
    tokens: Tokens, shapes: Sequence[Sequence[int]], paths: Sequence[str]
) -> dict[str, int]:
    """The size of each dimension variable in a call.

    Args:
        tokens: A token per axis of each leaf (``"_"``: static).
        shapes: The shapes of the leaves.
        paths: How errors name the leaves.

    Returns:
        Variable to size.

    Raises:
        SizeMismatchError: One variable is given two sizes, or an expression does not fit.
        ArgumentError: No whole size of the variables gives a size the call has.
    """
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    expressions: list[tuple[str, int, str]] = []
    for leaf, axis, token in places_of(tokens).opened:
        size, where = shapes[leaf][axis], f"axis {axis} of {paths[leaf]}"
        if token.isdigit():
            check_declared(token, size, where)
        elif token.isidentifier():
            if sizes.setdefault(token, size) != size:
                raise SizeMismatchError(
                    f"dimension {token!r} is {sizes[token]} at {origin[token]} and {size} at "
                    f"{where}; one name means one size"
                )
            origin.setdefault(token, where)
        else:
            expressions.append((token, size, where))
    _bind_expressions(expressions, sizes, origin)
    return sizes


def _bind_expressions(
    expressions: list[tuple[str, int, str]], sizes: dict[str, int], origin: dict[str, str]
) -> None:
    for _ in expressions:
        for token, size, where in expressions:
            for name, value in solve(token, size, sizes).items():
                sizes[name], origin[name] = value, where
    for token, size, where in expressions:
        missing = [v for v in variables_of(token) if v not in sizes]
        if missing:
            raise ArgumentError(
                f"{where} has size {size}, declared {token!r}: no whole size of "
                f"{', '.join(missing)} gives that"
            )
        if evaluate_text(token, sizes) != size:
            known = ", ".join(f"{v} = {sizes[v]} at {origin[v]}" for v in variables_of(token))
            value = evaluate_text(token, sizes)
            raise SizeMismatchError(
                f"{where} has size {size}, but {token!r} is {value} with {known}"
            )
