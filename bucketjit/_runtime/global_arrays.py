"""Refuses to pad arrays that are spread over several processes: no process holds all of one."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from bucketjit._compile.argument_types import padded_leaf_shapes
from bucketjit._events import shown
from bucketjit._tracing.resolved_call import ResolvedCall
from bucketjit._tracing.signer import SignedCall
from bucketjit.errors import ArgumentError

_REMEDY = (
    "choose a bucket of that size (explain() shows the bucket), or give the rows of each process "
    "to a bucketed function made by .with_processes(mesh, axis)"
)


def refusal_of_global(
    signed: SignedCall, call: ResolvedCall, bucket: Mapping[str, int]
) -> ArgumentError | None:
    """Why a call with an array of several processes cannot be padded; None if it need not be."""
    if jax.process_count() == 1:
        return None
    spread = [
        i
        for i, leaf in enumerate(signed.leaves)
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    ]
    if not spread:
        return None
    signature = signed.signature
    pads = dict(padded_leaf_shapes(call, signature, bucket, signed.shapes))
    for i in spread:
        shape = tuple(signed.shapes[i])
        if pads.get(i, shape) != shape:
            return ArgumentError(
                f"{signature.paths[i]}: an array of shape {shape} on the devices of several "
                f"processes cannot be padded to {pads[i]}, as no process holds all of it; {_REMEDY}"
            )
    assert call.program is not None
    if call.program.open_outs and any(bucket[v] != n for v, n in call.sizes.items()):
        return ArgumentError(
            f"{signature.paths[spread[0]]}: an array on the devices of several processes makes "
            f"results that are spread over them too, and results of the bucket {shown(bucket)} "
            f"would have to be cut to {shown(call.sizes)}; {_REMEDY}"
        )
    return None
