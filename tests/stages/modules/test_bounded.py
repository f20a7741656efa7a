"""Modules with bounds: their types, and what has none.

The compilers that take them are those of `tests/accelerator/test_cases.py`.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec, Check
from bucketjit._jax import stablehlo
from bucketjit.errors import ExportError
from tests.stages.modules.running import main_line, text


def struct(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def bucketed(fn: Callable[..., Any], axes: Any, **options: Any) -> BucketedExec:
    return BucketedExec(fn, dynamic_axes=axes, **options).with_pow2()


def two(x: Any, w: Any) -> Any:
    return jax.nn.softmax(x @ w, axis=0), jnp.sort(x, axis=0)[::-1], w.sum()


def test_every_open_argument_and_result_has_bounds_and_nothing_else() -> None:  # checks 1 and 6
    line = main_line(bucketed(two, ("b, _", None)).export_bounded(struct(5, 8), struct(8, 8)))
    types = re.findall(r"tensor<[^<>]*(?:<[^<>]*>)?>", line)
    open_ = "tensor<?x8xf32, #stablehlo.bounds<8, ?>>"
    assert types == [open_, "tensor<8x8xf32>", open_, open_, "tensor<f32>"]
    assert 'bucketjit.shape = "(b, 8)"' in line and 'jax.result_info = "result[0]"' in line


def test_it_verifies_and_converts_to_hlo_with_bounded_sizes() -> None:  # check 2
    from jaxlib import _jax

    artifact = bucketed(two, ("b, _", None)).export_bounded(struct(5, 8), struct(8, 8))
    module = stablehlo.read_module(artifact)
    assert module.operation.verify()
    import io

    written = io.BytesIO()
    module.operation.write_bytecode(written)
    computation = _jax.mlir.mlir_module_to_xla_computation(written.getvalue(), False, False)
    hlo = computation.as_hlo_module().to_string()
    assert "(Arg_0.1: f32[<=8,8], Arg_1.1: f32[8,8])" in re.sub(r"Arg_(\d)\.\d+", r"Arg_\1.1", hlo)
    assert "-> (f32[<=8,8], f32[<=8,8], f32[])" in hlo


def test_a_size_that_is_an_argument_is_a_scalar() -> None:
    def fn(x: Any, n: Any) -> Any:
        return jnp.ones(n).sum() + x, jnp.arange(n)

    artifact = bucketed(fn, ("b", "n")).export_bounded(struct(3), 5)
    line = main_line(artifact)
    assert 'tensor<i32> {bucketjit.shape = "n"}' in line


def test_a_size_that_no_argument_gives() -> None:
    executor = bucketed(jnp.cumsum, "n + floordiv(n, 4)")
    assert len(executor(np.ones(2, np.float32))) == 2
    with pytest.raises(ExportError, match="the size of n does not follow from the shapes"):
        executor.export_bounded(struct(2))


def test_it_is_written_for_the_oldest_version() -> None:  # check 7
    artifact = bucketed(two, ("b, _", None)).export_bounded(struct(5, 8), struct(8, 8))
    module = stablehlo.read_module(artifact)
    oldest = str(stablehlo.hlo.get_minimum_version())
    old = stablehlo.write_module(module, oldest)
    header = f"StableHLO_v{oldest}".encode()
    assert header in old and header not in artifact
    assert text(old) == text(artifact)


@pytest.mark.parametrize(
    ("executor", "args", "message"),
    [
        (
            BucketedExec(lambda x: jnp.linalg.eigh(x @ x.T)[1], dynamic_axes="n, _").with_pow2(),
            (struct(5, 3),),
            "cannot export with bounds: .*eigh",
        ),
        (BucketedExec(jnp.sum, dynamic_axes="n"), (struct(5),), "there is no strategy"),
        (bucketed(jnp.sum, None), (struct(),), "no axis is open"),
        (bucketed(lambda x: x * np.sqrt(x.shape[0]), "n"), (struct(5),), "is computed by Python"),
        (
            bucketed(lambda x: x if x.shape[0] > 4 else -x, "n"),
            (struct(6),),
            "at n=1 .*holds for n >= 5 only, .*promise others by constraints",
        ),
        (bucketed(lambda x: x.reshape(-1, 2).sum(0), "n"), (struct(6),), "n"),
        (
            bucketed(lambda x: jax.pure_callback(np.sin, x, x), "n"),
            (struct(6),),
            "calls back into Python",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::bucketjit.errors.FallbackWarning")
def test_what_has_no_such_module(executor: BucketedExec, args: Any, message: str) -> None:
    with pytest.raises(ExportError, match=message):  # check 8
        executor.export_bounded(*args)
    # After the error the executor works.
    (shape,) = [x.shape for x in args]
    x = rng().standard_normal(shape).astype(np.float32)
    np.testing.assert_allclose(executor(x), jax.jit(executor.__wrapped__)(x), rtol=1e-5, atol=1e-5)


def test_trees_and_keywords_are_flattened_in_order() -> None:
    def fn(batch: Any, *, scale: Any) -> Any:
        return {"out": batch["x"] * scale, "mean": batch["y"].mean()}

    executor = bucketed(fn, {"batch": {"x": "b", "y": "b"}})
    artifact = executor.export_bounded({"y": struct(3), "x": struct(3)}, scale=struct())
    line = main_line(artifact)
    assert line.index('"(b,)"') < line.index('"()"')
    assert "result['mean']" in line and "result['out']" in line


def test_a_checked_executor_exports_the_plain_program() -> None:
    executor = bucketed(jnp.cumsum, "n")
    checked = bucketed(jnp.cumsum, "n", check=Check.POISON)
    assert text(checked.export_bounded(struct(5))) == text(executor.export_bounded(struct(5)))


def test_constraints_promise_what_a_guard_asks_for() -> None:
    executor = bucketed(lambda x: x if x.shape[0] > 4 else -x, "n", constraints=["n >= 5"])
    assert "bounds<8>" in main_line(executor.export_bounded(struct(6)))


def test_an_argument_that_is_not_read_still_has_its_place() -> None:
    artifact = bucketed(lambda x, y: y * 2, ("a", "b")).export_bounded(struct(3), struct(5))
    assert main_line(artifact).count("%arg") == 2
