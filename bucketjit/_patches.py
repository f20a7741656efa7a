"""Functions of JAX that refuse symbolic sizes without need, replaced while a program is traced.

A replacement does for plain sizes what the original does, so it does not matter to other
threads that it is there while some thread traces.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bucketjit import _jax
from bucketjit._associative import associative_scan_of

_ABSENT = object()
_lock = threading.Lock()
_active = 0
_originals: list[tuple[Any, Any, Any]] = []


@contextmanager
def lenient_jax() -> Iterator[None]:
    """While active, JAX traces more programs with symbolic sizes. Nests, in any threads."""
    global _active
    with _lock:
        if _active == 0:
            for owner, name, replacement in _replacements():
                names = _names_of(owner)
                _originals.append((owner, name, names.get(name, _ABSENT)))
                _set(owner, name, replacement)
        _active += 1
    try:
        yield
    finally:
        with _lock:
            _active -= 1
            if _active == 0:
                while _originals:
                    owner, name, original = _originals.pop()
                    _set(owner, name, original)


def _names_of(owner: Any) -> Any:
    return owner if isinstance(owner, dict) else vars(owner)


def _set(owner: Any, name: Any, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    elif value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _replacements() -> list[tuple[Any, Any, Any]]:
    """``(owner, name, replacement)`` of each function, in a module or a table, that is replaced."""
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
        _jax.convolution_padding(),
        _jax.lengths(),
        _jax.inferred_sizes(),
        _jax.fft_lengths(),
        *_jax.real_fft_transposes(),
    ]
