"""The bodies of kernels from the modules of a file, and executables that the file has."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from bucketjit._artifact.saved_program import LoadedProgram
from bucketjit._compile.argument_types import Body, Transform, device_of, without_values
from bucketjit._compile.bodies import Options
from bucketjit._compile.executable import Executable, Pads
from bucketjit._compile.files.environment import environment
from bucketjit._compile.files.fingerprint import digest
from bucketjit._compile.kernel import Kernel, exact_kernel, kernel, loaded
from bucketjit._compile.workarounds import Workarounds
from bucketjit._config import Config
from bucketjit._events import shown
from bucketjit._ir.interface import Interface
from bucketjit._jax.arrays import with_type
from bucketjit._jax.serialization import NotPlain, Placement, deserialized
from bucketjit._raised import is_of_machine
from bucketjit._tracing.call import Call
from bucketjit.errors import ArtifactError

OF_BACKENDS = {"gpu": "cuda"}  # what JAX calls platforms of devices, and of modules


class SavedBodies:
    """The bodies of a function that was saved in a file: the modules of its buckets."""

    def __init__(self, config: Config, rules: object) -> None:
        self._check = config.check

    def workarounds(self, program: Interface) -> Workarounds:
        """See `bucketjit._compile.bodies.Bodies`. What hooks add is in the modules already."""
        assert isinstance(program, LoadedProgram)
        return program.workarounds

    def in_bucket(
        self, call: Call, bucket: Mapping[str, int], transform: Transform, options: Options
    ) -> Kernel:
        """See `bucketjit._compile.bodies.Bodies`."""
        program = call.program
        assert isinstance(program, LoadedProgram)
        record = program.bucket(bucket)
        arrays = [i for i, kind in enumerate(call.signature.types) if kind.dtype is not None]
        opened = call.signature.open_leaves(call.tokens)
        shapes = zip(arrays, record.arguments, strict=True)
        pads: Pads = tuple((i, shape) for i, shape in shapes if i in opened)

        def body(shared: Sequence[Any]) -> Body:
            def run(
                vector: Any, constants: Sequence[Any], arrays: Sequence[Any], poison: object = None
            ) -> list[Any]:
                return _called(
                    program, record.module, list(shared), vector, list(constants), arrays
                )

            return run

        _check_platform(program, call)
        of_xla = options(program.workarounds.options())
        given = call, record.sizes, pads, self._check, of_xla
        return kernel(transform, body, *given, program.constants)

    def exact(self, call: Call, sizes: Mapping[str, int], options: Options) -> Kernel:
        """See `bucketjit._compile.bodies.Bodies`; the module of all sizes serves these calls."""
        program = call.signature.resolve(call.shapes).program
        if not isinstance(program, LoadedProgram):
            raise ArtifactError(
                f"a call with {shown(sizes)}: a saved function takes no call in which all open "
                "axes are of size 0; call it with at least one element"
            )
        member = program.record.dynamic
        assert member is not None
        kinds = call.signature.types

        def run(shared: Sequence[Any], leaves: list[Any], tree: Any) -> Any:
            arrays = [x for x, kind in zip(leaves, kinds, strict=True) if kind.dtype is not None]
            return program.out_tree.unflatten(_called(program, member, list(shared), arrays))

        of_xla = options(program.workarounds.options())
        return exact_kernel(call, run, sizes, call.donate, of_xla, program.constants)

    def place(self, files: object, sizes: Mapping[str, int], make: Callable[[], Kernel]) -> InFile:
        """See `bucketjit._compile.bodies.Bodies`."""
        return InFile(sizes, make)


def _called(program: LoadedProgram, member: str, *args: Any) -> list[Any]:
    """The results of a module, with the types of the program; then the counts."""
    outs = program.source.modules[member].call(*args)
    types = program.out_types
    typed = [with_type(x, d, weak) for x, (d, weak) in zip(outs, types, strict=False)]
    return [*typed, *outs[len(types) :]]


def _check_platform(program: LoadedProgram, call: Call) -> None:
    """Refuse a call on a platform that the file has no modules for, before anything is compiled."""
    try:
        device = device_of(without_values(call).leaves)
    except NotPlain:  # on several devices; JAX says why that does not work
        return
    platform = OF_BACKENDS.get(device.platform, device.platform)
    saved = program.source.manifest.platforms
    if platform not in saved:
        raise ArtifactError(
            f"{program.source.path}: it was saved for {', '.join(saved)}, and the call runs on "
            f"{platform}; save it with platforms=[..., {platform!r}]"
        )


def environment_digest(device: jax.Device) -> str:
    """A digest of what an executable for a device depends on besides its program."""
    return digest(sorted(environment(device).items()))[:32]


class InFile:
    """The place of a bucket's executable in the file."""

    def __init__(self, sizes: Mapping[str, int], make: Callable[[], Kernel]) -> None:
        self._sizes, self._make = sizes, make

    def load(self) -> Executable | None:
        """The executable; None if the file has none for this machine and these versions."""
        began, made = time.perf_counter(), self._make()
        program = made.call.program
        if made.is_exact:
            return None
        assert isinstance(program, LoadedProgram)
        bucket = program.bucket(self._sizes)
        if not bucket.executables or not program.source.executables:
            return None
        try:
            placement = Placement.on(device_of([*program.constants, *made.leaves]))
            member, kept = bucket.executables[environment_digest(placement.device)]
            xla = deserialized(program.source.executables[member], placement)
        except Exception as error:  # its module can be compiled in its place
            if is_of_machine(error):
                raise
            return None
        return loaded(made, xla, kept, made.results(), placement, lambda error: None, began)

    def save(self, entry: Executable) -> None:
        """Nothing: the file is not written to."""
