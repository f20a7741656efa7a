"""An executor is pickled as its name, or as its function and its options."""

import copy
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

import bucketjit
from bucketjit import BucketedExec, strategies
from tests.comparison import ramp

homeless = [Primitive("homeless")]


@bucketjit.jit
def decorated(x: Any) -> Any:
    return x * 2


def total(x: Any) -> Any:
    return (x + 1).sum()


def rule(ctx: Any, operand: Any) -> Any:
    return ctx.bind(operand)


def heard(event: object) -> None:
    """A callback."""


class Model:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    @functools.partial(bucketjit.jit, static_argnums=0)
    def apply(self, x: Any) -> Any:
        return x * self.factor


EXECUTORS = {
    "no strategy": BucketedExec(total),
    "strategies": bucketjit.jit(
        total, dynamic_axes="n", buckets={"n": strategies.Pow2(min=4)}, overflow={"n": "extend"}
    ),
    "options": bucketjit.jit(
        *(total,), fallback="error", check="exact", out="numpy", compile_budget=9, copy_inputs=True
    ),
    "rules": bucketjit.jit(total).with_rules({jax.lax.neg_p: rule}),
    "the rest": bucketjit.jit(total, buckets=[4]).with_on_event(heard).with_background_compile(),
    "of JAX": bucketjit.jit(jnp.sum, constraints="batch >= 2"),
}


@pytest.mark.parametrize("name", EXECUTORS)
def test_the_options_are_kept_and_not_the_executables(name: str) -> None:
    executor = EXECUTORS[name]
    result = executor(ramp(3))
    copies = copy.copy(executor), copy.deepcopy({"f": executor})["f"]
    for other in (pickle.loads(pickle.dumps(executor)), *copies):
        assert other._config == executor._config and other.cache_size() == 0
        assert other._config.has_no_strategy == executor._config.has_no_strategy
        np.testing.assert_array_equal(other(ramp(3)), result)


def test_what_a_module_has_is_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert pickle.loads(pickle.dumps(Model.apply)) is Model.apply
    method = pickle.loads(pickle.dumps(Model(3.0).apply))
    np.testing.assert_array_equal(method(ramp(2)), [3, 6])
    assert copy.copy(decorated) is not decorated is not copy.deepcopy(decorated)


def test_a_rule_of_a_primitive_that_no_module_has_is_refused() -> None:
    with pytest.raises(TypeError, match="primitive homeless is in no module"):
        pickle.dumps(bucketjit.jit(total).with_rules({homeless[0]: rule}))


def test_cloudpickle_sends_functions_of_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    pytest.importorskip("equinox")
    pytest.importorskip("flax")
    factor, others = 5.0, bucketjit.integrations
    inner = bucketjit.jit(lambda x: x * factor, buckets=[4, 8])
    filtered = others.equinox.filter_jit(lambda how, x: how(x))
    modules = others.nnx.jit(lambda x: x + 1, out="numpy")
    monkeypatch.setattr(decorated, "__module__", "__main__")
    sent = pickle.loads(cloudpickle.dumps((decorated, inner, filtered, modules)))
    results = [sent[0](ramp(3)), sent[1](ramp(3)), sent[2](abs, ramp(3)), sent[3](ramp(3))]
    assert not {*sent} & {decorated, inner, filtered, modules}
    for result, by in zip(results, (2, 5, 1), strict=False):
        np.testing.assert_array_equal(result, by * ramp(3))
    assert isinstance(results[3], np.ndarray)
    assert dict(sent[1].stats().buckets[0].sizes) == {"batch": 4}
