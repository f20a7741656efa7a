"""Compile lowered programs, and keep the bytes that were read.

`serialization` turns executables into bytes and back. `bucketjit._compile` decides who compiles
what.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jaxlib

from bucketjit._jax.names import Forwarding
from bucketjit._jax.serialization import NotPlain, compilation_cache


def signature_counter(function: Any) -> Callable[[], int]:
    """A function that counts the argument signatures a jitted function knows, placement included.

    The count (``_cache_size`` of jaxlib's ``PjitFunction``) has no public name. The bound method is
    wrapped in a lambda: the garbage collector does not look through methods of nanobind (jaxlib
    0.10), so a bucketed function that its own function references would never be freed.
    """
    return lambda: function._cache_size()


_STATUS = re.compile(r"[A-Z_]+: ")


def failed_running(error: Exception) -> bool:
    """Whether a call of an executable failed while it ran, not while its arguments were checked.

    Examples are a callback that raises, missing memory, and a NaN under ``jax_debug_nans``. The
    fast path of ``jit`` raises an error of the runtime as a ``ValueError`` whose text starts with a
    status code. A ``ValueError`` with any other text is about the arguments.
    """
    if isinstance(error, ValueError):
        return _STATUS.match(str(error)) is not None
    return isinstance(error, jax.errors.JaxRuntimeError | FloatingPointError)


def jaxlib_version() -> str:
    """The version of jaxlib (``jaxlib.__version__``), which no module of ``jax`` has."""
    return str(jaxlib.__version__)


def compile_here(lowered: jax.stages.Lowered) -> Any:
    """Compile a lowered program.

    JAX may read the executable from its own persistent cache. XLA cannot serialize an executable
    that it has read from bytes, at least on CPU: the result is incomplete. So for the compile a
    client that keeps the bytes replaces that of the program (``MeshComputation.compile_args``,
    since 0.4; no public argument does this). `serialized` uses the bytes, `forget_bytes` drops
    them.
    """
    arguments = lowered._lowering.compile_args
    client = arguments.get("backend")
    if compilation_cache() is None or not _is_cpu_of_one_host(client):
        return lowered.compile()
    # The compiled program keeps this client, and with it the bytes; `lowered` gets its own back.
    arguments["backend"] = _Remembering(client)
    try:
        return lowered.compile()
    finally:
        arguments["backend"] = client


def _is_cpu_of_one_host(client: Any) -> bool:
    return getattr(client, "platform", None) == "cpu" and jax.process_count() == 1


def forget_bytes(compiled: object) -> None:
    """Drop the bytes that `compile_here` keeps for this executable."""
    client = _client_of(compiled)
    if isinstance(client, _Remembering):
        client.raw = None


def has_bytes(compiled: object) -> bool:
    """Whether `compile_here` keeps the bytes of this executable."""
    client = _client_of(compiled)
    return isinstance(client, _Remembering) and client.raw is not None


def _client_of(compiled: Any) -> Any:
    """The client that compiled an executable (``pxla.UnloadedMeshExecutable``, since 0.4.30)."""
    around = getattr(compiled._executable, "_unloaded_executable", None)
    return getattr(around, "backend", None)


class _Remembering(Forwarding):
    """A client of XLA that keeps the bytes of the executable it deserialized last."""

    _executable: Any = None
    raw: bytes | None = None

    def deserialize_executable(self, raw: bytes, *args: Any, **kwargs: Any) -> Any:
        self._executable = self._original.deserialize_executable(raw, *args, **kwargs)
        self.raw = raw
        return self._executable

    def serialize_executable(self, executable: Any) -> bytes:
        if executable is self._executable and self.raw is not None:
            return self.raw
        return bytes(self._original.serialize_executable(executable))


def run_once(compiled: Any, argument: Callable[[int, Any], Any]) -> None:
    """Run an executable, wait until it is done, and drop its results.

    A jitted function compiles again for arguments of another placement. The executable behind it
    (``MeshExecutable.unsafe_call``, since 0.4) takes arguments of any placement.
    """
    if getattr(getattr(compiled, "_params", None), "const_args", None):
        raise NotPlain("it holds objects of this process")
    executable = getattr(compiled, "_executable", compiled)
    # Arguments that the program does not read are not passed to XLA: None stands for them.
    args: list[Any] = [None] * (1 + max(executable._kept_var_idx, default=-1))
    for i, aval in zip(sorted(executable._kept_var_idx), executable.in_avals, strict=True):
        args[i] = argument(i, aval)
    jax.block_until_ready(executable.unsafe_call(*args))


_ALIAS = re.compile(r"\}: \((\d+), \{(\d*)")  # {result}: (parameter, {its place in a tuple}, ...


def reused_arguments(compiled: Any) -> Iterator[int]:
    """Positions of the donated arguments whose memory results take, constants of JAX left out.

    JAX offers donated arguments to XLA, which chooses; the first line of its text tells.
    """
    executable = getattr(compiled, "_executable", compiled)
    kept = sorted(executable._kept_var_idx)
    front = len(getattr(getattr(compiled, "_params", None), "const_args", ()))
    for parameter, place in _ALIAS.findall((executable.as_text() or "").partition("\n")[0]):
        yield kept[int(place or parameter)] - front


_REFUSED_OPTION = re.compile(r"No such compile option: '([^']*)'|setting option ([^\s,]+)")


def as_stage(compiled: Any, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """A compiled program as ``jax.stages.Compiled``, which it is not if it was read from a file.

    The constructor of that class is not documented (checked in 0.10 and 0.12).
    """
    if isinstance(compiled, jax.stages.Compiled):
        return compiled
    make: Any = jax.stages.Compiled
    stage: jax.stages.Compiled = make(compiled, [], lowered.args_info, lowered.out_tree)
    return stage


def is_defect_of_xla(error: Exception) -> bool:
    """Whether lowering or compiling failed by a defect of XLA or JAX, not of the user's program.

    That is an error with the status ``INTERNAL`` or ``UNIMPLEMENTED``, or a program that JAX's
    lowering to MLIR rejects.
    """
    if isinstance(error, jax.errors.JaxRuntimeError):
        return str(error).startswith(("INTERNAL", "UNIMPLEMENTED"))
    return isinstance(error, ValueError) and str(error).startswith("Cannot lower jaxpr")


def refused_option(error: Exception) -> str | None:
    """The compiler option that XLA refused, if ``error`` is about one; None otherwise.

    No attribute of the error has it: its text is searched (as jaxlib 0.10 to 0.12 write it).
    """
    match = _REFUSED_OPTION.search(str(error))
    return None if match is None else match[match.lastindex or 0]
