"""Facts about JAX's primitives: which ones are elementwise.

Each position of an elementwise result depends on that position of the operands alone.
"""

from __future__ import annotations

from collections.abc import Mapping

ELEMENTWISE = (
    # arithmetic
    *("add", "add_any", "sub", "mul", "mulhi", "div", "rem", "neg", "abs", "sign", "max", "min"),
    *("pow", "integer_pow", "square", "sqrt", "rsqrt", "cbrt", "nextafter", "polynomial"),
    *("floor", "ceil", "round", "is_finite", "reduce_precision", "one_minus_square"),
    # exponentials and trigonometry
    *("exp", "exp2", "expm1", "log", "log2", "log1p", "logistic"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    # special functions
    *("erf", "erfc", "erf_inv", "lgamma", "digamma", "polygamma", "zeta"),
    *("igamma", "igammac", "igamma_grad_a", "regularized_incomplete_beta"),
    *("bessel_i0e", "bessel_i1e"),
    # complex
    *("complex", "real", "imag", "conj"),
    # bits
    *("and", "or", "xor", "not", "population_count", "clz"),
    *("shift_left", "shift_right_arithmetic", "shift_right_logical"),
    # comparison and choice
    *("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to", "select_n", "clamp"),
    # one operand in, the same out
    *("convert_element_type", "copy", "stop_gradient"),
)


# --- size params --------------------------------------------------------------------------------

# The parameters of JAX's primitives in which a symbolic size may be replaced by a padded size.
#
# User code can put a size into any parameter. In ``lax.integer_pow(x, x.shape[0])`` it is an
# exponent, which padding must not change. So this module lists the parameters that masking rules
# know as sizes, positions or counts along axes. A symbolic size in any other parameter is refused.

SIZE_PARAMS: Mapping[str, frozenset[str]] = {
    name: frozenset(params.split())
    for name, params in {
        "approx_top_k": "k",
        "broadcast_in_dim": "shape",
        "conv_general_dilated": "padding batch_group_count feature_group_count",
        "dynamic_slice": "slice_sizes",
        "empty": "shape",
        "fft": "fft_lengths",
        "full": "shape",
        "gather": "slice_sizes",
        "iota": "shape",
        "iota_2x32_shape": "shape",
        "lu_pivots_to_permutation": "permutation_size",
        "pad": "padding_config",
        "random_bits": "shape",
        "random_gamma": "shape",
        "random_split": "shape",
        "reduce_window": "window_dimensions window_strides padding",
        "reduce_window_max": "window_dimensions window_strides padding",
        "reduce_window_min": "window_dimensions window_strides padding",
        "reduce_window_mul": "window_dimensions window_strides padding",
        "reduce_window_sum": "window_dimensions window_strides padding",
        "reshape": "new_sizes",
        "rng_bit_generator": "shape",
        "rng_uniform": "shape",
        "scan": "length",
        "select_and_gather_add": "window_dimensions window_strides padding",
        "select_and_scatter": "window_dimensions window_strides padding",
        "select_and_scatter_add": "window_dimensions window_strides padding",
        "slice": "start_indices limit_indices strides",
        "split": "sizes",
        "tile": "reps",
        "top_k": "k",
    }.items()
}

#: Parameters with symbolic sizes whose logical value the rule computes, or which it refuses.
VALUE_PARAMS: Mapping[str, frozenset[str]] = {
    "conv_general_dilated": frozenset({"window_strides", "lhs_dilation", "rhs_dilation"}),
    **dict.fromkeys(("pure_callback", "io_callback", "debug_callback"), frozenset({"callback"})),
    "dim_as_value": frozenset({"dim"}),
    "gather": frozenset({"fill_value"}),
    "size_constant": frozenset({"depends_on"}),
}
