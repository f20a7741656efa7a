#!/usr/bin/env bash
# jax 0.10.2 (Python 3.11 and later).
#
# jax.eval_shape keeps its trace. The first jax.jit of the same function, and jax.make_jaxpr, take
# that trace for arguments of the same types, and do not run the Python function again. So a global
# that changes after eval_shape does not reach the first compiled call, which warnings and prints of
# the function do not reach either. Another function object and other types are traced anew.
#
# Seen:
#   eval_shape: traced 1 time
#   first jit: traced 0 times, gives 2.0 where the global is 3
#   make_jaxpr: traced 0 times
#   first jit of a lambda around it: traced 1 time, gives 3.0
#   first jit at another size: traced 1 time, gives 3.0
#   jit after jax.clear_caches: traced 1 time, gives 3.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY' | tee "$folder/seen"
import jax
import jax.numpy as jnp

runs, scale = 0, 2.0


def scaled(x):
    global runs
    runs += 1
    return x * scale


def traced(run):
    global runs
    runs = 0
    result = run()
    return f"traced {runs} time{'' if runs == 1 else 's'}", result


three, four = jnp.ones(3), jnp.ones(4)
print("eval_shape:", traced(lambda: jax.eval_shape(scaled, three))[0])
scale = 3.0
told, result = traced(lambda: jax.jit(scaled)(three))
print(f"first jit: {told}, gives {result[0]} where the global is 3")
print("make_jaxpr:", traced(lambda: jax.make_jaxpr(scaled)(three))[0])
told, result = traced(lambda: jax.jit(lambda x: scaled(x))(three))
print(f"first jit of a lambda around it: {told}, gives {result[0]}")
told, result = traced(lambda: jax.jit(scaled)(four))
print(f"first jit at another size: {told}, gives {result[0]}")
jax.clear_caches()
told, result = traced(lambda: jax.jit(scaled)(three))
print(f"jit after jax.clear_caches: {told}, gives {result[0]}")
PY
sed -n 's/^#   //p' "$0" | diff - "$folder/seen"
