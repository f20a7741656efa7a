"""`refine`, which fixes the sizes of a module without the Python code that it was made from."""

from __future__ import annotations

from collections.abc import Mapping

from bucketjit._artifact.archive import MAGIC, Archive
from bucketjit._artifact.saved_engine import LoadedFunction
from bucketjit._artifact.saved_program import Source
from bucketjit._events import shown
from bucketjit._stages import refine as modules
from bucketjit.errors import ArtifactError, ExportError


def refine(artifact: bytes, sizes: Mapping[str, int], platform: str | None = None) -> bytes:
    """Fix the sizes of an exported module, without the Python code that it was made from.

    The result is a StableHLO portable artifact: the bytes of a module whose sizes are all fixed,
    which every PJRT client compiles. Its function ``main`` takes the leaves of the arguments in the
    order of ``Exported.in_tree``, and returns the leaves of ``Exported.out_tree``. In C++,
    ``PJRT_Client_Compile`` takes it as a program of format ``"mlir"``; StableHLO's
    ``deserializePortableArtifact`` and ``stablehlo-translate --deserialize`` read it, too.

    Args:
        artifact: The bytes of ``jax.export.Exported.serialize()``, from
            `BucketedExec.export_dynamic` or from ``jax.export`` itself, or a ``.bkt`` file that was
            saved with ``dynamic=True``, whose module takes the constants of the file first. They
            must be trusted: jaxlib does not guard against hostile ones.
        sizes: The size of each dimension variable, such as ``{"b": 16}``.
        platform: Of a module for several platforms, the one to keep. By default it keeps all, and
            the number of the platform as its first argument.

    Returns:
        The portable artifact.

    Raises:
        ExportError: The artifact cannot be read, or is too new for this jaxlib; a size is missing,
            unknown, or no positive int; the sizes break a constraint of the module; or the module
            is not for the platform.
        MissingExtraError: flatbuffers is not installed, which reads the bytes of ``Exported``.

    Examples:
        >>> import bucketjit, jax, jax.numpy as jnp
        >>> total = bucketjit.jit(lambda x: x.sum(0), dynamic_axes="b, _")
        >>> exported = total.export_dynamic(jax.ShapeDtypeStruct((3, 8), jnp.float32))
        >>> fixed = refine(exported.serialize(), {"b": 16})
        >>> b"StableHLO" in fixed
        True
    """
    if isinstance(artifact, bytes | bytearray | memoryview) and bytes(artifact[:4]) == MAGIC:
        artifact = _dynamic_module(bytes(artifact), sizes)
    return modules.refine(artifact, sizes, platform)


def _dynamic_module(raw: bytes, sizes: Mapping[str, int]) -> bytes:
    """The module of all sizes in a ``.bkt`` file."""
    try:
        archive = Archive("artifact", data=raw)
        programs = LoadedFunction(Source(archive, False), archive.manifest.functions[0]).programs
    except ArtifactError as error:
        raise ExportError(str(error)) from error
    members = {p.record.dynamic: p for p in programs if p.record.dynamic is not None}
    if not members:
        raise ExportError(
            "artifact: the file has a module for each bucket, and none of all sizes; save it with "
            "dynamic=True"
        )
    checked = modules.checked_sizes(sizes, programs[0].record.variables)
    for member, program in members.items():
        if program.admits(checked):
            return archive.read(member)
    raise ExportError(f"artifact: no program of the file holds for {shown(checked)}")
