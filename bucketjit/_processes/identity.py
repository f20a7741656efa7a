"""What makes the calls of two processes the same call: program, types, and strategies."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from bucketjit import strategies
from bucketjit._compile.files.keys import OWN_PRIMITIVES
from bucketjit._config import Config
from bucketjit._jax.jaxprs import all_equations
from bucketjit._persistence.fingerprint import NoDigest, program_digest
from bucketjit._runtime.decisions import Masked
from bucketjit._signature.parameters import PLAIN_STATICS
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall
from bucketjit._sizes.dynamic_axes import STATIC
from bucketjit._tracing.program import Program

_MOST_INPUTS = 6  # arguments that a message shows


def digest_of_call(config: Config, name: str, signed: SignedCall, call: ResolvedCall) -> str:
    """A digest that is equal on two processes if they make the same call, of whatever sizes.

    The values of arrays that the function closes over are left out: they may differ.

    Args:
        config: The configuration.
        name: The name of the function.
        signed: The call.
        call: The same call, resolved.
    """
    program = call.program
    parts: list[Any] = [name, *described(config, signed, call)]
    if isinstance(program, Program):
        parts += [_text_of(program.jaxpr), str(program.out_tree), [str(g) for g in program.guards]]
    else:
        parts.append(signed.shapes)
    parts += [str(signed.tree), [str((x.dtype, x.weak_type)) for x in signed.signature.types]]
    parts.append(sorted(map(_static, [*signed.statics.positional.values()])))
    parts.append(sorted((k, _static(v)) for k, v in signed.statics.keyword.items()))
    return hashlib.sha256(_plain(repr(parts)).encode()).hexdigest()[:16]


def described(config: Config, signed: SignedCall, call: ResolvedCall) -> tuple[str, str]:
    """The arguments with open axes and the strategies of a call, as people write them.

    Args:
        config: The configuration.
        signed: The call.
        call: The same call, resolved.
    """
    leaves = zip(signed.signature.types, call.tokens, signed.shapes, strict=True)
    types = [
        f"{kind.dtype}[{', '.join(_axes(row, shape))}]"
        for kind, row, shape in leaves
        if any(token != STATIC for token in row)
    ]
    more = "" if len(types) <= _MOST_INPUTS else f" and {len(types) - _MOST_INPUTS} more"
    chosen = {"plan": config.plan} if config.plan is not None else {}
    chosen |= {v: config.strategy_of(v) for v in call.sizes if v not in config.planned}
    buckets = ", ".join(f"{v} in {_strategy(s)}" for v, s in chosen.items())
    return ", ".join(types[:_MOST_INPUTS]) + more, buckets


def _axes(row: Sequence[str], shape: Sequence[int]) -> list[str]:
    """The axes of an argument: variables, and the sizes of the static ones."""
    return [str(n) if token == STATIC else token for token, n in zip(row, shape, strict=True)]


def name_of_executable(digest: str, masked: Masked) -> str:
    """How processes name an executable to each other."""
    return f"{digest}:{','.join(map(str, masked.bucket.values()))}"


def _text_of(jaxpr: Any) -> str:
    """A digest of a jaxpr; where it has none, a text of its equations' names and types."""
    try:
        return program_digest(jaxpr, OWN_PRIMITIVES).text
    except NoDigest:
        lines = [str([v.aval for v in (*jaxpr.constvars, *jaxpr.invars)])]
        for eqn in all_equations(jaxpr):
            lines.append(f"{eqn.primitive.name} {[str(v.aval) for v in eqn.outvars]}")
        return "\n".join(lines)


def _strategy(strategy: object) -> str:
    """A strategy as text, equal on all processes also where it adapts to the calls."""
    if isinstance(strategy, strategies.Adaptive):
        return type(strategy).__name__
    return _plain(repr(strategy))


def _static(value: object) -> str:
    """A static argument as text; its type if its ``repr`` may differ between processes."""
    return repr(value) if type(value) in PLAIN_STATICS else type(value).__qualname__


def _plain(text: str) -> str:
    """A text without addresses, which differ between processes."""
    return re.sub(r"\b0x[0-9a-f]+\b", "0x", text)
