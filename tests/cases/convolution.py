"""Convolutions over open batch, feature and spatial axes, and their gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.harness import Arg, family

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

CASES = [
    # 1-D
    case("batch", conv("SAME"), "b, 6, 2; 3, 2, 3"),
    case("valid_1d", conv("VALID"), "b, s, 2; 1, 2, 3"),
    case("valid_1d_k3", conv("VALID"), "2, s, 2; 3, 2, 3", sizes=ODD_SIZES),
    case("same_1d", conv("SAME"), "b, s, 2; 3, 2, 3"),
    case("same_1d_even_kernel", conv("SAME"), "2, s, 2; 4, 2, 3"),
    case("same_lower_1d", conv("SAME_LOWER", 2), "2, s, 2; 4, 2, 3"),
    case("same_1d_stride2", conv("SAME", 2), "b, s, 2; 3, 2, 3"),
    case("same_1d_stride3", conv("SAME", 3), "2, s, 2; 5, 2, 3"),
    case("same_1d_dilated", conv("SAME", 1, dilation=2), "2, s, 2; 3, 2, 3"),
    case(
        "valid_1d_stride2_dilated",
        conv("VALID", 2, dilation=2),
        "b, s, 2; 3, 2, 3",
        sizes=({"b": 1, "s": 5}, {"b": 3, "s": 6}, {"b": 4, "s": 8}, {"b": 2, "s": 7}),
    ),
    case("causal", conv([(4, 0)], dilation=2), "b, s, 2; 3, 2, 3"),
    case("wide_padding", conv([(5, 3)], 2), "2, s, 2; 3, 2, 3"),
    case(
        "negative_padding",
        conv([(-1, -2)], 2),
        "2, s, 2; 2, 2, 3",
        sizes=({"s": 5}, {"s": 6}, {"s": 7}, {"s": 8}),
        constraints=("s >= 5",),
    ),
    case("stride_over_kernel", conv("VALID", 3), "2, s, 2; 1, 2, 3"),
    case("transposed_same", transposed("SAME", 2), "b, s, 2; 3, 2, 3"),
    case("transposed_valid", transposed("VALID", 3), "2, s, 2; 2, 2, 3"),
    case("lhs_and_window_strides", conv([(2, 1)], 3, lhs_dilation=2), "2, s, 2; 3, 2, 3"),
    case("grouped", conv("SAME", 2, groups=2), "b, s, 4; 3, 2, 6"),
    case("channels_first", conv("SAME", 2, NCL), "b, 2, s; 3, 2, 3"),
    # features
    case("features", conv("SAME"), "2, 5, f; 3, f, g"),
    case("features_and_space", conv("SAME", 2), "b, s, f; 3, f, 2"),
    case("features_grouped_outputs", conv("SAME"), "2, 5, 2; 3, 2, g"),
    # symbolic kernels
    case("kernel_valid", conv("VALID"), "2, 9, 2; s, 2, 3"),
    case("kernel_same", conv("SAME"), "2, t, 2; s, 2, 3", buckets={"t": 8}, grad=False),
    case(
        "kernel_not_finite",
        conv("SAME"),
        Arg("2, t, 2", make=hole_at_the_end),
        "s, 2, 3",
        buckets={"t": 8},
        grad=False,
    ),
    case(
        "gradient_by_kernel_not_finite",
        lambda x, w, g: jax.vjp(conv("SAME", 1, NHWC), x, w)[1](g)[1],
        Arg("b, s, 6, 2", make=hole_at_the_end),
        "3, 3, 2, 3; b, s, 6, 3",
        grad=False,
    ),
    # 2-D and 3-D
    case("same_2d", conv("SAME", 2, NHWC), "b, s, 5, 2; 3, 3, 2, 2"),
    case("same_2d_both", conv("SAME", (2, 1), NHWC), "1, s, t, 2; 3, 2, 2, 2"),
    case("valid_2d_1x1_stride2", conv("VALID", 2, NHWC), "b, s, t, 2; 1, 1, 2, 3"),
    case(
        "nchw", conv([(1, 1), (2, 2)], (2, 3), ("NCHW", "OIHW", "NCHW")), "b, 2, s, t; 2, 2, 3, 5"
    ),
    case("separable", separable, "b, s, 4, 3; 3, 3, 1, 3; 1, 1, 3, 2"),
    case("same_3d", conv("SAME", 2, NDHWC), "1, s, 3, t, 1; 3, 2, 2, 1, 2"),
    # vmap
    case("vmap_batch", jax.vmap(conv("SAME", 2), (0, None)), "b, 2, s, 2; 3, 2, 3"),
    case("vmap_kernels", jax.vmap(conv("SAME", 2)), "b, 2, s, 2; b, 3, 2, 3", grad=False),
    *(
        case(
            f"vmap_{groups}_groups",
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
    ),
    case(
        "vmap_kernels_only", jax.vmap(conv("SAME", 2), (None, 0)), "2, s, 2; b, 3, 2, 3", grad=False
    ),
    case("per_example_gradients", per_example, "b, 5, 2; 3, 2, 3", grad=False),
    # dtypes
    case(
        "bfloat16",
        conv("SAME", 2),
        "bfloat16[b, s, 2]; bfloat16[3, 2, 3]",
        rtol=2e-2,
        atol=2e-2,
        grad=False,
    ),
    case(
        "int8",
        conv("SAME", 2, preferred_element_type=jnp.int32),
        "int8[b, s, 2]; int8[3, 2, 3]",
        grad=False,
    ),
    case("complex64", conv("SAME", 2), "complex64[b, s, 2]; complex64[3, 2, 3]", grad=False),
    case("precision", conv("SAME", precision="highest"), "b, s, 2; 3, 2, 3", grad=False),
    # jax.numpy
    case(
        "convolve_full", jnp.convolve, "s; 3", sizes=ODD_SIZES, constraints=("s >= 3",), grad=False
    ),
    case(
        "convolve_same",
        lambda x, y: jnp.convolve(x, y, mode="same"),
        "s; 3",
        sizes=ODD_SIZES,
        constraints=("s >= 3",),
    ),
    case(
        "correlate_valid",
        lambda x, y: jnp.correlate(x, y, mode="valid"),
        "s; 3",
        sizes=ODD_SIZES,
        constraints=("s >= 3",),
        grad=False,
    ),
    case(
        "convolve_both",
        jnp.convolve,
        "s; t",
        sizes=({"s": 3, "t": 1}, {"s": 8, "t": 4}, {"s": 5, "t": 3}),
        constraints=("s >= t",),
        grad=False,
    ),
]
