"""Functions of one shard: uneven rows give what one process with all rows computes.

One process with two devices runs most programs; two processes run those that differ there.
"""

import functools
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bucketjit import BucketedExec
from bucketjit.errors import AgreementError, ArgumentError, BucketJitError, FallbackError, SpecError
from tests.comparison import assert_close
from tests.processes.launch import run_processes

WEIGHTS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def rows(n: int, seed: int = 0, width: int = 3) -> Any:
    return np.random.default_rng((seed, n)).normal(size=(n, width)).astype(np.float32)


def psum(x: Any) -> Any:
    return lax.psum(x, "d")


def pmean(x: Any) -> Any:
    return lax.pmean(x, "d")


# References under other names, which nothing finds by name.
MEAN, SUM = functools.partial(lax.pmean, axis_name="d"), functools.partial(lax.psum, axis_name="d")


def local_loss(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w).mean()


def normalised_loss(w: Any, x: Any, mean: Callable[[Any], Any] = pmean) -> Any:
    """A loss of rows that are normalised by the statistics of the whole batch."""
    y = x @ w
    centre = mean(y.mean(0))
    spread = mean(jnp.square(y - centre).mean(0))
    return jnp.tanh((y - centre) * lax.rsqrt(spread + 1e-3) + w[0]).mean()


def mean_of_all(w: Any, x: Any) -> Any:
    return pmean(jax.value_and_grad(local_loss)(w, x))


def gradients(w: Any, x: Any) -> dict[str, Any]:
    """Both ways to write the step of a data-parallel job, and one by sums."""

    def looped_loss(w: Any) -> Any:
        return lax.scan(lambda c, _: (c * 0.5 + pmean(local_loss(w, x)), None), 0.0, None, 3)[0]

    def averaged(loss: Callable[..., Any]) -> Any:
        return pmean(jax.grad(loss)(w))

    count = psum(x.shape[0])
    summed = psum(jax.grad(lambda w: jnp.tanh(x @ w).sum() / (4 * count))(w))
    return {
        "loss": pmean(local_loss(w, x)),
        "by other names": [MEAN(local_loss(w, x)), SUM(x.shape[0])],
        "of the mean": averaged(lambda w: pmean(local_loss(w, x))),
        "of each": averaged(lambda w: local_loss(w, x)),
        "of the square": averaged(lambda w: pmean(local_loss(w, x)) ** 2),
        "of sums": summed,
        "normalised": averaged(lambda w: normalised_loss(w, x)),
        "looped": averaged(looped_loss),
        "forward": pmean(jax.jvp(lambda w: pmean(local_loss(w, x)), (w,), (jnp.ones_like(w),))[1]),
    }


def gradients_of_all(w: Any, x: Any) -> dict[str, Any]:
    def same(value: Any) -> Any:
        return value

    loss, gradient = jax.value_and_grad(local_loss)(w, x)
    return {
        "loss": loss,
        "by other names": [loss, np.int32(len(x))],
        "of the mean": gradient,
        "of each": gradient,
        "of the square": jax.grad(lambda w: local_loss(w, x) ** 2)(w),
        "of sums": gradient,
        "normalised": jax.grad(lambda w: normalised_loss(w, x, same))(w),
        "looped": gradient * 1.75,
        "forward": gradient.sum(),
    }


def reductions(w: Any, x: Any) -> dict[str, Any]:
    half = x.astype(jnp.bfloat16)
    return {
        "count": psum(x.shape[0]),
        "longest": lax.pmax(x.shape[0], "d"),
        "mean": psum(jnp.tanh(x @ w).sum(0)) / psum(x.shape[0]),
        "max": lax.pmax(x.max(0), "d"),
        "min": lax.pmin(x.min(), "d"),
        "half": pmean(half.mean()),
        "rows of each": lax.all_gather(x.shape[0] * jnp.ones(()), "d"),
        "rows": jnp.tanh(x @ w) - pmean(x.mean()),
        "sorted": jnp.sort(x, 0),
        "parameters": w * 2,
    }


def masked_sum(w: Any, tokens: Any, lengths: Any) -> Any:
    """Sentences of a length that differs from process to process."""
    real = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    scores = jnp.where(real, tokens, 0).sum() * w[0, 0]
    return psum(scores), psum(tokens.shape[1]), jax.nn.softmax(tokens, 1)


