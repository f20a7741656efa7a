"""Convolutions over open batch, feature and spatial axes, and their gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.harness import Arg, cases, family

case = family("conv_general_dilated", "conv_", rtol=1e-4, atol=1e-4, grad=True)

NLC = ("NHC", "HIO", "NHC")
NCL = ("NCH", "OIH", "NCH")
NHWC = ("NHWC", "HWIO", "NHWC")
NDHWC = ("NDHWC", "DHWIO", "NDHWC")


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


def per_example(x: Any, w: Any) -> Any:
    """Gradients by the kernel, one for each example."""
    return jax.vmap(
        jax.grad(lambda w, x: jnp.sum(jnp.sin(conv("SAME", 2)(x[None], w)))), in_axes=(None, 0)
    )(w, x)


ODD_SIZES = ({"s": 3}, {"s": 5}, {"s": 7}, {"s": 8}, {"s": 4})

TABLE = {
    # 1-D
    "batch": case(conv("SAME"), "b, 6, 2; 3, 2, 3"),
    "valid_1d": case(conv("VALID"), "b, s, 2; 1, 2, 3"),
    "valid_1d_k3": case(conv("VALID"), "2, s, 2; 3, 2, 3", sizes=ODD_SIZES),
    "same_1d": case(conv("SAME"), "b, s, 2; 3, 2, 3"),
    "same_1d_even_kernel": case(conv("SAME"), "2, s, 2; 4, 2, 3"),
    "same_lower_1d": case(conv("SAME_LOWER", 2), "2, s, 2; 4, 2, 3"),
    "same_1d_stride2": case(conv("SAME", 2), "b, s, 2; 3, 2, 3"),
    "same_1d_stride3": case(conv("SAME", 3), "2, s, 2; 5, 2, 3"),
    "same_1d_dilated": case(conv("SAME", 1, dilation=2), "2, s, 2; 3, 2, 3"),
    "valid_1d_stride2_dilated": case(
        conv("VALID", 2, dilation=2),
        "b, s, 2; 3, 2, 3",
        sizes=({"b": 1, "s": 5}, {"b": 3, "s": 6}, {"b": 4, "s": 8}, {"b": 2, "s": 7}),
    ),
    "causal": case(conv([(4, 0)], dilation=2), "b, s, 2; 3, 2, 3"),
    "wide_padding": case(conv([(5, 3)], 2), "2, s, 2; 3, 2, 3"),
    "negative_padding": case(
        conv([(-1, -2)], 2),
        "2, s, 2; 2, 2, 3",
        sizes=({"s": 5}, {"s": 6}, {"s": 7}, {"s": 8}),
        constraints=("s >= 5",),
    ),
    "stride_over_kernel": case(conv("VALID", 3), "2, s, 2; 1, 2, 3"),
    "transposed_same": case(transposed("SAME", 2), "b, s, 2; 3, 2, 3"),
    "transposed_valid": case(transposed("VALID", 3), "2, s, 2; 2, 2, 3"),
    "lhs_and_window_strides": case(conv([(2, 1)], 3, lhs_dilation=2), "2, s, 2; 3, 2, 3"),
    "grouped": case(conv("SAME", 2, groups=2), "b, s, 4; 3, 2, 6"),
    "channels_first": case(conv("SAME", 2, NCL), "b, 2, s; 3, 2, 3"),
    # features
    "features": case(conv("SAME"), "2, 5, f; 3, f, g"),
    "features_and_space": case(conv("SAME", 2), "b, s, f; 3, f, 2"),
    "features_grouped_outputs": case(conv("SAME"), "2, 5, 2; 3, 2, g"),
    # symbolic kernels
    "kernel_valid": case(conv("VALID"), "2, 9, 2; s, 2, 3"),
    "kernel_same": case(conv("SAME"), "2, t, 2; s, 2, 3", buckets={"t": 8}, grad=False),
    "kernel_not_finite": case(
        conv("SAME"), Arg("2, t, 2", make=hole_at_the_end), "s, 2, 3", buckets={"t": 8}, grad=False
    ),
    "gradient_by_kernel_not_finite": case(
        lambda x, w, g: jax.vjp(conv("SAME", 1, NHWC), x, w)[1](g)[1],
        Arg("b, s, 6, 2", make=hole_at_the_end),
        "3, 3, 2, 3; b, s, 6, 3",
        grad=False,
    ),
    # 2-D and 3-D
    "same_2d": case(conv("SAME", 2, NHWC), "b, s, 5, 2; 3, 3, 2, 2"),
    "same_2d_both": case(conv("SAME", (2, 1), NHWC), "1, s, t, 2; 3, 2, 2, 2"),
    "valid_2d_1x1_stride2": case(conv("VALID", 2, NHWC), "b, s, t, 2; 1, 1, 2, 3"),
    "nchw": case(
        conv([(1, 1), (2, 2)], (2, 3), ("NCHW", "OIHW", "NCHW")), "b, 2, s, t; 2, 2, 3, 5"
    ),
    "separable": case(separable, "b, s, 4, 3; 3, 3, 1, 3; 1, 1, 3, 2"),
    "same_3d": case(conv("SAME", 2, NDHWC), "1, s, 3, t, 1; 3, 2, 2, 1, 2"),
    # vmap
    "vmap_batch": case(jax.vmap(conv("SAME", 2), (0, None)), "b, 2, s, 2; 3, 2, 3"),
    "vmap_kernels": case(jax.vmap(conv("SAME", 2)), "b, 2, s, 2; b, 3, 2, 3", grad=False),
    **{
        f"vmap_{groups}_groups": case(
            jax.vmap(
                lambda x, w, name=f"{groups}_group_count": lax.conv_general_dilated(
                    x, w, (1,), "VALID", **{name: 2}
                )
            ),
            *shapes,
        )
        for groups, shapes in {
            "batch": ("b, 4, 3, 9", "b, 6, 3, 4"),
            "feature": ("b, 2, 4, 9", "b, 6, 2, 4"),
        }.items()
    },
    "kernels_only": case(jax.vmap(conv("SAME", 2), (None, 0)), "2, s, 2; b, 3, 2, 3", grad=False),
    "per_example_gradients": case(per_example, "b, 5, 2; 3, 2, 3", grad=False),
    # dtypes
    "bfloat16": case(
        conv("SAME", 2), "bfloat16[b, s, 2]; bfloat16[3, 2, 3]", rtol=2e-2, atol=2e-2, grad=False
    ),
    "int8": case(
        conv("SAME", 2, preferred_element_type=jnp.int32),
        "int8[b, s, 2]; int8[3, 2, 3]",
        grad=False,
    ),
    "complex64": case(conv("SAME", 2), "complex64[b, s, 2]; complex64[3, 2, 3]", grad=False),
    "precision": case(conv("SAME", precision="highest"), "b, s, 2; 3, 2, 3", grad=False),
    # jax.numpy
    "convolve_full": case(
        jnp.convolve, "s; 3", sizes=ODD_SIZES, constraints=("s >= 3",), grad=False
    ),
    "convolve_same": case(
        lambda x, y: jnp.convolve(x, y, mode="same"),
        "s; 3",
        sizes=ODD_SIZES,
        constraints=("s >= 3",),
    ),
    "correlate_valid": case(
        lambda x, y: jnp.correlate(x, y, mode="valid"),
        "s; 3",
        sizes=ODD_SIZES,
        constraints=("s >= 3",),
        grad=False,
    ),
    "convolve_both": case(
        jnp.convolve,
        "s; t",
        sizes=({"s": 3, "t": 1}, {"s": 8, "t": 4}, {"s": 5, "t": 3}),
        constraints=("s >= t",),
        grad=False,
    ),
}
CASES = cases(TABLE)
