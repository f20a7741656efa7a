"""Executors on one directory: what one compiles, the others load, and nothing else."""

import errno
import functools
import math
import os
import re
import warnings
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.compilation_cache import compilation_cache
from jax.extend import core as jex_core
from jax.interpreters import mlir

from bucketjit import BucketedExec, Check
from bucketjit._compile.files import directory as files
from bucketjit._compile.files import environment, record, stored
from bucketjit._compile.files.directory import SUFFIX
from bucketjit._jax import compiler
from bucketjit.errors import CompileBudgetError, PersistenceWarning, SpecError
from tests.comparison import assert_close, in_threads

close = functools.partial(assert_close, rtol=1e-4)


def rows(n: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal((n, *shape)).astype(np.float32)


def pooled(x: Any) -> Any:
    return jnp.tanh(x).sum(axis=0)


class Kept:
    """Makes executors on one directory, and tells what they did."""

    def __init__(self, directory: Any) -> None:
        self.directory = directory
        self.events: list[Any] = []

    def __call__(self, fn: Any = pooled, exact: bool = False, **options: Any) -> BucketedExec:
        executor = BucketedExec(fn, **options)
        if not exact:
            executor = executor.with_pow2()
        executor = executor.with_persistence(self.directory)
        return executor.with_on_event(self._heard)

    def did(self, executor: BucketedExec, *calls: tuple[Any, ...]) -> tuple[int, int]:
        """Compiles and loads of an executor after these calls, whose results are compared."""
        fn = executor.__wrapped__
        for args in calls:
            got = executor(*args)
            if fn is not None:
                close(got, fn(*args))
        stats = executor.stats()
        return stats.compiles, stats.loads

    def _heard(self, event: Any) -> None:
        if event.kind != "signature":
            self.events.append(event)

    def kinds(self) -> list[str]:
        return [e.kind for e in self.events]

    def files(self) -> list[Any]:
        return sorted(self.directory.glob(f"*{SUFFIX}"))


@pytest.fixture
def kept(tmp_path):
    return Kept(tmp_path / "cache")


# --- what is loaded -----------------------------------------------------------------------------


def test_the_second_executor_compiles_nothing(kept):
    calls = [(rows(n, 2),) for n in (3, 4, 7)]
    assert kept.did(kept(), *calls) == (2, 0)
    assert kept.kinds() == ["compile", "compile"]
    second = kept()
    assert kept.did(second, *calls, *calls) == (0, 2)
    assert kept.kinds()[2:] == ["load", "load"]
    stats = second.stats()
    assert (stats.calls, stats.hits, stats.misses) == (6, 4, 2)
    assert stats.load_seconds > 0 == stats.compile_seconds
    [entry, _] = [slot.entry for _, slot in second._engine.cache.slots()]
    assert entry.nbytes > 0 and entry.flops > 0


def test_threads_load_once_without_a_budget_until_the_executor_goes(kept, live_executables):
    kept.did(kept(), (rows(3, 2),))
    before = live_executables()
    executor = kept()
    executor._engine.provider.allowance.forbid(1)
    for out in in_threads(executor, [rows(3, 2)] * 8):
        close(out, pooled(rows(3, 2)))
    assert kept.did(executor) == (0, 1) and live_executables() == before + 1
    with pytest.raises(CompileBudgetError):
        executor(rows(5, 2))
    del executor
    assert live_executables() == before


def test_exact_shapes_are_loaded_too(kept):
    fn = jax.value_and_grad(lambda w, x: ((x @ w) ** 2).mean())
    calls = [(rows(3), rows(n, 3)) for n in (5, 6)]
    assert kept.did(kept(fn, exact=True), *calls) == (2, 0)
    assert kept.did(kept(fn, exact=True), *calls) == (0, 2)


def keys(key, x):
    return jax.random.normal(key, x.shape) + x, jax.random.split(key)


def by_number(x):
    return x / math.sqrt(x.shape[0]) + np.arange(x.shape[0], dtype=np.float32)[:, None]


def nested(tree, *, scale):
    return {"a": [tree["x"] * scale, None], "b": (tree["y"].sum(),)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fn", "make"),
    [
        pytest.param(keys, lambda n: (jax.random.key(n), rows(n, 2)), id="keys"),
        pytest.param(by_number, lambda n: (rows(n, 3),), id="concrete traces"),
        pytest.param(lambda x: lax.associative_scan(jnp.add, x), lambda n: (rows(n),), id="scan"),
        pytest.param(
            lambda x: jnp.linalg.cholesky(x @ x.T + 9 * jnp.eye(x.shape[0])),
            lambda n: (rows(n, n),),
            id="cholesky",
        ),
    ],
)
def test_programs_of_all_kinds(kept, fn, make):
    options = {"dynamic_axes": "n, n"} if make(5)[0].shape == (5, 5) else {}
    for expected in ((1, 0), (0, 1)):  # sizes 5 and 6 share a bucket, and a program too
        assert kept.did(kept(fn, **options), make(5), make(6)) == expected


def test_containers_keywords_and_statics(kept):
    options = {"static_argnames": "scale", "dynamic_axes": ({"x": "n, _", "y": "n"},)}
    for expected in ((1, 0), (0, 1)):
        executor = kept(nested, **options)
        for n in (5, 6):
            tree = {"x": rows(n, 2), "y": rows(n)}
            close(executor(tree, scale=3), nested(tree, scale=3))
        assert kept.did(executor) == expected
    assert kept.did(kept(nested, **options)) == (0, 0)
    other = kept(nested, **options)
    close(other(tree, scale=4), nested(tree, scale=4))
    assert kept.did(other) == (1, 0)


def test_donated_arguments_are_given_away(kept):
    def update(state, x):
        return state + x.sum(axis=0)

    for _ in range(2):
        executor = kept(update, donate_argnums=0)
        state = jnp.zeros(2)
        close(executor(state, rows(3, 2)), rows(3, 2).sum(axis=0))
        assert state.is_deleted()
    assert kept.did(executor) == (0, 1)


def test_calls_placed_in_another_way(kept):
    device = jax.devices()[0]
    here = jax.device_put(rows(2), device)
    mesh = jax.sharding.Mesh([device], "d")
    spread = jax.device_put(rows(2), jax.sharding.NamedSharding(mesh, jax.P()))

    def plus(p, x):
        return p + x.sum(axis=0)

    kept.did(kept(plus), (rows(2), rows(3, 2)))
    executor = kept(plus)
    assert kept.did(executor, (rows(2), rows(3, 2))) == (0, 1)
    committed = executor(here, rows(3, 2))
    assert committed.committed and not executor(rows(2), rows(3, 2)).committed
    assert kept.did(executor) == (0, 1)  # it is the same executable
    out = executor(spread, rows(3, 2))
    assert out.sharding == jax.jit(plus)(spread, rows(3, 2)).sharding
    assert kept.did(executor, (spread, rows(3, 2))) == (1, 1)  # which jit had to compile
    assert not executor(rows(2), rows(3, 2)).committed


def test_arguments_on_two_meshes_are_not_kept(kept):
    meshes = [jax.sharding.Mesh(jax.devices()[:1], name) for name in "de"]
    p, x = (
        jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.P()))
        for mesh, array in zip(meshes, (rows(2), rows(3, 2)), strict=True)
    )
    assert kept.did(kept(lambda p, x: p + x.sum(0)), (p, x)) == (1, 0)
    assert kept.kinds() == ["unstored", "compile"]
    assert "on several devices, but not placed by one mesh" in kept.events[0].detail


