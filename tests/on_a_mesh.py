"""Calls with arrays that are sharded over four devices; run as a process by tests/test_mesh.py.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m tests.on_a_mesh explicit 1

Each case compares with ``jax.jit``: values, types, and where results are.
"""

import functools
import json
import pickle
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bucketjit import BucketedExec, Check, Fallback, Padded, jit
from bucketjit._arrays import padding
from bucketjit.errors import ArgumentError, FallbackWarning, SpecError

CASES: dict[str, Callable[[Any], None]] = {}
SIZES = (4, 8, 12, 20)


def case(run: Callable[[Any], None]) -> Callable[[Any], None]:
    CASES[run.__name__] = run
    return run


def put(mesh: Any, array: Any, *spec: Any) -> Any:
    placed = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.device_put(np.asarray(array, np.float32), placed)


def rows(mesh: Any, n: int, width: int = 6) -> Any:
    return put(mesh, np.random.default_rng(n).normal(size=(n, width)), "data")


def weights(mesh: Any) -> Any:
    return put(mesh, np.random.default_rng(0).normal(size=(6, 5)))


def assert_same(mine: Any, exact: Any) -> None:
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(exact), strict=True):
        assert jax.typeof(a) == jax.typeof(b), (jax.typeof(a), jax.typeof(b))
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (a.sharding, b.sharding)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)


def bucketed(fn: Callable[..., Any], axes: Any = (None, "b, _"), **options: Any) -> BucketedExec:
    options = {"fallback": Fallback.ERROR, **options}
    return BucketedExec(fn, dynamic_axes=axes, **options).with_pow2()


@case
def compiled_ahead_of_time(mesh: Any) -> None:
    executor = bucketed(affine)
    w = weights(mesh)
    compiled = executor.lower(w, rows(mesh, 12)).compile()
    for n in (4, 8, 12, 16, 12):
        assert_same(compiled(w, rows(mesh, n)), jax.jit(affine)(w, rows(mesh, n)))
    try:
        compiled(w, np.ones((8, 6), np.float32))
    except TypeError as error:
        assert "x: compiled for float32[b, 6]" in str(error), error
    else:
        raise AssertionError("an array that is not sharded is of another type")


def affine(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w).mean(0)


def check(mesh: Any, fn: Callable[..., Any]) -> None:
    """Buckets 4, 8, 16 and 32, no fallback, the same as under ``jit``."""
    executor = bucketed(fn)
    w = weights(mesh)
    for n in SIZES:
        x = rows(mesh, n)
        assert_same(executor(w, x), jax.jit(fn)(w, x))
    assert executor.cache_size() == len(SIZES)


def loss(w: Any, x: Any) -> Any:
    return (jnp.tanh(x @ w) ** 2).mean()


def step(w: Any, x: Any) -> Any:
    value, gradient = jax.value_and_grad(loss)(w, x)
    return w - 0.1 * gradient, value


def assert_steps(mesh: Any, executor: BucketedExec, sizes: Sequence[int]) -> None:
    for n in sizes:
        w, x = weights(mesh), rows(mesh, n)
        assert_same(executor(w, x), jax.jit(step)(w, x))


