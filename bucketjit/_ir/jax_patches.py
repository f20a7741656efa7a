"""Functions of JAX that refuse symbolic sizes without need, replaced while a program is traced.

A replacement does for plain sizes what the original does, so it does not matter to other
threads that it is there while some thread traces.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bucketjit._ir.associative_scan import associative_scan_of
from bucketjit._jax.names import Without, lacking
from bucketjit._jax.patches.callbacks import open_debug_callbacks
from bucketjit._jax.patches.convolution import convolution_padding
from bucketjit._jax.patches.fft import fft_lengths, real_fft_transposes
from bucketjit._jax.patches.finalizers import weak_finalizers
from bucketjit._jax.patches.indexing import clamped_indices, open_constants, open_index_types
from bucketjit._jax.patches.patch import Patch
from bucketjit._jax.patches.reductions import open_reductions
from bucketjit._jax.patches.scan import associative_scans, open_scans
from bucketjit._jax.patches.searchsorted import open_searches
from bucketjit._jax.patches.shapes import inferred_sizes, lengths
from bucketjit._jax.patches.shuffles import open_shuffles
from bucketjit._jax.patches.size_decisions import brief_decisions

_ABSENT = object()
_Find = Callable[[], Sequence[Patch]]
_Entry = tuple[_Find, Without | None]


class _Replacing:
    """Replaces functions while it is active. Nests, in any threads.

    Args:
        patches: Functions that return patches, each with the feature that it is for. Patches of
            features that are left out with this JAX are left out.
    """

    def __init__(self, patches: Sequence[_Entry]) -> None:
        self._patches = patches
        self._lock = threading.Lock()
        self._active = 0
        self._originals: list[tuple[Any, Any, Any]] = []

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
                    while self._originals:
                        _set(*self._originals.pop())

    def found(self) -> list[Patch]:
        """The patches that this JAX has a place for."""
        there = [f for f, feature in self._patches if feature is None or not lacking(feature)]
        return [patch for find in there for patch in find()]


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


# Each patch, with the feature that is left out where this JAX lacks what it replaces.
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
    (brief_decisions, Without.DECISIONS),
    (convolution_padding, Without.CONVOLUTIONS),
    (lengths, Without.LENGTHS),
    (inferred_sizes, Without.RESHAPES),
    (fft_lengths, Without.FFT),
    (real_fft_transposes, Without.FFT_GRADIENTS),
)
_FOR_FAILURES = ((weak_finalizers, Without.FORGETTING),)

lenient_jax = _Replacing(_FOR_SYMBOLIC_SIZES)
"""While active, JAX traces more programs with symbolic sizes."""

forgetful_jax = _Replacing(_FOR_FAILURES)
"""While active, JAX lets go of traces that fail."""


def left_out() -> str:
    """What this JAX lacks of the patches for symbolic sizes, in words; ``""`` if nothing."""
    return "; ".join(
        f"{lacking(feature)}, without which {feature}"
        for _, feature in _FOR_SYMBOLIC_SIZES
        if feature is not None and lacking(feature)
    )
