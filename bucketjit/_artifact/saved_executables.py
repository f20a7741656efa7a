"""Build the executable of a bucket from its module, or take it from the file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from bucketjit._artifact.manifest import Bucket
from bucketjit._artifact.saved_program import LoadedProgram
from bucketjit._compile.argument_types import Expected, abstract
from bucketjit._compile.build import (
    Masked,
    donated_of,
    masked_executable,
    with_counts,
    with_type_of_counts,
)
from bucketjit._compile.executable import Executable, Origin, Pads, SignatureChanged, sizes_argument
from bucketjit._compile.files.keys import device_of
from bucketjit._jax.arrays import with_type
from bucketjit._jax.jaxprs import shaped
from bucketjit._jax.serialization import Placement, deserialized, loaded_function
from bucketjit._persistence.environment import environment
from bucketjit._persistence.fingerprint import Digest
from bucketjit._raised import is_of_machine
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall
from bucketjit._sizes.bucket_sizes import BucketSizes
from bucketjit.errors import ArtifactError


class WithConstants:
    """A jitted function whose first argument is given: the constants, which all buckets share.

    Args:
        function: The function.
        constants: Its first argument.
    """

    def __init__(self, function: Any, constants: list[Any]) -> None:
        self.function = function
        self.constants = constants
        self.__name__ = getattr(function, "__name__", "saved")

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.function(self.constants, *args, **kwargs)

    def lower(self, *args: object, **kwargs: object) -> Any:
        """Lower the function for some argument types, as ``jax.jit`` does."""
        return self.function.lower(self.constants, *args, **kwargs)

    def _cache_size(self) -> int:
        """How many argument signatures it knows; see `bucketjit._jax.compiler`."""
        return self.function._cache_size()


def saved_function(
    signed: SignedCall,
    call: ResolvedCall,
    bucket: Bucket,
    pads: Pads,
    options: Mapping[str, Any],
) -> Masked:
    """The function of a saved bucket, as `bucketjit._compile.build.build_masked` compiles it.

    Args:
        signed: The call that needs it.
        call: The same call, resolved.
        bucket: What the manifest says of the bucket.
        pads: Position and padded shape of each leaf with open axes.
        options: Options of XLA.

    Returns:
        The function and the types to lower it for.

    Raises:
        ArtifactError: Its module does not fit the manifest, or is not trusted.
    """
    program, signature = call.program, signed.signature
    assert isinstance(program, LoadedProgram)
    module = program.source.module(bucket.module)
    _check_module(program, bucket, module)
    expected = Expected({i for i, _ in pads})
    kinds = [(t.dtype, t.weak_type) for t in signature.types]

    def saved(constants: Any, sizes: Any, *args: object, **kwargs: object) -> Any:
        leaves = expected.check(args, kwargs)
        arrays = [x for x, (dtype, _) in zip(leaves, kinds, strict=True) if dtype is not None]
        vector, by_size = sizes if isinstance(sizes, tuple) else (sizes, ())
        outs = module.call(list(constants), vector, list(by_size), arrays)
        count = len(program.out_types)
        typed = zip(outs[:count], program.out_types, strict=True)
        made = [with_type(x, d, weak) for x, (d, weak) in typed]
        return with_counts(program, [*made, *outs[count:]])

    saved.__name__ = getattr(signature.fn, "__name__", "saved")
    static = BucketSizes(program.padded_sizes(bucket.sizes), program.lower, {})
    args, kwargs = signed.tree.unflatten(abstract(signed, dict(pads)))
    donated, donated_leaves = frozenset[int](), frozenset[int]()
    if not program.presumed:  # else a run may be repeated, and must not lose an argument
        donated, donated_leaves = donated_of(signed, dict(pads), program, static)
    size_constant_shapes = tuple(map(static.padded_shape, program.size_constant_shapes))
    jitted = jax.jit(
        saved,
        donate_argnums=tuple(i + 2 for i in sorted(donated)),
        compiler_options=dict(options),
    )
    return Masked(
        function=WithConstants(jitted, program.constants),
        sizes=sizes_argument(call, size_constant_shapes),
        args=args,
        kwargs=kwargs,
        expected=expected,
        at=static,
        call=call,
        origin=Origin(signed, call.tokens, call.sizes),
        bucket=bucket.sizes,
        pads=pads,
        size_constant_shapes=size_constant_shapes,
        donated=donated,
        donated_leaves=donated_leaves,
        options=options,
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
    """The place of a bucket's executable in the file.

    Args:
        made: Makes the function of the bucket.
        sizes: The padded sizes of the bucket.
    """

    def __init__(self, made: Callable[[], Masked], sizes: Mapping[str, int]) -> None:
        self._make = made
        self._sizes = sizes

    def load(self) -> Executable | None:
        """The executable; None if the file has none for this machine and these versions."""
        began = time.perf_counter()
        made = self._make()
        program = made.call.program
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
        shapes = [tuple(out.shape) for out in outs]
        return masked_executable(made, whole, compiled, shapes, began, loaded=True)

    def save(self, entry: Executable) -> None:
        """Nothing: the file is not written to.

        Args:
            entry: The executable.
        """

    def shared(self) -> None:
        """Nothing: each process compiles what the file lacks."""
