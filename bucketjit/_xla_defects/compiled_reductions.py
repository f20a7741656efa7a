"""Whether XLA's CPU backend has handed its library YNN something that the library gets wrong.

What the library is given is found in the compiled program: fusions, of which those with a fold (a
``reduce``) are wrong, of 4,096 elements or more and in ``jax.jit`` too (jaxlib 0.10.2 and 0.12),
where

* a product in them has a side that is broadcast along an axis of its own, as in
  ``(x @ jnp.ones((256, 256))).sum(1)``: numbers come out that were never computed;
* they choose between floats (``relu``): NaN is lost;
* they convert to integers of 8 bits: nothing is cut off.

So in a fusion with a fold nothing is trusted but what is known to be right there. To such sizes
padding may take calls, so what has such a fusion is compiled again without the folds of the library
(`_jax.library_options`). `bucketjit._xla_defects.nan_reductions` and
`bucketjit._xla_defects.broadcast_operands` tell most of them before they are compiled, by the
program.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_LIBRARY = "__ynn_fusion"
_CALLED = re.compile(rf"calls=%([\w.\-]+)[^\n]*{_LIBRARY}")
_INSTRUCTION = re.compile(
    r"^ +(?:ROOT )?%(?P<name>\S+) = (?P<dtype>\w+)\[(?P<shape>[\d,]*)\]\S* "
    r"(?P<opcode>[\w\-]+)\((?P<operands>[^)]*)\)(?P<rest>.*)$"
)
_OPERAND = re.compile(r"%([\w.\-]+)")

_ELEMENTWISE = frozenset(
    (
        *("add", "subtract", "multiply", "divide", "negate", "abs", "sign", "power", "remainder"),
        *("exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "tanh"),
        *("sqrt", "rsqrt", "cbrt", "sine", "cosine", "tan", "erf", "atan2", "is-finite"),
        *("floor", "ceil", "round-nearest-even", "round-nearest-afz"),
        *("compare", "select", "and", "or", "xor", "not", "convert", "copy"),
    )
)
_MOVES = frozenset(("bitcast", "reshape", "transpose"))
_TRUSTED = frozenset(
    ("parameter", "constant", "iota", "broadcast", "reduce", "dot", *_ELEMENTWISE, *_MOVES)
)
_DTYPES = frozenset(("pred", "s32", "u32", "s64", "u64", "f16", "bf16", "f32", "f64"))

Axes = frozenset[int]  # along which a value may vary


class _Instruction(NamedTuple):
    """A line of a computation.

    Attributes:
        dtype, opcode: As XLA writes them.
        rank: How many axes its result has.
        operands: Names of those.
        rest: Its attributes.
    """

    dtype: str
    opcode: str
    rank: int
    operands: Sequence[str]
    rest: str

    def axes(self, attribute: str) -> list[int]:
        """The axes that an attribute lists."""
        found = re.search(rf"\b{attribute}={{([\d,]*)}}", self.rest)
        return [int(n) for n in found[1].split(",") if n] if found else []


def has_wrong_reductions(text: str) -> bool:
    """Whether a compiled program has a fold that is not to be trusted.

    Args:
        text: The program as XLA writes it, optimised (``compiled.as_text()``).
    """
    called = set(_CALLED.findall(text))
    if not called:
        return False
    computation: list[str] | None = None
    for line in text.splitlines():
        if line.startswith("%"):
            computation = [] if line[1:].split(" ", 1)[0] in called else None
        elif computation is not None and line.startswith("}"):
            if _is_wrong(computation):
                return True
            computation = None
        elif computation is not None:
            computation.append(line)
    return False


def _is_wrong(lines: Sequence[str]) -> bool:
    if not any(" reduce(" in line for line in lines):
        return False
    found: dict[str, _Instruction] = {}
    varies: dict[str, Axes] = {}
    for line in lines:
        match = _INSTRUCTION.match(line)
        if match is None:
            return True
        shape = [n for n in match["shape"].split(",") if n]
        operands = _OPERAND.findall(match["operands"])
        made = _Instruction(match["dtype"], match["opcode"], len(shape), operands, match["rest"])
        if made.opcode not in _TRUSTED or made.dtype not in _DTYPES:
            return True
        if made.opcode == "dot" and not _has_own_sides(made, found, varies):
            return True
        found[match["name"]] = made
        varies[match["name"]] = _axes_of(made, found, varies)
    return False


def _has_own_sides(
    dot: _Instruction, found: dict[str, _Instruction], varies: dict[str, Axes]
) -> bool:
    """Whether each side of a product varies along the axes that the product has of it."""
    for side, name in zip(("lhs", "rhs"), dot.operands, strict=True):
        gone = {*dot.axes(f"{side}_contracting_dims"), *dot.axes(f"{side}_batch_dims")}
        if not varies[name] >= set(range(found[name].rank)) - gone:
            return False
    return True


def _axes_of(made: _Instruction, found: dict[str, _Instruction], varies: dict[str, Axes]) -> Axes:
    """The axes along which what an instruction makes is known to vary, in memory at least."""
    every = Axes(range(made.rank))
    # XLA writes an array of one number as a broadcast; any other is in memory.
    if made.opcode in ("parameter", "constant", "dot", "reduce"):
        return every
    if made.opcode == "broadcast":
        to = made.axes("dimensions")
        return Axes(to[axis] for axis in varies[made.operands[0]])
    if made.opcode in _ELEMENTWISE:
        return Axes().union(*(varies[name] for name in made.operands))
    if made.opcode in _MOVES:
        (name,) = made.operands
        return every if len(varies[name]) == found[name].rank else Axes()
    return Axes()  # iota
