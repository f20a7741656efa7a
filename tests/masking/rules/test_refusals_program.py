"""What control flow, random draws and effects refuse, and what they say."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, PartitionSpec

from bucketjit._ir.program import Leaf
from bucketjit._masking.rules import default_rules
from bucketjit._masking.rules.refused import REFUSED
from bucketjit.errors import MaskingError
from tests.masking.rules import test_refusals_numeric


def refusal(fn: Callable[..., Any], *shape: int | str, dtype: Any = "float32") -> MaskingError:
    """The refusal of a function of one array; nothing is computed."""
    dtype = jnp.dtype(dtype) if isinstance(dtype, str) else dtype
    return test_refusals_numeric.refusal(fn, Leaf("x", shape, dtype), b=4, s=8)


def says(error: MaskingError, reason: str, remedy: str) -> None:
    assert error.reason.startswith(reason), error.reason
    assert remedy in error.remedy


# --- effects ------------------------------------------------------------------------------

ORDERED = "an ordered effect would be ordered among masked calls only"


def _ordered_io(x: Any) -> Any:
    return io_callback(lambda y: y, jax.typeof(x), x, ordered=True)


def _ordered_print(x: Any) -> Any:
    jax.debug.print("{}", x, ordered=True)
    return x


def _ordered_debug(x: Any) -> Any:
    jax.debug.callback(lambda y: None, x, ordered=True)
    return x


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("io_callback", _ordered_io),
        ("debug_print", _ordered_print),
        ("debug_callback", _ordered_debug),
    ],
)
def test_ordered_effects(name: str, fn: Callable[..., Any]) -> None:
    says(refusal(fn, "b"), f"{name}: {ORDERED}", "drop ordered=True")
    inside = refusal(lambda x: lax.map(fn, x), "b", "s")
    says(inside, f"{name}: {ORDERED}", "drop ordered=True")


def test_the_line_of_the_user_is_named() -> None:
    assert "test_refusals_program.py" in refusal(_ordered_io, "b").reason


def test_partitioned_callback() -> None:
    def fn(x: Any) -> Any:
        jax.debug.callback(lambda y: None, x, partitioned=True)
        return x

    says(refusal(fn, "b"), "debug_callback: with partitioned=True it sees shards", "leave the axis")


# --- mutable references -------------------------------------------------------------------


def _references(x: Any) -> Any:
    ref = jax.new_ref(x)
    ref[...] = ref[...] * 2
    return jax.ref.freeze(ref)


def test_mutable_references() -> None:
    error = refusal(_references, "b")
    assert "a mutable reference is read and written in place, padding included" in error.reason
    assert "use .at[].set" in error.remedy


# --- what is written for one shape --------------------------------------------------------


def test_pallas() -> None:
    def kernel(source: Any, target: Any) -> None:
        target[...] = source[...] * 2

    def fn(x: Any) -> Any:
        block = pl.BlockSpec((4,), lambda i: i)
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(
            kernel, out, grid=(x.shape[0] // 4,), in_specs=[block], out_specs=block
        )(x)

    says(
        refusal(fn, "b"),
        "pallas_call: a Pallas kernel reads whole blocks of the padded array",
        'declare the function that calls it, such as @bucketjit.kernel("n, d", out="n, d")',
    )


def test_foreign_code() -> None:
    def fn(x: Any) -> Any:
        return jax.ffi.ffi_call("somewhere", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    says(refusal(fn, "b"), "ffi_call: foreign code is handed the padded buffers", ".kernel(")


def test_custom_partitioning() -> None:
    double = custom_partitioning(lambda x: x * 2)
    double.def_partition(
        partition=lambda *_: None,
        infer_sharding_from_operands=lambda *_: None,
        sharding_rule="i -> i",
    )
    says(refusal(double, "b"), "custom_partitioning: its own partitioning rules", ".with_rules(")


def test_exported_programs() -> None:
    shape = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(jnp.cumsum))(jax.ShapeDtypeStruct(shape, jnp.float32))
    says(
        refusal(lambda x: exported.call(x), "b"),
        "call_exported: an exported program computes on the whole padded array",
        "call the function itself",
    )


def test_collectives_of_open_axes() -> None:
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("i",))
    spec = PartitionSpec("i")

    def fn(x: Any) -> Any:
        gathered = partial(jax.lax.all_gather, axis_name="i", tiled=True)
        return jax.shard_map(gathered, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    says(
        refusal(fn, "b"),
        "all_gather: it moves open axes between shards",
        "reduce open axes on each shard first",
    )


def test_every_refusal_has_a_rule_a_reason_and_a_remedy() -> None:
    for names, reason, remedy in REFUSED:
        assert reason
        assert remedy
        for name in names:
            assert default_rules()[name] is not None


# --- random draws -------------------------------------------------------------------------

HARDWARE = "its bits come from the hardware's generator"
DEFAULT = "use keys of JAX's default generator (threefry2x32)"


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_bits_of_the_hardware(impl: str) -> None:
    key = jax.random.key(0, impl=impl)
    says(
        refusal(lambda x: jax.random.normal(key, x.shape), "b"), f"random_bits: {HARDWARE}", DEFAULT
    )
    per_key = refusal(jax.vmap(partial(jax.random.bits, shape=(3,))), "b", dtype=key.dtype)
    says(per_key, f"random_bits: {HARDWARE}", DEFAULT)


def test_split_and_fold_in_of_the_hardware() -> None:
    key = jax.random.key(0, impl="unsafe_rbg")
    split = refusal(lambda x: jax.random.split(key, x.shape[0]), "b")
    says(split, f"random_split: {HARDWARE}", DEFAULT)
    folded = refusal(jax.vmap(partial(jax.random.fold_in, key)), "b", dtype="uint32")
    says(folded, f"random_fold_in: {HARDWARE}", DEFAULT)


@pytest.mark.parametrize("draw", [lax.rng_uniform, lambda *_, shape: _generate(shape)])
def test_bits_by_the_backend(draw: Callable[..., Any]) -> None:
    error = refusal(lambda x: draw(jnp.float32(0), jnp.float32(1), shape=x.shape), "b")
    assert "its bits depend on the whole shape drawn" in error.reason
    assert DEFAULT in error.remedy


def _generate(shape: Any) -> Any:
    return lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), shape)[1]
