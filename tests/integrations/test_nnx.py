"""`bucketjit.integrations.nnx.jit` beside `flax.nnx.jit`, on ragged batches."""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="flax is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")

from flax import nnx  # noqa: E402

import bucketjit  # noqa: E402
from bucketjit.errors import ArgumentError, InlinedWarning, MissingExtraError, SpecError  # noqa: E402
from bucketjit.integrations.nnx import ModuleExec, jit  # noqa: E402


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.last = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.relu(self.norm(self.first(x))))


def loss_of(model: Any, x: Any, y: Any) -> Any:
    logits = model(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits


def train_step(model: Any, optimizer: Any, metrics: Any, x: Any, y: Any) -> Any:
    (loss, logits), grads = nnx.value_and_grad(loss_of, has_aux=True)(model, x, y)
    optimizer.update(model, grads)
    metrics.update(loss=loss, logits=logits, labels=y)
    return loss


def objects() -> tuple[Any, Any, Any]:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    average = nnx.metrics.Average("loss")
    return model, optimizer, nnx.MultiMetric(loss=average, hits=nnx.metrics.Accuracy())


def batch(n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    return rng.normal(size=(n, 4)).astype(np.float32), rng.integers(0, 3, n)


def plain_state(tree: Any) -> list[Any]:
    leaves = jax.tree.leaves(nnx.state(tree))
    is_key = [jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    return [jax.random.key_data(x) if k else x for x, k in zip(leaves, is_key, strict=True)]


def test_training_equals_that_of_nnx() -> None:
    sizes = (7, 8, 5, 8, 3)
    runs = []
    for decorate in (nnx.jit, jit):
        given, step = objects(), decorate(train_step)
        losses = [float(step(*given, *batch(n))) for n in sizes]
        runs.append((losses, plain_state(given), step))
    (losses, state, _), (own_losses, own_state, step) = runs
    np.testing.assert_allclose(own_losses, losses, rtol=1e-5)
    assert len(set(losses)) == len(losses)
    for own, wanted in zip(own_state, state, strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-4, atol=1e-5)
    stats = step.stats()
    assert (stats.calls, stats.compiles, stats.fallback_calls) == (5, 1, 0)
    # What changes at each step is state, and state alone: all calls have one signature.
    assert len(stats.programs) == 1
    assert step.__name__ == "train_step"


def test_a_selection_of_what_a_module_returns() -> None:
    def chosen(model: Any, x: Any) -> Any:
        y = model(x)
        model.seen = nnx.Variable(jnp.asarray(x.shape[0]))
        return y[y[:, 0] > 0], nnx.Linear(2, 2, kernel_init=lambda *_: y[:2], rngs=nnx.Rngs(0))

    plain, bucketed = (nnx.Linear(3, 2, rngs=nnx.Rngs(0)) for _ in range(2))
    function = jit(chosen)
    assert function.explain(bucketed, np.ones((5, 3), np.float32)).kind == "masked"
    for n in (5, 8, 3):
        x = np.random.default_rng(n).standard_normal((n, 3)).astype(np.float32)
        (got, made), (want, wanted) = function(bucketed, x), chosen(plain, x)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        np.testing.assert_allclose(made.kernel[...], wanted.kernel[...], rtol=1e-5)
        assert int(bucketed.seen[...]) == n
    assert function.stats().fallback_calls == 0


class Counter(nnx.Module):
    def __init__(self) -> None:
        self.scale = nnx.Param(jnp.ones(4))
        self.rows = nnx.Variable(jnp.zeros((), jnp.int32))
        self.mode = "sum"

    @jit(buckets=[4, 8])
    def __call__(self, x: Any) -> Any:
        self.rows[...] += x.shape[0]
        self.seen = nnx.Intermediate(x * self.scale)
        return (x * self.scale).sum() if self.mode == "sum" else (x * self.scale).max()


def test_a_method_changes_its_module_and_static_attributes_choose_the_program() -> None:
    Counter.__call__.cache_clear()
    module = Counter()
    for n, rows in ((3, 3), (4, 7), (2, 9)):
        x, _ = batch(n)
        np.testing.assert_allclose(module(x), x.sum(), rtol=1e-5)
        assert int(module.rows[...]) == rows
        # A variable that the call made, with an axis of the call's size.
        np.testing.assert_array_equal(nnx.pop(module, nnx.Intermediate)["seen"][...], x)
    assert Counter.__call__.stats().compiles == 1
    for mode, wanted in (("max", x.max()), ("sum", x.sum()), ("max", x.max())):
        module.mode = mode
        np.testing.assert_allclose(module(x), wanted, rtol=1e-5)
        nnx.pop(module, nnx.Intermediate)
    assert Counter.__call__.stats().compiles == 2


def test_references_stay_shared_and_the_structure_may_change() -> None:
    @jit
    def change(objects: Any, *, x: Any) -> Any:
        model = objects["model"]
        assert objects["again"][0] is model
        model.extra = nnx.Param(jnp.full(3, x.sum()))
        model.alias = model.first
        model.note = "changed"
        del model.last
        other = nnx.Linear(2, 2, rngs=nnx.Rngs(1))
        return {"model": model, "other": other, "sum": x.sum()}

    model = Net(nnx.Rngs(0))
    first = model.first
    for n in (3, 4):
        x, _ = batch(n)
        model.last = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
        result = change({"model": model, "again": [model]}, x=x)
        assert result["model"] is model and model.first is first and model.alias is first
        assert model.note == "changed" and not hasattr(model, "last")
        np.testing.assert_allclose(model.extra[...], np.full(3, x.sum()), rtol=1e-5)
        assert isinstance(result["other"], nnx.Linear)
        np.testing.assert_allclose(result["sum"], x.sum(), rtol=1e-5)
    # The second call came with another structure.
    assert change.stats().compiles == 2


def linear_loss(model: Any, x: Any) -> Any:
    return (model(x) ** 2).mean()


def linear_step(model: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(linear_loss)(model, x)
    optimizer.update(model, grads)
    return loss


@pytest.fixture(scope="module")
def donating() -> ModuleExec:
    return jit(linear_step, donate_argnames=("model", "optimizer"))


def linear() -> tuple[Any, Any]:
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


def test_cached_partial(donating: ModuleExec) -> None:
    compiles = donating.stats().compiles
    model, optimizer = linear()
    step = nnx.cached_partial(donating, model, optimizer)
    losses = [float(step(batch(4)[0])) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert int(optimizer.step[...]) == 3
    assert donating.stats().compiles <= compiles + 1


def test_warmup_and_explain_take_modules(donating: ModuleExec) -> None:
    step = donating.with_linear(6)
    assert isinstance(step, ModuleExec)
    model, optimizer = linear()
    kernel = model.kernel[...]
    like = jax.ShapeDtypeStruct((5, 4), jnp.float32)
    assert step.explain(model, optimizer, like).bucket == {"batch": 6}
    assert step.warmup(model, optimizer, like, progress=False).compiled == ({"batch": 6},)
    # Neither runs the function.
    np.testing.assert_array_equal(model.kernel[...], kernel)
    with step.forbid_compiles():
        step(model, optimizer, batch(3)[0])
    abstract = nnx.eval_shape(linear)
    assert step.explain(*abstract, like).bucket == {"batch": 6}
    assert step.cache_size() == 1 and "6" in str(step.report())
    with pytest.raises(AttributeError, match=r"no file holds modules"):
        step.export_dynamic  # noqa: B018


def test_executables_are_stored_in_files(tmp_path: Any) -> None:
    losses = []
    for loads in (0, 1):
        step = jit(linear_step).with_persistence(tmp_path)
        model, optimizer = linear()
        losses.append([float(step(model, optimizer, batch(n)[0])) for n in (3, 4)])
        assert step.stats().loads == loads
    assert losses[0] == losses[1]


def test_derivatives_run_in_buckets_and_other_transformations_inline() -> None:
    model, _ = linear()
    loss = jit(linear_loss)
    for n in (3, 4):
        x, _ = batch(n)
        grads, wanted = nnx.grad(loss)(model, x), nnx.jit(nnx.grad(linear_loss))(model, x)
        np.testing.assert_allclose(grads["kernel"][...], wanted["kernel"][...], rtol=1e-4)
    with pytest.warns(InlinedWarning) as told:
        np.testing.assert_allclose(nnx.jit(loss)(model, x), linear_loss(model, x), rtol=1e-5)
    assert told[0].filename == __file__  # and not a line of flax
    assert loss.stats().inlined_calls == 1
    # The loss and its gradient, or the two at once, at one bucket.
    assert 1 <= loss.stats().compiles <= 2


def test_after_an_error_the_arguments_are_as_before() -> None:
    outside = Counter()

    @jit(donate_argnums=0)
    def step(module: Any, x: Any, fails: Any = None) -> Any:
        module.rows[...] += 1
        if fails is not None:
            outside.rows[...] += 1
        return x.sum()

    module = Counter()
    x, _ = batch(3)
    step(module, x)
    # NNX refuses to change what did not come as an argument.
    with pytest.raises(Exception, match="trace level"):
        step(module, x, x)
    with pytest.raises(ArgumentError, match=r"^fails\.value: expected an array"):
        step(module, x, nnx.Variable("text"))
    assert int(module.rows[...]) == 1
    step(module, x)
    assert int(module.rows[...]) == 2 and step.stats().compiles == 1


def test_errors_of_options_and_of_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="buckets="):
        jit(linear_loss, buckets="pow3")
    model = linear()[0]
    for bound in (model, model.__call__, functools.partial(model.__call__)):
        with pytest.raises(SpecError, match=r"wrap Linear\.__call__ and pass the module"):
            jit(bound)
    with pytest.raises(TypeError, match="callable"):
        jit(3)  # type: ignore[call-overload]
    bucketjit.integrations.nnx._flax.cache_clear()
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(MissingExtraError, match=r"bucketjit\[nnx\]"):
        jit(lambda x: x)(np.ones(3))
