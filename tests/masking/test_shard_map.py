"""``shard_map`` over several devices, at sizes that leave the padded shards uneven.

One process with four CPU devices runs all programs: 6 rows are padded to 8, so the halves of the
padded array have 4 rows, and the shards of the exact run 3.
"""

import traceback
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bucketjit import BucketedExec
from bucketjit.errors import FallbackError
from tests.comparison import assert_close
from tests.processes.launch import run_processes

Program = Callable[[Any], Any]

WEIGHTS = np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3)
ROWS, WHOLE = P("d"), P()


def mapped(
    body: Callable[..., Any],
    specs: Any = ROWS,
    out: Any = ROWS,
    shape: tuple[int, ...] = (2,),
    **options: Any,
) -> Callable[..., Any]:
    names = ("d",) if len(shape) == 1 else ("a", "b")
    kind: Any = AxisType.Auto

    def program(*args: Any) -> Any:
        devices = jax.devices()[: int(np.prod(shape))]
        mesh = jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=devices)
        over = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, **options)
        return over(*args)

    return program


def scanned(x: Any) -> Any:
    last, rows = lax.scan(lambda c, r: (c + r, jnp.tanh(c) * r), x[0] * 0, x)
    return lax.psum(last, "d"), rows


def closed_loop(x: Any) -> Any:
    def step(carry: Any, _: Any) -> Any:
        return jnp.sin(carry) + lax.axis_index("d"), None

    return lax.pmean(lax.scan(step, x.sum(0), None, length=3)[0], "d")


def branches(x: Any) -> Any:
    total = x.sum()
    return lax.psum(lax.cond(total > 0, lambda s: s * 2, lambda s: -s, total), "d")


def loss(w: Any, x: Any) -> Any:
    return lax.pmean(jnp.tanh(x @ w).mean() * x.shape[0], "d")


def of_weights(**options: Any) -> Program:
    over = mapped(loss, (WHOLE, ROWS), WHOLE, **options)
    return lambda x: jax.value_and_grad(over)(jnp.asarray(WEIGHTS), x)


TWO = {"shape": (2, 2)}
SUM = mapped(lambda x: lax.psum((x * x.shape[0]).sum(0), "d"), ROWS, WHOLE)
ATTEND = mapped(lambda k, x: jax.nn.softmax(x @ k.T) @ k, (WHOLE, ROWS), ROWS)

PROGRAMS: dict[str, Program] = {
    "sum": SUM,
    "sum_without_types": mapped(lambda x: lax.psum(x.sum(0), "d"), ROWS, WHOLE, check_vma=False),
    "extremes": mapped(lambda x: lax.pmax(x.max(0), "d") - lax.pmin(x.min(0), "d"), ROWS, WHOLE),
    "rows": mapped(lambda x: jax.nn.softmax(jnp.cumsum(x, 0), 0)),
    "more_rows": mapped(lambda x: jnp.concatenate([x, x[:1]], 0)),
    "scan": mapped(scanned, ROWS, (WHOLE, ROWS)),
    "closed_loop": mapped(closed_loop, ROWS, WHOLE),
    "branches": mapped(branches, ROWS, WHOLE),
    "closed_rows_are_gathered": mapped(lambda x: lax.all_gather(x.sum(0), "d")),
    "closed_rows_are_moved": mapped(lambda x: lax.ppermute(x.sum(0), "d", [(0, 1), (1, 0)])),
    "open_and_whole": lambda x: ATTEND(x * 2, x),
    "closed_axis": lambda x: mapped(lambda x: x + x.sum(), P(None, "d"), P(None, "d"))(x[:, :2]),
    "two_mesh_axes": mapped(lambda x: lax.psum(x.sum(0), ("a", "b")), P(("a", "b")), P(), **TWO),
    "one_axis_of_the_mesh": mapped(lambda x: x + lax.psum(x.sum(), "a"), P("a"), P("a"), **TWO),
    "some_axes_by_hand": mapped(
        lambda x: x + lax.psum(x.sum(), "a"), P("a"), P("a"), axis_names={"a"}, **TWO
    ),
    "two_open_axes": lambda x: mapped(
        lambda y: y * 2 + lax.psum(y.sum(), ("a", "b")), P("a", "b"), P("b", "a"), **TWO
    )(x @ x.T),
    "in_a_loop": lambda x: lax.fori_loop(0, 3, lambda _, c: c + SUM(x), jnp.zeros(3)),
    "in_vmap": lambda x: jax.vmap(mapped(lambda c: c - lax.pmean(c.mean(), "d")), 1, 1)(x),
    "gradient_by_rows": jax.grad(lambda x: SUM(jnp.sin(x)).sum()),
    "gradient_by_weights": of_weights(),
    "gradient_without_types": of_weights(check_vma=False),
    "gradient_inside": lambda x: mapped(
        lambda w, x: jax.grad(lambda w: jnp.tanh(x @ w).sum())(w), (WHOLE, ROWS), WHOLE
    )(jnp.asarray(WEIGHTS), x),
    "gradient_by_open_and_whole": lambda x: jax.grad(lambda k: ATTEND(k, x).sum())(x * 2),
}

