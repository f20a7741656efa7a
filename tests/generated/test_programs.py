"""Random programs, padded with poison at every equation, against the plain run."""

import gc
import itertools

import jax
import pytest
from hypothesis import HealthCheck, Phase, assume, event, given, settings

from tests.generated.check import INVALID, verdict
from tests.generated.programs import Generated, programs

FEW = settings(
    max_examples=5,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),
)
MANY = settings(FEW, max_examples=400, derandomize=False, print_blob=True)
_count = itertools.count(1)


def check(program: Generated, paired: bool = False) -> None:
    """Masked agrees with exact, or masking is refused with a reason."""
    if next(_count) % 20 == 0:  # an executable holds about a hundred memory maps
        jax.clear_caches()
        gc.collect()
    found = verdict(program, paired)
    assume(found.kind != INVALID)
    event(f"{found.kind} {found.message}")
    if found.error is not None:
        raise AssertionError(repr(program)) from found.error


@FEW
@given(programs())
def test_generated_programs(program: Generated) -> None:
    check(program)


@FEW
@given(programs())
def test_generated_programs_of_concrete_traces(program: Generated) -> None:
    check(program, paired=True)


@pytest.mark.slow
@MANY
@given(programs())
def test_many_generated_programs(program: Generated) -> None:
    check(program)
