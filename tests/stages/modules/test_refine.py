"""Fixing the sizes of serialized modules."""

import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec
from bucketjit._jax import stablehlo
from bucketjit.errors import ExportError, MissingExtraError
from tests.comparison import assert_close, floats
from tests.stages.modules.running import in_another_process, main_line, run, text


def fn(x: Any, w: Any) -> Any:
    return jax.nn.softmax(x @ w, axis=0).mean(axis=0), jnp.sort(x, axis=0)[1:]


def struct(*shape: Any, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def exported(constraints: tuple[str, ...] = (), **options: Any) -> jax.export.Exported:
    executor = BucketedExec(fn, dynamic_axes=("b, s", "s, s"), constraints=constraints)
    return executor.export_dynamic(struct(5, 4), struct(4, 4), **options)


@pytest.fixture(scope="module")
def blob() -> bytes:
    return bytes(exported(("b >= 4",)).serialize())


def types(artifact: bytes) -> list[str]:
    """The types of the arguments and results."""
    return re.findall(r"tensor<(\w+)>", main_line(artifact))


def test_every_size_is_fixed(blob: bytes) -> None:  # check 1
    fixed = bucketjit.refine(blob, {"b": 16, "s": 8})
    assert types(fixed) == ["16x8xf32", "8x8xf32", "8xf32", "15x8xf32"]
    assert "?" not in text(fixed)
    assert "jax.uses_shape_polymorphism = false" in text(fixed)
    # Modules that jax.export has made itself are refined, too.
    b, s = jax.export.symbolic_shape("b, s")
    own = jax.export.export(jax.jit(fn))(struct(b, s), struct(s, s)).serialize()
    assert main_line(bucketjit.refine(own, {"b": 16, "s": 8})) == main_line(fixed)


def test_another_process_runs_both_without_the_source(blob: bytes, tmp_path: Path) -> None:
    (tmp_path / "dynamic").write_bytes(blob)
    for b, s in ((4, 2), (16, 8), (33, 5)):  # check 2
        (tmp_path / f"{b}_{s}").write_bytes(bucketjit.refine(blob, {"b": b, "s": s}))
        x, w = floats(b, s), floats(s, s)
        mean, rest = jax.jit(fn)(x, w)
        np.savez(tmp_path / f"{b}_{s}.npz", x=x, w=w, mean=mean, rest=rest)
    script = """
        import jax.export, numpy as np
        from jaxlib import xla_client
        from jax.interpreters import mlir
        from jaxlib.mlir.dialects import stablehlo
        device = jax.devices()[0]
        dynamic = jax.export.deserialize(bytearray(open("dynamic", "rb").read()))
        for name in ("4_2", "16_8", "33_5"):
            context = mlir.make_ir_context()
            module = stablehlo.deserialize_portable_artifact(context, open(name, "rb").read())
            compiled = device.client.compile_and_load(
                str(module), xla_client.DeviceList((device,)), xla_client.CompileOptions()
            )
            there = np.load(name + ".npz")
            given = [jax.device_put(there[k]) for k in ("x", "w")]
            got = compiled.execute_sharded(given).disassemble_into_single_device_arrays()
            for k, (out,), other in zip(("mean", "rest"), got, dynamic.call(*given)):
                np.testing.assert_allclose(out, there[k], rtol=1e-5, atol=1e-6)
                np.testing.assert_allclose(other, there[k], rtol=1e-5, atol=1e-6)
        print("right")
    """
    assert in_another_process(tmp_path, script).strip() == "right"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"b": 8, "t": 2}, r"sizes: expected .* each variable of the module \(b, s\), got"),
        (8, "sizes: expected a dict .*got 8"),
        ({"b": 0, "s": 2}, "sizes: b: expected an int from 1 to 2147483647, got 0"),
        ({"b": 8, "s": 2**31}, "sizes: s: .*got 2147483648"),
        ({"b": "8", "s": 2}, "sizes: b: expected an int .*got '8'"),
        ({"b": 8.0, "s": 2}, "sizes: b: .*got 8.0"),
        ({"b": True, "s": 2}, "sizes: b: .*got True"),
    ],
)
def test_wrong_sizes(blob: bytes, sizes: Any, message: str) -> None:  # check 3
    with pytest.raises(ExportError, match=message):
        bucketjit.refine(blob, sizes)


