"""The proof that a call may be cut into chunks: random programs, and rules broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit import BucketedExec
from bucketjit._jax.primitives import primitives
from bucketjit._runtime.chunks import independence, independence_rules
from bucketjit._runtime.chunks.independence import split_axes
from bucketjit._tracing.program import Program
from bucketjit.errors import MaskingError, SplitError


def program_of(fn: Callable[..., Any], axes: Any, *args: Any) -> Program:
    executor = BucketedExec(fn, dynamic_axes=axes).with_pow2()
    signed = executor._engine.signer.sign(args, {})
    program = signed.signature.resolve(signed.shapes).program
    assert program is not None
    return program


# --- random programs ----------------------------------------------------------------------------

W = np.random.default_rng(3).standard_normal((4, 4)).astype(np.float32)

Op = Callable[[Any, Any], Any]  # of two arrays (n, 4), to one

APART: tuple[Op, ...] = (
    lambda x, y: jnp.tanh(x) + y,
    lambda x, y: jnp.where(x > y, x, 1.0),
    lambda x, y: x @ W,
    lambda x, y: jax.nn.softmax(x, axis=1) * y,
    lambda x, y: x[:, ::-1],
    lambda x, y: jnp.cumsum(x, axis=1),
    lambda x, y: jnp.sort(x, axis=1) - jnp.argmax(y, axis=1, keepdims=True),
    lambda x, y: jnp.concatenate([x[:, :1], y[:, 1:]], axis=1),
    lambda x, y: x.reshape(-1, 2).reshape(x.shape) + y.reshape(-1).reshape(y.shape),
    lambda x, y: jnp.einsum("bi,bj->bij", x, y).reshape(x.shape[0], 4, 2, 2).max((2, 3)),
    lambda x, y: (W @ x.T).T,
    lambda x, y: jnp.repeat(x, 3, axis=0).reshape(x.shape[0], 3, 4)[:, 1],
    lambda x, y: jax.vmap(lambda r, i: jnp.roll(r, 1).at[i].set(0))(x, jnp.argmax(y, 1)),
    lambda x, y: lax.scan(lambda c, v: (c + v, c * v), jnp.zeros(x.shape[0]), x.T)[1].T,
    lambda x, y: lax.map(lambda r: r * jnp.sum(r), x),
    lambda x, y: x + jnp.arange(4.0),
)

TOGETHER: tuple[Op, ...] = (
    lambda x, y: x - x.mean(0),
    lambda x, y: x - y.max(),
    lambda x, y: jnp.flip(x, 0),
    lambda x, y: jnp.cumsum(x, axis=0),
    lambda x, y: jnp.sort(x, axis=0),
    lambda x, y: x @ (x.T @ y),
    lambda x, y: x.T.reshape(x.shape),
    lambda x, y: x + jnp.arange(x.shape[0])[:, None],
    lambda x, y: jnp.roll(x, 1, axis=0),
    lambda x, y: x * x.shape[0],
    lambda x, y: jax.nn.softmax(x @ y.T) @ x,
    lambda x, y: x + jax.random.normal(jax.random.key(0), x.shape),
    lambda x, y: lax.scan(lambda c, v: (c + v, c), jnp.zeros(4), x)[1],
    lambda x, y: jnp.tile(x, (2, 1)).reshape(x.shape[0], 8)[:, :4],
    lambda x, y: lax.associative_scan(jnp.maximum, x),
)


def random_program(seed: int, ops: tuple[Op, ...]) -> Callable[[Any, Any], Any]:
    def fn(x: Any, y: Any) -> Any:
        rng = np.random.default_rng(seed)
        values = [x, y]
        for i in rng.integers(0, len(ops), 4):
            a, b = (values[j] for j in rng.integers(0, len(values), 2))
            values.append(jnp.clip(ops[i](a, b), -9, 9))
        return values[-1], jnp.sum(values[-2], axis=1), W + 1

    return fn


def in_chunks(fn: Callable[..., Any], axes: Any, arrays: Any, sizes: Any) -> list[np.ndarray]:
    ends = np.cumsum(sizes)
    parts = [
        jax.tree.leaves(fn(*(a[end - n : end] for a in arrays)))
        for n, end in zip(sizes, ends, strict=True)
    ]
    return [
        np.asarray(chunks[0]) if axis is None else np.concatenate(chunks, axis)
        for chunks, axis in zip(zip(*parts, strict=True), axes, strict=True)
    ]


def arrays() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    x, y = (rng.standard_normal((5, 4)).astype(np.float32) for _ in range(2))
    return x, y


def test_programs_that_keep_rows_apart_are_seen_to() -> None:
    x, y = arrays()
    for seed in range(12):
        fn = random_program(seed, APART)
        axes = split_axes(program_of(fn, ("b, _", "b, _"), x, y), "b")
        assert axes == (0, 0, None)
        for got, want in zip(in_chunks(fn, axes, (x, y), (3, 2)), fn(x, y), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4, err_msg=f"seed {seed}")


def test_no_program_is_cut_that_gives_something_else() -> None:
    """What mixes rows may come anywhere, and its result may not be used: then it may be cut."""
    x, y = arrays()
    cut = refused = 0
    for seed in range(40):
        fn = random_program(seed, (*APART, *TOGETHER))
        try:
            axes = split_axes(program_of(fn, ("b, _", "b, _"), x, y), "b")
        except MaskingError:
            refused += 1
            continue
        cut += 1
        for got, want in zip(in_chunks(fn, axes, (x, y), (3, 2)), fn(x, y), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4, err_msg=f"seed {seed}")
    assert cut >= 3 and refused >= 10


@pytest.mark.parametrize("i", range(len(TOGETHER)))
def test_what_puts_rows_together_is_refused(i: int) -> None:
    x, y = arrays()
    with pytest.raises(MaskingError):
        split_axes(program_of(TOGETHER[i], ("b, _", "b, _"), x, y), "b")


# --- keys ---------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[Any], Any]] = {
    "bits": lambda key: jax.random.normal(key, (3,)),
    "fold_in": lambda key: jax.random.key_data(jax.random.fold_in(key, 7)),
    "split": lambda key: jax.random.key_data(jax.random.split(key, 2)),
    "gamma": lambda key: jax.random.gamma(key, 2.0, (2,)),
    "permutation": lambda key: jax.random.permutation(key, 7),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_that_are_drawn_from_as_a_batch_are_not_cut(name: str, impl: str) -> None:
    """``vmap`` of the hardware's generator draws for a whole batch by its first key."""
    fn = jax.vmap(DRAWS[name])
    keys = jax.random.split(jax.random.key(3, impl=impl), 19)
    cut = BucketedExec(fn).with_pow2(max=8, overflow="split")
    if impl == "threefry2x32" or (impl == "rbg" and name in ("fold_in", "split")):
        np.testing.assert_allclose(cut(keys), fn(keys), rtol=1e-5)
    else:
        with pytest.raises(SplitError, match="are not known to be used one by one"):
            cut(keys)


