"""Compiles of the background that another process does."""

from __future__ import annotations

import functools
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit._compile import provider
from bucketjit._compile.background import _Turns
from bucketjit._compile.process import messages, throttle, worker
from bucketjit._compile.process import pool as pool_module
from bucketjit._compile.process.pool import Pool
from bucketjit._jax.compiler import NotElsewhere, compile_elsewhere
from bucketjit._jax.serialization import Placement, serialized
from bucketjit.errors import SpecError
from bucketjit.types import Event
from tests.comparison import assert_same, ramp
from tests.process_table import SECONDS, assert_gone, child, state

pytestmark = pytest.mark.skipif(not pool_module.can_start(), reason="no processes that compile")
_PATIENT = f"""
    from bucketjit._compile import provider
    provider._PATIENCE = {SECONDS}
"""


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """A pool of this test's own."""
    made = Pool()
    monkeypatch.setattr(provider, "pool", lambda: made)
    monkeypatch.setattr(provider, "_PATIENCE", SECONDS)
    yield made
    made.end()


def centred(x: jax.Array) -> jax.Array:
    return jnp.exp(x - x.max()) - x.mean()


def executor(
    fn: Callable[..., Any] = centred, **options: Any
) -> tuple[BucketedExec, Callable[[str], list[str]]]:
    """An executor that compiles in the background, and what tells the details of its events."""
    told: list[Event] = []
    made = BucketedExec(fn).with_pow2().with_on_event(told.append)
    made = made.with_background_compile(**options)
    return made, lambda kind: [event.detail for event in told if event.kind == kind]


def members(process: Any) -> tuple[int, int]:
    """The throttle, and the worker, which is its only child."""
    return process._popen.pid, child(process._popen.pid)


# --- what it compiles ---


def test_another_process_compiles_what_compiles_in_the_background(
    processes: Pool, xla_compiles: Callable[[], int]
) -> None:
    wrapped, told = executor()
    wrapped(ramp(60))
    before = xla_compiles()
    assert_same(wrapped(ramp(5)), centred(jnp.asarray(ramp(5))))
    assert wrapped.wait_for_compiles(SECONDS)
    assert told("process") == []
    [process] = processes._all
    assert process in processes._free
    for n in (5, 8, 6):
        assert_same(wrapped(ramp(n)), centred(jnp.asarray(ramp(n))))
    assert wrapped.stats().compiles == 2
    hits = {tuple(bucket.sizes.values()): bucket.hits for bucket in wrapped.stats().buckets}
    assert hits[8,] == 3
    assert xla_compiles() > before  # JAX counts it as one of its own


def lapack(x: jax.Array) -> jax.Array:
    return jnp.linalg.eigh(x @ x.T)[0].sum() * x


def loops(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, row: (c + row, jnp.fft.fft(c).real), jnp.zeros(4), x)[1]


def draws(x: jax.Array) -> jax.Array:
    return x + jax.random.normal(jax.random.key(3), x.shape)


def gradients(x: jax.Array) -> Any:
    return jax.value_and_grad(lambda v: jnp.log1p(v**2).sum())(x)


@pytest.mark.parametrize("fn", [lapack, loops, draws, gradients])
def test_same_as_compiled_here(processes: Pool, fn: Callable[..., Any]) -> None:
    wrapped, told = executor(fn)
    wrapped = wrapped.with_dynamic_axes("b, _")
    plain = BucketedExec(fn, dynamic_axes="b, _").with_pow2()
    rng = np.random.default_rng(0)
    for n in (17, 3, 5):
        wrapped(rng.normal(size=(n, 4)).astype(np.float32))
    assert wrapped.wait_for_compiles(SECONDS)
    assert told("process") == [] and wrapped.stats().compiles == 3
    for n in (3, 4, 5, 1):
        x = rng.normal(size=(n, 4)).astype(np.float32)
        assert_same(wrapped(x), plain(x))


def test_options_reach_it(processes: Pool) -> None:
    """Without LLVM's optimisation the code is another."""
    found = []
    for level in (0, 3):
        lowered = jax.jit(centred, compiler_options={"xla_backend_optimization_level": level})
        lowered = lowered.lower(ramp(64))
        ask = functools.partial(processes.compile, SECONDS)
        compiled = compile_elsewhere(ask, lowered)
        assert_same(compiled(ramp(64)), centred(jnp.asarray(ramp(64))))
        found.append(serialized(compiled, Placement.on(jax.devices()[0]))[0])
    assert len(found[0]) != len(found[1])


