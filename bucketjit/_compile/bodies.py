"""The bodies of kernels: a traced program at padded sizes, and the function at its exact shape."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from bucketjit._arrays.padding import plain
from bucketjit._compile.argument_types import Body, Transform, padded_leaf_shapes
from bucketjit._compile.files.store import ExecutableFiles
from bucketjit._compile.kernel import Kernel, exact_kernel, kernel
from bucketjit._compile.workarounds import Workarounds, hooks, library_options, workarounds
from bucketjit._config import Check, Config
from bucketjit._ir.bucket_sizes import BucketSizes
from bucketjit._ir.expressions import is_symbolic
from bucketjit._ir.interface import Interface
from bucketjit._ir.program import Program
from bucketjit._jax.arrays import with_type
from bucketjit._jax.names import REMEDY_OF_VERSIONS, trouble_of_versions
from bucketjit._masking.array_ops import block_of, select, zeros_from
from bucketjit._masking.interpreter import Hook, interpret
from bucketjit._masking.padding import AROUND_NOTHING, Around, Padding
from bucketjit._masking.rule_context import RuleTable
from bucketjit._raised import in_one_line, is_of_machine
from bucketjit._tracing.call import Call
from bucketjit.errors import MaskingError

if TYPE_CHECKING:
    from bucketjit._compile.files.stored import Stored

Options = Callable[[Mapping[str, Any]], Mapping[str, Any]]  # those of bucketjit -> all of them


class TracedBodies:
    """The bodies of a function that is traced; `SavedBodies` has the same methods for a file."""

    def __init__(self, config: Config, rules: Callable[[], RuleTable]) -> None:
        self._check, self._rules = config.check, rules
        self._workarounds: weakref.WeakKeyDictionary[Interface, Workarounds]
        self._workarounds = weakref.WeakKeyDictionary()

    def workarounds(self, program: Interface) -> Workarounds:
        """What a program needs for XLA to compute it correctly: one object for each program."""
        program_workarounds = self._workarounds.get(program)
        if program_workarounds is None:
            assert isinstance(program, Program)
            program_workarounds = self._workarounds[program] = workarounds(program.jaxpr)
        return program_workarounds

    def in_bucket(
        self, call: Call, bucket: Mapping[str, int], transform: Transform, options: Options
    ) -> Kernel:
        """The kernel of a bucket, with the options that hold now."""
        program, rules = call.program, self._rules
        assert isinstance(program, Program)
        needed = self.workarounds(program)
        signature, is_compared = call.signature, self._check in (Check.EXACT, Check.EXACT_ALWAYS)
        around = Around(signature.is_cut, signature.is_cut_inside(call.tokens), is_compared)

        def body(_: Sequence[Any]) -> Body:
            consts, names = transform.of_host(program.consts), call.variables
            after, uneven = needed.after(), transform.uneven
            return masked(program, consts, bucket, names, rules(), after, uneven, around)

        pads, of_xla = padded_leaf_shapes(call, bucket), options(needed.options())
        return kernel(transform, body, call, bucket, pads, self._check, of_xla)

    def exact(self, call: Call, sizes: Mapping[str, int], options: Options) -> Kernel:
        is_checked = self._check is not Check.OFF
        # Masked results are compared with these, so these must be right then.
        return exact_body(call, sizes, is_checked, options(library_options(is_checked)))

    def place(self, files: ExecutableFiles) -> Stored | None:
        """The place of an executable among files; None if there is none."""
        store = files.store() if self._check is Check.OFF else None
        if store is None:
            return None
        from bucketjit._compile.files.stored import Stored

        return Stored(files, store)


def masked(
    program: Program,
    consts: Sequence[Any],
    bucket: Mapping[str, int],
    variables: Sequence[str],
    rules: RuleTable,
    after: Callable[[], Hook] | None,
    uneven: tuple[str, ...] = (),
    around: Around = AROUND_NOTHING,
) -> Body:
    """A program at padded sizes, with zeros in the padding of its results."""

    def body(
        vector: Any, constants: Sequence[Any], arrays: Sequence[Any], poison: Any = None
    ) -> list[Any]:
        values = {v: vector[i] for i, v in enumerate(variables)}
        padded_sizes = program.sizes_in(bucket, values, constants, uneven)
        is_poisoned, hook = poison is not None, None
        if is_poisoned:
            from bucketjit._masking.checks import poison_equations

            hook = poison_equations(poison)
        hook = hooks(hook, after)
        # The padding of arguments holds zeros, or the poison.
        padding, facts = None if is_poisoned else 0, Padding(around)
        try:
            outs = interpret(
                program.jaxpr, consts, arrays, padded_sizes, rules, hook, padding, facts
            )
            count = len(program.out_shapes)
            typed = zip(outs[:count], program.out_shapes, program.out_types, strict=True)
            ended = [
                with_type(x if facts.holds(x, shape, 0) else _ended(x, shape, padded_sizes), *kind)
                for x, shape, kind in typed
            ]
            return [*ended, *outs[count:]]
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

    return body


def _ended(out: Any, shape: tuple[Any, ...], sizes: BucketSizes) -> Any:
    """An output with its padding set to 0: `Padded` results show what is there."""
    opened = [axis for axis, size in enumerate(shape) if is_symbolic(size)]
    if not opened:
        return out
    if not block_of(out, opened[0]):
        return select(sizes.in_bounds(shape), out, 0)
    for axis in opened:
        out = zeros_from(out, axis, sizes.logical(shape[axis]))
    return out


def exact_body(
    call: Call,
    sizes: Mapping[str, int] = {},
    is_checked: bool = True,
    options: Mapping[str, Any] = {},
) -> Kernel:
    """The kernel of the user's function itself. Checked calls run twice, so they donate nothing."""
    fn = call.signature.fn
    # Size arguments, by position among the leaves. An exact shape fixes their values, so the
    # function gets these instead of tracers.
    static = {
        i: shape[0]
        for i, (shape, t) in enumerate(zip(call.shapes, call.signature.types, strict=True))
        if t.dtype is None
    }

    def run(_: Sequence[Any], leaves: list[Any], tree: Any) -> Any:
        args, kwargs = tree.unflatten(static.get(i, x) for i, x in enumerate(leaves))
        return fn(*args, **kwargs)

    donated = () if is_checked else tuple(call.donate)
    return exact_kernel(call, run, sizes, donated, options)


def result_types(call: Call) -> Any:
    """The types of the results. It is traced, not compiled, and raises what the function raises."""
    exact = exact_body(call)
    return exact.function.eval_shape(*exact.args, **exact.kwargs)


def one_by_one(call: Call) -> Any:
    """The function's results, each operation compiled and run by itself.

    XLA may compute a value again, with another rounding, for each operation that reads it, so that
    a comparison can contradict the value that is used; see
    `bucketjit._compile.recomputed_values`. Operations that run one by one cannot be affected.
    Raises whatever the function raises for these arguments, or raises only where ``jit`` is
    disabled.
    """
    with jax.disable_jit():
        return eagerly(call)


def eagerly(call: Call) -> Any:
    """The results of a function that ``jit`` cannot trace, as it computes sizes."""
    args, kwargs = call.tree.unflatten(
        shape[0] if t.dtype is None else jnp.asarray(plain(x))
        for x, shape, t in zip(call.leaves, call.shapes, call.signature.types, strict=True)
    )
    return jax.tree_util.tree_map(jnp.asarray, call.signature.fn(*args, **kwargs))
