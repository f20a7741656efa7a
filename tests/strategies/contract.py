"""The contract that every strategy keeps, as one check."""

from hypothesis import strategies as st

LARGEST = 2**40

small_sizes = st.integers(1, 200)
sizes = st.one_of(st.integers(0, 300), st.integers(0, LARGEST))


@st.composite
def ladder_parameters(draw, largest=4000):
    """min, max and multiple_of that fit each other."""
    multiple_of = draw(st.sampled_from([1, 1, 2, 3, 7, 8, 128]))
    smallest = draw(st.one_of(st.just(1), small_sizes))
    lowest = -(-smallest // multiple_of)
    highest = draw(st.none() | st.integers(lowest, lowest + largest // multiple_of))
    return {
        "min": smallest,
        "max": None if highest is None else highest * multiple_of,
        "multiple_of": multiple_of,
    }


def within(strategy, n):
    """A size that the strategy has a bucket for."""
    largest = getattr(strategy, "max", None)
    return n if largest is None else n % (largest + 1)


def check_contract(strategy, n, m):
    n, m = sorted((within(strategy, n), within(strategy, m)))
    bucket = strategy.bucket(n)
    assert type(bucket) is int
    assert bucket >= n
    assert bucket <= strategy.bucket(m)
    assert strategy.bucket(bucket) == bucket
    assert strategy.bucket(n) == bucket


def check_ladder(strategy, n):
    """The bucket obeys min, max and multiple_of."""
    bucket = strategy.bucket(within(strategy, n))
    assert bucket >= strategy.min
    assert bucket % strategy.multiple_of == 0
    if strategy.max is not None:
        assert bucket <= strategy.max
        assert strategy.bucket(strategy.max) == strategy.max
