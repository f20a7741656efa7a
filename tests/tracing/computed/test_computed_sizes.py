"""Functions that compute sizes, called by executors: equal to the eager function, few compiles."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec, Check, Fallback, Padded
from bucketjit.errors import FallbackError, FallbackWarning
from tests.comparison import assert_close

W = np.random.default_rng(3).standard_normal((4, 4)).astype(np.float32)
EDGES = (1, 7, 8, 9)  # sizes at the edges of the buckets 8 and 16


def arrays(size: int) -> Iterator[np.ndarray]:
    """Arrays of one size that select nothing, one element, half and all; and one with NaN."""
    rng = np.random.default_rng(size)
    plain = (np.abs(rng.standard_normal(size)) + 0.1).astype(np.float32)
    one = -plain
    one[size // 2] *= -1
    half = np.where(np.arange(size) % 2, plain, -plain).astype(np.float32)
    special = half.copy()
    special[0] = np.nan
    yield from (-plain, one, half, plain, special)


def few_arrays() -> Iterator[np.ndarray]:
    """Half of what a bucket holds, and nothing of another."""
    yield [*arrays(7)][2]
    yield [*arrays(9)][0]


def all_arrays() -> Iterator[np.ndarray]:
    for size in EDGES:
        yield from arrays(size)


few_or_all = pytest.mark.parametrize(
    "inputs", [few_arrays, pytest.param(all_arrays, marks=pytest.mark.slow)]
)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "selection": lambda x: x[x > 0],
    "mean": lambda x: x[x > 0].mean(),
    "sum": lambda x: x[x > 0].sum(),
    "std": lambda x: jnp.std(x[jnp.isfinite(x)]),
    "softmax": lambda x: jax.nn.softmax(x[x > 0]),
    "max": lambda x: x[x > 0].max(),
    "median": lambda x: jnp.median(x[x > 0]),
    "argmax": lambda x: jnp.argmax(x[x > -1]),
    "nonzero": lambda x: jnp.nonzero(x > 0),
    "flatnonzero": lambda x: jnp.flatnonzero(x > 0),
    "unique": lambda x: jnp.unique(jnp.round(x)),
    "unique_parts": lambda x: jnp.unique(jnp.round(x), True, True, True),
    "unique_rows": lambda x: jnp.unique(jnp.round(jnp.stack([x, x], 1)), axis=0),
    "setdiff1d": lambda x: jnp.setdiff1d(jnp.round(x), jnp.array([0.0, 1.0])),
    "outer": lambda x: x[x > 0][:, None] * x[x > 0],
    "nested": lambda x: x[x > 0][x[x > 0] < 1],
    "concatenated": lambda x: jnp.concatenate([x[x > 0], -x[x > 0], x[x <= 0]]),
    "elements": lambda x: jnp.stack([x, -x])[jnp.stack([x, -x]) > 0],
    "set": lambda x: x.at[x > 0].set(0),
    "set_each": lambda x: x.at[x > 0].set(-x[x > 0]).at[x > 1].add(3),
    "matmul": lambda x: jnp.stack([x] * 4, 1)[x > 0] @ W,
    "scan_over": lambda x: jax.lax.scan(lambda c, a: (c / 2 + a, c), jnp.float32(0), x[x > 0]),
    "size": lambda x: jnp.ones(x[x > 0].shape[0]),
    "tree": lambda x: {"a": x[x > 0], "b": [x.sum(), jnp.nonzero(x < 0)]},
    "gradient": jax.grad(lambda x: (x[x > 0] ** 2).sum()),
    "value_and_gradient": jax.value_and_grad(lambda x: jax.nn.logsumexp(x[x > 0])),
    "parts_reshaped": lambda x: jnp.concatenate([x[x > 0], x[~(x > 0)]]).reshape(x.shape),
    "selection_reshaped": lambda x: x[x > 0].reshape(x.shape[0]),
    "pairs": lambda x: x[x > 0].reshape(-1, 2).sum(0),
    "column": lambda x: x[x > 0].reshape(-1, 1),
    "branch": lambda x: x[x > 0].sum() if x[x > 0].shape[0] > 2 else -x.sum(),
    "branch_of_shape": lambda x: x[x > 0][1:] if x[x > 0].shape[0] > 2 else x[x > 0],
}


def checked(executor: Any, fn: Callable[..., Any], x: np.ndarray) -> None:
    """The executor returns, or raises, what the eager function does."""
    failure: Exception | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            want = fn(jnp.asarray(x))
        except Exception as error:
            failure = error
        if failure is None:
            assert_close(executor(x), want)
            return
        with pytest.raises(type(failure)) as raised:
            executor(x)
        assert raised.value.__context__ is None  # no attempt before is told of


@pytest.mark.sampled(2, "selection_reshaped-few_arrays")
@few_or_all
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_the_eager_function(name: str, inputs: Any) -> None:
    fn = PROGRAMS[name]
    executor = BucketedExec(fn, dynamic_axes="n", check=Check.POISON).with_pow2(min=8)
    for x in inputs():
        checked(executor, fn, x)


def of_selected(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of what is selected, and of its size."""
    return lambda x: fn(x[x > 0], x[x > 0].shape[0])


