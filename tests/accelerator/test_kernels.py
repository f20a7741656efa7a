"""The recipes of docs/kernels.md, compiled for a TPU and an H100; and what they cost on a TPU.

``make accelerator-compilers ARGS=--sample`` runs it, as it does tests/accelerator/test_targets.py.
"""

import os
from typing import Any

import pytest

from benchmarks import compilers, kernels

if not compilers.VARIABLES.items() <= os.environ.items():
    pytest.skip("make accelerator-compilers runs it", allow_module_level=True)

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import bucketjit
from tests.api.test_kernel_recipes import of_gpus, recipe


def lowered(target: str, fn: Any, axes: Any, *shapes: Any) -> Any:
    at = SingleDeviceSharding(compilers.device(target))
    made = bucketjit.jit(fn, dynamic_axes=axes, buckets="pow2", fallback="error")
    return made.lower(*(jax.ShapeDtypeStruct(*x, sharding=at) for x in shapes))


def floats(*shape: int) -> Any:
    return shape, jnp.float32


INTS = ((5,), jnp.int32), ((5, 6), jnp.int32)
PAGES = [floats(5, 8, 128), *[floats(1, 32, 16, 128)] * 2, *INTS]
ON_TPU = {
    "attention": (("_, _, s, _",) * 3, [floats(1, 2, 200, 64)] * 3, True),
    "splash": ((*("_, s, _",) * 3, "s"), [*[floats(2, 200, 128)] * 3, ((200,), jnp.int32)], True),
    "paged": (("b, _, _", None, None, "b", "b, p"), PAGES, False),
    "column_sums": ("n, _", [floats(20, 128)], False),
}


@pytest.mark.parametrize("name", ON_TPU)
def test_recipes_compile_for_a_tpu(name: str) -> None:
    axes, shapes, has_gradient = ON_TPU[name]
    fn = recipe(name)
    gradient = jax.grad(lambda *arrays: (fn(*arrays) ** 2).sum(), (0, 1, 2))
    for own, count in ((fn, 1), (gradient, 3))[: 1 + has_gradient]:
        compiled = lowered("tpu", own, axes, *shapes).compile()
        # The forward kernel is in the gradient once, with what the backward ones need.
        assert compilers.figures(compiled)["fused"] == count


def test_recipes_compile_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.cudnn import fused_attention_stablehlo  # JAX asks for a GPU and a cuDNN here

    for name in ("check_cudnn_version", "check_compute_capability"):
        monkeypatch.setattr(fused_attention_stablehlo, name, lambda *_: 91000)
    for fn, kernel in ((recipe("cudnn"), "__cudnn$fmhaSoftmax"), (of_gpus(False), "triton")):
        shape = (2, 200, 4, 64), jnp.bfloat16
        text = lowered("cuda", fn, ("_, s, _, _",) * 3, *[shape] * 3).compile().as_text()
        assert kernel in text and ('"mask_type": "PADDING"' in text or kernel == "triton")


@pytest.mark.parametrize(("n", "bucket"), [(200, 256), (400, 512)])
def test_a_layer_costs_what_it_costs_an_expert(n: int, bucket: int) -> None:
    ratio, *fused = kernels.ratio(recipe("self_attention"), n, bucket)
    assert ratio <= 1.05 and fused == [1, 1]


def test_as_many_executables_as_buckets() -> None:
    executor, refused = kernels.in_buckets(recipe("self_attention")), 0
    for n in range(1, 513):
        executor.warmup(*kernels.structs(n))
        try:
            jax.eval_shape(kernels.by_hand, *kernels.structs(n))
        except ValueError:
            refused += 1
    assert (executor.stats().compiles, refused) == (3, 508)  # 128, 256, 512
