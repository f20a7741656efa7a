"""Explains what a call would do: sizes, bucket, program, and which equations are masked.

Nothing is compiled or run. The function is traced if it has not been. Its program is then
interpreted on abstract arrays with the ordinary masking rules, each wrapped by a function that
notes whether the rule did anything else than bind the equation unchanged.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp

from bucketjit._events import counted, printable, shown
from bucketjit._ir.expressions import is_symbolic
from bucketjit._ir.interface import Interface
from bucketjit._ir.jax_patches import forgetful_jax
from bucketjit._ir.kernels import name_in_words
from bucketjit._ir.program import Program
from bucketjit._jax.jaxprs import CALLS, struct_of
from bucketjit._jax.user_code import source_line
from bucketjit._masking.interpreter import interpret
from bucketjit._masking.rule_context import Rule, RuleContext, RuleTable
from bucketjit._runtime.decisions import NO_STRATEGY, Masked
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.statistics import FrozenDict
from bucketjit._stages.report import shown_bytes
from bucketjit._tracing.call import Call
from bucketjit._tracing.shards import bound_axis
from bucketjit._tracing.signer import Signer
from bucketjit.errors import MaskingError, SpecError


def how(rule: Callable[..., Any]) -> str:
    """What a rule does, in words: the first paragraph of its docstring, or of its maker's."""
    text = rule.__doc__ or maker_of(rule).__doc__ or ""
    return " ".join(text.strip().split("\n\n")[0].split())


def maker_of(rule: object) -> Any:
    """The function at the top level of a module that made a rule; the rule itself if it is one."""
    if not isinstance(rule, FunctionType):
        return rule
    return rule.__globals__.get(rule.__qualname__.split(".")[0], rule)


@dataclass(frozen=True)
class MaskedEquation:
    """An equation whose result padding would change, and how its masking rule prevents that.

    Attributes:
        primitive: Name of its primitive.
        sizes: The open sizes in the shapes of its operands and results.
        how: What its masking rule does, in words.
        fills: What is written into the padding of its operands, such as ``"-inf along s"``.
        where: File, line and function of the user's code; empty if not known.
    """

    primitive: str
    sizes: tuple[str, ...]
    how: str
    fills: tuple[str, ...]
    where: str

    def __str__(self) -> str:
        filled = f" ({'; '.join(self.fills)})" if self.fills else ""
        where = f"  [{self.where}]" if self.where else ""
        return f"{self.primitive} of {', '.join(self.sizes) or 'sizes'}: {self.how}{filled}{where}"


