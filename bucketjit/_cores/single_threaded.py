"""Run programs in the thread that calls them, for chunks of which several run at the same time.

XLA's CPU client shares an operation among its threads. While several chunks of a call run, every
core is busy, so sharing a small operation only costs: chunks of 0.1 to 0.8 GFLOP of a 6-layer
encoder took 1.2 to 1.7 times as long on two cores as in a client that shares nothing (jaxlib 0.10
and 0.12).

Such a client takes no arrays of JAX's client. So each argument is lent to it: an array of the other
client over the same memory. Results come back in the same way. No array of JAX's is copied.
"""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from bucketjit._arrays.padding import pad, plain
from bucketjit._jax import cpu_client
from bucketjit._jax.cpu_client import can_lend, placed_on, returned
from bucketjit._jax.devices import sole_device

_SCALARS = bool | int | float | complex

Pads = Mapping[int, tuple[int, ...]]  # padded shapes, by position of the leaf


def lent_types(
    sizes: object, leaves: Sequence[Any], opened: Set[int], device: jax.Device
) -> tuple[Any, list[Any]]:
    """The types of the arguments that `SingleThreaded` passes to its function.

    Args:
        sizes: The logical sizes, or their types: the first argument.
        leaves: The types of the leaves of the other arguments.
        opened: Positions of the leaves that are padded for each call.
        device: The device of the function.

    Returns:
        The types of the sizes, and of the leaves.
    """
    return jax.tree_util.tree_map(lambda x: placed_on(x, device), sizes), [
        x if isinstance(x, _SCALARS) else placed_on(x, None if i in opened else device)
        for i, x in enumerate(leaves)
    ]


class _Lent(NamedTuple):
    """An array that was lent. It serves all programs until its owner is gone.

    Attributes:
        owner: A weak reference to the array of JAX's client.
        array: The array of the other client over the same memory.
    """

    owner: Callable[[], Any]
    array: jax.Array


class _Given(NamedTuple):
    """The leaves without open axes that a function got last, and those they were lent from.

    Attributes:
        closed_of: Picks the leaves without open axes from all leaves.
        owners: Identities of the leaves as they came.
        leaves: The leaves for the function; None where axes are open.
        committed: Whether some of them is committed to a device.
    """

    closed_of: Callable[[Sequence[Any]], Sequence[Any]]
    owners: Sequence[int]
    leaves: list[Any]
    committed: bool


class _BorrowedArrays:
    """The arrays that are lent, by the identity of their owner: a ``jax.Array`` has no hash.

    So a model's parameters are lent once, not at every call. No lock is needed: Python runs the
    callback of a weak reference before another object can get the identity of the one that is gone.

    Attributes:
        last_arguments: The leaves that each function got last. All are dropped when an owner is
            gone, since another array may get its identity then.
    """

    def __init__(self) -> None:
        self._lent: dict[int, _Lent] = {}
        self.last_arguments: WeakKeyDictionary[SingleThreaded, _Given] = WeakKeyDictionary()

    def lend(self, value: object, device: jax.Device) -> jax.Array:
        """Lend an array to a device.

        Args:
            value: An array of JAX's CPU client, or of NumPy.
            device: The device of the other client.

        Returns:
            The array on the device. It is kept for a JAX array, and a new one for a NumPy array.

        Raises:
            RuntimeError: The array has been deleted.
        """
        found = self._lent.get(id(value))
        if found is not None and found.owner() is value and not value.is_deleted():
            return found.array
        lent = cpu_client.borrowed(value, device)
        if isinstance(value, jax.Array):
            place = id(value)
            ends = sys.is_finalizing  # bound now: at exit, modules may be empty already

            def forget(gone: object) -> None:
                if not ends():
                    self._forget(place, gone)

            owner = weakref.ref(value, forget)
            self._lent[place] = _Lent(owner, lent)
        return lent

    def _forget(self, place: int, gone: object) -> None:
        found = self._lent.get(place)
        if found is not None and found.owner is gone:  # not if another array is there by now
            self._lent.pop(place, None)
        self.last_arguments = WeakKeyDictionary()