# Each one is a program for every bucket, and its results are those of eager JAX.
ONE_SELECTION: dict[str, Callable[..., Any]] = {
    "median_of_rest": lambda x: jnp.median(x[~(x > 0)]),
    "both_parts": lambda x: (x[x > 0].max(), x[~(x > 0)].max()),
    "chained_rests": lambda x: x[~(x > 0)][~(x[~(x > 0)] < -1)].max(),
    "both_slices": lambda x: (lambda k: (x[:k].max(), x[k:].max()))(jnp.sum(x > 0)),
    "interp": lambda x: jnp.interp(0.3, jnp.sort(x[~(x > 0)]), x[~(x > 0)]),
    "is_there_any": lambda x: x[x > 0].min() if x[x > 0].shape[0] else x.max(),
    "middle": of_selected(lambda y, k: y[k // 2]),
    "last_row": of_selected(lambda y, k: jnp.stack([y, y], 1)[k - 1, 0]),
    "remainder": of_selected(lambda y, k: y[k % 3]),
    "set_middle": of_selected(lambda y, k: y.at[k // 2].set(7)),
    "set_first": of_selected(lambda y, k: y.at[0].set(k)),
    "set_in_whole": lambda x: x.at[x[x > 0].shape[0] - 1].add(1),
    "arange": of_selected(lambda y, k: jnp.arange(1.0, k + 1) * y),
    "arange_of_halves": of_selected(lambda y, k: 0.5 + 1.5 * jnp.arange(0.0, k)),
    "arange_down": of_selected(lambda y, k: jnp.arange(k, 0, -1.0)),
    "linspace": of_selected(lambda y, k: jnp.linspace(0, 1, k + 2)),
    "root": of_selected(lambda y, k: y / (k + 1) ** 0.5),
    "inverse": of_selected(lambda y, k: y * (k + 2) ** -1),
    "clipped_counts": lambda x: jnp.repeat(x, jnp.clip(x, 0, 3).astype(int)),
    "rounded_counts": lambda x: x.repeat(jnp.round(jnp.clip(jnp.abs(x), None, 2.5)).astype(int)),
}


@pytest.mark.sampled(2, "inverse", "chained_rests")
@pytest.mark.parametrize("name", ONE_SELECTION)
def test_one_selection_is_masked_whatever_is_made_of_it(name: str) -> None:
    fn = ONE_SELECTION[name]
    executor = BucketedExec(fn, dynamic_axes="n").with_pow2(min=8)
    for size in (5, 8):
        for x in arrays(size):
            checked(executor, fn, x)
    halves = np.where(np.arange(8) % 2, 1.5, -0.5).astype(np.float32)
    assert executor.explain(halves).kind == "masked"
    assert executor(halves) is not None
    assert executor.stats().calls > executor.stats().fallback_calls


# A decision by another question than whether there is anything.
DECISIONS: dict[str, Callable[..., Any]] = {
    "branch": PROGRAMS["branch"],
    "branch_of_shape": PROGRAMS["branch_of_shape"],
    "top_k": lambda x: jax.lax.top_k(x[x > 0], 2),
    "equal": lambda x: x[x > 0].sum() if x[x > 0].shape[0] == 3 else -x,
    "key": lambda x: {3: x}.get(x[x > 0].shape[0], -x),
    "remainder": of_selected(lambda y, k: y.sum() if k % 3 >= 1 else -y),
    "halves": of_selected(lambda y, k: y[: k // 2] + y[k // 2 :] if k % 2 == 0 else y),
    "permutation": of_selected(lambda y, k: jax.random.permutation(jax.random.key(0), k + 1)),
    "linspace": of_selected(lambda y, k: jnp.linspace(0, 1, k // 2 + 1)),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_other_decisions_by_computed_sizes_run_eagerly(name: str) -> None:
    fn = DECISIONS[name]
    executor = BucketedExec(fn, dynamic_axes="n").with_pow2(min=8)
    for x in arrays(8):
        checked(executor, fn, x)
    strict = BucketedExec(fn, dynamic_axes="n", fallback=Fallback.ERROR).with_pow2()
    with pytest.raises(FallbackError, match="a decision depends on a computed size") as told:
        strict(np.ones(8, np.float32))
    assert "test_computed_sizes.py" in str(told.value) and "jnp.where" in told.value.remedy


@pytest.mark.parametrize("name", ["nested", "is_there_any"])
def test_a_call_that_selects_nothing_runs_eagerly(name: str) -> None:
    fn = {**PROGRAMS, **ONE_SELECTION}[name]
    executor = BucketedExec(fn, dynamic_axes="n").with_pow2()
    checked(executor, fn, np.ones(5, np.float32))
    with pytest.warns(FallbackWarning, match=r"array that is not empty \(.*test_computed_sizes"):
        assert_close(executor(-np.ones(5, np.float32)), fn(-jnp.ones(5)))
    for sign in (1, -1, 1):  # by the fast path, too
        for size in (5, 6):
            checked(executor, fn, sign * np.ones(size, np.float32))
    stats = executor.stats()
    assert (stats.calls, stats.fallback_calls, stats.compiles) == (8, 3, 1)
    strict = BucketedExec(fn, dynamic_axes="n", fallback=Fallback.ERROR).with_pow2()
    with pytest.raises(FallbackError, match="array that is not empty"):
        strict(-np.ones(5, np.float32))


def test_a_reason_names_the_operation_and_no_second_mask() -> None:
    refused: dict[str, Callable[..., Any]] = {
        "jnp.arange": of_selected(lambda y, k: jnp.arange(0, k, 0.1)),
        "float(k)": of_selected(lambda y, k: y * float(k)),
        "y + x": lambda x: (lambda y: y + x[:2])(x[x > 0]),
    }
    for operation, fn in refused.items():
        executor = BucketedExec(fn, dynamic_axes="n").with_pow2()
        reason = str(executor.explain(np.ones(6, np.float32)).reason)
        assert (operation in reason or operation == "y + x") and "one mask" not in reason, reason


@pytest.mark.sampled(1, "mean")
@pytest.mark.parametrize("name", ["selection", "mean", "unique_parts", "set_each", "gradient"])
def test_one_executable_for_each_bucket(name: str) -> None:
    fn = PROGRAMS[name]
    executor = BucketedExec(fn, dynamic_axes="n", fallback=Fallback.ERROR).with_pow2(min=8)
    rng = np.random.default_rng(1)
    buckets = set()
    for number in range(100):
        size = int(rng.integers(1, 65))
        x = (rng.standard_normal(size) + rng.uniform(-2, 2)).astype(np.float32)
        buckets.add(max(8, 1 << (size - 1).bit_length()))
        if number < 10:  # eager JAX compiles for each size and count
            checked(executor, fn, x)
        else:
            executor(x)
    assert executor.stats().compiles == len(buckets)


WITHOUT_JIT: dict[str, tuple[Callable[..., Any], np.ndarray]] = {
    "empty": (lambda x: x[x > 0], np.zeros(0, np.float32)),
    "unbounded": (lambda x: jnp.repeat(x, x.astype(int)), np.ones(3, np.float32)),
    "iterated": (lambda x: sum(iter(x[x > 0])), np.ones(3, np.float32)),
    "raises": (lambda x: x[x > 0].max(), -np.ones(3, np.float32)),
}


@pytest.mark.parametrize("name", WITHOUT_JIT)
def test_what_runs_without_jit_does_so_beside_files(name: str, tmp_path: Any) -> None:
    fn, x = WITHOUT_JIT[name]
    executor = BucketedExec(fn, dynamic_axes="n").with_pow2().with_persistence(tmp_path)
    for _ in range(2):
        checked(executor, fn, x)


@pytest.mark.parametrize("stage", ["trace", "lower"])
def test_a_stage_of_what_runs_without_jit_is_refused_with_the_reason(stage: str) -> None:
    executor = BucketedExec(REFUSED["vmap"][0], dynamic_axes="n").with_pow2()
    with (
        pytest.warns(FallbackWarning),
        pytest.raises(bucketjit.errors.MaskingError, match="computes sizes.*vmap over a selection"),
    ):
        getattr(executor, stage)(np.ones(3, np.float32))


def test_iteration_is_not_taken_for_different_selections() -> None:
    executor = BucketedExec(WITHOUT_JIT["iterated"][0], dynamic_axes="n").with_pow2()
    assert "meet" not in str(executor.explain(np.ones(3, np.float32)).reason)


def test_an_effect_does_not_run_twice(capfd: pytest.CaptureFixture[str]) -> None:
    def noisy(x: Any) -> Any:
        jax.debug.print("ran with {}", x[0])
        return x.sum() if x[x > 0].shape[0] else x

    executor = BucketedExec(noisy, dynamic_axes="n").with_pow2()
    with pytest.warns(FallbackWarning, match="may run twice"):
        executor(-np.ones(5, np.float32))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("ran with") == 1


@pytest.mark.filterwarnings("ignore::bucketjit.errors.FallbackWarning")
def test_a_donated_argument_is_there_for_the_second_run() -> None:
    fn = ONE_SELECTION["is_there_any"]
    executor = BucketedExec(fn, dynamic_axes="n", donate_argnums=0).with_pow2()
    for x in (-np.ones(8, np.float32), np.ones(8, np.float32)) * 2:
        assert_close(executor(jnp.asarray(x)), fn(jnp.asarray(x)))


@pytest.mark.parametrize("out", ["numpy", "padded"])
def test_forms_of_results(out: str) -> None:
    executor = BucketedExec(PROGRAMS["tree"], dynamic_axes="n", out=out).with_pow2()
    for x in arrays(9):
        got, want = executor(x), PROGRAMS["tree"](jnp.asarray(x))
        kind = np.ndarray if out == "numpy" else Padded
        assert type(got["a"]) is kind
        np.testing.assert_allclose(np.asarray(got["a"]), want["a"])
        if out == "padded":
            assert got["a"].array.shape == (16,)
            total = BucketedExec(jnp.sum).with_pow2()
            np.testing.assert_allclose(total(got["a"]), want["a"].sum(), rtol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["sum", "selection", "softmax"])
def test_derivatives_of_the_executor(name: str) -> None:
    fn = PROGRAMS[name]
    executor = BucketedExec(fn, dynamic_axes="n").with_pow2()

    def scalar(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: jnp.sum(jnp.sin(run(x)))

    for x in map(jnp.asarray, list(arrays(7))[1:4]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            assert_close(jax.grad(scalar(executor))(x), jax.grad(scalar(fn))(x))
            assert_close(jax.hessian(scalar(executor))(x), jax.hessian(scalar(fn))(x))


def loop(x: Any) -> Any:
    return jax.lax.scan(lambda c, a: (c + x[x > a].sum(), a), jnp.float32(0), x)[0]


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "branches_that_return": (
        lambda x: jax.lax.cond(x.sum() > 0, lambda y: y[y > 0], lambda y: y[y > 0], x),
        "meet",
    ),
    "vmap": (lambda x: jax.vmap(lambda a: x[x > a].sum())(x), "vmap over a selection"),
    "decision_in_a_loop": (
        lambda x: jax.lax.scan(lambda c, a: (c + x[x > a].max(), a), jnp.float32(0), x)[0],
        "a decision depends on a size that is computed in a loop",
    ),
    "derivative_of_a_loop": (jax.grad(loop), "or needs one for a derivative"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    fn, reason = REFUSED[name]
    x = np.arange(5, dtype=np.float32)
    executor = BucketedExec(fn, dynamic_axes="n", fallback=Fallback.ERROR).with_pow2()
    with pytest.raises(FallbackError, match=reason) as told:
        executor(x)
    assert "test_computed_sizes.py" in str(told.value) and told.value.remedy
    # JAX itself cannot run it either; the error says why the call is not masked.
    with pytest.raises(IndexError) as raised:
        BucketedExec(fn, dynamic_axes="n").with_pow2()(x)
    assert any(note.startswith("bucketjit runs") for note in raised.value.__notes__)


@pytest.mark.parametrize("name", ["selection", "nonzero", "unique"])
def test_inside_of_jit_the_error_says_what_to_do(name: str) -> None:
    executor = BucketedExec(PROGRAMS[name], dynamic_axes="n").with_pow2()
    for transformed in (jax.jit(executor), lambda x: jax.vmap(executor)(x[None])):
        with pytest.raises((IndexError, jax.errors.ConcretizationTypeError)) as raised:
            transformed(np.ones(3, np.float32))
        assert "call the bucketed function outside" in str(raised.value)


@pytest.mark.parametrize("fallback", ["exact", "error"])
def test_the_error_of_the_function_itself_is_raised(fallback: str) -> None:
    executor = bucketjit.jit(lambda x: x[x > 0].max(), buckets="pow2", fallback=fallback)
    for size in (3, 4):
        with pytest.raises(ValueError, match="zero-size array to reduction operation max"):
            executor(-np.ones(size, np.float32))
        assert executor(np.arange(size, dtype=np.float32)) == size - 1


# As imported inside of a function, where no module has the name.
IMPORTED: dict[str, Callable[..., Any]] = {
    "slice": (lambda slice: lambda x: slice(x, (0,), (jnp.sum(x > 0),)).sum())(jax.lax.slice),
    "repeat": (lambda repeat: lambda x: repeat(x, (x > 0).astype(int)).sum())(jnp.repeat),
    "arange": (lambda arange: lambda x: arange(jnp.sum(x > 0)).sum())(jnp.arange),
}


@pytest.mark.parametrize("name", IMPORTED)
def test_a_function_imported_by_name_runs_without_jit(name: str) -> None:
    fn, x = IMPORTED[name], np.array([3, 1, -2], np.float32)
    executor = BucketedExec(fn, dynamic_axes="n").with_pow2()
    with pytest.warns(FallbackWarning, match=r"imported by name .* \[\S+test_computed_sizes.py"):
        assert executor(x) == fn(jnp.asarray(x))
    with pytest.raises(FallbackError, match="imported by name"):
        BucketedExec(fn, dynamic_axes="n", fallback=Fallback.ERROR).with_pow2()(x)


def test_counts_of_bounded_functions_are_bounded() -> None:
    def fn(x: Any) -> Any:
        counts = jax.nn.sigmoid(x) * 4 + jax.nn.softmax(x) * 3 + jnp.sin(x) + 1
        return jnp.repeat(x, counts.astype(int)).sum()

    executor = BucketedExec(fn, dynamic_axes="n", fallback=Fallback.ERROR).with_pow2()
    for size in (5, 7):
        x = np.linspace(-3, 3, size, dtype=np.float32)
        np.testing.assert_allclose(executor(x), fn(jnp.asarray(x)), rtol=1e-5)
    assert executor.cache_size() == 1


def test_what_cannot_be_masked_runs_without_jit() -> None:
    def refused(x: Any) -> Any:
        y = x[x > 0]
        return jnp.linalg.eigvals(y[:, None] * y).real.sum() + y

    executor = BucketedExec(refused, dynamic_axes="n").with_pow2()
    x = np.arange(1, 4, dtype=np.float32)
    with pytest.warns(FallbackWarning):
        np.testing.assert_allclose(executor(x), 14 + x, rtol=1e-5)
    np.testing.assert_allclose(executor(x), 14 + x, rtol=1e-5)
    assert executor.stats().calls == 2 == executor.stats().fallback_calls


def test_empty_arrays_and_no_strategy_run_without_jit() -> None:
    empty = np.zeros(0, np.float32)
    assert BucketedExec(PROGRAMS["selection"], dynamic_axes="n").with_pow2()(empty).shape == (0,)
    x = np.array([1, -1, 2], np.float32)
    np.testing.assert_allclose(BucketedExec(PROGRAMS["selection"])(x), [1, 2])
    with pytest.raises(jax.errors.TracerBoolConversionError):  # that of jit, as before
        BucketedExec(lambda x: x if x.sum() > 0 else -x)(x)


def test_a_function_without_open_axes_is_a_fallback_if_jit_cannot_run_it() -> None:
    x = np.array([1, -1, 2], np.float32)
    executor = BucketedExec(PROGRAMS["selection"], dynamic_axes=(None,)).with_pow2()
    with pytest.warns(FallbackWarning, match="without jit.*no axis is open.*open an axis in"):
        np.testing.assert_allclose(executor(x), [1, 2])
    assert executor.stats().fallback_calls == 1
    strict = BucketedExec(PROGRAMS["selection"], dynamic_axes=(None,), fallback="error").with_pow2()
    with pytest.raises(FallbackError, match="no axis is open"):
        strict(x)


def test_programs_of_concrete_traces_cannot_compute_sizes() -> None:
    def both(x: Any) -> Any:
        return x[x > 0] * np.arange(x.shape[0]).sum()

    executor = BucketedExec(both, dynamic_axes="n").with_pow2()
    with pytest.warns(FallbackWarning):
        np.testing.assert_allclose(executor(np.ones(4, np.float32)), 6)


def test_explain_names_the_size_its_bound_and_what_is_presumed() -> None:
    executor = BucketedExec(PROGRAMS["max"], dynamic_axes="n").with_pow2()
    told = executor.explain(np.ones(5, np.float32))
    assert told.computed[0].startswith("size_1 - 1 <= n  [")
    assert told.computed[1] == "assumed: size_1 - 1 >= 1"
    assert "computed: size_1 - 1 <= n" in str(told)


def test_statistics_name_sizes_their_bounds_and_what_was_selected() -> None:
    executor = BucketedExec(PROGRAMS["selection"], dynamic_axes="n").with_pow2()
    for x in (np.ones(3, np.float32), -np.ones(4, np.float32), np.ones(3, np.float32)):
        executor(x)
    [size] = {made for program in executor.stats().programs for made in program.computed}
    assert (size.size, size.bound) == ("size_1 - 1", "n")
    assert "test_computed_sizes.py" in size.line
    assert (size.runs, size.selected, size.rows, size.most) == (3, 6, 10, 3)
    executor.reset_stats()
    [size] = executor.stats().programs[0].computed
    assert size.runs == 0


def test_the_report_has_a_table_of_computed_sizes() -> None:
    executor = BucketedExec(PROGRAMS["selection"], dynamic_axes="n").with_pow2()
    executor(np.array([1, -1, 2], np.float32))
    told = str(executor.report()).partition("Computed sizes")[2]
    assert "size_1" in told and "{" not in told


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["selection", "mean", "tree", "gradient", "unique_parts"])
def test_executables_are_kept_in_files(name: str, tmp_path: Any) -> None:
    fn = PROGRAMS[name]
    executor = BucketedExec(fn, dynamic_axes="n").with_pow2(min=8).with_persistence(tmp_path)
    for x in arrays(7):
        checked(executor, fn, x)
    assert executor.stats().compiles == 1
    executor.cache_clear()
    for x in arrays(6):
        checked(executor, fn, x)
    assert (executor.stats().compiles, executor.stats().loads) == (0, 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["selection", "mean", "softmax", "tree", "unique_parts"])
def test_a_compiled_stage_serves_its_bucket(name: str) -> None:
    fn = PROGRAMS[name]
    executor = BucketedExec(fn, dynamic_axes="n").with_pow2()
    lowered = executor.lower(np.ones(8, np.float32))
    assert lowered.computed[0].startswith("size_1 - 1 <= n  [")
    compiled = lowered.compile()
    shapes = [str(x.shape) for x in jax.tree.leaves(compiled.out_info)]
    assert ("(size_1 - 1,)" in shapes) == (name != "mean")
    assert len(jax.tree.leaves(compiled.output_shardings)) == len(shapes)
    for size in (2, 5, 8, 5):
        for x in arrays(size):
            checked(compiled, fn, x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("executables", [False, True])
@pytest.mark.parametrize(
    "name", ["selection", "mean", "tree", "median", "unique_parts", "set_each"]
)
def test_saved_functions_compute_sizes(name: str, executables: bool, tmp_path: Any) -> None:
    pytest.importorskip("flatbuffers", reason="it serializes exported modules")
    fn, path = PROGRAMS[name], tmp_path / "saved.bkt"
    executor = BucketedExec(fn, dynamic_axes="n").with_pow2(min=4)
    executor.save(path, np.ones(5, np.float32), sizes={"n": [4, 8]}, executables=executables)
    loaded = bucketjit.load(path, trust_executables=executables)
    for size in (1, 3, 8, 5, 8):
        for x in arrays(size):
            if name != "median" or (x > 0).any():
                checked(loaded, fn, x)
    if name == "median":
        with pytest.raises(FallbackError, match="array that is not empty"):
            loaded(-np.ones(5, np.float32))
    told = loaded.stats()
    assert told.fallback_calls == 0 and (told.compiles == 0) == executables
    assert told.programs[0].computed[0].bound == "n"


def test_what_cannot_carry_computed_sizes_says_so(tmp_path: Any) -> None:
    x = np.ones(5, np.float32)
    executor = BucketedExec(PROGRAMS["selection"], dynamic_axes="n").with_pow2()
    for export in (executor.export_dynamic, executor.export_bounded):
        with pytest.raises(bucketjit.errors.ExportError, match="computes sizes"):
            export(x)
    with pytest.raises(bucketjit.errors.ArtifactError, match="depend on computed sizes"):
        executor.save(tmp_path / "saved.bkt", x, derivatives=1)


def test_patches_are_gone_after_a_trace_that_raises() -> None:
    original = jnp.nonzero, jax.numpy.compress

    def raises(x: Any) -> Any:
        raise KeyError(str(jnp.nonzero(x)[0].ndim))

    with pytest.raises(KeyError):
        BucketedExec(raises, dynamic_axes="n").with_pow2()(np.ones(3, np.float32))
    assert (jnp.nonzero, jax.numpy.compress) == original


def test_a_mask_of_another_shape_raises_the_error_of_jax() -> None:
    executor = BucketedExec(lambda x: x[x[:3] > 0], dynamic_axes="n").with_pow2()
    with pytest.raises(IndexError, match="boolean index did not match"):
        executor(np.ones(5, np.float32))
