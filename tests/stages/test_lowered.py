"""What is lowered and compiled ahead of time: texts, types, options, where it is kept."""

from __future__ import annotations

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
    keys = BucketedExec(
        lambda k, x: x + jax.random.normal(k, x.shape), dynamic_axes=(None, "n")
    ).with_pow2()
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


def test_8_sizes_are_in_the_order_of_the_variables() -> None:
    executor = BucketedExec(
        lambda x, y: (x.mean(0).sum(), y.mean(0).sum()), dynamic_axes=("b, s", "t, b")
    ).with_pow2()
    lowered = executor.lower(ramp(3, 5), ramp(9, 3))
    assert lowered.variables == ("b", "s", "t")
    assert dict(lowered.bucket) == {"b": 4, "s": 8, "t": 16}
    assert "%arg0: tensor<3xi32>" in lowered.as_text()
    with pytest.raises(TypeError):
        lowered.bucket["b"] = 1  # type: ignore[index]


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


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_10_at_exact_shapes_the_types_are_equal() -> None:
    plain = BucketedExec(score, dynamic_axes=(None, "b, _"), donate_argnums=1)
    theirs = jax.jit(score, donate_argnums=1).lower(PARAMS, rows(5))
    lowered = plain.lower(PARAMS, rows(5))
    assert lowered.exact and lowered.variables == ()
    for ours in (lowered, plain.trace(PARAMS, rows(5)), lowered.compile()):
        assert ours.in_avals == theirs.in_avals
        assert ours.in_tree == theirs.in_tree and ours.out_tree == theirs.out_tree
        assert _open(ours.out_info, {}) == _open(theirs.out_info, {})
        assert ours.donate_argnums == theirs.donate_argnums


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


def test_10_a_bucket_of_ones_own() -> None:
    traced = scorer().trace(PARAMS, rows(5))
    compiled = traced.lower({"b": 12}).compile()
    for n in (5, 9, 12):
        assert_same(compiled(PARAMS, rows(n)), jax.jit(score)(PARAMS, rows(n)), rtol=1e-5)
    for wrong, message in (
        ({"b": 4}, r"bucket\['b'\] must be an int of at least 5"),
        ({"b": 9.0}, "must be an int"),
        ({"b": True}, "must be an int"),
        ({"c": 9}, "names 'c'; the variables are b"),
        (9, "bucket must be a dict such as {'n': 16}, got 9"),
    ):
        with pytest.raises(SpecError, match=message):
            traced.lower(wrong)
    assert dict(traced.lower({"b": np.int64(12)}).bucket) == {"b": 12}
    even = BucketedExec(
        lambda x: (x[::2] + x[1::2]).mean(), dynamic_axes="n", constraints=["mod(n, 2) == 0"]
    ).with_pow2()
    with pytest.raises(SpecError, match="does not hold at n=9"):
        even.trace(ramp(4)).lower({"n": 9})
    with pytest.raises(SpecError, match="runs at its exact shape"):
        BucketedExec(score).trace(PARAMS, rows(5)).lower({"b": 8})


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
    assert compiled(PARAMS, rows(3))["total"].shape == ()
    assert xla_compiles() == before + 1
    assert executor.stats().compiles == 1 and executor.cache_info().misses == 1
    assert executor.cache_info().hits >= 1


def test_an_earlier_call_has_compiled_it(xla_compiles: Count) -> None:
    executor = scorer()
    executor(PARAMS, rows(7))
    before = xla_compiles()
    executor.lower(PARAMS, rows(5)).compile()(PARAMS, rows(6))
    assert xla_compiles() == before


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


def test_13_other_reasons_to_be_exact(xla_compiles: Count) -> None:
    plain = BucketedExec(score, dynamic_axes=(None, "b, _"), fallback=Fallback.ERROR)
    lowered = plain.lower(PARAMS, rows(5))
    assert lowered.exact and dict(lowered.bucket) == {"b": 5}
    compiled = lowered.compile()
    assert_same(compiled(PARAMS, rows(5)), jax.jit(score)(PARAMS, rows(5)))
    before = xla_compiles()
    plain(PARAMS, rows(5))
    assert xla_compiles() == before
    empty = scorer().lower(PARAMS, rows(0))
    assert empty.exact and empty.compile()(PARAMS, rows(0))["best"].shape == (0, 4)
    fixed = BucketedExec(score, dynamic_axes=(None, None)).with_pow2().lower(PARAMS, rows(5))
    assert fixed.exact and dict(fixed.bucket) == {}
    served = fixed.compile()
    for _ in range(3):
        assert_same(served(PARAMS, rows(5)), jax.jit(score)(PARAMS, rows(5)))
    with pytest.raises(ArgumentError, match=r"x: compiled for float32\[5, 8\]"):
        served(PARAMS, rows(4))
    with pytest.raises(ArgumentError, match=r"params\['w'\]: compiled for float32\[8, 4\]"):
        served({**PARAMS, "w": ramp(8, 5)}, rows(5))


def test_inside_of_transformations_the_types_of_tracers_are_taken() -> None:
    executor = scorer()
    found = []

    @jax.jit
    def outer(x: Any) -> Any:
        lowered = executor.lower(PARAMS, x)
        found.append((lowered.in_avals, executor.trace(PARAMS, x).guards))
        return lowered.compile()(PARAMS, x)

    assert_same(outer(rows(5)), jax.jit(score)(PARAMS, rows(5)), rtol=1e-5)
    assert_same(jax.vmap(outer)(rows(5)[None])["best"][0], outer(rows(5))["best"], rtol=1e-5)
    assert found[0] == (executor.lower(PARAMS, rows(5)).in_avals, ())
    assert_same(executor(PARAMS, rows(6)), jax.jit(score)(PARAMS, rows(6)), rtol=1e-5)


def test_disable_jit_changes_neither_stages_nor_modules() -> None:
    def last(x: Any) -> Any:
        return jax.lax.scan(lambda c, row: (c * 0.5 + row, None), jnp.zeros(8), x)[0]

    executor = BucketedExec(last, dynamic_axes="n, _").with_pow2()
    with jax.disable_jit():
        assert not executor.trace(rows(5)).exact
        compiled = executor.lower(rows(5)).compile()
        assert_same(compiled(rows(6)), last(rows(6)), rtol=1e-5)  # runs the function itself
        exported = executor.export_dynamic(rows(5))
        assert executor.export_bounded(rows(5)).startswith(b"ML\xefR")
    for served in (compiled, exported.call, executor):
        np.testing.assert_allclose(served(rows(7)), last(rows(7)), rtol=1e-5)
    assert executor.stats().compiles == 1


def test_6_a_struct_has_the_sharding_of_a_mesh_of_one_device() -> None:
    mesh = jax.make_mesh((1,), ("d",), (jax.sharding.AxisType.Explicit,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    given = jax.device_put(rows(8), sharding)
    executor = BucketedExec(lambda x: x * 2, dynamic_axes="n, _").with_pow2()
    struct = jax.ShapeDtypeStruct(given.shape, given.dtype, sharding=sharding)
    compiled = executor.lower(struct).compile()
    assert_same(compiled(given), executor(given))
    assert executor.stats().compiles == 1


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
