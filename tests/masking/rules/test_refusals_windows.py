"""What convolutions, windows, transforms and factorisations refuse, and what they say."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import pytest
from jax import lax

from bucketjit._jax.jaxprs import primitive
from tests.masking.rules.test_refusals_numeric import of, refusal


def windowed(x: Any, size: Any, stride: Any) -> Any:
    return lax.reduce_window(x, 0.0, lax.add, (size,), (stride,), "VALID")


def test_symbolic_stride() -> None:
    def fn(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (x.shape[2] // 4,), "VALID")

    error = refusal(fn, of((1, 2, "s")), of((3, 2, 1)), s=8)
    assert error.reason.startswith(
        "conv_general_dilated: the stride depends on a symbolic size (floordiv(s, 4))"
    )


def test_symbolic_dilation() -> None:
    def fn(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1,), "VALID", rhs_dilation=(x.shape[2] // 4,))

    error = refusal(fn, of((1, 2, "s")), of((3, 2, 2)), s=8)
    assert "a dilation that depends on a symbolic size" in error.reason


def test_static_groups_of_symbolic_size() -> None:
    def fn(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x, jnp.concatenate([w, w]), (1,), "SAME", feature_group_count=2
        )

    error = refusal(fn, of((1, 4, 6)), of(("f", 2, 3)), f=3)
    assert error.reason.startswith(
        "conv_general_dilated: feature_group_count=2 divides an axis of size 2*f into groups"
    )


def test_windows_too_many_to_lay_out() -> None:
    error = refusal(
        lambda x, w: windowed(x, w.shape[0], 1), of(("s",)), of(("t",)), s=1 << 15, t=1 << 14
    )
    assert error.reason.startswith("reduce_window_sum: windows of size t at stride 1 would need")


def test_scatter_of_the_users_own() -> None:
    from tests.cases.windows import select_and_scatter

    def fn(x: Any, g: Any) -> Any:
        return select_and_scatter(x.T, g.T).T

    error = refusal(fn, of(("2*s", 3)), of(("s", 3)), s=4)
    assert error.reason.startswith("select_and_scatter: windows slide along a symbolic axis")


def test_transform_too_long() -> None:
    error = refusal(jnp.fft.fft, of(("s",), "complex64"), s=1 << 16)
    assert error.reason.startswith("fft: a transform of symbolic length s, padded beyond 46340")


REFUSED_MATRICES: dict[str, tuple[Callable[..., Any], str]] = {
    "eigh": (jnp.linalg.eigh, "eigenvectors of a matrix of symbolic size n: their signs"),
    "svd": (jnp.linalg.svd, "singular vectors of a matrix of symbolic size n: their signs"),
    "eig": (jnp.linalg.eigvals, "a matrix of symbolic size n: padding would mix its eigenvalues"),
    "schur": (jsl.schur, "a matrix of symbolic size n: padding would mix its eigenvalues"),
    "tridiagonal": (
        lambda x: lax.linalg.tridiagonal(x, lower=False),
        "a matrix of symbolic size n with lower=False: the reduction starts at its last column",
    ),
}


@pytest.mark.parametrize("name", REFUSED_MATRICES)
def test_matrices(name: str) -> None:
    fn, reason = REFUSED_MATRICES[name]
    error = refusal(fn, of(("n", "n")), n=4)
    assert error.reason.startswith(f"{name}: {reason}")


def test_subsets_and_order_of_eigenvalues() -> None:
    def values(**options: Any) -> Callable[[Any], Any]:
        return lambda x: lax.linalg.eigh(x, **options)[1]

    error = refusal(values(subset_by_index=(0, 2)), of(("n", "n")), n=4)
    assert "a subset of the eigenvalues of a matrix of symbolic size n" in error.reason
    error = refusal(values(sort_eigenvalues=False), of(("n", "n")), n=4)
    assert "unsorted eigenvalues of a matrix of symbolic size n" in error.reason


def test_unused_eigenvectors_are_no_reason() -> None:
    def fn(x: Any) -> Any:
        return jax.jit(jnp.linalg.eigh)(x)[0]

    with pytest.raises(pytest.fail.Exception):
        refusal(fn, of(("n", "n")), n=4)


def test_windows_scattered_from_a_static_source() -> None:
    select_and_scatter_add = primitive("select_and_scatter_add")

    def fn(x: Any, source: Any) -> Any:
        return select_and_scatter_add.bind(
            source,
            x,
            select_prim=lax.ge_p,
            window_dimensions=(2,),
            window_strides=(1,),
            padding=((0, 0),),
        )

    error = refusal(fn, of(("s",)), of((4,)), s=8)
    assert "select_and_scatter_add: an axis of size s has 4 windows" in error.reason
