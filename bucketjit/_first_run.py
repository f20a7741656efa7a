"""Run an executable once before a call needs it.

XLA's CPU backend sets up a matrix multiplication when it first runs it, in about a millisecond:
the first call of a 6-layer encoder takes 45 ms longer than the next ones. An executable that was
compiled ahead, or in the background, can have that behind it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from bucketjit import _jax
from bucketjit._executable import Executable
from bucketjit._trace import Program

# Some tenths of a second: a longer run is in nobody's interest, and its setting up not noticed.
_MOST_FLOPS = 1e10

# On made-up values a loop may not end, and what Python is called back with must be real.
_NOT_ON_ZEROS = {"while", "pure_callback", "io_callback", "debug_callback"}


def run_first(entry: Executable, program: Program) -> bool:
    """Run an executable of a bucket on zeros, if that can do nothing but take time.

    It does so on the host only, for less than 10 GFLOP, and for programs without effects, callbacks
    and ``while_loop``. What the run raises is left to the call that needs the executable.

    Args:
        entry: The executable.
        program: What it was compiled from.

    Returns:
        Whether it ran.
    """
    if not entry.on_host or not entry.flops <= _MOST_FLOPS or not _runs_on_zeros(program):
        return False
    with contextlib.suppress(Exception):
        # Logical sizes come first, and are never 0.
        _jax.run_once(entry.compiled, lambda i, aval: _filled(aval, 1 if i == 0 else 0))
        return True
    return False


def _runs_on_zeros(program: Program) -> bool:
    jaxpr, _ = _jax.open_jaxpr(program.jaxpr)
    if jaxpr.effects:
        return False
    return all(eqn.primitive.name not in _NOT_ON_ZEROS for eqn in _jax.all_equations(jaxpr))


def _filled(aval: Any, value: int) -> np.ndarray:
    """An array of one value; zeros take no memory until somebody writes them."""
    dtype = np.dtype(aval.dtype)
    # XLA copies what is not aligned so.
    raw = np.zeros(int(np.prod(aval.shape, dtype=np.int64)) * dtype.itemsize + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    array = raw[begin : raw.size - 64 + begin].view(dtype).reshape(aval.shape)
    if value:
        array[...] = value
    return array