def test_numpy_sizes_and_a_platform(blob: bytes) -> None:
    sizes = {"b": np.int64(8), "s": np.int32(2)}
    fixed = bucketjit.refine(blob, sizes, platform="cpu")  # bytes also say who called
    assert text(fixed) == text(bucketjit.refine(blob, {"b": 8, "s": 2}))


def test_sizes_that_break_a_constraint(blob: bytes) -> None:  # check 4
    with pytest.raises(ExportError) as caught:
        bucketjit.refine(blob, {"b": 2, "s": 2})
    assert str(caught.value) == (
        "sizes: the module does not hold at these: Input shapes do not match the symbolic shape "
        "constraint b >= 4. Expected 'b - 4' to be greater or equal to 0, but found -2."
    )


def test_sizes_that_break_a_guard() -> None:
    executor = BucketedExec(lambda x: -x if x.shape[0] == 4 else x, dynamic_axes="n")
    raw = executor.export_dynamic(struct(5)).serialize()
    with pytest.raises(ExportError, match="holds for sizes with n != 4 only, but found n = 4"):
        bucketjit.refine(raw, {"n": 4})
    assert "tensor<3xf32>" in main_line(bucketjit.refine(raw, {"n": 3}))


def test_expressions_in_the_shapes_of_arguments() -> None:
    executor = BucketedExec(lambda x, y: x[3:] + y, dynamic_axes=("2*n + 3", "2*n"))
    raw = executor.export_dynamic(struct(7), struct(4)).serialize()
    assert types(bucketjit.refine(raw, {"n": 5})) == ["13xf32", "10xf32", "10xf32"]


def test_several_platforms() -> None:  # check 5
    raw = exported(platforms=["cpu", "cuda"]).serialize()
    sizes = {"b": 6, "s": 3}
    both = bucketjit.refine(raw, sizes)
    assert 'tensor<i32> {jax.global_constant = "_platform_index"}' in main_line(both)
    one = bucketjit.refine(raw, sizes, platform="cpu")
    assert "_platform_index" not in text(one) and main_line(one).count("%arg") == 2
    x, w = floats(6, 3), floats(3, 3)
    for module, given in ((both, (np.int32(0), x, w)), (one, (x, w))):
        assert_close(run(stablehlo.read_module(module), *given), [*jax.jit(fn)(x, w)])
    with pytest.raises(ExportError, match="platform: the module is for cpu, cuda, not for 'tpu'"):
        bucketjit.refine(raw, sizes, platform="tpu")


@pytest.mark.parametrize("platform", [None, "cpu", "cuda", "tpu"])
def test_a_cumulative_sum_for_gpus(platform: str | None) -> None:
    """Since jax 0.12 it is an operation that StableHLO has no form for."""
    executor = BucketedExec(jnp.cumsum, dynamic_axes="n")
    raw = executor.export_dynamic(struct(5), platforms=["cpu", "cuda", "tpu"]).serialize()
    line = main_line(bucketjit.refine(raw, {"n": 3}, platform=platform))
    assert "tensor<3xf32>" in line and "?" not in line
    assert ("_platform_index" in line) is (platform is None)


@pytest.mark.parametrize("raw", [b"", b"hello world" * 30, bytes(1000), b"ML\xefR" + bytes(20)])
def test_foreign_bytes(raw: bytes, capfd: Any) -> None:  # check 6
    with pytest.raises(ExportError, match=r"expected the bytes of jax.export.Exported.serialize\("):
        bucketjit.refine(raw, {})
    assert capfd.readouterr().err == ""  # MLIR itself would write there


