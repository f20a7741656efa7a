"""Buckets that are learnt from a table of costs, in place of a clock."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import pytest

from bucketjit._runtime.learning.learner import MOST_SIZES, Bucket, Learner, fitted_line
from bucketjit.strategies import Pow2


def pow2(sizes: Bucket) -> Bucket:
    return tuple(map(Pow2().bucket, sizes))


class Replay:
    """A stream whose compiles and calls cost what a table says.

    Attributes:
        seconds: What the stream has cost.
        buckets: The bucket of each call.
    """

    def __init__(
        self, compile_seconds: float, run: Callable[[Bucket], float], **options: Any
    ) -> None:
        self.learner = Learner(options.pop("most", 20), pow2, **options)
        self._compile_seconds, self._run = compile_seconds, run
        self.seconds, self.buckets = 0.0, list[Bucket]()

    def __call__(self, stream: Sequence[Bucket]) -> Self:
        learner = self.learner
        for sizes in stream:
            learner.count(sizes)
            if learner.is_due:
                learner.look()
            bucket = learner.bucket(sizes)
            if not learner.has(bucket):
                self.seconds += self._compile_seconds
                learner.compiled(bucket, self._compile_seconds)
            elif learner.wants_seconds(bucket):
                learner.ran(bucket, self._run(bucket))
            self.seconds += self._run(bucket)
            self.buckets.append(bucket)
        return self

    @property
    def used(self) -> set[Bucket]:
        return set(self.buckets)


def of_powers_of_two(
    stream: Sequence[Bucket], compile_seconds: float, run: Callable[[Bucket], float]
) -> float:
    buckets = [pow2(sizes) for sizes in stream]
    return compile_seconds * len(set(buckets)) + sum(map(run, buckets))


def volume(unit: float) -> Callable[[Bucket], float]:
    return lambda bucket: 1e-3 + unit * math.prod(bucket)


RANDOM = np.random.default_rng(5)
LENGTHS = np.exp(RANDOM.normal(np.log(48), 0.7, 1000)).round().astype(int).clip(4, 512)
STREAMS = {
    "sentences": [
        (int(b), int(s)) for b, s in zip(RANDOM.integers(1, 9, 1000), LENGTHS, strict=True)
    ],
    "batches": [(int(n),) for n in RANDOM.integers(1, 257, 1000)],
    "drift": [(int(n),) for n in RANDOM.normal(np.repeat([40, 200], 500), 15).clip(4)],
    "peaks": [(int(n),) for n in RANDOM.normal(RANDOM.choice([70, 300], 1000), 8).clip(4)],
    "one size": [(100,)] * 1000,
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_costs_no_more_than_by_powers_of_two(name: str) -> None:
    stream = STREAMS[name]
    unit = 20 / sum(math.prod(sizes) for sizes in stream)  # 20 s of running, without padding
    costs = 0.4, volume(unit)
    one, other = Replay(*costs)(stream), Replay(*costs)(stream)
    assert one.buckets == other.buckets  # the same costs, the same buckets
    assert one.seconds <= 0.97 * of_powers_of_two(stream, *costs)
    assert len(one.used) <= 20


def test_what_does_not_pay_is_not_compiled() -> None:
    stream = STREAMS["batches"]
    dear = Replay(100.0, volume(1e-6))(stream)
    assert len(dear.used) <= 9
    cheap = Replay(1e-3, volume(1e-3))(stream)
    assert len(dear.used) < len(cheap.used) <= 20
    real = sum(map(math.prod, stream[300:]))
    assert 1 - real / sum(map(math.prod, cheap.buckets[300:])) < 0.15


def test_a_size_that_no_bucket_holds_gets_room() -> None:
    replay = Replay(1.0, volume(1e-9))([(60, 3), (58, 2), (65, 2), (60, 3)])
    assert replay.buckets == [(64, 4), (64, 4), (128, 2), (64, 4)]
    told = {one.sizes: (one.why, one.calls) for one in replay.learner.learnt()}
    assert told[64, 4] == ("no bucket held a call", 3)


def test_a_better_bucket_comes_when_it_would_have_paid() -> None:
    """A call of size 10 in the bucket of 1024 wastes 1.014 s, and a compile costs 100 s."""
    run: Callable[[Bucket], float] = lambda bucket: bucket[0] / 1000  # noqa: E731
    replay = Replay(100.0, run)([(1024,)])
    replay([(10,)] * 2000)
    first = replay.buckets.index((10,))
    assert first == 7  # with the first look: 500 calls are expected, and all were of this size
    assert replay.used == {(1024,), (10,)}
    (better,) = (one for one in replay.learner.learnt() if one.sizes == (10,))
    assert better.why.startswith("would have paid after ")
    assert better.saved_seconds == pytest.approx(1.014 * better.calls)


def test_variables_that_are_not_learnt_keep_their_buckets() -> None:
    stream = [(int(Pow2().bucket(b)), s) for b, s in STREAMS["sentences"]]
    replay = Replay(1e-3, volume(1e-3), fixed=[0])(stream)
    for sizes, bucket in zip(stream, replay.buckets, strict=True):
        assert sizes[0] == bucket[0] and sizes[1] <= bucket[1]


def test_a_bucket_that_does_not_fit_is_not_chosen() -> None:
    replay = Replay(1e-3, volume(1e-3), fits=lambda bucket: bucket[0] % 2 == 0)
    replay(STREAMS["batches"])
    assert all(bucket[0] % 2 == 0 for bucket in replay.buckets if bucket[0] > 1)


def test_there_are_no_more_buckets_than_allowed() -> None:
    replay = Replay(1e-3, volume(1e-3), most=3)([(512,), *STREAMS["batches"]])
    assert len(replay.used) == 3


def test_buckets_of_before_are_there_at_once() -> None:
    replay = Replay(1.0, volume(1e-9), known={(50,): 2.0, (99,): 2.0})([(40,), (60,), (100,)])
    assert replay.buckets == [(50,), (99,), (128,)]


def test_buckets_that_are_gone_are_not_chosen() -> None:
    replay = Replay(1.0, volume(1e-9))([(70,), (40,)])
    replay.learner.gone((128,))
    assert replay([(40,)]).buckets[-1] == (64,)


def test_the_sizes_that_are_kept_are_bounded() -> None:
    learner = Learner(20, pow2)
    for n in itertools.chain(range(1, 10_000), range(1, 10_000)):
        learner.count((n, 10_000 - n))
    assert sum(one.calls for one in learner.learnt()) == 0
    assert len(learner._counts) <= MOST_SIZES
    learner.compiled((16_384, 16_384), 1.0)
    (only,) = learner.learnt()
    assert only.calls == 2 * 9_999


@pytest.mark.parametrize("seconds", [{10: 1.0}, {10: 1.0, 20: 1.0}, {10: 2.0, 20: 1.0, 40: 1.5}])
def test_a_line_never_falls(seconds: dict[float, float]) -> None:
    line = fitted_line(seconds)
    assert line.start >= 0 and line.slope >= 0 and 0.5 <= line.at(15) <= 2


def test_given_sizes_are_not_rounded_however_many_there_are() -> None:
    replay = Replay(1e-3, volume(1e-3), fixed=[0])
    replay([(2 ** int(b), int(s)) for b, s in RANDOM.integers((0, 1000), (3, 1400), (2000, 2))])
    assert sum(one.calls for one in replay.learner.learnt()) == 2000
    assert {bucket[0] for bucket in replay.buckets} == {1, 2, 4}