def test_results_in_another_memory(kept):
    device = jax.devices()[0]
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    for shardings in ({}, {"out_shardings": pinned}):
        executor = kept(lambda x: x * 2, **shardings)
        memories = {executor(rows(n, 2)).sharding.memory_kind for n in (3, 4)}
        assert memories == {"pinned_host" if shardings else "device"}
        assert executor.stats().loads == 0


def test_under_a_default_device(kept):
    device = jax.devices()[-1]
    for expected in ((1, 0), (0, 1)):
        with jax.default_device(device):
            executor = kept()
            assert kept.did(executor, (rows(3, 2),), (rows(4, 2),)) == expected
            assert executor(rows(3, 2)).devices() == {device}


def test_checked_calls_are_compiled(kept):
    kept.did(kept(), (rows(3, 2),))
    for check in (Check.POISON, Check.EXACT):
        assert kept.did(kept(check=check), (rows(3, 2),))[1] == 0


# --- what is not the same is not found ----------------------------------------------------------


def times(constant):
    return lambda x: x * constant


def other_constant():
    changed = np.zeros(5000, np.float32)
    changed[2500] = 1  # far from both ends, which are what text of an array shows
    return changed


def constants(change=None):
    return np.zeros(5000, np.float32) if change is None else change


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: pooled, lambda: lambda x: jnp.tanh(x).sum(axis=0) + 1),
        (lambda: times(constants()), lambda: times(other_constant())),
        (lambda: times(jnp.float32(0.1)), lambda: times(jnp.nextafter(jnp.float32(0.1), 1))),
        (lambda: times(2.0), lambda: times(3.0)),
    ],
)
def test_another_program_is_not_mistaken(kept, one, other):
    x = rows(3, 5000)
    assert kept.did(kept(one()), (x,)) == (1, 0)
    assert kept.did(kept(other()), (x,)) == (1, 0)
    assert kept.did(kept(one()), (x,)) == (0, 1)
    assert len(kept.files()) == 2


