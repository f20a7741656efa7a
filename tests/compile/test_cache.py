import gc
import sys
import threading
import time
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bucketjit._compile.cache import ExecutableCache

PATIENCE = 20  # seconds until a test that hangs is failed


class Entry:
    """Something that can be told apart and weakly referenced."""


def never():
    raise AssertionError("compiled although stored")


def fill(cache, *keys):
    for key in keys:
        cache.get_or_compile(key, lambda key=key: f"entry {key}")


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


class Gate:
    """A compile that starts, waits to be let through, and then returns or raises."""

    def __init__(self, outcome):
        self.outcome = outcome
        self.started = threading.Event()
        self.opened = threading.Event()
        self.calls = 0

    def __call__(self):
        self.calls += 1
        self.started.set()
        assert self.opened.wait(PATIENCE)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as executor:
        yield executor


def ask(pool, cache, key, gate, threads):
    """Ask for one key from many threads and return once one compiles and the rest wait."""
    futures = [pool.submit(cache.get_or_compile, key, gate) for _ in range(threads)]
    assert gate.started.wait(PATIENCE)
    wait_for(cache, key, threads - 1)
    return futures


def wait_for(cache, key, threads):
    """Return once so many threads wait for a key that another one compiles."""
    flight = cache._flights[key]

    def waiting():
        frames = [f for f in sys._current_frames().values() if "flight" in f.f_code.co_varnames]
        return [f for f in frames if f.f_locals.get("flight") is flight]

    until(lambda: len(waiting()) == threads)


def test_what_is_made_ready_is_no_use(pool):
    cache = ExecutableCache(4)
    gate = Gate("A")
    owner = pool.submit(cache.get_or_compile, "a", gate, False)
    assert gate.started.wait(PATIENCE)
    waiter = pool.submit(cache.get_or_compile, "a", never, False)
    wait_for(cache, "a", 1)
    gate.opened.set()
    assert owner.result(PATIENCE) == waiter.result(PATIENCE) == "A"
    assert cache.get_or_compile("a", never, is_use=False) == "A"
    assert cache.info().hits == cache.slot("a").uses.read() == 0
    assert cache.get_or_compile("a", never) == "A"
    assert cache.info().hits == cache.slot("a").uses.read() == 1


def others_compile(pool, cache, interrupted, again):
    """Five threads wait for one that ends by an interrupt; one of them compiles for all."""
    (owner,) = ask(pool, cache, "a", interrupted, threads=1)
    waiters = [pool.submit(cache.get_or_compile, "a", again) for _ in range(5)]
    wait_for(cache, "a", 5)
    interrupted.opened.set()
    again.opened.set()
    assert isinstance(owner.exception(PATIENCE), KeyboardInterrupt)
    assert [waiter.result(PATIENCE) for waiter in waiters] == [again.outcome] * 5
    assert again.calls == 1


class TestOneThread:
    @pytest.mark.parametrize(("limits", "kept"), [({}, 2), ({"max_bytes": 10, "weigh": len}, 1)])
    def test_why_entries_leave(self, limits, kept):
        told = []
        cache = ExecutableCache(2, on_evict=lambda *item: told.append(item), **limits)
        fill(cache, "a", "b", "c")
        bound = "max_bytes=10" if limits else "maxsize=2"
        why = f"the least recently used, for want of room ({bound})"
        assert told == [(key, f"entry {key}", why) for key in "abc"[: 3 - kept]]
        cache.clear()
        assert told[3 - kept :] == [(key, f"entry {key}", "cleared") for key in "abc"[3 - kept :]]

    def test_a_failed_compile_frees_what_it_held(self):
        cache, held = ExecutableCache(2), []

        def fail():
            local = Entry()
            held.append(weakref.ref(local))
            raise OSError

        gc.disable()
        try:
            with pytest.raises(OSError) as caught:
                cache.get_or_compile("a", fail)
            assert held[0]() is not None
            caught.value.__traceback__ = None
            del caught
            assert held[0]() is None
        finally:
            gc.enable()

    def test_a_compile_may_ask_for_another_key(self):
        cache = ExecutableCache(2)
        assert cache.get_or_compile("a", lambda: cache.get_or_compile("b", lambda: "B") + "A") == (
            "BA"
        )
        assert cache.items() == [("b", "B"), ("a", "BA")]

    def test_a_compile_that_asks_for_itself_is_refused(self):
        cache = ExecutableCache(2)

        def recursive():
            return cache.get_or_compile("a", recursive)

        with pytest.raises(RuntimeError, match="compiling 'a' needs its own result"):
            cache.get_or_compile("a", recursive)
        with pytest.raises(RuntimeError, match="compiling 'a' needs its own result"):
            cache.get_or_compile("a", lambda: cache.get_or_compile("b", recursive))
        assert cache.get_or_compile("a", lambda: "A") == "A"
        assert list(dict(cache.items())) == ["a"]

    def test_on_evict_may_use_the_cache(self):
        sizes = []
        cache = ExecutableCache(1, on_evict=lambda *_: sizes.append(cache.info().currsize))
        fill(cache, "a", "b")
        cache.clear()
        assert sizes == [1, 0]