def step(w: Any, x: Any) -> Any:
    gradient = pmean(jax.grad(local_loss)(w, x))
    return w - 0.5 * gradient, pmean(local_loss(w, x))


def bucketed(fn: Any, mesh: Any = None, **options: Any) -> Any:
    options = {"dynamic_axes": (None, "b, _"), **options}
    made = BucketedExec(fn, **options).with_pow2(min=16 if jax.process_count() > 1 else 1)
    return made.with_processes(mesh or on_all_devices(), "d")


def on_all_devices() -> Any:
    return jax.make_mesh((jax.device_count(),), ("d",))


def all_rows(sizes: Any, seed: int = 0, width: int = 3) -> list[Any]:
    return [rows(n, seed + i, width) for i, n in enumerate(sizes)]


def given(rank: int, sizes: Any, seed: int = 0, width: int = 3) -> tuple[Any, Any]:
    """The rows of this process, and those of all."""
    every = all_rows(sizes, seed, width)
    return every[rank], np.concatenate(every)


# --- cases: they get the rank, and how many rows each process has -------------------------------


CASES: dict[str, Callable[[int, Any], None]] = {}


def case(run: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
    CASES[run.__name__] = run
    return run


@case
def losses_and_gradients(rank: int, sizes: Any) -> None:
    mine, every = given(rank, sizes)
    assert_close(bucketed(gradients)(WEIGHTS, mine), gradients_of_all(WEIGHTS, every))


@case
def sums_and_rows(rank: int, sizes: Any) -> None:
    mine, every = given(rank, sizes)
    got = bucketed(reductions)(WEIGHTS, mine)
    shards = jax.device_count()
    assert int(got["rows of each"].sum()) == len(every) and got["rows of each"].shape == (shards,)
    assert int(got["longest"]) == int(got["rows of each"].max())
    assert int(got["count"]) == len(every)
    assert_close(got["mean"], np.tanh(every @ WEIGHTS).mean(0))
    assert_close((got["max"], got["min"]), (every.max(0), every.min()))
    assert got["half"].dtype == jnp.bfloat16
    np.testing.assert_allclose(float(got["half"]), every.mean(), atol=0.01)
    assert_close(got["rows"], np.tanh(mine @ WEIGHTS) - every.mean())
    if len(jax.local_devices()) == 1:
        assert_close(got["sorted"], np.sort(mine, 0))
    assert_close(got["parameters"], WEIGHTS * 2)


@case
def training(rank: int, sizes: Any) -> None:
    """Twenty steps of random sizes, each fed with the results of the one before."""
    stepped, alone = bucketed(step), jax.jit(step_alone)
    w = exact = jnp.asarray(WEIGHTS)
    random = np.random.default_rng(7)
    for i in range(20):
        mine, every = given(rank, random.integers(2, 17, len(sizes)), seed=100 * i)
        w, loss = stepped(w, mine)
        exact, exact_loss = alone(exact, every)
        assert_close((w, loss), (exact, exact_loss), 1e-4)
    assert stepped.cache_size() <= 5 and stepped.stats().compiles == stepped.cache_size()


def step_alone(w: Any, x: Any) -> Any:
    loss, gradient = jax.value_and_grad(local_loss)(w, x)
    return w - 0.5 * gradient, loss


@case
def forms_of_results(rank: int, sizes: Any) -> None:
    mine, _ = given(rank, sizes)

    def both(w: Any, x: Any) -> Any:
        return x * 2, pmean(x.mean())

    for out in ("numpy", "padded", "jax"):
        doubled, mean = bucketed(both, out=out)(WEIGHTS, mine)
        if out == "padded":
            assert doubled.sizes == mine.shape
            doubled = np.asarray(doubled)
        assert isinstance(mean, np.ndarray if out == "numpy" else jax.Array)
        assert_close(doubled, mine * 2)


@case
def donated_parameters(rank: int, sizes: Any) -> None:
    mine, _ = given(rank, sizes)
    stepped = bucketed(step, donate_argnums=(0,))
    w, _ = stepped(jnp.asarray(WEIGHTS), mine)
    again, _ = stepped(w, mine)
    assert w.is_deleted() and not again.is_deleted()


@case
def keys_and_scalars(rank: int, sizes: Any) -> None:
    """Random keys, and Python numbers whose results, weakly typed, are given back."""
    mine, every = given(rank, sizes)

    def noisy(key: Any, count: Any, rate: Any, x: Any) -> Any:
        noise = jax.random.normal(key, (3,)) * rate
        return jax.random.fold_in(key, 1), count + 1, rate * 0.5, (noise, psum(x.sum() * rate))

    fn = bucketed(noisy, dynamic_axes=(None, None, None, "b, _"))
    key, count, rate = jax.random.key(3), 0, 0.5
    exact: Any = key, count, rate
    for i in range(3):
        noise = jax.random.normal(exact[0], (3,)) * exact[2]
        exact = jax.random.fold_in(exact[0], 1), i + 1, exact[2] * 0.5
        want = noise, every.sum() * exact[2] * 2
        key, count, rate, got = fn(key, count, rate, mine)
        assert_close(got, want, 1e-4)
        assert int(count) == exact[1] and float(rate) == exact[2]
    assert fn.stats().compiles == 1


REFUSED: dict[str, tuple[Any, str]] = {
    "all_gather": (lambda w, x: lax.all_gather(x, "d").sum(0), "all_gather: it moves open axes"),
    "ppermute": (
        lambda w, x: psum(lax.ppermute(x, "d", [(0, 1), (1, 0)]).sum()),
        "ppermute: it moves open axes",
    ),
    "psum of rows": (lambda w, x: psum(x), "psum: it combines an open axis whose size differs"),
    "pmean of rows": (lambda w, x: pmean(x).sum(), "shard_mean: it combines an open axis"),
    "a mean of gradients of a sum": (
        lambda w, x: pmean(jax.grad(lambda w: psum((x @ w).sum()) / psum(x.shape[0]))(w)),
        "a gradient that was taken through psum is combined by pmean",
    ),
    "a sum of gradients of a mean": (
        lambda w, x: psum(jax.grad(lambda w: pmean((x @ w).mean()))(w)),
        "a gradient that was taken through pmean is combined by psum",
    ),
    "not reduced": (lambda w, x: {"a": psum(x.sum()), "b": x.sum()}, r"result\['b'\] differs"),
    "a size": (lambda w, x: x.shape[0] * w, "the result differs from shard to shard"),
    "a branch": (lambda w, x: lax.cond(x.sum() > 0, lambda: 1.0, lambda: 2.0), "result differs"),
    "a loop": (lambda w, x: lax.fori_loop(0, x.shape[0], lambda i, c: c + 1, 0), "result differs"),
    "index": (lambda w, x: lax.axis_index("d") + psum(x.sum()), "the result differs"),
    "pairs": (lambda w, x: psum(np.zeros(int(x.shape[0])).sum() + x.sum()), "cannot run at its"),
    "a sum in a branch": (
        lambda w, x: lax.cond(x.sum() > 0, lambda: psum(1.0 * x.sum()), lambda: 2.0),
        "cond: it holds a collective, and its condition differs from shard to shard",
    ),
    "a sum in a loop": (
        lambda w, x: psum(lax.fori_loop(0, x.shape[0], lambda i, c: pmean(c + i), 0.0)),
        "while: it holds a collective, and its condition differs",
    ),
    "a sum for each row": (
        lambda w, x: psum(lax.scan(lambda c, r: (psum(c + r.sum()), None), 0.0, x)[0]),
        "scan: it holds a collective, and its number of steps differs",
    ),
    "computed sizes": (lambda w, x: psum(x[x > 0].sum()), "it computes sizes"),
}


@case
def helpers_that_jax_keeps(rank: int, sizes: Any) -> None:
    """JAX keeps the traces of inner functions; here and elsewhere they are others."""
    mine, every = given(rank, sizes)
    helper = jax.jit(pmean)

    def loss(x: Any) -> Any:
        return helper(x.mean())

    plain = jax.vmap(loss, axis_name="d")
    assert plain(np.ones((2, 4), np.float32)).tolist() == [1, 1]
    for axes in ("b, _", "n, _", "n, b"):
        assert_close(bucketed(loss, dynamic_axes=axes)(mine), every.mean(), 1e-5)
    assert plain(np.ones((2, 5), np.float32)).tolist() == [1, 1]


@case
def inside_of_set_mesh(rank: int, sizes: Any) -> None:
    mine, every = given(rank, sizes)
    fn = bucketed(lambda w, x: (x * 2, pmean((x @ w).mean(0))))
    for axes in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("d",), axis_types=(axes,))):
            doubled, mean = fn(WEIGHTS, mine)
        assert_close((doubled, mean), (mine * 2, (every @ WEIGHTS).mean(0)), 1e-5)