@case
def arrays_stay_on_their_devices(mesh: Any) -> None:
    """As on accelerators: nothing asks for their contents on the host."""

    def fn(x: Any, y: Any, z: Any) -> Any:
        return jnp.sort(x, axis=1), x.sum(), y * 2, x.T, 2.0 * y.sum(1), z + 1

    executor = BucketedExec(fn, dynamic_axes=("b, s", "b, s", "n, _"), fallback=Fallback.ERROR)
    executor = executor.with_pow2()
    place = NamedSharding(mesh, PartitionSpec("data"))
    double = lambda x: (x * 2, x.sum())  # noqa: E731
    placing = BucketedExec(double, dynamic_axes="b, _", in_shardings=place).with_pow2()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padding, "_in_host_memory", lambda sharding: False)
        patch.setattr(padding, "_pad_host", None)
        patch.setattr(padding, "cut", None)
        for b, s in ((12, 5), (4, 8), (20, 3), (8, 8), (12, 12), (12, 5)):
            host = np.random.default_rng(b).normal(size=(b, s))
            x, y, z = put(mesh, host, "data"), put(mesh, host), put(mesh, host, None, None)
            if s % 4 == 0:
                y = put(mesh, host, *(("data", None) if b % 8 else (None, "data")))
            # Without explicit axes the compiler chooses where results are.
            for mine, exact in zip(executor(x, y, z), jax.jit(fn)(x, y, z), strict=True):
                np.testing.assert_allclose(mine, exact, rtol=1e-5, atol=1e-5)
                assert len(mine.sharding.device_set) == 4
            assert_same(placing(x), jax.jit(double)(x))
        # Four shards cannot hold ten rows, so each device has all of them.
        if mesh.axis_types == (AxisType.Auto,):
            x = put(mesh, np.ones((10, 3)))
            np.testing.assert_array_equal(placing(x)[0], 2 * np.ones((10, 3)))
    first = BucketedExec(double, dynamic_axes="b, _", in_shardings=place).with_pow2()
    np.testing.assert_array_equal(first(put(mesh, np.ones((10, 3))))[0], 2 * np.ones((10, 3)))
    assert first.stats().fallback_calls == 0


@case
def kept_in_files(mesh: Any) -> None:
    """The next executor loads what one has compiled: of arguments, placed ones, and inside."""
    place = NamedSharding(mesh, PartitionSpec("data"))

    def inside(w: Any, x: Any) -> Any:
        summed = jax.shard_map(
            lambda x: jax.lax.psum(x.sum(0), "data"),
            mesh=mesh,
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec(),
        )
        return w, jax.lax.with_sharding_constraint(x * 2, place), summed(x)

    with tempfile.TemporaryDirectory() as directory:

        def calls(fn: Any, **shardings: Any) -> tuple[int, int]:
            executor = BucketedExec(fn, dynamic_axes=(None, "b, _"), **shardings).with_pow2()
            executor = executor.with_persistence(directory)
            w = weights(mesh)
            for n in (12, 20):
                x = np.asarray(rows(mesh, n)) if shardings else rows(mesh, n)
                mine, exact = executor(w, x), jax.jit(fn, **shardings)(w, x)
                assert_same(mine, exact)
                assert_same(executor(*mine[:1], x), jax.jit(fn, **shardings)(*exact[:1], x))
            return executor.stats().compiles, executor.stats().loads

        is_auto = mesh.axis_types == (AxisType.Auto,)
        for fn, shardings in (
            (step, {}),
            (step, {"in_shardings": (None, place), "out_shardings": None}),
            (lambda w, x: (w, x.mean(0)), {"in_shardings": (None, place)}),
            *([(inside, {})] if is_auto else []),
        ):
            assert calls(fn, **shardings)[1] == 0
            assert calls(fn, **shardings) == (0, 2)


@case
def checked(mesh: Any) -> None:
    """With padding of each kind, where the arguments are: sharded, whole, or in host memory."""
    for kind in Check:
        executor = bucketed(jax.nn.softmax, "b, _", check=kind)
        for n in (4, 12):
            x = rows(mesh, n)
            whole = jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
            for given in (x, whole, np.asarray(x)):
                assert_same(executor(given), jax.jit(jax.nn.softmax)(given))


def attend(w: Any, x: Any) -> Any:
    y = x[:, :, None] * w[None]
    return jax.nn.softmax(jnp.einsum("bij,bkj->bik", y, y)) @ y


@case
def a_gradient_outside_of_jit(mesh: Any) -> None:
    executor = bucketed(loss)
    w = weights(mesh)
    for n in SIZES:
        x = rows(mesh, n)
        exact = jax.value_and_grad(jax.jit(loss))(w, x)
        assert_same(jax.value_and_grad(executor)(w, x), exact)


