"""`bucketjit.kernel`: declarations, calls of kernels, and what they are under transformations.

tests/cases/kernels.py has them in masked programs, with poisoned padding.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import bucketjit
from bucketjit.errors import (
    ArgumentError,
    ExportError,
    FallbackWarning,
    MaskingError,
    SizeMismatchError,
    SpecError,
)


def rows(n: int, width: int = 3) -> np.ndarray[Any, Any]:
    return np.random.default_rng(n).normal(size=(n, width)).astype(np.float32)


def bucketed(fn: Any, **options: Any) -> bucketjit.BucketedExec[..., Any]:
    options = {"buckets": "pow2", "fallback": "error", **options}
    return bucketjit.jit(fn, **options)


def real(x: Any, n: Any) -> Any:
    return jnp.where(jnp.arange(x.shape[0])[:, None] < n, x, 0)


@bucketjit.kernel("n%8, d", out="d")
def total(x: Any, sizes: Any) -> Any:
    """The sum of columns, in blocks of eight rows."""
    assert x.shape[0] % 8 == 0 and sizes["n"].dtype == np.int32
    return real(x, sizes["n"]).sum(0)


@bucketjit.kernel("n, d", out="n, d")
def softmax(x: Any, sizes: Any) -> Any:
    mask = (jnp.arange(x.shape[0]) < sizes["n"])[:, None]
    return jax.nn.softmax(jnp.where(mask, x, -jnp.inf), axis=0)


def both(x: Any) -> Any:
    return softmax(x) * total(x)


# --- calls ----------------------------------------------------------------------------------


def test_alone_and_under_jit_sizes_are_those_of_the_arrays() -> None:
    for n in (0, 1, 8, 11):
        for fn in (total, jax.jit(total)):
            np.testing.assert_allclose(fn(rows(n)), rows(n).sum(0), rtol=1e-5, atol=1e-6)
    assert "sizes" not in str(total.__signature__)  # type: ignore[attr-defined]


def test_buckets_are_multiples() -> None:
    for buckets, want in (("pow2", [8, 16, 32]), ([3, 12, 20], [8, 16, 24]), ("auto", [8, 16, 32])):
        executor = bucketed(total, buckets=buckets)
        for n in (1, 2, 8, 9, 12, 16, 17):
            np.testing.assert_allclose(executor(rows(n)), rows(n).sum(0), rtol=1e-4, atol=1e-5)
        assert [bucket.sizes["batch"] for bucket in executor.stats().buckets] == want
    why = str(bucketed(total, buckets=[3, 12]).explain(rows(9)))
    assert "why this bucket: batch: a kernel takes multiples of 8" in why


def test_an_exact_size_is_padded_inside() -> None:
    executor = bucketed(total).with_exact("batch")
    np.testing.assert_allclose(executor(rows(5)), rows(5).sum(0), rtol=1e-5)


def test_what_an_open_axis_is_called_with() -> None:
    seen: list[Any] = []

    @bucketjit.kernel("n, d", "n", out="n", fill={"x": 7})
    def spy(x: Any, y: Any, sizes: Any) -> Any:
        seen.append((x.shape, sorted(sizes), [jnp.shape(n) for n in sizes.values()]))
        return jnp.where(jnp.arange(len(y)) < sizes["n"], x[:, 0] + x[-1, 1] + y, 0)

    executor = bucketed(lambda x: spy(x, x[:, 0]))
    wanted = [((8, 3), ["d", "n"], [(), ()])]
    np.testing.assert_allclose(executor(rows(5)), 2 * rows(5)[:, 0] + 7, rtol=1e-6)
    assert seen == wanted, "it is entered once, at padded shapes"


def test_trees_expressions_static_and_keyword_arguments() -> None:
    @bucketjit.kernel(
        {"x": "n, _", "y": ("n + 1", "")}, None, bias="n", out=("n + 1", {"count": "int32[]"})
    )
    def mixed(tree: Any, power: int, *, bias: Any = None, twice: bool = False, sizes: Any) -> Any:
        inside = jnp.where(jnp.arange(tree["x"].shape[0]) < sizes["n"], tree["x"].sum(1), 0)
        inside = inside if bias is None else inside + bias
        out = tree["y"][0] * tree["y"][1] ** power + jnp.pad(inside, (1, 0))
        return (2 * out if twice else out), {"count": sizes["n"] * 2}

    def fn(x: Any, **more: Any) -> Any:
        y = jnp.concatenate([x[:, 0], x[:1, 0]])
        return mixed({"x": x, "y": (y, 2.0)}, 3, **more, bias=x[:, 1] if more else None)

    for more in ({}, {"twice": True}):
        executor = bucketed(lambda x, more=more: fn(x, **more), check="exact")
        for n in (3, 4, 5):
            got, other = executor(rows(n))
            x = rows(n)
            y = np.concatenate([x[:, 0], x[:1, 0]]) * 8
            y[1:] += x.sum(1) + (x[:, 1] if more else 0)
            np.testing.assert_allclose(got, 2 * y if more else y, rtol=1e-5)
            assert other["count"] == 2 * n and other["count"].dtype == np.int32


def test_dtypes_of_results() -> None:
    @bucketjit.kernel("n", "n", out=("bfloat16[n]", "bool[n]", "n"))
    def three(x: Any, y: Any, sizes: Any) -> Any:
        return y, x > 0, x

    outs = bucketed(lambda x: three(x[:, 0], x[:, 1].astype(jnp.bfloat16)))(rows(5))
    assert [x.dtype.name for x in outs] == ["bfloat16", "bool", "float32"]


def test_sizes_that_are_not_open() -> None:
    executor = bucketed(jax.vmap(total))
    x = np.stack([rows(5)] * 3)
    np.testing.assert_allclose(executor(x), x.sum(1), rtol=1e-5)


# --- what does not fit ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "options", "message"),
    [
        (("n", "n"), {"out": "n"}, "total needs parameters for 2 axes, and sizes"),
        (("n", None), {"out": "n", "z": "n"}, "total has no parameter 'z' with axes"),
        (("n +",), {"out": "n"}, r"total: x: expected axes such as .*, got 'n \+'"),
        ((3,), {"out": "n"}, "x: expected axes such as .*, got 3"),
        (("n",), {"out": "m"}, "total: no axis has the size m of 'm'"),
        (("n + 1",), {"out": "n"}, "no axis has the size n of 'n . 1'"),
        (("n",), {"out": "_"}, "total: out: expected axes such as"),
        (("n",), {"out": "flat[n]"}, "out: expected axes such as .*'flat.n.'"),
        (("n",), {"out": "n", "fill": {"y": 0}}, "total has no parameter 'y' with axes"),
    ],
)
def test_declarations_that_are_refused(axes: Any, options: Any, message: str) -> None:
    def total(x: Any, sizes: Any) -> Any:
        return x

    axes = axes[:1] if "z" in options else axes
    with pytest.raises(SpecError, match=message):
        bucketjit.kernel(*axes, **options)(total)
    with pytest.raises(SpecError, match="needs parameters for 1 axes, and sizes"):
        bucketjit.kernel("n", out="n")(lambda x: x)


@bucketjit.kernel("n, d", {"a": "d"}, out="n, d")
def scaled(x: Any, scales: Any, mode: Any = None, *, sizes: Any) -> Any:
    return x * scales["a"] if mode is None else x


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: scaled(x[0], {"a": x[0]}), r"scaled: x is float32\[3\], expected 'n, d'"),
        (lambda x: scaled(x, x), "scaled: its arguments are no trees as declared"),
        (
            lambda x: scaled(x, {"a": x[:, 0]}),
            r"scales\['a'\] has an axis d of size .*, expected .3.",
        ),
        (
            lambda x: scaled(x, {"a": x[0]}, x),
            "scaled: mode is an array or an open size; declare its axes",
        ),
    ],
)
def test_calls_that_do_not_fit(fn: Callable[..., Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        fn(rows(5))
    with pytest.raises(ArgumentError, match=message):
        bucketed(fn, fallback="exact")(rows(5))


def test_results_that_do_not_fit() -> None:
    short = bucketjit.kernel("n, d", out="n, d")(lambda x, sizes: x[1:])
    for fn in (short, bucketed(short)):
        with pytest.raises((ArgumentError, MaskingError), match="and out declares .*[58], 3"):
            fn(rows(5))
    pair = bucketjit.kernel("n, d", out="n, d")(lambda x, sizes: (x, x))
    with pytest.raises(ArgumentError, match="returns .ShapedArray"):
        pair(rows(5))


def test_an_open_axis_needs_a_name() -> None:
    @bucketjit.kernel("_, d", out="d")
    def anonymous(x: Any, sizes: Any) -> Any:
        return x.sum(0)

    with pytest.warns(FallbackWarning, match="anonymous: an open axis .b. is declared as _"):
        np.testing.assert_allclose(
            bucketed(anonymous, fallback="exact", dynamic_axes="b, _")(rows(5)),
            rows(5).sum(0),
            rtol=1e-5,
        )
    static = bucketed(lambda x: scaled(x, {"a": x[0]}, x.shape[0]), check="exact")
    np.testing.assert_allclose(static(rows(5)), rows(5))  # it is traced at concrete sizes


def test_sizes_that_may_be_equal_get_a_guard() -> None:
    @bucketjit.kernel("n", "n", out="n")
    def add(x: Any, y: Any, sizes: Any) -> Any:
        return x + y

    executor = bucketed(add, dynamic_axes=("a", "b"))
    x = rows(5)[:, 0]
    np.testing.assert_allclose(executor(x, x), 2 * x)
    assert "b == a" in str(executor.explain(x, x, rules=True))
    with pytest.raises(SizeMismatchError, match="y has an axis n of size .4., expected .5."):
        bucketed(add, dynamic_axes=("a", "b"), fallback="exact")(x, x[:4])


# --- transformations --------------------------------------------------------------------------


def loss(x: Any) -> Any:
    return (both(x) ** 2).sum()


@pytest.mark.parametrize(
    "fn",
    [
        jax.grad(loss),
        lambda x: jax.vmap(jax.grad(loss))(jnp.stack([x, 2 * x])),
        jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum()),
        jax.grad(jax.checkpoint(loss)),
        jax.grad(lambda x: jax.lax.scan(lambda c, _: (both(c), None), x, length=3)[0].sum()),
        jax.grad(jax.jit(loss)),
        jax.grad(lambda x: jax.lax.map(lambda row: total(row[:, None]), x).sum()),
    ],
    ids=["grad", "vmap_grad", "second", "checkpoint", "scan", "jit", "map_rows"],
)
def test_transformations(fn: Callable[..., Any]) -> None:
    for check in ("poison", "exact"):
        got = bucketed(fn, check=check)(rows(5))
        np.testing.assert_allclose(got, fn(rows(5)), rtol=1e-4, atol=1e-5)


def with_derivative() -> tuple[Any, list[str]]:
    """A kernel with a reverse derivative of its own, and what was traced of it."""
    traced: list[str] = []

    @jax.custom_vjp
    def scaled(x: Any) -> Any:
        traced.append("alone")
        return x**2

    def forward(x: Any) -> Any:
        traced.append("forward")
        return x**2, x

    scaled.defvjp(forward, lambda x, ct: (traced.append("backward") or 2 * x * ct,))
    return bucketjit.kernel("n, d", out="n, d")(lambda x, sizes: scaled(x)), traced


def test_its_own_derivative_is_used_once() -> None:
    squared, traced = with_derivative()
    fn = jax.grad(lambda x: squared(x).sum())
    executor = bucketed(fn)
    np.testing.assert_allclose(executor(rows(5)), 2 * rows(5), rtol=1e-6)
    assert traced == ["forward", "backward"], "what the pullback needs is kept"


@pytest.mark.filterwarnings("ignore::bucketjit.errors.FallbackWarning")
def test_forward_mode_does_not_use_the_declaration() -> None:
    for forward in (jax.hessian(loss), lambda x: jax.jvp(both, (x,), (x,))[1]):
        executor = bucketed(forward, fallback="exact", dynamic_axes="b, _", check="exact")
        for n in (5, 8, 16):
            np.testing.assert_allclose(executor(rows(n)), forward(rows(n)), rtol=1e-3, atol=1e-5)


def test_map_and_stages(tmp_path: Path) -> None:
    executor = bucketed(both)
    for got, n in zip(executor.map([rows(5), rows(2), rows(3)]), (5, 2, 3), strict=True):
        np.testing.assert_allclose(got, both(rows(n)), rtol=1e-5, atol=1e-6)
    shown = str(executor.explain(rows(5), rules=True))
    assert "softmax of batch: A kernel, masked by its own declaration" in shown
    assert executor.lower(rows(5)).compile() is not None
    path = tmp_path / "both.bkt"
    executor.save(path, rows(5), sizes={"batch": [5]})
    np.testing.assert_allclose(bucketjit.load(path)(rows(6)), both(rows(6)), rtol=1e-5, atol=1e-6)
    with pytest.raises(ExportError, match="cannot export the kernel softmax without its sizes"):
        executor.export_dynamic(rows(5))
    kept = executor.with_persistence(tmp_path / "files")
    kept(rows(5))
    assert not list((tmp_path / "files").glob("*.bjx")), "what a kernel does has no digest"


# --- never silently wrong ---------------------------------------------------------------------


def test_a_declaration_that_lies_is_noticed() -> None:
    lies = bucketjit.kernel("n, d", out="d")(lambda x, sizes: x.sum(0))
    lies.__name__ = "lies"
    with pytest.raises(MaskingError, match=r"nan against .*; the first to differ is <lambda>"):
        bucketed(lies, check="exact")(rows(5))
    counts = bucketjit.kernel("n, d", out="int32[]")(lambda x, sizes: (x == 0).sum(dtype=jnp.int32))
    ints = bucketed(lambda x: counts(x.astype(jnp.int32) * 0 + 1), check="exact")
    assert ints(rows(5)) == 0
    highest = bucketjit.kernel("n", out="")(lambda x, sizes: x.max())
    with pytest.raises(MaskingError, match="2147483647 against 1"):
        bucketed(lambda x: highest(x[:, 0].astype(jnp.int32) * 0 + 1), check="exact")(rows(5))


# --- Pallas, and without it -------------------------------------------------------------------


def block_kernel(sizes_ref: Any, x_ref: Any, out_ref: Any) -> None:
    first = pl.program_id(0) * 8
    real = first + jax.lax.broadcasted_iota(jnp.int32, x_ref.shape, 0) < sizes_ref[0]
    out_ref[...] = jnp.where(real, x_ref[...], 0).sum(0, keepdims=True)


@bucketjit.kernel("n%8, d", out="d")
def by_blocks(x: Any, sizes: Any) -> Any:
    blocks = x.shape[0] // 8
    return pl.pallas_call(
        block_kernel,
        jax.ShapeDtypeStruct((blocks, x.shape[1]), x.dtype),
        grid=(blocks,),
        in_specs=[pl.BlockSpec((1,), lambda i: 0), pl.BlockSpec((8, x.shape[1]), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0)),
        interpret=True,
    )(sizes["n"][None], x).sum(0)


def test_a_kernel_of_blocks() -> None:
    executor = bucketed(lambda x: by_blocks(x) / x.shape[0], check="exact")
    for n in (1, 3, 9, 12, 21):
        np.testing.assert_allclose(executor(rows(n)), rows(n).mean(0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(by_blocks(rows(n)), rows(n).sum(0), rtol=1e-4, atol=1e-5)


def test_without_pallas() -> None:
    code = """
        import sys
        sys.modules["jax.experimental.pallas"] = None
        import numpy as np, jax.numpy as jnp, bucketjit
        @bucketjit.kernel("n", out="")
        def total(x, sizes):
            return jnp.where(jnp.arange(len(x)) < sizes["n"], x, 0).sum()
        x = np.ones(5, np.float32)
        assert bucketjit.jit(total, buckets="pow2", fallback="error")(x) == total(x) == 5
    """
    import textwrap

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
