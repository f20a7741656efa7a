from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from bucketjit.strategies._search import histogram

SEEN = [5, 3, 5, 0, 900]


@pytest.mark.parametrize(
    "sizes",
    [SEEN, tuple(SEEN), iter(SEEN), np.array(SEEN, np.int16), Counter(SEEN), dict(Counter(SEEN))],
    ids=lambda s: type(s).__name__,
)
def test_any_iterable_and_counts(sizes):
    _, points, counts = histogram(sizes)
    assert points.tolist() == [[3], [5], [900]]
    assert counts.tolist() == [1, 2, 1]


@pytest.mark.parametrize(
    "sizes",
    [[3, np.uint64(9)], [np.int64(3), np.uint64(9)], {3: 1, np.uint64(9): 1}],
    ids=["int", "signed", "counts"],
)
def test_ints_of_several_types(sizes):
    assert histogram(sizes)[1].tolist() == [[3], [9]]  # np.asarray makes floats of them


def test_counts_may_be_any_numbers():
    assert histogram({4: 0.5, 8: Fraction(1, 4), 9: 0})[2].tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    "sizes, error, message",
    [
        ([], ValueError, "sizes must hold at least one size of 1 or more, not none"),
        ({8: 0}, ValueError, "at least one size"),
        ([3, -1], ValueError, "sizes must not be negative, not -1"),
        ([3.0], TypeError, "sizes must be a flat iterable of ints, not of float64"),
        ([3, 2**63], ValueError, "sizes must be below 2\\*\\*63, not 9223372036854775808"),
        (np.array([3, 2**63 + 5], np.uint64), ValueError, "sizes must be below"),
        ([[3, 4]], TypeError, r"flat iterable of ints, not of int64 with shape \(1, 2\)"),
        ([True, 3], TypeError, "not of bool"),
        (np.array([True]), TypeError, "not of bool"),
        ([[1], [2, 3]], TypeError, "sizes must be a flat iterable of ints, not a nested one"),
        ("34", TypeError, "sizes must be an iterable of ints, not '34'"),
        (34, TypeError, "sizes must be an iterable of ints, not 34"),
        ({3: "a"}, TypeError, "the count of size 3 must be a number, not 'a'"),
        ({3: -1}, ValueError, "the count of size 3 must be finite and not negative, not -1"),
        ({3: float("nan")}, ValueError, "must be finite"),
    ],
)
def test_wrong_sizes_are_refused(sizes, error, message):
    with pytest.raises(error, match=message):
        histogram(sizes)


def test_joint_counts_combinations():
    dims, points, counts = histogram({"b": [4, 1, 4, 0], "s": np.array([9, 9, 9, 7])})
    assert dims == ("b", "s")
    assert points.tolist() == [[1, 9], [4, 9]]
    assert counts.tolist() == [1, 2]
    _, points, counts = histogram({"b": {7: 2, 0: 4, 3: 0.5}})
    assert (points.tolist(), counts.tolist()) == ([[3], [7]], [0.5, 2])


@pytest.mark.parametrize(
    "sizes, error, message",
    [
        ({1: [3]}, TypeError, r"the count of size 1 must be a number, not \[3\]"),
        ({"b": [0]}, ValueError, "at least one size"),
        ({"b": [1, 2], "s": [3]}, ValueError, r"as many sizes as .*\{'b': 2, 's': 1\}"),
        ({"b": [1], "s": [-3]}, ValueError, r"sizes\['s'\] must not be negative"),
        ({"b": [1.5]}, TypeError, r"sizes\['b'\] must be a flat iterable of ints"),
        ({"b": {3: 1}, "s": [3]}, TypeError, r"sizes\['b'\] must be the size of each call"),
    ],
)
def test_wrong_joint_sizes_are_refused(sizes, error, message):
    with pytest.raises(error, match=message):
        histogram(sizes)
