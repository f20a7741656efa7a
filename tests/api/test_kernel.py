"""`bucketjit.kernel`: declarations, calls of kernels, and what they are under transformations.

tests/cases/kernels.py has them in masked programs, with poisoned padding.
"""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import bucketjit
from bucketjit.errors import ArgumentError, ExportError, FallbackWarning, MaskingError, SpecError
from tests.alone import run_python


def rows(n: int, width: int = 3) -> np.ndarray[Any, Any]:
    return np.random.default_rng(n).normal(size=(n, width)).astype(np.float32)


def bucketed(fn: Any, fallback: Any = "error", buckets: Any = "pow2", **options: Any) -> Any:
    return bucketjit.jit(fn, fallback=fallback, buckets=buckets, **options)


def same(got: Any, want: Any, rtol: float = 1e-4) -> None:
    np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-5)


@bucketjit.kernel("n%8, d", out="d")
def total(x: Any, sizes: Any) -> Any:
    """The sum of columns, in blocks of eight rows."""
    assert x.shape[0] % 8 == 0 and sizes["n"].dtype == np.int32
    return jnp.where(jnp.arange(x.shape[0])[:, None] < sizes["n"], x, 0).sum(0)


@bucketjit.kernel("n, d", out="n, d")
def softmax(x: Any, sizes: Any) -> Any:
    real = (jnp.arange(x.shape[0]) < sizes["n"])[:, None]
    return jax.nn.softmax(jnp.where(real, x, -jnp.inf), axis=0)


def both(x: Any) -> Any:
    return softmax(x) * total(x)


# --- calls ----------------------------------------------------------------------------------


def test_alone_and_under_jit_sizes_are_those_of_the_arrays() -> None:
    for n in (0, 1, 8, 11):
        same(total(rows(n)), rows(n).sum(0))
        same(jax.jit(total)(rows(n)), rows(n).sum(0))


def test_buckets_are_multiples() -> None:
    for buckets, want in (("pow2", [8, 16, 32]), ([3, 12, 20], [8, 16, 24]), ("auto", [8, 16, 32])):
        executor = bucketed(total, buckets=buckets)
        for n in (1, 2, 8, 9, 12, 16, 17):
            same(executor(rows(n)), rows(n).sum(0))
        assert [bucket.sizes["batch"] for bucket in executor.stats().buckets] == want
    why = str(bucketed(total, buckets=[3, 12]).explain(rows(9)))
    assert "why this bucket: batch: a kernel or a mesh takes multiples of 8" in why


def test_what_a_kernel_is_called_with() -> None:
    seen: list[Any] = []

    @bucketjit.kernel("n, d", "n", out="n", fill={"x": 7})
    def spy(x: Any, y: Any, sizes: Any) -> Any:
        seen.append((x.shape, sorted(sizes)))
        return x[:, 0] + x[-1, 1] + y

    executor = bucketed(lambda x: spy(x, x[:, 0]))
    same(executor(rows(5)), 2 * rows(5)[:, 0] + 7)
    assert seen == [((8, 3), ["d", "n"])], "it is entered once, at padded shapes"
    same(bucketed(total).with_exact("batch")(rows(5)), rows(5).sum(0))  # padded inside
    x = np.stack([rows(5)] * 3)
    same(bucketed(jax.vmap(total))(x), x.sum(1))  # the sizes of the kernel are not open


def test_trees_expressions_static_and_keyword_arguments() -> None:
    axes, out = {"x": "n, _", "y": ("n + 1", "")}, ("n + 1", {"count": "int32[]"}, "bfloat16[n]")

    @bucketjit.kernel(axes, None, bias="n", out=out)
    def mixed(tree: Any, power: int, *, bias: Any = None, twice: bool = False, sizes: Any) -> Any:
        inside = jnp.where(jnp.arange(tree["x"].shape[0]) < sizes["n"], tree["x"].sum(1), 0)
        inside = inside + bias
        out = tree["y"][0] * tree["y"][1] ** power + jnp.pad(inside, (1, 0))
        return (2 * out if twice else out), {"count": sizes["n"] * 2}, inside.astype(jnp.bfloat16)

    def fn(x: Any) -> Any:
        y = jnp.append(x[:, 0], x[0, 0])
        return mixed({"x": x, "y": (y, 2.0)}, 3, twice=True, bias=x[:, 1])

    executor = bucketed(fn, check="exact")
    for n in (3, 4, 5):
        (got, other, half), x = executor(rows(n)), rows(n)
        y = np.append(x[:, 0], x[0, 0]) * 8 + np.append(0, x.sum(1) + x[:, 1])
        same(got, 2 * y)
        assert other["count"] == 2 * n and half.shape == (n,) and half.dtype == jnp.bfloat16


