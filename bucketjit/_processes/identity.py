"""What makes the calls of two processes the same call: program, types, and strategies."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from typing import Any

from bucketjit._compile.files.fingerprint import NoDigest, program_digest
from bucketjit._compile.files.keys import OWN_PRIMITIVES
from bucketjit._ir.dynamic_axes import STATIC
from bucketjit._ir.program import Program
from bucketjit._jax.jaxprs import all_equations
from bucketjit._runtime.engine import Engine
from bucketjit._tracing.parameters import PLAIN_STATICS
from bucketjit._tracing.resolved_call import ResolvedCall
from bucketjit._tracing.signer import SignedCall

_MOST_INPUTS = 6  # arguments that a message shows


def described(engine: Engine, signed: SignedCall, call: ResolvedCall) -> list[str]:
    """A call as people write it: the function with its open arguments, each argument, a program.

    Two calls with the same lines are the same call, of whatever sizes. The values of arrays that
    the function closes over are left out: they may differ.
    """
    config, signature, program = engine.config, signed.signature, call.program
    rows = zip(signature.paths, signature.types, call.tokens, signed.shapes, strict=True)
    opened, lines = [], []
    for path, kind, row, shape in rows:
        sizes = [str(n) if token == STATIC else token for token, n in zip(row, shape, strict=True)]
        text = f"{kind.dtype}[{', '.join(sizes)}]"
        lines.append(f"{path}: {text}{' of a Python number' * kind.weak_type}")
        opened += [text] if any(token != STATIC for token in row) else []
    opened[_MOST_INPUTS:] = ["..."] * (len(opened) > _MOST_INPUTS)
    chosen = {"plan": config.plan} if config.plan is not None else {}
    chosen |= {v: config.strategy_of(v) for v in call.sizes if v not in config.planned}
    buckets = ", ".join(f"{v} in {_plain(repr(s))}" for v, s in chosen.items())
    statics: dict[Any, Any] = {**signed.statics.positional, **signed.statics.keyword}
    traced = [str(signed.tree)]
    if isinstance(program, Program):
        traced += [_text_of(program.jaxpr), str(program.out_tree), *map(str, program.guards)]
    return [
        f"calls {engine.name}({', '.join(opened)})" + (f" with {buckets}" if buckets else ""),
        *lines,
        *(f"the static argument {name}: {_static(value)}" for name, value in statics.items()),
        f"a function that was traced to program {digest_of(traced)}",
    ]


def digest_of(lines: Sequence[str]) -> str:
    """A digest of texts, without addresses."""
    return hashlib.sha256(_plain(repr(lines)).encode()).hexdigest()[:16]


def differences(every: Sequence[Sequence[str]]) -> dict[int, str]:
    """What each process calls: the first line, and the first one in which they differ."""
    rows = enumerate(itertools.zip_longest(*every, fillvalue="another number of arguments"))
    at, row = next(((i, row) for i, row in rows if len(set(row)) > 1), (0, ()))
    return {i: f"{x[0]}, {row[i]}" if at else x[0] for i, x in enumerate(every)}


def _text_of(jaxpr: Any) -> str:
    """A digest of a jaxpr; where it has none, a text of its equations' names and types."""
    try:
        return program_digest(jaxpr, OWN_PRIMITIVES).text
    except NoDigest:
        lines = [str([v.aval for v in (*jaxpr.constvars, *jaxpr.invars)])]
        for eqn in all_equations(jaxpr):
            lines.append(f"{eqn.primitive.name} {[str(v.aval) for v in eqn.outvars]}")
        return "\n".join(lines)


def _static(value: object) -> str:
    """A static argument as text; its type if its ``repr`` may differ between processes."""
    return repr(value) if type(value) in PLAIN_STATICS else type(value).__qualname__


def _plain(text: str) -> str:
    """A text without addresses, which differ between processes."""
    return re.sub(r"\b0x[0-9a-f]+\b", "0x", text)
