"""`BucketedExec` and `jit` take the same options; texts stand for the members of enums."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec, Check, Fallback, Overflow
from bucketjit.errors import BucketOverflowError, FallbackError, SpecError, StrategyContractError


@pytest.mark.parametrize("make", [BucketedExec, bucketjit.jit])
def test_an_option_that_there_is_not(make: Any) -> None:
    with pytest.raises(TypeError, match="there is no option 'bukets'; there are dynamic_axes"):
        make(jnp.sum, bukets="pow2")


@pytest.mark.parametrize("make", [BucketedExec, bucketjit.jit])
def test_each_option_reaches_both(make: Any) -> None:
    rows = make(
        lambda x, k: x.sum(axis=1) * k,
        dynamic_axes=("b, s", None),
        buckets={"b": [2, 4], "s": "pow2"},
        overflow={"b": "extend"},
        donate_argnames="x",
        static_argnums=1,
        maxsize=3,
        compile_budget=10,
        out="numpy",
        constraints="s >= 2",
    )
    got = rows(np.ones((7, 3), np.float32), 2)
    assert isinstance(got, np.ndarray)
    np.testing.assert_array_equal(got, np.full(7, 6.0, np.float32))
    assert {b.sizes["b"] for b in rows.stats().buckets} == {8}
    assert rows.cache_info().maxsize == 3
    with pytest.raises(BucketOverflowError):
        make(jnp.sum, buckets=[4])(np.ones(5, np.float32))


def test_a_text_is_the_member_of_the_enum() -> None:
    for fallback in ("error", Fallback.ERROR):
        refused = BucketedExec(
            lambda x: jnp.linalg.eigh(x)[1], dynamic_axes="n, n", fallback=fallback
        )
        with pytest.raises(FallbackError):
            refused.with_pow2()(np.eye(3, dtype=np.float32))
    for check in Check:
        assert float(BucketedExec(jnp.sum, buckets="pow2", check=check.value)(np.ones(3))) == 3
    for overflow in Overflow:
        assert BucketedExec(jnp.sum).with_overflow(overflow.value) is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fallback": "raise"}, "fallback must be one of 'exact', 'error', got 'raise'"),
        ({"check": True}, "check must be one of 'off', 'poison', 'exact', 'exact always', got"),
        ({"out": "np"}, "out must be one of 'jax', 'numpy', 'padded', got 'np'"),
        ({"overflow": "grow"}, "overflow must be one of 'error', 'extend', 'exact', got"),
        ({"overflow": {"b": "grow"}}, r"overflow\['b'\] must be one of 'error', 'extend'"),
        ({"buckets": "pow3"}, r"'pow3': expected one of \['auto', 'exact', 'pow2'\], a list"),
        ({"buckets": "64"}, r"^buckets must be .*, got '64'; write \[64\]$"),
        ({"buckets": True}, r"got True; write one such as \[16, 64\]"),
        ({"buckets": {"n": "auot"}}, r"^buckets\['n'\]='auot': .*did you mean 'auto'"),
        ({"buckets": np.array([64, 16])}, r"^buckets must be .*got array.*; write \[16, 64\]$"),
        ({"buckets": {"n": 3}}, r"^buckets\['n'\] must be .*, got 3; write \[3\]$"),
        ({"buckets": {3: "pow2"}}, "^a key of buckets must be the name of a dimension .*, got 3"),
        ({"maxsize": 0}, "maxsize must be a positive int or None, got 0"),
        ({"in_shardings": "x"}, "in_shardings must be shardings, PartitionSpecs .*; got 'x'"),
    ],
)
@pytest.mark.parametrize("make", [BucketedExec, bucketjit.jit])
def test_an_error_lists_the_choices(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make(jnp.sum, **options)


def test_a_strategy_is_checked_when_it_is_given() -> None:
    Pow2: Any = bucketjit.strategies.Pow2
    with pytest.raises(StrategyContractError, match=r"^buckets must be an object.*Pow2\(\.\.\.\)$"):
        bucketjit.jit(jnp.sum, buckets=Pow2)
    with pytest.raises(StrategyContractError, match=r"^strategy must be an object with a method"):
        BucketedExec(jnp.sum).with_strategy(Pow2)
    sizes: Any = [8, 16]
    with pytest.raises(StrategyContractError, match=r"strategies.Boundaries\(\[16, 64\]\), or go"):
        BucketedExec(jnp.sum).with_strategy(sizes)
    with pytest.raises(SpecError, match=r"^strategy='pow3': expected one of .* mean 'pow2'\?$"):
        BucketedExec(jnp.sum).with_strategy("pow3")  # type: ignore[arg-type]


def test_a_strategy_has_the_names_of_buckets() -> None:
    row = np.ones((5, 3))
    for name, bucket in {"pow2": 8, "exact": 5}.items():
        named: Any = BucketedExec(jnp.sum, dynamic_axes="b, s").with_strategy(name, "b")
        assert named.explain(row).bucket["b"] == bucket
        assert named.with_strategy(name, overflow="extend").explain(row).bucket["b"] == bucket
    assert "Auto" in repr(BucketedExec(jnp.sum).with_strategy("auto"))


@pytest.mark.parametrize(
    "buckets", [[4, 8], (4, 8), range(4, 9, 4), np.array([4, 8]), jnp.array([4, 8])]
)
def test_sizes_in_any_list(buckets: Any) -> None:
    for total in (
        bucketjit.jit(jnp.sum, buckets=buckets),
        BucketedExec(jnp.sum).with_buckets(buckets),
    ):
        assert [total.explain(np.ones(n)).bucket["batch"] for n in (3, 4, 5)] == [4, 4, 8]


def test_a_constraint_of_shardings_is_said_in_the_function() -> None:
    """What the error of ``out_shardings`` recommends works."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = bucketjit.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, one))
    np.testing.assert_array_equal(placed(np.ones(3, np.float32)), np.full(3, 2, np.float32))
    assert placed.stats().fallback_calls == 0


def test_a_partition_spec_needs_a_mesh() -> None:
    spec = jax.sharding.PartitionSpec()
    with pytest.raises(SpecError, match="in_shardings has the .*, which needs a mesh"):
        bucketjit.jit(np.tanh, in_shardings=spec)(np.ones(3))
