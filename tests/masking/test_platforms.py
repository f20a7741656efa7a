"""What is masked in another way for other platforms: traced for them here, and run on the CPU."""

from typing import Any

import jax.numpy as jnp
import pytest

from bucketjit._jax.arrays import traced_for
from tests.cases import contractions, convolution, reductions
from tests.harness import Case, check, gradient_of, primitives_of
from tests.masked import masked_jaxpr

CASES = [c for module in (contractions, reductions, convolution) for c in module.CASES]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", [c for c in CASES if not c.slow], ids=lambda c: c.name)
def test_results_are_those_without_padding(case: Case) -> None:
    with traced_for({"tpu"}):
        check(case, fn=gradient_of(case) if case.grad else None)


@pytest.mark.parametrize(("platform", "selects"), [("tpu", False), ("cuda", True), ("cpu", True)])
def test_zeros_are_filled_by_bits_on_tpus(platform: str, selects: bool) -> None:
    with traced_for({platform}):
        jaxpr = masked_jaxpr(lambda x: jnp.einsum("bsd,bse->bde", x, x), "b, s, 4", padding=None)
    names = primitives_of(jaxpr.jaxpr)
    assert ("select_n" in names) == selects and ("and" in names) != selects


def test_infinities_and_nan_of_data_stay() -> None:
    def product(x: Any, y: Any) -> Any:
        return jnp.einsum("bsd,bse->bde", x, y)

    case = Case("product_special", product, ("b, s, 3", "b, s, 3"), domains=("special",), grad=True)
    with traced_for({"tpu"}):
        check(case, fn=gradient_of(case), whole=True)
