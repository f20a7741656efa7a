"""What is lowered and compiled ahead of time: texts, types, options, where it is kept."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec, Check, Fallback
from bucketjit.errors import (
    ArgumentError,
    BucketOverflowError,
    CompileBudgetError,
    FallbackError,
    FallbackWarning,
    SpecError,
)
from bucketjit.stages import Compiled, Lowered, Traced
from tests.comparison import assert_same, ramp, unrolled

Count = Callable[[], int]


def score(params: Any, x: Any) -> Any:
    logits = x @ params["w"] + params["b"]
    return {"best": jax.nn.softmax(logits, axis=0), "total": logits.sum()}


PARAMS = {"w": ramp(8, 4), "b": ramp(4)}


def rows(n: int) -> np.ndarray:
    return ramp(n, 8) / 16


def scorer(**options: Any) -> BucketedExec:
    return BucketedExec(score, dynamic_axes=(None, "b, _"), **options).with_pow2()


def eigen(x: Any) -> Any:
    return jnp.linalg.eigvalsh(x + x.T)


def drawn(x: Any) -> Any:
    return x + jax.random.uniform(jax.random.key(0, impl="rbg"), x.shape)


def square(n: int) -> np.ndarray:
    return np.eye(n, dtype=np.float32) * ramp(n)


# --- check 6: what stands for arrays ---


def test_6_structs_arrays_and_shardings() -> None:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    struct = jax.ShapeDtypeStruct
    params = jax.tree.map(lambda p: struct(p.shape, p.dtype), PARAMS)
    want = jax.jit(score)(PARAMS, rows(3))
    for x in (rows(5), jnp.asarray(rows(5)), struct((5, 8), np.float32)):
        for p in (params, PARAMS):
            assert_same(scorer().lower(p, x).compile()(PARAMS, rows(3)), want)
    placed = scorer().lower(params, struct((5, 8), np.float32, sharding=device)).compile()
    given = jax.device_put(rows(3), device)
    assert_same(placed(PARAMS, given), jax.jit(score)(PARAMS, given))
    keys = BucketedExec(lambda k, x: x + jax.random.normal(k, x.shape), dynamic_axes=(None, "n"))
    keys = keys.with_pow2()
    lowered = keys.lower(struct((), jax.random.key(0).dtype), struct((5,), np.float32))
    assert lowered.compile()(jax.random.key(1), ramp(3)).shape == (3,)


# --- check 8: texts ---


def test_8_texts_are_static_and_argument_0_is_the_sizes() -> None:
    lowered = scorer().lower(PARAMS, rows(5))
    text = lowered.as_text()
    assert "?" not in text and text == lowered.as_text("stablehlo")
    assert re.search(r"@main\(%arg0: tensor<1xi32>", text)
    assert "tensor<8x8xf32>" in text
    assert "loc(" in lowered.as_text(debug_info=True) and "loc(" not in text
    assert lowered.as_text("hlo").startswith("HloModule")
    assert lowered.compiler_ir().operation.verify()
    assert "HloModule" in lowered.compiler_ir("hlo").as_hlo_text()
    for wrong in ("mhlo", "", 3):
        with pytest.raises(SpecError, match="dialect must be 'stablehlo'"):
            lowered.as_text(wrong)  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="dialect must be 'stablehlo'"):
            lowered.compiler_ir(wrong)  # type: ignore[arg-type]


# --- check 9: analyses ---


def test_9_costs_memory_and_executable() -> None:
    lowered = scorer().lower(PARAMS, rows(5))
    compiled = lowered.compile()
    for stage in (lowered, compiled):
        assert stage.cost_analysis()["flops"] > 0
    assert compiled.memory_analysis().argument_size_in_bytes > 0
    assert compiled.runtime_executable().local_devices() == jax.devices()[:1]
    assert "HloModule" in str(compiled.as_text())
    in_shardings, _ = compiled.input_shardings
    assert jax.tree.structure(in_shardings) == jax.tree.structure((PARAMS, 0))
    assert jax.tree.leaves(compiled.output_shardings) == [in_shardings[1]] * 2
    formats, named = compiled.input_formats
    assert formats[1].sharding == in_shardings[1] and named == {}
    assert formats[1].layout.major_to_minor == (0, 1)
    assert compiled.output_formats["best"].layout.major_to_minor == (0, 1)


def test_9_an_argument_that_is_not_read_has_no_sharding() -> None:
    executor = BucketedExec(lambda x, y: x.mean(), dynamic_axes=("n", None)).with_pow2()
    compiled = executor.lower(ramp(3), ramp(2)).compile()
    (first, second), _ = compiled.input_shardings
    assert first is not None and second is None


# --- check 10: trees and types ---


def _sizes(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(n if isinstance(n, int) else str(n) for n in shape)


def _open(types: Any, at: dict[int, str]) -> list[Any]:
    """Shapes and dtypes, with variables in the place of these sizes."""
    leaves = jax.tree.leaves(types)
    return [(tuple(at.get(n, n) for n in _sizes(x.shape)), x.dtype) for x in leaves]


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("donate", [(), (1,)])
def test_10_trees_and_types_are_those_of_jax(donate: tuple[int, ...]) -> None:
    args = PARAMS, ramp(13, 8)
    theirs = jax.jit(score, donate_argnums=donate).lower(*args)
    executor = scorer(donate_argnums=donate)
    lowered = executor.lower(*args)
    for ours in (executor.trace(*args), lowered, lowered.compile()):
        assert ours.in_tree == theirs.in_tree
        assert ours.out_tree == theirs.out_tree
        assert jax.tree.structure(ours.in_avals) == jax.tree.structure(theirs.in_avals)
        assert _open(ours.in_avals, {}) == _open(theirs.in_avals, {13: "b"})
        assert _open(ours.out_info, {}) == _open(theirs.out_info, {13: "b"})
        assert ours.donate_argnums == theirs.donate_argnums
        infos = jax.tree.leaves(ours.args_info)
        wanted = jax.tree.leaves(theirs.args_info)
        assert [x.donated for x in infos] == [x.donated for x in wanted]
        assert _open(ours.args_info, {}) == _open(theirs.args_info, {13: "b"})
    assert str(lowered.in_avals[0][1]) == "float32[b,8]"


def test_10_named_arguments_and_sizes() -> None:
    executor = BucketedExec(lambda n, *, x: x.sum() + n, dynamic_axes=("n", {"x": "n"}))
    lowered = executor.with_pow2().lower(5, x=ramp(5))
    theirs = jax.jit(lambda n, *, x: x.sum() + n).lower(5, x=ramp(5))
    assert lowered.in_tree == theirs.in_tree
    assert lowered.in_avals[0] == theirs.in_avals[0]
    assert str(lowered.in_avals[1]["x"]) == "float32[n]"


def test_10_traced() -> None:
    traced = scorer().trace(PARAMS, rows(5))
    assert isinstance(traced, Traced)
    assert [str(v.aval) for v in traced.jaxpr.jaxpr.invars][-1] == "float32[b,8]"
    assert [str(a) for a in jax.tree.leaves(traced.out_avals)] == ["float32[b,4]", "float32[]"]
    assert traced.fun_name == "score" and traced.guards == ()
    assert repr(traced) == "Traced(score: b=8)"
    assert isinstance(traced.lower(), Lowered)
    exact = BucketedExec(score).trace(PARAMS, rows(5))
    assert exact.exact and exact.guards == ()
    assert [str(v.aval) for v in exact.jaxpr.jaxpr.invars][-1] == "float32[5,8]"


# --- where the executable is kept ---


def test_a_later_call_compiles_nothing(xla_compiles: Count) -> None:
    events: list[Any] = []
    executor = scorer().with_on_event(events.append)
    lowered = executor.lower(PARAMS, rows(5))
    before = xla_compiles()
    compiled = lowered.compile()
    assert xla_compiles() == before + 1
    assert [e.kind for e in events if e.kind != "signature"] == ["compile"]
    executor(PARAMS, rows(7))
    assert lowered.compile()(PARAMS, rows(2))["total"].shape == ()
    executor(PARAMS, rows(9))
    assert executor.lower(PARAMS, rows(10)).compile()(PARAMS, rows(11))["total"].shape == ()
    assert compiled(PARAMS, rows(3))["total"].shape == ()
    assert xla_compiles() == before + 2
    assert executor.stats().compiles == 2 and executor.cache_info().misses == 2
    assert executor.cache_info().hits >= 1


def test_compiled_again_after_an_eviction() -> None:
    executor = scorer().with_maxsize(1)
    lowered = executor.lower(PARAMS, rows(5))
    lowered.compile()
    executor(PARAMS, rows(20))
    assert_same(lowered.compile()(PARAMS, rows(3)), jax.jit(score)(PARAMS, rows(3)), rtol=1e-5)
    assert [dict(b.sizes) for b in executor.stats().buckets] == [{"b": 8}]


def test_files_are_read_and_written(tmp_path: Path, xla_compiles: Count) -> None:
    scorer().with_persistence(tmp_path).lower(PARAMS, rows(5)).compile()
    again = scorer().with_persistence(tmp_path)
    lowered = again.lower(PARAMS, rows(5))
    before = xla_compiles()
    compiled = lowered.compile()
    assert again.stats().loads == 1 and xla_compiles() == before
    assert_same(compiled(PARAMS, rows(3)), jax.jit(score)(PARAMS, rows(3)), rtol=1e-5)
    # What was read from a file tells the same as what was compiled.
    assert "HloModule" in str(compiled.as_text()) and compiled.cost_analysis()["flops"] > 0
    (_, x), _ = compiled.input_shardings
    assert x == compiled.output_shardings["total"]
    assert compiled.input_formats[0][1].layout.major_to_minor == (0, 1)
    with pytest.raises(ArgumentError, match=r"x: compiled for float32\[b, 8\]"):
        compiled(PARAMS, rows(3).astype(np.float16))


def test_background_compiles_and_budgets() -> None:
    executor = scorer().with_background_compile()
    executor(PARAMS, rows(30))
    compiled = executor.lower(PARAMS, rows(5)).compile()  # no stand-in
    assert dict(compiled.bucket) == {"b": 8} == dict(executor.stats().buckets[-1].sizes)
    spent = scorer(compile_budget=1)
    spent.lower(PARAMS, rows(5)).compile()
    other = spent.lower(PARAMS, rows(20))
    for options in (None, {"xla_cpu_enable_fast_math": True}):
        with pytest.raises(CompileBudgetError, match="b=32"):
            other.compile(options)
    spent.lower(PARAMS, rows(5)).compile()


# --- check 13: what is not masked ---


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "while it is traced": (unrolled, "unrolled"),
    "while it is built": (drawn, "random_bits"),
}


@pytest.mark.parametrize("when", REFUSED)
def test_13_what_cannot_be_masked_follows_the_policy(when: str) -> None:
    fn, why = REFUSED[when]
    strict = BucketedExec(fn, dynamic_axes="n", fallback=Fallback.ERROR).with_pow2()
    with pytest.raises(FallbackError, match=why):
        strict.lower(ramp(3))
    lenient = BucketedExec(fn, dynamic_axes="n").with_pow2()
    with pytest.warns(FallbackWarning, match=why):
        lowered = lenient.lower(ramp(3))
    assert lowered.exact and dict(lowered.bucket) == {"n": 3}
    assert repr(lowered) == f"Lowered({fn.__name__}: exact, n=3)"
    assert "%arg0: tensor<3xf32>" in lowered.as_text()
    compiled = lowered.compile()
    for _ in range(2):
        assert_same(compiled(ramp(3)), jax.jit(fn)(ramp(3)))
        with pytest.raises(ArgumentError, match=r"x: compiled for float32\[3\], called with "):
            compiled(ramp(4))
    assert lenient.stats().fallback_calls == 0  # nothing was called by the executor
    assert lenient.lower(ramp(3)).exact  # known by now, so no second warning
    with pytest.raises(ArgumentError):
        jax.jit(compiled)(ramp(4))
    np.testing.assert_allclose(jax.jit(compiled)(ramp(3)), jax.jit(fn)(ramp(3)), rtol=1e-5)


def test_13_eigenvalues_are_masked() -> None:
    strict = BucketedExec(eigen, dynamic_axes="n, n", fallback=Fallback.ERROR).with_pow2()
    compiled = strict.lower(square(3)).compile()
    assert not compiled.exact
    np.testing.assert_allclose(compiled(square(4)), eigen(square(4)), rtol=1e-5, atol=1e-5)


def test_13_an_exact_size_argument() -> None:
    executor = BucketedExec(lambda n, x: x * n + jnp.zeros(n), dynamic_axes=("n", "n"))
    compiled = executor.lower(3, ramp(3)).compile()
    assert compiled.exact
    assert_same(compiled(3, ramp(3)), jax.jit(lambda x: x * 3 + jnp.zeros(3))(ramp(3)))
    assert_same(compiled(np.int64(3), ramp(3)), compiled(3, ramp(3)))
    with pytest.raises(ArgumentError, match="n: compiled for an int, the size 3, called with 4"):
        compiled(4, ramp(3))


def test_13_sizes_beyond_the_largest_bucket() -> None:
    small = BucketedExec(score, dynamic_axes=(None, "b, _")).with_buckets([4, 8])
    with pytest.raises(BucketOverflowError, match="beyond the largest bucket 8"):
        small.lower(PARAMS, rows(9))


# --- check 15: options of the compiler ---


def test_15_options_of_one_executable() -> None:
    executor = scorer()
    lowered = executor.lower(PARAMS, rows(5))
    for wrong, message in (
        ({"bad": 1}, "'bad'"),
        ({"xla_cpu_enable_fast_math": "text"}, "xla_cpu_enable_fast_math"),
        ({3: 1}, r"compiler_options\[3\]"),
        ({"bad": None}, r"compiler_options\['bad'\]"),
        ([1], "must be a dict"),
    ):
        with pytest.raises(SpecError, match=message):
            lowered.compile(wrong)  # type: ignore[arg-type]
    assert executor.cache_size() == 0
    apart = lowered.compile({"xla_cpu_enable_fast_math": True})
    assert_same(apart(PARAMS, rows(3)), jax.jit(score)(PARAMS, rows(3)), rtol=1e-5)
    assert executor.cache_size() == 0 and executor.stats().compiles == 1
    plain = lowered.compile({})
    assert executor.cache_size() == 1
    assert plain.runtime_executable() is not apart.runtime_executable()
    exact = BucketedExec(score).lower(PARAMS, rows(5))
    with pytest.raises(SpecError, match="'bad'"):
        exact.compile({"bad": 1})
    assert isinstance(exact.compile({"xla_cpu_enable_fast_math": True}), Compiled)


def test_15_options_of_the_executor_hold_too() -> None:
    executor = scorer(compiler_options={"xla_cpu_enable_fast_math": True})
    lowered = executor.lower(PARAMS, rows(5))
    assert_same(lowered.compile()(PARAMS, rows(3)), jax.jit(score)(PARAMS, rows(3)), rtol=1e-5)
    wrong = scorer(compiler_options={"bad": 1}).lower(PARAMS, rows(5))
    with pytest.raises(SpecError, match="'bad'"):
        wrong.compile()


# --- errors while lowering ---


def test_errors_of_the_function_and_of_arguments() -> None:
    executor = scorer()
    with pytest.raises(TypeError, match="dot_general"):
        executor.lower(PARAMS, ramp(5, 7))
    with pytest.raises(ArgumentError, match="params"):
        executor.lower({"w": "text", "b": 1}, rows(5))
    with pytest.raises(ArgumentError):
        executor.lower(PARAMS, ramp(8))
    assert executor.lower(PARAMS, rows(5)).compile()(PARAMS, rows(2))["best"].shape == (2, 4)


def test_bounded_modules_have_a_method_of_their_own() -> None:
    with pytest.raises(SpecError, match="'stablehlo' or 'hlo'.*export_bounded"):
        scorer().lower(PARAMS, rows(5)).as_text("stablehlo-bounded")
    poisoned = scorer(check=Check.POISON)
    assert poisoned.export_bounded(PARAMS, rows(5)).startswith(b"ML\xefR")
