"""Every case, forward and gradient, against the plain run."""

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterable

import pytest

import tests.cases
from bucketjit.errors import MaskingError
from tests.harness import Case, check, gradient_of


def all_cases() -> list[Case]:
    found: list[Case] = []
    for module in pkgutil.iter_modules(tests.cases.__path__):
        found += importlib.import_module(f"tests.cases.{module.name}").CASES
    return found


def first_of_each(cases: Iterable[Case], count: int) -> list[Case]:
    """The first cases of each primitive, so many of each; other cases are of none."""
    seen: Counter[str] = Counter()
    first = []
    for case in cases:
        if any(seen[primitive] < count for primitive in case.covers):
            seen.update(case.covers)
            first.append(case)
    return first


CASES = all_cases()
# They take paths of rules that no first case takes, by the coverage of branches, or catch a mutant.
_ALSO = """
argmax_at_the_lowest_value argmax_small_index associative_linear_transpose
associative_per_example_gradient conv_same_2d conv_vmap_kernels cov_of_columns
dot_changes_sides_many_free get_fill kv_cache lax_last_two linalg_pinv_rows merge prod_hessian
random_total_bits_8 random_total_bits_per_key random_total_split reduce_closed_gradient
reduce_max_min_complex reduce_max_min_complex_nan reduce_the_rest scan_of_a_length
scan_of_an_array_and_its_length scatter_windows_leading_axis_partial_promise_in_bounds
searchsorted_compare_all searchsorted_unsorted sort_complex64 sort_float8_e5m2fnuz
take_filled_with_a_size window_adaptive_max window_min_tangent_valid
"""
_FIRST = first_of_each((case for case in CASES if not case.slow), 2)
DAILY = _FIRST + [case for case in CASES if case.name in _ALSO.split() and case not in _FIRST]
QUICK = first_of_each(_FIRST, 1)


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    if case not in DAILY:
        return [pytest.mark.slow]
    return [] if case in QUICK else [pytest.mark.further]


def test_names_are_unique() -> None:
    names = [c.name for c in CASES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=_marks(c), id=c.name) for c in CASES if not c.slow]
)
def test_case(case: Case) -> None:
    """Outputs, and the gradient beside them; without it where that is made of other primitives."""
    if not (case.grad and set(case.covers) <= check(case, fn=gradient_of(case))):
        check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_at_every_size(case: Case) -> None:
    check(case, whole=True)
    if case.grad:
        check(case, fn=gradient_of(case), whole=True)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_with_room(case: Case) -> None:
    """Arrays are longer than the largest sizes are, as where results come back as arguments.

    Operations on blocks may refuse an array that does not consist of whole ones.
    """
    try:
        check(case, room=1)
    except MaskingError as error:
        assert "whole blocks" in error.reason, error


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_paired(case: Case) -> None:
    """Programs of concrete traces do the same, though symbolic traces would do.

    What happens to be equal at the few sizes of a case may be refused, but not be wrong.
    """
    try:
        check(case, fn=gradient_of(case) if case.grad else None, paired=True)
    except MaskingError as error:
        assert "defect" not in error.remedy, error


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_without_poison(case: Case) -> None:
    check(case, fn=gradient_of(case) if case.grad else None, poisoned=False)
