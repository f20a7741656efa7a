"""Programs that serve one size only: which are told as fallbacks, and which are not made at all."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import bucketjit
from bucketjit._ir.guards import fixed_by, parse_constraint
from bucketjit.errors import ArtifactError, FallbackError, FallbackWarning
from tests.comparison import assert_like_jit, ramp

_LINE = r"each size of batch has a program of its own \[\S+test_fixed_sizes.py:\d+ \(each\)\]"


def each(x: Any) -> Any:
    """It does something else at nearly every size."""
    return (jnp.sin, jnp.cos, jnp.tan, jnp.tanh, jnp.exp)[hash(x.shape[0]) % 5](x).sum()


def test_a_program_of_one_size_is_told_as_a_fallback(tmp_path: Path) -> None:
    executor = bucketjit.jit(each, buckets="pow2")
    told = executor.explain(ramp(3))
    assert (told.kind, told.bucket) == ("exact", {"batch": 3})
    with pytest.warns(FallbackWarning, match=_LINE) as warned:
        assert_like_jit(executor, each, ramp(3))
        assert_like_jit(executor, each, ramp(6))
    assert len(warned) == 1
    stats = executor.stats()
    assert (stats.fallback_calls, list(stats.fallback_reasons)) == (2, [told.reason])
    assert any(program.refused == told.reason for program in stats.programs)
    assert executor.lower(ramp(3)).exact
    ((sizes, why),) = executor.warmup(ramp(3)).exact
    assert (sizes, why) == ({"batch": 3}, told.reason)
    with pytest.raises(ArtifactError, match="each size of batch"):
        executor.save(tmp_path / "each.bkt", ramp(3))
    rows = executor.map([ramp(2, 3), ramp(2, 3)])
    assert [float(row) for row in rows] == [float(each(jnp.asarray(ramp(2, 3))))] * 2
    with pytest.raises(FallbackError, match="each size of batch"):
        bucketjit.jit(each, buckets="pow2", fallback="error")(ramp(3))


APART: dict[str, Callable[[Any], Any]] = {
    "one": lambda x: x.sum() if x.shape[0] == 1 else x.mean(),
    "a number": lambda x: x.sum() if 2 * x.shape[0] == 6 else x.mean(),
    "two bounds": lambda x: x.sum() if 3 <= x.shape[0] < 4 else x.mean(),
    "a table": lambda x: {3: jnp.sin, 5: jnp.cos}.get(x.shape[0], jnp.tanh)(x),
    "squeezed": lambda x: jnp.squeeze(x[:, None, None] * jnp.ones(2)),
    "squeezed, as a method": lambda x: x[:, None].squeeze(),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", APART)
def test_a_size_that_is_treated_apart_is_no_fallback(name: str) -> None:
    executor = bucketjit.jit(APART[name], buckets="pow2", fallback="error")
    for n in (3, 1, 6, 7):
        assert_like_jit(executor, APART[name], ramp(n))
    assert executor.cache_size() == 3
    assert {made.kind for made in executor.stats().programs if made.guards} == {"symbolic"}


def test_a_size_that_the_user_fixes_is_no_fallback() -> None:
    given = {"dynamic_axes": "n", "constraints": ("n == 3",)}
    executor = bucketjit.jit(lambda x: x * x.shape[0], fallback="error", buckets="pow2", **given)
    assert_like_jit(executor, lambda x: x * x.shape[0], ramp(3))


@functools.cache
def area(shape: tuple[Any, ...]) -> Any:
    return 2 * shape[0]


class Layer:
    @functools.lru_cache(maxsize=8)  # noqa: B019
    def width(self, n: Any, more: int) -> Any:
        return n + more


def test_caches_of_functools_are_keyed_by_open_sizes() -> None:
    layer = Layer()
    wider = functools.partial(layer.width, more=2)

    def fn(x: Any) -> Any:
        more = layer.width(x.shape[0], more=1)
        struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return x * area(x.shape) + more + wider(struct.shape[0])

    executor = bucketjit.jit(fn, buckets="pow2", fallback="error")
    for n in (3, 5, 6, 7, 8):
        assert_like_jit(executor, fn, ramp(n))
    assert executor.cache_size() == 2
    assert [program.kind for program in executor.stats().programs] == ["symbolic"]


class Shown:
    """A callable object whose text tells a size, as those of Equinox do."""

    def __init__(self, n: Any) -> None:
        self.n = n

    def __call__(self, x: Any) -> Any:
        return x * self.n

    def __repr__(self) -> str:
        return f"Shown({self.n})"


def test_a_text_for_debug_information_decides_nothing() -> None:
    def fn(x: Any) -> Any:
        return jax.linearize(Shown(x.shape[0]), x)[1](x)

    executor = bucketjit.jit(fn, buckets="pow2", fallback="error")
    assert_like_jit(executor, fn, ramp(3))
    assert_like_jit(executor, fn, ramp(4))
    assert executor.cache_size() == 1


@pytest.mark.parametrize(
    ("texts", "fixed"),
    [
        (("n == 3",), {"n"}),
        (("n >= 3", "n <= 3"), {"n"}),
        (("2*n == 6",), {"n"}),
        (("mod(n, 3) == 0", "n <= 5"), {"n"}),
        (("n >= 3", "n <= 4"), set()),
        (("mod(n, 3) == 0",), set()),
        (("n == m",), set()),
        (("m == n + 2", "n == 3"), {"n", "m"}),
    ],
)
def test_what_guards_fix(texts: tuple[str, ...], fixed: set[str]) -> None:
    assert fixed_by(map(parse_constraint, texts), {"m": 5, "n": 3}) == fixed


def test_a_function_that_keeps_tracers_by_size_is_traced_once_at_each() -> None:
    kept: dict[Any, Any] = {}

    def fn(x: Any) -> Any:
        n = x.shape[0]
        if n not in kept:
            kept[n] = jnp.arange(n)
        return (x * kept[n]).sum()

    executor = bucketjit.jit(fn, buckets="pow2")
    for n in (3, 9, 13, 7):  # 9 and 13 are sizes that a trace is tried at beside 3
        assert float(executor(ramp(n))) == (ramp(n) * range(n)).sum()