_borrowed = _BorrowedArrays()


class Bound:
    """A `SingleThreaded` function, and the arguments that several calls of it have in common.

    Safe to use from several threads.

    Args:
        function: The function, its sizes bound.
        leaves: The leaves of one of the calls, as they came; in host memory if they are padded.
        given: The same leaves, as the function takes them.
        tree: Their tree.
        device: The device of the function.
        back: Converts its results for the caller.

    Attributes:
        leaves: See above.
    """

    __slots__ = ("_back", "_device", "_function", "_given", "_tree", "leaves")

    def __init__(
        self,
        function: Callable[..., Any],
        leaves: Sequence[Any],
        given: list[Any],
        tree: PyTreeDef,
        device: jax.Device,
        back: Callable[[Any], Any],
    ) -> None:
        self.leaves = leaves
        self._function = function
        self._given = given
        self._tree = tree
        self._device = device
        self._back = back

    @property
    def arguments(self) -> Any:
        """The positional and the keyword arguments of the call it was bound with."""
        return self._tree.unflatten(self.leaves)

    def run(self, own: Iterable[tuple[int, Any]]) -> Any:
        """Serve a call.

        Args:
            own: The leaves that differ from call to call, padded, with their positions.

        Returns:
            The results, as those of `SingleThreaded.to_host`.

        Raises:
            Exception: Whatever the function raises.
        """
        leaves = self._given.copy()
        for leaf, value in own:
            is_array = isinstance(value, np.generic)  # a NumPy scalar, which is never padded
            leaves[leaf] = _borrowed.lend(value, self._device) if is_array else value
        args, kwargs = self._tree.unflatten(leaves)
        return self._back(self._function(*args, **kwargs))