REFUSED: dict[str, Program] = {
    "all_gather": mapped(
        lambda x: lax.all_gather(x, "d", tiled=True).sum(0), ROWS, WHOLE, check_vma=False
    ),
    "ppermute": mapped(lambda x: lax.ppermute(x, "d", [(0, 1), (1, 0)])),
    "all_to_all": mapped(lambda x: lax.all_to_all(x[:, :2], "d", 1, 0, tiled=True)),
}


def array(n: int) -> Any:
    return np.random.default_rng(n).normal(size=(n, 3)).astype(np.float32)


def assert_equal_to_jit(program: Program, sizes: tuple[int, ...], check: Any = "off") -> None:
    given = {"dynamic_axes": "n, _", "fallback": "error", "check": check}
    bucketed = BucketedExec(program, **given).with_pow2()
    for n in sizes:
        assert_close(bucketed(array(n)), jax.jit(program)(array(n)))


def told(run: Callable[..., None], *args: Any) -> str:
    try:
        run(*args)
    except Exception:
        return traceback.format_exc(limit=-3)
    return "ok"


def explicit() -> None:
    """Arrays whose types say how they are sharded; the results are sharded as those of jit."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    program = jax.shard_map(lambda x: jnp.cumsum(x, 0), mesh=mesh, in_specs=ROWS, out_specs=ROWS)
    bucketed = BucketedExec(program, dynamic_axes="n, _", fallback="error").with_pow2()
    for n in (6, 12):
        x = jax.device_put(array(n), NamedSharding(mesh, ROWS))
        mine, exact = bucketed(x), jax.jit(program)(x)
        assert jax.typeof(mine) == jax.typeof(exact)
        np.testing.assert_allclose(mine, exact, rtol=2e-5)


def uneven() -> None:
    """Sizes that the mesh cannot cut raise what jit raises."""
    bucketed = BucketedExec(SUM, dynamic_axes="n, _").with_pow2()
    bucketed(array(6))
    for call in (bucketed, jax.jit(SUM)):
        with pytest.raises(ValueError, match="evenly divisible"):
            call(array(5))
    bucketed(array(4))


def reason(program: Program) -> str:
    bucketed = BucketedExec(program, dynamic_axes="n, _", fallback="error").with_pow2()
    with pytest.raises(FallbackError) as raised:
        bucketed(array(6))
    with warnings.catch_warnings(action="ignore"):
        exact = BucketedExec(program, dynamic_axes="n, _").with_pow2()(array(6))
    np.testing.assert_allclose(exact, jax.jit(program)(array(6)), rtol=2e-5, atol=2e-5)
    return str(raised.value)


def outcomes_there(rank: int) -> dict[str, str]:
    found = {}
    for name, program in PROGRAMS.items():
        sizes = (12, 16) if name.startswith("two_") else (6, 8)  # of one bucket
        found[name] = told(assert_equal_to_jit, program, sizes)
    found["poisoned"] = told(assert_equal_to_jit, PROGRAMS["gradient_by_weights"], (6,), "poison")
    found["explicit"], found["uneven"] = told(explicit), told(uneven)
    return found | {name: reason(program) for name, program in REFUSED.items()}


def test_programs_are_equal_to_jit_or_move_open_axes_between_shards() -> None:
    (outcome,) = run_processes(outcomes_there, 1, devices=4, timeout=240)  # one for all of them
    for name in REFUSED:
        reason = outcome.result.pop(name)
        assert reason.startswith(f"{name}: it moves open axes between shards")
        assert "test_shard_map.py" in reason and "reduce open axes on each shard first" in reason
    assert set(outcome.result.values()) == {"ok"}, outcome.result
