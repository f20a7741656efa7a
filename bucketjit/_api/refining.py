"""`refine`, which fixes the sizes of a module without the Python code that it was made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bucketjit._artifact.archive import MAGIC, Archive
from bucketjit._artifact.saved_engine import LoadedFunction
from bucketjit._artifact.saved_program import Source
from bucketjit._events import shown
from bucketjit._stages import refine as modules
from bucketjit.errors import ArtifactError, ExportError

Sizes = Mapping[str, int] | Sequence[Any]


def refine(artifact: bytes, sizes: Sizes, platform: str | None = None) -> bytes:
    """Fix the sizes of an exported module, without the Python code that it was made from.

    The result is a StableHLO portable artifact: the bytes of a module whose sizes are all fixed,
    which every PJRT client compiles. Its function ``main`` takes the leaves of the arguments in the
    order of ``Exported.in_tree``, without those that are not in ``Exported.module_kept_var_idx``,
    and returns the leaves of ``Exported.out_tree``. In C++, ``PJRT_Client_Compile`` takes it as a
    program of format ``"mlir"``; StableHLO's ``deserializePortableArtifact`` and
    ``stablehlo-translate --deserialize`` read it, too.

    Args:
        artifact: The bytes of ``jax.export.Exported.serialize()``, from
            `BucketedExec.export_dynamic` or from ``jax.export`` itself; a StableHLO portable
            artifact; or a ``.bkt`` file that was saved with ``dynamic=True``, whose module takes
            the constants of the file first. They must be trusted: jaxlib does not guard against
            hostile ones.
        sizes: The size of each dimension variable, such as ``{"b": 16}``. A portable artifact does
            not name its sizes, so it takes a list with an entry for each argument of ``main``: a
            shape, a ``jax.ShapeDtypeStruct``, text such as ``"16x8xf32"``, or None for an argument
            that has no open sizes.
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
        >>> refine(fixed, [(16, 8)]) == fixed
        True
    """
    raw: Any = artifact
    if isinstance(artifact, bytes | bytearray | memoryview) and bytes(artifact[:4]) == MAGIC:
        raw = _dynamic_module(bytes(artifact), sizes)
    return modules.refine(raw, sizes, platform)


def _dynamic_module(raw: bytes, sizes: Sizes) -> bytes:
    """The module of all sizes in a ``.bkt`` file."""
    try:
        archive = Archive("artifact", data=raw)
        programs = LoadedFunction(Source(archive, False), archive.manifest.functions[0]).programs
    except ArtifactError as error:
        raise ExportError(str(error)) from error
    found = [program for program in programs if program.record.dynamic is not None]
    if not found:
        raise ExportError(
            "artifact: the file has a module for each bucket, and none of all sizes; save it with "
            "dynamic=True"
        )
    if isinstance(sizes, Mapping) and len(found) > 1:  # which one, its guards decide
        known = set(found[0].record.variables)
        if set(sizes) == known and all(type(n) is int and n > 0 for n in sizes.values()):
            found = [program for program in found if program.admits(sizes)]
            if not found:
                raise ExportError(f"artifact: no program of the file holds for {shown(sizes)}")
    member = found[0].record.dynamic
    assert member is not None
    return archive.read(member)
