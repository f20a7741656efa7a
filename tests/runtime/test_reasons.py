"""What a fallback reason says: the operation, the line of the user's code, and what to write."""

import functools
import logging
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit._ir.program import TraceRefused
from bucketjit._tracing.skeleton import decompose
from tests.comparison import ramp

_LINE = r"\[\S+test_reasons.py:\d+(:\d+)? \([\w.<>]+\)\]"

_LOOP = "a Python loop or list is as long as an open axis"


def _by_length(x: Any) -> list[Any]:
    return [x] * len(x)


def _branch_by_length(x: Any) -> Any:
    return [jnp.sin, jnp.cos, jnp.tan, jnp.sort, jnp.flip, jnp.exp, jnp.tanh][len(x) % 7](x)


def _in_a_dict(x: Any) -> list[Any]:
    batch = {"x": x}
    return [x] * (len(batch["x"]) - 1)


def _rows(x: Any) -> list[Any]:
    doubled = []
    for row in x:
        doubled.append(row * 2)
    return doubled


def _columns(x: Any) -> list[Any]:
    return [row for row in x]


def _positions(x: Any) -> list[Any]:
    return [x[i] for i in range(x.shape[0])]


def _by_number(x: Any) -> list[Any]:
    doubled = []
    for i in range(len(x)):
        doubled.append(x[i] * 2)
    return doubled


def _sum(x: Any) -> Any:
    return sum(x)


def _mask(x: Any) -> list[Any]:
    return [x] * (x.shape[0] ^ 1)


def _bits(x: Any) -> list[Any]:
    return [x] * (x.shape[0] * x.shape[0].bit_length())


def _root(x: Any) -> list[Any]:
    return [x] * int(9 * math.sqrt(x.shape[0]))


def _keyed(x: Any) -> Any:
    return jax.random.normal(_KEYS[int(x.shape[0])], x.shape)


_KEYS = [jax.random.key(i) for i in range(40)]

# What the reason and the remedy say, by function.
SYMBOLIC: dict[Callable[[Any], Any], tuple[str, str]] = {
    _by_length: (
        r"len\(x\) is always a Python int, where x.shape\[0\] stays symbolic",
        r"write x.shape\[0\] in place of len\(x\)",
    ),
    _branch_by_length: (r"len\(x\) is always a Python int", r"write x.shape\[0\] in place"),
    _in_a_dict: (
        r'len\(batch\["x"\]\) is always a Python int',
        r'write batch\["x"\].shape\[0\] in place of len\(batch\["x"\]\)',
    ),
    _rows: (f"^{_LOOP}: for row in x {_LINE}$", "jax.vmap"),
    _columns: (rf"^{_LOOP}: return \[row for row in x\] {_LINE}$", "jax.vmap"),
    _positions: (rf"^{_LOOP}: .*range\(x.shape\[0\]\)\] {_LINE}$", "jax.lax.scan"),
    _by_number: (rf"^{_LOOP}: for i in range\(len\(x\)\) {_LINE}$", "jax.lax.scan"),
    _sum: (rf"^{_LOOP}: return sum\(x\) {_LINE}", "jax.vmap"),
    _mask: (r"x.shape\[0\] \^ 1: .*a symbolic size has no __xor__", r"\*, //, %"),
    _bits: (r"x.shape\[0\].bit_length: .*no attribute 'bit_length'", "jax.numpy"),
    _root: (r"math.sqrt\(x.shape\[0\]\): .*no __float__", "jax.numpy"),
    _keyed: (r"int\(x.shape\[0\]\): .*a random key in the program depends on a size", "fold_in"),
}


@pytest.mark.parametrize("fn", SYMBOLIC, ids=lambda fn: fn.__name__)
def test_the_operation_and_its_line_and_what_to_write(fn: Callable[[Any], Any]) -> None:
    told = BucketedExec(fn).with_pow2().explain(ramp(5))
    reason, remedy = SYMBOLIC[fn]
    assert told.kind == "exact"
    assert re.search(reason, told.reason), told.reason
    assert re.search(rf"{_LINE}(; |$)", told.reason), told.reason
    assert re.search(remedy, told.remedy), told.remedy


def _other_primitives(n: int, x: Any) -> Any:
    return jnp.sin(x) if n % 2 else x * 2


def _other_functions(n: int, x: Any) -> Any:
    return jnp.sort(x) if n % 2 else x * 2


def _other_axes(n: int, x: Any) -> Any:
    return jnp.cumsum(jnp.outer(x, x), axis=n % 2)


def _other_types(n: int, x: Any) -> Any:
    return x.astype(jnp.float16 if n % 2 else jnp.int32)


def _one_row(n: int, x: Any) -> Any:
    return jnp.roll(x, 4 + n % 2)


def _more_at_the_end(n: int, x: Any) -> Any:
    return x if n % 2 else -x


