"""Programs that keep to the thread that calls them, for chunks of which several run together.

XLA's CPU client shares an operation among its threads. Where the cores have work anyway, as they
have while several chunks of a call run at the same time, to share a small one only costs: chunks of
0.1 to 0.8 GFLOP of a 6-layer encoder took 1.2 to 1.7 times as long on two cores as in a client that
shares nothing (jaxlib 0.10 and 0.12). Such a client has arrays of its own, so what a program is
given is looked at from there, and its results are looked at from here: nothing is copied.
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

Pads = Mapping[int, tuple[int, ...]]


def lent_types(
    sizes: object, leaves: Sequence[Any], opened: Set[int], device: jax.Device
) -> tuple[Any, list[Any]]:
    """The types of arguments as `SingleThreaded` hands them to its function.

    Args:
        sizes: The logical sizes, or their types, that it is given before all others.
        leaves: The types of those.
        opened: Positions of those that are padded anew for each call.
        device: Its device.

    Returns:
        The types of both.
    """
    return jax.tree_util.tree_map(lambda x: placed_on(x, device), sizes), [
        x if isinstance(x, _SCALARS) else placed_on(x, None if i in opened else device)
        for i, x in enumerate(leaves)
    ]


class _Lent(NamedTuple):
    """What was lent of an array of JAX's: to all programs, until the array is gone.

    Attributes:
        owner: The array.
        array: The same on the device.
    """

    owner: Callable[[], Any]
    array: jax.Array


class _Given(NamedTuple):
    """Arguments as a function takes them, and what they were made of.

    Attributes:
        closed_of: Picks the leaves without open axes, of all.
        owners: Identities of those.
        leaves: The leaves for the function, None where axes are open.
        committed: Whether some owner is committed.
    """

    closed_of: Callable[[Sequence[Any]], Sequence[Any]]
    owners: Sequence[int]
    leaves: list[Any]
    committed: bool


class _BorrowedArrays:
    """What was lent, by identity: an array of JAX's has no hash.

    A model's parameters are lent once, and not at every call. No lock is needed: the interpreter
    tells that an array is gone before it gives its place to another.

    Attributes:
        page: What each function was given last. A new one is begun when something that was lent is
            gone: another array may have its identity then.
    """

    def __init__(self) -> None:
        self._lent: dict[int, _Lent] = {}
        self.last_arguments: WeakKeyDictionary[SingleThreaded, _Given] = WeakKeyDictionary()

    def lend(self, value: object, device: jax.Device) -> jax.Array:
        """An array on the device; for one of NumPy's a new one each time."""
        found = self._lent.get(id(value))
        if found is not None and found.owner() is value and not value.is_deleted():
            return found.array
        lent = cpu_client.borrowed(value, device)
        if isinstance(value, jax.Array):
            place = id(value)
            ends = sys.is_finalizing  # when modules may have lost what `_forget` needs

            def forget(gone: object) -> None:
                if not ends():
                    self._forget(place, gone)

            owner = weakref.ref(value, forget)
            self._lent[place] = _Lent(owner, lent)
        return lent

    def _forget(self, place: int, gone: object) -> None:
        found = self._lent.get(place)
        if found is not None and found.owner is gone:  # no other array is in its place by now
            self._lent.pop(place, None)
        self.last_arguments = WeakKeyDictionary()


_books = _BorrowedArrays()


class Bound:
    """A `SingleThreaded` function and what several calls of it have in common.

    Safe to call from several threads.

    Args:
        function: Takes the arguments.
        leaves: The leaves of one of the calls, as they came; in host memory where they are padded.
        given: The same, as the function takes them.
        tree: Their tree.
        device: Where the function runs.
        back: What is done to results.

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
        """The positional arguments and those by name."""
        return self._tree.unflatten(self.leaves)

    def run(self, own: Iterable[tuple[int, Any]]) -> Any:
        """Serve a call; results are as those of `SingleThreaded.to_host`.

        Args:
            own: What it does not have in common with others, padded, by position among the leaves.
        """
        leaves = self._given.copy()
        for leaf, value in own:
            is_array = isinstance(value, np.generic)  # one without axes, which is never padded
            leaves[leaf] = _books.lend(value, self._device) if is_array else value
        args, kwargs = self._tree.unflatten(leaves)
        return self._back(self._function(*args, **kwargs))


def _flat(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of arguments, and their tree."""
    leaves, tree = jax.tree_util.tree_flatten((tuple(args), kwargs))
    return leaves, tree


