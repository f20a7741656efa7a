"""A sample of JAX's own primitive cases, exported over an open batch axis."""

import warnings
from collections import Counter

import pytest

from tests.conformance.harnesses import selection
from tests.stages.harnesses import BOTH, LOST, WRONG, outcome


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_whatever_jax_exports_is_exported() -> None:  # check 13 of dynamic modules
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [outcome(index) for index in selection(sample=24, seed=3)]
    assert [told for kind, told in found if kind in (LOST, WRONG)] == []
    assert Counter(kind for kind, _ in found)[BOTH] >= 12
