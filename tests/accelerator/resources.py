"""Memory and threads: donation, `max_bytes`, and compiles in the background."""

import gc
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit import BucketedExec
from tests.accelerator.arrays import contents
from tests.accelerator.on_device import (
    NotShown,
    as_on_an_accelerator,
    device,
    is_cpu,
    memory,
    placed,
    same,
)
from tests.alone import run_python

MIB = 2**20


def added(state: Any, x: Any) -> Any:
    """A step whose state has closed axes."""
    return state + x.sum(), x * 2


def check_donation() -> str:
    """Donated arguments are deleted, and a closed one is reused for a result."""
    executor = BucketedExec(added, dynamic_axes=(None, "n, _"), donate_argnums=(0, 1)).with_pow2()
    with as_on_an_accelerator():
        for n in (5, 8, 7, 5):
            host = contents((n, 8))
            # Computed: on CPU, memory that is shared with NumPy's is not donated.
            state, x = jnp.full((32, 32), 1.0), placed(host)
            where = state.unsafe_buffer_pointer()
            new, doubled = jax.block_until_ready(executor(state, x))
            assert state.is_deleted() and x.is_deleted()
            assert new.unsafe_buffer_pointer() == where, "the state was copied"
            same((new, doubled), (np.full((32, 32), 1 + host.sum(), np.float32), host * 2), 1e-4)
    return "4 calls, state in place"


def check_peak_memory() -> str:
    """A step with a donated state needs memory for one state, and not for two."""
    size = 256 * MIB
    base, peak = memory(), memory("peak_bytes_in_use")
    if peak - base > size:
        raise NotShown(f"{peak / MIB:.0f} MiB were in use before: a peak beyond would not show")
    executor = BucketedExec(added, dynamic_axes=(None, "n, _"), donate_argnums=0).with_pow2()
    state = jnp.ones(size // 4, jnp.float32)
    for n in (5, 6, 5):
        state, _ = jax.block_until_ready(executor(state, placed(contents((n, 8)))))
    more = memory("peak_bytes_in_use") - base
    assert more < 1.5 * size, f"{more / MIB:.0f} MiB at the peak for a state of {size / MIB:.0f}"
    return f"{more / MIB:.0f} MiB at the peak, the state is {size / MIB:.0f}"


def donate_a_view() -> None:
    """Donate a result that is a view of padded memory, where that is used again and where not."""
    executor = BucketedExec(lambda x: x * 2, dynamic_axes="n, _").with_pow2()
    host = contents((5, 8))
    x = placed(host)
    with as_on_an_accelerator():
        view, other = executor(x), executor(x)
        bumped = jax.jit(lambda v: v.at[0].set(9), donate_argnums=0)(view)
        with warnings.catch_warnings(action="ignore"):  # JAX says that no result can reuse it
            reduced = jax.jit(lambda v: v.sum(0), donate_argnums=0)(other)
        wanted = host * 2
        same(reduced, wanted.sum(0), 1e-4)
        wanted[0] = 9
        same(bumped, wanted)
        again = BucketedExec(lambda v: v + 1, dynamic_axes="n, _", donate_argnums=0)
        doubled = executor(placed(contents((4, 8)))), executor(placed(contents((3, 8))))
        got = [again.with_pow2()(v) for v in doubled]
        same(got, [contents((n, 8)) * 2 + 1 for n in (4, 3)])
        same(x, host)


def check_donated_views() -> str:
    """Results that are views can be donated; in a process of its own, which XLA could end."""
    if is_cpu():
        donate_a_view()
        return "3 kinds"
    code = f"from {__name__} import donate_a_view; donate_a_view()"
    done = run_python("-c", code, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    assert done.returncode == 0, f"exit status {done.returncode}: {last}"
    return "3 kinds, in a process of its own"


def check_max_bytes() -> str:
    """Executables count their bytes, and one that is evicted frees what its program held."""
    size = 8 * MIB

    def scaled(x: Any, k: int) -> Any:
        with jax.ensure_compile_time_eval():
            table = jnp.full(size // 4, k, jnp.float32)
        return x * table[: x.shape[1]]

    def held() -> int:
        gc.collect()
        if is_cpu():  # which tells nothing of its memory
            return sum(a.nbytes for a in device().client.live_arrays())
        return memory()

    executor = BucketedExec(scaled, dynamic_axes=("n, _", None), static_argnums=1).with_pow2()
    bounded, x = executor.with_maxsize(None, max_bytes=int(2.5 * size)), placed(contents((5, 8)))
    more = {}
    for which, each in (("unbounded", executor), ("bounded", bounded)):
        base = held()
        for k in range(1, 5):
            same(each(x, k), np.asarray(x) * np.float32(k))
        more[which] = (held() - base) / MIB
    stats = bounded.stats()
    counted = [bucket.nbytes for bucket in stats.buckets]
    assert counted and min(counted) >= size, f"bytes by bucket: {counted}"
    assert sum(counted) <= 2.5 * size, f"bytes by bucket: {counted}"
    assert stats.evictions == 2, f"{stats.evictions} evictions"
    assert more["bounded"] < 0.75 * more["unbounded"], f"MiB that 4 programs hold: {more}"
    return f"{more['bounded']:.0f} MiB for 2 programs, {more['unbounded']:.0f} for all 4"


def check_background() -> str:
    """Compiles in the background, and stand-ins, from several threads, end and are right."""
    executor = BucketedExec(lambda x: (jnp.sort(x, 0), x.sum(0)), dynamic_axes="n, _").with_pow2()
    executor = executor.with_background_compile(2)

    def calls(sizes: tuple[int, ...]) -> None:
        # A thread does not see the precision of another one, and would compile for its own.
        with jax.default_matmul_precision("highest"):
            for n in sizes:
                host = contents((n, 8))
                same(executor(placed(host)), (np.sort(host, 0), host.sum(0)), 1e-4)

    with as_on_an_accelerator():
        calls((64,))
        sizes_of_threads = [(3, 5, 17, 33), (17, 3, 9, 4), (33, 16, 2, 60), (5, 40, 3, 31)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(calls, sizes_of_threads))
        assert executor.wait_for_compiles(60), "a compile hangs"
        before = executor.stats().compiles
        for sizes in sizes_of_threads:
            calls(sizes)
    assert executor.stats().compiles == before, "a bucket was compiled twice"
    return f"{before} buckets, 4 threads"
