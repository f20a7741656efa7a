"""Functions that change their arguments in place: an error where the change would be lost."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import bucketjit
from bucketjit.errors import MutationError


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    """An object of a pytree class, with a plain dict and a list of parts in it."""

    w: Any
    extras: dict[str, Any]
    parts: list[Any]
    mode: str = dataclasses.field(default="train", metadata={"static": True})


@jax.tree_util.register_pytree_node_class
class Converting:
    """A class that makes new leaves whenever it is taken apart."""

    def __init__(self, w: Any) -> None:
        self.w = w

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.w + 0 if isinstance(self.w, jax.Array) else self.w,), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Converting:
        return cls(*children)


def model(n: int = 2) -> Model:
    parts = [Model(np.float32(i), {}, []) for i in range(n)]
    return Model(np.float32(2), {"a": np.float32(1)}, parts)


X = np.arange(5, dtype=np.float32)


def replaced(m: Model, x: Any) -> Any:
    m.w = m.w * 2
    return m.w + x.sum()


def nested(m: Model, x: Any) -> Any:
    m.parts[1].w = x.sum()
    return x * 2


def around(m: Model, batch: Any) -> Any:
    batch["model"].w = batch["x"].sum()
    return batch["x"] * 2


def new_list(m: Model, x: Any) -> Any:
    m.parts = [*m.parts[:1], Model(x.sum(), {}, [])]
    return x * 2


def by_size(m: Model, x: Any) -> Any:
    m.w = m.w * 2.0 ** int(x.shape[0])  # is traced at concrete sizes
    return x * 2


def added(m: Model, x: Any) -> Any:
    m.parts = [*m.parts, m.parts[0]]
    return x * 2


def static(m: Model, x: Any) -> Any:
    m.mode = "eval"
    return x * 2


@pytest.mark.parametrize(
    ("fn", "leaves"),
    [
        (replaced, ("m.w",)),
        (nested, ("m.parts[1].w",)),
        (around, ("batch['model'].w",)),
        (new_list, ("m.parts[1].w",)),
        (by_size, ("m.w",)),
        (added, ("m.parts[2].w",)),
        (static, ("m",)),
    ],
)
def test_a_change_in_an_object_is_an_error_in_every_call(
    fn: Callable[..., Any], leaves: tuple[str, ...]
) -> None:
    if fn is replaced:
        fn = lambda m, x: replaced(m, x) * 0  # noqa: E731  # the value of the change is not returned
    x: Any = {"model": model(), "x": X} if fn is around else X
    axes = (None, {"model": None, "x": "n"}) if fn is around else (None, "n")
    masked = bucketjit.jit(fn, dynamic_axes=axes)
    for _ in range(2):
        with pytest.raises(MutationError) as raised:
            masked(model(), x)
        assert raised.value.leaves == leaves
        assert "return the new state" in str(raised.value)
    with pytest.raises(MutationError):
        bucketjit.BucketedExec(fn, dynamic_axes=axes)(model(), x)
    assert masked.cache_size() == 0


def test_every_way_to_trace_refuses() -> None:
    step = bucketjit.jit(nested, dynamic_axes=(None, "n"))
    asks = (step.lower, step.trace, step.explain, step.export_dynamic, step.export_bounded)
    for ask in asks:
        with pytest.raises(MutationError):
            ask(model(), X)
    with pytest.raises(MutationError):
        step.warmup(model(), X, sizes={"n": [4]}, progress=False)
    with pytest.raises(MutationError):
        step.map(model(), [X, X[:3]])
    with pytest.raises(MutationError):
        jax.grad(lambda m, x: step(m, x).sum())(model(), X)
    checked = bucketjit.jit(nested, dynamic_axes=(None, "n"), check=bucketjit.Check.POISON)
    with pytest.raises(MutationError):
        checked(model(), X)


def habits(batch: dict[str, Any], m: Model) -> Any:
    labels = batch.pop("labels")
    batch["x"] = batch["x"] * 2
    batch["more"] = [labels]
    batch["more"].append(labels)
    batch["model"] = Model(labels, {}, [])
    m.extras["b"] = m.extras.pop("a") + 1
    m.parts.append(labels)  # into a list that was empty
    return batch["x"].sum() + labels.sum() + m.extras["b"] + m.w


def test_changes_in_plain_containers_are_left_alone() -> None:
    step = bucketjit.jit(habits, dynamic_axes={"batch": {"x": "n", "labels": "n", "model": None}})
    batch, empty = {"x": X, "labels": X, "model": model()}, model(0)
    assert float(step(batch, empty)) == float(habits(dict(batch), model(0)))
    assert sorted(batch) == ["labels", "model", "x"] and not empty.parts
    assert step.stats().fallback_calls == 0


def returned(m: Model, x: Any) -> Any:
    m.w = m.w + x.sum()
    m.parts[0].w = m.w
    m.parts.append(m.parts[0])
    m.mode = "eval"
    return {"loss": x.sum(), "model": m}


def parts_returned(m: Model, x: Any) -> Any:
    m.w = m.w + x.sum()
    return x.sum(), m.w


def test_a_change_that_is_returned_is_not_lost() -> None:
    step = bucketjit.jit(returned, dynamic_axes=(None, "n"))
    new = step(model(), X)["model"]
    assert (float(new.w), float(new.parts[0].w), len(new.parts), new.mode) == (12, 12, 3, "eval")
    assert float(bucketjit.jit(parts_returned, dynamic_axes=(None, "n"))(model(), X)[1]) == 12


def test_what_a_class_makes_anew_is_no_change() -> None:
    step = bucketjit.jit(lambda m, x: m.w * x.sum(), dynamic_axes=(None, "n"))
    assert float(step(Converting(np.float32(2)), X)) == 20


def test_the_error_is_pickled_whole() -> None:
    error = pickle.loads(pickle.dumps(MutationError("changed", ("m.w",))))
    assert (str(error), error.leaves) == ("changed", ("m.w",))


nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")


class Net(nnx.Module):  # type: ignore[misc, name-defined]
    """What flax's users write."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(3, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.norm(self.linear(x)))


