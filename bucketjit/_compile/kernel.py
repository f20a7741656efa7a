"""A kernel: the function that is compiled, for one bucket or for one exact shape.

    kernel = transform(body)

A *body* computes results at padded sizes: a masked program (`bucketjit._compile.bodies`), or a
module of a file. A *transform* says what a kernel takes: one call (`Transform`), rows of examples
(`bucketjit._compile.rows`), or the rows of all shards (`bucketjit._processes.build_shards`). At an
exact shape the kernel is the function itself.

Each kernel has its own ``jit`` object: JAX frees the executables of a shared one only when the
object itself is freed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bucketjit._compile.argument_types import ONE, Body, Expected, Transform, abstract, placement_of
from bucketjit._compile.executable import Executable, OpenOut, Pads
from bucketjit._config import Check
from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._ir.expressions import is_symbolic, shape_function
from bucketjit._ir.interface import Interface
from bucketjit._ir.jax_patches import forgetful_jax, selecting_jax
from bucketjit._jax.arrays import platforms_of, traced_for
from bucketjit._jax.compiler import compile_here, is_defect_of_xla, reused_arguments
from bucketjit._jax.jaxprs import shaped
from bucketjit._jax.serialization import Placement, loaded_function
from bucketjit._jax.tracebacks import as_user_code, traced_anew
from bucketjit._raised import in_one_line
from bucketjit._tracing.call import Call
from bucketjit.errors import MaskingError


class Kernel(NamedTuple):
    """A jitted function and the types to lower it for; not compiled yet.

    Attributes:
        function: The jitted function. It takes the sizes, unless it is exact, then the arguments.
        args, kwargs: The argument types to lower it for.
        expected: Raises for arguments of other types.
        options: Options of XLA.
        donated: Positions of the donated arguments.
        bucket: The sizes that it is compiled for: those of its bucket, or of the exact shape.
        call: The call that needs it, without its arrays.
        sizes: The type of the sizes; None if the kernel is exact.
        padded_sizes: The padded sizes; None if the kernel is exact.
        pads, size_constant_shapes: See `Executable`.
        transform: What the kernel takes.
        lowered: What it was lowered to; None if it is still to be lowered.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: Expected
    options: Mapping[str, Any]
    donated: frozenset[int]
    bucket: Mapping[str, int]
    call: Call
    sizes: Any = None
    padded_sizes: BucketSizes | None = None
    pads: Pads = ()
    size_constant_shapes: tuple[tuple[int, ...], ...] = ()
    transform: Transform | None = None
    lowered: Any = None

    @property
    def is_exact(self) -> bool:
        return self.padded_sizes is None

    @property
    def types(self) -> tuple[Any, ...]:
        """All positional arguments to lower the function for, the sizes first."""
        return self.args if self.is_exact else (self.sizes, *self.args)

    @property
    def leaves(self) -> list[Any]:
        return jax.tree_util.tree_leaves((self.types, self.kwargs))

    def placement(self) -> Placement:
        return placement_of(self.leaves, self.call.signature.shardings)

    def results(self) -> tuple[list[Any], Any]:
        """The types of the results, with the counts if there are any, and their tree; untraced."""
        program = self.call.program
        assert self.transform is not None and self.padded_sizes is not None and program is not None
        outs = list(map(shaped, self.transform.results(program, self.padded_sizes)))
        info = program.out_tree.unflatten(outs)
        if program.counts:
            counts = shaped(jax.ShapeDtypeStruct((len(program.counts),), jnp.int32))
            outs, info = [*outs, counts], (info, counts)
        return outs, info

    def as_lowered(self) -> Kernel:
        if self.lowered is not None:
            return self
        around: tuple[Any, Any] = selecting_jax(), traced_anew()
        if not self.is_exact:
            alone = self.call.signature.target is not None
            around = _refusing_defects(), traced_for(platforms_of(self.leaves), alone)
        with forgetful_jax(), around[0], around[1]:  # a trace that fails must not be kept
            return self._replace(lowered=self.function.lower(*self.types, **self.kwargs))

    def build(self) -> Executable:
        """Compile the kernel, and lower it first if that is still to be done."""
        began = time.perf_counter()
        lowered = self.as_lowered().lowered
        with _refusing_defects() if not self.is_exact else nullcontext():
            compiled = compile_here(lowered)
        return self.executable(self.function, compiled, lowered.out_info, began)

    def executable(
        self, function: Any, compiled: Any, results: Any, began: float, loaded: bool = False
    ) -> Executable:
        """The kernel as an entry of the cache, compiled or loaded."""
        call, program = self.call, None if self.is_exact else self.call.program
        leaves, tree = jax.tree_util.tree_flatten(results)
        outs: tuple[OpenOut, ...] = ()
        if program is not None:
            tree, variables = program.out_tree, (*call.variables, *program.counts)
            outs = tuple(
                OpenOut(i, shape_function(shape, variables), tuple(leaves[i].shape), weak)
                for i, (shape, (_, weak)) in enumerate(
                    zip(program.out_shapes, program.out_types, strict=True)
                )
                if any(map(is_symbolic, shape))
            )
        transform = self.transform or ONE
        entry = Executable(
            sizes=dict(self.bucket),
            exact=self.is_exact,
            function=function,
            compiled=compiled,
            compile_seconds=time.perf_counter() - began,
            out_tree=tree,
            compiles=self.function,
            pads=self.pads,
            outs=outs,
            size_constant_shapes=self.size_constant_shapes,
            reused_leaves=self._reused_leaves(compiled),
            constant_bytes=0 if program is None else program.constant_bytes,
            loaded=loaded,
            origin=call,
            counted=program if program is not None and program.counts else None,
            rows=transform.count,
            in_turn=transform.in_turn,
            placed=call.signature.placed,
        )
        if not loaded:
            entry.expect(jax.tree_util.tree_leaves((self.args, self.kwargs)))
        return entry

    def _reused_leaves(self, compiled: Any) -> frozenset[int]:
        """The leaves with open axes whose memory, or that of their copies, results take."""
        if self.transform is None or not self.donated:
            return frozenset()
        shared = self.function.constants if isinstance(self.function, WithConstants) else ()
        front = len(jax.tree_util.tree_leaves((shared, self.sizes)))
        leaves, opened = self.transform.leaves(self.call), {i for i, _ in self.pads}
        return frozenset(leaves[i - front] for i in reused_arguments(compiled)) & opened


