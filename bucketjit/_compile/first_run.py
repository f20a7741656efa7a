"""Run an executable once before a call needs it.

XLA's CPU backend sets up a matrix multiplication when it first runs it, in about a millisecond:
the first call of a 6-layer encoder takes 45 ms longer than the next ones. An executable that is
compiled before a call needs it can get this setup done beforehand.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr

from bucketjit._compile.executable import Executable
from bucketjit._ir.program import Program
from bucketjit._jax.compiler import run_once
from bucketjit._jax.jaxprs import CALLBACKS, all_equations, bodies, open_jaxpr

# Some tenths of a second. In a longer run, the setup is too small a part to be noticed.
_MOST_FLOPS = 1e10
_MOST_BYTES = 2**30  # of temporaries and results, which come on top of those of calls

# On zeros a loop may not end, and callbacks would pass made-up values to the user's code. XLA's
# cost analysis does not count what LAPACK does. A collective waits for other processes; most have
# effects besides.
_NOT_ON_ZEROS = {
    *("while", *CALLBACKS),
    *("cholesky", "eig", "eigh", "geqrf", "geqp3", "householder_product", "hessenberg", "lu"),
    *("ormqr", "qr", "schur", "svd", "symmetric_product", "triangular_solve", "tridiagonal"),
    *("tridiagonal_solve", "shard_mean", "shard_psum"),
}
_SIZES, _FIRST_SIZE = 0, 1  # position of the logical sizes; a valid size: programs may assume >= 1


def run_first(entry: Executable, program: Program) -> None:
    """Run an executable of a bucket on zeros, if that is harmless and quick.

    It runs on the host only, up to 10 GFLOP and 1 GiB of memory besides its arguments, and only for
    programs without effects, callbacks, ``while_loop`` and LAPACK. All errors are suppressed: the
    call that needs the executable will meet them.
    """
    with contextlib.suppress(Exception):
        if not entry.on_host or entry.nbytes > _MOST_BYTES:
            return
        jaxpr, _ = open_jaxpr(program.jaxpr)
        steps = _steps(jaxpr, max(entry.sizes.values()))
        # XLA counts one step of a loop.
        if not entry.flops * steps <= _MOST_FLOPS or not _runs_on_zeros(jaxpr):
            return
        run_once(entry.compiled, lambda i, aval: _filled(aval, _FIRST_SIZE if i == _SIZES else 0))


def _runs_on_zeros(jaxpr: Jaxpr) -> bool:
    """Whether running a program on zeros ends, and does nothing that can be observed."""
    names = {eqn.primitive.name for eqn in all_equations(jaxpr)}
    return not jaxpr.effects and names.isdisjoint(_NOT_ON_ZEROS)


def _steps(jaxpr: Jaxpr, most: int) -> int:
    """How often the innermost ``scan`` runs; a scan over an open axis counts as ``most`` steps."""
    most_steps = 1
    for eqn in jaxpr.eqns:
        length = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        inner = [_steps(body, most) for body in bodies(eqn)]
        most_steps = max(
            most_steps, (length if isinstance(length, int) else most) * max(inner, default=1)
        )
    return most_steps


def _filled(aval: Any, value: int) -> np.ndarray:
    """An array of one value. Zeros take no memory until they are written to."""
    dtype = np.dtype(aval.dtype)
    # XLA copies a host array that is not aligned to 64 bytes.
    raw = np.zeros(int(np.prod(aval.shape, dtype=np.int64)) * dtype.itemsize + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    array = raw[begin : raw.size - 64 + begin].view(dtype).reshape(aval.shape)
    if value:
        array[...] = value
    return array
