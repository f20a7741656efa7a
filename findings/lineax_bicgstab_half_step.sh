#!/bin/sh
# lineax 0.1.1 with jax 0.10.2: BiCGStab ends in NaN, and raises by default, on a system whose solution its first
# half step finds: a multiple of the identity, every system of size 1, a right-hand side that is an eigenvector.
# CG of lineax, and bicgstab of jax.scipy, solve all three.
#
# Seen:
#   2 * identity: BiCGStab NaN, CG [1.5 0.5], jax.scipy [1.5 0.5]
#   size 1: BiCGStab NaN, CG [1.5], jax.scipy [1.5]
#   eigenvector: BiCGStab NaN, CG [1.5 0. ], jax.scipy [1.5 0. ]
#   another right-hand side: BiCGStab [1.5 0.3333]
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check install --quiet \
    jax==0.10.2 jaxlib==0.10.2 lineax==0.1.1 equinox==0.13.8

JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.scipy.sparse.linalg import bicgstab


def solved(matrix, right, solver):
    operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
    return np.asarray(lx.linear_solve(operator, right, solver, throw=False).value)


systems = {
    "2 * identity": ([[2.0, 0.0], [0.0, 2.0]], [3.0, 1.0]),
    "size 1": ([[2.0]], [3.0]),
    "eigenvector": ([[2.0, 0.0], [0.0, 3.0]], [3.0, 0.0]),
}
for name, (matrix, right) in systems.items():
    matrix, right = jnp.array(matrix), jnp.array(right)
    want = np.linalg.solve(matrix, right)
    failed = solved(matrix, right, lx.BiCGStab(1e-5, 1e-5))
    by_cg, by_jax = solved(matrix, right, lx.CG(1e-5, 1e-5)), np.asarray(bicgstab(matrix, right)[0])
    assert np.isnan(failed).all(), failed
    np.testing.assert_allclose(by_cg, want, atol=1e-5)
    np.testing.assert_allclose(by_jax, want, atol=1e-5)
    print(f"{name}: BiCGStab NaN, CG {by_cg}, jax.scipy {by_jax}")
    try:
        lx.linear_solve(lx.MatrixLinearOperator(matrix), right, lx.BiCGStab(1e-5, 1e-5))
    except Exception as error:
        assert "non-finite" in str(error), error
    else:
        raise AssertionError("it raises nothing")
other = solved(jnp.diag(jnp.array([2.0, 3.0])), jnp.array([3.0, 1.0]), lx.BiCGStab(1e-5, 1e-5))
np.testing.assert_allclose(other, [1.5, 1 / 3], atol=1e-4)
print(f"another right-hand side: BiCGStab {other.round(4)}")
PY