@dataclass(frozen=True)
class Explanation:
    """The result of `BucketedExec.explain`: ``print`` it, or show it in a notebook.

    Attributes:
        name: Name of the function.
        sizes: Logical size of each dimension variable.
        bucket: Padded size of each dimension variable; equal to ``sizes`` if the call runs exact.
        kind: ``"masked"``; ``"paired"`` if masked and its program was made from traces at concrete
            sizes; or ``"exact"``.
        compiled: Whether the executable that the call needs is in the cache.
        program: How the program was made, in words.
        guards: Conditions that hold for the sizes of every call that the program serves.
        masked: The equations that are masked, in the order of the program.
        reason: Why the call runs exact, or an empty string.
        remedy: What to do about that, or an empty string.
        computed: The sizes that the program computes, each with its bound and the line, and what
            is presumed of them: that arrays are not empty. Where one is, the call runs eagerly.
        why: Why its bucket was made, if buckets are learnt, or why it suits the device; else an
            empty string.
        device: The device of a topology that it is for; an empty string if it runs here.
        memory: Bytes on that device during a call, if the executable is compiled; see
            `bucketjit.types.BucketStats`.
        rules: Whether its text lists the program, the guards and the equations that are masked.
    """

    name: str
    sizes: Mapping[str, int]
    bucket: Mapping[str, int]
    kind: str
    compiled: bool
    program: str = ""
    guards: tuple[str, ...] = ()
    masked: tuple[MaskedEquation, ...] = ()
    reason: str = ""
    remedy: str = ""
    computed: tuple[str, ...] = ()
    why: str = ""
    device: str = ""
    memory: Mapping[str, int] = field(default_factory=FrozenDict[str, int])
    rules: bool = field(default=False, repr=False, compare=False)

    def __str__(self) -> str:
        is_exact = self.kind == "exact"
        runs = "exact, without padding" if is_exact else f"padded, in bucket {shown(self.bucket)}"
        executable = "compiled" if self.compiled else "not compiled yet"
        count = counted(len(self.masked), "operation")
        more = " (explain(..., rules=True) lists them)" if self.masked and not self.rules else ""
        facts = [
            ("device", self.device),
            ("padding", "" if is_exact else self._padding()),
            ("why", self.reason),
            ("what to do", self.remedy),
            ("why this bucket", self.why),
            *(("computed", size) for size in self.computed),
            ("executable", executable),
            ("memory", ", ".join(f"{what} {shown_bytes(n)}" for what, n in self.memory.items())),
            ("masked", "" if is_exact else count + more),
        ]
        if self.rules:
            facts += [("program", self.program), ("holds for", ", ".join(self.guards))]
            facts += [("rule", str(equation)) for equation in self.masked]
        sizes = f" at {shown(self.sizes)}" if self.sizes else ""
        lines = [f"{self.name}{sizes} runs {runs}"]
        lines += [f"  {name}: {text}" for name, text in facts if text]
        return printable("\n".join(lines))

    def _padding(self) -> str:
        """How much of each variable of the bucket is padding."""
        spare = {v: (size - self.sizes.get(v, size), size) for v, size in self.bucket.items()}
        parts = [
            f"{n} of {size} along {v} ({100 * n / size:.0f} %)"
            for v, (n, size) in spare.items()
            if n
        ]
        return ", ".join(parts) or "none, the sizes fill the bucket"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def describe(program: Interface) -> str:
    """How a program was made, in words."""
    if program.pairing is None:
        return "traced once, with symbolic sizes"
    samples = "; ".join(map(shown, program.pairing.samples))
    number = program.pairing.num_size_constants
    depend = f"{counted(number, 'constant')} {'depends' if number == 1 else 'depend'}"
    trees = ", and so does the tree of the results" if program.pairing.nests_by_size else ""
    why = f"; {program.pairing.why}" if program.pairing.why else ""
    return f"concrete traces, at {samples}; {depend} on the sizes{trees}{why}"


def masked_equations(
    program: Program, bucket: Mapping[str, int], rules: RuleTable
) -> tuple[MaskedEquation, ...]:
    masked: dict[int, tuple[Any, MaskedEquation]] = {}
    watched = {key: _watched(rule, masked) for key, rule in rules.items()}
    static = program.sizes_in(bucket)

    def run(values: Any, size_constants: Any, arrays: Any) -> Any:
        run_sizes = program.sizes_in(bucket, values, size_constants)
        return interpret(program.jaxpr, program.consts, arrays, run_sizes, watched, padding=0)

    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = map(static.padded_shape, program.size_constant_shapes)
    size_constants = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    avals = [v.aval for v in program.jaxpr.invars]
    arrays = [struct_of(a, static.padded_shape(getattr(a, "shape", ()))) for a in avals]
    with forgetful_jax():  # the interpretation may fail, and JAX must not cache what it did
        jax.eval_shape(run, dict.fromkeys(bucket, scalar), size_constants, arrays)
    return tuple(equation for _, equation in masked.values())


# Not listed: the equations of the program that they call are.
_CALLS = CALLS | {"eval_jaxpr", "call_hi_primitive"}


