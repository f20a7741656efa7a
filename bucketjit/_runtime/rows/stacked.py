"""`Ragged`: results of many examples as one array each, with the lengths of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any

import jax
import numpy as np

from bucketjit._jax.arrays import is_key, on_default_device
from bucketjit.errors import ArgumentError


class Ragged(Sequence[Any]):
    """Arrays of many examples, stacked: values padded to the longest row, and lengths.

    `BucketedExec.map` with ``out="stacked"`` returns one for each array that the function returns,
    in the function's tree. It is a sequence of rows, so another bucketed function's `map` takes it
    as a list of examples.

    Args:
        values: An array with the examples along axis 0. Rows that are shorter than the array hold
            zeros after their end.
        lengths: With one ragged axis, the length of each row along it, ``int32[examples]``. With
            several, ``int32[examples, axes]``; without one, ``int32[examples, 0]``.
        axes: The ragged axes, as a tuple. By default axis 1 if lengths have rank 1, else the axes
            from 1 on.

    Attributes:
        values: See above.
        lengths: See above.

    Raises:
        ArgumentError: ``values`` is no array, or has not a length for each of its rows.

    Examples:
        >>> import jax.numpy as jnp, numpy as np
        >>> import bucketjit
        >>> both = lambda x: (jnp.cumsum(x), x.sum())
        >>> running = bucketjit.jit(both, dynamic_axes="n", buckets="pow2")
        >>> sums, total = running.map([np.ones(n, np.float32) for n in (1, 3)], out="stacked")
        >>> sums.values
        Array([[1., 0., 0.],
               [1., 2., 3.]], dtype=float32)
        >>> sums.lengths.tolist(), sums.mask.tolist()
        ([1, 3], [[True, False, False], [True, True, True]])
        >>> [row.tolist() for row in sums.rows()], total.values.tolist()
        ([[1.0], [1.0, 2.0, 3.0]], [1.0, 3.0])
    """

    def __init__(self, values: Any, lengths: Any, axes: Sequence[int] | None = None) -> None:
        self._lengths, self._axes = _checked(values, lengths, axes)
        self.values, self.lengths = values, lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} rows")
        cuts = dict(zip(self._axes, map(int, self._lengths[index]), strict=True))
        row = _on_host(self.values)[index]  # JAX would compile for each length
        return row[tuple(slice(cuts.get(i + 1)) for i in range(row.ndim))]

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows in {np.shape(self.values)})"

    def rows(self) -> Iterator[Any]:
        """The result of each example, without its padding.

        Returns:
            An iterator over NumPy arrays: views, where the values are in host memory.

        Examples:
            >>> import numpy as np
            >>> from bucketjit import Ragged
            >>> ragged = Ragged(np.array([[1, 0], [2, 3]]), np.array([1, 2]))
            >>> [row.tolist() for row in ragged.rows()]
            [[1], [2, 3]]
        """
        return iter(self)

    def to_list(self) -> list[Any]:
        """The rows as a list of arrays, as `map` returns them without ``"stacked"``.

        Examples:
            >>> import numpy as np
            >>> from bucketjit import Ragged
            >>> Ragged(np.array([[1.0, 0.0], [2.0, 3.0]]), np.array([1, 2])).to_list()
            [array([1.]), array([2., 3.])]
        """
        return list(self.rows())

    @property
    def mask(self) -> Any:
        """Where values are not padding: booleans up to the last ragged axis.

        They have size 1 along axes before it that are not ragged. Without ragged axes it is
        ``bool[examples]``, all True.

        Examples:
            >>> import numpy as np
            >>> from bucketjit import Ragged
            >>> Ragged(np.array([[1, 0], [2, 3]]), np.array([1, 2])).mask
            array([[ True, False],
                   [ True,  True]])
        """
        shape, rank = np.shape(self.values), max(self._axes, default=0) + 1
        full = (shape[0], *(shape[i] if i in self._axes else 1 for i in range(1, rank)))
        mask = np.ones(full, bool)
        for axis, lengths in zip(self._axes, self._lengths.T, strict=True):
            column = [1] * rank
            column[0], column[axis] = shape[0], shape[axis]
            mask &= (np.arange(shape[axis]) < lengths[:, None]).reshape(column)
        return mask


def _checked(
    values: Any, lengths: Any, axes: Sequence[int] | None
) -> tuple[np.ndarray, tuple[int, ...]]:
    """The lengths along each ragged axis, which are whole numbers within an array, and the axes."""
    if not hasattr(values, "shape"):
        raise ArgumentError(f"Ragged: values are a {type(values).__name__}; expected one array")
    shape, n = np.shape(values), np.asarray(lengths)
    if not shape or not n.ndim or shape[0] != len(n):
        raise ArgumentError(
            f"Ragged: values of shape {shape} and lengths of shape {n.shape}; expected a length "
            "for each row"
        )
    if n.size and not np.issubdtype(n.dtype, np.integer):
        raise ArgumentError(f"Ragged: lengths must be whole numbers, got {n.dtype}")
    columns = n[:, None] if n.ndim == 1 else n
    ragged = tuple(range(1, 1 + columns.shape[1])) if axes is None else tuple(axes)
    if columns.shape[1:] != (len(ragged),) or not all(0 < axis < len(shape) for axis in ragged):
        raise ArgumentError(
            f"Ragged: lengths of shape {n.shape} for the axes {ragged} of values of shape {shape}; "
            "expected a length for each ragged axis"
        )
    for column, axis in zip(columns.T, ragged, strict=True):
        wrong = np.flatnonzero((column < 0) | (column > shape[axis]))
        if wrong.size:
            raise ArgumentError(
                f"Ragged: row {wrong[0]} has length {column[wrong[0]]} along axis {axis}; expected "
                f"0 to {shape[axis]}, the size of the values there"
            )
    return columns, ragged


def stacked(results: Sequence[Any], opened: Sequence[Set[int]] | None, to_jax: bool) -> Any:
    """The tree of the results of examples, with a `Ragged` for each array."""
    first: Any
    leaves, first = jax.tree_util.tree_flatten(results[0])
    rows = [leaves]
    for index, result in enumerate(results[1:], start=1):
        leaves, tree = jax.tree_util.tree_flatten(result)
        if tree != first:
            raise ArgumentError(
                f"map: results cannot be stacked: that of example {index} is {tree}, those before "
                f"are {first}"
            )
        rows.append(leaves)
    return first.unflatten(
        _stack(column, None if opened is None else opened[place], to_jax)
        for place, column in enumerate(zip(*rows, strict=True))
    )


def _stack(column: Sequence[Any], opened: Set[int] | None, to_jax: bool) -> Ragged:
    hosts = list(map(_on_host, column))
    first = hosts[0]
    for index, host in enumerate(hosts):
        if host.dtype != first.dtype or host.ndim != first.ndim:
            raise ArgumentError(
                f"map: results cannot be stacked: that of example {index} is "
                f"{host.dtype}{list(host.shape)}, that of example 0 is "
                f"{first.dtype}{list(first.shape)}"
            )
    shapes = np.array([host.shape for host in hosts], np.int32).reshape(len(hosts), first.ndim)
    most = shapes.max(axis=0, initial=0)
    ragged = [
        i
        for i in range(first.ndim)
        if opened is None or i in opened or (shapes[:, i] != most[i]).any()
    ]
    values = np.zeros((len(hosts), *most), first.dtype)
    for r, host in enumerate(hosts):
        inside: Any = (r, *map(slice, host.shape))
        values[inside] = host
    lengths = shapes[:, ragged[0]] if len(ragged) == 1 else shapes[:, ragged]
    axes = tuple(i + 1 for i in ragged)
    return Ragged(on_default_device(values) if to_jax else values, lengths, axes)


def _on_host(value: Any) -> Any:
    if is_key(value):
        raise ArgumentError(
            "map: random keys cannot be stacked; return jax.random.key_data of them"
        )
    return np.asarray(value)
