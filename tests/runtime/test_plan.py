"""How many rows each batch has, and rows that take turns in one executable."""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketjit import BucketedExec
from bucketjit._runtime.rows import plan
from bucketjit._runtime.rows.plan import Group, default_budget, row_counts


def pow2(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def ladder(n: int) -> int:
    return next(s for s in (16, 24, 32, 48, 64, 96, 128, 192, 256) if s >= n)


GROUP = st.builds(
    Group,
    st.integers(1, 3000),
    st.integers(1, 5000),
    st.frozensets(st.sampled_from([1, 2, 4, 8, 64, 128]), max_size=3),
)


@given(st.lists(GROUP, min_size=1, max_size=12), st.integers(1, 10_000))
def test_batches_hold_all_rows_within_the_budget(groups: list[Group], budget: int) -> None:
    for group, rows in zip(groups, row_counts(tuple(groups), budget), strict=True):
        assert sum(rows) >= group.count > sum(rows) - min(rows)
        assert all(n == 1 or n * group.tokens <= budget for n in rows)
        assert all(n & (n - 1) == 0 for n in rows) and len(set(rows)) <= 2


@given(st.lists(GROUP, min_size=1, max_size=12))
def test_the_budget_of_the_sizes(groups: list[Group]) -> None:
    budget = default_budget(groups)
    assert 2048 <= budget <= 8192 and budget & (budget - 1) == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [None, 2048, 8192])
@pytest.mark.parametrize(
    ("bucket", "most_executables", "most"), [(pow2, 6, 1.5), (ladder, 13, 1.35)]
)
def test_padding_of_lognormal_lengths(
    bucket: object, most_executables: int, most: float, budget: int | None, seed: int
) -> None:
    assert callable(bucket)
    lengths = np.clip(np.random.default_rng(seed).lognormal(3.5, 0.6, 1000).astype(int), 4, 256)
    counts = Counter(map(bucket, lengths.tolist()))
    groups = [Group(n, tokens) for tokens, n in counts.items()]
    found = row_counts(tuple(groups), budget or default_budget(groups))
    computed = sum(sum(rows) * g.tokens for g, rows in zip(groups, found, strict=True))
    executables = sum(len(set(rows)) for rows in found)
    assert computed <= most * lengths.sum() and executables <= most_executables


@pytest.mark.parametrize("bucket", [pow2, ladder])
def test_executables_of_many_calls(bucket: object) -> None:
    assert callable(bucket)
    random, known = np.random.default_rng(0), defaultdict[int, set[int]](set)
    for _ in range(50):
        lengths = np.clip(random.lognormal(3.2, 0.6, random.integers(50, 500)).astype(int), 4, 256)
        counts = Counter(map(bucket, lengths.tolist()))
        groups = [Group(n, tokens, frozenset(known[tokens])) for tokens, n in counts.items()]
        for group, rows in zip(groups, row_counts(tuple(groups), 2048), strict=True):
            known[group.tokens] |= set(rows)
    for tokens, rows in known.items():
        assert len(rows) <= (2048 // tokens).bit_length()


@pytest.mark.parametrize("seed", range(30))
def test_a_call_like_an_earlier_one_compiles_nothing(seed: int) -> None:
    random = np.random.default_rng(seed)
    counts = {int(2**k * 8): int(random.integers(1, 300)) for k in range(random.integers(1, 9))}
    known = defaultdict[int, set[int]](set)
    for call in range(3):
        groups = [Group(n, tokens, frozenset(known[tokens])) for tokens, n in counts.items()]
        for group, rows in zip(groups, row_counts(tuple(groups), 2048), strict=True):
            assert not call or known[group.tokens].issuperset(rows)
            known[group.tokens] |= set(rows)


F32 = np.float32
WEIGHTS = np.linspace(-1, 1, 12, dtype=F32).reshape(3, 4)


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program is tried, and takes turns."""
    monkeypatch.setattr(plan, "_LEAST_FLOPS", 0)
    monkeypatch.setattr(plan, "_WORTH_TURNS", 1e9)


def attention(w: Any, x: Any) -> Any:
    h = jax.nn.softmax(x @ x.T, axis=-1) @ x @ w
    return {"mean": h.mean(0), "rows": h, "count": (h > 0).sum(), "weak": 2.0 * jnp.ones(())}


def recurrent(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, row: (jnp.tanh(c + row @ w), c.sum()), jnp.zeros(4), x)


def loops(w: Any, x: Any) -> Any:
    return jax.lax.while_loop(lambda c: c.sum() < 40, lambda c: c + jnp.abs(x).sum(), x[0] * 0 + 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fn", [attention, recurrent, loops])
@pytest.mark.usefixtures("in_turn")
def test_results_are_those_of_a_loop(fn: Callable[..., Any]) -> None:
    executor = BucketedExec(fn, dynamic_axes=(None, "n, _")).with_pow2(min=4)
    rng = np.random.default_rng(0)
    for count in (1, 2, 9):
        examples = [rng.standard_normal((n, 3)).astype(F32) for n in rng.integers(1, 9, count)]
        got = executor.map(WEIGHTS, examples, in_axes=(None, 0))
        for result, x in zip(got, examples, strict=True):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
                result,
                jax.jit(fn)(WEIGHTS, x),
            )
    assert set(executor._engine.takes_turns.values()) == {True}


@pytest.mark.usefixtures("in_turn")
def test_one_executable_serves_every_number_of_rows() -> None:
    executor = BucketedExec(attention, dynamic_axes=(None, "n, _")).with_pow2(min=8)
    shape = (None, 0)
    executor.map(WEIGHTS, [np.ones((7, 3), F32)] * 2, in_axes=shape)
    assert executor.stats().compiles == 2  # both ways were compiled for the comparison
    for count in (1, 3, 4, 5, 16, 33):
        executor.map(WEIGHTS, [np.ones((7, 3), F32)] * count, in_axes=shape)
    assert executor.stats().compiles == 2
    explained = executor.explain_map(WEIGHTS, [np.ones((7, 3), F32)] * 3, in_axes=shape)
    assert explained.groups[0].missing == ()
    executor.map(WEIGHTS, [np.ones((12, 3), F32)] * 3, in_axes=shape)
    assert executor.stats().compiles == 3
    executor.cache_clear()
    assert not executor._engine.takes_turns


@pytest.mark.usefixtures("in_turn")
def test_rows_that_are_not_there_are_not_computed() -> None:
    """A loop that does not end for a row of zeros ends here, and no row counts as padding."""
    executor = BucketedExec(loops, dynamic_axes=(None, "n, _")).with_pow2()
    executor.map(WEIGHTS, [np.ones((4, 3), F32)] * 2, in_axes=(None, 0))
    executor.reset_stats()
    executor.map(WEIGHTS, [np.ones((4, 3), F32)] * 3, in_axes=(None, 0))
    assert executor.stats().padding_waste == 0


@pytest.mark.usefixtures("in_turn")
def test_a_batch_of_one_row_says_nothing() -> None:
    executor = BucketedExec(attention, dynamic_axes=(None, "n, _")).with_pow2(min=8)
    for count, known in ((1, []), (2, [True])):
        executor.map(WEIGHTS, [np.ones((7, 3), F32)] * count, in_axes=(None, 0))
        assert list(executor._engine.takes_turns.values()) == known


def test_short_rows_are_not_tried() -> None:
    executor = BucketedExec(attention, dynamic_axes=(None, "n, _")).with_pow2(min=8)
    executor.map(WEIGHTS, [np.ones((7, 3), F32)] * 2, in_axes=(None, 0))
    assert executor.stats().compiles == 1 and not executor._engine.takes_turns