@case
def other_shardings_between(mesh: Any) -> None:
    """Sharded by rows, not at all, in host memory, and by rows again."""
    executor = bucketed(step)
    w = weights(mesh)
    for n in (8, 12, 8):
        x = rows(mesh, n)
        whole = jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
        for args in ((w, x), (w, whole), (np.asarray(w), np.asarray(x)), (w, x)):
            assert_same(executor(*args), jax.jit(step)(*args))


@case
def buckets_that_the_mesh_divides(mesh: Any) -> None:
    executor = bucketed(jnp.tanh, "b, _").with_linear(6)
    for n in (4, 8, 12):
        assert_same(executor(rows(mesh, n)), jax.jit(jnp.tanh)(rows(mesh, n)))
    assert all(b.sizes["b"] % 4 == 0 for b in executor.stats().buckets)


@case
def other_placements_in_odd_buckets(mesh: Any) -> None:
    """Warm calls with arrays that are sharded otherwise, and buckets that cannot be cut so."""
    executor = BucketedExec(lambda x: x - x.mean(0), fallback=Fallback.ERROR).with_linear(9)
    exact = jax.jit(lambda x: x - x.mean(0))
    for _ in range(2):
        for n in (4, 8, 12):
            x = rows(mesh, n)
            np.testing.assert_allclose(executor(np.asarray(x)), exact(np.asarray(x)), atol=1e-6)
            assert_same(executor(x), exact(x))
            whole = jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
            assert_same(executor(whole), exact(whole))


@case
def results_that_the_mesh_does_not_divide(mesh: Any) -> None:
    def later(x: Any) -> Any:
        return jnp.where(x[1:] > 0, 1, x[1:])

    executor = BucketedExec(later, dynamic_axes="b, _").with_pow2()
    for n in (4, 12):
        try:
            exact = jax.jit(later)(rows(mesh, n))
        except Exception as error:  # explicit axes must be cut evenly
            try:
                executor(rows(mesh, n))
            except type(error):
                continue
            raise
        np.testing.assert_allclose(executor(rows(mesh, n)), exact)


@case
def warm_up(mesh: Any) -> None:
    executor = bucketed(step)
    by_rows = NamedSharding(mesh, PartitionSpec("data"))
    like = jax.ShapeDtypeStruct((4, 6), np.float32, sharding=by_rows)
    report = executor.warmup(weights(mesh), like, sizes={"b": [4, 6, 8]}, progress=False)
    assert [dict(sizes) for sizes, _ in report.failed] == [{"b": 6}], str(report)
    assert "mod(b, 4) == 0" in report.failed[0][1]
    assert len(report.compiled) == 2
    with executor.forbid_compiles():
        assert_steps(mesh, executor, (4, 8))


@case
def over_two_axes_of_a_mesh(mesh: Any) -> None:
    """One of which is not explicit."""
    kinds = (mesh.axis_types[0], AxisType.Auto)
    two = jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds)
    for spec in (("a",), ("b",), (("a", "b"),), (None, "a"), ("a", "b")):
        executor = bucketed(jnp.tanh, "b, _")
        with jax.set_mesh(two):
            for n in (4, 12):
                x = put(two, np.random.default_rng(n).normal(size=(n, 6)), *spec)
                assert_same(executor(x), jax.jit(jnp.tanh)(x))


