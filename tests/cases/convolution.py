"""Convolutions over open batch, feature and spatial axes, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.harness import Arg, Case

CONV = ("conv_general_dilated",)
NLC = ("NHC", "HIO", "NHC")
NHWC = ("NHWC", "HWIO", "NHWC")


def conv(
    padding: Any = "SAME",
    stride: int | tuple[int, ...] = 1,
    numbers: Any = NLC,
    *,
    groups: int = 1,
    dilation: int = 1,
    lhs_dilation: int = 1,
    **options: Any,
) -> Callable[[Any, Any], Any]:
    """A convolution with these strides, padding and dilations."""

    def fn(x: Any, w: Any) -> Any:
        rank = x.ndim - 2
        return lax.conv_general_dilated(
            x,
            w,
            stride if isinstance(stride, tuple) else (stride,) * rank,
            padding,
            lhs_dilation=(lhs_dilation,) * rank,
            rhs_dilation=(dilation,) * rank,
            dimension_numbers=numbers,
            feature_group_count=groups,
            **options,
        )

    return fn


def transposed(padding: Any, stride: int) -> Callable[[Any, Any], Any]:
    return lambda x, w: lax.conv_transpose(x, w, (stride,), padding, dimension_numbers=NLC)


def separable(x: Any, depthwise: Any, pointwise: Any) -> Any:
    """Depthwise, then 1x1: the block of mobile networks."""
    y = conv("SAME", 2, NHWC, groups=x.shape[-1])(x, depthwise)
    return conv("VALID", 1, NHWC)(jax.nn.relu(y), pointwise)


def hole_at_the_end(data: Any, rng: np.random.Generator) -> Any:
    """The last position holds what must not leak into windows that do not reach it."""
    if data.shape[1]:
        data[:, -1] = rng.choice([np.nan, np.inf, -np.inf])
    return data


def _case(name: str, fn: Any, *args: Any, **options: Any) -> Case:
    options.setdefault("rtol", 1e-4)
    options.setdefault("atol", 1e-4)
    return Case(f"conv_{name}", fn, args, CONV, **options)


CASES = [
    _case("same_1d_stride2", conv("SAME", 2), "b, s, 2", "3, 2, 3", grad=True),
    _case("same_1d_stride3", conv("SAME", 3), "2, s, 2", "5, 2, 3", grad=True),
    _case("same_1d_dilated", conv("SAME", 1, dilation=2), "2, s, 2", "3, 2, 3", grad=True),
    _case(
        "valid_1d_stride2_dilated",
        conv("VALID", 2, dilation=2),
        "b, s, 2",
        "3, 2, 3",
        grad=True,
        sizes=({"b": 1, "s": 5}, {"b": 3, "s": 6}, {"b": 4, "s": 8}, {"b": 2, "s": 7}),
    ),
    _case("wide_padding", conv([(5, 3)], 2), "2, s, 2", "3, 2, 3", grad=True),
    _case(
        "negative_padding",
        conv([(-1, -2)], 2),
        "2, s, 2",
        "2, 2, 3",
        grad=True,
        sizes=({"s": 5}, {"s": 6}, {"s": 7}, {"s": 8}),
        constraints=("s >= 5",),
    ),
    _case("stride_over_kernel", conv("VALID", 3), "2, s, 2", "1, 2, 3", grad=True),
    _case("transposed_same", transposed("SAME", 2), "b, s, 2", "3, 2, 3", grad=True),
    _case("transposed_valid", transposed("VALID", 3), "2, s, 2", "2, 2, 3", grad=True),
    _case(
        "lhs_and_window_strides",
        conv([(2, 1)], 3, lhs_dilation=2),
        "2, s, 2",
        "3, 2, 3",
        grad=True,
    ),
    _case(
        "gradient_by_kernel_not_finite",
        lambda x, w, g: jax.vjp(conv("SAME", 1, NHWC), x, w)[1](g)[1],
        Arg("b, s, 6, 2", make=hole_at_the_end),
        "3, 3, 2, 3",
        "b, s, 6, 3",
    ),
    _case("valid_2d_1x1_stride2", conv("VALID", 2, NHWC), "b, s, t, 2", "1, 1, 2, 3", grad=True),
    _case(
        "nchw",
        conv([(1, 1), (2, 2)], (2, 3), ("NCHW", "OIHW", "NCHW")),
        "b, 2, s, t",
        "2, 2, 3, 5",
        grad=True,
    ),
    _case("separable", separable, "b, s, 4, 3", "3, 3, 1, 3", "1, 1, 3, 2", grad=True),
    _case("vmap_kernels", jax.vmap(conv("SAME", 2)), "b, 2, s, 2", "b, 3, 2, 3"),
    *(
        _case(
            f"vmap_{groups}_groups",
            jax.vmap(
                lambda x, w, name=f"{groups}_group_count": lax.conv_general_dilated(
                    x, w, (1,), "VALID", **{name: 2}
                )
            ),
            *shapes,
            grad=True,
        )
        for groups, shapes in {
            "batch": ("b, 4, 3, 9", "b, 6, 3, 4"),
            "feature": ("b, 2, 4, 9", "b, 6, 2, 4"),
        }.items()
    ),
    # dtypes
    _case(
        "bfloat16",
        conv("SAME", 2),
        Arg("b, s, 2", "bfloat16"),
        Arg("3, 2, 3", "bfloat16"),
        rtol=2e-2,
        atol=2e-2,
    ),
    _case(
        "int8",
        conv("SAME", 2, preferred_element_type=jnp.int32),
        Arg("b, s, 2", "int8"),
        Arg("3, 2, 3", "int8"),
    ),
    _case("complex64", conv("SAME", 2), Arg("b, s, 2", "complex64"), Arg("3, 2, 3", "complex64")),
    _case(
        "convolve_both",
        jnp.convolve,
        "s",
        "t",
        sizes=({"s": 3, "t": 1}, {"s": 8, "t": 4}, {"s": 5, "t": 3}),
        constraints=("s >= t",),
    ),
]
