"""What a compiled executable depends on besides its program: versions, device, flags."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
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
# call.) All other configuration is part of the environment.
_NO_MATTER = tuple(
    f"jax_{name}"
    for name in (
        *("captured_constants", "check_static_indices", "compilation_cache", "cpu_get"),
        *("compiler_detailed_logging", "cross_host", "cuda_visible_devices", "debug_log"),
        *("default_device", "dump_ir", "enable_compilation_cache", "explain_cache", "log"),
        *("oneapi_visible_devices", "persistent_cache", "platforms", "pprint"),
        *("raise_persistent_cache", "rocm_visible_devices", "tracer_error", "traceback"),
    )
)


def environment(device: jax.Device) -> Mapping[str, str]:
    """What an executable for a device depends on besides its program, by name."""
    config = {
        name: repr(value)
        for name, value in jax.config.values.items()
        if not name.startswith(_NO_MATTER)
    }
    return {**_of_process(device), **config, **{flag: os.environ.get(flag, "") for flag in _FLAGS}}


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
    return {
        **versions(),
        "platform": f"{device.platform} {_compiler(device)}",
        "device": device.device_kind,
        "system": f"{platform.system()} {platform.machine()}" if device.platform == "cpu" else "",
        "cpu": _processor() if device.platform == "cpu" else "",
    }


def _compiler(device: jax.Device) -> str:
    """The compiler of a device, as processes with and without the device tell it."""
    if device.platform == "gpu":
        every = (f"jax-{name}-pjrt" for name in ("cuda12", "cuda13", "rocm7"))
        versions = [f"{name} {version}" for name in every if (version := _version(name))]
        if versions:
            return f"{' '.join(versions)} {getattr(device, 'compute_capability', '')}"
    return str(device.client.platform_version)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _sources() -> str:
    """A digest of the package's own code: a changed masking rule makes other executables."""
    package, hasher = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        data = path.read_bytes()
        hasher.update(f"{path.relative_to(package).as_posix()}:{len(data)}:".encode())
        hasher.update(data)
    return hasher.hexdigest()[:16]


@functools.cache
def _processor() -> str:
    """A digest of the processor's name and instruction sets: XLA compiles for exactly these."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return f"{platform.processor()} {platform.machine()}"
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer", "isa")
    features = {line for line in lines if line.startswith(wanted)}
    return hashlib.sha256("\n".join(sorted(features)).encode()).hexdigest()[:16]
