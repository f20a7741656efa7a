"""The key of an executable among files: a digest of everything the executable depends on.

This module has the parts that JAX's objects are needed for; `bucketjit._compile.files.stored` puts
the key together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.backend import get_default_device

from bucketjit._compile.files.fingerprint import Digest, NoDigest, Own
from bucketjit._ir.associative_scan import associative_scan_p
from bucketjit._ir.combine import Combine
from bucketjit._ir.shard_reductions import COMBINED
from bucketjit._ir.sized import size_constant_p, sized_p, unsized_p
from bucketjit._jax.devices import device_name
from bucketjit._tracing.call import Call
from bucketjit._tracing.parameters import PLAIN_STATICS

# A `Combine` names its length by a dimension variable that is numbered as it is made, so the name
# differs between processes.
OWN_PRIMITIVES = Own(
    frozenset((size_constant_p, associative_scan_p, sized_p, unsized_p, *COMBINED)),
    {Combine: lambda own: (own.length, (own.jaxpr, own.axis, own.num_consts))},
)

_SINGLE = jax.sharding.SingleDeviceSharding


def device_of(leaves: Sequence[Any]) -> Any:
    """The device that ``jit`` would run a call on."""
    shardings = [getattr(x, "sharding", None) for x in leaves]
    placed: set[Any] = {s for s in shardings if s is not None}
    if not placed:
        return get_default_device()
    if len(placed) > 1 or not all(type(s) is _SINGLE for s in placed):
        raise NoDigest("its arguments are on several devices, or placed by a mesh")
    (device,) = placed.pop().device_set
    return device


def kind_of(call: Call, device: jax.Device) -> str:
    """A digest of what is known of a call before tracing, without the sizes of open axes."""
    signature = call.signature
    leaves = zip(signature.types, signature.specs, call.shapes, strict=True)
    return short_digest(
        getattr(signature.fn, "__module__", ""),
        getattr(signature.fn, "__qualname__", ""),
        device_name(device),
        [
            (str(kind.dtype), kind.weak_type, kind.rank, shape if spec is None else ())
            for kind, spec, shape in leaves
        ],
        [(i, _static_text(x)) for i, x in sorted(call.statics.positional.items())],
        [(name, _static_text(x)) for name, x in sorted(call.statics.keyword.items())],
    )


def _static_text(value: object) -> str:
    """A static argument as text; its type if its ``repr`` may differ between processes."""
    return repr(value) if type(value) in PLAIN_STATICS else type(value).__qualname__


def short_digest(*values: object) -> str:
    """The first 8 hexadecimal digits of the digest of some values."""
    return Digest().add(*values).hexdigest()[:8]


def digest_of(consts: Sequence[Any]) -> str:
    """The digest of the constants of a program."""
    return Digest(OWN_PRIMITIVES).add(*consts).hexdigest()


def type_text(value: object) -> str:
    """The shape, dtype and weak type of an array as one text."""
    aval = jax.typeof(value)
    return f"{aval.shape} {aval.dtype} {bool(getattr(aval, 'weak_type', False))}"


def placement_text(value: object) -> str:
    """Whether an argument is committed to its devices, as a text."""
    sharding = getattr(value, "sharding", None)
    return "anywhere" if sharding is None else "committed"