def centred(values: Any) -> Any:
    """``vmap`` has an axis of the same name as the shards, which collectives inside mean."""

    def one(value: Any, total: Any) -> Any:
        weight = psum(2.0) + lax.pmax(lax.stop_gradient(value), "d")
        return (value - pmean(value)) * weight + psum(value) + MEAN(total).sum()

    inside = jax.vmap(jax.jit(one), in_axes=(0, None), axis_name="d")
    return inside(values, jnp.ones(values.shape))


@case
def hidden_by_vmap(rank: int, sizes: Any) -> None:
    mine, every = given(rank, sizes)

    def both(total: Any) -> Any:
        return centred(total), jax.jacobian(centred)(total)

    got = bucketed(lambda w, x: both(psum(x.sum(0)) / psum(x.shape[0])))(WEIGHTS, mine)
    assert_close(got, both(every.mean(0)), 1e-4)


@case
def casts(rank: int, sizes: Any) -> None:
    """Parameters that are cast have gradients of one shard, as in ``shard_map``."""
    mine, every = given(rank, sizes)

    def cast(w: Any, x: Any) -> Any:
        varying = lax.pcast(w, ("d",), to="varying")
        return pmean(jax.value_and_grad(local_loss)(varying, x))

    assert_close(bucketed(cast)(WEIGHTS, mine), jax.value_and_grad(local_loss)(WEIGHTS, every))


