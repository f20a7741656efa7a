"""A fixed sample of JAX's own primitive cases: one of each primitive, then more of the common."""

import pytest

from tests.conformance.outcome import BAD, Outcome, share_masked
from tests.conformance.sweep import sweep

MAPPED, OPENED = 40, 20


def _report(outcomes: list[Outcome]) -> str:
    return "\n".join(f"{o.kind}: {o.reason}\n    {o.command}" for o in outcomes if o.kind in BAD)


@pytest.mark.slow
def test_mapped_over_an_open_batch_axis() -> None:
    outcomes = sweep("a", sample=MAPPED, seed=1, jobs=1)
    assert not _report(outcomes), _report(outcomes)
    assert share_masked(outcomes) >= 0.97


def test_every_axis_open() -> None:
    outcomes = sweep("b", sample=OPENED, seed=1, jobs=1)
    assert not _report(outcomes), _report(outcomes)
    assert all(o.reason for o in outcomes if o.kind != "masked")


@pytest.mark.slow
def test_gradient_over_an_open_batch_axis() -> None:
    outcomes = sweep("g", sample=MAPPED, seed=1, jobs=1)
    assert not _report(outcomes), _report(outcomes)