def _on_host(result: object) -> Any:
    if isinstance(result, jax.Array):  # the most frequent tree, without the way through it
        return np.asarray(result)
    return jax.tree_util.tree_map(np.asarray, result)


class SingleThreaded:
    """A function on the device of `device_for`, to be called like one on JAX's own.

    Arguments that JAX would not run on the device that is its default now (they are committed to
    another one, or traced; another device is the default, or a mesh) are handed over to an ordinary
    function.

    Args:
        function: The function there; its arguments are on the device, or NumPy's if they are
            padded anew for each call: to place those first takes longer.
        elsewhere: The ordinary one.
        arguments: Positional arguments and those by name, or their types: those of another tree are
            for the ordinary function, too.
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
        """Serve a call; it is over when this returns."""
        result, committed = self._run(sizes, args, kwargs)
        return result if committed is None else self._given_back(result, committed)

    def to_host(self, sizes: object, *args: object, **kwargs: object) -> Any:
        """Serve a call; results are NumPy's where JAX would put them on its default device."""
        result, committed = self._run(sizes, args, kwargs)
        if committed is None:
            return result
        return self._given_back(result, True) if committed else _on_host(result)

    def bind(
        self, sizes: object, args: Sequence[Any], kwargs: Mapping[str, Any], pads: Pads
    ) -> Bound | None:
        """What several calls have in common, looked at once; None where it is not for this device.

        Args:
            sizes: The logical sizes.
            args: Positional arguments of one of the calls, not padded.
            kwargs: Its keyword arguments.
            pads: Padded shapes of leaves that are common to the calls, by position.
        """
        leaves, tree = _flat(args, kwargs)
        if tree != self._tree:
            return None
        for i in self._opened:
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
        sizes = jax.tree_util.tree_map(lambda x: _books.lend(x, self._device), sizes)
        function = functools.partial(self._function, sizes)
        return Bound(function, leaves, values, tree, self._device, back)

    def _given_back(self, result: object, committed: bool) -> Any:
        return jax.tree_util.tree_map(lambda x: returned(x, self._here, committed), result)

    def _run(self, sizes: Any, args: Any, kwargs: Any) -> tuple[Any, bool | None]:
        """The result, and whether JAX would commit it; None if the ordinary function served it."""
        leaves, tree = _flat(args, kwargs)
        is_here = tree == self._tree and sole_device() is self._here
        given = self._given(leaves) if is_here else None
        if given is None:
            return self._elsewhere(sizes, *args, **kwargs), None
        values, committed = given
        args, kwargs = tree.unflatten(values)
        sizes = jax.tree_util.tree_map(lambda x: _books.lend(x, self._device), sizes)
        return self._function(sizes, *args, **kwargs), committed

    def _given(self, leaves: Sequence[Any]) -> tuple[list[Any], bool] | None:
        """The leaves for the function, and whether JAX would commit its results.

        None if one of them must not go there.
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
        """Those leaves for the function that are not padded: mostly the same as the last time."""
        last_arguments = _books.last_arguments
        known = last_arguments.get(self)
        if known is not None:
            own = known.closed_of(leaves)
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
            given[i] = _books.lend(x, self._device)
            committed |= getattr(x, "committed", False)
        closed_of = _picker(closed)
        own = closed_of(leaves)
        made = _Given(closed_of, list(map(id, own)), given, committed)
        if all(isinstance(x, jax.Array) for x in own):
            last_arguments[self] = made
        return made


_is_deleted = operator.methodcaller("is_deleted")


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Picks some of a list: the parameters of a model, at every call."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda every: [every[i] for i in positions]