def loss(net: Net, x: Any) -> Any:
    return (net(x) ** 2).mean()


def test_nnx_is_told_of_its_own_jit() -> None:
    net = Net()
    optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)

    def train(net: Net, optimizer: Any, x: Any) -> Any:
        value, grads = nnx.value_and_grad(loss)(net, x)
        optimizer.update(net, grads)
        return value

    x = np.ones((5, 3), np.float32)
    for fn, args, leaf in (
        (train, (net, optimizer, x), "net.linear.kernel.value"),
        (train, (net, optimizer, x), "optimizer.step.value"),
        (loss, (net, x), "net.norm.mean.value"),
        (loss, (net, x), "net.dropout.rngs.count.value"),
    ):
        step = bucketjit.jit(fn)
        with pytest.raises(MutationError, match=r"bucketjit\.integrations\.nnx\.jit") as raised:
            step(*args)
        assert leaf in raised.value.leaves
    net.eval()
    step = bucketjit.jit(loss)
    np.testing.assert_allclose(step(net, x), loss(net, x), rtol=1e-6)
    net.train()
    split = bucketjit.jit(lambda net, x: (loss(net, x), nnx.state(net)))
    assert int(split(net, x)[1]["dropout"]["rngs"]["count"].get_value()) == 1


def test_functional_nnx_is_told_what_works_for_it() -> None:
    graphdef, state = nnx.split(Net())
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)

    def shared(state: Any, x: Any) -> Any:
        return loss(nnx.merge(graphdef, state), x)

    def copied(state: Any, x: Any) -> Any:
        return loss(nnx.merge(graphdef, state, copy=True), x)

    def returned(state: Any, x: Any) -> Any:
        model = nnx.merge(graphdef, state)
        return loss(model, x), nnx.state(model)

    with pytest.raises(
        MutationError, match=r"return .*nnx\.state\(model\); .* copy=True"
    ) as raised:
        bucketjit.jit(shared)(state, x)
    assert "state['norm']['mean'].value" in raised.value.leaves
    want = jax.jit(shared)(state, x)
    np.testing.assert_allclose(bucketjit.jit(copied)(state, x), want, rtol=1e-5)
    value, new = bucketjit.jit(returned)(state, x)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert int(new["dropout"]["rngs"]["count"].get_value()) == 1


def test_a_part_with_equal_leaves_is_no_change_and_one_with_odd_classes_is_judged() -> None:
    def rebuilt(m: Model, x: Any) -> Any:
        m.extras = dict(m.extras)
        return x * 2

    def changed(m: Model, x: Any) -> Any:
        m.w = x.sum()
        return x * 2

    np.testing.assert_array_equal(bucketjit.jit(rebuilt)(model(), X), X * 2)
    beside = model(0)
    beside.extras["odd"] = Converting(np.float32(2))
    with pytest.raises(MutationError) as raised:
        bucketjit.jit(changed)(beside, X)
    assert raised.value.leaves == ("m.w",)