@case
def refused(rank: int, sizes: Any) -> None:
    """Errors say why, on each process, and the next call works."""
    mine, every = given(rank, sizes)
    for name, (fn, why) in REFUSED.items():
        with pytest.raises((FallbackError, AgreementError), match=why):
            print(name, bucketed(fn)(WEIGHTS, mine))
    good = bucketed(lambda w, x: psum(x.sum()))
    with pytest.raises(BucketJitError):
        good(WEIGHTS, "rows")
    assert_close(good(WEIGHTS, mine), every.sum(), 1e-4)


@case
def lengths_differ(rank: int, sizes: Any) -> None:
    """Each process pads its sentences to a length of its own."""
    shapes = [(n, s) for n, s in zip(sizes, (5, 11), strict=True)]
    n, s = shapes[rank]
    fn = bucketed(masked_sum, dynamic_axes=(None, "b, s", "b"))
    tokens, lengths = rows(n, rank, s), np.arange(n) % s + 1
    total, length, soft = fn(WEIGHTS, tokens, lengths)
    assert_close(soft, jax.nn.softmax(tokens, 1))
    want = 0.0
    for other, (n, s) in enumerate(shapes):
        real = np.arange(s)[None] < (np.arange(n) % s + 1)[:, None]
        want += float(np.where(real, rows(n, other, s), 0).sum() * WEIGHTS[0, 0])
    np.testing.assert_allclose(total, want, rtol=1e-4)
    assert float(length) == 16


def told(run: Callable[..., None], *args: Any) -> str:
    try:
        run(*args)
    except BaseException:
        return traceback.format_exc()[-3000:]
    return "ok"


def outcomes_there(rank: int, sizes: list[int], names: list[str]) -> dict[str, str]:
    alone = {name: told(globals()[name]) for name in OF_ONE} if len(sizes) == 1 else {}
    return {name: told(CASES[name], rank, sizes) for name in names} | alone


# How many rows each process has, how many devices, and what is run there.
JOBS: dict[str, tuple[list[int], int, list[str]]] = {
    "one process": ([5], 2, ["losses_and_gradients", "forms_of_results", "refused"]),
    "two processes": ([5, 9], 1, [*CASES]),
    "both": ([7, 5], 2, ["sums_and_rows", "training"]),
}


@pytest.mark.parametrize(
    "job", ["one process", "two processes", pytest.param("both", marks=pytest.mark.slow)]
)
def test_equal_to_all_rows(job: str) -> None:
    """Each job runs all of its cases on each of its processes."""
    sizes, devices, names = JOBS[job]
    count = len(sizes)
    for outcome in run_processes(outcomes_there, count, sizes, names, devices=devices, timeout=240):
        assert set(outcome.result.values()) == {"ok"}, outcome.result


