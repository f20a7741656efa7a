"""Primitives that few programs contain, some of which only JAX itself makes."""

import jax
import jax.numpy as jnp
from jax._src.lax import lax as lax_internal
from jax._src.lax.eval_jaxpr import eval_jaxpr_p
from jax._src.random import prng
from jax.experimental.layout import Layout, with_layout_constraint

from bucketjit._jax.jaxprs import primitive
from tests.harness import cases, family

case = family()

WORDS = "uint32[b, s] 0:2147483648"

# A call of a program rather than of a function; what it is traced as changed its name in 0.12.
CALL, PROGRAM = (
    ("eval_jaxpr", "call_jaxpr") if jax.__version_info__ >= (0, 12) else ("closed_call", "jaxpr")
)


def _stack_pieces(x):
    first, second = jnp.unstack(jnp.stack([x, -x], axis=1), axis=1)
    return first + second.sum(0)


def _inspected(x):
    jax.debug.inspect_array_sharding(x, callback=lambda sharding: None)
    return x.sum(1)


def _sunk(x):
    lax_internal.dce_sink(x)
    return x.sum(1)


def _program_called(x):
    program = jax.make_jaxpr(lambda y: jnp.sin(y - y.mean()))(x)
    return eval_jaxpr_p.bind(x, **{PROGRAM: program})


def _hashed(name, count):
    """A counter-based generator's hash of a word and its neighbours in the words' order."""
    return lambda x: primitive(name).bind(*(x + jnp.uint32(i) for i in range(count)))


TABLE = {
    "stack_inner": case(lambda x: jnp.stack([x, x + 1, -x], axis=-1), covers="stack", grad=True),
    "unstack_static": case(
        lambda x: jnp.unstack(x, axis=1), "b, 3, s", covers="unstack", grad=True
    ),
    "stack_pieces": case(_stack_pieces, grad=True),
    "inspect_sharding": case(_inspected, covers="inspect_sharding"),
    "dce_sink": case(_sunk, covers="dce_sink"),
    "tie": case(lambda x: lax_internal.tie_p.bind(x, x + 1).sum(1), covers="tie"),
    "program_called": case(_program_called, covers=CALL),
    "iota_2x32_shape": case(lambda x: prng.iota_2x32_shape(x.shape), covers="iota_2x32_shape"),
    "philox2x32": case(_hashed("philox2x32", 3), WORDS, covers="philox2x32"),
    "philox4x32": case(_hashed("philox4x32", 6), WORDS, covers="philox4x32"),
    "threefry4x32": case(_hashed("threefry4x32", 8), WORDS, covers="threefry4x32"),
    "layout_constraint": case(
        lambda x: with_layout_constraint(x, Layout((0, 1))).sum(1), covers="layout_constraint"
    ),
}
CASES = cases(TABLE)