DIFFERENCES: dict[Callable[[int, Any], Any], str] = {
    _other_primitives: f"sin at one size, mul at another {_LINE}",
    _other_functions: f"jit of sort at one size, mul at another {_LINE}",
    _other_axes: f"cumsum: parameter axis: another one at another size {_LINE}",
    _other_types: f"convert_element_type: parameter new_dtype: .* at another.* {_LINE}",
    _one_row: f"slice: result 0: an axis of size 1 at one size, .* {_LINE}",
    _more_at_the_end: f"neg {_LINE}, at one size only",
}


@pytest.mark.parametrize("fn", DIFFERENCES, ids=lambda fn: fn.__name__)
def test_where_two_traces_differ(fn: Callable[[int, Any], Any]) -> None:
    def skeleton(n: int) -> Any:
        closed = jax.make_jaxpr(functools.partial(fn, n))(jnp.zeros(5))
        return decompose(closed.jaxpr, closed.consts)

    told = skeleton(1).difference(skeleton(2))
    assert told is not None
    assert re.search(f"^({DIFFERENCES[fn]})", told), told


def test_a_constant_that_differs_has_a_line() -> None:
    closed = jax.make_jaxpr(lambda x: x * 2)(jnp.zeros(5))
    skeleton = decompose(closed.jaxpr, closed.consts)
    assert re.search(_LINE, skeleton.line_of_constant(0))


def test_reasons_do_not_name_the_sizes_of_a_call() -> None:
    """Each reason is warned of and counted by itself."""
    executor = BucketedExec(_by_length, dynamic_axes="n").with_pow2()
    assert len({executor.explain(ramp(n)).reason for n in (5, 9, 12)}) == 1


def test_a_size_beside_the_arrays_of_a_result_names_the_function() -> None:
    def fn(x: Any) -> Any:
        partial = jax.tree_util.Partial(functools.partial(lambda n, y: y, x.shape[0]), x)
        return [partial] * int(x.shape[0])

    told = BucketedExec(fn).with_pow2().explain(ramp(5))
    assert told.kind == "exact" and re.search(_LINE, told.reason), told.reason


@pytest.mark.parametrize("build", [lambda fn: fn, functools.partial, jax.jit])
def test_a_reason_without_a_line_names_that_of_the_function(build: Any) -> None:
    reason = TraceRefused("the result is odd", "return an array").placed(build(_rows)).reason
    assert re.fullmatch(rf"the result is odd {_LINE}", reason)
    assert TraceRefused("a [x.py:3 (f)]", "").placed(_rows).reason == "a [x.py:3 (f)]"


def test_numbers_of_sizes_name_the_operation() -> None:
    def fn(x: Any) -> Any:
        return x * (1 - 1 / x.shape[0])

    def of_an_array(x: Any) -> Any:
        size = jnp.float32(x.shape[0])
        return x * (1 - 1 / size)

    told = BucketedExec(fn).with_pow2().explain(ramp(5))
    assert re.search(f"sub: a number .* goes into sub, .* {_LINE}", told.program)
    assert BucketedExec(of_an_array).with_pow2().explain(ramp(5)).kind == "masked"


def test_a_program_of_concrete_traces_says_why(caplog: pytest.LogCaptureFixture) -> None:
    def fn(x: Any) -> Any:
        print(f"{len(x)} rows")
        return x * 2

    executor = BucketedExec(fn).with_pow2()
    told = executor.explain(ramp(5))
    assert told.kind == "paired"
    why = r"len\(x\) is always a Python int, where x.shape\[0\] stays symbolic " + _LINE
    assert re.search(why, told.program), told.program
    with caplog.at_level(logging.DEBUG, "bucketjit"):
        executor(ramp(5))
    assert re.search(f"once at each size: .*{why}", caplog.text)


def test_len_of_an_array_is_that_of_its_shape_elsewhere() -> None:
    """What catches the error, and arrays of known length, are as without bucketjit."""

    def fn(x: Any) -> Any:
        try:
            n = len(x)
        except TypeError:
            n = 1
        return x * n / len(jnp.zeros(3))

    executor = BucketedExec(fn).with_pow2()
    for n in (5, 6, 7):
        np.testing.assert_allclose(executor(ramp(n)), jax.jit(fn)(ramp(n)), rtol=1e-6)


def test_a_rule_that_refuses_a_size_names_its_primitive() -> None:
    def fn(x: Any) -> Any:
        return x.sum() / jnp.float32(x.shape[0] * x.shape[0])

    executor = BucketedExec(fn).with_pow2()
    told = executor.explain(np.ones(50_000, np.float32))
    assert re.search(rf"^dim_as_value: the size batch\^2 .* {_LINE}$", told.reason), told.reason


def test_effects_that_a_derivative_would_repeat_are_named() -> None:
    def fn(x: Any) -> Any:
        jax.debug.print("{}", x[0])
        return (x * x).sum()

    executor = BucketedExec(fn).with_pow2()
    with pytest.warns(UserWarning, match=rf"once more: debug_\w+ {_LINE}"):
        jax.grad(executor)(ramp(5))