def test_text_and_portable_artifacts(blob: bytes) -> None:  # check 6
    fixed = bucketjit.refine(blob, {"b": 8, "s": 2})
    with pytest.raises(ExportError, match="artifact: expected bytes, got str"):
        bucketjit.refine(text(fixed), {})  # type: ignore[arg-type]
    with pytest.raises(ExportError, match=r"expected the bytes of jax.export.Exported.serialize\("):
        bucketjit.refine(fixed, {})


def test_a_static_module() -> None:  # check 9
    static = jax.export.export(jax.jit(fn))(struct(8, 2), struct(2, 2))
    fixed = bucketjit.refine(bytes(static.serialize()), {})
    x, w = floats(8, 2), floats(2, 2)
    assert_close(run(stablehlo.read_module(fixed), x, w), [*jax.jit(fn)(x, w)])


def test_arguments_of_64_bits() -> None:
    with jax.enable_x64(True):
        executor = BucketedExec(lambda x: x.cumsum() / x.shape[0], dynamic_axes="n")
        raw = executor.export_dynamic(struct(5, dtype=np.float64)).serialize()
    assert types(bucketjit.refine(raw, {"n": 6}))[:2] == ["6xf64", "6xf64"]


def test_keys_constants_and_keywords() -> None:
    table = jnp.arange(64.0)

    def noisy(key: Any, *, unread: Any, batch: Any) -> Any:
        n = batch["x"].shape[0]
        return {"y": batch["x"] * table[:n], "noise": jax.random.uniform(key, (n,))}

    key, x = jax.random.key(3), floats(7)
    executor = BucketedExec(noisy, dynamic_axes={"batch": {"x": "n"}})
    raw = executor.export_dynamic(key, unread=struct(), batch={"x": struct(5)}).serialize()
    fixed = stablehlo.read_module(bucketjit.refine(raw, {"n": 7}))
    noise, y = run(fixed, jax.random.key_data(key), x, np.float32(0))
    wanted = jax.jit(noisy)(key, unread=np.float32(0), batch={"x": x})
    np.testing.assert_array_equal(noise, wanted["noise"])
    np.testing.assert_array_equal(y, wanted["y"])


def test_flatbuffers_is_an_extra(blob: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(
        MissingExtraError, match=r"flatbuffers; .*pip install 'bucketjit\[export\]'"
    ):
        bucketjit.refine(blob, {"b": 8, "s": 2})


def test_the_module_of_all_sizes_of_a_saved_function(tmp_path: Path) -> None:
    table = jnp.arange(8.0)

    def fn(x: Any) -> Any:
        return x * table if x.shape[0] > 4 else x + table

    path = tmp_path / "f.bkt"
    executor = BucketedExec(fn, dynamic_axes="n, _").with_pow2()
    like = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    executor.save(path, like, sizes={"n": [4, 8]}, dynamic=True)
    for n, operation in ((3, "stablehlo.add"), (7, "stablehlo.multiply")):
        shown = text(bucketjit.refine(path.read_bytes(), {"n": n}))
        assert operation in shown and f"tensor<{n}x8xf32>" in shown and "?" not in shown
    executor.save(path, like, sizes={"n": [8]})
    with pytest.raises(ExportError, match="save it with dynamic=True"):
        bucketjit.refine(path.read_bytes(), {"n": 3})
    with pytest.raises(ExportError, match="truncated"):
        bucketjit.refine(path.read_bytes()[:500], {"n": 3})
    with pytest.raises(ExportError, match="no .bkt file"):
        bucketjit.refine(b"PK\3\4" + bytes(50), {"n": 3})


@pytest.mark.parametrize(
    "fn", [lambda x: jax.lax.top_k(x.T, 2), lambda x: jnp.cumsum(jnp.tan(x), 0)]
)
def test_nothing_is_printed(fn: Any, capfd: pytest.CaptureFixture[str]) -> None:
    raw = BucketedExec(fn, dynamic_axes="n, _").export_dynamic(struct(5, 4)).serialize()
    assert bucketjit.refine(raw, {"n": 6})
    assert capfd.readouterr() == ("", "")
