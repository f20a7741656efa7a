"""One executable over rows of different sizes: `jax.vmap` over the sizes themselves."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._ir.expressions import evaluate, evaluate_text
from bucketjit._masking.interpreter import interpret
from tests.harness import Case, Masked, _contents, poison_padding

ROWS = 4
NAMES = {
    "control": (
        *("jit", "custom_vjp", "remat", "conjugate_gradient", "cond", "switch", "cond_vmapped"),
        *("while", "while_vmapped_ints", "fori_symbolic", "fori_update", "while_in_scan"),
        "while_in_scan_of_none",
    ),
    "scan": (
        *("scan_both", "scan_reverse", "scan_static_reverse", "scan_special", "scan_keys"),
        *("scan_length_expression", "scan_nested", "scan_rnn", "map", "per_example_gradients"),
    ),
    "random": (
        *("random_bits_both", "random_bits_lead", "random_split", "random_bits_per_key"),
        *("random_total_bits_both", "random_total_split", "random_poisson", "random_gamma"),
    ),
    "convolution": (
        *("conv_features_and_space", "conv_nchw", "conv_per_example_gradients"),
        *("conv_kernel_valid", "conv_kernel_not_finite", "conv_gradient_by_kernel_not_finite"),
    ),
    "effects": ("pure_callback", "io_callback", "debug_callback"),
}
CASES = {
    case.name: case
    for module, names in NAMES.items()
    for case in importlib.import_module(f"tests.cases.{module}").CASES
    if case.name in names
}


def test_the_names_are_those_of_cases() -> None:
    assert set(CASES) == {name for names in NAMES.values() for name in names}


def _rows(case: Case) -> list[dict[str, int]]:
    rng = np.random.default_rng(3)
    edges = [dict.fromkeys(case.bucket, 1), dict(case.bucket)]
    inside = [{v: int(rng.integers(1, p + 1)) for v, p in case.bucket.items()} for _ in range(2)]
    return (edges + inside)[:ROWS]


def _stack(arrays: Sequence[Any]) -> Any:
    if jax.dtypes.issubdtype(arrays[0].dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(np.stack([jax.random.key_data(x) for x in arrays]))
    return np.stack(arrays)


def _padded(case: Case, x: Any, dims: Sequence[str], bucket: Mapping[str, int]) -> Any:
    return poison_padding(x, tuple(evaluate_text(t, bucket) for t in dims), "nan")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", sorted(CASES))
def test_every_row_has_its_own_sizes(name: str) -> None:
    check_rows(CASES[name])


def check_rows(case: Case) -> None:
    """Rows of one call, with sizes of their own, give what the exact run does at these sizes."""
    program = Masked(case, case.fn).program(case.bucket)
    assert program.admits(case.bucket)
    rows, real, padded = _rows(case), [], []
    for i, sizes in enumerate(rows):
        rng = np.random.default_rng(i)
        args = [
            _contents(a, tuple(evaluate_text(t, sizes) for t in a.sizes), sizes, "mixed", rng)
            for a in case.arguments
        ]
        real.append(args)
        pairs = zip(args, case.arguments, strict=True)
        padded.append([_padded(case, x, a.sizes, case.bucket) for x, a in pairs])

    exact = jax.jit(lambda every: [jax.tree.leaves(case.fn(*args)) for args in every])
    wants = exact(real)

    def run(values: Mapping[str, Any], *arrays: Any) -> Any:
        sizes = BucketSizes(case.bucket, program.lower, values)
        return interpret(program.jaxpr, program.consts, arrays, sizes, Masked(case, run).rules)

    values = {v: np.asarray([sizes[v] for sizes in rows], np.int32) for v in case.bucket}
    outs = jax.jit(jax.vmap(run))(values, *map(_stack, zip(*padded, strict=True)))
    for i, (sizes, want) in enumerate(zip(rows, wants, strict=True)):
        for out, shape, exact in zip(outs, program.out_shapes, want, strict=True):
            dims = tuple(slice(0, evaluate(d, sizes)) for d in shape)
            got, exact = (
                jax.random.key_data(x)
                if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
                else np.asarray(x)
                for x in (out, exact)
            )
            np.testing.assert_allclose(
                np.asarray(got)[i][dims], exact, rtol=1e-4, atol=1e-5, err_msg=f"{sizes}"
            )
