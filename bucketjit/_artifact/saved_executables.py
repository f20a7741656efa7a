"""The bodies of kernels from the modules of a file, and executables that the file has."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bucketjit._artifact.manifest import Bucket
from bucketjit._artifact.saved_program import LoadedProgram, Source
from bucketjit._compile.argument_types import without_values
from bucketjit._compile.bodies import Options
from bucketjit._compile.executable import Executable, Pads, SignatureChanged
from bucketjit._compile.files.keys import device_of
from bucketjit._compile.kernel import (
    Body,
    Kernel,
    Transform,
    WithConstants,
    exact_kernel,
    kernel,
    with_type_of_counts,
)
from bucketjit._config import Config
from bucketjit._events import shown
from bucketjit._jax.arrays import with_type
from bucketjit._jax.jaxprs import shaped
from bucketjit._jax.serialization import Placement, deserialized, loaded_function
from bucketjit._persistence.environment import environment
from bucketjit._persistence.fingerprint import Digest, NoDigest
from bucketjit._raised import is_of_machine
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall
from bucketjit._tracing.interface import Interface
from bucketjit._xla_defects.workarounds import Workarounds
from bucketjit.errors import ArtifactError

_OF_BACKENDS = {"gpu": "cuda"}  # what JAX calls platforms of devices, and of modules


class SavedBodies:
    """The bodies of a function that was saved in a file: the modules of its buckets."""

    def __init__(self, config: Config, rules: object) -> None:
        self._check = config.check
        self._workarounds: dict[Interface, Workarounds] = {}

    def workarounds(self, program: Interface) -> Workarounds:
        """See `bucketjit._compile.bodies.Bodies`. What hooks add is in the modules already."""
        assert isinstance(program, LoadedProgram)
        if program not in self._workarounds:
            self._workarounds[program] = Workarounds(program.record.avoids_reductions)
        return self._workarounds[program]

    def in_bucket(
        self,
        signed: SignedCall,
        call: ResolvedCall,
        bucket: Mapping[str, int],
        transform: Transform,
        options: Options,
    ) -> Callable[[], Kernel]:
        """See `bucketjit._compile.bodies.Bodies`."""
        program = call.program
        assert isinstance(program, LoadedProgram)
        record, needed = program.bucket(bucket), self.workarounds(program)
        pads = _pads(signed, call, record)

        def made() -> Kernel:
            _check_platform(program.source, signed)
            module = program.source.module(record.module)
            _check_module(program, record, module)

            def body(shared: Sequence[Any]) -> Body:
                return functools.partial(_call_module, module, program, shared)

            given = signed, call, record.sizes, pads, self._check
            return kernel(transform, body, *given, options(needed.options()), program.constants)

        return made

    def exact(
        self, signed: SignedCall, sizes: Mapping[str, int], options: Options
    ) -> Callable[[], Kernel]:
        """See `bucketjit._compile.bodies.Bodies`; the module of all sizes serves these calls."""
        if any(n < 1 for n in sizes.values()):
            raise ArtifactError(
                f"a call with {shown(sizes)}: a saved function takes no call in which all open "
                "axes are of size 0; call it with at least one element"
            )
        program = signed.signature.resolve(signed.shapes).program
        assert isinstance(program, LoadedProgram) and program.record.dynamic is not None
        module = program.source.module(program.record.dynamic)
        is_size = [kind.dtype is None for kind in signed.signature.types]

        def run(shared: Sequence[Any], leaves: list[Any], tree: Any) -> Any:
            arrays = [x for x, size in zip(leaves, is_size, strict=True) if not size]
            typed = zip(module.call(list(shared), arrays), program.out_types, strict=True)
            return program.out_tree.unflatten([with_type(x, d, weak) for x, (d, weak) in typed])

        def made() -> Kernel:
            of_xla = options(self.workarounds(program).options())
            return exact_kernel(signed, run, sizes, signed.donate, of_xla, program.constants)

        return made

    def place(
        self,
        files: object,
        signed: SignedCall,
        bucket: Mapping[str, int],
        transform: Transform | None,
        made: Callable[[], Kernel],
    ) -> InFile | None:
        """See `bucketjit._compile.bodies.Bodies`."""
        return None if transform is None else InFile(made, bucket)


def _call_module(
    module: Any,
    program: LoadedProgram,
    shared: Sequence[Any],
    vector: Any,
    constants: Sequence[Any],
    arrays: Sequence[Any],
    poison: object = None,
) -> list[Any]:
    """The results of a module at padded sizes, with the types of the program; then its counts."""
    outs = module.call(list(shared), vector, list(constants), list(arrays))
    count = len(program.out_types)
    typed = zip(outs[:count], program.out_types, strict=True)
    return [*(with_type(x, d, weak) for x, (d, weak) in typed), *outs[count:]]


def _pads(signed: SignedCall, call: ResolvedCall, bucket: Bucket) -> Pads:
    """Position and padded shape of each leaf with open axes."""
    padded = iter(bucket.arguments)
    shapes = [None if kind.dtype is None else next(padded) for kind in signed.signature.types]
    opened = set(signed.signature.open_leaves(call.tokens))
    return tuple((i, s) for i, s in enumerate(shapes) if s is not None and i in opened)


def _check_platform(source: Source, signed: SignedCall) -> None:
    """Refuse a call on a platform that the file has no modules for, before anything is compiled."""
    try:
        device = device_of(without_values(signed).leaves)
    except NoDigest:  # on several devices; JAX says why that does not work
        return
    platform = _OF_BACKENDS.get(device.platform, device.platform)
    saved = source.archive.manifest.platforms
    if platform not in saved:
        raise ArtifactError(
            f"{source.archive.path}: it was saved for {', '.join(saved)}, and the call runs on "
            f"{platform}; save it with platforms=[..., {platform!r}]"
        )


def _check_module(program: LoadedProgram, bucket: Bucket, module: Any) -> None:
    """Refuse a module whose arguments or results are not those that the manifest tells of."""
    place = f"{program.source.archive.path}: {bucket.module}"
    constants = [tuple(x.shape) for x in program.constants]
    sizes = [(len(program.record.variables),)]
    given = [tuple(a.shape) for a in module.in_avals]
    by_size = len(program.size_constant_shapes)
    begin, end = [*constants, *sizes], list(bucket.arguments)
    outs = [(tuple(a.shape), a.dtype) for a in module.out_avals]
    dtypes = [dtype for dtype, _ in program.out_types]
    dtypes += [np.dtype(np.int32)] * len(program.counts)
    told = list(zip(bucket.results, dtypes, strict=True))
    fits = (
        len(given) == len(begin) + by_size + len(end)
        and given[: len(begin)] == begin
        and given[len(given) - len(end) :] == end
        and outs == told
    )
    if not fits:
        raise ArtifactError(
            f"{place}: its arguments or results are not those of the manifest; the file is damaged "
            "or was altered"
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
        program = None if made.call is None else made.call.program
        assert isinstance(program, LoadedProgram)
        bucket = program.bucket(self._sizes)
        if not bucket.executables:
            return None
        leaves = jax.tree_util.tree_leaves(
            (made.function.constants, made.sizes, made.args, made.kwargs)
        )
        try:
            device = device_of(leaves)
        except Exception:  # its arguments are on several devices
            return None
        found = bucket.executables.get(environment_digest(device))
        if found is None:
            return None
        member, kept = found
        raw = program.source.executable(member)
        if raw is None:
            return None
        try:
            xla = deserialized(raw, Placement.on(device))
        except Exception as error:  # its module can be compiled in its place
            if is_of_machine(error):
                raise
            return None
        outs = [
            shaped(jax.ShapeDtypeStruct(shape, dtype, weak_type=weak))
            for shape, (dtype, weak) in zip(bucket.results, program.out_types, strict=False)
        ]
        outs, tree = with_type_of_counts(program, outs)

        def check(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            made.expected.check(args[2:], dict(kwargs))
            if type(args[1]) is not type(made.sizes) and isinstance(made.sizes, tuple):
                raise SignatureChanged

        check((None, made.sizes, *made.args), made.kwargs)
        function, compiled = loaded_function(
            xla,
            kept,
            f"jit({made.function.__name__})",
            [jax.typeof(x) for x in leaves],
            outs,
            tree,
            Placement.on(device),
            check,
            made.function.function,
            lambda error: None,
        )
        whole = WithConstants(function, made.function.constants)
        return made.executable(whole, compiled, outs, began, loaded=True)

    def save(self, entry: Executable) -> None:
        """Nothing: the file is not written to."""