def _watched(rule: Rule, masked: dict[int, tuple[Any, MaskedEquation]]) -> Rule:
    """A rule that notes the equations which it masks.

    A rule that does not mask returns what ``ctx.bind`` returned for the unchanged operands. The
    wrapper replaces ``fill`` of the context, and remembers what was filled.
    """

    @functools.wraps(rule)
    def watched(ctx: RuleContext, *operands: object) -> Any:
        fills: list[str] = []
        fill = ctx.fill

        def watched_fill(operand: Any, **options: Any) -> Any:
            out = fill(operand, **options)
            if out is not operand:
                shape = options.get("shape") or ctx.shape_of(operand)
                axes = options.get("axes")
                every = range(len(shape)) if axes is None else axes
                names = dict.fromkeys(str(shape[a]) for a in every if is_symbolic(shape[a]))
                fills.append(f"{_shown(options['value'])} along {', '.join(names)}")
            return out

        ctx.fill = watched_fill  # type: ignore[method-assign]
        out = rule(ctx, *operands)
        if not ctx.stands(out) and ctx.primitive.name not in _CALLS:
            shapes = (*ctx.in_shapes, *ctx.out_shapes)
            sizes = dict.fromkeys(str(d) for shape in shapes for d in shape if is_symbolic(d))
            filled, where = tuple(dict.fromkeys(fills)), source_line(ctx.eqn)
            noted = MaskedEquation(name_in_words(ctx.eqn), tuple(sizes), how(rule), filled, where)
            masked.setdefault(id(ctx.eqn), (ctx.eqn, noted))
        return out

    return watched


def _shown(value: object) -> str:
    return "a value computed" if isinstance(value, jax.core.Tracer) else str(value)


Equations = Callable[[Interface, Mapping[str, int]], tuple[MaskedEquation, ...]]


def asked(
    signer: Signer, rules: object, kwargs: Mapping[str, Any]
) -> tuple[bool | None, dict[str, Any]]:
    """Whether to list rules, and the keywords; a parameter named ``rules`` gets that one."""
    parameters = signer.parameters
    if rules is not None and "rules" in [*parameters.positional, *(parameters.keyword_only or ())]:
        return None, {**kwargs, "rules": rules}
    if not isinstance(rules, bool | None):
        raise SpecError(f"explain: rules must be True or False, got {rules!r}")
    return rules, dict(kwargs)


def explain(
    engine: Engine,
    call: Call,
    rules: bool | None,
    equations: Equations | None = None,
    unpadded: MaskingError | None = None,
) -> Explanation:
    if engine.config.always_exact or unpadded is not None:
        call = call.resolved(call.signature.declared(call.shapes))
        return _explained_exact(engine, call, unpadded or NO_STRATEGY, rules)
    call, decision = engine.chosen(call, learns=False)
    if not isinstance(decision, Masked):
        return _explained_exact(engine, call, decision.why, rules)
    program = decision.program
    try:
        if equations is not None:
            masked = equations(program, decision.bucket)
        else:
            assert isinstance(program, Program)
            explained = engine.explained.setdefault(program, {})
            bucket = tuple(decision.bucket.items())
            if bucket not in explained:
                with bound_axis(engine.config.sharded):
                    rules_of = engine.requests.rules()
                    explained[bucket] = masked_equations(program, decision.bucket, rules_of)
            masked = explained[bucket]
    except MaskingError as error:
        return _explained_exact(engine, call, error, rules)
    return Explanation(
        **_of_executable(engine, call, decision.key),
        bucket=FrozenDict(decision.bucket),
        kind="masked" if program.pairing is None else "paired",
        program=describe(program),
        guards=tuple(map(str, program.guards)),
        masked=masked,
        computed=program.computed_in_words(),
        why=engine.buckets.why(program, call, decision.bucket),
        rules=bool(rules),
    )


def _of_executable(engine: Engine, call: Call, key: Any) -> dict[str, Any]:
    """What an explanation says of a call and its executable."""
    entry, device = dict(engine.cache.items()).get(key), call.signature.device
    return {
        "name": engine.name,
        "sizes": FrozenDict(call.sizes),
        "compiled": entry is not None,
        "device": device,  # if it is not here, the memory is told, too
        "memory": FrozenDict({} if entry is None or not device else entry.memory),
    }


def _explained_exact(
    engine: Engine, call: Call, why: MaskingError, rules: bool | None
) -> Explanation:
    return Explanation(
        **_of_executable(engine, call, engine.requests.exact_key(call)),
        bucket=FrozenDict(call.sizes),
        kind="exact",
        reason=why.reason,
        remedy=why.remedy,
        rules=bool(rules),
    )
