"""Install the patches of `bucketjit._jax.patches` while a function is traced.

They replace functions of JAX that refuse symbolic sizes without need. The replacements are global,
so other threads call them, too. For plain sizes they do what the originals do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bucketjit._ir.associative_scan import associative_scan_of
from bucketjit._ir.open_sizes import selecting
from bucketjit._ir.shard_reductions import (
    axis_of_shards,
    mean_over_shards,
    refuse_groups,
    sum_over_shards,
)
from bucketjit._jax.names import Without, lacking
from bucketjit._jax.patches.callbacks import open_debug_callbacks
from bucketjit._jax.patches.convolution import convolution_padding
from bucketjit._jax.patches.fft import fft_lengths, real_fft_transposes
from bucketjit._jax.patches.finalizers import weak_finalizers
from bucketjit._jax.patches.indexing import (
    clamped_indices,
    open_constants,
    open_index_types,
    sizes_as_indices,
)
from bucketjit._jax.patches.patch import Patch, in_modules
from bucketjit._jax.patches.reductions import open_reductions
from bucketjit._jax.patches.scan import associative_scans, open_scans
from bucketjit._jax.patches.searchsorted import open_searches
from bucketjit._jax.patches.selections import open_selections
from bucketjit._jax.patches.shapes import inferred_sizes, lengths
from bucketjit._jax.patches.shard_collectives import uneven_collectives
from bucketjit._jax.patches.shuffles import open_shuffles
from bucketjit._jax.patches.size_decisions import brief_decisions

_ABSENT = object()  # of a name that the owner did not have, such as ``len`` in a module
_Find = Callable[[], Sequence[Patch]]
_Entry = tuple[_Find, Without | None]


class _Replacing:
    """A context manager that installs patches while any thread is inside it. It nests."""

    def __init__(self, patches: Sequence[_Entry]) -> None:
        self._patches = patches
        self._lock = threading.Lock()
        self._active = 0  # how many contexts are open, in all threads
        self._originals: list[tuple[Any, Any, Any]] = []  # in order of installation

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._active == 0:
                for patch in self.found():
                    held = _names_of(patch.owner).get(patch.name, _ABSENT)
                    self._originals.append((patch.owner, patch.name, held))
                    _set(patch.owner, patch.name, patch.replacement)
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                self._active -= 1
                if self._active == 0:
                    while self._originals:  # the last first: two patches may share a name
                        _set(*self._originals.pop())

    def found(self) -> list[Patch]:
        """The patches whose features this JAX has.

        They are made anew each time: a patch reads the original when it is made.
        """
        there = [f for f, feature in self._patches if feature is None or not lacking(feature)]
        return in_modules([patch for find in there for patch in find()])


def _names_of(owner: object) -> Any:
    return owner if isinstance(owner, dict) else vars(owner)


def _set(owner: Any, name: Any, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    elif value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _associative_scans() -> list[Patch]:
    return associative_scans(associative_scan_of)


def _selections() -> list[Patch]:
    return open_selections(selecting)


def _uneven_collectives() -> list[Patch]:
    return uneven_collectives(axis_of_shards, mean_over_shards, sum_over_shards, refuse_groups)


# Each patch, with the feature that is left out if this JAX lacks the name that the patch replaces.
_FOR_SYMBOLIC_SIZES: tuple[_Entry, ...] = (
    (_associative_scans, None),
    (open_scans, None),
    (open_searches, Without.SEARCHES),
    (open_shuffles, Without.SHUFFLES),
    (open_constants, Without.CONSTANTS),
    (open_reductions, Without.REDUCTIONS),
    (open_debug_callbacks, Without.CALLBACKS),
    (open_index_types, None),
    (clamped_indices, None),
    (sizes_as_indices, Without.INDICES),
    (brief_decisions, Without.DECISIONS),
    (convolution_padding, Without.CONVOLUTIONS),
    (lengths, Without.LENGTHS),
    (inferred_sizes, Without.RESHAPES),
    (fft_lengths, Without.FFT),
    (real_fft_transposes, Without.FFT_GRADIENTS),
)
_FOR_SELECTIONS: tuple[_Entry, ...] = ((_selections, Without.SELECTIONS),)
_FOR_SHARDS: tuple[_Entry, ...] = ((_uneven_collectives, None),)
_FOR_FAILURES = ((weak_finalizers, Without.FORGETTING),)

lenient_jax = _Replacing(_FOR_SYMBOLIC_SIZES)
"""While active, JAX traces more programs with symbolic sizes."""

selecting_jax = _Replacing(_FOR_SELECTIONS)
"""While active, selections ask `bucketjit._ir.open_sizes.selecting` what to do."""

uneven_shards = _Replacing(_FOR_SHARDS)
"""While active, collectives know uneven shards; see `bucketjit._ir.shard_reductions`."""

forgetful_jax = _Replacing(_FOR_FAILURES)
"""While active, traces that fail can be freed."""


def left_out() -> str:
    """The features whose patch for symbolic sizes is left out, as text; ``""`` if there is none."""
    return "; ".join(
        f"{lacking(feature)}, without which {feature}"
        for _, feature in _FOR_SYMBOLIC_SIZES
        if feature is not None and lacking(feature)
    )