@case
def placed_by_the_user(mesh: Any) -> None:
    """Host arrays of any size go to the mesh, as arrays that are there do."""
    by_rows, whole = (NamedSharding(mesh, PartitionSpec(*s)) for s in (("data",), ()))
    spec = {"dynamic_axes": (None, "b, _"), "buckets": "pow2", "fallback": "error"}
    placed: Any = {"in_shardings": [whole, by_rows], "out_shardings": (whole, None)}
    w = np.asarray(weights(mesh))
    for options in (placed, {**placed, "check": "poison"}, {**placed, "check": "exact"}):
        executor = jit(step, **spec, **options)
        for n in (3, 8, 45, 61):
            x = np.asarray(rows(mesh, 64))[:n]
            new, value = executor(w, x)
            for mine, exact in zip((new, value), jax.jit(step)(w, x), strict=True):
                np.testing.assert_allclose(mine, exact, rtol=1e-4, atol=1e-6)
            assert new.sharding.is_equivalent_to(whole, 2)
        assert sorted({b.sizes["b"] for b in executor.stats().buckets if not b.exact}) == [4, 8, 64]
    text = executor.lower(w, x).compile().as_text()
    assert "f32[16,6]" in text and "f32[64,6]" not in text  # each device has 16 of 64 rows
    assert_same(executor(weights(mesh), rows(mesh, 12)), jax.jit(step)(w, rows(mesh, 12)))
    double = jit(lambda x: {"y": (2 * x, x[1:])}, **{**spec, "dynamic_axes": "b, _"}, out="padded")
    with jax.set_mesh(mesh):
        by_spec = PartitionSpec("data")
        double = BucketedExec._of(double._config)._with(in_shardings=by_spec, out_shardings=by_spec)
        first, later = double(x)["y"]
    assert first.array.sharding.is_equivalent_to(by_rows, 2) and later.sizes == (60, 6)
    np.testing.assert_allclose(first, 2 * x)
    learnt = jit(lambda x: x.sum(0), dynamic_axes="b, _", in_shardings=by_rows, fallback="error")
    for _ in range(3):
        for n in (5, 6, 7, 30):
            np.testing.assert_allclose(learnt(x[:n]), x[:n].sum(0), rtol=1e-4, atol=1e-5)
    assert all(b.sizes["b"] % 4 == 0 for b in learnt.stats().buckets)
    grad = jax.grad(lambda w: executor(w, x)[1])(jnp.asarray(w))
    np.testing.assert_allclose(grad, jax.grad(loss)(w, x), rtol=1e-4, atol=1e-6)
    again = jit(lambda x: x + 1, buckets="pow2", in_shardings=by_rows, out_shardings=by_rows)
    for _ in range(2):
        np.testing.assert_allclose(again(again(x[:45])), x[:45] + 2, rtol=1e-6)
    static = jit(lambda k, x: k * x, static_argnums=0, in_shardings=(by_rows,), buckets="pow2")
    np.testing.assert_allclose(static(3, x), 3 * x, rtol=1e-6)
    unmasked = jit(lambda x: jax.numpy.linalg.eigvals(x @ x.T).sum(), in_shardings=by_rows)
    with warnings.catch_warnings(action="ignore", category=FallbackWarning):
        assert np.isfinite(unmasked(x[:5]))


@case
def shardings_that_do_not_fit(mesh: Any) -> None:
    by_rows = NamedSharding(mesh, PartitionSpec("data"))
    x = np.ones((5, 6), np.float32)
    executor = jit(step, dynamic_axes=(None, "b, _"), buckets="pow2", in_shardings=(None, by_rows))
    w = np.asarray(weights(mesh))
    for call, words in (
        (lambda: executor(w, x=x), "nothing of keyword arguments, got 'x'"),
        (lambda: executor.map(w, [x, x]), "map is not there with in_shardings"),
        (lambda: executor.save("step.bkt", w, x), "save is not there"),
        (lambda: executor.export_dynamic(w, x), "export is not there"),
        (lambda: executor.with_processes(mesh, "data"), "with_processes is not there"),
        (
            lambda: jit(jnp.sum, buckets="pow2", out_shardings=by_rows)(x),
            "outputs? .*result|P.'data'",
        ),
        (lambda: pickle.dumps(executor), "in_shardings: devices cannot be pickled"),
        (lambda: jit(step, in_shardings="x"), "must be shardings, PartitionSpecs .*; got 'x'"),
        (lambda: jit(step, in_shardings=(by_rows,))(w, x), "prefix of the tree of the positional"),
        (lambda: jit(step, out_shardings=(by_rows,))(w, x), "prefix of the tree of the results"),
    ):
        try:
            call()
        except (ArgumentError, SpecError, TypeError, ValueError) as error:
            assert re.search(words, str(error)), error
        else:
            raise AssertionError(words)
    assert np.isfinite(executor(w, x)[1])


