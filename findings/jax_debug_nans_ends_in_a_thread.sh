#!/usr/bin/env bash
# jax 0.10.2 (Python 3.11 and later).
#
# A context jax.debug_nans(False) ends the check of jax.config.update("jax_debug_nans", True) in its
# thread: at its end the thread has the check "none" of its own, which goes before that of the whole
# process. JAX itself enters such a context: an eager jnp.std or jnp.sort does, and jit as it traces
# or lowers one. From then on a jitted function of that thread that has run before returns NaN, though
# the flag still reads True. Its first call checks, another thread does, and so does
# jax.debug_nans(True).
#
# Seen:
#   before, second call: FloatingPointError, the flag is True
#   after an eager jnp.std, first call: FloatingPointError, the flag is True
#   after an eager jnp.std, second call: nan, the flag is True
#   in another thread, second call: FloatingPointError, the flag is True
#   within jax.debug_nans(True), second call: FloatingPointError, the flag is True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY' | grep -v "^Invalid nan" | tee "$folder/seen"
import threading

import jax
import jax.numpy as jnp

jax.config.update("jax_debug_nans", True)
one, zero = jnp.ones(()), jnp.zeros(())


def seen(when, *numbers):
    fn = jax.jit(lambda x: x / x)
    try:
        told = [float(fn(x)) for x in numbers][-1]
    except FloatingPointError as error:
        told = type(error).__name__
    print(f"{when}: {told}, the flag is {jax.config.jax_debug_nans}", flush=True)


seen("before, second call", one, zero)
jnp.std(jnp.arange(3.0))
seen("after an eager jnp.std, first call", zero)
seen("after an eager jnp.std, second call", one, zero)
thread = threading.Thread(target=seen, args=("in another thread, second call", one, zero))
thread.start()
thread.join()
with jax.debug_nans(True):
    seen("within jax.debug_nans(True), second call", one, zero)
PY
sed -n 's/^#   //p' "$0" | diff - "$folder/seen"