# --- what does not fit ----------------------------------------------------------------------


REFUSED = [
    (("n", "n"), {"out": "n"}, "needs parameters for 2 axes, and sizes"),
    (("n",), {"out": "n", "z": "n"}, "has no parameter 'z' with axes"),
    (("n +",), {"out": "n"}, r"x: expected axes such as .*, got 'n \+'"),
    ((3,), {"out": "n"}, "x: expected axes such as .*, got 3"),
    (("n",), {"out": "m"}, "no axis has the size m of 'm'"),
    (("n",), {"out": "_"}, "out: expected axes such as"),
    (("n",), {"out": "n", "fill": {"y": 0}}, "has no parameter 'y' with axes"),
]


@pytest.mark.parametrize(("axes", "options", "message"), REFUSED)
def test_declarations_that_are_refused(axes: Any, options: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        bucketjit.kernel(*axes, **options)(lambda x, sizes: x)


@bucketjit.kernel("n, d", {"a": "d"}, out="n, d")
def scaled(x: Any, scales: Any, mode: Any = None, *, sizes: Any) -> Any:
    return x * scales["a"] if mode is None else x


MISFITS = [
    (lambda x: scaled(x[0], {"a": x[0]}), r"scaled: x is float32\[3\], expected 'n, d'"),
    (lambda x: scaled(x, x), "scaled: its arguments are no trees as declared"),
    (lambda x: scaled(x, {"a": x[:, 0]}), r"scales\['a'\] has d of size .*, expected .3."),
    (lambda x: scaled(x, {"a": x[0]}, x), "scaled: mode is an array or an open size; declare"),
    (lambda x: bucketjit.kernel("n", out="n")(lambda x, sizes: x[1:])(x[:, 0]), "out declares"),
]


@pytest.mark.parametrize(("fn", "message"), MISFITS)
def test_calls_that_do_not_fit(fn: Callable[..., Any], message: str) -> None:
    for call in (fn, bucketed(fn, fallback="exact")):
        with pytest.raises((ArgumentError, MaskingError), match=message):
            call(rows(5))


def test_an_open_axis_needs_a_name() -> None:
    anonymous = bucketjit.kernel("_, d", out="d")(lambda x, sizes: x.sum(0))
    with pytest.warns(FallbackWarning, match="b is open, and declared as _"):
        same(bucketed(anonymous, fallback="exact", dynamic_axes="b, _")(rows(5)), rows(5).sum(0))
    static = bucketed(lambda x: scaled(x, {"a": x[0]}, x.shape[0]), check="exact")
    same(static(rows(5)), rows(5))  # it is traced at concrete sizes


def test_sizes_that_may_be_equal_get_a_guard() -> None:
    add = bucketjit.kernel("n", "n", out="n")(lambda x, y, sizes: x + y)
    executor = bucketed(add, dynamic_axes=("a", "b"))
    x = rows(5)[:, 0]
    same(executor(x, x), 2 * x)
    assert "b == a" in str(executor.explain(x, x, rules=True))
    with pytest.raises(ArgumentError, match="y has n of size .4., expected .5."):
        bucketed(add, dynamic_axes=("a", "b"), fallback="exact")(x, x[:4])


# --- transformations --------------------------------------------------------------------------


def loss(x: Any) -> Any:
    return (both(x) ** 2).sum()


DERIVATIVES = [
    lambda x: jax.vmap(jax.grad(loss))(jnp.stack([x, 2 * x])),
    jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum()),
    jax.grad(lambda x: jax.lax.scan(lambda c, _: (both(c), None), x, length=3)[0].sum()),
]