def test_a_constant_that_is_written_to(kept):
    """What a file holds is what its key says, whatever happens to the user's array meanwhile."""
    table = np.ones(4, np.float32)

    def fn(x):
        return x * table

    first = kept(fn)
    first(rows(3, 4))
    table[0] = 5
    close(first(rows(9, 4)), rows(9, 4))  # traced before, compiled now
    for value in (5, 1, 5):
        table[0] = value
        for n in (3, 9):
            kept.did(kept(fn), (rows(n, 4),))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["literal", "inner program", "inner constant"])
def test_an_array_inside_the_program_that_is_written_to(kept, where):
    table = np.array(1.0, np.float32) if where == "literal" else np.ones(4, np.float32)
    inner = jax.jit(lambda x: x * table)

    def fn(x):
        if where == "inner constant":
            return jax.lax.cond(x.sum() > 0, lambda y: y * table, jnp.negative, x)
        return x * table if where == "literal" else inner(x)

    first = kept(fn)
    first(rows(3, 4))
    table[...] = 5
    first(rows(9, 4))  # traced before, compiled now
    table[...] = 1
    jax.clear_caches()  # as in another process, which traces it anew
    kept.did(kept(fn), (rows(9, 4),))


@pytest.mark.parametrize("error", [MemoryError, jax.errors.JaxRuntimeError])
def test_a_file_that_does_not_load_for_the_moment_stays(kept, monkeypatch, error):
    call = (rows(3, 4),)
    assert kept.did(kept(), call) == (1, 0)
    with monkeypatch.context() as patch:
        failing = Mock(side_effect=error("RESOURCE_EXHAUSTED: planted"))
        patch.setattr(stored, "deserialized", failing)
        assert kept.did(kept(), call) == (1, 0) and failing.called
    assert len(kept.files()) == 1 and "damaged" not in kept.kinds()
    assert kept.did(kept(), call) == (0, 1)


@pytest.mark.parametrize("name", ["jax", "bucketjit", "device", "XLA_FLAGS"])
def test_another_environment_is_not_mistaken(kept, monkeypatch, name):
    kept.did(kept(), (rows(3, 2),))
    plain = environment._of_process
    monkeypatch.setattr(environment, "_of_process", lambda d: {**plain(d), name: "another"})
    if name in os.environ or name == "XLA_FLAGS":
        monkeypatch.setenv(name, "another")
    assert kept.did(kept(), (rows(3, 2),)) == (1, 0)
    assert kept.did(kept(), (rows(3, 2),)) == (0, 1)
    assert len(kept.files()) == 2


def test_another_configuration_is_not_mistaken(kept):
    def product(x, y):
        return x @ y

    args = rows(3, 8), rows(8, 2)
    kept.did(kept(product), args)
    with jax.default_matmul_precision("float32"):
        assert kept.did(kept(product), args) == (1, 0)
    assert "jax_platforms" not in environment.environment(jax.devices()[0])
    with jax.enable_x64(True):
        assert kept.did(kept(product), args) == (1, 0)
    assert kept.did(kept(product), args) == (0, 1)


# --- what cannot be kept, and why ---------------------------------------------------------------


def opaque_function(x):
    return jax.pure_callback(lambda y: y * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def printing(x):
    jax.debug.print("{}", x.sum())
    return x


twice_p = jex_core.Primitive("twice_of_a_test")
twice_p.def_impl(lambda x: x + x)
twice_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(twice_p, mlir.lower_fun(lambda x: x + x, multiple_results=False))


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (opaque_function, "what pure_callback does is not part of the program"),
        (printing, "what debug_print does|debug_callback|a program with effects"),
        (lambda x: twice_p.bind(x), "the primitive twice_of_a_test is of another library"),
    ],
)
def test_what_the_program_does_not_tell_is_not_kept(kept, capfd, fn, why):
    for _ in range(2):
        executor = kept(fn, exact=True)
        jax.block_until_ready(executor(rows(3, 2)))
        assert kept.did(executor) == (1, 0)
    assert kept.files() == []
    unstored = [e for e in kept.events if e.kind == "unstored"]
    assert len(unstored) == 2 and re.search(why, unstored[0].detail)


