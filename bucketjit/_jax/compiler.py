"""Compile a lowered module: here, in another process, and to bytes."""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jaxlib

from bucketjit._errors import in_one_line
from bucketjit._jax import names
from bucketjit._jax.names import Without, lacking
from bucketjit._jax.serialization import NotPlain, compilation_cache

_config = names.module("config")
_linalg = names.module("lax.linalg")
_xla_client = names.module("lib").xla_client


def signature_counter(function: Any) -> Callable[[], int]:
    """Counts the argument signatures that a jitted function knows, placement included.

    Not the method itself: through one of nanobind's, as jaxlib 0.10 has them, the garbage collector
    does not see the function, so an executor that its own function knows would never be freed.
    """
    return lambda: function._cache_size()


_STATUS = re.compile(r"[A-Z_]+: ")


def failed_running(error: Exception) -> bool:
    """Whether a call of an executable came as far as running it, and failed there.

    In a callback, for want of memory, at a NaN where ``jax_debug_nans`` looks for them. Jit's fast
    path raises what the runtime reports as a ``ValueError`` that starts with its status code; what
    has another text is about the arguments.
    """
    if isinstance(error, ValueError):
        return _STATUS.match(str(error)) is not None
    return isinstance(error, jax.errors.JaxRuntimeError | FloatingPointError)


def jaxlib_version() -> str:
    """The version of jaxlib, which no module of ``jax`` tells (``jaxlib.__version__``)."""
    return str(jaxlib.__version__)


class NotElsewhere(Exception):
    """A program cannot be compiled elsewhere, and can be here; the message says why."""


def compile_here(lowered: jax.stages.Lowered) -> Any:
    """Compile a lowered program, as `compile_elsewhere` does elsewhere.

    What JAX has in its own persistent cache is read from there. XLA does not write an executable
    again as a whole that it has read, at least on CPU, so the bytes that were read are kept for
    `serialized`, until `forget_bytes`.
    """
    arguments = lowered._lowering.compile_args
    client = arguments.get("backend")
    if compilation_cache() is None or not _is_cpu_of_one_host(client):
        return lowered.compile()
    arguments["backend"] = _Remembering(client)
    try:
        return lowered.compile()
    finally:
        arguments["backend"] = client


def _is_cpu_of_one_host(client: Any) -> bool:
    return getattr(client, "platform", None) == "cpu" and jax.process_count() == 1


def compile_elsewhere(
    compile: Callable[[bytes, bytes, int, int], bytes], lowered: jax.stages.Lowered
) -> Any:
    """What ``lowered.compile()`` returns, from an executable that is compiled somewhere else.

    That takes part in all that JAX does around a compile, its events and its persistent cache,
    with another client in the place of the one that the program was lowered for
    (``MeshComputation.compile_args``, since 0.4). Only the bytes that come back hold all of an
    executable: XLA does not write one again as a whole that it has read. So JAX's own cache is not
    written to, and `serialized` finds those bytes, until `forget_bytes`.

    Args:
        compile: Is given the program as MLIR bytecode, XLA's options as a protocol buffer, how
            many devices the host has and which of them it is for; returns the executable's bytes.
        lowered: The program.

    Returns:
        The compiled program.

    Raises:
        NotElsewhere: Said by ``compile``, or the program is not for one CPU, or calls back.
        Exception: Whatever ``lowered.compile()`` raises before it asks XLA.
    """
    if lack := lacking(Without.ELSEWHERE):
        raise NotElsewhere(lack)
    arguments = lowered._lowering.compile_args
    client = arguments.get("backend")
    if not _is_cpu_of_one_host(client):
        raise NotElsewhere("it is not for a CPU of one host")
    arguments["backend"] = _Elsewhere(client, compile)
    try:
        with _config.persistent_cache_min_compile_time_secs(math.inf):
            return lowered.compile()
    except NotElsewhere:
        arguments["backend"] = client
        raise


def forget_bytes(compiled: object) -> None:
    """Drop the bytes that `compile_here` and `compile_elsewhere` have kept."""
    client = _client_of(compiled)
    if isinstance(client, _Remembering):
        client.raw = None


def has_bytes(compiled: object) -> bool:
    """Whether the bytes of an executable are kept."""
    client = _client_of(compiled)
    return isinstance(client, _Remembering) and client.raw is not None


