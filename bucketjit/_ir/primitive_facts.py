"""Facts about JAX's primitives: which ones are elementwise.

Each position of an elementwise result depends on that position of the operands alone.
"""

from __future__ import annotations

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