@case
def constraints_inside(mesh: Any) -> None:
    """Three rows get a bucket that the mesh of a constraint divides."""
    auto = jax.sharding.Mesh(mesh.devices, ("data",), axis_types=(AxisType.Auto,))
    by_rows = NamedSharding(auto, PartitionSpec("data"))
    executor = jit(
        lambda x: jax.lax.with_sharding_constraint(2 * x, by_rows).sum(0),
        **{"dynamic_axes": "b, _", "buckets": "pow2", "fallback": "error"},
    )
    x = np.ones((3, 6), np.float32)
    with jax.set_mesh(auto):
        np.testing.assert_allclose(executor(x), 2 * x.sum(0))
    assert executor.stats().buckets[0].sizes == {"b": 4}


@case
def sizes_made_of_others(mesh: Any) -> None:
    for fn in (
        lambda w, x: jnp.concatenate([x, x]),
        lambda w, x: x.reshape(x.shape[0] // 2, 2, 6).sum(1),
    ):
        executor = BucketedExec(fn, dynamic_axes=(None, "b, _")).with_pow2()
        for n in (8, 16):
            x = rows(mesh, n)
            assert_same(executor(weights(mesh), x), jax.jit(fn)(weights(mesh), x))
        assert executor.stats().fallback_calls == 0


@case
def derivatives_by_what_is_sharded(mesh: Any) -> None:
    def scalar(x: Any) -> Any:
        return (jnp.tanh(x) ** 2).mean()

    executor = bucketed(scalar, "b, _").with_linear(6)
    for n in (4, 12):
        x = rows(mesh, n)
        assert_same(jax.grad(executor)(x), jax.grad(jax.jit(scalar))(x))
        assert_same(jax.jvp(executor, (x,), (x,)), jax.jvp(jax.jit(scalar), (x,), (x,)))
    each = bucketed(jnp.tanh, "b, _").with_linear(6)
    x = rows(mesh, 4)
    assert_same(jax.vjp(each, x)[1](x), jax.vjp(jax.jit(jnp.tanh), x)[1](x))


@case
def padding_that_the_mesh_does_not_divide(mesh: Any) -> None:
    x = rows(mesh, 8)
    for n in (1, 3, 5, 8):
        executor = BucketedExec(jnp.tanh, dynamic_axes="b, _").with_linear(6)
        # Explicit axes are cut unevenly.
        with warnings.catch_warnings(action="ignore", category=FallbackWarning):
            result = executor(Padded(x, {0: n}))
        np.testing.assert_allclose(result, np.tanh(np.asarray(x)[:n]), rtol=1e-6)


@case
def the_background(mesh: Any) -> None:
    executor = bucketed(step)
    executor = executor.with_background_compile()
    for _ in range(2):
        assert_steps(mesh, executor, (32, 4, 12))
        executor.wait_for_compiles()
    assert executor.cache_size() == 3


@case
def donated(mesh: Any) -> None:
    executor = bucketed(step, donate_argnums=0)
    w, x = weights(mesh), rows(mesh, 12)
    assert_same(executor(w, x), jax.jit(step)(weights(mesh), x))
    assert w.is_deleted()


@case
def padded_results(mesh: Any) -> None:
    first = BucketedExec(lambda x: x * 2, dynamic_axes="b, _", out="padded").with_pow2()
    second = bucketed(lambda y: y.mean(0), "b, _")
    x = rows(mesh, 12)
    np.testing.assert_allclose(second(first(x)), 2 * np.asarray(x).mean(0), rtol=1e-5, atol=1e-6)


@case
def what_exact_refuses(mesh: Any) -> None:
    """Along a sharded axis nothing is accumulated, where axes are explicit."""
    executor = BucketedExec(lambda x: jnp.cumsum(x, 0), dynamic_axes="b, _").with_pow2()
    try:
        exact = jax.jit(lambda x: jnp.cumsum(x, 0))(rows(mesh, 8))
    except Exception as error:
        expected: Any = error
    else:
        assert_same(executor(rows(mesh, 8)), exact)
        return
    try:
        executor(rows(mesh, 8))
    except type(expected) as error:
        assert str(error).splitlines()[0] == str(expected).splitlines()[0]
    else:
        raise AssertionError(f"did not raise {expected!r}")


@case
def batches_of_ragged_rows(mesh: Any) -> None:
    def encode(w: Any, x: Any) -> Any:
        return {"y": jnp.tanh(x @ w), "top": jnp.max(x @ w, 0)}

    executor = BucketedExec(encode, dynamic_axes=(None, "s, _")).with_pow2(min=8)
    w, random = weights(mesh), np.random.default_rng(0)
    examples = [random.normal(size=(n, 6)).astype(np.float32) for n in (3, 5, 8, 2, 7, 12, 4, 9)]
    for x, got in zip(examples, executor.map(w, examples), strict=True):
        exact = jax.jit(encode)(w, x)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)
    assert executor.stats().rows == 8 and not executor.stats().rows_alone
    if AxisType.Explicit in mesh.axis_types:
        return
    sharded = [
        entry
        for _, entry in executor._engine.cache.items()
        if entry.rows % 4 == 0 and "data" in str(entry.compiled.input_shardings)
    ]
    assert sharded  # each device has a fourth of the rows