def test_rows_are_stacked_and_taken_apart_along_other_axes() -> None:
    x = np.random.default_rng(0).standard_normal((19, 4, 3)).astype(np.float32)

    def fn(x: Any) -> Any:
        return jnp.stack(list(jnp.unstack(x, axis=1))[::-1], axis=0).mean(0)

    cut = BucketedExec(fn).with_pow2(max=8, overflow="split")
    np.testing.assert_allclose(cut(x), fn(x), rtol=1e-5)


# --- rules that let too much pass ---------------------------------------------------------------


def lets_pass(step: Any) -> None:
    """Look at shapes only."""


def looks_inside_only(step: Any) -> None:
    """Do not mind what is carried from step to step."""
    step.proof.inside(step.params["jaxpr"])


def fixed_draw(x: Any) -> Any:
    return x + jax.random.uniform(jax.random.wrap_key_data(np.zeros(2, np.uint32)), x.shape)


def padded_by_size(x: Any) -> Any:
    n = x.shape[0]
    return lax.pad(x, jnp.float32(0), [(0, 0, 0), (n - 7, 7 - n, 0)])


def sum_of_rows(x: Any) -> Any:
    return jnp.zeros(4).at[jnp.argmax(x, 1).astype(np.uint32)].add(x[:, 0])


def row_of_rows(x: Any) -> Any:
    return x[jnp.argmax(x, 1).astype(np.uint32)]


MUTANTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "reduce_max": ("reduce_max", lambda x: x - jnp.max(x, 0)),
    "reduce_sum": ("reduce_sum", lambda x: jnp.sum(x, 0)),
    "argmax": ("argmax", lambda x: jnp.argmax(x, 0)),
    "cumsum": ("cumsum", lambda x: jnp.cumsum(x, 0)),
    "sort": ("sort", lambda x: jnp.sort(x, 0)),
    "rev": ("rev", lambda x: jnp.flip(x, 0)),
    "iota": ("iota", lambda x: x + lax.broadcasted_iota(np.float32, x.shape, 0)),
    "dot_general": ("dot_general", lambda x: x.T @ x),
    "reshape": ("reshape", lambda x: x.T.reshape(-1)),
    "concatenate": ("concatenate", lambda x: jnp.concatenate([x, -x])),
    "dim_as_value": ("dim_as_value", lambda x: x / x.shape[0]),
    "random_bits": ("random_bits", fixed_draw),
    "scatter": ("scatter-add", sum_of_rows),
    "gather": ("gather", row_of_rows),
    "pad": ("pad", padded_by_size),
    "conv": (
        "conv_general_dilated",
        lambda x: lax.conv_general_dilated(x.T[None], jnp.ones((1, 4, 3)), (1,), "SAME")[0, 0],
    ),
    "window": (
        "reduce_window_max",
        lambda x: lax.reduce_window(x, -np.inf, lax.max, (3, 1), (1, 1), "SAME"),
    ),
    "fft": ("fft", lambda x: jnp.fft.fft(x, axis=0).real),
    "scan": ("scan", lambda x: lax.scan(lambda c, v: (c + v, c), jnp.zeros(4), x)[1]),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_rule_that_lets_too_much_pass_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    primitive, fn = MUTANTS[name]
    x = np.random.default_rng(0).uniform(0, 3, (7, 4)).astype(np.float32)
    want = np.asarray(fn(x))
    with pytest.raises(SplitError):
        BucketedExec(fn, dynamic_axes="b, _").with_pow2(max=4, overflow="split")(x)
    table = independence_rules.CONTROL if name == "scan" else independence_rules.RULES
    broken = looks_inside_only if name == "scan" else lets_pass
    every = frozenset(("shape", "padding_config", "dim", "fft_lengths", "new_sizes"))
    for p in primitives(primitive):
        monkeypatch.setitem(table, p, broken)
    monkeypatch.setattr(independence, "SHOWN", {**independence_rules.SHOWN, primitive: every})
    axes = split_axes(program_of(fn, "b, _", x), "b")
    (got,) = in_chunks(fn, axes, (x,), (4, 3))
    assert got.shape != want.shape or not np.allclose(got, want, rtol=1e-3), "the test is too weak"
