"""`Ragged`: results of many examples as one array each, with the lengths of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np

from bucketjit._jax.arrays import on_default_device
from bucketjit.errors import ArgumentError


class Ragged(Sequence[Any]):
    """The results of many examples, stacked: values padded to the longest row, and lengths.

    `BucketedExec.map` with ``out="stacked"`` returns one. It is a sequence of rows, so another
    bucketed function's `map` takes it as a list of examples.

    Args:
        values: A tree of arrays with the examples along axis 0. Rows that are shorter than the
            array hold zeros after their end.
        lengths: The same tree. Of an array with one ragged axis, the length of each row along it,
            ``int32[examples]``. Of one with several, ``int32[examples, axes]``; of one without,
            ``int32[examples, 0]``.
        axes: The same tree with the ragged axes of each array, as a tuple. By default axis 1 of
            an array whose lengths have rank 1, and the axes from 1 on of others.

    Attributes:
        values: See above.
        lengths: See above.

    Raises:
        ArgumentError: The trees differ, or an array has not a length for each of its rows.

    Examples:
        >>> import jax.numpy as jnp, numpy as np
        >>> import bucketjit
        >>> running = bucketjit.jit(jnp.cumsum, dynamic_axes="n", buckets="pow2")
        >>> sums = running.map([np.ones(n, np.float32) for n in (1, 3)], out="stacked")
        >>> sums.values
        Array([[1., 0., 0.],
               [1., 2., 3.]], dtype=float32)
        >>> sums.lengths.tolist(), sums.mask.tolist()
        ([1, 3], [[True, False, False], [True, True, True]])
        >>> [row.tolist() for row in sums.rows()]
        [[1.0], [1.0, 2.0, 3.0]]
    """

    def __init__(self, values: Any, lengths: Any, axes: Any = None) -> None:
        leaves: list[Any]
        self._tree: Any
        leaves, self._tree = jax.tree_util.tree_flatten(values)
        own, of_lengths = jax.tree_util.tree_flatten(lengths)
        if of_lengths != self._tree:
            raise ArgumentError(f"Ragged: values are {self._tree}, and lengths are {of_lengths}")
        chosen = [None] * len(own) if axes is None else self._tree.flatten_up_to(axes)
        self._columns = list(map(_column, leaves, own, chosen))
        self.values, self.lengths = values, lengths

    def __len__(self) -> int:
        return len(self._columns[0].lengths) if self._columns else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} rows")
        return self._tree.unflatten([column.row(index) for column in self._columns])

    def __repr__(self) -> str:
        shapes = self._tree.unflatten([np.shape(column.value) for column in self._columns])
        return f"Ragged({len(self)} rows in {shapes})"

    def rows(self) -> Iterator[Any]:
        """The result of each example, without its padding.

        Returns:
            An iterator over trees of arrays; NumPy views where the values are in host memory.

        Examples:
            >>> import numpy as np
            >>> from bucketjit import Ragged
            >>> ragged = Ragged(np.array([[1, 0], [2, 3]]), np.array([1, 2]))
            >>> [row.tolist() for row in ragged.rows()]
            [[1], [2, 3]]
        """
        hosts = [column._replace(value=_on_host(column.value)) for column in self._columns]
        every = range(len(self))
        return (self._tree.unflatten([column.row(i) for column in hosts]) for i in every)

    def to_list(self) -> list[Any]:
        """The results as a list of trees of arrays, as `map` returns them without ``"stacked"``.

        Examples:
            >>> import numpy as np
            >>> from bucketjit import Ragged
            >>> Ragged(np.array([[1.0, 0.0], [2.0, 3.0]]), np.array([1, 2])).to_list()
            [array([1.]), array([2., 3.])]
        """
        return list(self.rows())

    @property
    def mask(self) -> Any:
        """Where values are not padding: booleans up to the last ragged axis of each array.

        They have size 1 along axes before it that are not ragged. An array without ragged axes has
        ``bool[examples]``, all True.

        Examples:
            >>> import numpy as np
            >>> from bucketjit import Ragged
            >>> Ragged(np.array([[1, 0], [2, 3]]), np.array([1, 2])).mask
            array([[ True, False],
                   [ True,  True]])
        """
        return self._tree.unflatten([column.mask() for column in self._columns])


class _Column(NamedTuple):
    """One array of a `Ragged`.

    Attributes:
        value: The array.
        lengths: The length of each row along each ragged axis.
        axes: The ragged axes.
    """

    value: Any
    lengths: np.ndarray
    axes: tuple[int, ...]

    def row(self, index: int) -> Any:
        """A row without its padding."""
        cuts = dict(zip(self.axes, map(int, self.lengths[index]), strict=True))
        return self.value[index][tuple(slice(cuts.get(i)) for i in range(1, self.value.ndim))]

    def mask(self) -> np.ndarray:
        """Where values are not padding; see `Ragged.mask`."""
        shape, rank = np.shape(self.value), max(self.axes, default=0) + 1
        full = (shape[0], *(shape[i] if i in self.axes else 1 for i in range(1, rank)))
        mask = np.ones(full, bool)
        for axis, lengths in zip(self.axes, self.lengths.T, strict=True):
            own = [1] * rank
            own[0], own[axis] = shape[0], shape[axis]
            mask &= (np.arange(shape[axis]) < lengths[:, None]).reshape(own)
        return mask


def _column(value: Any, lengths: Any, axes: Sequence[int] | None) -> _Column:
    """One array, with lengths that are whole numbers within it."""
    shape, n = np.shape(value), np.asarray(lengths)
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
    return _Column(value, columns, ragged)


def stacked(results: Sequence[Any], opened: Sequence[Set[int]] | None, to_jax: bool) -> Ragged:
    """Stack the results of examples."""
    first: Any
    leaves, first = jax.tree_util.tree_flatten(results[0])
    rows = [leaves]
    for index, result in enumerate(results[1:], start=1):
        leaves, own = jax.tree_util.tree_flatten(result)
        if own != first:
            raise ArgumentError(
                f"map: results cannot be stacked: that of example {index} is {own}, those before "
                f"are {first}"
            )
        rows.append(leaves)
    columns = [
        _stack(column, None if opened is None else opened[place])
        for place, column in enumerate(zip(*rows, strict=True))
    ]
    values = [on_default_device(c.value) if to_jax else c.value for c in columns]
    lengths = [c.lengths[:, 0] if len(c.axes) == 1 else c.lengths for c in columns]
    axes = [c.axes for c in columns]
    return Ragged(*map(first.unflatten, (values, lengths, axes)))


def _stack(column: Sequence[Any], opened: Set[int] | None) -> _Column:
    """One array of the values of all examples."""
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
    return _Column(values, shapes[:, ragged], tuple(i + 1 for i in ragged))


def _on_host(value: Any) -> Any:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise ArgumentError(
            "map: random keys cannot be stacked; return jax.random.key_data of them"
        )
    return np.asarray(value)