# --- what one process tells ---------------------------------------------------------------------


OF_ONE = (
    *("sentences", "several_axes", "too_few_rows", "no_rows_first", "misuse", "guards"),
    *("ahead_of_calls", "placements", "other_types", "one_device"),
)


def sentences() -> None:
    """Two open axes: the sentences are cut for the devices, their length is not."""
    fn = bucketed(masked_sum, dynamic_axes=(None, "b, s", "b"))
    for n, s in ((5, 3), (6, 7), (3, 7)):
        tokens, lengths = rows(n, width=s), np.arange(n) % s + 1
        total, length, soft = fn(WEIGHTS, tokens, lengths)
        real = np.arange(s)[None] < lengths[:, None]
        assert_close(total, np.where(real, tokens, 0).sum() * WEIGHTS[0, 0], 1e-4)
        assert int(length) == 2 * s
        assert_close(soft, jax.nn.softmax(tokens, 1))


def several_axes() -> None:
    """A mesh of two axes: the rows are cut along one, and repeated along the other."""
    mesh = jax.make_mesh((1, 2), ("m", "d"))
    assert_close(bucketed(mean_of_all, mesh)(WEIGHTS, rows(5))[0], local_loss(WEIGHTS, rows(5)))
    other = BucketedExec(lambda x: lax.psum(x.sum(), "m"), dynamic_axes="b, _").with_pow2()
    assert_close(other.with_processes(mesh, "m")(rows(5)), rows(5).sum(), 1e-4)


def too_few_rows() -> None:
    fn = bucketed(mean_of_all)
    with pytest.raises(ArgumentError, match="1 rows .b. cannot be given to the 2 devices"):
        fn(WEIGHTS, rows(1))
    assert_close(fn(WEIGHTS, rows(2))[0], local_loss(WEIGHTS, rows(2)))


def no_rows_first() -> None:
    one = Mesh(np.asarray(jax.devices()[:1]), ("d",))
    with pytest.raises(FallbackError, match="each shard needs one row at least"):
        bucketed(mean_of_all, one)(WEIGHTS, rows(0))
    with pytest.raises(FallbackError, match="no argument has an open axis"):
        bucketed(mean_of_all, one, dynamic_axes=(None, None))(WEIGHTS, rows(3))
    fn = bucketed(lambda w, x: pmean(x.mean()), dynamic_axes=(None, "3, b"))
    with pytest.raises(ArgumentError, match="no first axis is open"):
        fn(WEIGHTS, np.ones((3, 5), np.float32))
    pair = bucketed(lambda x, y: psum(x.sum() + y.sum()), dynamic_axes=("b, _", "c, _"))
    with pytest.raises(ArgumentError, match="the first open axes are b, c"):
        pair(rows(5), rows(4))
    square = bucketed(lambda w, x: x @ x.T)
    with pytest.raises(ArgumentError, match="result 0 of shape .b, b. cannot be joined"):
        square(WEIGHTS, rows(5))


def misuse() -> None:
    plain = BucketedExec(mean_of_all, dynamic_axes=(None, "b, _")).with_pow2()
    mesh = on_all_devices()
    for wrong, match in (
        ((mesh, "rows"), r"an axis of the mesh \('d'\), got 'rows'"),
        (("d", mesh), "mesh must be a jax.sharding.Mesh"),
    ):
        with pytest.raises(SpecError, match=match):
            plain.with_processes(*wrong)
    fn = plain.with_processes(mesh, "d")
    for inside in (jax.jit(fn), jax.grad(lambda w, x: fn(w, x)[0])):
        with pytest.raises(SpecError, match="a call inside jax.jit, grad or vmap, .* is not there"):
            inside(WEIGHTS, rows(5))
    with pytest.raises(SpecError, match="map"):
        fn.map(WEIGHTS, [rows(5)])
    compiled = fn.lower(WEIGHTS, rows(5)).compile()
    assert_close(compiled(WEIGHTS, rows(4)), fn(WEIGHTS, rows(4)))
    with pytest.raises(ArgumentError, match="at most|beyond"):
        compiled(WEIGHTS, rows(80))
    for wrong in (fn.export_dynamic, functools.partial(fn.save, "saved.bkt")):
        with pytest.raises(SpecError, match="with_processes"):
            wrong(WEIGHTS, rows(5))
    nested = bucketed(
        lambda w, x: psum(jax.shard_map(jnp.sin, mesh=mesh, in_specs=P(), out_specs=P())(x).sum())
    )
    with pytest.raises(FallbackError, match="inside of a function of one shard"):
        nested(WEIGHTS, rows(5))
    with pytest.raises(SpecError, match="check='poison'"):
        bucketed(mean_of_all, check="poison")(WEIGHTS, rows(5))


