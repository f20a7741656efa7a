"""`Loaded`, a function that was read from a file; `load`, which reads it, and `refine`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.export  # an attribute of jax only after this import

from bucketjit._api.options import budget_of, flag
from bucketjit._api.served import Served
from bucketjit._artifact.archive import MAGIC, Archive
from bucketjit._artifact.saved_engine import LoadedFunction
from bucketjit._artifact.saved_program import Source
from bucketjit._artifact.transformed import Transformed
from bucketjit._config import CompileBudget
from bucketjit._events import counted, one_line, shown
from bucketjit._jax.tracebacks import boundary
from bucketjit._stages.modules import dynamic as modules
from bucketjit._stages.warmup import WarmupReport, check_options, warm_up
from bucketjit.errors import ArtifactError, ExportError


class Loaded(Served[..., Any]):
    """A function that was saved by `BucketedExec.save`, served without its source.

    It is called like the bucketed function that was saved, without static arguments, and takes
    every size up to its largest buckets. A bucket is compiled when a call first needs it. Inside
    ``jax.jit`` it is padded for the sizes of the traced call; ``jax.grad`` works as often as
    derivatives were saved; ``jax.vmap`` and `map` run it once for each example. Calling it from
    several threads is safe.

    Its other methods are those of `BucketedExec` about the cache, compiles, statistics and events,
    and `explain`, which tells what was masked when the function was saved.

    Args:
        functions: The function, and its pullbacks.
        changes: The options that the user has changed.
    """

    _equations = staticmethod(lambda program, bucket: program.record.masked)

    def __init__(
        self, functions: tuple[LoadedFunction, ...], changes: Mapping[str, Any] | None = None
    ) -> None:
        self._functions = functions
        self._changes = dict(changes or {})
        self._engine = first = functions[0].engine(**self._changes)
        others = (function.engine(first.shared, **self._changes) for function in functions[1:])
        self._config = first.config
        self._fast_path = self._engine.memory.fast_path
        self._of_copies = None
        self._in_places = functions[0].by_position
        self._transformed = Transformed(functions, [first, *others])
        self.__name__ = functions[0].record.name

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} cannot be pickled: its executables are those of this process; send its path "
            "and load it where it is needed"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._with()

    def _with(self, **changes: object) -> Self:
        return type(self)(self._functions, {**self._changes, **changes})

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the function; see `BucketedExec.__call__`.

        Args:
            *args: Its positional arguments, without static ones.
            **kwargs: Its keyword arguments. What was saved as a positional argument may be given by
                name.

        Returns:
            What the function returns.

        Raises:
            ArgumentError: An argument is not what the function was saved for.
            SizeMismatchError: The sizes of the arguments contradict each other.
            BucketOverflowError: No saved bucket holds the sizes.
            ArtifactError: No saved program serves the sizes, or the file is not for this platform.
            ShapeCheckError: At these sizes an array cannot be reshaped as the function does.
        """
        if kwargs:
            args, kwargs = self._in_places(args, kwargs)
        return super().__call__(*args, **kwargs)

    def _inside(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self._transformed.call(args, kwargs)

    @property
    def path(self) -> str:
        """The file."""
        return str(self._functions[0].source.path)

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platforms that it can be compiled for."""
        return self._functions[0].source.manifest.platforms

    @property
    def buckets(self) -> tuple[dict[str, int], ...]:
        """The padded sizes of each bucket, in the order in which they were saved."""
        return tuple(
            {v: bucket.sizes.get(v, 0) for v in self._functions[0].variables}
            for program in self._functions[0].programs
            for bucket in program.record.buckets
        )

    @property
    def signature(self) -> dict[str, str]:
        """The type of each argument by its path, such as ``{"x": "float32[b, 8]"}``."""
        return {leaf.path: str(leaf) for leaf in self._functions[0].arguments.facts.leaves}

    @boundary
    def warmup(
        self,
        *,
        sizes: Any = None,
        workers: int | None = None,
        time_budget: float | None = None,
        progress: bool = True,
    ) -> WarmupReport:
        """Compile buckets before calls need them; see `BucketedExec.warmup`.

        Args:
            sizes: Sizes of the calls, in any form that `BucketedExec.warmup` takes; by default all
                buckets.
            workers: Number of threads that compile.
            time_budget: Seconds after which no further compile begins.
            progress: Whether to show progress on standard error.

        Returns:
            What was compiled.

        Raises:
            SpecError: An option is malformed.
        """
        check_options(workers, time_budget, progress=progress)
        function, engine = self._functions[0], self._engine
        wanted = list(self.buckets) if sizes is None else sizes
        args, kwargs = function.like(self.buckets[0])
        call = engine.signer.sign(args, kwargs, structs=True)
        return warm_up(engine, call, wanted, workers, time_budget, progress)

    def __repr__(self) -> str:
        name = self._functions[0].record.name
        arguments = ", ".join(f"{path}: {kind}" for path, kind in list(self.signature.items())[:4])
        more = ", ..." if len(self.signature) > 4 else ""
        buckets = counted(len(self.buckets), "bucket")
        size = counted(len(self._engine.cache), "executable")
        return one_line(f"<Loaded {name}({arguments}{more}), {buckets}, {size}>")


def load(
    path: str | os.PathLike[str],
    *,
    trust_executables: bool = False,
    key: str | bytes | None = None,
    compile_budget: CompileBudget | int | None = None,
) -> Loaded:
    """Load a function that `BucketedExec.save` has saved. Its source is not needed.

    Nothing in the file is run when it is loaded, and no pickle is read. Every member is compared
    with its digest. A module may use the operations of StableHLO, and of custom calls only those
    that JAX promises to keep stable, so it cannot call into Python.

    Args:
        path: The file.
        trust_executables: Whether to run machine code, and kernels of accelerators, that the file
            has. Do so for files of your own only. Executables of another machine or of other
            versions are not used.
        key: The secret that the file was signed with; without one no signature is looked at.
        compile_budget: How much may be compiled, as for `BucketedExec`.

    Returns:
        The function.

    Raises:
        ArtifactError: The file is damaged, was altered, is of a later format, or is not to be
            trusted; the message names the member.
        MissingExtraError: flatbuffers is not installed; the extra ``export`` installs it.
        SpecError: ``key`` or ``trust_executables`` is of a wrong type.
        OSError: The file cannot be read.

    Examples:
        See `BucketedExec.save`.
    """
    flag("trust_executables", trust_executables)
    archive = Archive(path, key)
    manifest = archive.manifest
    least = jax.export.minimum_supported_calling_convention_version
    most = jax.export.maximum_supported_calling_convention_version
    if not least <= manifest.calling_convention <= most:
        raise ArtifactError(
            f"{archive.path}: its modules have the calling convention "
            f"{manifest.calling_convention} of JAX {manifest.versions.get('jax')}, and JAX "
            f"{jax.__version__} reads {least} to {most}; load it with a JAX of about the same age"
        )
    source = Source(archive, trust_executables)
    if not (manifest.functions and manifest.platforms):
        raise ArtifactError(f"{path}: it has no function, or is for no platform; it was altered")
    functions = tuple(LoadedFunction(source, record) for record in manifest.functions)
    archive.close()
    return Loaded(functions, {"budget": budget_of(compile_budget)})


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
