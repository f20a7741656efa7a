"""The checks of `make accelerator`, on the device that is there: in CI a CPU."""

import jax
import pytest

from tests.accelerator.checks import CHECKS, Check
from tests.accelerator.on_device import NotShown

OF_RULES = ("core", "an encoder", "a CNN")


def _passes(check: Check) -> None:
    try:
        with jax.default_matmul_precision("highest"):
            assert check.run()
    except NotShown as reason:
        pytest.skip(str(reason))


@pytest.mark.sampled(3, "donation: arguments")
@pytest.mark.parametrize(
    "check", [c for c in CHECKS if not c.name.startswith(OF_RULES)], ids=lambda check: check.name
)
def test_arrays_and_resources(check: Check) -> None:
    _passes(check)


@pytest.mark.slow  # on a CPU, tests/test_cases.py shows more
@pytest.mark.parametrize(
    "check", [c for c in CHECKS if c.name.startswith(OF_RULES)], ids=lambda check: check.name
)
def test_rules(check: Check) -> None:
    _passes(check)