@pytest.mark.parametrize("fn", DERIVATIVES)
def test_transformations(fn: Callable[..., Any]) -> None:
    for check in ("poison", "exact"):
        same(bucketed(fn, check=check)(rows(5)), fn(rows(5)))


def test_its_own_derivative_is_used_once() -> None:
    traced: list[str] = []
    forward = lambda x: (traced.append("forward") or x**2, x)  # noqa: E731
    square = jax.custom_vjp(lambda x: x**2)
    square.defvjp(forward, lambda x, ct: (traced.append("backward") or 2 * x * ct,))
    squared = bucketjit.kernel("n, d", out="n, d")(lambda x, sizes: square(x))
    executor = bucketed(jax.grad(lambda x: squared(x).sum()))
    same(executor(rows(5)), 2 * rows(5))
    assert traced == ["forward", "backward"], "what the pullback needs is kept"


def test_without_a_derivative() -> None:
    host = lambda x, sizes: jax.pure_callback(lambda x: x, jax.typeof(x), x)  # noqa: E731
    fn = jax.grad(lambda x: bucketjit.kernel("n, d", out="n, d")(host)(x).sum())
    with pytest.raises(MaskingError, match="the kernel has no derivative in reverse mode"):
        bucketed(fn)(rows(5))


def test_shards_do_not_use_the_declaration() -> None:
    """Their gradients are sums over shards, which no declaration tells."""
    of = {"mesh": jax.sharding.Mesh(jax.devices()[:1], ("d",)), "in_specs": P(None, "d")}
    shards = jax.shard_map(total, out_specs=P("d"), **of)
    executor = bucketed(jax.grad(lambda x: (shards(x) ** 2).sum()))
    same(executor(rows(5)), np.broadcast_to(2 * rows(5).sum(0), (5, 3)))
    assert "a kernel in shard_map" in str(executor.explain(rows(5), rules=True))


@pytest.mark.filterwarnings("ignore::bucketjit.errors.FallbackWarning")
def test_forward_mode_does_not_use_the_declaration() -> None:
    for forward in (jax.hessian(loss), lambda x: jax.jvp(both, (x,), (x,))[1]):
        executor = bucketed(forward, fallback="exact", dynamic_axes="b, _", check="exact")
        for n in (5, 8, 16):
            same(executor(rows(n)), forward(rows(n)))


def test_map_and_stages(tmp_path: Path) -> None:
    executor = bucketed(both)
    for got, n in zip(executor.map([rows(5), rows(2), rows(3)]), (5, 2, 3), strict=True):
        same(got, both(rows(n)))
    shown = str(executor.explain(rows(5), rules=True))
    assert "softmax of batch: A kernel, masked by its own declaration" in shown
    assert executor.lower(rows(5)).compile()
    path = tmp_path / "both.bkt"
    executor.save(path, rows(5), sizes={"batch": [5]})
    same(bucketjit.load(path)(rows(6)), both(rows(6)))
    with pytest.raises(ExportError, match="cannot export the kernel softmax without its sizes"):
        executor.export_dynamic(rows(5))
    executor.with_persistence(tmp_path / "files")(rows(5))
    assert not list((tmp_path / "files").glob("*.bjx")), "what a kernel does has no digest"


# --- never silently wrong ---------------------------------------------------------------------


def test_a_declaration_that_lies_is_noticed() -> None:
    lies = bucketjit.kernel("n, d", out="d")(lambda x, sizes: x.sum(0))
    with pytest.raises(MaskingError, match=r"nan against .*; the first to differ is <lambda>"):
        bucketed(lies, check="exact")(rows(5))
    highest = bucketjit.kernel("n", out="")(lambda x, sizes: x.max())
    with pytest.raises(MaskingError, match="2147483647 against 1"):
        bucketed(lambda x: highest(x[:, 0].astype(jnp.int32) * 0 + 1), check="exact")(rows(5))


def test_without_pallas() -> None:
    code = """
        import sys
        sys.modules["jax.experimental.pallas"] = None
        import numpy as np, bucketjit
        total = bucketjit.kernel("n", out="", fill=0)(lambda x, sizes: x.sum())
        x = np.ones(5, np.float32)
        assert bucketjit.jit(total, buckets="pow2", fallback="error")(x) == total(x) == 5
    """
    done = run_python("-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
