"""Functions that are saved and loaded: results, sizes beyond, wrong arguments, derivatives."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec, Padded
from bucketjit.errors import ArgumentError, ArtifactError, BucketOverflowError, SpecError
from bucketjit.types import Loaded
from tests.comparison import assert_close, floats, in_threads

SIZES = {"n": [4, 8, 16]}
Function = Callable[..., Any]


def of(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def saved(path: Path, fn: Function, axes: Any, *like: Any, **options: Any) -> Loaded:
    """A function, saved in the buckets of `SIZES` and loaded."""
    options = {"sizes": SIZES, **options}
    BucketedExec(fn, dynamic_axes=axes).with_pow2().save(path / "f.bkt", *like, **options)
    return bucketjit.load(path / "f.bkt")


def attend(x: Any) -> Any:
    scores = jax.nn.softmax(x @ x.T, axis=-1)
    return {"mean": (scores @ x).mean(axis=0), "rows": (scores @ x, None)}


KEY = jax.random.key(7)


def several(*sizes: int, width: tuple[int, ...] = ()) -> list[tuple[Any, ...]]:
    return [(floats(n, *width),) for n in sizes]


PROGRAMS: dict[str, tuple[Function, Any, list[tuple[Any, ...]]]] = {
    "attention": (attend, "n, _", several(1, 3, 4, 5, 9, 16, width=(3,))),
    "numbers": (lambda x: x * np.arange(x.shape[0], dtype=np.float32), "n", several(1, 2, 3, 8, 9)),
    "unfitted": (lambda x: x[: int(math.sqrt(x.shape[0]))].sum(), "n", several(1, 3, 5, 9, 16)),
    "random bits": (
        lambda key, x: jax.random.bits(key, x.shape),
        (None, "n, _"),
        [(jax.random.key(n), floats(n, 3)) for n in (3, 8)],
    ),
    "a key closed over": (
        lambda x: (x + jax.random.uniform(KEY, x.shape), jax.random.split(KEY, 3)),
        "n",
        several(3, 8),
    ),
    "a factorization": (
        lambda x: jnp.linalg.cholesky(x @ x.T + 9 * jnp.eye(x.shape[0])),
        "n, _",
        several(3, 8, width=(3,)),
    ),
    "bfloat16": (
        lambda x: jnp.sort(x)[-1] + x,
        "n",
        [(jnp.asarray(floats(n), jnp.bfloat16),) for n in (1, 5)],
    ),
    "an unused argument": (lambda x, y: x.sum(), ("n", "_"), [(floats(3), floats(2))]),
    "no result": (lambda x: (), "n", several(3)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_equal_those_of_the_function(name: str, tmp_path: Path) -> None:
    fn, axes, calls = PROGRAMS[name]
    loaded = saved(tmp_path, fn, axes, *calls[0])
    for args in calls:
        assert_close(loaded(*args), jax.jit(fn)(*args))
        assert_close(loaded(*args), jax.jit(fn)(*args))  # by its handler


def test_every_size_up_to_the_largest_bucket_is_served(tmp_path: Path) -> None:
    def fn(x: Any) -> Any:
        return x.sum() if x.shape[0] > 4 else x.mean() / math.sqrt(x.shape[0])

    loaded = saved(tmp_path, fn, "n", of(16), sizes=[{"n": 16}])
    for n in range(1, 17):
        assert_close(loaded(floats(n)), jax.jit(fn)(floats(n)))


def test_arguments_that_are_sizes(tmp_path: Path) -> None:
    executor = BucketedExec(lambda n: jnp.ones((n, 2)).sum(), dynamic_axes=("n",)).with_pow2()
    executor.save(tmp_path / "f.bkt", 5, sizes=SIZES)
    loaded = bucketjit.load(tmp_path / "f.bkt")
    assert [float(loaded(n)) for n in (1, 5, 16)] == [2, 10, 32]
    assert [float(loaded(np.int64(n))) for n in (3, 3, 5)] == [6, 6, 10]
    with pytest.raises(ArgumentError, match="n: saved for an int, the size n, called with float32"):
        loaded(np.float32(3))


@pytest.mark.parametrize(
    "constant",
    [
        jnp.asarray(floats(3), jnp.bfloat16),
        jnp.asarray(floats(2), jnp.float8_e4m3fn),
        np.array([True, False]),
        np.complex64(1 + 2j),
        jnp.array([1, -2], jnp.int4),
        np.float32(3),
        np.zeros((0, 3), np.float32),
        np.arange(6).reshape(2, 3).T,
    ],
    ids=lambda c: str(getattr(c, "dtype", c)),
)
def test_constants_of_every_kind(constant: Any, tmp_path: Path) -> None:
    loaded = saved(tmp_path, lambda x: (x, jnp.asarray(constant)), "n", of(4), sizes=[{"n": 4}])
    _, got = loaded(floats(3))
    assert got.dtype == jnp.asarray(constant).dtype
    np.testing.assert_array_equal(got, jnp.asarray(constant))


def test_a_constant_is_stored_once(tmp_path: Path) -> None:
    table = floats(1000, 50)
    saved(tmp_path, lambda i: jnp.asarray(table)[i].sum(), "n", of(4, dtype=np.int32))
    size = (tmp_path / "f.bkt").stat().st_size
    assert table.nbytes < size < table.nbytes + 50_000


def test_no_further_compiles_and_statistics(tmp_path: Path) -> None:
    loaded = saved(tmp_path, jnp.mean, "n", of(4))
    for n in range(1, 17):
        loaded(floats(n))
    stats = loaded.stats()
    assert stats.compiles == 3 and stats.calls == 16 and stats.fallback_calls == 0
    assert loaded.cache_size() == 3
    loaded.cache_clear()
    assert loaded.cache_size() == 0
    assert_close(loaded(floats(5)), jnp.mean(floats(5)))


def test_beyond_the_buckets(tmp_path: Path) -> None:
    loaded = saved(tmp_path, jnp.mean, "n", of(4))
    with pytest.raises(BucketOverflowError, match="'n' has size 17.*saved bucket 16") as raised:
        loaded(floats(17))
    assert (raised.value.dim, raised.value.size, raised.value.largest) == ("n", 17, 16)
    assert_close(loaded(floats(3)), jnp.mean(floats(3)))


def test_beyond_the_buckets_with_a_module_of_all_sizes(tmp_path: Path) -> None:
    weights = jnp.asarray(floats(3, 3))
    loaded = saved(tmp_path, lambda x: attend(x @ weights), "n, _", of(4, 3), dynamic=True)
    for n in (3, 17, 40, 17):
        assert_close(loaded(floats(n, 3)), attend(floats(n, 3) @ weights))
    assert loaded.stats().compiles == 3
    assert loaded.explain(of(40, 3)).kind == "exact"
    assert "no saved bucket holds n=40" in loaded.explain(of(40, 3)).reason


def test_a_gap_between_buckets(tmp_path: Path) -> None:
    executor = BucketedExec(jnp.sum, dynamic_axes="b, s").with_pow2()
    executor.save(tmp_path / "f.bkt", of(1, 1), sizes=[{"b": 1, "s": 64}, {"b": 8, "s": 16}])
    loaded = bucketjit.load(tmp_path / "f.bkt")
    assert len(loaded.buckets) == 2
    assert_close(loaded(floats(5, 9)), jnp.sum(floats(5, 9)))
    with pytest.raises(BucketOverflowError, match="no saved bucket holds b=5, s=20"):
        loaded(floats(5, 20))


def test_buckets_of_the_cache_are_the_default(tmp_path: Path) -> None:
    executor = BucketedExec(jnp.sum, dynamic_axes="n").with_pow2()
    for n in (3, 6, 7):
        executor(floats(n))
    executor.save(tmp_path / "f.bkt", of(1))
    assert bucketjit.load(tmp_path / "f.bkt").buckets == ({"n": 4}, {"n": 8})


WRONG: list[tuple[tuple[Any, ...], str]] = [
    ((floats(4, 3).astype(np.float16), floats(3)), r"x: .*float32\[n, 3\], .*float16\[4, 3"),
    ((floats(4, 3), 2.0), r"w: .*float32\[3\], called with float32\[\] of weak type"),
    ((floats(4, 3),), r"w: saved for float32\[3\], called without it"),
    ((floats(4, 3), floats(3), 1), "saved for no such argument"),
    ((floats(4, 3), [floats(3)]), r"w: saved for float32\[3\], called with a container"),
    (("text", floats(3)), r"x: saved for float32\[n, 3\], called with str"),
]


def test_wrong_arguments(tmp_path: Path) -> None:
    # The second argument is not used: it is looked at all the same.
    loaded = saved(tmp_path, lambda x, w: x.sum(), ("n, _", None), of(4, 3), of(3))
    for args, told in WRONG:
        with pytest.raises(ArgumentError, match=told):
            loaded(*args)
        assert_close(loaded(floats(3, 3), floats(3)), floats(3, 3).sum())


def test_two_sizes_of_one_variable(tmp_path: Path) -> None:
    loaded = saved(tmp_path, lambda x, y: x @ y, ("n", "n"), of(4), of(4))
    with pytest.raises(bucketjit.errors.SizeMismatchError, match="n"):
        loaded(floats(3), floats(4))


def test_static_arguments_are_a_part(tmp_path: Path) -> None:
    executor = BucketedExec(
        lambda x, times, *, power: (x * times) ** power,
        dynamic_axes=("n", None),
        static_argnums=1,
        static_argnames="power",
    ).with_pow2()
    executor.save(tmp_path / "f.bkt", of(4), 3, power=2, sizes=SIZES)
    loaded = bucketjit.load(tmp_path / "f.bkt")
    assert_close(loaded(floats(3)), (floats(3) * 3) ** 2)
    with pytest.raises(ArgumentError, match="static argument times=3 .* without times"):
        loaded(floats(3), 3)
    with pytest.raises(ArgumentError, match="static argument power=2"):
        loaded(floats(3), power=2)


def test_sizes_that_no_saved_program_serves(tmp_path: Path) -> None:
    def fn(x: Any) -> Any:
        if x.shape[0] < 3:
            raise ValueError("too short")
        return x.mean()

    loaded = saved(tmp_path, fn, "n", of(4))
    assert_close(loaded(floats(3)), floats(3).mean())
    with pytest.raises(ArtifactError, match="n >= 3"):
        loaded(floats(2))
    with pytest.raises(ArtifactError, match="size 0"):
        loaded(floats(0))


def test_reshapes_are_checked(tmp_path: Path) -> None:
    loaded = saved(tmp_path, lambda x: x.reshape(-1, 2).sum(0), "n", of(4))
    assert_close(loaded(floats(6)), floats(6).reshape(-1, 2).sum(0))
    with pytest.raises((bucketjit.errors.ShapeCheckError, ArtifactError)):
        loaded(floats(5))


# --- transformations ------------------------------------------------------------------------


def loss(w: Any, x: Any) -> Any:
    return jnp.log(jnp.sum((x @ w) ** 2, axis=1)).mean()


def test_gradients(tmp_path: Path) -> None:
    loaded = saved(tmp_path, loss, (None, "n, _"), of(3, 3), of(4, 3), derivatives=1)
    w = floats(3, 3)
    for n in (3, 5, 16):
        got = jax.value_and_grad(loaded, (0, 1))(w, floats(n, 3))
        assert_close(got, jax.value_and_grad(loss, (0, 1))(w, floats(n, 3)), 1e-4)
    compiles = loaded.stats().compiles
    jax.value_and_grad(loaded, (0, 1))(w, floats(6, 3))
    assert loaded.stats().compiles == compiles  # in the buckets of before
    got = jax.jit(jax.grad(loaded, 1))(w, floats(5, 3))
    assert_close(got, jax.grad(loss, 1)(w, floats(5, 3)), 1e-4)


def test_integer_arguments_have_no_gradient(tmp_path: Path) -> None:
    def pick(w: Any, i: Any) -> tuple[Any, Any]:
        return w[i].sum(), i.max()

    loaded = saved(tmp_path, pick, (None, "n"), of(5), of(4, dtype=np.int32), derivatives=1)
    at = np.array([1, 1, 4], np.int32)
    got, _ = jax.grad(loaded, has_aux=True)(floats(5), at)
    assert_close(got, jax.grad(pick, has_aux=True)(floats(5), at)[0])


def test_without_derivatives(tmp_path: Path) -> None:
    loaded = saved(tmp_path, loss, (None, "n, _"), of(3, 3), of(4, 3))
    with pytest.raises(ArtifactError, match="save it with derivatives=1"):
        jax.grad(loaded)(floats(3, 3), floats(5, 3))
    assert_close(loaded(floats(3, 3), floats(5, 3)), loss(floats(3, 3), floats(5, 3)))


def test_inside_jit_vmap_and_scan(tmp_path: Path) -> None:
    loaded = saved(tmp_path, attend, "n, _", of(4, 3), derivatives=1)
    several = np.stack([floats(5, 3), floats(5, 3) + 1, -floats(5, 3)])
    assert_close(jax.jit(loaded)(several[0]), attend(several[0]))
    assert_close(jax.vmap(loaded)(several), jax.vmap(attend)(several))
    assert_close(jax.jit(jax.vmap(loaded))(several), jax.vmap(attend)(several))
    with jax.disable_jit():
        assert_close(loaded(several[0]), attend(several[0]))

    def total(fn: Function) -> Function:
        return lambda x: fn(x)["mean"].sum()

    got = jax.vmap(jax.grad(total(loaded)))(several)
    assert_close(got, jax.vmap(jax.grad(total(attend)))(several), 1e-4)

    def step(carry: Any, x: Any) -> Any:
        return carry + loaded(x)["mean"].sum(), None

    got, _ = jax.lax.scan(step, jnp.float32(0), several)
    assert_close(got, sum(attend(x)["mean"].sum() for x in several), 1e-4)


# --- forms ----------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["numpy", "padded"])
def test_forms_of_results(out: str, tmp_path: Path) -> None:
    executor = BucketedExec(lambda x: x * 2, dynamic_axes="n", out=out).with_pow2()
    executor.save(tmp_path / "f.bkt", of(4), sizes=SIZES)
    got = bucketjit.load(tmp_path / "f.bkt")(floats(5))
    assert type(got) is (np.ndarray if out == "numpy" else Padded)
    host = got if out == "numpy" else np.asarray(got.array)[: got.sizes[0]]
    np.testing.assert_array_equal(host, floats(5) * 2)


def test_donated_arguments(tmp_path: Path) -> None:
    executor = BucketedExec(
        lambda state, x: state + x.sum(), dynamic_axes=(None, "n"), donate_argnums=0
    ).with_pow2()
    executor.save(tmp_path / "f.bkt", of(3), of(4), sizes=SIZES)
    loaded = bucketjit.load(tmp_path / "f.bkt")
    state = jnp.zeros(3)
    assert_close(loaded(state, floats(5)), jnp.zeros(3) + floats(5).sum())
    assert state.is_deleted()


Pair = collections.namedtuple("Pair", "first second")


@jax.tree_util.register_pytree_node_class
class Box:
    def __init__(self, *held: Any) -> None:
        self.held = held

    def tree_flatten(self) -> tuple[Any, None]:
        return self.held, None

    @classmethod
    def tree_unflatten(cls, _: None, held: Any) -> Box:
        return cls(*held)


def test_classes_in_trees(tmp_path: Path) -> None:
    def fn(x: Any) -> Any:
        return Box(Pair(x, x.sum()))

    with pytest.raises(ArtifactError, match="register_pytree_node_serialization"):
        saved(tmp_path, fn, "n", of(4))
    jax.export.register_pytree_node_serialization(
        Box,
        serialized_name="tests.artifact.Box",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: None,
    )
    got = saved(tmp_path, fn, "n", of(4))(floats(3))
    assert type(got) is Box and type(got.held[0]) is Pair
    assert_close(got.held[0], fn(floats(3)).held[0])


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    def calls_back(x: Any) -> Any:
        return jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(ArtifactError, match="pure_callback"):
        saved(tmp_path, calls_back, "n", of(4))
    with pytest.raises(ArtifactError, match=r"choose them, such as bucketjit\.jit\(fn, buckets="):
        BucketedExec(jnp.sum, dynamic_axes="n").save(tmp_path / "f.bkt", of(4))
    with pytest.raises(ArtifactError, match="no axis is open"):
        BucketedExec(jnp.sum, dynamic_axes="_").with_pow2().save(tmp_path / "f.bkt", of(4))
    with pytest.raises(SpecError, match="no dimension 'm'"):
        saved(tmp_path, jnp.sum, "n", of(4), sizes={"m": [4]})
    for options in (
        {"derivatives": -1},
        {"derivatives": True},
        {"platforms": "cpu"},
        {"dynamic": 1},
        {"key": 3},
    ):
        with pytest.raises(SpecError, match=next(iter(options))):
            saved(tmp_path, jnp.sum, "n", of(4), **options)
    assert not (tmp_path / "f.bkt").exists()


def test_two_saves_are_equal(tmp_path: Path) -> None:
    for name in ("one", "two"):
        executor = BucketedExec(attend, dynamic_axes="n, _").with_pow2()
        executor.save(tmp_path / name, of(4, 3), sizes=SIZES, derivatives=1)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_threads_compile_each_bucket_once(tmp_path: Path) -> None:
    loaded = saved(tmp_path, attend, "n, _", of(4, 3))

    def work(n: int) -> None:
        for m in (n, 16, 5):
            assert_close(loaded(floats(m, 3)), attend(floats(m, 3)))

    in_threads(work, range(1, 17))
    assert loaded.stats().compiles == 3


def test_warm_up_and_background_compiles(tmp_path: Path) -> None:
    loaded = saved(tmp_path, attend, "n, _", of(4, 3))
    assert len(loaded.warmup(progress=False).compiled) == 3
    assert loaded.warmup(sizes={"n": [3]}, progress=False).present == ({"n": 4},)
    later = loaded.with_background_compile()
    later(floats(16, 3))
    assert_close(later(floats(3, 3)), attend(floats(3, 3)))  # bucket 16 stands in
    assert later.wait_for_compiles(60)
    assert later.cache_size() == 2


def test_executables_of_another_environment_are_not_used(tmp_path: Path, monkeypatch: Any) -> None:
    saved(tmp_path, attend, "n, _", of(4, 3), executables=True)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    loaded = bucketjit.load(tmp_path / "f.bkt", trust_executables=True)
    assert_close(loaded(floats(5, 3)), attend(floats(5, 3)))
    assert loaded.stats().compiles == 1


def test_second_derivatives(tmp_path: Path) -> None:
    loaded = saved(tmp_path, loss, (None, "n, _"), of(3, 3), of(4, 3), derivatives=2)

    def twice(fn: Function) -> Any:
        inner = jax.grad(fn)
        return jax.grad(lambda w: (inner(w, floats(5, 3)) ** 2).sum())(floats(3, 3))

    assert_close(twice(loaded), twice(loss), 1e-3)