@contextmanager
def _refusing_defects() -> Iterator[None]:
    """A context that raises defects of XLA and JAX as refusals of one bucket."""
    try:
        yield
    except Exception as error:
        if not is_defect_of_xla(error):
            raise
        raise MaskingError(
            f"the masked program does not compile: {in_one_line(error)}",
            "leave the axis static, or write that part in another way",
            in_bucket=True,
        ) from error


def kernel(
    transform: Transform,
    body: Callable[[Sequence[Any]], Body],
    call: Call,
    bucket: Mapping[str, int],
    pads: Pads,
    check: Check,
    options: Mapping[str, Any],
    constants: list[Any] | None = None,
) -> Kernel:
    """The kernel of a bucket. Nothing is traced."""
    program, kinds = call.program, call.signature.types
    assert program is not None
    is_poisoned = check is Check.POISON
    pads = transform.pads(call, pads)
    opened, positions = dict(pads), transform.leaves(call)
    expected = Expected({k for k, i in enumerate(positions) if i in opened})
    are_arrays = [kinds[i].dtype is not None for i in positions]
    leaves_of = [i for i, is_array in zip(positions, are_arrays, strict=True) if is_array]

    def run(shared: Sequence[Any], args: tuple[Any, ...], named: Any) -> Any:
        leaves = expected.check(args[1:], named)
        arrays = [x for x, is_array in zip(leaves, are_arrays, strict=True) if is_array]
        transformed = transform.run(body(shared), program, leaves_of, opened)
        return with_counts(program, transformed(args[0], arrays, is_poisoned))

    padded_sizes = program.sizes_in(bucket)
    shapes = tuple(map(padded_sizes.padded_shape, program.size_constant_shapes))
    # A call whose results are dropped runs eagerly, so its run must not lose an argument.
    keeps_all = check is not Check.OFF or program.presumed
    donated = frozenset(() if keeps_all else transform.donated(call, opened))
    args, kwargs = transform.types(call, opened)
    name = getattr(call.signature.fn, "__name__", "masked").replace(" ", "_")
    outs = transform.results(program, padded_sizes)
    padded = [opened.get(i, shape) for i, shape in enumerate(call.shapes)]
    placed = call.signature.shardings.options(call.tree, padded, program, outs)
    return Kernel(
        function=jitted(run, name, [1 + i for i in donated], options, constants, **placed),
        args=args,
        kwargs=kwargs,
        expected=expected,
        options=options,
        donated=donated,
        bucket=transform.bucket(bucket),
        call=call,
        sizes=transform.sizes(call, shapes, 0 if is_poisoned else None),
        padded_sizes=padded_sizes,
        pads=pads,
        size_constant_shapes=shapes,
        transform=transform,
    )