class TestThreads:
    def test_stored_entries_are_served_during_a_compile(self, pool):
        cache, gate = ExecutableCache(4), Gate("B")
        fill(cache, "a")
        (future,) = ask(pool, cache, "b", gate, threads=1)
        assert cache.get("a") == cache.get_or_compile("a", never) == "entry a"
        assert cache.get("b") is None
        gate.opened.set()
        assert future.result(PATIENCE) == "B"

    def test_an_interrupt_is_for_its_own_thread(self, pool):
        interrupted = Gate(KeyboardInterrupt())
        others_compile(pool, ExecutableCache(4), interrupted, Gate("A"))
        assert interrupted.calls == 1

    def test_dropped_while_compiling_is_not_stored(self, pool):
        evicted = []
        cache = ExecutableCache(4, on_evict=lambda *item: evicted.append(item))
        old, new = Gate("old"), Gate("new")
        before = ask(pool, cache, "a", old, threads=4)
        cache.clear()
        after = pool.submit(cache.get_or_compile, "a", new)
        assert new.started.wait(PATIENCE)
        old.opened.set()
        assert [future.result(PATIENCE) for future in before] == ["old"] * 4
        assert len(cache) == 0
        joined = pool.submit(cache.get_or_compile, "a", never)
        wait_for(cache, "a", 1)
        new.opened.set()
        assert after.result(PATIENCE) == joined.result(PATIENCE) == "new"
        assert cache.items() == [("a", "new")]
        assert evicted == []

    def test_a_failure_after_a_clear_leaves_the_new_compile_alone(self, pool):
        cache, old, new = ExecutableCache(4), Gate(ValueError()), Gate("new")
        (before,) = ask(pool, cache, "a", old, threads=1)
        cache.clear()
        (after,) = ask(pool, cache, "a", new, threads=1)
        old.opened.set()
        assert before.exception(PATIENCE) is old.outcome
        new.opened.set()
        assert after.result(PATIENCE) == "new"
        assert list(dict(cache.items())) == ["a"]


class AgainstModel(RuleBasedStateMachine):
    """The cache against an OrderedDict, the least recently used key first."""

    keys = st.integers(0, 6)

    def __init__(self):
        super().__init__()
        self.maxsize = 3
        self.evicted = []
        self.cache = ExecutableCache(
            self.maxsize, on_evict=lambda *item: self.evicted.append(item[:2])
        )
        self.model = OrderedDict()
        self.left = []
        self.hits = self.misses = self.evictions = self.serial = 0

    @rule(key=keys)
    def get(self, key):
        entry = self.cache.get(key)
        assert entry == self.model.get(key)
        if key in self.model:
            self.hits += 1
            self.model.move_to_end(key)

    @rule(key=keys)
    def get_or_compile(self, key):
        self.serial += 1
        entry = self.cache.get_or_compile(key, lambda: self.serial)
        if key in self.model:
            self.hits += 1
            self.model.move_to_end(key)
        else:
            self.misses += 1
            if len(self.model) == self.maxsize:
                self.left.append(self.model.popitem(last=False))
                self.evictions += 1
            self.model[key] = self.serial
        assert entry == self.model[key]

    @precondition(lambda self: len(self.model) < 7)
    @rule(data=st.data())
    def fail_to_compile(self, data):
        key = data.draw(st.sampled_from(sorted(set(range(7)) - set(self.model))))
        with pytest.raises(ZeroDivisionError):
            self.cache.get_or_compile(key, lambda: 1 // 0)

    @rule()
    def clear(self):
        self.cache.clear()
        self.left += sorted(self.model.items())
        self.model.clear()
        self.hits = self.misses = self.evictions = 0

    @invariant()
    def agrees(self):
        assert dict(self.cache.items()) == dict(self.model)
        assert len(self.cache) == len(self.model)
        assert sorted(self.evicted) == sorted(self.left)
        assert self.cache.evictions == self.evictions
        assert self.cache.info() == (self.hits, self.misses, self.maxsize, len(self.model))


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(deadline=None, max_examples=50, stateful_step_count=30)