def test_what_is_larger_than_a_file_may_be_is_not_kept(kept, monkeypatch):
    monkeypatch.setattr(record, "LARGEST", 1000)
    assert kept.did(kept(), (rows(3, 2),)) == (1, 0)
    assert kept.files() == [] and kept.kinds() == ["unstored", "compile"]
    assert re.fullmatch(r".* has \d+ bytes; a file holds 1000 at most", kept.events[0].detail)


def test_programs_with_rules_of_the_users_are_not_kept(kept):
    def total(ctx, operand):
        return ctx.bind(ctx.fill(operand, axes=ctx.params["axes"], value=0))

    for _ in range(2):
        executor = kept().with_rules({lax.reduce_sum_p: total})
        assert kept.did(executor, (rows(3, 2),)) == (1, 0)
    assert kept.files() == []
    assert {e.detail for e in kept.events if e.kind == "unstored"} == {
        "the rule of reduce_sum is one of with_rules"
    }
    without = kept(lambda x: x + 1).with_rules({lax.reduce_sum_p: total})
    kept.did(without, (rows(3, 2),))
    assert len(kept.files()) == 1  # it has no sum


# --- damage -------------------------------------------------------------------------------------


def damaged_by(kept, damage) -> list[Any]:
    """What is told when a call meets a file that was tampered with; it must serve and mend."""
    kept.did(kept(), (rows(3, 2),))
    [path] = kept.files()
    good = path.read_bytes()
    damage(path, good)
    kept.events.clear()
    with pytest.warns(PersistenceWarning, match="The call goes on with a compile"):
        assert kept.did(kept(), (rows(3, 2),)) == (1, 0)
    told = [e for e in kept.events if e.kind != "compile"]
    kept.events.clear()
    assert kept.did(kept(), (rows(4, 2),)) == (0, 1)
    assert kept.kinds() == ["load"]
    return told


def truncated(length):
    return lambda path, data: path.write_bytes(data[:length])


def flipped(where):
    def flip(path, data):
        broken = bytearray(data)
        broken[where] ^= 4
        path.write_bytes(broken)

    return flip


def forge(change):
    """Damage with a digest that is right: another record, or other bytes."""

    def damage(path, data):
        found, raw = record.unpack(data)
        values, raw = change(found._asdict(), raw)
        path.write_bytes(record.pack(record.Record(**values), raw))

    return damage


