"""Run random programs in batches, each in a process that can be thrown away."""

import gc
from collections import Counter
from typing import Any

BATCH = 40


def drawn(count: int, seed: int) -> list[Any]:
    """Programs drawn by Hypothesis, the same for the same seed."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as with_seed

    from tests.generated.programs import Generated, programs

    found: list[Generated] = []

    @with_seed(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    @given(programs())
    def collect(program: Generated) -> None:
        if program.lines:
            found.append(program)

    collect()
    return found


def run_batch(
    seeds: list[int], paired: bool = False
) -> tuple[Counter[str], Counter[str], list[str]]:
    """A batch for each seed: verdicts, reasons of refusals, failures with their source."""
    import jax

    from tests.generated.check import FAILED, REFUSED, verdict
    from tests.generated.shrink import shrink

    kinds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    failures = []
    drawn_programs = [p for seed in seeds for p in drawn(BATCH, seed)]
    for i, program in enumerate(drawn_programs):
        if i % 10 == 9:
            jax.clear_caches()
            gc.collect()
        found = verdict(program, paired)
        kinds[found.kind] += 1
        if found.kind == REFUSED:
            reasons[found.message] += 1
        if found.kind == FAILED:
            kind = type(found.error)
            small = shrink(program, lambda p, kind=kind: type(verdict(p, paired).error) is kind)
            failures.append(f"{small}\n  {verdict(small, paired).message}")
    return kinds, reasons, failures
