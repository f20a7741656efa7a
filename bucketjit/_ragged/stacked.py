"""`Ragged`: results of many examples as one array each, with the lengths of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any

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
        >>> from bucketjit import BucketedExec
        >>> running = BucketedExec(jnp.cumsum, dynamic_axes="n").with_pow2()
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
        tree: Any
        leaves, tree = jax.tree_util.tree_flatten(values)
        own, of_lengths = jax.tree_util.tree_flatten(lengths)
        if of_lengths != tree:
            raise ArgumentError(f"Ragged: values are {tree}, and lengths are {of_lengths}")
        chosen: list[Any] = [None] * len(own) if axes is None else tree.flatten_up_to(axes)
        self._tree = tree
        self._lengths: list[np.ndarray] = [np.asarray(n) for n in own]
        self._axes: list[tuple[int, ...]] = [
            tuple(range(1, 1 + n.shape[1] if n.ndim > 1 else 2)) if a is None else tuple(a)
            for a, n in zip(chosen, self._lengths, strict=True)
        ]
        for value, n in zip(leaves, self._lengths, strict=True):
            if not np.ndim(value) or not n.ndim or len(value) != len(n):
                raise ArgumentError(
                    f"Ragged: values of shape {np.shape(value)} and lengths of shape {n.shape}; "
                    "expected a length for each row"
                )
        for value, n, ragged in zip(leaves, self._lengths, self._axes, strict=True):
            _check_lengths(value, n, ragged)
        self.values, self.lengths = values, lengths

    def __len__(self) -> int:
        return len(self._lengths[0]) if self._lengths else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} rows")
        leaves = [
            _row(value, index, axes, lengths)
            for value, axes, lengths in zip(
                jax.tree_util.tree_leaves(self.values), self._axes, self._lengths, strict=True
            )
        ]
        return self._tree.unflatten(leaves)

    def __repr__(self) -> str:
        shapes = self._tree.unflatten([np.shape(v) for v in jax.tree_util.tree_leaves(self.values)])
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
        host = jax.tree_util.tree_map(_on_host, self.values)
        return iter(_with_values(self, host))

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
        leaves: list[Any] = jax.tree_util.tree_leaves(self.values)
        masks: list[np.ndarray] = []
        for value, axes, lengths in zip(leaves, self._axes, self._lengths, strict=True):
            masks.append(_mask(value.shape, axes, lengths))
        return self._tree.unflatten(masks)


def stacked(results: Sequence[Any], opened: Sequence[Set[int]] | None, to_jax: bool) -> Ragged:
    """Stack the results of examples."""
    columns: list[list[Any]] = []
    tree: Any = None
    for index, result in enumerate(results):
        leaves, own = jax.tree_util.tree_flatten(result)
        if tree is not None and own != tree:
            raise ArgumentError(
                f"map: results cannot be stacked: that of example {index} is {own}, those before "
                f"are {tree}"
            )
        tree = own
        columns.append(leaves)
    assert tree is not None
    values, lengths, axes = [], [], []
    for place, column in enumerate(zip(*columns, strict=True)):
        for_leaf = _stack(column, None if opened is None else opened[place])
        values.append(on_default_device(for_leaf[0]) if to_jax else for_leaf[0])
        lengths.append(for_leaf[1])
        axes.append(for_leaf[2])
    return Ragged(tree.unflatten(values), tree.unflatten(lengths), tree.unflatten(axes))


def _stack(
    column: Sequence[Any], opened: Set[int] | None
) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """One array of the values of all examples, their lengths, and the ragged axes."""
    hosts = [_on_host(leaf) for leaf in column]
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
    lengths = shapes[:, ragged]
    return values, lengths[:, 0] if len(ragged) == 1 else lengths, tuple(i + 1 for i in ragged)


def _check_lengths(value: Any, lengths: np.ndarray, axes: Sequence[int]) -> None:
    """Refuse lengths that are no whole numbers, or not within the values."""
    shape = np.shape(value)
    if lengths.size and not np.issubdtype(lengths.dtype, np.integer):
        raise ArgumentError(f"Ragged: lengths must be whole numbers, got {lengths.dtype}")
    columns = lengths.reshape(len(lengths), -1)
    if columns.shape[1] != len(axes) or not all(0 < axis < len(shape) for axis in axes):
        raise ArgumentError(
            f"Ragged: lengths of shape {lengths.shape} for the axes {tuple(axes)} of values of "
            f"shape {shape}; expected a length for each ragged axis"
        )
    for column, axis in zip(columns.T, axes, strict=True):
        wrong = np.flatnonzero((column < 0) | (column > shape[axis]))
        if wrong.size:
            raise ArgumentError(
                f"Ragged: row {wrong[0]} has length {column[wrong[0]]} along axis {axis}; expected "
                f"0 to {shape[axis]}, the size of the values there"
            )


def _row(value: Any, index: int, axes: Sequence[int], lengths: np.ndarray) -> Any:
    sizes = np.atleast_1d(lengths[index])
    cuts = dict(zip(axes, map(int, sizes), strict=True))
    return value[index][tuple(slice(cuts.get(i)) for i in range(1, value.ndim))]


def _mask(shape: Sequence[int], axes: Sequence[int], lengths: np.ndarray) -> np.ndarray:
    last = max(axes, default=0)
    mask = np.ones((shape[0], *(shape[i] if i in axes else 1 for i in range(1, last + 1))), bool)
    for place, axis in enumerate(axes):
        own = lengths if lengths.ndim == 1 else lengths[:, place]
        within = np.arange(shape[axis]) < own[:, None]
        mask &= within.reshape(
            shape[0], *(shape[axis] if i == axis else 1 for i in range(1, last + 1))
        )
    return mask


def _on_host(value: Any) -> Any:
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    if is_key:
        raise ArgumentError(
            "map: random keys cannot be stacked; return jax.random.key_data of them"
        )
    return np.asarray(value)


def _with_values(ragged: Ragged, values: Any) -> Ragged:
    return Ragged(values, ragged.lengths, ragged._tree.unflatten(ragged._axes))