DAMAGES = {
    **{f"cut at {n}": (truncated(n), "") for n in (0, 10, 500, -1)},
    **{f"flipped at {n}": (flipped(n), "") for n in (3, 60, 200, -5)},
    "much too long": (lambda path, _: os.truncate(path, 1 << 36), "longer than any executable"),
    "another call": (forge(lambda h, raw: ({**h, "call": "0" * 64}, raw)), "not that of its cont"),
    "too many": (forge(lambda h, raw: ({**h, "kept": (0, 1, 2)}, raw)), "cannot be taken"),
    "too few": (forge(lambda h, raw: ({**h, "kept": (0,)}, raw)), ""),
    "no executable": (forge(lambda h, raw: (h, b"")), ""),
    "half an executable": (forge(lambda h, raw: (h, raw[: len(raw) // 2])), ""),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_made_again(kept, name):
    damage, why = DAMAGES[name]
    [told] = damaged_by(kept, damage)
    assert told.kind == "damaged" and why in told.detail


def test_the_file_of_another_function_is_not_run(kept, tmp_path):
    """Another program's bytes under this one's name."""
    other = Kept(tmp_path / "other")
    other.did(other(lambda x: jnp.tanh(x).sum(axis=0) * 2), (rows(3, 2),))

    def swap(path, data):
        path.write_bytes(other.files()[0].read_bytes())

    [told] = damaged_by(kept, swap)
    assert "not that of its contents" in told.detail


# --- directories --------------------------------------------------------------------------------


def fails_with(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_directory_that_cannot_be_read_or_written(kept, monkeypatch):
    with monkeypatch.context() as patch:
        kept.did(kept(), (rows(9, 2),))
        patch.setattr(files, "load", fails_with(errno.EIO))
        with pytest.warns(PersistenceWarning, match="cannot read"):
            assert kept.did(kept(), (rows(9, 2),)) == (1, 0)
    kept.files()[0].unlink()

    monkeypatch.setattr(files, "write", fails_with(errno.ENOSPC))
    executor = kept()
    with pytest.warns(PersistenceWarning) as warned:
        assert kept.did(executor, (rows(3, 2),), (rows(5, 2),)) == (2, 0)
    message = str(warned[0].message)
    assert len(warned) == 1 and f"{os.strerror(errno.ENOSPC)}. It is not kept" in message
    assert kept.kinds().count("unwritable") == 2
    assert kept.files() == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write")
def test_a_read_only_directory(kept):
    kept.did(kept(), (rows(3, 2),))
    kept.directory.chmod(0o500)
    executor = kept()
    with pytest.warns(PersistenceWarning, match="cannot write"):
        assert kept.did(executor, (rows(3, 2),), (rows(5, 2),)) == (1, 1)
    kept.directory.chmod(0o700)


def test_a_directory_that_others_can_write_is_refused(kept):
    kept.did(kept(), (rows(3, 2),))
    executor = kept()
    kept.directory.chmod(0o777)
    with pytest.warns(PersistenceWarning, match="chmod go-w"):
        assert kept.did(executor, (rows(3, 2),)) == (1, 0)
    with pytest.raises(SpecError, match="can be written by other users"):
        kept()
    kept.directory.chmod(0o700)
    kept.files()[0].chmod(0o666)
    with pytest.warns(PersistenceWarning, match="chmod go-w"):
        assert kept.did(kept(), (rows(3, 2),)) == (1, 0)


def test_the_bound_in_bytes(kept):
    executor = kept()
    kept.did(executor, (rows(3, 2),))
    [first] = kept.files()
    os.utime(first, (0, 0))
    bounded = executor.with_persistence(kept.directory, max_bytes=int(first.stat().st_size * 1.5))
    bounded(rows(5, 2))
    assert first not in kept.files() and len(kept.files()) == 1


def test_options_are_checked(tmp_path):
    executor = BucketedExec(pooled)
    (tmp_path / "file").write_text("")
    for directory, message in (
        (tmp_path / "file", "is not a directory"),
        (3, "directory must be a path"),
        ("", "directory must be a path"),
        ("a\0b", "with_persistence: "),
    ):
        with pytest.raises(SpecError, match=message):
            executor.with_persistence(directory)
    for bound in (0, -1, True, 1.5):
        with pytest.raises(SpecError, match="max_bytes"):
            executor.with_persistence(tmp_path, max_bytes=bound)
    with pytest.raises(TypeError, match="share"):
        executor.with_persistence(tmp_path, share="first")  # type: ignore[call-arg]


# --- JAX's own cache ----------------------------------------------------------------------------


@pytest.fixture
def cache_of_jax(tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    old = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path), 0.0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # the first directory that JAX uses, it keeps
    yield tmp_path
    for name, value in zip(names, old, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_the_directory_of_jax_is_used(cache_of_jax):
    assert BucketedExec(pooled).with_pow2()(rows(3, 2)).shape == (2,)
    assert len(list((cache_of_jax / "bucketjit").glob("*.bjx"))) == 1
    second = BucketedExec(pooled).with_pow2()
    second(rows(3, 2))
    assert (second.stats().compiles, second.stats().loads) == (0, 1)
    without = BucketedExec(pooled).with_pow2().with_persistence(None)
    without(rows(3, 2))
    assert (without.stats().compiles, without.stats().loads) == (1, 0)


def test_what_jax_had_in_its_cache_is_not_written_again(kept, cache_of_jax, monkeypatch):
    """As on an accelerator, whose client is not known to keep the bytes."""
    monkeypatch.setattr(compiler, "_is_cpu_of_one_host", lambda client: False)
    assert kept.did(kept().with_persistence(None), (rows(3, 2),)) == (1, 0)
    kept.did(kept(), (rows(3, 2),))
    assert kept.files() == []
    [told] = [e.detail for e in kept.events if e.kind == "unstored"]
    assert "from JAX's own cache" in told


def test_what_is_larger_than_all_files_may_be_is_told_of(kept):
    executor = kept().with_persistence(kept.directory, max_bytes=100)
    executor(rows(3, 2))
    assert kept.files() == []
    [told] = [e.detail for e in kept.events if e.kind == "unstored"]
    assert told == "its file has more than the 100 bytes that files may have"


def test_the_thresholds_of_jax_are_kept(cache_of_jax):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e6)
    with warnings.catch_warnings(action="error"):
        BucketedExec(pooled).with_pow2()(rows(3, 2))
    assert not (cache_of_jax / "bucketjit").exists()
