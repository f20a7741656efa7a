"""Loops that end by data, wherever what is around them may not run: they end, and are right.

A loop that runs on padding never ends here. So the programs run in processes of their own, which
say at which one they are, and end themselves.
"""

import faulthandler
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bucketjit import BucketedExec, Fallback
from tests.comparison import assert_like_jit
from tests.harness import Arg, Case
from tests.masking.rules.test_vmapped_sizes import check_rows

SIZES = (3, 4)  # in a bucket of 4: x[3:] has 0 and 1 of at most 1 row
SECONDS = 60  # for one program


def collatz(x: Any) -> Any:
    """Steps down to 1; from 0, which padding is, it never gets there."""

    def step(state: Any) -> Any:
        n, count = state
        return jnp.where(n % 2 == 0, n // 2, 3 * n + 1), count + 1

    return lax.while_loop(lambda state: state[0] != 1, step, (x, jnp.zeros_like(x)))[1]


def countdown(x: Any) -> Any:
    """A loop in the body of a loop; when the outer one is done, the inner one has no end."""

    def step(state: Any) -> Any:
        return state[0] - 1, state[1] + collatz(state[0])

    return lax.while_loop(lambda state: state[0] != 0, step, (x, jnp.zeros_like(x)))[1]


def counted(x: Any) -> Any:
    """One that ends in rows that are done, too: under `vmap`, JAX runs it there."""

    def step(state: Any) -> Any:
        return state[0] - 1, state[1] + collatz(state[0] + 1)

    return lax.while_loop(lambda state: state[0] != 0, step, (x, jnp.zeros_like(x)))[1]


def in_branches(x: Any) -> Any:
    return lax.switch(x % 3, [collatz, lambda n: -n, lambda n: collatz(3 * n)], x)


@jax.custom_jvp
def custom(x: Any) -> Any:
    return collatz(x)


custom.defjvp(lambda primals, tangents: (custom(*primals), tangents[0]))

# Functions of a row; each stands in a map over rows of which there may be none.
LOOPS: dict[str, Callable[[Any], Any]] = {
    "while": collatz,
    "fori": lambda x: lax.fori_loop(0, jnp.where(x > 0, x, 2**31 - 1), lambda i, c: c ^ i, x),
    "while in a while": countdown,
    "while in a predicate": lambda x: lax.while_loop(lambda n: collatz(n) > 2, lambda n: n // 2, x),
    "static scan": lambda x: lax.scan(lambda c, i: (c + collatz(x * i), c), 0, jnp.arange(1, 4)),
    "while in branches": in_branches,
    "while in a vmap": lambda x: jax.vmap(collatz)(jnp.stack([x, 3 * x])),
    "while in a call": jax.jit(collatz),
    "while in a remat": jax.checkpoint(collatz),
    "while in a custom derivative": custom,
}


def with_carry(loop: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda c, row: (c + loop(row), c - row)


def fours(x: Any) -> Any:
    return x[: x.shape[0] // 4 * 4].reshape(x.shape[0] // 4, 4)


def while_over(x: Any) -> Any:
    def step(state: Any) -> Any:
        return state[0] + 1, state[1] + collatz(x[state[0]])

    return lax.while_loop(lambda state: state[0] < x.shape[0], step, (3, 0))[1]


def by_size(x: Any) -> Any:
    some = jnp.asarray(x.shape[0]) > 4
    return lax.cond(some, lambda: lax.map(collatz, x[3:]).sum(), lambda: 0)


def common_divisor(a: Any, b: Any) -> Any:
    """Of positive numbers; of others it never ends."""

    def step(state: Any) -> Any:
        a, b = state
        return jnp.where(a > b, a - b, a), jnp.where(b > a, b - a, b)

    return lax.while_loop(lambda state: state[0] != state[1], step, (a, b))[0]


def divisors(x: Any, **options: Any) -> Any:
    return lax.associative_scan(jax.vmap(common_divisor), x, **options)


def halved(row: Any) -> Any:
    return lax.while_loop(lambda y: jnp.logical_not(jnp.abs(y) < 1), lambda y: y / 2, 1 / row)


def weighed(c: Any, row: Any) -> Any:
    return c + jnp.sin(row) * collatz(row.astype(jnp.int32)), c


def of_floats(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: fn(x.astype(jnp.float32))


PLACES: dict[str, Callable[[Any], Any]] = {
    "map in batches": lambda x: lax.map(collatz, x, batch_size=4),
    "scan": lambda x: lax.scan(with_carry(collatz), 0, x[3:]),
    "reversed scan": lambda x: lax.scan(with_carry(countdown), 0, x[3:], reverse=True),
    "reversed scan of vmap": lambda x: lax.scan(
        with_carry(jax.vmap(collatz)), jnp.zeros(4, x.dtype), fours(x), reverse=True
    ),
    "maps": lambda x: lax.map(lambda a: lax.map(lambda b: collatz(a * b), x[3:]).sum(), x[3:]),
    "map of vmap": lambda x: lax.map(
        lambda a: jax.vmap(lambda b: counted(a * b))(x[3:]).sum(), x[3:]
    ),
    "vmap": lambda x: jax.vmap(counted)(x[3:]),
    "vmap of map": lambda x: jax.vmap(lambda a: lax.map(lambda b: collatz(a * b), x[3:]).sum())(
        x[3:]
    ),
    "vmap of branches": lambda x: jax.vmap(in_branches)(x[3:] * 3),
    "branch by size": by_size,
    "branch by size in a map": lambda x: lax.map(lambda row: by_size(x) + row, x[3:]),
    "while": while_over,
    "while in a map": lambda x: lax.map(lambda row: while_over(row * x), x[3:]),
    # Of three rows the inner loop would have no end, on what is no padding.
    "fori over the size": lambda x: lax.fori_loop(
        0, x.shape[0] - 3, lambda i, c: c + collatz(x.max() - 3), 0
    ),
    "associative scan": lambda x: divisors(x, reverse=True),
    "associative scan in a map": lambda x: lax.map(lambda a: divisors(a * x[3:]).sum(), x[3:]),
    "tangent": of_floats(lambda x: jax.jvp(lambda y: lax.map(halved, y[3:]), (x,), (x,))),
    "remat": of_floats(jax.grad(lambda x: lax.scan(jax.checkpoint(weighed), 0.0, x[3:])[0])),
    "fori over the size as a number": lambda x: lax.fori_loop(
        0, int(x.shape[0]) - 3, lambda i, c: c + collatz(x.max() - 3), 0
    ),
}

# Rows with sizes of their own: each branch and body runs for all of them if it does for one.
ROWS: dict[str, Callable[[Any], Any]] = {
    "branch": lambda x: lax.cond(
        jnp.asarray(x.shape[0]) < 8, lambda n: collatz(8 - n), lambda n: n, x.shape[0]
    ),
    "body": lambda x: countdown(jnp.asarray(x.shape[0])),
    "step": lambda x: lax.scan(with_carry(countdown), 0, x),
}


def _run(kind: str, name: str) -> None:
    if kind == "rows":
        check_rows(Case(name, ROWS[name], (Arg("s", "int32", low=1, high=9),)))
        return
    fn = PLACES[name] if kind == "places" else lambda x: lax.map(LOOPS[name], x[3:])
    executor = BucketedExec(fn, fallback=Fallback.ERROR).with_pow2()
    for n in SIZES:
        assert_like_jit(executor, fn, np.arange(1, n + 1, dtype=np.int32))


KINDS = {"loops": LOOPS, "places": PLACES, "rows": ROWS}


def _run_all() -> None:
    for kind, programs in KINDS.items():
        for name in programs:
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            print(name, flush=True)
            _run(kind, name)


def test_they_end_and_are_right() -> None:
    code = "from tests.masking.rules.test_loops import _run_all; _run_all()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    begun = done.stdout.splitlines()
    assert "Timeout" not in done.stderr, f"{begun[-1]} has not returned in {SECONDS} s"
    assert done.returncode == 0, f"{begun[-1:]}: {done.stderr[-2000:]}"
    assert begun == [name for programs in KINDS.values() for name in programs]
