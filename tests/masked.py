"""The masked program of a function, to look at what it is made of."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._masking.interpreter import interpret
from bucketjit._masking.rules import default_rules
from tests.harness import traced

LOGICAL, PADDED = 4, 8


def masked_jaxpr(fn: Callable[..., Any], *shapes: str, padding: Any = 0) -> Any:
    """What is compiled for a function of float32 arrays, every dimension variable at 8.

    Args:
        fn: The function.
        shapes: Shape of each argument, such as ``"b, 4"``.
        padding: What the padding of the arguments holds, or None if that is not known.
    """
    names = sorted({v for s in shapes for v in s.split(", ") if v.isalpha()})
    program = traced(fn, "; ".join(shapes), **dict.fromkeys(names, LOGICAL))

    def run(values: Any, *args: Any) -> Any:
        sizes = BucketSizes(dict.fromkeys(names, PADDED), program.lower, values)
        table = default_rules()
        return interpret(program.jaxpr, program.consts, args, sizes, table, padding=padding)

    padded = [
        np.zeros([int(d) if d.isdigit() else PADDED for d in s.split(", ")], "f4") for s in shapes
    ]
    return jax.make_jaxpr(run)(dict.fromkeys(names, np.int32(3)), *padded)
