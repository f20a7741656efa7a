"""Dynamic modules: what is exported, that it computes the same, and what is refused."""

import collections
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit.errors import ArgumentError, ExportError
from tests.comparison import assert_close

Args = Sequence[tuple[Any, ...]]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def check(fn: Callable[..., Any], axes: Any, calls: Args, **options: Any) -> jax.export.Exported:
    """Export for the first call; the module equals ``jit`` at all of them, after a round trip."""
    exported = BucketedExec(fn, dynamic_axes=axes, **options).export_dynamic(*calls[0])
    again = jax.export.deserialize(exported.serialize())
    for args in calls:
        want = jax.jit(fn)(*args)
        for run in (exported, again):
            assert_close(run.call(*args), want)
    return exported


@contextmanager
def refused_by_the_module(message: str) -> Iterator[None]:
    """A call of an exported function raises an error that says this, itself or its cause."""
    with pytest.raises(Exception) as caught:
        yield
    told = f"{caught.value} {caught.value.__cause__}"
    assert re.search(message, told), told


def lengths(*sizes: int) -> Args:
    return [(normal(n),) for n in sizes]


PROGRAMS = {
    "softmax": (lambda x: jax.nn.softmax(x, 1), "b, s", [(normal(n, n + 2),) for n in (3, 5)]),
    "branch": (lambda x: x.sum() if x.shape[0] > 4 else x.mean(), "n", lengths(6, 9)),
    "scan": (lambda x: jax.lax.scan(lambda c, a: (c + a, c), 0.0, x)[1], "n", lengths(5, 6)),
    "merge": (lambda x: jnp.sort(x.reshape(-1)), "b, s", [(normal(n, n + 1),) for n in (3, 5)]),
    "shift": (lambda x: x[1:] - x[:-1], "n", lengths(5, 1)),
    "random": (lambda x: jax.random.normal(jax.random.key(0), x.shape) + x, "n", lengths(5, 6)),
    "gradient": (jax.grad(lambda x: jnp.log(jnp.mean(x**2))), "n", lengths(5, 6)),
    "conv": (
        lambda x: jax.lax.conv(x, jnp.ones((2, 3, 3)), (2,), "SAME"),
        "b, _, t",
        [(normal(n, 3, n + 8),) for n in (2, 3)],
    ),
    "int": (lambda x: x[: int(x.shape[0]) // 2].sum(), "n", lengths(5, 6, 11)),
    "returned size": (lambda x: (x.shape[0], x * 2), "n", lengths(5, 6)),
    "not read": (lambda x, y: y.sum(), ("n", "n"), [(normal(n), normal(n)) for n in (5, 6)]),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_at_several_sizes(name: str) -> None:
    exported = check(*PROGRAMS[name])
    text = exported.mlir_module()
    assert "tensor<?x" in text and exported.uses_global_constants  # check 1


def test_no_bucket_is_in_the_module() -> None:  # check 1
    executor = BucketedExec(jnp.cumsum, dynamic_axes="n").with_linear(1000)
    exported = executor.export_dynamic(normal(5))
    assert "1000" not in exported.mlir_module()
    assert executor.cache_size() == 0


def test_guards_are_shape_assertions() -> None:  # check 3
    def fn(x: Any) -> Any:
        if x.shape[0] == 4:
            return -x
        return x * 2 if x.shape[0] > 2 else x

    exported = BucketedExec(fn, dynamic_axes="n").export_dynamic(normal(6))
    again = jax.export.deserialize(exported.serialize())
    for run in (exported, again):
        np.testing.assert_allclose(run.call(normal(5)), 2 * normal(5))
        with refused_by_the_module("constraint n >= 3"):
            run.call(normal(2))
        with refused_by_the_module("sizes with n != 4 only, but found n = 4"):
            run.call(normal(4))


def test_a_reshape_that_fails_at_some_sizes_fails_there() -> None:
    fn = lambda x: x.reshape(x.shape[0] // 2, 2).sum(0)  # noqa: E731
    exported = BucketedExec(fn, dynamic_axes="n").export_dynamic(normal(6))
    np.testing.assert_allclose(exported.call(normal(8)), jax.jit(fn)(normal(8)), rtol=1e-5)
    with refused_by_the_module(r"output elements \(6\) doesn't match .* elements \(7\)"):
        exported.call(normal(7))


Pair = collections.namedtuple("Pair", "first second")
jax.export.register_namedtuple_serialization(Pair, serialized_name="tests.stages.Pair")


def test_trees_and_keywords() -> None:  # check 4
    def fn(batch: Any, *, scale: Any) -> Any:
        return Pair({"x": batch["x"] * scale}, [batch["pair"].first, None])

    batch = {"x": normal(5), "pair": Pair(normal(5), normal(3))}
    axes = {"batch": {"x": "n", "pair": Pair("n", None)}}
    exported = BucketedExec(fn, dynamic_axes=axes).export_dynamic(batch, scale=2.0)
    again = jax.export.deserialize(exported.serialize())
    assert again.in_tree == jax.tree.structure(((batch,), {"scale": 2.0}))
    batch = {"x": normal(7), "pair": Pair(normal(7), normal(3))}
    found, wanted = again.call(batch, scale=2.0), fn(batch, scale=2.0)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    np.testing.assert_allclose(found.first["x"], wanted.first["x"])


def test_static_arguments_are_bound() -> None:  # check 4
    executor = BucketedExec(lambda x, k: x * k, dynamic_axes=("n", None), static_argnums=1)
    exported = executor.export_dynamic(normal(5), 3)
    np.testing.assert_allclose(exported.call(normal(6)), 3 * normal(6))


def test_several_platforms() -> None:  # check 5
    executor = BucketedExec(jnp.cumsum, dynamic_axes="n")
    exported = executor.export_dynamic(normal(5), platforms=["cpu", "cuda", "tpu"])
    assert exported.platforms == ("cpu", "cuda", "tpu")
    assert '"_platform_index"' in exported.mlir_module()
    np.testing.assert_allclose(exported.call(normal(7)), jnp.cumsum(normal(7)), rtol=1e-5)


@pytest.mark.parametrize(
    ("fn", "axes"),
    [
        (lambda x: jnp.log(jnp.mean(x**2)), "n"),
        (lambda x: (x * 2).sum() if x.shape[0] != 4 else x.sum(), "n"),
    ],
)
def test_derivatives(fn: Callable[..., Any], axes: Any) -> None:  # check 6
    exported = BucketedExec(fn, dynamic_axes=axes).export_dynamic(normal(5), vjp_order=2)
    again = jax.export.deserialize(exported.serialize(vjp_order=2))
    for n in (3, 6):
        for run in (exported, again):
            found = jax.grad(lambda x, run=run: run.call(x))(normal(n))
            np.testing.assert_allclose(found, jax.grad(fn)(normal(n)), rtol=1e-4, atol=1e-6)
            curved = jax.grad(lambda x, run=run: jnp.sum(jax.grad(run.call)(x) ** 2))(normal(n))
            want = jax.grad(lambda x: jnp.sum(jax.grad(fn)(x) ** 2))(normal(n))
            np.testing.assert_allclose(curved, want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (lambda x: jax.pure_callback(np.sin, x, x), "pure_callback"),
        (lambda x: (jax.debug.print("{}", x), x * 2)[1], "debug_(print|callback)"),
    ],
)
def test_callbacks(fn: Callable[..., Any], name: str) -> None:  # check 8
    message = rf"{name}: a module cannot call back into Python \[.*test_dynamic.py"
    with pytest.raises(ExportError, match=message):
        BucketedExec(fn, dynamic_axes="n").export_dynamic(normal(5))


def test_tangents_and_pullbacks_of_associative_scans() -> None:
    def fn(x: Any) -> Any:
        product = lambda y: jax.lax.associative_scan(jnp.multiply, y)  # noqa: E731
        out, tangent = jax.jvp(product, (x,), (jnp.ones_like(x),))
        return out, tangent, jax.vjp(product, x)[1](jnp.cos(x))[0]

    check(fn, "n", lengths(5, 1, 2, 7))


def test_a_call_without_open_axes_is_a_static_module() -> None:  # check 11
    exported = BucketedExec(lambda x: x * 2, dynamic_axes=None).export_dynamic(np.float32(3))
    assert not exported.uses_global_constants and "?" not in exported.mlir_module().split("#loc")[0]
    executor = BucketedExec(lambda x: {"y": x.sum(0)}, dynamic_axes=(None,))
    exported = executor.export_dynamic(normal(5, 2))
    assert exported.in_avals[0].shape == (5, 2) and not exported.uses_global_constants
    np.testing.assert_allclose(exported.call(normal(5, 2))["y"], normal(5, 2).sum(0), rtol=1e-5)


def test_a_program_that_no_rule_masks() -> None:  # check 12
    def fn(x: Any) -> Any:
        return jnp.linalg.eigh(x @ x.T + jnp.diag(jnp.arange(1.0, x.shape[0] + 1)))[1]

    assert BucketedExec(fn, dynamic_axes="n, _").with_pow2().explain(normal(5, 3)).kind == "exact"
    check(fn, "n, _", [(normal(n, 3),) for n in (5, 4)])


def test_sizes_that_are_arguments() -> None:
    executor = BucketedExec(lambda x, n: x + n, dynamic_axes=("b", "n"))
    with pytest.raises(ExportError, match="n: it is itself a size, .*make the argument static"):
        executor.export_dynamic(normal(5), 3)


def test_structs_and_learnt_axes() -> None:
    executor = BucketedExec(jnp.tanh).with_pow2()
    exported = executor.export_dynamic(jax.ShapeDtypeStruct((5, 3), jnp.float32))
    assert str(exported.in_avals[0].shape) == "(batch, 3)"
    # Exporting opens no axes: the first call still names them.
    executor.export_dynamic(jax.ShapeDtypeStruct((5, 4), jnp.float32))
    assert str(executor.export_dynamic(normal(5, 3)).in_avals[0].shape) == "(batch, 3)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vjp_order": -1}, "vjp_order: expected an int of at least 0, got -1"),
        ({"vjp_order": True}, "vjp_order: .*got True"),
        ({"platforms": "cpu"}, "platforms: expected a list"),
        ({"platforms": []}, "platforms: expected a list"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    executor = BucketedExec(jnp.cumsum, dynamic_axes="n")
    with pytest.raises(ExportError, match=message):
        executor.export_dynamic(normal(5), **options)


def test_jax_export_of_an_executor_names_the_method() -> None:
    executor = BucketedExec(lambda x: (x * x).sum(), dynamic_axes="n").with_pow2()
    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b"), np.float32)
    for like, error in ((normal(3), ExportError), (symbolic, ArgumentError)):
        with pytest.raises(error, match="export_dynamic"):
            jax.export.export(executor)(like)  # type: ignore[arg-type]


def test_an_axis_without_elements() -> None:
    with pytest.raises(ExportError, match="an axis has size 0"):
        BucketedExec(jnp.cumsum, dynamic_axes="n").export_dynamic(normal(0))


def test_a_function_that_cannot_be_traced() -> None:
    def fn(x: Any) -> Any:
        y = x
        for _ in range(int(x.shape[0])):
            y = jnp.sin(y) if y.shape[0] % 2 else jnp.cos(y)[:, None].sum(1)
        return y

    with pytest.raises(ExportError, match="cannot export: "):
        BucketedExec(fn, dynamic_axes="n").export_dynamic(normal(5))


# --- programs of concrete traces --------------------------------------------------------------


def test_the_sizes_at_which_the_function_does_something_else_are_refused() -> None:
    def fn(x: Any) -> Any:
        n = int(x.shape[0])
        return jnp.cos(x)[: n // 2] if n <= 100 else jnp.sin(x)[: n // 2]

    exported = BucketedExec(fn, dynamic_axes="n").export_dynamic(normal(6))
    for n in (4, 7, 100):
        np.testing.assert_allclose(exported.call(normal(n)), fn(normal(n)), rtol=1e-5)
    with refused_by_the_module("sizes with n <= 100 only, but found n = 101"):
        exported.call(normal(101))


def test_sizes_beyond_those_compared_are_refused() -> None:
    fn = lambda x: x[: int(x.shape[0]) // 2]  # noqa: E731
    exported = BucketedExec(fn, dynamic_axes="n").export_dynamic(normal(6))
    assert exported.call(normal(4096)).shape == (2048,)
    with refused_by_the_module("sizes with n <= 4096 only"):
        exported.call(normal(4097))
    exported = BucketedExec(fn, dynamic_axes="n").export_dynamic(normal(3000))
    assert exported.call(normal(12000)).shape == (6000,)


def test_a_result_that_is_nested_by_size() -> None:
    fn = lambda x: {"n": x, f"half of {int(x.shape[0])}": x[: int(x.shape[0]) // 2]}  # noqa: E731
    with pytest.raises(ExportError, match="the tree of the results depends on a size"):
        BucketedExec(fn, dynamic_axes="n").export_dynamic(normal(6))


def test_it_is_named_as_the_function() -> None:
    class Scale:
        def __call__(self, x: Any) -> Any:
            return x * 2

    struct = jax.ShapeDtypeStruct((5,), np.float32)
    for fn, name in ((jnp.sum, "sum"), (Scale(), "Scale")):
        assert BucketedExec(fn, dynamic_axes="n").export_dynamic(struct).fun_name == name
