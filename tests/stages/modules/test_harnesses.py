"""A sample of JAX's own primitive cases, exported over an open batch axis."""

from typing import Any

import jax
import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit.errors import ExportError
from tests.conformance.compare import difference
from tests.conformance.harnesses import harness, selection


def exported_by_jax(fn: Any, args: list[np.ndarray]) -> Any:
    """What ``jax.export`` exports by itself; None if it does not."""
    (b,) = jax.export.symbolic_shape("b")
    structs = [jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in args]
    try:
        return jax.export.export(jax.jit(fn))(*structs)
    except Exception:
        return None


def is_exported_by_both(index: int) -> bool:
    """Export a case; what bucketjit exports is right, and it exports all that JAX does."""
    case = harness(index)
    fn = jax.vmap(case.fn)
    try:
        rows = [[case.make(seed) for seed in range(size)] for size in (3, 2)]
        calls = [[np.stack(column) for column in zip(*made, strict=True)] for made in rows]
        wanted = [jax.jit(fn)(*args) for args in calls]
    except Exception:  # JAX does not map it
        return False
    plain = exported_by_jax(fn, calls[0])
    executor = BucketedExec(fn, dynamic_axes=("b, ...",) * len(calls[0]))
    try:
        exported = executor.export_dynamic(*calls[0])
    except ExportError:
        assert plain is None, case.name
        return False
    for args, want in zip(calls, wanted, strict=True):
        leaves = [jax.tree.leaves(x) for x in (exported.call(*args), want)]
        assert not difference(*leaves, case.primitive, tied_keys=case.tied_keys), case.name
    return plain is not None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_whatever_jax_exports_is_exported() -> None:  # check 13 of dynamic modules
    indices = [i for i in selection(sample=24, seed=3) if harness(i).supported]
    assert sum(map(is_exported_by_both, indices)) >= 12
