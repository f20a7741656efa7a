"""What a compiled executable depends on besides its program: versions, device, flags."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from bucketjit._jax.compiler import jaxlib_version
from bucketjit._version import __version__

_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")

# Prefixes of JAX's configuration that only says where files are, what is logged, how errors are
# shown, or which devices and addresses a process of a job has. (The default device is part of the
# key.) All other configuration is part of the environment.
_NO_MATTER = (
    "jax_captured_constants",
    "jax_check_static_indices",
    "jax_compilation_cache",
    "jax_compiler_detailed_logging",
    "jax_cpu_get",
    "jax_cross_host",
    "jax_cuda_visible_devices",
    "jax_debug_log",
    "jax_default_device",
    "jax_dump_ir",
    "jax_enable_compilation_cache",
    "jax_explain_cache",
    "jax_log",
    "jax_oneapi_visible_devices",
    "jax_persistent_cache",
    "jax_platforms",
    "jax_pprint",
    "jax_raise_persistent_cache",
    "jax_rocm_visible_devices",
    "jax_tracer_error",
    "jax_traceback",
)


def environment(device: jax.Device) -> Mapping[str, str]:
    """What an executable for a device depends on besides its program, by name."""
    return {**_of_process(device), **_of_now()}


def versions() -> dict[str, str]:
    """The versions of the libraries. That of bucketjit includes a digest of its sources."""
    return {
        "bucketjit": f"{__version__} {_sources()}",
        "jax": jax.__version__,
        "jaxlib": jaxlib_version(),
        "numpy": np.__version__,
    }


@functools.lru_cache(maxsize=16)
def _of_process(device: jax.Device) -> dict[str, str]:
    """The part that stays the same while the process runs."""
    client = device.client
    found = {
        **versions(),
        "platform": f"{device.platform} {client.platform_version}",
        "device": device.device_kind,
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.platform == "cpu":
        found["cpu"] = _processor()
    return found


def _of_now() -> dict[str, str]:
    """The part that can change: JAX's configuration and the environment variables with flags."""
    config = {
        name: repr(value)
        for name, value in jax.config.values.items()
        if not name.startswith(_NO_MATTER)
    }
    return {**config, **{name: os.environ.get(name, "") for name in _FLAGS}}


@functools.cache
def _sources() -> str:
    """A digest of the package's own code: a changed masking rule makes other executables."""
    package = os.path.dirname(os.path.dirname(__file__))
    modules = [
        os.path.join(folder, name)
        for folder, _, names in os.walk(package)
        for name in names
        if name.endswith(".py")
    ]
    told = hashlib.sha256()
    for path in sorted(modules):
        with open(path, "rb") as file:
            data = file.read()
        told.update(f"{os.path.relpath(path, package)}:{len(data)}:".encode())
        told.update(data)
    return told.hexdigest()[:16]


@functools.cache
def _processor() -> str:
    """The processor's name and its instruction sets: XLA compiles for exactly these."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return f"{platform.processor()} {platform.machine()}"
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer", "isa")
    told = dict(line.split(":", 1) for line in lines if ":" in line and line.startswith(wanted))
    named = told.get("model name\t", "").strip() or platform.machine()
    return f"{named} {_short(repr(sorted(told.items())))}"


def _short(text: str) -> str:
    """The first 16 hexadecimal digits of the digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
