"""Callbacks see logical shapes, never padding, once for each logical call."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from tests.harness import POISONS, Arg, Case, Masked

SIZES = ({"b": 1, "s": 8}, {"b": 3, "s": 5}, {"b": 4, "s": 1})


def calls_of(fn: Any, seen: list[Any], shape: str = "b, s", dtype: str = "float32") -> None:
    """Run padded and exact at several sizes; host calls and results must be the same.

    Args:
        fn: The function; its callbacks append what they see to ``seen``.
        seen: That list.
        shape: Shape of its argument.
        dtype: Dtype of its argument.
    """
    masked = Masked(Case("callback", fn, (Arg(shape, dtype),)), fn)
    exact = jax.jit(fn)
    for sizes in SIZES:
        sizes = {v: n for v, n in sizes.items() if v in masked.bucket}
        dims = [sizes.get(d.strip()) or int(d) for d in shape.split(",")]
        x = np.random.default_rng(0).normal(size=dims).astype(dtype)
        want = jax.tree.leaves(exact(x))
        jax.effects_barrier()
        expected, seen[:] = list(seen), []
        for poison in POISONS:
            got = masked([x], sizes, poison)
            jax.effects_barrier()
            assert len(seen) == len(expected)
            for a, b in zip(_sorted(seen), _sorted(expected), strict=True):
                assert a.shape == b.shape
                assert a.dtype == b.dtype
                np.testing.assert_allclose(a, b, rtol=1e-6)
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6)
            seen.clear()


def _sorted(arrays: list[Any]) -> list[Any]:
    """In an order of their own: unordered callbacks come in any order."""
    return sorted(map(np.asarray, arrays), key=lambda a: (a.shape, a.tobytes()))


def test_debug_callback() -> None:
    seen: list[Any] = []

    def fn(x: Any) -> Any:
        jax.debug.callback(lambda y, *, total: seen.extend([y, total]), x, total=x.sum(0))
        return x.sum()

    calls_of(fn, seen)


def test_debug_callback_gets_jax_arrays() -> None:
    seen: list[Any] = []

    def fn(x: Any) -> Any:
        jax.debug.callback(lambda y: seen.append(type(y)), x)
        return x.sum()

    for run in (jax.jit(fn), lambda x: Masked(Case("c", fn, ("b",)), fn)([x], {"b": 2}, "nan")):
        run(np.ones(2, np.float32))
        jax.effects_barrier()
    assert seen[0] is seen[1]


def test_debug_print(capsys: pytest.CaptureFixture[str]) -> None:
    def fn(x: Any) -> Any:
        jax.debug.print("{} {name:.1f}", x, name=x.sum())
        return x * 2

    masked = Masked(Case("print", fn, (Arg("s"),)), fn)
    masked([np.asarray([1, 2, 3], np.float32)], {"s": 3}, "nan")
    jax.effects_barrier()
    assert capsys.readouterr().out == "[1. 2. 3.] 6.0\n"


def test_in_loops() -> None:
    """A scan over padded rows calls for real rows only."""
    seen: list[Any] = []

    def step(carry: Any, row: Any) -> Any:
        jax.debug.callback(seen.append, row)
        return carry + row.sum(), row * 2

    calls_of(lambda x: lax.scan(step, jnp.float32(0), x), seen)


def test_in_map_and_cond() -> None:
    seen: list[Any] = []

    def row(x: Any) -> Any:
        lax.cond(x[0] > 0, lambda: jax.debug.callback(seen.append, x), lambda: None)
        return x.sum()

    calls_of(lambda x: lax.map(row, x), seen)


def test_pure_callback() -> None:
    seen: list[Any] = []

    def host(x: Any) -> Any:
        seen.append(x)
        return np.cumsum(np.asarray(x), axis=1), np.asarray(x).shape[0]

    def fn(x: Any) -> Any:
        out = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((), jnp.int32))
        total, rows = jax.pure_callback(lambda y: _pair(host(y)), out, x)
        return total - total.mean(), rows

    def _pair(result: Any) -> Any:
        return result[0], np.int32(result[1])

    calls_of(fn, seen)


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all"])
def test_pure_callback_of_a_vmap(method: str) -> None:
    seen: list[Any] = []

    def host(x: Any, scale: Any) -> Any:
        seen.append(x)
        scale = np.asarray(scale)
        return np.asarray(x) * scale.reshape(scale.shape + (1,) * (x.ndim - scale.ndim))

    def row(x: Any) -> Any:
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(host, out, x, jnp.float32(2), vmap_method=method)

    calls_of(jax.vmap(row), seen)


def test_pure_callback_with_wrong_result() -> None:
    def fn(x: Any) -> Any:
        return jax.pure_callback(lambda y: np.zeros(7, np.float32), jax.typeof(x), x)

    masked = Masked(Case("wrong", fn, ("s",)), fn)
    with pytest.raises(Exception, match=r"returned shape \(7,\), expected \(3,\)"):
        jax.block_until_ready(masked([np.zeros(3, np.float32)], {"s": 3}, "nan"))


def test_io_callback() -> None:
    seen: list[Any] = []

    def host(x: Any) -> Any:
        seen.append(x)
        return np.asarray(x)[::-1]

    calls_of(lambda x: io_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x).sum(0), seen)


def test_keys_arrive_as_their_words() -> None:
    seen: list[Any] = []

    def fn(x: Any) -> Any:
        jax.debug.callback(seen.append, jax.random.split(jax.random.key(3), x.shape[0]))
        return x.sum()

    calls_of(fn, seen)
