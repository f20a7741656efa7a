"""JAX's own primitive cases, exported over an open batch axis.

python -m tests.stages.harnesses --sample 400       how many export, with and without bucketjit
"""

import argparse
import warnings
from collections import Counter
from typing import Any

import jax
import numpy as np

from bucketjit import BucketedExec
from bucketjit.errors import ExportError
from tests.conformance.compare import difference
from tests.conformance.harnesses import Harness, harness, selection

SIZES = (3, 2)

BOTH, OURS, NEITHER, LOST, WRONG = "both", "bucketjit alone", "neither", "jax alone", "wrong"


def _rows(case: Harness, size: int) -> list[np.ndarray]:
    made = [case.make(seed) for seed in range(size)]
    return [np.stack(column) for column in zip(*made, strict=True)]


def _by_jax(fn: Any, args: list[np.ndarray]) -> Any:
    """What ``jax.export`` exports by itself; None if it does not."""
    (b,) = jax.export.symbolic_shape("b")
    structs = [jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in args]
    try:
        return jax.export.export(jax.jit(fn))(*structs)
    except Exception:
        return None


def outcome(index: int) -> tuple[str, str]:
    """Export one case.

    Returns:
        Who exports it, and why bucketjit does not or what is wrong.
    """
    case = harness(index)
    if not case.supported:
        return NEITHER, "JAX does not run it here"
    fn = jax.vmap(case.fn)
    try:
        args = [_rows(case, size) for size in SIZES]
        wanted = [jax.jit(fn)(*given) for given in args]
    except Exception:
        return NEITHER, "JAX does not map it"
    plain = _by_jax(fn, args[0])
    try:
        executor = BucketedExec(fn, dynamic_axes=("b, ...",) * len(args[0]))
        exported = executor.export_dynamic(*args[0])
    except ExportError as error:
        return (NEITHER if plain is None else LOST), f"{case.name}: {error}"
    for given, want in zip(args, wanted, strict=True):
        outs = [jax.tree.leaves(x) for x in (exported.call(*given), want)]
        if told := difference(*outs, case.primitive, tied_keys=case.tied_keys):
            return WRONG, f"{case.name}: {told}"
    return (OURS if plain is None else BOTH), ""


def main() -> None:
    """Export a sample and print how many do."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found: Counter[str] = Counter()
    for count, index in enumerate(selection(sample=options.sample, seed=options.seed)):
        kind, told = outcome(index)
        found[kind] += 1
        if kind in (LOST, WRONG):
            print(f"{kind}: {told[:400]}", flush=True)
        if count % 8 == 0:
            jax.clear_caches()
    print(dict(found))


if __name__ == "__main__":
    main()
