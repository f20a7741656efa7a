"""What reshapes and scatters refuse, and what they say."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._masking.interpreter import interpret
from bucketjit._masking.rules import default_rules
from bucketjit._tracing.symbolic import trace
from bucketjit.errors import MaskingError
from tests.masking.rules.test_refusals_numeric import of, refusal


def test_reshape_beyond_int32() -> None:
    error = refusal(lambda x: x.reshape(x.shape[::-1]), of(("b", "s")), b=1 << 16, s=1 << 16)
    assert error.reason.startswith("reshape: it has more positions than int32 holds in this bucket")


def test_reshape_with_a_sharding() -> None:
    _, tree = jax.tree_util.tree_flatten(((0,), {}))
    program = trace(lambda x: x.reshape(-1), tree, [of(("b", 2))], {"b": 4})
    (eqn,) = program.jaxpr.eqns
    eqn = eqn.replace(params={**eqn.params, "sharding": object()})
    jaxpr = program.jaxpr.replace(eqns=[eqn])
    sizes = BucketSizes({"b": 4}, program.lower, {"b": 3})
    with pytest.raises(MaskingError, match="reshape: a reshape with an explicit sharding"):
        interpret(jaxpr, (), [jnp.ones((4, 2))], sizes, default_rules())


def test_scatter_without_an_index() -> None:
    numbers = lax.ScatterDimensionNumbers((1,), (), ())

    def fn(x: Any, y: Any) -> Any:
        return lax.scatter_add(x, jnp.zeros((y.shape[0], 0), jnp.int32), y, numbers)

    error = refusal(fn, of((3,)), of(("t", 3)), t=4)
    assert error.reason.startswith(
        "scatter-add: it has no index by which to drop the updates of padded rows"
    )
