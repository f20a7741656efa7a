"""Which parameters of JAX's primitives hold sizes, so that a padded size may stand in for them.

A size may get anywhere: ``lax.integer_pow(x, x.shape[0])`` is an exponent that is a size. Padding
must not change that one. So the parameters that the masking rules know as sizes, positions or
counts along axes are listed, and a symbolic size in any other one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

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

#: Those that rules take the logical value of, or refuse themselves.
VALUE_PARAMS: Mapping[str, frozenset[str]] = {
    "conv_general_dilated": frozenset({"window_strides", "lhs_dilation", "rhs_dilation"}),
    **dict.fromkeys(("pure_callback", "io_callback", "debug_callback"), frozenset({"callback"})),
    "dim_as_value": frozenset({"dim"}),
    "gather": frozenset({"fill_value"}),
    "size_constant": frozenset({"depends_on"}),
}
