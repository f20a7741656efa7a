"""What reductions, contractions and orderings refuse, and what they say."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit import BucketedExec, Fallback
from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._ir.program import Leaf
from bucketjit._masking.interpreter import interpret
from bucketjit._masking.rules import default_rules
from bucketjit._tracing.symbolic import trace
from bucketjit.errors import FallbackError, MaskingError


def refusal(fn: Callable[..., Any], *leaves: Leaf, **bucket: int) -> MaskingError:
    """The refusal of a function at a bucket; nothing is computed."""
    _, tree = jax.tree_util.tree_flatten(((*(0,) * len(leaves),), {}))
    program = trace(fn, tree, leaves, bucket)
    sizes = BucketSizes(bucket, program.lower, bucket)
    args = [
        jax.ShapeDtypeStruct(sizes.padded_shape(shape), leaf.dtype)
        for shape, leaf in zip(program.in_shapes, leaves, strict=True)
    ]

    def run(*args: Any) -> Any:
        return interpret(program.jaxpr, program.consts, args, sizes, default_rules())

    with pytest.raises(MaskingError) as caught:
        jax.eval_shape(run, *args)
    return caught.value


def of(shape: tuple[int | str, ...], dtype: str = "float32") -> Leaf:
    return Leaf("x", shape, jnp.dtype(dtype))


@pytest.mark.parametrize("fn", [lax.cummax, lax.cummin])
def test_complex_cumulative_order(fn: Callable[..., Any]) -> None:
    error = refusal(fn, of(("s",), "complex64"), s=4)
    assert error.reason.startswith(
        f"{fn.__name__}: complex numbers have no order next to a NaN, so padding would change"
    )


@pytest.mark.parametrize("nested", [False, True])
def test_reduce_with_a_function_of_a_size(nested: bool) -> None:
    def fn(x: Any) -> Any:
        scaled = lambda a, b: a + b * x.shape[0]  # noqa: E731
        return lax.reduce(x, 0.0, jax.jit(scaled) if nested else scaled, (0,))

    error = refusal(fn, of(("s",)), s=4)
    assert error.reason.startswith("reduce: its function reads a symbolic size")


def test_scaled_dot_with_broken_blocks() -> None:
    def fn(x: Any, y: Any, sx: Any, sy: Any) -> Any:
        return lax.scaled_dot(x, y, lhs_scale=sx, rhs_scale=sy)

    operands = [of((3, "2*s"), "bfloat16"), of(("2*s", 3), "bfloat16")]
    error = refusal(fn, *operands, of((3, 2)), of((2, 3)), s=4)
    assert "scaled_dot: a padded axis would not consist of whole blocks" in error.reason


def test_approximate_search_on_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    error = refusal(lambda x: lax.approx_max_k(x, 1), of(("s",)), s=4)
    assert "what an approximate search finds depends on the size of the axis" in error.reason
    assert error.remedy == "use lax.top_k"


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e8m0fnu"])
def test_top_k_of_floats_without_a_least_value(dtype: str) -> None:
    error = refusal(lambda x: lax.top_k(x, 1), of(("s",), dtype), s=4)
    assert f"top_k: {dtype} has nothing that is below all else" in error.reason


def test_approximate_search_that_returns_more_than_k() -> None:
    def fn(x: Any) -> Any:
        return lax.approx_max_k(x, 1, aggregate_to_topk=False)

    why = "returns depends on the size of the axis|symbolic"  # jax 0.10 does not trace it
    with pytest.raises(FallbackError, match=why):
        BucketedExec(fn, fallback=Fallback.ERROR).with_pow2()(np.ones(3, np.float32))


def test_approximate_search_among_narrow_floats() -> None:
    error = refusal(lambda x: lax.approx_min_k(x, 1), of(("s",), "float8_e4m3fn"), s=4)
    assert "an approximate search orders float8_e4m3fn by itself" in error.reason


def test_a_dtype_without_zero() -> None:
    ones = of(("s", 3), "float8_e8m0fnu")
    error = refusal(lambda x: lax.dot(x.T, x, preferred_element_type="float32"), ones, s=4)
    assert "padding of 0 in float8_e8m0fnu, which has no 0" in error.reason


def test_size_beyond_int32() -> None:
    error = refusal(
        lambda x, y: x.shape[0] * y.shape[0], of(("b",)), of(("s",)), b=1 << 16, s=1 << 16
    )
    assert "does not fit into int32 in this bucket" in error.reason


def test_sizes_that_jax_does_not_compare() -> None:
    def folded(x: Any, y: Any) -> Any:
        pair = lambda a, b: (a[0] + b[0], a[1] + b[1])  # noqa: E731
        return lax.reduce((x, y), (0.0, 0.0), pair, (0,))

    error = refusal(folded, of(("s", 2)), of((4, 2)), s=4)
    assert error.reason.startswith(
        "reduce: an axis of size s meets one of size 4, which it must equal"
    )
    solve = lambda a, b: lax.linalg.triangular_solve(a, b)  # noqa: E731
    error = refusal(solve, of(("b", 3, 3)), of((4, 3, 3)), b=4)
    assert "an axis of size b meets one of size 4" in error.reason


def test_half_a_spectrum_of_a_static_transform() -> None:
    fn = lambda x: lax.fft(x, "IRFFT", (6,))  # noqa: E731
    error = refusal(fn, of((2, "s"), "complex64"), s=4)
    assert "fft: an axis of symbolic size s meets the static length 6" in error.reason
