"""Choose where the programs of chunks run: on JAX's own device, or in the thread that calls them.

`bucketjit._cores.single_threaded` runs them in the calling thread, and says why that is faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from bucketjit._cores.helper_threads import cores, start_helpers
from bucketjit._jax.cpu_client import can_lend, single_threaded_device
from bucketjit._jax.devices import is_place, sole_device
from bucketjit._jax.jaxprs import all_equations, open_jaxpr, shape_of
from bucketjit._jax.primitives import CALLBACKS
from bucketjit._sizes.bucket_sizes import BucketSizes
from bucketjit._tracing.program import Program

_MOST_FLOPS = 2e8  # of one operation; larger ones are no slower if XLA shares them among threads
_LEAST_BUSY = 0.5  # chunks for each core, below which XLA's threads would have idle cores


def device_of_chunks(chunks: float) -> Any:
    """The device for programs of which several chunks run at the same time.

    Args:
        chunks: The usual number of chunks of a call; 0 if programs are for whole calls.

    Returns:
        The device; None for JAX's own.
    """
    if not chunks or chunks < _LEAST_BUSY * cores():
        return None
    usual = sole_device()
    if usual is None or usual.platform != "cpu":
        return None
    start_helpers()
    return single_threaded_device()


def device_for(program: Program, at: BucketSizes, leaves: Sequence[Any], chunks: float) -> Any:
    """The device for one program; see `device_of_chunks`.

    Args:
        program: The program.
        at: Its padded sizes.
        leaves: Types of the arguments that it is lowered for, with the devices they are committed
            to.
        chunks: The usual number of chunks of a call.

    Returns:
        The device; None for JAX's own. That is so if the program or its arguments are tied to
        one of JAX's devices, or if it has an operation that XLA should share among threads.
    """
    device = device_of_chunks(chunks)
    if device is None:
        return None
    types = [dtype for dtype, _ in program.out_types]
    for leaf in leaves:
        if not can_lend(leaf, sole_device()):
            return None
        types.append(jax.typeof(leaf).dtype)
    if any(jax.dtypes.issubdtype(t, jax.dtypes.extended) or t == jax.dtypes.float0 for t in types):
        return None
    jaxpr, _ = open_jaxpr(program.jaxpr)
    if jaxpr.effects or not all(_runs_anywhere(eqn) for eqn in all_equations(jaxpr)):
        return None
    if max((_flops(eqn, at) for eqn in all_equations(jaxpr)), default=0) > _MOST_FLOPS:
        return None
    return device


def _runs_anywhere(eqn: JaxprEqn) -> bool:
    """Whether an equation neither calls back into Python nor names a device."""
    if eqn.primitive.name in CALLBACKS:
        return False
    return not any(is_place(value) for value in _innermost(eqn.params.values()))


def _innermost(values: Any) -> Iterator[Any]:
    """The values in nested tuples and lists."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from _innermost(value)
        else:
            yield value


def _flops(eqn: JaxprEqn, at: BucketSizes) -> float:
    """Floating point operations of a matrix product or convolution, 0 for other equations."""
    name = eqn.primitive.name
    if name not in ("dot_general", "conv_general_dilated"):
        return 0
    shapes = [shape_of(x) for x in (*eqn.invars[:2], eqn.outvars[0])]
    try:
        left, right, out = map(at.padded_shape, shapes)
    except KeyError:  # the body of a scan, for example, has variables that `at` does not
        return 0
    made = math.prod(out)
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * made * math.prod(left[i] for i in contracted)
    features = right[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2 * made * math.prod(right) / max(1, features)