@case
def sums_over_ragged_rows(mesh: Any) -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    step = jax.value_and_grad(loss)
    executor = BucketedExec(step, dynamic_axes=(None, "s, _")).with_pow2(min=8)
    w, random = weights(mesh), np.random.default_rng(1)
    examples = [random.normal(size=(n, 6)).astype(np.float32) for n in (3, 5, 8, 2, 7, 12, 4, 9)]
    total, gradient = executor.map(w, examples, reduce="sum")
    wanted = [jax.jit(step)(w, x) for x in examples]
    np.testing.assert_allclose(total, sum(float(one) for one, _ in wanted), rtol=1e-5)
    np.testing.assert_allclose(
        np.asarray(gradient), sum(np.asarray(g) for _, g in wanted), rtol=1e-4, atol=1e-5
    )


CHECKED: dict[str, Callable[..., Any]] = {
    "a_dense_layer": lambda w, x: (jax.nn.softmax(x @ w), x.mean(0)),
    "a_training_step": step,
    "normalised_over_the_batch": lambda w, x: (x - x.mean(0)) / x.std(0),
    "a_softmax_over_the_batch": lambda w, x: jax.nn.softmax(x @ w, axis=0),
    "where": lambda w, x: jnp.where(x > 0, x, 0).sum(),
    "extremes": lambda w, x: (x.max(0), x.argmin(0)),
    "dropout": lambda w, x: jax.random.bernoulli(jax.random.key(0), 0.5, x.shape) * x,
    "weak_types": lambda w, x: jnp.where(x > 0, 1, 2),
    "attention": attend,
}
CASES |= {name: functools.partial(check, fn=fn) for name, fn in CHECKED.items()}


def main() -> None:
    """Run every case, and print what became of it as JSON."""
    kind = AxisType[sys.argv[1].capitalize()]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    warnings.simplefilter("error")
    found = {}
    for name, run in [*CASES.items()][:: int(sys.argv[2])]:
        try:
            with jax.set_mesh(mesh):
                run(mesh)
            found[name] = "ok"
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
