"""The bodies of kernels from the modules of a file, and executables that the file has."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from bucketjit._artifact.saved_program import LoadedProgram
from bucketjit._compile.argument_types import without_values
from bucketjit._compile.bodies import Options
from bucketjit._compile.executable import Executable, Pads, SignatureChanged
from bucketjit._compile.files.environment import environment
from bucketjit._compile.files.fingerprint import Digest, NoDigest
from bucketjit._compile.files.keys import device_of
from bucketjit._compile.kernel import (
    Kernel,
    WithConstants,
    exact_kernel,
    kernel,
    with_type_of_counts,
)
from bucketjit._compile.transform import Body, Transform
from bucketjit._compile.workarounds import Workarounds
from bucketjit._config import Config
from bucketjit._events import shown
from bucketjit._ir.interface import Interface
from bucketjit._jax.arrays import with_type
from bucketjit._jax.jaxprs import shaped
from bucketjit._jax.serialization import Placement, deserialized, loaded_function
from bucketjit._raised import is_of_machine
from bucketjit._tracing.call import Call
from bucketjit.errors import ArtifactError

_OF_BACKENDS = {"gpu": "cuda"}  # what JAX calls platforms of devices, and of modules


class SavedBodies:
    """The bodies of a function that was saved in a file: the modules of its buckets."""

    def __init__(self, config: Config, rules: object) -> None:
        self._check = config.check

    def workarounds(self, program: Interface) -> Workarounds:
        """See `bucketjit._compile.bodies.Bodies`. What hooks add is in the modules already."""
        assert isinstance(program, LoadedProgram)
        return program.workarounds

    def in_bucket(
        self,
        call: Call,
        bucket: Mapping[str, int],
        transform: Transform,
        options: Options,
    ) -> Callable[[], Kernel]:
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

        def made() -> Kernel:
            _check_platform(program, call)
            of_xla = options(program.workarounds.options())
            given = call, record.sizes, pads, self._check, of_xla
            return kernel(transform, body, *given, program.constants)

        return made

    def exact(self, call: Call, sizes: Mapping[str, int], options: Options) -> Callable[[], Kernel]:
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

        def made() -> Kernel:
            of_xla = options(program.workarounds.options())
            return exact_kernel(call, run, sizes, call.donate, of_xla, program.constants)

        return made

    def place(
        self,
        files: object,
        call: Call,
        bucket: Mapping[str, int],
        transform: Transform | None,
        made: Callable[[], Kernel],
    ) -> InFile | None:
        """See `bucketjit._compile.bodies.Bodies`."""
        return None if transform is None else InFile(made, bucket)


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
    except NoDigest:  # on several devices; JAX says why that does not work
        return
    platform = _OF_BACKENDS.get(device.platform, device.platform)
    saved = program.source.manifest.platforms
    if platform not in saved:
        raise ArtifactError(
            f"{program.source.path}: it was saved for {', '.join(saved)}, and the call runs on "
            f"{platform}; save it with platforms=[..., {platform!r}]"
        )


def environment_digest(device: jax.Device) -> str:
    """A digest of what an executable for a device depends on besides its program."""
    return Digest().add(sorted(environment(device).items())).hexdigest()[:32]


class InFile:
    """The place of a bucket's executable in the file."""

    def __init__(self, made: Callable[[], Kernel], sizes: Mapping[str, int]) -> None:
        self._make = made
        self._sizes = sizes

    def load(self) -> Executable | None:
        """The executable; None if the file has none for this machine and these versions."""
        began = time.perf_counter()
        made = self._make()
        program = made.call.program
        assert isinstance(program, LoadedProgram)
        bucket = program.bucket(self._sizes)
        if not bucket.executables or not program.source.executables:
            return None
        leaves = jax.tree_util.tree_leaves((program.constants, made.types, made.kwargs))
        try:
            placement = Placement.on(device_of(leaves))
            member, kept = bucket.executables[environment_digest(placement.device)]
            xla = deserialized(program.source.executables[member], placement)
        except Exception as error:  # its module can be compiled in its place
            if is_of_machine(error):
                raise
            return None
        outs, tree = with_type_of_counts(
            program,
            [
                shaped(jax.ShapeDtypeStruct(shape, dtype, weak_type=weak))
                for shape, (dtype, weak) in zip(bucket.results, program.out_types, strict=False)
            ],
        )

        def check(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            made.expected.check(args[2:], dict(kwargs))
            if isinstance(args[1], tuple) is not isinstance(made.sizes, tuple):
                raise SignatureChanged

        check((None, *made.types), made.kwargs)
        function, compiled = loaded_function(
            xla,
            kept,
            f"jit({made.function.__name__})",
            [jax.typeof(x) for x in leaves],
            outs,
            tree,
            placement,
            check,
            made.function.function,
            lambda error: None,
        )
        whole = WithConstants(function, program.constants)
        return made.executable(whole, compiled, outs, began, loaded=True)

    def save(self, entry: Executable) -> None:
        """Nothing: the file is not written to."""
