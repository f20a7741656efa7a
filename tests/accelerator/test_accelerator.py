"""The checks of `make accelerator`, on the device that is there: in CI a CPU."""

import jax
import pytest

from tests.accelerator.checks import CHECKS
from tests.accelerator.on_device import NotShown

OF_RULES = [name for name in CHECKS if name.startswith(("core", "an encoder", "a CNN"))]


def passes(name: str) -> None:
    try:
        with jax.default_matmul_precision("highest"):
            assert CHECKS[name]()
    except NotShown as reason:
        pytest.skip(str(reason))


@pytest.mark.sampled(3, "donation: arguments")
@pytest.mark.parametrize("name", [name for name in CHECKS if name not in OF_RULES])
def test_arrays_and_resources(name: str) -> None:
    passes(name)


@pytest.mark.slow  # on a CPU, tests/test_cases.py shows more
@pytest.mark.parametrize("name", OF_RULES)
def test_rules(name: str) -> None:
    passes(name)
