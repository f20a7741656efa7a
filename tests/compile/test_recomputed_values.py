"""Values that are compared with themselves, or with what was chosen among them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import mlir

from bucketjit import BucketedExec, Check, Fallback
from bucketjit._compile.recomputed_values import _Following, recomputed_values
from bucketjit._jax.jaxprs import (
    all_equations,
    open_jaxpr,
    without_dead_code,
    without_hi_primitives,
)

Function = Callable[[Any], Any]

SIZES = (3, 8, 20)
WIDTH = 129  # whole vectors, and one element beyond
SCALES = np.random.default_rng(9).standard_normal(WIDTH).astype(np.float32)


def centred(x: Any) -> Any:
    return x - x.mean(0) * 0.7


def numbered(x: Any) -> Any:
    return x + jnp.arange(x.shape[0])[:, None] * 0.1


def normalised(x: Any) -> Any:
    centre = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)
    return centre * SCALES[: x.shape[1]] + 0.3


def of_a_column(fn: Function) -> Function:
    return lambda x: fn(centred(x)[:, 0])


def beside(y: Any) -> Any:
    """Where the largest are, found by their position."""
    return jnp.take_along_axis(y, jnp.argmax(y, 0)[None], 0)[0] == y.max(0)


def in_segments(x: Any) -> Any:
    y, segment = x * 0.3 + SCALES[: x.shape[1]], jnp.arange(x.shape[0]) // 3
    return jax.ops.segment_max(y, segment, num_segments=x.shape[0]).clip(-99, 99).sum()


def in_a_branch(x: Any) -> Any:
    def largest(x: Any) -> Any:
        return (centred(x) >= centred(x).max(0)).sum(0)

    return lax.cond(x.sum() > 0, largest, lambda x: (centred(x) <= centred(x).min(0)).sum(0), x)


def while_it_grows(x: Any) -> Any:
    def step(state: tuple[Any, Any]) -> tuple[Any, Any]:
        i, x = state
        return i + 1, x + (centred(numbered(x)) >= centred(numbered(x)).max(0))

    return lax.while_loop(lambda state: state[0] < 3, step, (0, x))[1]


def in_a_loop(x: Any) -> Any:
    def step(total: Any, row: Any) -> tuple[Any, None]:
        y = (x - row) * 0.7 + x * 0.1
        return total + (y == y.max(0)), None

    return lax.scan(step, jnp.zeros(x.shape, int), x)[0]


def scattered(x: Any) -> Any:
    at = jnp.arange(x.shape[0]) % 3
    return jnp.full((3, x.shape[1]), -9.0).at[at].max(x * 0.3 + 0.2).sum()


def in_a_scan(x: Any) -> Any:
    y = numbered(x)
    largest = y.max(0)
    first = jnp.zeros(x.shape[1], int)
    return lax.scan(lambda count, row: (count + (row == largest), None), first, y)[0]


def carried(x: Any) -> Any:
    def step(i: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        y, found = state
        return y, found + (y >= largest)

    y = numbered(x)
    largest = y.max(0)
    return lax.fori_loop(0, 3, step, (y, jnp.zeros(x.shape, int)))[1]


def in_either_branch(x: Any) -> Any:
    y = numbered(x)
    some, others = lambda y, m: (y == m).sum(0), lambda y, m: (y > m).sum(0)
    return lax.cond(x[0, 0] < 99, some, others, y, y.max(0))


def ranks(x: Any) -> Any:
    y = centred(x)
    return jax.vmap(lambda c: jnp.searchsorted(jnp.sort(c), c, side="right"), 1)(y)


def levels(y: Any) -> Any:
    return ((y - y.min(0)) / (y.max(0) - y.min(0)) * 7).astype(jnp.int32).max(0)


def of_size(y: Any) -> Any:
    return jnp.abs(y) / jnp.abs(y).max(0)


def bits(y: Any) -> Any:
    return lax.bitcast_convert_type(y, jnp.int32)


CHOSEN: dict[str, Function] = {
    **{
        f"gradient of a maximum, {fn.__name__}": jax.grad(lambda x, fn=fn: fn(x).max(0).sum())
        for fn in (centred, numbered, normalised)
    },
    "gradient of a minimum": jax.grad(lambda x: numbered(x).min(0).sum()),
    "gradient in segments": jax.grad(in_segments),
    "gradient of what is scattered": jax.grad(scattered),
    "gradient in rows": jax.grad(lambda x: jax.vmap(lambda r: (r * 0.3 + 0.1).max())(x).sum()),
    "gradient of an infinity norm": jax.grad(
        lambda x: jnp.linalg.norm(x * 0.3 + 0.1, jnp.inf, axis=0).sum()
    ),
    "gradient, recomputed": jax.grad(jax.checkpoint(lambda x: centred(x).max(0).sum())),
    "equal": lambda x: (centred(x) == centred(x).max(0)).sum(0),
    "not below": lambda x: (lambda y: jnp.where(y >= y.max(0), y, 0))(centred(x)),
    "up to the median": lambda x: (lambda y: (y <= jnp.median(y, 0)).sum(0))(centred(x)),
    "at its position": lambda x: beside(centred(x)),
    "each twice": of_a_column(lambda y: jnp.unique(jnp.concatenate([y, y]), size=9)),
    "the next one": of_a_column(lambda y: (jnp.sort(y[1:]) != y[:-1]).sum()),
    "with all others": of_a_column(lambda y: (y[:, None] >= y[None]).sum(1)),
    "root of the difference": lambda x: (lambda y: jnp.sqrt(y.max(0) - y))(centred(x)),
    "sign of the difference": lambda x: (lambda y: jnp.sign((y - y.max(0)) * 2))(centred(x)),
    "logarithm of the difference": lambda x: (lambda y: jnp.log(y.max(0) - y + 1e-30))(centred(x)),
    "in a loop": in_a_loop,
    "in a branch": in_a_branch,
    "while it grows": while_it_grows,
    "given to a scan": in_a_scan,
    "given to a map": lambda x: (lambda y, m: lax.map(lambda row: (row >= m).sum(), y))(
        numbered(x), numbered(x).max(0)
    ),
    "carried by a loop": carried,
    "given to branches": in_either_branch,
    "ranks": ranks,
    "gradient of parts": jax.grad(
        lambda x: sum(part.max(0).sum() for part in jnp.split(numbered(x), [64, 99], 1))
    ),
    "but for one": lambda x: (centred(x) == centred(x).at[0].set(-jnp.inf).max(0)).sum(0),
    "up to there": lambda x: (lambda y: y == lax.associative_scan(jnp.maximum, y, axis=1))(
        numbered(x)
    ),
    "sorted": lambda x: (jnp.sort(centred(x), 0)[-1] == centred(x).max(0)).sum(),
    "by its number": lambda x: (
        lambda y: (jax.nn.one_hot(y.argmax(0), y.shape[0], axis=0) * y).sum(0) == y.max(0)
    )(numbered(x)),
    "sum of the opposite": lambda x: (lambda y: ((y + -y.max(0)) >= 0).sum(0))(numbered(x)),
    "quotient": lambda x: (lambda y: (y / y.max(0) == 1).sum(0))(numbered(x)),
    "angle": lambda x: jnp.isnan(jnp.arccos(of_size(numbered(x)))).sum(0),
    "root of the quotient": lambda x: jnp.isnan(jnp.sqrt(1 - of_size(numbered(x)))).sum(0),
    "exponential": lambda x: (lambda y: (jnp.exp(y - y.max(0)) == 1).sum(0))(numbered(x)),
    "levels": lambda x: levels(numbered(x)),
    "sign bit": lambda x: (lambda y: jnp.signbit(y.max(0) - y).sum(0))(numbered(x)),
    "sign that is copied": lambda x: (lambda y: jnp.copysign(1, y.max(0) - y).sum(0))(numbered(x)),
    "bits": lambda x: (lambda y: (bits(y) == bits(y.max(0))[None]).sum(0))(numbered(x)),
    "function of both": lambda x: (lambda y: (jnp.exp(y) == jnp.exp(y.max(0))).sum(0))(numbered(x)),
    "scale of both": lambda x: (lambda y: (y / 0.7 >= y.max(0) / 0.7).sum(0))(numbered(x)),
    "functions of both": lambda x: (
        lambda y: (
            (jnp.tanh(y * 0.3 + 1) >= jnp.tanh(y * 0.3 + 1).max(0)).sum(0)
            + (jnp.tanh(y * 0.3 + 1) >= jnp.tanh(y.max(0) * 0.3 + 1)).sum(0)
        )
    )(numbered(x)),
}

OTHERS: dict[str, Function] = {
    "softmax": lambda x: jax.nn.softmax(centred(x), 0),
    "gradient of a softmax": jax.grad(lambda x: jax.nn.log_softmax(centred(x))[:, 0].sum()),
    "gradient of a normalisation": jax.grad(lambda x: normalised(x).sum()),
    "gradient of a relu": jax.grad(lambda x: jax.nn.relu(centred(x)).sum()),
    "maximum with 0": lambda x: jnp.maximum(centred(x), 0).sum(),
    "maximum of an argument": jax.grad(lambda x: x.max(0).sum()),
    "maximum of a product": jax.grad(lambda x: (x @ x.T).max(0).sum()),
    "labels": lambda x: (jnp.argmax(centred(x), 1) == jnp.arange(x.shape[0])).sum(),
    "a bound": lambda x: jnp.where(centred(x) > 0.5, 1, 0).sum(),
    "largest alone": lambda x: centred(x).max(0),
    "where it is NaN": lambda x: jnp.where(jnp.isnan(centred(x)), 0, centred(x)).sum(),
    "twice beside each other": lambda x: (lambda y: jnp.concatenate([y, y]).sum())(centred(x)),
}


def kept(fn: Function, *args: Any) -> int:
    """Number of variables that are kept."""
    closed = without_hi_primitives(jax.make_jaxpr(fn)(*args))
    return len(recomputed_values(without_dead_code(open_jaxpr(closed)[0])))


@pytest.mark.parametrize("name", [*CHOSEN, *OTHERS])
def test_which_are_known(name: str) -> None:
    fn = CHOSEN.get(name) or OTHERS[name]
    assert bool(kept(fn, np.ones((5, WIDTH), np.float32))) is (name in CHOSEN)


def test_of_what_is_mixed_step_by_step_only_the_last_is_kept() -> None:
    def fn(x: Any) -> Any:
        y = x * 2
        for i in range(9):
            y = jnp.where(x > i, y, y * 0.5 + i)
        return (y >= y.max(0)).sum(0)

    assert kept(fn, np.ones((5, 8), np.float32)) == 1


def test_what_is_read_and_made_by_one_call_is_kept_in_it() -> None:
    @jax.jit
    def largest(x: Any) -> Any:
        y = numbered(x)
        return y, y >= y.max(0)

    def fn(x: Any) -> Any:
        (y, at), (z, _) = largest(x), largest(x * 2 + 1)
        return at.sum(0) + (y == y.max(0)).sum(0), (z <= z.max(0)).sum(0)

    bucketed = BucketedExec(fn, dynamic_axes="b, _", fallback=Fallback.ERROR).with_pow2()
    for n in SIZES:
        x = np.random.default_rng(0).standard_normal((n, WIDTH)).astype(np.float32)
        with jax.disable_jit():
            want = fn(jnp.asarray(x))
        np.testing.assert_array_equal(bucketed(x), want)


def table(n: int, last: float) -> np.ndarray:
    made = np.zeros(n, np.float32)
    made[-1] = last
    return made


class Named:
    """A parameter whose text does not tell it from another."""

    def __repr__(self) -> str:
        return "Named"


def of_a_user(y: Any, param: Any, name: str) -> Any:
    made = jax.extend.core.Primitive(name)
    factor = 2.0 if isinstance(param, Named) else 3.0
    made.def_impl(lambda x, param: x * factor)
    made.def_abstract_eval(lambda x, param: x)
    mlir.register_lowering(made, mlir.lower_fun(lambda x, param: x * factor, False))
    return made.bind(y, param=param)


def looked_up(y: Any, last: float) -> Any:
    look = functools.partial(lambda values, y: y + values[-1], table(2000, last))
    return jax.pure_callback(look, jax.ShapeDtypeStruct(y.shape, y.dtype), y)


@pytest.mark.parametrize(
    "pair",
    [
        lambda y: (of_a_user(y, 1, "one"), of_a_user(y, Named(), "other")),
        lambda y: (of_a_user(y, 1, "sin"), jnp.sin(y)),
        lambda y: (looked_up(y, 1), looked_up(y, 2)),
        lambda y: (lax.rng_uniform(0.0, 1.0, y.shape), lax.rng_uniform(0.0, 1.0, y.shape)),
        lambda y: (y * 0.0, y * -0.0),
    ],
    ids=["primitives of a user", "one of JAX's name", "callbacks", "draws", "signs of zero"],
)
def test_what_looks_alike_is_not_taken_for_the_same(pair: Callable[[Any], Any]) -> None:
    def fn(w: Any) -> Any:
        one, other = pair(w * 3)
        y, z = one * 2 + 1, other * 2 + 1
        return (y >= y.max(0)).sum(0), (z >= z.max(0)).sum(0), one, other

    jaxpr, _ = open_jaxpr(jax.make_jaxpr(fn)(np.ones(8, np.float32)))
    found = recomputed_values(jaxpr)
    assert len(found) == 2
    assert len(set(found.values())) == 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*CHOSEN][::3])
def test_they_are_computed_once(name: str) -> None:
    """As where each operation runs by itself."""
    fn = CHOSEN[name]
    bucketed = BucketedExec(fn, dynamic_axes="b, _", fallback=Fallback.ERROR).with_pow2()
    for n in SIZES[::2]:
        x = np.random.default_rng(0).standard_normal((n, WIDTH)).astype(np.float32)
        with jax.disable_jit():
            want = fn(jnp.asarray(x))
        np.testing.assert_allclose(bucketed(x), want, rtol=2e-3, atol=2e-3)


def test_poison_does_not_reach_them() -> None:
    fn = CHOSEN["gradient of a maximum, numbered"]
    x = np.random.default_rng(0).standard_normal((20, 8)).astype(np.float32)
    checked = BucketedExec(fn, dynamic_axes="b, _", fallback=Fallback.ERROR, check=Check.POISON)
    np.testing.assert_allclose(checked.with_pow2()(x), fn(x), atol=1e-5)


def test_loops_within_loops_are_followed_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solvers of differential equations have loops of many carried values, four deep."""
    followed = 0
    default = _Following.default

    def counted(self: Any, eqn: Any, ins: Any) -> Any:
        nonlocal followed
        followed += 1
        return default(self, eqn, ins)

    def nested(depth: int, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        if not depth:
            one, *others = carry
            highest = jnp.maximum(one, others[0] * 2 - one)
            return *others, jnp.where(highest == one, one * 3 - 1, highest)
        less = functools.partial(nested, depth - 1)
        return lax.while_loop(lambda c: c[0].sum() < 9, less, carry)

    monkeypatch.setattr(_Following, "default", counted)
    jaxpr = jax.make_jaxpr(lambda x: nested(4, tuple(x + i for i in range(8))))(jnp.ones(3)).jaxpr
    recomputed_values(jaxpr)
    assert 0 < followed <= 2**4 * sum(1 for _ in all_equations(jaxpr))
