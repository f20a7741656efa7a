"""Fit an expression of sizes to its values at some sizes, and a bucket to the sizes of a call.

The expression is a guess. Its user compares its value with the right one at every size that it is
used for, so a wrong guess costs another program, never a wrong result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from bucketjit._ir.expressions import evaluate_text

_DIVISORS = range(2, 9)  # of ``floordiv(n, k)`` and ``mod(n, k)`` that are tried

Samples = Sequence[Mapping[str, int]]


def fit(values: Sequence[int], samples: Samples) -> int | str | None:
    """The simplest expression with these values.

    >>> fit([9, 13], [{"n": 4}, {"n": 6}])
    '2*n + 1'
    >>> fit([6, 20, 12], [{"b": 2, "s": 3}, {"b": 4, "s": 5}, {"b": 4, "s": 3}])
    'b*s'

    Args:
        values: A value for each sample.
        samples: Sizes of the dimension variables.

    Returns:
        An int if all values are equal, the text of an expression, or None if none was found.
    """
    if len(set(values)) == 1:
        return values[0]
    for text in _candidates(values, samples):
        if all(evaluate_text(text, s) == v for s, v in zip(samples, values, strict=True)):
            return text
    return None


def _candidates(values: Sequence[int], samples: Samples) -> Iterator[str]:
    """Expressions to try, simpler ones first: each has the right value at two or three samples."""
    names = sorted(samples[0])
    terms = [
        *names,
        *(f"{a}*{b}" for a, b in itertools.combinations_with_replacement(names, 2)),
        *("*".join(three) for three in itertools.combinations(names, 3)),
    ]
    for term in terms:
        yield from _affine(term, values, samples)
    for one, two in itertools.combinations(terms, 2):
        yield from _sums(one, two, values, samples)
    for name in names:
        for k in _DIVISORS:
            for shift in range(k):
                whole = f"floordiv({name} + {shift}, {k})" if shift else f"floordiv({name}, {k})"
                yield from _affine(whole, values, samples)
            yield from _affine(f"mod({name}, {k})", values, samples)


def _affine(term: str, values: Sequence[int], samples: Samples) -> Iterator[str]:
    """``a*term + c`` through the first two samples at which the term differs, if ``a`` is whole."""
    at = [evaluate_text(term, s) for s in samples]
    for i, j in itertools.combinations(range(len(at)), 2):
        if at[i] != at[j]:
            slope, rest = divmod(values[j] - values[i], at[j] - at[i])
            if rest == 0 and slope != 0:
                yield _written([(slope, term)], values[i] - slope * at[i])
            return


def _sums(one: str, two: str, values: Sequence[int], samples: Samples) -> Iterator[str]:
    """``a*one + b*two + c`` through the first three samples that determine ``a`` and ``b``."""
    rows = [(evaluate_text(one, s), evaluate_text(two, s)) for s in samples]
    for i, j, k in itertools.combinations(range(len(rows)), 3):
        (p, q), (r, t) = ([rows[m][x] - rows[i][x] for x in (0, 1)] for m in (j, k))
        u, v = values[j] - values[i], values[k] - values[i]
        determinant = p * t - q * r  # Cramer's rule, in whole numbers
        if determinant:
            a, rest_a = divmod(u * t - q * v, determinant)
            b, rest_b = divmod(p * v - u * r, determinant)
            if rest_a == rest_b == 0 and a and b:
                constant = values[i] - a * rows[i][0] - b * rows[i][1]
                yield _written([(a, one), (b, two)], constant)
            return


def _written(terms: Sequence[tuple[int, str]], constant: int) -> str:
    text = " + ".join(t if a == 1 else f"{a}*{t}" for a, t in terms)
    if constant:
        text += f" {'+' if constant > 0 else '-'} {abs(constant)}"
    return text


# --- holding ------------------------------------------------------------------------------------

# Which buckets hold the sizes of a call, and which of these is the smallest.

B = TypeVar("B", bound=Mapping[str, int])


def holds(bucket: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
    """Whether a bucket is at least as large as a call along every variable of the call."""
    return all(bucket[v] >= n for v, n in sizes.items())


def smallest_holding(buckets: Iterable[B], sizes: Mapping[str, int]) -> B | None:
    """The bucket with the smallest product of its sizes, among those that hold a call."""
    fitting = (bucket for bucket in buckets if holds(bucket, sizes))
    return min(fitting, key=lambda bucket: math.prod(bucket.values()), default=None)
