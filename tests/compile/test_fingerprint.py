"""Digests: equal for equal programs, different for different ones, none where that is not known."""

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit._compile.files.fingerprint import NoDigest, digest, program_digest
from bucketjit._jax.jaxprs import open_jaxpr


def digest_of(fn: Any, *args: Any) -> str:
    return program_digest(open_jaxpr(jax.make_jaxpr(fn)(*args))[0])[0]


def of(*values: Any) -> str:
    return digest(*values)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


VALUES = [
    None,
    True,
    1,
    1.0,
    -0.0,
    0.0,
    float("nan"),
    1j,
    "1",
    b"1",
    (1,),
    [1],
    ((), 1),
    (1, ()),
    ("ab", "c"),
    ("a", "bc"),
    {"a": 1},
    {"a": 2},
    frozenset({1, 2}),
    frozenset({1, 3}),
    Colour.RED,
    Colour.BLUE,
    int,
    float,
    np.zeros(3, np.float32),
    np.zeros(3, np.int32),
    np.zeros((3, 1), np.float32),
    np.float32(0),
    jnp.bfloat16(1),
    jnp.asarray(1.0),
    jnp.asarray(1),
    jax.random.key(1),
    jax.random.key(1, impl="rbg"),
    jax.random.key(2),
    np.dtype(np.float32),
    np.dtype(np.int32),
]


def test_values_that_differ_have_digests_that_differ():
    found = [of(v) for v in VALUES]
    assert len(set(found)) == len(VALUES)
    assert found == [of(v) for v in VALUES]
    assert of(1, 2) != of((1, 2)) != of((1,), 2)


def test_order_in_mappings_and_sets_does_not_matter():
    assert of({"a": 1, "b": 2}) == of({"b": 2, "a": 1})
    assert of({"x", "y", "z"}) == of({"z", "x", "y"})


X = np.ones((4, 4), np.float32)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x + 1, lambda x: x + 2),
        (lambda x: x.sum(0), lambda x: x.sum(1)),
        (lambda x: jnp.sin(x) - x, lambda x: x - jnp.sin(x)),
        (lambda x: (x, x + 1), lambda x: (x + 1, x)),
        (lambda x: x + np.float32(1), lambda x: x + np.float32(np.nextafter(np.float32(1), 2))),
        (lambda x: jnp.sort(x), lambda x: jnp.sort(x, stable=False)),
        (
            lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
            lambda x: lax.cond(x[0, 0] > 0, jnp.cos, jnp.sin, x),
        ),
        (lambda x: lax.dot(x, x), lambda x: lax.dot(x, x, precision=lax.Precision.HIGHEST)),
        (
            lambda x: lax.scan(lambda c, r: (c + r, r), x[0], x),
            lambda x: lax.scan(lambda c, r: (c + r, r), x[0], x, reverse=True),
        ),
        (
            lambda x: jnp.take(x, jnp.arange(2), axis=0, mode="clip"),
            lambda x: jnp.take(x, jnp.arange(2), axis=0, mode="fill"),
        ),
    ],
)
def test_programs_that_differ(one, other):
    assert digest_of(one, X) != digest_of(other, X)
    assert digest_of(one, X) == digest_of(one, X)


def test_types_of_inputs_count():
    def double(x):
        return x * 2

    weak = jnp.asarray(2.0)
    assert weak.weak_type
    args = [X, X[:3], X.astype(np.int32), weak, np.float32(2), jnp.asarray(2)]
    assert len({digest_of(double, x) for x in args}) == len(args)


def test_names_of_functions_and_variables_do_not_count():
    def one(x):
        return jax.nn.relu(x)

    def other(argument):
        renamed = jax.nn.relu(argument)
        return renamed

    assert digest_of(jax.jit(one), X) == digest_of(jax.jit(other), X)


def test_derivatives_do_not_count_where_they_are_not_taken():
    def with_derivative(rule):
        @jax.custom_jvp
        def fn(x):
            return jnp.sin(x)

        fn.defjvp(rule)
        return fn

    def one(primals, tangents):
        return jnp.sin(primals[0]), tangents[0]

    def other(primals, tangents):
        return jnp.sin(primals[0]), 2 * tangents[0]

    assert digest_of(with_derivative(one), X) == digest_of(with_derivative(other), X)
    gradients = [jax.grad(lambda x, r=r: with_derivative(r)(x).sum()) for r in (one, other)]
    assert digest_of(gradients[0], X) != digest_of(gradients[1], X)


@pytest.mark.parametrize(
    "value", [object(), lambda: 0, X.sum, {"a": object()}, np.array([object()]), iter(())]
)
def test_what_is_not_known_has_no_digest(value):
    with pytest.raises(NoDigest):
        of(value)


def test_a_mesh_counts_by_its_axes():
    def on(axis):
        mesh = jax.sharding.Mesh(jax.devices()[:1], axis)
        sharding = jax.sharding.NamedSharding(mesh, jax.P())
        return digest_of(lambda x: lax.with_sharding_constraint(x, sharding), X)

    assert on("d") == on("d") != on("e")
