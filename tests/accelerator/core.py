"""A few masking cases of each family of rules, and models, beside the unpadded run."""

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import tests.cases
from benchmarks import masking
from benchmarks.contenders.jax_encoder import encode
from benchmarks.encoder import draw_tokens, draw_weights
from bucketjit import BucketedExec
from tests.accelerator.on_device import NotShown, as_on_an_accelerator, is_cpu, placed, same
from tests.harness import Case, check, gradient_of

POISONS = ("nan", "lowest", "index")
# Families whose gradient is taken too, of one case each.
DIFFERENTIATED = frozenset(
    [
        "contractions",
        "convolution",
        "cumulative",
        "indexing",
        "reductions",
        "scan",
        "scatter",
        "windows",
    ]
)


def families() -> Iterator[tuple[str, Callable[[], str]]]:
    """A check for each family of cases, by its name."""
    for module in pkgutil.iter_modules(tests.cases.__path__):
        yield module.name, functools.partial(check_family, module.name)


def chosen(family: str) -> list[Case]:
    """Two cases of a family, from its beginning and its middle.

    Of a family whose cases run without ``jit``, one: each of their operations is a program.
    """
    every = importlib.import_module(f"tests.cases.{family}").CASES
    cases = [case for case in every if not case.eager] or every[:1]
    return [_short(cases[i]) for i in sorted({0, len(cases) // 2})]


def differentiated(family: str) -> Case:
    """The first case of a family whose gradient is compared."""
    cases = importlib.import_module(f"tests.cases.{family}").CASES
    return _short(next(case for case in cases if case.grad))


def _short(case: Case) -> Case:
    """The case at one logical size, which is not that of the bucket if there is such a one."""
    sizes = case.logical_sizes
    factor = 1 if is_cpu() else 20  # sums of other lengths are added up in another order
    return dataclasses.replace(
        case,
        sizes=(sizes[len(sizes) // 2],),
        domains=("mixed",),
        rtol=case.rtol * factor,
        atol=case.atol * factor,
    )


def check_family(family: str) -> str:
    """The cases of a family."""
    cases = chosen(family)
    absent = [case.name for case in cases if not _runs(case, None)]
    if family in DIFFERENTIATED:
        case = differentiated(family)
        absent += [] if _runs(case, gradient_of(case)) else [f"gradient of {case.name}"]
    if len(absent) > len(cases):
        raise NotShown(f"the device runs none of it: {', '.join(absent)}")
    what = f"{len(cases)} cases" + (", a gradient" if family in DIFFERENTIATED else "")
    return what + (f"; not on this device: {', '.join(absent)}" if absent else "")


def _runs(case: Case, fn: Callable[..., Any] | None) -> bool:
    """Check a case; False if JAX cannot run even the plain function on this device."""
    try:
        check(case, fn=fn, poisons=POISONS)
    except AssertionError:
        raise
    except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
        if is_cpu() or "nimplemented" not in f"{type(error).__name__}: {error}".lower():
            raise
        return False
    return True


def check_encoder() -> str:
    """An encoder with open batch and length, tokens and results on the device."""
    weights = jax.device_put(draw_weights(layers=2))
    executor = BucketedExec(encode, dynamic_axes=(None, "b, s")).with_pow2("b", min=4)
    executor = executor.with_pow2("s", min=32)
    with as_on_an_accelerator():
        for tokens in draw_tokens([(3, 17), (4, 31)]):
            got = executor(weights, placed(tokens))
            same(got, jax.jit(encode)(weights, tokens), 2e-4)
    assert executor.stats().compiles == 1
    return "2 sizes, 1 bucket"


def check_cnn() -> str:
    """Steps of training of a CNN on batches of several sizes end at the same parameters."""
    model = masking.cnn_step(np.random.default_rng(0))
    executor = BucketedExec(
        model.plain, dynamic_axes=(None, "b, _, _, _", "b"), donate_argnums=0
    ).with_pow2(min=64)
    exact = jax.jit(model.plain)
    params, wanted = jax.tree.map(lambda p: placed(np.array(p)), (model.params, model.params))
    images, labels = model.arrays
    with as_on_an_accelerator():
        for b in (50, 33):
            x, y = placed(images[:b]), placed(labels[:b])
            params, loss = executor(params, x, y)
            wanted, wanted_loss = exact(wanted, x, y)
            same((params, loss), (wanted, wanted_loss), 1e-4)
    assert executor.stats().compiles == 1
    return "2 steps, 1 bucket"
