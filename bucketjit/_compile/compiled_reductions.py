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

* A product in it has an operand that is broadcast, at least along a free axis, as in
  ``(x @ jnp.ones((256, 256))).sum(1)``. It yields numbers that were never computed.
* It chooses between floats (``relu``). It loses NaN.
* It converts to integers of 8 bits. It does not saturate.

So a library fusion with a reduction is accepted only if every instruction in it is in `_TRUSTED`.
Otherwise the bucket is compiled again without library reductions
(`bucketjit._compile.workarounds.library_options`), whatever its size.
`bucketjit._compile.nan_reductions` predicts the second case from the program, which saves the
first compile.
"""

from __future__ import annotations

import re

# Text of XLA's optimised HLO: the kind of a library fusion, and what a line of a fusion looks like.
_LIBRARY = "__ynn_fusion"
_NAME = re.compile(r"^%([\w.\-]+) ", re.MULTILINE)
_CALLED = re.compile(rf"calls=%([\w.\-]+)[^\n]*{_LIBRARY}")
_INSTRUCTION = re.compile(
    r"^ +(?:ROOT )?%(?P<name>\S+) = (?P<dtype>\w+)\[[\d,]*\]\S* "
    r"(?P<opcode>[\w\-]+)\((?P<operands>[^)]*)\)"
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
_CARRIED = _ELEMENTWISE | {"bitcast", "reshape", "transpose"}
# Opcodes and dtypes that the library is known to compute rightly together with a reduction.
_TRUSTED = frozenset(("parameter", "constant", "iota", "broadcast", "reduce", "dot", *_CARRIED))
_DTYPES = frozenset(("pred", "s32", "u32", "s64", "u64", "f16", "bf16", "f32", "f64"))

# Results whose elements may all differ. An array of equal numbers is a broadcast in XLA's text.
_FULL = frozenset(("parameter", "constant", "dot", "reduce"))


def has_wrong_reductions(text: str) -> bool:
    """Whether an executable has a library reduction that may be wrong."""
    called = set(_CALLED.findall(text))
    if not called:
        return False
    computations = re.split(r"^}.*$", text, flags=re.MULTILINE)
    names = map(_NAME.search, computations)
    return any(
        name is not None and name[1] in called and " reduce(" in found and _is_wrong(found)
        for found, name in zip(computations, names, strict=True)
    )


def _is_wrong(computation: str) -> bool:
    """Whether a library fusion with a reduction has an instruction that may make it wrong."""
    full: set[str] = set()  # what has numbers of its own along all axes, as far as it is known
    for line in computation.splitlines():
        if not line.startswith("  "):
            continue
        match = _INSTRUCTION.match(line)
        if match is None:  # a line that this module cannot read is not trusted
            return True
        opcode, operands = match["opcode"], _OPERAND.findall(match["operands"])
        if opcode not in _TRUSTED or match["dtype"] not in _DTYPES:
            return True
        if opcode == "dot" and not full.issuperset(operands):
            return True
        if opcode in _FULL or (opcode in _CARRIED and not full.isdisjoint(operands)):
            full.add(match["name"])
    return False