def _client_of(compiled: Any) -> Any:
    around = getattr(compiled._executable, "_unloaded_executable", None)
    return getattr(around, "backend", None)


def compile_to_bytes(module: bytes, options: bytes, devices: int, device: int) -> bytes:
    """Compile a program for a device of a host like this one; see `compile_elsewhere`.

    Raises:
        Exception: Whatever XLA says of the program.
    """
    if b"lapack_" in module:
        _linalg.initialize_lapack()
    client = _cpu_client(devices)
    executable = client.compile_and_load(
        module,
        executable_devices=_xla_client.DeviceList((client.local_devices()[device],)),
        compile_options=_xla_client.CompileOptions.ParseFromString(options),
    )
    return bytes(client.serialize_executable(executable))


@functools.cache
def _cpu_client(devices: int) -> Any:
    return _xla_client.make_cpu_client(num_devices=devices)


class _Remembering:
    """A client that knows the bytes of the executable that it has read."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._executable: Any = None
        self.raw: bytes | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def deserialize_executable(self, raw: bytes, *args: Any, **kwargs: Any) -> Any:
        self._executable = self._client.deserialize_executable(raw, *args, **kwargs)
        self.raw = raw
        return self._executable

    def serialize_executable(self, executable: Any) -> bytes:
        if executable is self._executable and self.raw is not None:
            return self.raw
        return bytes(self._client.serialize_executable(executable))


class _Elsewhere(_Remembering):
    """A client whose executables are compiled elsewhere, and are its own from then on."""

    def __init__(self, client: Any, compile: Callable[[bytes, bytes, int, int], bytes]) -> None:
        super().__init__(client)
        self._compile = compile

    def compile_and_load(
        self, module: Any, executable_devices: Any, compile_options: Any, **others: Any
    ) -> Any:
        devices, known = list(executable_devices), self._client.local_devices()
        if len(devices) != 1 or devices[0] not in known:
            raise NotElsewhere("it is not for one device of this host")
        if others:
            raise NotElsewhere("it calls back into Python")
        written = io.BytesIO()
        module.operation.write_bytecode(written)
        where = len(known), known.index(devices[0])
        raw = self._compile(written.getvalue(), compile_options.SerializeAsString(), *where)
        if b"lapack_" in raw:
            _linalg.initialize_lapack()
        try:
            return self.deserialize_executable(raw, executable_devices=executable_devices)
        except Exception as error:
            raise NotElsewhere(in_one_line(error)) from error


def run_once(compiled: Any, argument: Callable[[int, Any], Any]) -> None:
    """Run an executable, wait until it is done, and drop what it returns.

    A jitted function must be given arguments of the placement that it will have later, or it
    compiles twice. What is behind it (``MeshExecutable.unsafe_call``, since 0.4) takes any.

    Args:
        compiled: What ``lower().compile()`` returns, or what is behind it.
        argument: Makes an argument, of its position among all and its type.

    Raises:
        NotPlain: It holds arguments of its own.
        Exception: Whatever running it raises.
    """
    if getattr(getattr(compiled, "_params", None), "const_args", None):
        raise NotPlain("it holds objects of this process")
    executable = getattr(compiled, "_executable", compiled)
    args: list[Any] = [None] * (1 + max(executable._kept_var_idx, default=-1))
    for i, aval in zip(sorted(executable._kept_var_idx), executable.in_avals, strict=True):
        args[i] = argument(i, aval)
    jax.block_until_ready(executable.unsafe_call(*args))


_REFUSED_OPTION = re.compile(r"No such compile option: '([^']*)'|setting option ([^\s,]+)")


def is_defect_of_xla(error: Exception) -> bool:
    """Whether a program failed to lower or compile by no fault of its arguments.

    That is an error that XLA calls internal, or a program that MLIR does not take.
    """
    if isinstance(error, jax.errors.JaxRuntimeError):
        return str(error).startswith(("INTERNAL", "UNIMPLEMENTED"))
    return isinstance(error, ValueError) and str(error).startswith("Cannot lower jaxpr")


def refused_option(error: Exception) -> str | None:
    """The option that XLA did not take, if that is the error (as texts of jaxlib 0.10 to 0.12)."""
    found = _REFUSED_OPTION.search(str(error))
    return None if found is None else found[found.lastindex or 0]
