"""Claims by themselves: one process gets each, and dead ones give way."""

from __future__ import annotations

import errno
import os
import threading
import time
from types import SimpleNamespace

import pytest

from bucketjit._persistence import claims, file_format, files
from bucketjit._persistence.claims import State, Watch, claim_path, take
from tests.persistence.test_files import HEADER, NAME, PAYLOAD


@pytest.fixture
def path(tmp_path):
    return claim_path(tmp_path, HEADER.key)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still. The claims' only clock is the monotonic one of this process."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(claims, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def dead_claim(path) -> None:
    """A claim whose holder was killed, on a machine whose clock is years ahead."""
    path.write_bytes(b"elsewhere 7 0123 000000000042\n")
    os.utime(path, (4e9, 4e9))


def test_one_of_many_gets_a_claim(path):
    for _ in range(20):
        start, got = threading.Barrier(8), []

        def run(start=start, got=got):
            start.wait()
            got.append(take(path))

        threads = [threading.Thread(target=run) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        [claim] = [each for each in got if each is not None]
        assert take(path) is None
        claim.release()
        assert not path.exists()


def test_a_holder_counts_and_is_never_taken_for_dead(path, clock, monkeypatch):
    monkeypatch.setattr(claims, "BEAT", 0.001)
    claim, watch, before = take(path), Watch(path), b""
    for _ in range(3):
        assert watch.look() is State.HELD
        before, deadline = path.read_bytes(), time.monotonic() + 60
        while path.read_bytes() == before and time.monotonic() < deadline:
            time.sleep(0.001)
        clock.now += 1e6
    assert len(path.read_bytes()) == len(before)
    claim.release()
    assert watch.look() is State.GONE


def test_a_holder_that_stops_counting_is_dead(path, clock):
    dead_claim(path)
    watch = Watch(path)
    assert watch.look() is State.HELD  # whatever its age: clocks of machines are not compared
    clock.now += claims.DEAD_AFTER - 1
    assert watch.look() is State.HELD
    clock.now += 1
    assert watch.look() is State.DEAD
    watch.remove_dead()
    assert watch.look() is State.GONE and list(path.parent.iterdir()) == []
    watch.remove_dead()  # another process did already


def test_a_new_claim_in_the_place_of_a_dead_one_stays(path, clock):
    """Two processes find one dead, and the slower one meets the claim of the faster one."""
    dead_claim(path)
    fast, slow = Watch(path), Watch(path)
    for watch in (fast, slow):
        watch.look()
    clock.now += claims.DEAD_AFTER
    assert fast.look() is slow.look() is State.DEAD
    fast.remove_dead()
    claim = take(path)
    slow.remove_dead()
    assert take(path) is None and [p.name for p in path.parent.iterdir()] == [path.name]
    claim.release()
    assert not path.exists()


def test_the_claim_of_the_next_process_is_another_one(path):
    claim, watch = take(path), Watch(path)
    assert watch.look() is State.HELD
    claim.release()
    claim = take(path)
    assert watch.look() is State.GONE
    assert Watch(path).look() is State.HELD
    claim.release()


def test_who_was_taken_for_dead_does_not_remove_the_next_claim(path):
    late = take(path)
    path.unlink()
    claim = take(path)
    late.release()
    assert take(path) is None
    claim.release()


def test_a_claim_that_is_lost_stops_counting(path):
    claim = take(path)
    thread = claim._thread
    del claim
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_nothing_is_left_of_a_claim_that_fails(path, monkeypatch, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        take(path)
    assert list(path.parent.iterdir()) == []


def test_a_claim_that_cannot_be_read_does_not_last(path, clock):
    path.mkdir()
    watch = Watch(path)
    assert watch.look() is State.HELD
    clock.now += claims.DEAD_AFTER
    assert watch.look() is State.DEAD


# --- files that other machines replace and remove -----------------------------------------------


def stale(*_, **__):
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_a_file_that_is_replaced_meanwhile_is_read_again(tmp_path, monkeypatch):
    files.write(tmp_path / NAME, file_format.pack(HEADER, PAYLOAD))
    unpack, left = files.unpack_file, [stale, stale]

    def unpack_later(file, length, payload):
        header = unpack(file, length, payload)
        return left.pop()() if left else header

    monkeypatch.setattr(files, "unpack_file", unpack_later)
    assert files.load(tmp_path / NAME) == (HEADER, PAYLOAD)
    left += [stale] * 100
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        files.load(tmp_path / NAME)


def test_a_claim_that_is_removed_meanwhile_is_gone(path, monkeypatch):
    dead_claim(path)
    monkeypatch.setattr(os, "read", stale)
    assert Watch(path).look() is State.GONE


def test_the_clock_of_the_file_server_tells_what_was_abandoned(tmp_path, monkeypatch):
    """Here it is a day later than there, or a day earlier."""
    for name in (".writing-new", ".claim-new"):
        (tmp_path / name).touch()
    for name in (".writing-old", ".claim-old"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - 7200,) * 2)
    for skew in (86400, -86400):
        here = SimpleNamespace(time=lambda skew=skew: time.time() + skew)
        monkeypatch.setattr(files, "time", here)
        assert [p.name for p in files.abandoned(tmp_path)] == [".claim-old", ".writing-old"]
    assert len(list(tmp_path.iterdir())) == 4


def test_a_bound_is_kept_while_others_write_and_remove(tmp_path):
    errors, size = [], 1000

    def sweep(number):
        try:
            for i in range(60):
                files.write(tmp_path / f"{number}-{i}{files.SUFFIX}", bytes(size))
                files.bound(tmp_path, 5 * size)
        except BaseException as error:
            errors.append(error)

    (tmp_path / ".writing-old").touch()
    os.utime(tmp_path / ".writing-old", (1, 1))
    threads = [threading.Thread(target=sweep, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    files.bound(tmp_path, 5 * size)
    left = list(tmp_path.iterdir())
    assert len(left) == 5 and all(p.suffix == files.SUFFIX for p in left)


def test_a_directory_that_vanishes_is_no_error_of_a_bound(tmp_path):
    assert files.bound(tmp_path / "gone", 100) == []
