"""What JAX says of functions that bucketjit traces: the user's name, line and arguments."""

import gc
import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec

X = np.ones(5, np.float32)
OURS = os.path.dirname(bucketjit.__file__) + os.sep
KEPT: list[Any] = []


def leaking(batch: Any, scale: Any) -> Any:
    KEPT.append(jnp.sum(jnp.sin(batch["ids"]) * scale))
    return jnp.sum(batch["ids"])


def counted(batch: Any, scale: Any) -> Any:
    return jnp.sum(batch["ids"] * scale)


AT = f"{__file__}:{leaking.__code__.co_firstlineno}"
AXES = ({"ids": "n"}, None)

MADE: dict[str, Callable[[Any], Any]] = {
    "symbolic": lambda fn: BucketedExec(fn, dynamic_axes=AXES).with_pow2(),
    "concrete": lambda fn: BucketedExec(
        lambda batch, scale: fn(batch, scale) * np.ones(int(batch["ids"].shape[0])).sum(),
        dynamic_axes=AXES,
    ).with_pow2(),
    "exact": BucketedExec,
    "static": lambda fn: BucketedExec(fn, static_argnames="scale"),
    "gradient": lambda fn: jax.grad(BucketedExec(fn, dynamic_axes=AXES).with_pow2()),
    "map": lambda fn: (
        lambda batch, scale: BucketedExec(fn, dynamic_axes=AXES).with_pow2().map([batch], scale)
    ),
}


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    KEPT.clear()
    yield
    KEPT.clear()


@pytest.fixture
def few_objects() -> Iterator[None]:
    """JAX looks for a leak among all objects that are not frozen, which earlier tests have made."""
    gc.freeze()
    yield
    gc.unfreeze()


def names_the_user(text: str) -> bool:
    """Whether a text names functions, and all of them are the user's, with their lines."""
    named = re.findall(r"(\S+) at (\S+):\d+", text)
    return bool(named) and all(file == __file__ for _, file in named) and OURS not in text


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("name", ["symbolic", "exact", "static", "gradient", "map"])
def test_a_leak_names_the_function(name: str) -> None:
    with jax.checking_leaks(), pytest.raises(Exception, match="Leaked trace") as raised:
        MADE[name](leaking)({"ids": X}, 2.0)
    told = str(raised.value)
    assert names_the_user(told) and f"leaking at {AT}" in told
    assert "of the argument batch['ids']" in told


@pytest.mark.parametrize("name", ["symbolic", "concrete", "exact", "map"])
def test_a_tracer_that_was_stored_names_the_function(name: str) -> None:
    MADE[name](leaking)({"ids": X}, 2.0)
    with pytest.raises(jax.errors.UnexpectedTracerError) as raised:
        KEPT[-1] + 1
    told = str(raised.value)
    assert names_the_user(told)
    assert f"created on line {__file__}:" in told
    assert name == "concrete" or f"was leaking at {AT}" in told


def refused(batch: Any, scale: Any) -> Any:
    return np.asarray(batch["ids"])


@pytest.mark.parametrize("name", ["symbolic", "exact", "static", "gradient", "map"])
def test_an_error_of_a_tracer_names_the_argument(name: str) -> None:
    with pytest.raises(jax.errors.TracerArrayConversionError) as raised:
        MADE[name](refused)({"ids": X}, 2.0)
    told = str(raised.value)
    assert names_the_user(told) and "of the argument batch['ids']" in told


def test_of_other_functions_jax_says_what_it_did(caplog: pytest.LogCaptureFixture) -> None:
    executor = BucketedExec(counted, dynamic_axes=AXES).with_pow2()
    with jax.explain_cache_misses(True), caplog.at_level(logging.WARNING, "jax"):
        for n in (3, 9):
            executor({"ids": np.ones(n, np.float32)}, 2.0)
            jax.jit(lambda x: x + 1)(X)
    assert "re-defined repeatedly" in caplog.text
