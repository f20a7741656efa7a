"""Build the executable of a bucket: one jitted function, lowered and compiled.

Each bucket has its own ``jit`` object: JAX frees the executables of a shared one only when the
object itself is freed. `bucketjit._compile.build_exact` does the same for exact shapes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bucketjit._compile.argument_types import Expected, abstract, to_donate
from bucketjit._compile.executable import Executable, OpenOut, Origin, Pads, sizes_argument
from bucketjit._compile.rows import Rows
from bucketjit._config import Check
from bucketjit._ir.jax_patches import forgetful_jax
from bucketjit._jax.arrays import with_type
from bucketjit._jax.compiler import compile_here, is_defect_of_xla
from bucketjit._jax.jaxprs import shaped
from bucketjit._jax.names import REMEDY_OF_VERSIONS, trouble_of_versions
from bucketjit._masking.array_ops import select
from bucketjit._masking.checks import poison_equations
from bucketjit._masking.interpreter import Hook, interpret
from bucketjit._masking.rule_context import RuleTable
from bucketjit._raised import in_one_line, is_of_machine
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall
from bucketjit._sizes.bucket_sizes import BucketSizes
from bucketjit._sizes.expressions import is_symbolic, shape_function
from bucketjit._tracing.interface import Interface
from bucketjit._tracing.program import Program
from bucketjit._xla_defects.workarounds import hooks
from bucketjit.errors import MaskingError


class Masked(NamedTuple):
    """A program as a function of padded arguments, not yet compiled.

    Attributes:
        function: The jitted function.
        sizes, args, kwargs: The argument types to lower it for.
        expected: Raises for arguments of other types.
        at: The padded sizes.
        call: The call that needs it, resolved.
        origin: The same call, as `Executable` keeps it.
        bucket, pads, size_constant_shapes, donated_leaves: See `Executable` and `masked_function`.
        donated: Positions of the donated arguments.
        options: Options of XLA.
        rows: The examples that it takes at once; None if it takes one, not in a batch. See
            `bucketjit._compile.build_rows`.
    """

    function: Any
    sizes: Any
    args: Any
    kwargs: Any
    expected: Expected
    at: BucketSizes
    call: ResolvedCall
    origin: Origin
    bucket: Mapping[str, int]
    pads: Pads
    size_constant_shapes: tuple[tuple[int, ...], ...]
    donated: frozenset[int]
    donated_leaves: frozenset[int]
    options: Mapping[str, Any]
    rows: Rows | None = None


def masked_function(
    signed: SignedCall,
    call: ResolvedCall,
    bucket: Mapping[str, int],
    pads: Pads,
    rules: Callable[[], RuleTable],
    check: Check,
    options: Mapping[str, Any],
    after: Callable[[], Callable[[], Hook] | None] = lambda: None,
) -> Masked:
    """The function that `build_masked` compiles. Traces nothing.

    Args:
        signed: The call that needs it.
        call: The same call, resolved: its sizes and its program.
        bucket: Padded size of each variable, those of unfitted sizes included.
        pads: Position and padded shape of each leaf with open axes.
        rules: Returns the rule table; called when the function is traced, as importing the rules
            takes 50 ms.
        check: The kind of check. `Check.POISON` overwrites the padding of every equation; the
            executable then takes the index of the poison after the sizes. Checked calls run twice,
            so they donate nothing.
        options: Options of XLA.
        after: Returns what makes the hook of `interpret` that the program needs, or None; called
            when the function is traced.

    Returns:
        The function and the types to lower it for.
    """
    program, types = call.program, signed.signature.types
    assert isinstance(program, Program)
    poisoned = check is Check.POISON
    expected = Expected({i for i, _ in pads})

    def masked(sizes: object, *args: object, **kwargs: object) -> Any:
        leaves = expected.check(args, kwargs)
        arrays = [x for x, t in zip(leaves, types, strict=True) if t.dtype is not None]
        vector, size_constants = sizes if isinstance(sizes, tuple) else (sizes, ())
        values = {v: vector[i] for i, v in enumerate(call.variables)}
        at = BucketSizes(program.padded_sizes(bucket), program.lower, values, size_constants)
        # In checked calls the index of the poison follows the sizes; see `sizes_argument`.
        poison = poison_equations(vector[len(call.variables)]) if poisoned else None
        hook, padding = hooks(poison, after()), None if poisoned else 0
        outs = evaluated(program, program.consts, arrays, at, rules(), hook, padding)
        return with_counts(program, outs)

    masked.__name__ = getattr(signed.signature.fn, "__name__", "masked").replace(" ", "_")
    args, kwargs = signed.tree.unflatten(abstract(signed, dict(pads)))
    static = BucketSizes(program.padded_sizes(bucket), program.lower, {})
    donated, donated_leaves = frozenset[int](), frozenset[int]()
    # A run whose computed sizes are not as presumed is repeated, so it must not lose an argument.
    if check is Check.OFF and not program.presumed:
        donated, donated_leaves = donated_of(signed, dict(pads), program, static)
    size_constant_shapes = tuple(map(static.padded_shape, program.size_constant_shapes))
    sizes: Any = sizes_argument(call, size_constant_shapes, 0 if poisoned else None)
    return Masked(
        function=_jitted(masked, donated, options),
        sizes=sizes,
        args=args,
        kwargs=kwargs,
        expected=expected,
        at=static,
        call=call,
        origin=Origin(signed, call.tokens, call.sizes),
        bucket=bucket,
        pads=pads,
        size_constant_shapes=size_constant_shapes,
        donated=donated,
        donated_leaves=donated_leaves,
        options=options,
    )


def _jitted(
    masked: Callable[..., Any], donated: Set[int], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """The masked function under ``jit``. Its first argument are the sizes."""
    donate = tuple(i + 1 for i in sorted(donated))
    return jax.jit(masked, donate_argnums=donate, compiler_options=dict(options))


def donated_of(
    signed: SignedCall, pads: Mapping[int, tuple[int, ...]], program: Interface, at: BucketSizes
) -> tuple[frozenset[int], frozenset[int]]:
    """The arguments whose padded copies are donated, and their leaves with open axes.

    `to_donate` chooses them by what the outputs of the bucket can reuse.

    Args:
        signed: The call.
        pads: Padded shape of each leaf with open axes.
        program: Its program.
        at: The padded sizes.

    Returns:
        The positions of the arguments, and those of their leaves with open axes.
    """
    if not signed.donate:
        return frozenset(), frozenset()
    made = Counter(
        (at.padded_shape(shape), dtype)
        for shape, (dtype, _) in zip(program.out_shapes, program.out_types, strict=True)
    )
    return to_donate(signed, pads, made)


def evaluated(
    program: Program,
    consts: Sequence[Any],
    arrays: Sequence[Any],
    at: BucketSizes,
    rules: RuleTable,
    after: Callable[[], Hook] | None,
    padding: int | None = 0,
) -> list[Any]:
    """The results of a program at padded sizes, with zeros in their padding.

    Args:
        program: The program.
        consts: The values of its constants.
        arrays: Its padded arguments.
        at: Padded and logical sizes.
        rules: The rule table.
        after: Makes the hook of `interpret`.
        padding: What the padding of the arguments holds; None if it is not known.

    Returns:
        The results, flat, with the types of the program; then its counts.

    Raises:
        MaskingError: The program cannot be masked.
    """
    try:
        outs = interpret(program.jaxpr, consts, arrays, at, rules, after, padding)
        counts = outs[len(program.out_shapes) :]
        typed = zip(
            outs[: len(outs) - len(counts)], program.out_shapes, program.out_types, strict=True
        )
        return [*(_finish(out, shape, kind, at) for out, shape, kind in typed), *counts]
    except (MaskingError, FloatingPointError):  # the latter: jax_debug_nans has found a NaN
        raise
    except Exception as error:
        if is_of_machine(error):
            raise
        if trouble := trouble_of_versions(error):
            raise MaskingError(trouble, REMEDY_OF_VERSIONS) from error
        raise MaskingError(
            f"the masked program does not build: {in_one_line(error)}",
            "this is a defect of a masking rule; leave the axis static until it is mended",
            is_defect=True,
        ) from error


def with_counts(program: Interface, outs: Sequence[Any]) -> Any:
    """What an executable returns: the tree of the results, with the counts if there are any.

    Args:
        program: The program.
        outs: Its results and its counts, flat.
    """
    results = program.out_tree.num_leaves
    tree = program.out_tree.unflatten(outs[:results])
    if not program.counts:
        return tree
    return tree, jnp.stack([jnp.asarray(n, jnp.int32) for n in outs[results:]])


def with_type_of_counts(program: Interface, outs: Sequence[Any]) -> tuple[list[Any], Any]:
    """The types of what `with_counts` returns.

    Args:
        program: The program.
        outs: The types of its results.

    Returns:
        The types, flat, and their tree.
    """
    tree = program.out_tree
    if not program.counts:
        return list(outs), tree
    counts = shaped(jax.ShapeDtypeStruct((len(program.counts),), jnp.int32))
    whole = jax.tree_util.tree_structure((tree.unflatten(range(tree.num_leaves)), 0))
    return [*outs, counts], whole


def lower_masked(made: Masked) -> jax.stages.Lowered:
    """Lower a program for a bucket, without compiling it.

    Args:
        made: The function.

    Returns:
        The lowered function.

    Raises:
        MaskingError: The program cannot be masked, or JAX fails to lower it.
        Exception: Whatever ``jit`` raises for these arguments, such as arrays on two devices.
    """
    with _refusing_defects(), forgetful_jax():  # if tracing fails, JAX must not keep the trace
        return made.function.lower(made.sizes, *made.args, **made.kwargs)


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


def build_masked(made: Masked, lowered: jax.stages.Lowered | None = None) -> Executable:
    """Compile a program for a bucket.

    Only the types and the placement of the arguments are used, so the call may have ended.

    Args:
        made: The function.
        lowered: The lowered function, if it was lowered before.

    Returns:
        The executable, as the cache stores it.

    Raises:
        MaskingError: The program cannot be masked, or XLA fails to compile it.
        Exception: Whatever ``jit`` raises for these arguments, such as arrays on two devices.
    """
    began = time.perf_counter()
    if lowered is None:
        lowered = lower_masked(made)
    with _refusing_defects():
        compiled = compile_here(lowered)
    padded_outs = [tuple(x.shape) for x in jax.tree_util.tree_leaves(lowered.out_info)]
    return masked_executable(made, made.function, compiled, padded_outs, began)


def masked_executable(
    made: Masked,
    function: Callable[..., Any],
    compiled: jax.stages.Compiled,
    padded_outs: Sequence[tuple[int, ...]],
    began: float,
    loaded: bool = False,
) -> Executable:
    """The cache entry of a masked function, compiled or loaded.

    Args:
        made: The masked function.
        function: The callable: the jitted function, or a loaded one.
        compiled: The XLA executable behind it.
        padded_outs: Padded shape of each output.
        began: When building it began, in seconds (``time.perf_counter``).
        loaded: Whether it was read from a file.
    """
    program = made.call.program
    assert program is not None
    variables = (*made.call.variables, *program.counts)
    outs = tuple(
        OpenOut(i, shape_function(shape, variables), padded_outs[i], weak)
        for i, (shape, (_, weak)) in enumerate(
            zip(program.out_shapes, program.out_types, strict=True)
        )
        if any(map(is_symbolic, shape))
    )
    return Executable(
        sizes=dict(made.bucket),
        exact=False,
        function=function,
        compiled=compiled,
        compile_seconds=time.perf_counter() - began,
        out_tree=program.out_tree,
        pads=made.pads,
        outs=outs,
        size_constant_shapes=made.size_constant_shapes,
        donated_leaves=made.donated_leaves,
        constant_bytes=program.constant_bytes,
        compiles=made.function,
        loaded=loaded,
        origin=made.origin,
        counted=program if program.counts else None,
        rows=None if made.rows is None else made.rows.count,
    )


def _finish(out: Any, shape: tuple[Any, ...], kind: tuple[Any, bool], sizes: BucketSizes) -> Any:
    """An output with its padding set to 0, and with the weak type that was traced.

    Garbage in the padding must not leave the executable: `Padded` results show it.
    """
    dtype, weak = kind
    mask = sizes.in_bounds(shape)
    if mask is not None:
        out = select(mask, out, 0)
    return with_type(out, dtype, weak)
