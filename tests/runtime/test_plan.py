"""How many rows each batch has: what is computed beside what is real, and how many executables."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketjit._runtime.rows.batches import Group, default_budget, row_counts


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
    for group, rows in zip(groups, row_counts(groups, budget), strict=True):
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
    found = row_counts(groups, budget or default_budget(groups))
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
        for group, rows in zip(groups, row_counts(groups, 2048), strict=True):
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
        for group, rows in zip(groups, row_counts(groups, 2048), strict=True):
            assert not call or known[group.tokens].issuperset(rows)
            known[group.tokens] |= set(rows)
