#!/usr/bin/env bash
# lineax 0.1.1, equinox 0.13.8, jax 0.10.2 (Python 3.11 and later).
#
# Which solvers of lineax.linear_solve does jax.export take with a symbolic matrix size n? LU, SVD and
# the iterative CG and BiCGStab export. GMRES compares its restart length, 20, with the size, which is
# inconclusive. Where a constraint decides that, GMRES is refused as QR is: for a custom call on CPUs
# for which JAX promises no compatibility.
#
# Seen:
#   LU exports
#   SVD exports
#   CG exports
#   BiCGStab exports
#   GMRES raises InconclusiveDimensionOperation: 'n' < '20'
#   GMRES raises ValueError: custom calls without guarantees if n >= 20
#   QR raises ValueError: custom calls without guarantees
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet lineax==0.1.1 equinox==0.13.8 jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY' | tee "$folder/seen"
import re

import jax
import lineax as lx
from jax import export


def outcome(solver, *constraints):
    def solved(a, b):
        tags = lx.positive_semidefinite_tag if isinstance(solver, lx.CG) else ()
        operator = lx.MatrixLinearOperator(a, tags)
        return lx.linear_solve(operator, b, solver, throw=False).value

    scope = export.SymbolicScope(constraints)
    shapes = [export.symbolic_shape(s, scope=scope) for s in ("n, n", "n,")]
    try:
        export.export(jax.jit(solved))(*(jax.ShapeDtypeStruct(s, "float32") for s in shapes))
    except Exception as error:
        compared = re.search(r"comparison (.*) is inconclusive", str(error))
        guarantees = "no compatibility guarantees" in str(error)
        told = compared[1] if compared else "custom calls without guarantees" * guarantees
        return f"raises {type(error).__name__}: {told}"
    return "exports"


print("LU", outcome(lx.LU()))
print("SVD", outcome(lx.SVD()))
print("CG", outcome(lx.CG(rtol=1e-6, atol=1e-6)))
print("BiCGStab", outcome(lx.BiCGStab(rtol=1e-6, atol=1e-6)))
gmres = lx.GMRES(rtol=1e-6, atol=1e-6)
print("GMRES", outcome(gmres))
print("GMRES", outcome(gmres, "n >= 20"), "if n >= 20")
print("QR", outcome(lx.QR()))
PY
sed -n 's/^#   //p' "$0" | diff - "$folder/seen"
