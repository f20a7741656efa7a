"""The command ``refine``: fixes the sizes of an exported module, without its Python code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from bucketjit._api.commands.command import (
    PLATFORM,
    Command,
    CommandError,
    UsageError,
    argument,
    named,
    read_bytes,
)
from bucketjit._api.refining import refine
from bucketjit._jax.stablehlo import BadModule, compile_module, read_module, text_of

_DESCRIPTION = """\
Fix the sizes of an exported module, without the Python code that it was made from. FILE holds the
bytes of jax.export.Exported.serialize(), or a StableHLO portable artifact. The result is a
portable artifact, whose sizes are all fixed:

    python -m bucketjit refine model.bin --sizes b=16 s=32 -o model_16_32.mlirbc

A portable artifact does not name its sizes. It takes the type of each argument instead:

    python -m bucketjit refine model.mlirbc --sizes 16x32xi32 384xf32 --text

FILE may also be a .bkt file that was saved with dynamic=True; its module takes the constants of
the file first. FILE must be trusted: the parser of jaxlib does not guard against hostile ones.
"""
_ARGUMENTS = (
    argument("file", metavar="FILE", nargs="?", type=named, help="the module; - is standard input"),
    argument(
        "--sizes",
        nargs="*",
        default=[],
        metavar="b=16",
        help="the size of each variable; of a portable artifact, the type of each argument",
    ),
    PLATFORM,
    argument("--text", action="store_true", help="write MLIR text in place of bytes"),
    argument("--check", action="store_true", help="also compile it for the device of this host"),
    argument("-o", "--output", metavar="OUT", default="-", type=named, help="the file to write"),
)


def _run(options: argparse.Namespace) -> None:
    if options.file is None:
        raise UsageError("name FILE, before --sizes, which takes all words up to the next option")
    if options.output == "-" and sys.stdout.isatty() and not options.text:
        raise UsageError("the result is no text: name a file with -o, or ask for --text")
    sizes = _sizes(options.sizes)
    fixed = refine(read_bytes(options.file), sizes, options.platform)
    if options.check:
        try:
            compile_module(read_module(fixed))
        except BadModule as error:
            raise CommandError(str(error)) from None
    if options.text:
        fixed = (text_of(read_module(fixed)).rstrip("\n") + "\n").encode()
    if options.output == "-":
        sys.stdout.buffer.write(fixed)
    else:
        Path(options.output).write_bytes(fixed)


def _sizes(words: list[str]) -> Any:
    """What `refine` takes: a dict if the words name variables, else a list of types."""
    if not any("=" in word for word in words) and words:
        return words
    sizes = {}
    for word in words:
        name, equals, number = word.partition("=")
        if not (equals and name and number.isascii() and number.isdigit()):
            raise UsageError(f"--sizes: expected a size such as b=16, got {word!r}")
        if name in sizes:
            raise UsageError(f"--sizes: {name} is there twice")
        sizes[name] = int(number)
    return sizes


COMMAND = Command("refine", "fix the sizes of an exported module", _DESCRIPTION, _ARGUMENTS, _run)
