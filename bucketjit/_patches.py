"""Functions of JAX that refuse symbolic sizes without need, replaced while a program is traced.

A replacement does for plain sizes what the original does, so it does not matter to other
threads that it is there while some thread traces.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bucketjit import _jax
from bucketjit._associative import associative_scan_of

_ABSENT = object()
_Replacement = tuple[Any, Any, Any]  # owner (a module, or a table), name, and what is there then


class _Replacing:
    """Replaces functions while it is active. Nests, in any threads.

    Args:
        find: Gives the replacements.
    """

    def __init__(self, find: Callable[[], Sequence[_Replacement]]) -> None:
        self._find = find
        self._lock = threading.Lock()
        self._active = 0
        self._originals: list[_Replacement] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._active == 0:
                for owner, name, replacement in self._find():
                    names = _names_of(owner)
                    self._originals.append((owner, name, names.get(name, _ABSENT)))
                    _set(owner, name, replacement)
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                self._active -= 1
                if self._active == 0:
                    while self._originals:
                        _set(*self._originals.pop())


def _names_of(owner: Any) -> Any:
    return owner if isinstance(owner, dict) else vars(owner)


def _set(owner: Any, name: Any, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    elif value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _for_symbolic_sizes() -> list[_Replacement]:
    scan, modules = _jax.associative_scans()
    open_scan = associative_scan_of(scan)
    return [
        *((module, "associative_scan", open_scan) for module in modules),
        *_jax.open_scans(),
        *_jax.open_searches(),
        *_jax.open_shuffles(),
        _jax.open_constants(),
        _jax.open_reductions(),
        *_jax.open_debug_callbacks(),
        *_jax.open_index_types(),
        _jax.clamped_indices(),
        *_jax.brief_decisions(),
        _jax.convolution_padding(),
        _jax.lengths(),
        _jax.inferred_sizes(),
        _jax.fft_lengths(),
        *_jax.real_fft_transposes(),
    ]


lenient_jax = _Replacing(_for_symbolic_sizes)
"""While active, JAX traces more programs with symbolic sizes."""

forgetful_jax = _Replacing(lambda: [_jax.weak_finalizers()])
"""While active, JAX lets go of traces that fail."""