def guards() -> None:
    """A function that decides by a size is traced for the sizes of all shards, or refused."""

    fn = bucketed(lambda w, x: psum(x.sum() if x.shape[0] > 4 else x.sum() * 2))
    assert_close(fn(WEIGHTS, rows(12)), rows(12).sum(), 1e-4)
    assert_close(fn(WEIGHTS, rows(6)), rows(6).sum() * 2, 1e-4)
    with pytest.raises(ArgumentError, match="decides by sizes, and differently"):
        fn(WEIGHTS, rows(9))
    assert_close(fn(WEIGHTS, rows(8)), rows(8).sum() * 2, 1e-4)


def ahead_of_calls() -> None:
    """Explanations and warm-ups are of the largest shard; what is compiled serves the calls."""
    fn = bucketed(mean_of_all)
    told = fn.explain(WEIGHTS, rows(9))
    assert (told.kind, dict(told.sizes), dict(told.bucket)) == ("masked", {"b": 5}, {"b": 8})
    assert any(equation.primitive == "shard_mean" for equation in told.masked)
    fn.warmup(WEIGHTS, rows(3), sizes={"b": [3, 8]})
    assert fn.stats().compiles == 2
    for n in (5, 16):
        assert_close(fn(WEIGHTS, rows(n))[0], local_loss(WEIGHTS, rows(n)))
    assert fn.stats().compiles == 2
    small = fn.with_maxsize(1)
    for n in (5, 16, 6):
        assert_close(small(WEIGHTS, rows(n))[0], local_loss(WEIGHTS, rows(n)))
    assert small.cache_size() == 1 and small.stats().evictions == 2


def placements() -> None:
    """Arguments may be on any devices; types that name a mesh are left behind."""
    mesh = on_all_devices()
    fn = bucketed(lambda w, x: (w + 0 * psum(x.shape[0]), x * 2), mesh)
    x, w = rows(6, width=4), jnp.asarray(WEIGHTS)
    for given_w in (WEIGHTS, w, jax.device_put(w, jax.devices()[1]), on(mesh, w, P())):
        kept, doubled = fn(given_w, on(mesh, x, P("d")))
        assert_close((kept, doubled), (WEIGHTS, x * 2))
        again, _ = fn(kept, jnp.asarray(x))
        assert again.sharding.is_fully_replicated and len(again.devices()) == 2
    assert fn.stats().compiles == 1


def other_types() -> None:
    """Arguments without open axes may change their types and containers from call to call."""
    fn = bucketed(lambda w, x: (jax.tree.map(lambda v: v * 2, w), psum(x.sum())))
    x, half = rows(5), np.ones(3, np.float16)
    one, two = np.float32(1), np.float32(2)
    some = (half, half, np.ones(3, np.float32), 3, 2.5, np.float32(2.5), half, [one, two])
    for w in (*some, (one, two), {"a": one, "b": two}, {"b": one, "c": two}, [one, two]):
        got, total = fn(w, x)
        want = jax.jit(lambda w: jax.tree.map(lambda v: v * 2, w))(w)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert (a.dtype, a.weak_type, a.shape) == (b.dtype, b.weak_type, b.shape)
        assert_close((got, total), (want, x.sum()))


def on(mesh: Any, array: Any, spec: Any) -> Any:
    return jax.device_put(array, NamedSharding(mesh, spec))


def one_device() -> None:
    """A mesh of one of the devices: nothing is cut, and axes may be in any place."""
    mesh = Mesh(np.asarray(jax.devices()[1:]), ("d",))
    square = bucketed(lambda w, x: (x @ x.T, psum(x.shape[0])), mesh)
    product, count = square(WEIGHTS, rows(5))
    assert_close(product, rows(5) @ rows(5).T)
    assert product.devices() == {jax.devices()[1]} and int(count) == 5
