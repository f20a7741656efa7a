"""`bucketjit.integrations.equinox.filter_jit` beside `equinox.filter_jit`, on ragged batches."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

eqx = pytest.importorskip("equinox", reason="equinox is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")

import bucketjit  # noqa: E402
from bucketjit.errors import ArgumentError, InlinedWarning, MissingExtraError, SpecError  # noqa: E402
from bucketjit.integrations.equinox import FilteredExec, filter_jit  # noqa: E402


def key(seed: int = 0) -> Any:
    return jax.random.key(seed)


def mlp() -> Any:
    return eqx.nn.MLP(4, 3, 6, 1, activation=jax.nn.tanh, key=key())


def batch(n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    return rng.normal(size=(n, 4)).astype(np.float32), rng.integers(0, 3, n)


OPTIMIZER = optax.adam(0.05)


def loss_of(model: Any, x: Any, y: Any) -> Any:
    logits = jax.vmap(model)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def train_step(model: Any, state: Any, x: Any, y: Any) -> Any:
    loss, grads = eqx.filter_value_and_grad(loss_of)(model, x, y)
    updates, state = OPTIMIZER.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss


def assert_close(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        if eqx.is_array(b):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        else:
            assert type(a) is type(b) and a == b


def test_training_equals_that_of_equinox() -> None:
    runs = []
    for decorate in (eqx.filter_jit, filter_jit):
        model, step, losses = mlp(), decorate(train_step), []
        state = OPTIMIZER.init(eqx.filter(model, eqx.is_array))
        for n in (7, 8, 5, 8, 3):
            model, state, loss = step(model, state, *batch(n))
            losses.append(float(loss))
        runs.append((losses, model, step))
    np.testing.assert_allclose(runs[1][0], runs[0][0], rtol=1e-5)
    assert_close(runs[1][1], runs[0][1])
    stats = runs[1][2].stats()
    assert (stats.calls, stats.compiles, stats.fallback_calls) == (5, 1, 0)
    assert len(stats.programs) == 1


def with_aux(model: Any, x: Any, mode: str) -> Any:
    out = jax.vmap(model)(x)
    told = {"rows": x.shape[0], "half": x.shape[0] / 2, "mode": mode, "p": 0.1, "is": True}
    return (out**2).mean(), {**told, "many": 2**40, "out": out, "model": model}


def test_results_may_hold_what_is_no_array() -> None:
    call, model = filter_jit(with_aux), mlp()
    for n in (3, 4):
        x, _ = batch(n)
        _, told = call(model, x, "a mode")
        assert {k: told[k] for k in ("rows", "mode", "p", "is", "many")} == {
            **{"rows": n, "mode": "a mode", "p": 0.1, "is": True, "many": 2**40}
        }
        assert type(told["rows"]) is int and told["is"] is True
        assert float(told["half"]) == n / 2
        assert told["out"].shape == (n, 3)
        assert told["model"].activation is model.activation
    assert call.stats().compiles == 1
    x, _ = batch(5)
    (value, told), grads = eqx.filter_value_and_grad(call, has_aux=True)(model, x, "a mode")
    (wanted, _), wanted_grads = eqx.filter_value_and_grad(with_aux, has_aux=True)(model, x, "")
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    assert_close(grads, wanted_grads)
    assert told["rows"] == 5 and told["mode"] == "a mode"


class Normed(eqx.Module):
    linear: Any
    norm: Any
    slope: float

    def __init__(self, slope: float) -> None:
        self.linear = eqx.nn.Linear(4, 3, key=key())
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
        self.slope = slope

    def _one(self, x: Any, state: Any) -> Any:
        x, state = self.norm(self.linear(x), state)
        return jnp.where(x > 0, x, self.slope * x), state

    def plain(self, x: Any, state: Any) -> Any:
        return jax.vmap(self._one, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            x, state
        )

    # A method, of a stateful layer that reduces over the batch.
    @filter_jit
    def __call__(self, x: Any, state: Any) -> Any:
        return self.plain(x, state)


def test_methods_with_state_and_batch_norm() -> None:
    Normed.__call__.cache_clear()
    model, state = eqx.nn.make_with_state(Normed)(0.1)
    wanted = eqx.filter_jit(Normed.plain)
    wanted_state = jax.tree.map(lambda x: x, state)
    for n in (3, 4, 3):
        x, _ = batch(n)
        out, state = model(x, state)
        wanted_out, wanted_state = wanted(model, x, wanted_state)
        np.testing.assert_allclose(out, wanted_out, rtol=1e-4, atol=1e-5)
        assert_close(state, wanted_state)
    assert Normed.__call__.stats().compiles == 1
    # Another static value is another program; the first one is still there.
    other = eqx.tree_at(lambda m: m.slope, model, 0.5)
    x, _ = batch(3)
    for module in (other, model, other):
        want = wanted(module, x, jax.tree.map(lambda x: x, state))[0]
        np.testing.assert_allclose(module(x, state)[0], want, rtol=1e-4, atol=1e-5)
    assert Normed.__call__.stats().compiles == 2


@pytest.fixture(scope="module")
def added() -> FilteredExec:
    return filter_jit(lambda x, n, *, by: x.sum() + n * by["factor"])


@pytest.mark.parametrize(("n", "factor"), [(2, 1), (2.0, True), (np.float32(3), 0.5)])
def test_static_values_by_type(added: FilteredExec, n: Any, factor: Any) -> None:
    x, _ = batch(3)
    for _ in range(2):
        got = added(x, n, by={"factor": factor})
        np.testing.assert_allclose(got, x.sum() + n * factor, rtol=1e-5)
    assert added.explain(x, n, by={"factor": factor}).bucket == {"batch": 4}
    assert "\n  program: " in str(added.explain(x, n, by={"factor": factor}, rules=True))


def test_an_int_is_a_size_where_dynamic_axes_say_so() -> None:
    grow = filter_jit(lambda x, n: jnp.zeros(n) + x.sum(), dynamic_axes=("b", "n"))
    for n in (3, 4):
        np.testing.assert_array_equal(grow(np.ones(n, np.float32), n), np.full(n, n))
    assert grow.stats().compiles == 1


def test_warmup_builders_and_dynamic_axes_with_an_entry_for_the_model() -> None:
    call = filter_jit(lambda m, x: jax.vmap(m)(x), buckets=[4, 8], dynamic_axes=(None, "b, _"))
    model, like = mlp(), jax.ShapeDtypeStruct((3, 4), jnp.float32)
    report = call.warmup(model, like, sizes={"b": [3, 7]}, progress=False)
    assert len(report.compiled) == 2
    with call.forbid_compiles():
        assert call(model, batch(6)[0]).shape == (6, 3)
    assert call.with_exact().explain(model, like).kind != "masked"
    assert isinstance(call.with_maxsize(4), FilteredExec)
    assert {"stats", "cache_size", "with_pow2"} <= set(dir(call))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        call.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: filter_jit(loss_of, donate="some"), SpecError, "donate must be one of"),
        (lambda: filter_jit(loss_of, static_argnums=0), SpecError, "static by itself"),
        (lambda: filter_jit(loss_of, donate="all", donate_argnums=0), SpecError, "not both"),
        (lambda: filter_jit(3), TypeError, "callable"),
        (
            lambda: filter_jit(lambda x, o: x)(np.ones(3), {"a": {1}}),
            ArgumentError,
            r"^o\['a'\]: .* got set",
        ),
    ],
)
def test_errors(make: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def test_an_executor_of_arrays_names_the_wrapper() -> None:
    call = bucketjit.jit(lambda models, x: jax.vmap(models[0])(x))
    cure = r"^models\[0\]\.activation: .*use bucketjit\.integrations\.equinox\.filter_jit"
    with pytest.raises(ArgumentError, match=cure):
        call([mlp()], batch(3)[0])
    with pytest.raises(ArgumentError, match="static_argnums"):
        call([jax.nn.relu], batch(3)[0])


def test_equinox_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    bucketjit.integrations.equinox._equinox.cache_clear()
    monkeypatch.setitem(sys.modules, "equinox", None)
    with pytest.raises(MissingExtraError, match=r"bucketjit\[equinox\]"):
        filter_jit(lambda x: x)(np.ones(3))


def test_the_error_of_save_names_a_way_that_works(tmp_path: Any) -> None:
    model, (x, _) = mlp(), batch(5)
    fn = filter_jit(lambda model, x: jax.vmap(model)(x))
    with pytest.raises(AttributeError, match=r"jit\(lambda x: fn.__wrapped__\(model, x\)\).save\("):
        fn.save(tmp_path / "f.bkt", model, x)
    bucketjit.jit(lambda x: fn.__wrapped__(model, x)).save(tmp_path / "f.bkt", x)  # type: ignore[attr-defined]
    assert_close(bucketjit.load(tmp_path / "f.bkt")(x[:3]), fn(model, x[:3]))


def test_donated_arguments() -> None:
    for donate, first, second in (
        ("all", True, True),
        ("all-except-first", False, True),
        ("none", False, False),
    ):

        @filter_jit(donate=donate)
        def move(a: Any, b: Any, x: Any) -> Any:
            return jax.tree.map(lambda p: p + x.sum(), eqx.filter((a, b), eqx.is_array))

        a, b = eqx.nn.Linear(2, 2, key=key()), eqx.nn.Linear(2, 2, key=key(1))
        with warnings.catch_warnings(action="error"):  # no result can take the memory of x
            move(a, b, np.ones(3, np.float32))
        assert (a.weight.is_deleted(), b.weight.is_deleted()) == (first, second)
    with warnings.catch_warnings(action="error"):  # of a changed copy neither
        filter_jit(donate="all")(jnp.sum).with_linear(4)(np.ones(3, np.float32))
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        filter_jit(donate="warn")(jnp.sum)(np.ones(3, np.float32))


def test_gradients_of_it_run_in_buckets() -> None:
    loss, model = filter_jit(loss_of), mlp()
    wanted_of = eqx.filter_jit(eqx.filter_value_and_grad(loss_of))
    for n in (5, 7, 6):
        value, grads = eqx.filter_value_and_grad(loss)(model, *batch(n))
        wanted, wanted_grads = wanted_of(model, *batch(n))
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
        assert_close(grads, wanted_grads)
        assert_close(eqx.filter_grad(loss)(model, *batch(n)), wanted_grads)
    assert loss.stats().compiles <= 2  # the loss and its gradient, or the two at once
    with pytest.warns(InlinedWarning) as told:
        assert_close(eqx.filter_jit(loss)(model, *batch(5)), loss_of(model, *batch(5)))
    assert told[0].filename == __file__  # and not a line of equinox
    assert loss.stats().inlined_calls == 1
