"""Which operand of a batch of matrix products XLA's CPU backend is given on which side."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from bucketjit import BucketedExec, Fallback
from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._ir.program import Leaf
from bucketjit._masking.interpreter import interpret
from bucketjit._masking.rules import default_rules
from bucketjit._tracing.symbolic import trace
from tests.comparison import assert_like_jit, ramp
from tests.masked import PADDED, masked_jaxpr

PRODUCTS = {
    "attention weights and values": ("bhqk,bkhd->bqhd", ["b, 2, s, s", "b, s, 2, 3"], True),
    "weights on the right": ("bkd,bqk->bdq", ["b, s, 2", "b, s, s"], True),
    "as XLA wants it": ("bij,bjk->bik", ["b, s, s", "b, s, 2"], False),
    "two matrices": ("ji,kj->ik", ["s, 2", "8, s"], False),
    "transposed either way": ("bshd,bthd->bhst", ["b, s, 2, 4", "b, s, 2, 4"], False),
    "the result is as large": ("bjd,bqj->bdq", ["b, 2, s", "b, s, 2"], False),
}


def _numbers(jaxpr: Any) -> Any:
    (eqn,) = (eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "dot_general")
    return jax.tree_util.tree_map(int, eqn.params["dimension_numbers"])


@pytest.mark.parametrize("name", PRODUCTS)
def test_sides(name: str) -> None:
    subscripts, shapes, changes = PRODUCTS[name]

    def fn(x: Any, y: Any) -> Any:
        return jnp.einsum(subscripts, x, y)

    sizes = [[PADDED if t.isalpha() else int(t) for t in s.split(", ")] for s in shapes]
    written = _numbers(jax.make_jaxpr(fn)(*map(np.zeros, sizes)))
    # einsum itself has put the operands on the sides that "->" asks for
    flipped = tuple(pair[::-1] for pair in written)
    assert flipped != written or not changes
    assert _numbers(masked_jaxpr(fn, *shapes)) == (flipped if changes else written)


@st.composite
def products(draw: Any) -> tuple[Any, list[int], list[Any], list[Any]]:
    """Dimension numbers, and both shapes with axes in any order; some are open."""
    pool: list[Any] = ["b", "s", 2, 3]
    drawn = [draw(st.lists(st.sampled_from(pool), min_size=n, max_size=2)) for n in (1, 1, 0, 0)]
    batch, contracted, rows, columns = drawn
    sides = []
    for free in (rows, columns):
        axes = [*batch, *contracted, *free]
        order = draw(st.permutations(range(len(axes))))
        place = {axis: at for at, axis in enumerate(order)}
        split = len(batch), len(batch) + len(contracted)
        sides.append(
            (
                [axes[i] for i in order],
                tuple(place[i] for i in range(split[0], split[1])),
                tuple(place[i] for i in range(split[0])),
            )
        )
    (left, left_contract, left_batch), (right, right_contract, right_batch) = sides
    numbers = (left_contract, right_contract), (left_batch, right_batch)
    sizes = [draw(st.integers(1, PADDED)), draw(st.integers(1, PADDED))]
    return numbers, sizes, left, right


def _contraction_is_as_written(product: Any) -> None:
    numbers, (b, s), *shapes = product
    sizes = {"b": b, "s": s}
    used = {v: n for v, n in sizes.items() if any(v in shape for shape in shapes)}

    def fn(x: Any, y: Any) -> Any:
        return lax.dot_general(x, y, numbers)

    leaves = [Leaf("x", tuple(shape), np.dtype("int32")) for shape in shapes]
    program = trace(fn, jax.tree_util.tree_structure(((0, 0), {})), leaves, used)
    rng = np.random.default_rng(0)
    real = [rng.integers(-9, 9, [sizes.get(d, d) for d in x]).astype(np.int32) for x in shapes]
    padded = []
    for x, shape in zip(real, shapes, strict=True):
        wide = np.full([PADDED if isinstance(d, str) else d for d in shape], 1000, np.int32)
        wide[tuple(map(slice, x.shape))] = x
        padded.append(wide)
    values = {v: np.int32(n) for v, n in used.items()}
    at = BucketSizes(dict.fromkeys(used, PADDED), program.lower, values)
    masked = jax.jit(lambda *xs: interpret(program.jaxpr, program.consts, xs, at, default_rules()))
    (got,) = masked(*padded)
    want = np.asarray(fn(*real))
    np.testing.assert_array_equal(np.asarray(got)[tuple(map(slice, want.shape))], want)


@given(products())
@settings(max_examples=12, deadline=None)
def test_any_contraction_is_as_written(product: Any) -> None:
    _contraction_is_as_written(product)


@pytest.mark.slow
@given(products())
@settings(max_examples=300, deadline=None)
def test_many_contractions_are_as_written(product: Any) -> None:
    _contraction_is_as_written(product)


def _weighted(dtype: Any = jnp.float32, **options: Any) -> Any:
    """Attention weights and values as einsum contracts them; operands of a dtype."""
    numbers = ((1,), (3,)), ((0, 2), (0, 1))

    return lambda v, w: lax.dot_general(v.astype(dtype), w.astype(dtype), numbers, **options)


SHAPES = "b, s, 2, 3", "b, 2, s, s"


def _contraction(fn: Any) -> Any:
    found = [e for e in masked_jaxpr(fn, *SHAPES).jaxpr.eqns if e.primitive is lax.dot_general_p]
    assert len(found) == 1
    return found[0]


def test_precisions_change_sides_too() -> None:
    precision = lax.Precision.HIGHEST, lax.Precision.DEFAULT
    eqn = _contraction(_weighted(precision=precision))
    assert eqn.params["dimension_numbers"] == (((3,), (1,)), ((0, 1), (0, 2)))
    assert eqn.params["precision"] == precision[::-1]


@pytest.mark.parametrize(
    "dtype, result",
    [
        *((dtype, None) for dtype in ("bfloat16", "float16", "int8", "float64", "complex64")),
        *(("bfloat16", "float32"), ("float16", "float32"), ("int8", "int32")),
    ],
)
def test_dtypes(dtype: str, result: str | None) -> None:
    """XLA's CPU backend fails on some operands of one type whose result is of a wider one."""
    with jax.enable_x64(dtype == "float64"):
        fn = _weighted(dtype, preferred_element_type=result and jnp.dtype(result))
        executor = BucketedExec(
            fn, dynamic_axes=("b, s, _, _", "b, _, s, s"), fallback=Fallback.ERROR
        ).with_pow2()
        for b, s in ((3, 5), (4, 8), (1, 1)):
            assert_like_jit(executor, fn, ramp(b, s, 2, 3), ramp(b, 2, s, s))