def test_callbacks_compile_here(processes: Pool) -> None:
    def calls_back(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return x * jax.pure_callback(lambda: np.float32(2), shape)

    wrapped, told = executor(calls_back)
    wrapped(ramp(60))
    wrapped(ramp(5))
    assert wrapped.wait_for_compiles(SECONDS)
    assert_same(wrapped(ramp(5)), 2 * jnp.asarray(ramp(5)))
    assert told("process") == ["it compiles in this process: it calls back into Python"]
    assert wrapped.stats().compiles == 2


def test_none_is_asked_where_none_is_wanted(processes: Pool) -> None:
    wrapped, told = executor(process=False)
    wrapped(ramp(60))
    wrapped(ramp(5))
    assert wrapped.wait_for_compiles(SECONDS)
    assert wrapped.stats().compiles == 2
    assert not processes._all and told("process") == []


@pytest.mark.parametrize("process", [None, 1, "yes"])
def test_malformed_process(process: Any) -> None:
    with pytest.raises(SpecError, match="process must be True or False"):
        BucketedExec(centred).with_background_compile(process=process)


_DEVICES = (
    _PATIENT
    + """
    import os
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
    import jax, jax.numpy as jnp, numpy as np
    from bucketjit import BucketedExec

    told = []
    fn = BucketedExec(lambda x: x - x.max()).with_pow2().with_background_compile()
    fn = fn.with_on_event(told.append)
    for device in jax.devices()[:0:-1]:
        for n in (40, 5):
            fn(jax.device_put(np.arange(n, dtype=np.float32), device))
        assert fn.wait_for_compiles()
        out = fn(jax.device_put(np.arange(5, dtype=np.float32), device))
        assert out.devices() == {device} and out.tolist() == [-4, -3, -2, -1, 0]
    print([e.detail for e in told if e.kind == "process"], fn.stats().compiles)
"""
)


def test_each_device_has_its_own() -> None:
    done = _run(_DEVICES)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[] 4\n", "")


# --- files ---


_KEPT = (
    _PATIENT
    + """
    import sys
    import numpy as np
    from bucketjit import BucketedExec

    told = []
    fn = BucketedExec(lambda x: np.float32(2) * (x - x.max())).with_pow2()
    fn = fn.with_background_compile().with_persistence(sys.argv[1]).with_on_event(told.append)
    for n in (40, 5):
        fn(np.arange(n, dtype=np.float32))
    assert fn.wait_for_compiles()
    print([e.kind for e in told if e.kind in ("process", "compile", "load")])
    print(fn(np.arange(5, dtype=np.float32)).tolist())
"""
)


def test_what_it_compiles_is_kept_as_a_whole(tmp_path: Path) -> None:
    values = "[-8.0, -6.0, -4.0, -2.0, 0.0]\n"
    first, second = _run(_KEPT, tmp_path), _run(_KEPT, tmp_path)
    assert first.stdout == "['compile', 'compile']\n" + values, first.stderr
    assert second.stdout == "['load', 'load']\n" + values, second.stderr


def test_its_bytes_are_not_held(processes: Pool) -> None:
    wrapped, _ = executor()
    wrapped(ramp(60))
    wrapped(ramp(5))
    assert wrapped.wait_for_compiles(SECONDS)
    clients = [
        entry.compiled._executable._unloaded_executable.backend
        for _, entry in wrapped._engine.cache.items()
    ]
    assert [getattr(client, "raw", "as lowered") for client in clients].count(None) == 1


_JAX_CACHE = (
    _PATIENT
    + """
    import sys
    import jax, numpy as np
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    from bucketjit import BucketedExec

    def fn(x):
        return jax.numpy.exp(x - x.max())

    told = []
    wrapped = BucketedExec(fn).with_pow2().with_background_compile().with_on_event(told.append)
    for n in (40, 5):
        wrapped(np.arange(n, dtype=np.float32))
    assert wrapped.wait_for_compiles()
    print([e.kind for e in told if e.kind in ("process", "compile", "load")])
    print(bool(np.allclose(wrapped(np.arange(5, dtype=np.float32)), fn(np.arange(5.0)))))
"""
)


def test_beside_the_cache_of_jax(tmp_path: Path) -> None:
    first, second = _run(_JAX_CACHE, tmp_path), _run(_JAX_CACHE, tmp_path)
    assert first.stdout == "['compile', 'compile']\nTrue\n", first.stderr
    assert second.stdout == "['load', 'load']\nTrue\n", second.stderr


# --- what goes wrong ---


def test_a_process_that_has_ended_is_followed_by_another(processes: Pool) -> None:
    wrapped, told = executor()
    wrapped(ramp(60))
    wrapped(ramp(5))
    assert wrapped.wait_for_compiles(SECONDS)
    [first] = processes._all
    paced, compiles = members(first)
    os.kill(compiles, signal.SIGKILL)
    assert_gone(paced, compiles)
    wrapped(ramp(20))
    assert wrapped.wait_for_compiles(SECONDS)
    assert wrapped.stats().compiles == 3 and told("process") == []
    [second] = processes._all
    assert second is not first


def test_one_that_ends_when_it_is_asked_is_followed_by_another(
    processes: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.start()
    [first] = processes._all
    members(first)
    ask = first.ask

    def dies(message: list[bytes], deadline: float) -> list[bytes]:
        os.killpg(first._popen.pid, signal.SIGKILL)
        return ask(message, deadline)

    monkeypatch.setattr(first, "ask", dies)
    wrapped, told = executor()
    wrapped(ramp(60))
    wrapped(ramp(5))
    assert wrapped.wait_for_compiles(SECONDS)
    assert wrapped.stats().compiles == 2 and told("process") == []
    assert first not in processes._all and len(processes._all) == 1


def test_one_that_gets_no_time_is_given_up(
    processes: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider, "_PATIENCE", 0.2)
    monkeypatch.setattr(provider, "_PATIENT", 0.0)
    processes.start()
    [process] = processes._all
    halted = members(process)
    for pid in halted:
        os.kill(pid, signal.SIGSTOP)
    wrapped, told = executor()
    wrapped(ramp(60))
    wrapped(ramp(5))
    assert wrapped.wait_for_compiles(SECONDS)
    assert wrapped.stats().compiles == 2
    [why] = told("process")
    assert why.endswith("the process that compiles got no time for it")
    assert_gone(*halted)
    assert_same(wrapped(ramp(5)), centred(jnp.asarray(ramp(5))))
    wrapped(ramp(20))
    assert wrapped.wait_for_compiles(SECONDS)
    assert told("process")[1].endswith("did not get to it lately")  # and is not asked
    assert not processes._all and processes._rest == 120
    processes._rests_until = 0.0
    monkeypatch.setattr(provider, "_PATIENCE", SECONDS)
    wrapped(ramp(2))
    assert wrapped.wait_for_compiles(SECONDS)
    assert len(told("process")) == 2 and processes._rest == 60


def test_an_interpreter_that_runs_no_scripts(
    processes: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/viewer/viewer")
    wrapped, told = executor()
    wrapped(ramp(60))
    wrapped(ramp(5))
    assert wrapped.wait_for_compiles(SECONDS)
    assert wrapped.stats().compiles == 2 and not processes._all
    assert told("process") == []


def test_an_error_of_xla_is_the_one_of_this_process(processes: Pool) -> None:
    with pytest.raises(NotElsewhere, match="Error"):
        processes.compile(SECONDS, b"no module", b"", 1, 0)
    [process] = processes._all
    assert process.is_alive and process in processes._free


def test_a_program_too_large_to_send(processes: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_MOST_BYTES", 1000)
    with pytest.raises(NotElsewhere, match="bytes"):
        processes.compile(SECONDS, b"x" * 1000, b"", 1, 0)
    assert not processes._all


@pytest.mark.parametrize("most", [1, 2])
def test_many_threads_and_messages(processes: Pool, most: int) -> None:
    """Each thread gets its own answers, through pipes that hold less than one of them."""
    processes._most = most

    def lower(i: int) -> Any:
        table = np.random.default_rng(i).normal(size=(200, 500)).astype(np.float32)
        return jax.jit(lambda x: x @ table).lower(np.ones(200, np.float32)), table

    wanted = [lower(i) for i in range(6)]
    ask = functools.partial(processes.compile, SECONDS)
    found: dict[int, Any] = {}

    def compile(i: int) -> None:
        found[i] = compile_elsewhere(ask, wanted[i][0])

    threads = [threading.Thread(target=compile, args=(i,)) for i in range(len(wanted))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (_, table) in enumerate(wanted):
        assert_same(found[i](np.ones(200, np.float32)), jnp.ones(200) @ table, rtol=1e-4)
    assert len(processes._all) == len(processes._free) == processes._most


# --- its life ---


_ENDS = (
    _PATIENT
    + """
    import os, signal, sys, time
    import numpy as np
    from bucketjit import BucketedExec
    from bucketjit._compile.process.pool import pool
    from tests.process_table import child

    fn = BucketedExec(lambda x: x - x.max()).with_pow2().with_background_compile()
    for n in (40, 5):
        fn(np.arange(n, dtype=np.float32))
    if sys.argv[1] != "compiling":
        assert fn.wait_for_compiles()
    [process] = pool()._all
    print(process._popen.pid, child(process._popen.pid), flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "forked":
        forked = os.fork()
        if not forked:
            assert not pool()._all
            del process
            os._exit(0)
        assert os.waitpid(forked, 0)[1] == 0 and process.is_alive
"""
)


_DIES_COMPILING = """
    import os, signal, threading, time
    import jax, numpy as np
    from bucketjit._jax.compiler import compile_elsewhere
    from bucketjit._compile.process.pool import pool
    from tests.process_table import child

    def deep(x):
        for i in range(600):
            x = jax.numpy.sort(x * (i + 1)) + jax.numpy.sin(x[::-1])
        return x

    lowered = jax.jit(deep).lower(np.ones(64, np.float32))
    ask = lambda *parts: pool().compile(240, *parts)
    threading.Thread(target=compile_elsewhere, args=(ask, lowered), daemon=True).start()
    while not (processes := list(pool()._all)) or pool()._free:
        time.sleep(0.01)
    time.sleep(3)
    print(processes[0]._popen.pid, child(processes[0]._popen.pid), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("how", ["waited", "compiling", "killed", "forked"])
def test_it_ends_with_whom_it_serves(how: str) -> None:
    done = _run(_ENDS, how)
    assert done.returncode == (-signal.SIGKILL if how == "killed" else 0), done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert pids
    assert_gone(*pids)


@pytest.mark.parametrize("is_halted", [False, True])
def test_it_ends_with_its_pacer(processes: Pool, is_halted: bool) -> None:
    """Which may have halted it, and would never let it go on."""
    with pytest.raises(NotElsewhere):
        processes.compile(SECONDS, b"no module", b"", 1, 0)  # it serves
    [process] = processes._all
    paced, compiles = members(process)
    if is_halted:
        os.kill(compiles, signal.SIGSTOP)
    os.kill(paced, signal.SIGKILL)
    assert_gone(compiles)


def test_it_does_not_outlive_whom_it_serves_by_a_compile() -> None:
    done = _run(_DIES_COMPILING)
    assert done.returncode == -signal.SIGTERM, done.stderr
    began = time.monotonic()
    assert_gone(*map(int, done.stdout.split()))
    assert time.monotonic() - began < 10  # the compile takes longer


def test_those_that_have_ended_are_buried(processes: Pool) -> None:
    processes.start()
    [process] = processes._all
    paced, compiles = members(process)
    os.kill(compiles, signal.SIGKILL)
    assert_gone(paced)
    processes.start()
    assert state(paced) is None and process not in processes._all


def test_it_ends_without_work() -> None:
    reads, writes = Pipe()
    with reads:
        assert worker._next_message(reads, 0.01) is None
        messages.send(writes, message := [b"a", b"bc", b"", b"d" * 2**15])
        assert worker._next_message(reads, 0.01) == message
        writes.close()
        assert worker._next_message(reads, SECONDS) is None


def test_none_is_started_after_the_end(processes: Pool) -> None:
    processes.end()
    processes.start()
    with pytest.raises(pool_module.Ended):
        processes.compile(SECONDS, b"", b"", 1, 0)
    assert not processes._all


# --- where it starts ---


_CALLS = (
    _PATIENT
    + """
    import os, sys
    import numpy as np
    from bucketjit import BucketedExec

    told = []
    fn = BucketedExec(lambda x: x - x.max()).with_pow2().with_background_compile()
    fn = fn.with_on_event(lambda event: told.append((event.kind, event.detail)))

    def call():
        for n in (40, 5):
            fn(np.arange(n, dtype=np.float32))
        assert fn.wait_for_compiles()
        assert np.array_equal(fn(np.ones(5, np.float32)), np.zeros(5))
        return [detail for kind, detail in told if kind == "process"]
"""
)


def test_what_it_runs_is_not_what_lies_about(tmp_path: Path) -> None:
    """Neither the present directory, nor variables, nor files of sites decide."""
    for name in ("jax.py", "select.py", "sitecustomize.py", "usercustomize.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})")
    script = f"""
    os.chdir({str(tmp_path)!r})
    os.environ["PYTHONPATH"] = {str(tmp_path)!r}
    assert sys.path[0] == ""
    assert call() == [], told
"""
    done = _run(_CALLS + script)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()


def test_where_standard_streams_are_closed() -> None:
    script = """
    from bucketjit._compile.process.pool import pool
    for fd in (0, 1):
        os.close(fd)
    assert call() == [], told
    assert pool()._all
"""
    done = _run(_CALLS + script)
    assert done.returncode == 0, done.stderr


def test_it_starts_no_other() -> None:
    script = """
    from bucketjit._compile.process.pool import can_start, pool
    assert call() == [] and pool()._all
    [process] = pool()._all
    from tests.process_table import child
    with open(f"/proc/{child(process._popen.pid)}/environ") as file:
        marks = [line for line in file.read().split(chr(0)) if "BUCKETJIT" in line]
    assert can_start() and len(marks) == 1
    os.environ.update(line.split("=") for line in marks)
    assert not can_start()
"""
    done = _run(_CALLS + script)
    assert done.returncode == 0, done.stderr


def test_one_that_cannot_start_is_not_started_for_each_compile(
    processes: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_COMPILER", "no_such_module")
    started = []
    start = Pool._started

    def counted(pool: Pool) -> Any:
        started.append(pool)
        return start(pool)

    monkeypatch.setattr(Pool, "_started", counted)
    wrapped, told = executor()
    wrapped(ramp(60))
    for n in (5, 9, 20):
        wrapped(ramp(n))
    assert wrapped.wait_for_compiles(SECONDS)
    assert wrapped.stats().compiles == 4 and len(started) <= 2
    assert [why.rpartition(": ")[2] for why in told("process")] == [
        "the process has ended",
        *["the process that compiles did not get to it lately"] * 2,
    ]
    monkeypatch.undo()
    processes._rests_until = 0.0


def test_another_version_is_not_asked_again(
    processes: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files may be replaced after this process has read them, and before the other one does."""
    monkeypatch.setattr(pool_module, "stamp", lambda: b"jax 0.0.1")
    wrapped, told = executor()
    wrapped(ramp(60))
    wrapped(ramp(5))
    wrapped(ramp(9))
    assert wrapped.wait_for_compiles(SECONDS)
    assert wrapped.stats().compiles == 3
    [first, second] = told("process")
    assert first == second and f"finds jax {jax.__version__}, jaxlib" in first
    assert first.endswith("this one has jax 0.0.1")
    assert not processes._all
    assert_same(wrapped(ramp(5)), centred(jnp.asarray(ramp(5))))


def test_a_broken_line_is_no_signal() -> None:
    """Programs of the command line have SIGPIPE end them."""
    script = """
    import signal, time
    from bucketjit._compile.process.pool import pool
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    pool().start()
    [process] = pool()._all
    os.killpg(process._popen.pid, signal.SIGKILL)
    while process._popen.poll() is None:
        pass
    try:
        process.ask([b"x" * 2**22], time.monotonic() + 60)
    except EOFError as error:
        print(error)
"""
    done = _run(_CALLS + script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the process has ended\n"


def test_no_wait_is_without_end() -> None:
    """Neither for one that reads nothing, nor for one that stops or ends within its answer."""

    def asked(message: list[bytes], begun: bytes, ends: bool) -> list[bytes]:
        process = object.__new__(pool_module._Process)
        process._line, theirs = Pipe()
        with process._line, theirs:
            os.write(theirs.fileno(), begun)
            if ends:
                with socket.socket(fileno=os.dup(theirs.fileno())) as end:
                    end.shutdown(socket.SHUT_WR)
            return process.ask(message, time.monotonic() + 0.2)

    small, complete = [b"a"], struct.pack("!i", 1) + b"b"
    assert asked(small, complete * 3, ends=False) == [b"b"] * 3
    for message, begun in ((small, b""), (small, complete + b"\0"), ([b"x" * 2**24], b"")):
        with pytest.raises(TimeoutError, match="got no time for it"):
            asked(message, begun, ends=False)
    for begun in (b"", complete, complete + b"\0", complete[:-1]):
        with pytest.raises(EOFError, match="has ended"):
            asked(small, begun, ends=True)


@pytest.mark.parametrize("how", ["ends", "is interrupted"])
def test_exit_does_not_wait_for_what_is_compiled_elsewhere(how: str) -> None:
    script = """
    import signal, time
    from bucketjit._compile.process.pool import pool
    from tests.process_table import child
    fn(np.ones(40, np.float32))
    while not (processes := list(pool()._all)):
        time.sleep(0.01)
    pids = processes[0]._popen.pid, child(processes[0]._popen.pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    fn(np.ones(5, np.float32))
    while pool()._free:
        time.sleep(0.01)
    if sys.argv[1] == "is interrupted":
        raise KeyboardInterrupt
"""
    done = _run(_CALLS + script, how)
    interrupted = how == "is interrupted"
    assert done.returncode == (-signal.SIGINT if interrupted else 0), done.stderr
    assert done.stderr.count("Traceback") == interrupted


# --- standing back ---


def test_it_is_of_the_idle_class(processes: Pool) -> None:
    processes.start()
    [process] = processes._all
    paced, compiles = members(process)
    deadline = time.monotonic() + SECONDS
    while os.sched_getscheduler(compiles) != os.SCHED_IDLE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert os.sched_getscheduler(paced) == os.sched_getscheduler(0)
    assert os.getsid(compiles) == os.getsid(0) and os.getpgid(compiles) != os.getpgid(0)


def test_it_is_halted_while_this_process_is_at_work(processes: Pool) -> None:
    processes.start()
    [process] = processes._all
    _, compiles = members(process)
    states: set[str] = set()
    deadline = time.monotonic() + SECONDS
    while "T" not in states:  # importing JAX is work, and this loop is too
        states.add(state(compiles) or "")
        assert time.monotonic() < deadline, states


def test_whether_a_process_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "LOOK", 0.1)
    until = "import time; t = time.monotonic() + 60\nwhile time.monotonic() < t: {}"
    for what, expected in (("pass", True), ("time.sleep(1)", False)):
        with subprocess.Popen([sys.executable, "-c", until.format(what)]) as process:
            work = throttle._Work(process.pid)
            deadline = time.monotonic() + SECONDS
            agreed = 0
            while agreed < 2:  # starting is work, too
                time.sleep(0.15)
                agreed = agreed + 1 if work.is_under_way() is expected else 0
                assert time.monotonic() < deadline
            process.kill()
    gone = throttle._Work(process.pid)
    time.sleep(0.15)
    assert not gone.is_under_way()


def test_turns_are_short_while_something_compiles(processes: Pool) -> None:
    seen: list[float] = []

    def watched(x: jax.Array) -> jax.Array:
        seen.append(sys.getswitchinterval())
        return x - x.max()

    before = sys.getswitchinterval()
    wrapped, _ = executor(watched)
    wrapped(ramp(60))
    assert set(seen) == {before}
    wrapped(np.zeros(60, np.int32))
    wrapped = wrapped.with_on_event(lambda event: seen.append(sys.getswitchinterval()))
    wrapped(ramp(60))
    seen.clear()
    wrapped(ramp(5))
    assert wrapped.wait_for_compiles(SECONDS)
    assert min(seen) == pytest.approx(0.0005)
    deadline = time.monotonic() + SECONDS
    while sys.getswitchinterval() != before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("before", [0.005, 0.0001, 0.0123, 0.000501])
def test_turns_are_as_before_afterwards(before: float) -> None:
    turns, at_first = _Turns(), sys.getswitchinterval()
    try:
        sys.setswitchinterval(before)
        before = sys.getswitchinterval()
        with turns.short(), turns.short():
            assert sys.getswitchinterval() == pytest.approx(min(0.0005, before))
        assert sys.getswitchinterval() == before
        with turns.short():
            sys.setswitchinterval(0.002)
        assert sys.getswitchinterval() == pytest.approx(0.002)  # somebody wants it so
    finally:
        sys.setswitchinterval(at_first)


def test_turns_of_a_fork_are_as_before() -> None:
    turns, before = _Turns(), sys.getswitchinterval()
    with turns.short():
        turns.forget()  # as after a fork
        assert sys.getswitchinterval() == before
    assert sys.getswitchinterval() == before


def _run(script: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
        cwd=Path(__file__).parents[2],
    )