def _flat(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of arguments, and their tree."""
    leaves, tree = jax.tree_util.tree_flatten((tuple(args), kwargs))
    return leaves, tree


def _on_host(result: object) -> Any:
    if isinstance(result, jax.Array):  # the most frequent tree, without the cost of `tree_map`
        return np.asarray(result)
    return jax.tree_util.tree_map(np.asarray, result)


class SingleThreaded:
    """A function on the device of `device_for`, to be called like one on JAX's own device.

    An ordinary function serves calls that JAX would not run on its default device at the time of
    construction: arguments are committed to another device, or traced, or the default device is
    another one now, or a mesh.

    Args:
        function: The function on the device. Its arguments are on the device, or NumPy arrays if
            they are padded for each call, which is faster than placing them first.
        elsewhere: The ordinary function.
        arguments: Positional and keyword arguments, or their types. The ordinary function serves
            calls with another tree, too.
        opened: Positions of the leaves that are padded, the logical sizes left out.
        device: The device.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        elsewhere: Callable[..., Any],
        arguments: tuple[Sequence[Any], Mapping[str, Any]],
        opened: Set[int],
        device: jax.Device,
    ) -> None:
        self._function = function
        self._elsewhere = elsewhere
        self._tree = _flat(*arguments)[1]
        self._opened = opened
        self._device = device
        self._here = sole_device()

    def __call__(self, sizes: object, *args: object, **kwargs: object) -> Any:
        """Serve a call. The results are computed when this returns."""
        result, committed = self._run(sizes, args, kwargs)
        return result if committed is None else self._given_back(result, committed)

    def to_host(self, sizes: object, *args: object, **kwargs: object) -> Any:
        """Serve a call, with results in host memory.

        Args:
            sizes: The logical sizes.
            *args: The positional arguments.
            **kwargs: The keyword arguments.

        Returns:
            The results: NumPy arrays, unless JAX would commit them to a device, or the ordinary
            function serves the call.

        Raises:
            RuntimeError: An argument has been deleted.
            Exception: Whatever the function raises.
        """
        result, committed = self._run(sizes, args, kwargs)
        if committed is None:
            return result
        return self._given_back(result, True) if committed else _on_host(result)

    def bind(
        self, sizes: object, args: Sequence[Any], kwargs: Mapping[str, Any], pads: Pads
    ) -> Bound | None:
        """Convert the arguments that several calls have in common, once for all of them.

        Args:
            sizes: The logical sizes.
            args: Positional arguments of one of the calls, not padded.
            kwargs: Its keyword arguments.
            pads: Padded shapes of leaves that are common to the calls, by position.

        Returns:
            The function with these arguments; None if the ordinary function must serve the calls.

        Raises:
            RuntimeError: An argument has been deleted.
        """
        leaves, tree = _flat(args, kwargs)
        if tree != self._tree:
            return None
        for i in self._opened:  # a `Padded` argument is taken out of its padding
            leaves[i] = plain(leaves[i])
        given = self._given(leaves) if sole_device() is self._here else None
        if given is None:
            return None
        values, committed = given
        for i in self._opened:
            leaves[i] = values[i]
        for i, shape in pads.items():
            values[i] = pad(values[i], shape)
        back = functools.partial(self._given_back, committed=True) if committed else _on_host
        sizes = jax.tree_util.tree_map(lambda x: _borrowed.lend(x, self._device), sizes)
        function = functools.partial(self._function, sizes)
        return Bound(function, leaves, values, tree, self._device, back)

    def _given_back(self, result: object, committed: bool) -> Any:
        return jax.tree_util.tree_map(lambda x: returned(x, self._here, committed), result)

    def _run(self, sizes: Any, args: Any, kwargs: Any) -> tuple[Any, bool | None]:
        """Serve a call.

        Returns:
            The result, and whether JAX would commit it; None for the latter if the ordinary
            function served the call.
        """
        leaves, tree = _flat(args, kwargs)
        is_here = tree == self._tree and sole_device() is self._here
        given = self._given(leaves) if is_here else None
        if given is None:
            return self._elsewhere(sizes, *args, **kwargs), None
        values, committed = given
        args, kwargs = tree.unflatten(values)
        sizes = jax.tree_util.tree_map(lambda x: _borrowed.lend(x, self._device), sizes)
        return self._function(sizes, *args, **kwargs), committed

    def _given(self, leaves: Sequence[Any]) -> tuple[list[Any], bool] | None:
        """The leaves for the function, and whether JAX would commit its results.

        None if one of them cannot be lent, so that the ordinary function must serve the call.
        """
        known = self._closed(leaves)
        if known is None:
            return None
        given, committed = known.leaves.copy(), known.committed
        for i in self._opened:
            x = leaves[i]
            if type(x) is not np.ndarray:
                if not can_lend(x, self._here):
                    return None
                committed |= getattr(x, "committed", False)
            given[i] = np.asarray(x)
        return given, committed

    def _closed(self, leaves: Sequence[Any]) -> _Given | None:
        """The leaves for the function that are not padded; mostly those of the last call.

        None if one of them cannot be lent.
        """
        # A local reference: `_forget` replaces the dict when an array is gone, and what is made
        # from that array here must not get into the new one.
        last_arguments = _borrowed.last_arguments
        known = last_arguments.get(self)
        if known is not None:
            own = known.closed_of(leaves)
            # Identities are enough: when an owner is gone, `_forget` drops what is known.
            if list(map(id, own)) == known.owners and not any(map(_is_deleted, own)):
                return known
        closed = [i for i in range(len(leaves)) if i not in self._opened]
        given: list[Any] = [None] * len(leaves)
        committed = False
        for i in closed:
            x = given[i] = leaves[i]
            if isinstance(x, _SCALARS):
                continue
            if not can_lend(x, self._here):
                return None
            given[i] = _borrowed.lend(x, self._device)
            committed |= getattr(x, "committed", False)
        closed_of = _picker(closed)
        own = closed_of(leaves)
        made = _Given(closed_of, list(map(id, own)), given, committed)
        if all(isinstance(x, jax.Array) for x in own):  # NumPy arrays may change from call to call
            last_arguments[self] = made
        return made


_is_deleted = operator.methodcaller("is_deleted")


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that picks positions of a list, fast: at every call it picks a model's weights."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda every: [every[i] for i in positions]
