"""Where the programs of chunks run: on JAX's own device, or in the thread that calls them.

See `bucketjit._cores.single_threaded` for what the latter is.
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

_MOST_FLOPS = 2e8  # of one operation: larger ones end as soon, or sooner, where they are shared
_LEAST_BUSY = 0.5  # share of the cores that chunks keep busy


def device_of_chunks(chunks: float) -> Any:
    """The device for programs of which several chunks run at the same time; None for JAX's own.

    Args:
        chunks: How many chunks of a call there are, as a rule; 0 if programs are for whole calls.
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
        leaves: What it is lowered for: types of arrays, with the places they are committed to.
        chunks: How many chunks of a call there are, as a rule.

    Returns:
        The device; None if the program or its arguments are tied to one of JAX's own, or it has an
        operation that is worth to be shared.
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
    """Values that are no tuples or lists, in values that may be."""
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
    except KeyError:  # in the body of a scan, say, that has sizes of its own
        return 0
    made = math.prod(out)
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * made * math.prod(left[i] for i in contracted)
    features = right[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2 * made * math.prod(right) / max(1, features)
