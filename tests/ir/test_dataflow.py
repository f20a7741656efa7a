"""The one walk over a program that every analysis shares."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import AbstractToken, JaxprEqn, Literal, Var

from bucketjit._ir import dataflow
from bucketjit._jax.jaxprs import dtype_of, open_jaxpr, shape_of
from tests.comparison import ramp

Names = frozenset[str]
ANY = Names({"?"})


class Reads(dataflow.Analysis[Names]):
    """Which arguments and literals a value is computed of; of what is unknown ``?``."""

    def __init__(self) -> None:
        self.table = {
            **dict.fromkeys(("add", "mul", "sub", "neg", "convert_element_type"), self.union),
            **dict.fromkeys(("sin", "lt", "broadcast_in_dim"), self.union),
        }
        self.defaults: list[str] = []

    def union(self, eqn: JaxprEqn, ins: Sequence[Names]) -> Sequence[Names]:
        return [Names().union(*ins)]

    def unknown(self, atom: dataflow.Atom) -> Names:
        return ANY

    def literal(self, atom: Literal) -> Names:
        return Names({str(atom.val)})

    def join(self, one: Names, other: Names) -> Names:
        return ANY if "?" in one | other else one | other

    def default(self, eqn: JaxprEqn, ins: Sequence[Names]) -> Sequence[Names]:
        self.defaults.append(eqn.primitive.name)
        return super().default(eqn, ins)


class Rows(Reads):
    """The same, also from array to row and back."""

    def row(self, value: Names, var: Var) -> Names:
        return value

    def stacked(self, value: Names, var: Var) -> Names:
        return value


def reads(fn: Callable[..., Any], *args: Any, analysis: Reads | None = None) -> list[str]:
    """What each result of a function is computed of, its arguments being a, b, c and so on."""
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(fn)(*args))
    names = [Names({"abcdefghij"[i]}) for i in range(len(jaxpr.invars))]
    outs = dataflow.follow(analysis or Reads(), jaxpr, names)
    return [" ".join(sorted(out)) for out in outs]


def test_values_go_from_equation_to_equation() -> None:
    assert reads(lambda x, y, z: (x + y, jnp.sin(x) * x, z), 1.0, 2.0, 3.0) == ["a b", "a", "c"]


def test_literals_as_operands_and_as_results() -> None:
    assert reads(lambda x: (x * 2.0, 3.0), 1.0) == ["2.0 a", "3.0"]


def test_of_constants_is_known_what_is_told() -> None:
    weights = ramp(3)
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(lambda x: (x + weights, weights))(ramp(3)))
    (var,) = jaxpr.constvars
    assert dataflow.follow(Reads(), jaxpr, [Names("a")]) == [{"a", "?"}, ANY]
    told = dataflow.follow(Reads(), jaxpr, [Names("a")], {var: Names("w")})
    assert told == [{"a", "w"}, {"w"}]


def test_a_constant_is_one_value_however_often_it_is_read() -> None:
    class Fresh(Reads):
        def unknown(self, atom: dataflow.Atom) -> Names:
            self.count = getattr(self, "count", 0) + 1
            return Names({f"?{self.count}"})

    weights = ramp(3)
    assert reads(lambda x: (x + weights, x * weights), ramp(3), analysis=Fresh()) == ["?1 a"] * 2


@jax.custom_jvp
def with_jvp(x: Any, y: Any) -> Any:
    return x * y


@jax.custom_vjp
def with_vjp(x: Any, y: Any) -> Any:
    return x * y


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0]))
with_vjp.defvjp(lambda x, y: (x * y, y), lambda y, t: (t * y, t))


@pytest.mark.parametrize("call", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))])
def test_calls_are_entered(call: Callable[..., Any]) -> None:
    fn = call(lambda x, y: (y + 1.0, jnp.sin(x)))
    assert reads(lambda x, y: fn(x, y), 1.0, 2.0) == ["1.0 b", "a"]


@pytest.mark.parametrize("fn", [with_jvp, with_vjp])
def test_calls_with_derivatives_of_their_own_are_entered(fn: Callable[..., Any]) -> None:
    assert reads(lambda x, y, z: fn(x, y) + z, 1.0, 2.0, 3.0) == ["a b c"]


def test_branches_are_joined() -> None:
    def fn(p: Any, x: Any, y: Any) -> Any:
        return lax.cond(p, lambda x, y: (x, y + 1.0), lambda x, y: (y, y), x, y)

    assert reads(fn, True, 1.0, 2.0) == ["b c", "1.0 c"]


def test_what_one_branch_makes_in_an_unknown_way_is_unknown() -> None:
    assert reads(lambda p, x: lax.cond(p, jnp.cos, jnp.sin, x), True, 1.0) == ["?"]


def test_a_loop_is_followed_until_it_has_settled() -> None:
    """Each turn moves a value one place on, so the last place knows the first after four."""

    def turn(_: Any, carry: Any) -> Any:
        p, q, r, s, t = carry
        return p, p, q, r, s

    def fn(*args: Any) -> Any:
        return lax.fori_loop(0, args[0], turn, args[1:])

    assert reads(fn, 9, *map(float, range(5))) == ["b", "b c", "b c d", "b c d e", "b c d e f"]


def test_a_loop_that_is_settled_at_once_is_followed_once() -> None:
    analysis = Reads()
    fn = lambda x: lax.while_loop(lambda x: jnp.cos(x) < 1.0, lambda x: x * 1.0, x)  # noqa: E731
    assert reads(fn, 1.0, analysis=analysis) == ["1.0 a"]
    assert analysis.defaults == ["cos", "cos"]  # the 1.0 came in the first turn
    assert reads(lambda x: lax.while_loop(lambda x: x < 1.0, lambda x: x, x), 1.0) == ["a"]


def test_a_loop_that_climbs_too_long_is_unknown() -> None:
    class Counts(dataflow.Analysis[float]):
        def __init__(self) -> None:
            self.turns = 0
            self.table = {"add": self.more}

        def more(self, eqn: JaxprEqn, ins: Sequence[float]) -> Sequence[float]:
            self.turns += 1
            return [ins[0] + 1]

        def unknown(self, atom: dataflow.Atom) -> float:
            return np.inf

        def join(self, one: float, other: float) -> float:
            return max(one, other)

    fn = jax.make_jaxpr(lambda x: lax.while_loop(lambda x: x < 9, lambda x: x + 1.0, x))
    jaxpr, _ = open_jaxpr(fn(1.0))
    counts = Counts()
    assert dataflow.follow(counts, jaxpr, [0.0]) == [np.inf]
    assert counts.turns == 2 * dataflow._STEPS + 1  # the last knows nothing of what is carried


def test_scan() -> None:
    def fn(w: Any, start: Any, xs: Any) -> Any:
        return lax.scan(lambda c, x: (c + w, (c, jnp.sin(x), -w)), start, xs)

    args = (1.0, 2.0, ramp(3))
    assert reads(fn, *args) == ["a b", "?", "?", "?"]
    assert reads(fn, *args, analysis=Rows()) == ["a b", "a b", "c", "a"]


def test_a_scan_gets_rows_of_its_last_carry() -> None:
    """What it stacks is that of the settled turn, not of the first."""

    def fn(start: Any, xs: Any) -> Any:
        return lax.scan(lambda c, x: (c + x, c), start, xs)

    assert reads(fn, 1.0, ramp(3), analysis=Rows()) == ["a b", "a b"]


def test_what_is_unknown_gets_the_default_and_its_programs_are_followed() -> None:
    analysis = Reads()

    def solve(x: Any) -> Any:
        return lax.custom_linear_solve(jnp.cos, x, lambda f, b: jnp.tan(b), symmetric=True)

    assert reads(lambda x: (jnp.cos(x), solve(x)), 1.0, analysis=analysis) == ["?", "?"]
    assert {"cos", "tan", "custom_linear_solve"} <= {*analysis.defaults}


def test_an_analysis_that_cannot_join_says_so() -> None:
    class Unjoined(dataflow.Analysis[int]):
        def unknown(self, atom: dataflow.Atom) -> int:
            return 0

    fn = jax.make_jaxpr(lambda p, x: lax.cond(p, jnp.cos, jnp.sin, x))
    jaxpr, _ = open_jaxpr(fn(True, 1.0))
    with pytest.raises(NotImplementedError, match="Unjoined neither joins nor"):
        dataflow.follow(Unjoined(), jaxpr, [0, 0])


def test_shapes_and_dtypes_of_what_is_no_array() -> None:
    token = Var(AbstractToken())
    assert shape_of(token) == () and dtype_of(token) == np.dtype(bool)
