"""Find reductions in an executable that XLA's library YNN computes wrongly.

XLA's CPU backend hands fusions to the library, which the text of the executable shows::

    %f (p: f32[64,64]) -> f32[64] {
      %p = f32[64,64] parameter(0)
      %m = f32[64,64] maximum(%p, %zeros)       not in `_TRUSTED`: the answer is True
      ROOT %r = f32[64] reduce(%m, ...)
    }
    %y = f32[64] fusion(%x), calls=%f, ... "__ynn_fusion" ...

A fusion with a ``reduce`` of 4,096 elements or more is wrong in three cases (jaxlib 0.10.2 and
0.12, in ``jax.jit`` too):

* A product in it has an operand that is broadcast along a free axis, as in
  ``(x @ jnp.ones((256, 256))).sum(1)``. It yields numbers that were never computed.
* It chooses between floats (``relu``). It loses NaN.
* It converts to integers of 8 bits. It does not saturate.

So a library fusion with a reduction is accepted only if every instruction in it is in `_TRUSTED`.
Otherwise the bucket is compiled again without library reductions
(`bucketjit._compile.workarounds.library_options`), whatever its size.
`bucketjit._compile.nan_reductions` and `bucketjit._compile.workarounds` predict most
cases from the program, which saves the first compile.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

# Text of XLA's optimised HLO: the kind of a library fusion, and what a line of a fusion looks like.
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
# Opcodes and dtypes that the library is known to compute rightly together with a reduction.
_TRUSTED = frozenset(
    ("parameter", "constant", "iota", "broadcast", "reduce", "dot", *_ELEMENTWISE, *_MOVES)
)
_DTYPES = frozenset(("pred", "s32", "u32", "s64", "u64", "f16", "bf16", "f32", "f64"))

Axes = frozenset[int]  # the axes along which a value may vary


class _Instruction(NamedTuple):
    """A line of a computation.

    Attributes:
        dtype: The dtype of its result, as XLA writes it.
        opcode: The operation, as XLA writes it.
        rank: Number of axes of its result.
        operands: Names of its operands.
        rest: The text of its attributes.
    """

    dtype: str
    opcode: str
    rank: int
    operands: Sequence[str]
    rest: str

    def axes(self, attribute: str) -> list[int]:
        """The axes that an attribute such as ``dimensions={0,1}`` lists; empty if it is missing."""
        found = re.search(rf"\b{attribute}={{([\d,]*)}}", self.rest)
        return [int(n) for n in found[1].split(",") if n] if found else []


def has_wrong_reductions(text: str) -> bool:
    """Whether an executable has a library reduction that may be wrong."""
    called = set(_CALLED.findall(text))
    if not called:
        return False
    computation: list[str] | None = None  # the lines of the library fusion that is being read
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
    """Whether the computation of a library fusion has a reduction that may be wrong."""
    if not any(" reduce(" in line for line in lines):
        return False
    found: dict[str, _Instruction] = {}
    varies: dict[str, Axes] = {}
    for line in lines:
        match = _INSTRUCTION.match(line)
        if match is None:  # a line that this module cannot read is not trusted
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
    """Whether each operand of a product varies along all of its free axes."""
    for side, name in zip(("lhs", "rhs"), dot.operands, strict=True):
        gone = {*dot.axes(f"{side}_contracting_dims"), *dot.axes(f"{side}_batch_dims")}
        if not varies[name] >= set(range(found[name].rank)) - gone:
            return False
    return True


def _axes_of(made: _Instruction, found: dict[str, _Instruction], varies: dict[str, Axes]) -> Axes:
    """The axes along which the result of an instruction varies, or has memory for each position."""
    every = Axes(range(made.rank))
    # XLA writes an array of equal numbers as a broadcast, so these results are full arrays.
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