def exact_kernel(
    call: Call,
    run: Callable[[Sequence[Any], list[Any], Any], Any],
    sizes: Mapping[str, int],
    donated: Sequence[int],
    options: Mapping[str, Any],
    constants: list[Any] | None = None,
) -> Kernel:
    """The kernel of an exact shape. Nothing is traced."""
    expected = Expected(set())
    args, kwargs = call.tree.unflatten(abstract(call, {}))

    def exact(shared: Sequence[Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        leaves = expected.check(args, named)
        return run(shared, leaves, jax.tree_util.tree_structure((args, named)))

    fn, placed = call.signature.fn, call.signature.shardings.options(call.tree, call.shapes)
    if constants is None:
        as_user_code(exact, fn, args, kwargs)
    return Kernel(
        function=jitted(
            exact, getattr(fn, "__name__", "exact"), donated, options, constants, **placed
        ),
        args=args,
        kwargs=kwargs,
        expected=expected,
        options=options,
        donated=frozenset(donated),
        bucket=dict(sizes),
        call=call,
    )


def jitted(
    run: Callable[[Sequence[Any], tuple[Any, ...], dict[str, Any]], Any],
    name: str,
    donated: Sequence[int],
    options: Mapping[str, Any],
    constants: list[Any] | None,
    **shardings: Any,
) -> Any:
    """A function under ``jit``, with shared constants as a further first argument if it has any."""

    # JAX takes a keyword argument of the user's for this one if it has the same name.
    def function(*_args: Any, **named: Any) -> Any:
        return run(_args[0], _args[1:], named) if front else run((), _args, named)

    front = 0 if constants is None else 1
    function.__name__ = name
    vars(function).update(vars(run))  # how JAX names the function and its arguments
    donate = tuple(front + i for i in sorted(donated))
    jitted_function = jax.jit(
        function, donate_argnums=donate, compiler_options=dict(options), **shardings
    )
    return jitted_function if constants is None else WithConstants(jitted_function, constants)


class WithConstants:
    """A jitted function whose first argument is given: the constants, which all buckets share."""

    def __init__(self, function: Any, constants: list[Any]) -> None:
        self.function = function
        self.constants = constants
        self.__name__ = getattr(function, "__name__", "saved")

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.function(self.constants, *args, **kwargs)

    def inlined(self, *args: object, **kwargs: object) -> Any:
        """Call it as a part of what is traced, where a ``jit`` of its own takes no options."""
        return self.function.__wrapped__(self.constants, *args, **kwargs)

    def lower(self, *args: object, **kwargs: object) -> Any:
        """Lower the function for some argument types, as ``jax.jit`` does."""
        return self.function.lower(self.constants, *args, **kwargs)

    def _cache_size(self) -> int:
        """How many argument signatures it knows; see `bucketjit._jax.compiler`."""
        return self.function._cache_size()


def with_counts(program: Interface, outs: Sequence[Any]) -> Any:
    """What an executable returns: the tree of the results, with the counts if there are any."""
    results = program.out_tree.num_leaves
    tree = program.out_tree.unflatten(outs[:results])
    if not program.counts:
        return tree
    return tree, jnp.stack([jnp.asarray(n, jnp.int32) for n in outs[results:]])


def loaded(
    kernel: Kernel,
    xla: object,
    kept: Sequence[int],
    results: tuple[list[Any], Any],
    placement: Placement,
    specs: Sequence[Sequence[Any]] | None,
    failed: Callable[[Exception], None],
    began: float,
) -> Executable:
    """The entry of a kernel whose executable was read from bytes; it takes the arguments ``kept``.

    It is never traced, so its calls are compared with the types of the kernel. ``failed`` is called
    if it does not run.
    """
    function, expected, (outs, info) = kernel.function, kernel.expected, results
    expected.check(kernel.args, kernel.kwargs)
    shared = function.constants if isinstance(function, WithConstants) else None
    front = (shared is not None) + (not kernel.is_exact)

    def check(operands: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        expected.check(operands[front:], dict(named))

    called, compiled = loaded_function(
        xla,
        kept,
        f"jit({function.__name__})",
        [jax.typeof(x) for x in (*jax.tree_util.tree_leaves(shared), *kernel.leaves)],
        outs,
        jax.tree_util.tree_structure(info),
        placement,
        specs,
        check,
        function if shared is None else function.function,
        failed,
    )
    whole = called if shared is None else WithConstants(called, shared)
    return kernel.executable(whole, compiled, info, began, loaded=True)
