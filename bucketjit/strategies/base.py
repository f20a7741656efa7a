"""The contract of a strategy, and what the strategies of this package share."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import operator
import reprlib
from collections.abc import Iterable, Mapping, Set
from typing import Any, Protocol, runtime_checkable

from bucketjit.errors import BucketOverflowError, SpecError, StrategyContractError

_MOST = 2**63 - 1  # the largest size that a shape can hold


@runtime_checkable
class Strategy(Protocol):
    """A policy that rounds a logical size up to a bucket.

    Any object with a ``bucket`` method is a strategy; deriving from this class is not needed.
    For all sizes ``n <= m`` a strategy keeps

    * ``bucket(n) >= n``: data is padded, never cut;
    * ``bucket(n) <= bucket(m)``: monotone;
    * ``bucket(bucket(n)) == bucket(n)``: idempotent, a bucket is its own bucket;
    * ``bucket(n) == bucket(n)``: deterministic, also between processes.

    Beyond its largest bucket, if it has one, it raises `bucketjit.errors.BucketOverflowError`.

    Examples:
        >>> class Tens:
        ...     def bucket(self, n):
        ...         return -(-n // 10) * 10
        >>> isinstance(Tens(), Strategy)
        True
        >>> checked_bucket(Tens(), "batch", 11)
        20
    """

    def bucket(self, n: int, /) -> int:
        """Return the bucket of a logical size.

        Args:
            n: The logical size, 0 or more.

        Returns:
            The padded size, at least ``n``.
        """
        ...


def checked_bucket(strategy: Strategy, dim_name: str, n: int) -> int:
    """Ask a strategy for a bucket, and check its contract.

    Every call checks the type of the answer, that ``bucket >= n``, and that the bucket and a size
    between it and ``n`` have the same bucket, as is the case for a strategy that is deterministic,
    idempotent and monotone.

    Args:
        strategy: The strategy to ask.
        dim_name: Name of the dimension variable, for the messages.
        n: The logical size.

    Returns:
        The bucket, as a Python int.

    Raises:
        BucketOverflowError: If ``n`` is beyond the strategy's largest bucket; it names the
            dimension.
        StrategyContractError: If the answer is not an integer, or is below ``n``, or is not
            the bucket of the sizes up to it.

    Examples:
        >>> from bucketjit.strategies import Boundaries
        >>> checked_bucket(Boundaries([30, 60]), "seq", 31)
        60
        >>> checked_bucket(Boundaries([30, 60]), "seq", 61)
        Traceback (most recent call last):
            ...
        bucketjit.errors.BucketOverflowError: dimension 'seq' has size 61, beyond ...
    """
    bucket = _answer(strategy, dim_name, n)
    if isinstance(strategy, Ladder):  # keeps the contract by construction
        return bucket
    for between in {(n + bucket) // 2, bucket}:
        if (different := _answer(strategy, dim_name, between)) != bucket:
            raise StrategyContractError(
                f"strategy {strategy!r} puts dimension {dim_name!r} of size {n} into the bucket "
                f"{bucket}, and size {between} into {different}; sizes from {n} to {bucket} must "
                "all have that bucket"
            )
    return bucket


def _answer(strategy: Strategy, dim_name: str, n: int) -> int:
    of = f"dimension {dim_name!r} of size {n}"
    try:
        answer = strategy.bucket(n)
    except BucketOverflowError as error:
        with contextlib.suppress(TypeError):
            if 0 < as_int(error.largest) < n:
                raise BucketOverflowError(
                    error.size, error.largest, error.dim or dim_name
                ) from None
        raise StrategyContractError(
            f"strategy {strategy!r} says of {of} that it is beyond the largest bucket, "
            f"{error.largest!r}; that is an int below the size"
        ) from None
    try:
        bucket = as_int(answer)
    except TypeError:
        raise StrategyContractError(
            f"strategy {strategy!r} must give an int for {of}, not {answer!r} "
            f"({type(answer).__name__})"
        ) from None
    if not n <= bucket <= _MOST:
        limit = f"at least {n}" if bucket < n else f"at most {_MOST}"
        raise StrategyContractError(
            f"strategy {strategy!r} must give a bucket of {limit} for {of}, not {bucket}"
        )
    return bucket


def as_int(value: object) -> int:
    """Return an integer of any kind (NumPy's too) as an int."""
    if isinstance(value, bool):
        raise TypeError("a bool is not a size")
    return operator.index(value)  # type: ignore[arg-type]


def checked_strategy(name: str, value: object) -> Strategy:
    """Check that a parameter is a strategy."""
    if isinstance(value, type) or not callable(getattr(value, "bucket", None)):
        cure = f"; write {value.__name__}(...)" if isinstance(value, type) else ""
        if isinstance(value, list | tuple | range):
            cure = "; sizes are strategies.Boundaries([16, 64]), or go to with_buckets"
        raise StrategyContractError(
            f"{name} must be an object with a method bucket(n) -> int, not {value!r}{cure}"
        )
    return value  # type: ignore[return-value]  # checked just now


def checked_sizes(name: str, sizes: object, besides: str = "") -> tuple[int, ...]:
    """Check that a parameter holds sizes in increasing order, in a list, an array or a range."""
    # An array of rank 0 is an iterable to Python.
    is_one = isinstance(sizes, str | bytes) or not isinstance(sizes, Iterable)
    is_one = is_one or getattr(sizes, "ndim", 1) == 0
    values: list[Any] = [sizes] if is_one else list(sizes)  # type: ignore[call-overload]
    if not is_one and not isinstance(sizes, Set | Mapping):
        with contextlib.suppress(TypeError):
            ints = tuple(map(as_int, values))
            if ints and all(a < b for a, b in itertools.pairwise((0, *ints, _MOST + 1))):
                return ints
    meant = set()
    for value in [] if isinstance(sizes, bool) else values:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            meant.add(math.ceil(float(value)))
    right = reprlib.repr(sorted(size for size in meant if 0 < size <= _MOST))
    raise SpecError(
        f"{name} must be{besides} a list of ints above 0 in increasing order, got "
        f"{reprlib.repr(sizes)}; write {'one such as [16, 64]' if right == '[]' else right}"
    )


def positive_int(name: str, value: object) -> int:
    """Check that a parameter is an integer of at least 1."""
    try:
        number = as_int(value)
    except TypeError:
        raise TypeError(
            f"{name} must be a positive int, not {value!r} ({type(value).__name__})"
        ) from None
    if number < 1:
        raise ValueError(f"{name} must be a positive int, not {number}")
    return number


def logical_size(n: object) -> int:
    """Check the argument of ``bucket``."""
    try:
        size = as_int(n)
    except TypeError:
        raise TypeError(f"a size must be an int, not {n!r} ({type(n).__name__})") from None
    if size < 0:
        raise ValueError(f"a size must not be negative, not {size}")
    return size


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Ladder:
    """Base of the strategies that climb a ladder of sizes, one rung a bucket.

    A subclass says where the rungs are; this class turns them into buckets: the smallest rung,
    rounded up to ``multiple_of``, that is at least ``n`` and ``min``, or ``max`` where that is
    smaller. Rounding rungs, rather than the result for one ``n``, keeps it idempotent: 3 -> 4 -> 6
    (the next multiple of 3) must not be followed by 6 -> 8 -> 9.

    Attributes:
        min: No bucket is smaller than this.
        max: The largest bucket; None for no limit.
        multiple_of: Every bucket is a multiple of this.
    """

    min: int = 1
    max: int | None = None
    multiple_of: int = 1

    def __post_init__(self) -> None:
        multiple = self._normalise("multiple_of")
        smallest = self._normalise("min")
        if self.max is None:
            return
        largest = self._normalise("max")
        if largest < smallest:
            raise ValueError(f"max must be at least min ({smallest}), not {largest}")
        if largest % multiple:
            raise ValueError(f"max must be a multiple of multiple_of ({multiple}), not {largest}")

    def _normalise(self, name: str) -> int:
        number = positive_int(name, getattr(self, name))
        object.__setattr__(self, name, number)
        return number

    def bucket(self, n: int, /) -> int:
        """Return the bucket of a logical size.

        Args:
            n: The logical size, 0 or more.

        Returns:
            The smallest bucket that is at least ``n``.

        Raises:
            BucketOverflowError: If ``n`` is larger than ``max``.
            TypeError: If ``n`` is not an int.
            ValueError: If ``n`` is negative.
        """
        size = logical_size(n)
        largest = self.max
        if largest is not None and size > largest:
            raise BucketOverflowError(size, largest)
        size = self.min if size < self.min else size
        multiple = self.multiple_of
        # A rung rounded up reaches `size` just when the rung is beyond the multiple below `size`.
        rung = self.rung_beyond((size - 1) // multiple * multiple)
        bucket = -(-rung // multiple) * multiple
        return bucket if largest is None or bucket < largest else largest

    def rung_beyond(self, size: int) -> int:
        """Return the smallest rung that is strictly larger than ``size`` (0 or more)."""
        raise NotImplementedError

    def __repr__(self) -> str:
        positional, keywords = [], []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.init and not field.kw_only:
                positional.append(repr(value))
            elif field.init and value != field.default:
                keywords.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(positional + keywords)})"
