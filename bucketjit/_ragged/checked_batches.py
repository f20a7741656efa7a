"""Checked batches, for tests: compare each row with other runs of itself, by `Check`.

`bucketjit._runtime.checked_calls` does the same for a call. A row that differs is run as a call of
its own, whose check names the equation to blame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bucketjit._compile.executable import Executable
from bucketjit._config import Check, Out
from bucketjit._masking.checks import POISONS, compare, failed
from bucketjit._ragged.batches import SharedArguments, launch, results_of
from bucketjit._ragged.kinds import Kinds, Row
from bucketjit._runtime.checked_calls import is_of_jit
from bucketjit._runtime.engine import Engine


def checked_results(
    engine: Engine,
    entry: Executable,
    rows: Sequence[Row],
    kinds: Kinds,
    shared: SharedArguments,
    out: Out,
) -> list[Any]:
    """Run a batch and compare its results."""
    check = engine.config.check
    if check is Check.POISON:
        runs = [
            results_of(launch(entry, rows, kinds, shared, poison), out)
            for poison in enumerate(POISONS)
        ]
        for row, one, other in zip(rows, *runs, strict=True):
            if problem := compare(one, other, "the same example with other padding", True):
                engine.serve(kinds.call_of(row), None, out)  # blames an equation
                raise failed(f"{engine.name}.map", problem, "")
        return runs[0]
    results = results_of(launch(entry, rows, kinds, shared), out)
    if check is Check.EXACT and entry.checked:
        return results
    for row, result in zip(rows, results, strict=True):
        signed = kinds.call_of(row)
        problem = compare(result, engine.run_unpadded(signed, row.kind.call), "it alone", False)
        if problem and not is_of_jit(engine.name, problem, signed, result):
            raise failed(f"{engine.name}.map", problem, "")
    entry.checked = True
    return results
