"""What rules refuse, and what they say: the reason, the user's line, and what to write instead."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, PartitionSpec

from bucketjit import BucketedExec, Fallback
from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._ir.expressions import variables_of
from bucketjit._jax.jaxprs import primitive
from bucketjit._masking.interpreter import interpret
from bucketjit._masking.rules import default_rules
from bucketjit._masking.rules.refused import REFUSED
from bucketjit.errors import FallbackError, MaskingError
from tests.cases.windows import select_and_scatter
from tests.harness import arguments, leaves_of, traced

LARGE = {"long": 1 << 16, "far": 1 << 16, "wide": 1 << 15}  # sizes of buckets; others are 8


def refusal(fn: Callable[..., Any], args: str) -> MaskingError:
    """The refusal of a function of arguments in a text; nothing is computed."""
    leaves = leaves_of(arguments(args))
    texts = [d for leaf in leaves for d in leaf.shape if isinstance(d, str)]
    bucket = {v: LARGE.get(v, 8) for text in texts for v in variables_of(text)}
    program = traced(fn, args, **bucket)
    sizes = BucketSizes(bucket, program.lower, bucket)
    args = [
        jax.ShapeDtypeStruct(sizes.padded_shape(shape), leaf.dtype)
        for shape, leaf in zip(program.in_shapes, leaves, strict=True)
    ]

    def run(*args: Any) -> Any:
        return interpret(program.jaxpr, program.consts, args, sizes, default_rules())

    with pytest.raises(MaskingError) as caught:
        jax.eval_shape(run, *args)
    return caught.value


class Refused(NamedTuple):
    """What is refused, and what the remedy holds; what the reason holds is its key in a table."""

    fn: Callable[..., Any]
    args: str
    remedy: str = ""


# --- reductions, contractions and orderings -----------------------------------------------------

NO_ORDER = "complex numbers have no order next to a NaN, so padding would change"


def folded(function: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda x: lax.reduce(x, 0.0, function(lambda a, b: a + b * x.shape[0]), (0,))


def folded_pairs(x: Any, y: Any) -> Any:
    return lax.reduce((x, y), (0.0, 0.0), lambda a, b: (a[0] + b[0], a[1] + b[1]), (0,))


NUMERIC = {
    f"cummax: {NO_ORDER}": Refused(lax.cummax, "complex64[s]"),
    f"cummin: {NO_ORDER}": Refused(lax.cummin, "complex64[s]"),
    "reduce: its function reads a symbolic size": Refused(folded(lambda fn: fn), "s"),
    "reduce: its function reads a symbolic": Refused(folded(jax.jit), "s"),
    "scaled_dot: a padded axis would not consist of whole blocks": Refused(
        lambda x, y, sx, sy: lax.scaled_dot(x, y, lhs_scale=sx, rhs_scale=sy),
        "bfloat16[3, 2*s]; bfloat16[2*s, 3]; 3, 2; 2, 3",
    ),
    "top_k: float8_e5m2 has nothing that is below all else": Refused(
        lambda x: lax.top_k(x, 1), "float8_e5m2[s]"
    ),
    "top_k: float8_e8m0fnu has nothing that is below all else": Refused(
        lambda x: lax.top_k(x, 1), "float8_e8m0fnu[s]"
    ),
    "an approximate search orders float8_e4m3fn by itself": Refused(
        lambda x: lax.approx_min_k(x, 1), "float8_e4m3fn[s]"
    ),
    "padding of 0 in float8_e8m0fnu, which has no 0": Refused(
        lambda x: lax.dot(x.T, x, preferred_element_type="float32"), "float8_e8m0fnu[s, 3]"
    ),
    "does not fit into int32 in this": Refused(lambda x, y: x.shape[0] * y.shape[0], "long; far"),
    "reduce: an axis of size s meets one of size 4, which": Refused(folded_pairs, "s, 2; 4, 2"),
    "axis of size b meets one of size 4": Refused(lax.linalg.triangular_solve, "b, 3, 3; 4, 3, 3"),
    "fft: an axis of symbolic size s meets the static length 6": Refused(
        lambda x: lax.fft(x, "IRFFT", (6,)), "complex64[2, s]"
    ),
}

# --- reshapes and scatters ----------------------------------------------------------------------

MOVES = {
    "reshape: it has more positions than int32 holds in this bucket": Refused(
        lambda x: x.reshape(x.shape[::-1]), "long, far"
    ),
    "scatter-add: it has no index by which to drop the updates of padded rows": Refused(
        lambda x, y: lax.scatter_add(
            *(x, jnp.zeros((y.shape[0], 0), jnp.int32), y),
            lax.ScatterDimensionNumbers((1,), (), ()),
        ),
        "3; t, 3",
    ),
}

# --- convolutions, windows, transforms and factorisations ---------------------------------------

conv = lax.conv_general_dilated


def windows_of_a_static_source(x: Any, source: Any) -> Any:
    window: Any = {"window_dimensions": (2,), "window_strides": (1,), "padding": ((0, 0),)}
    add = primitive("select_and_scatter_add")
    return add.bind(source, x, select_prim=lax.ge_p, **window)


def eigenvalues(**options: Any) -> Callable[[Any], Any]:
    return lambda x: lax.linalg.eigh(x, **options)[1]


MIXED = "a matrix of symbolic size n: padding would mix its eigenvalues"
WINDOWS = {
    "conv_general_dilated: the stride depends on a symbolic size (floordiv(s, 4))": Refused(
        lambda x, w: conv(x, w, (x.shape[2] // 4,), "VALID"), "1, 2, s; 3, 2, 1"
    ),
    "a dilation that depends on a symbolic size": Refused(
        lambda x, w: conv(x, w, (1,), "VALID", rhs_dilation=(x.shape[2] // 4,)), "1, 2, s; 3, 2, 2"
    ),
    "conv_general_dilated: feature_group_count=2 divides an axis of size 2*f into groups": Refused(
        lambda x, w: conv(x, jnp.concatenate([w, w]), (1,), "SAME", feature_group_count=2),
        "1, 4, 6; f, 2, 3",
    ),
    "reduce_window_sum: windows of size long at stride 1 would need": Refused(
        lambda x, w: lax.reduce_window(x, 0.0, lax.add, w.shape, (1,), "VALID"), "wide; long"
    ),
    "select_and_scatter: windows slide along a symbolic axis": Refused(
        lambda x, g: select_and_scatter(x.T, g.T).T, "2*s, 3; s, 3"
    ),
    "select_and_scatter_add: an axis of size s has 4": Refused(windows_of_a_static_source, "s; 4"),
    "fft: a transform of symbolic length long, padded beyond 46340": Refused(
        jnp.fft.fft, "complex64[long]"
    ),
    "eigh: eigenvectors of a matrix of symbolic size n: their": Refused(jnp.linalg.eigh, "n, n"),
    "svd: singular vectors of a matrix of symbolic size n: their": Refused(jnp.linalg.svd, "n, n"),
    f"eig: {MIXED}": Refused(jnp.linalg.eigvals, "n, n"),
    f"schur: {MIXED}": Refused(jsl.schur, "n, n"),
    "tridiagonal: a matrix of symbolic size n with lower=False: the reduction starts at": Refused(
        lambda x: lax.linalg.tridiagonal(x, lower=False), "n, n"
    ),
    "a subset of the eigenvalues of a matrix of symbolic size n": Refused(
        eigenvalues(subset_by_index=(0, 2)), "n, n"
    ),
    "unsorted eigenvalues of a matrix of symbolic size n": Refused(
        eigenvalues(sort_eigenvalues=False), "n, n"
    ),
}

# --- effects, and what is written for one shape -------------------------------------------------


def ordered_print(x: Any) -> Any:
    jax.debug.print("{}", x, ordered=True)
    return x


def debugged(**options: Any) -> Callable[[Any], Any]:
    return lambda x: (jax.debug.callback(lambda y: None, x, **options), x)[1]


def ordered_io(x: Any) -> Any:
    return io_callback(lambda y: y, jax.typeof(x), x, ordered=True)


def references(x: Any) -> Any:
    ref = jax.new_ref(x)
    ref[...] = ref[...] * 2
    return jax.ref.freeze(ref)


def pallas(x: Any) -> Any:
    def kernel(source: Any, target: Any) -> None:
        target[...] = source[...] * 2

    block = pl.BlockSpec((4,), lambda i: i)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    blocks: Any = {"grid": (x.shape[0] // 4,), "in_specs": [block], "out_specs": block}
    return pl.pallas_call(kernel, out, **blocks)(x)


partitioned = custom_partitioning(lambda x: x * 2)
partitioned.def_partition(
    partition=lambda *_: None, infer_sharding_from_operands=lambda *_: None, sharding_rule="i -> i"
)
exported = jax.export.export(jax.jit(jnp.cumsum))(
    jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), jnp.float32)
)


def foreign(x: Any) -> Any:
    return jax.ffi.ffi_call("somewhere", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def gathered(x: Any) -> Any:
    mesh, spec = Mesh(np.asarray(jax.devices()[:1]), ("i",)), PartitionSpec("i")
    gather = partial(jax.lax.all_gather, axis_name="i", tiled=True)
    return jax.shard_map(gather, mesh=mesh, in_specs=spec, out_specs=spec)(x)


KERNEL = 'declare the function that calls it, such as @bucketjit.kernel("n, d", out="n, d")'
ORDERED = "an ordered effect would be ordered among masked calls only"
EFFECTS = {
    "io_callback": ordered_io,
    "debug_print": ordered_print,
    "debug_callback": debugged(ordered=True),
}
PROGRAMS = {
    "debug_callback: with partitioned=True": Refused(debugged(partitioned=True), "b", "the axis"),
    "a mutable reference is read and written in place": Refused(references, "b", "use .at[].set"),
    "pallas_call: a Pallas kernel reads whole blocks": Refused(pallas, "b", KERNEL),
    "ffi_call: foreign code is handed the padded buffers": Refused(foreign, "b", ".kernel("),
    "custom_partitioning: its own partitioning rules": Refused(partitioned, "b", ".with_rules("),
    "call_exported: an exported program": Refused(lambda x: exported.call(x), "b", "itself"),
    "all_gather: it moves open axes between shards": Refused(gathered, "b", "open axes on each"),
}

# --- random draws -------------------------------------------------------------------------------

HARDWARE = "its bits come from the hardware's generator"
DEFAULT = "use keys of JAX's default generator (threefry2x32)"
RBG = jax.random.key(0, impl="unsafe_rbg")

DRAWS = {
    f"random_split: {HARDWARE}": Refused(lambda x: jax.random.split(RBG, x.shape[0]), "b", DEFAULT),
    f"random_fold_in: {HARDWARE}": Refused(
        jax.vmap(partial(jax.random.fold_in, RBG)), "uint32[b]", DEFAULT
    ),
    "its bits depend on the whole shape drawn": Refused(
        lambda x: lax.rng_uniform(jnp.float32(0), jnp.float32(1), x.shape), "b", DEFAULT
    ),
    "its bits depend on the whole shape": Refused(
        lambda x: lax.rng_bit_generator(np.zeros(4, "u4"), x.shape)[1], "b", DEFAULT
    ),
}


def says(error: MaskingError, reason: str, remedy: str) -> None:
    assert reason in error.reason, error.reason
    assert remedy in error.remedy


TABLE = NUMERIC | MOVES | WINDOWS | PROGRAMS | DRAWS


@pytest.mark.parametrize("reason", TABLE)
def test_the_reason_and_the_remedy(reason: str) -> None:
    refused = TABLE[reason]
    says(refusal(refused.fn, refused.args), reason, refused.remedy)


@pytest.mark.parametrize("name", EFFECTS)
def test_ordered_effects(name: str) -> None:
    for fn, args in ((EFFECTS[name], "b"), (partial(lax.map, EFFECTS[name]), "b, s")):
        says(refusal(fn, args), f"{name}: {ORDERED}", "drop ordered=True")


def test_the_line_of_the_user_is_named() -> None:
    assert "test_refusals.py" in refusal(ordered_io, "b").reason


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_bits_of_the_hardware(impl: str) -> None:
    key = jax.random.key(0, impl=impl)
    words = f"uint32[b, {jax.random.key_data(key).size}]"

    def for_each(words: Any) -> Any:
        keys = jax.random.wrap_key_data(words, impl=impl)
        return jax.vmap(partial(jax.random.bits, shape=(3,)))(keys)

    for fn, args in ((lambda x: jax.random.normal(key, x.shape), "b"), (for_each, words)):
        says(refusal(fn, args), f"random_bits: {HARDWARE}", DEFAULT)


def test_approximate_search_on_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    error = refusal(lambda x: lax.approx_max_k(x, 1), "s")
    says(error, "what an approximate search finds depends on the size of", "use lax.top_k")


def test_approximate_search_that_returns_more_than_k() -> None:
    fn = partial(lax.approx_max_k, k=1, aggregate_to_topk=False)
    why = "returns depends on the size of the axis|symbolic"  # jax 0.10 does not trace it
    with pytest.raises(FallbackError, match=why):
        BucketedExec(fn, fallback=Fallback.ERROR).with_pow2()(np.ones(3, np.float32))


def test_reshape_with_a_sharding() -> None:
    program = traced(lambda x: x.reshape(-1), "b, 2", b=4)
    (eqn,) = program.jaxpr.eqns
    eqn = eqn.replace(params={**eqn.params, "sharding": object()})
    sizes = BucketSizes({"b": 4}, program.lower, {"b": 3})
    with pytest.raises(MaskingError, match="reshape: a reshape with an explicit sharding"):
        interpret(program.jaxpr.replace(eqns=[eqn]), (), [jnp.ones((4, 2))], sizes, default_rules())


def test_every_refusal_has_a_rule_a_reason_and_a_remedy() -> None:
    for names, reason, remedy in REFUSED:
        assert reason and remedy
        assert all(default_rules()[name] is not None for name in names)


def test_unused_eigenvectors_are_no_reason() -> None:
    with pytest.raises(pytest.fail.Exception):
        refusal(lambda x: jax.jit(jnp.linalg.eigh)(x)[0], "n, n")
