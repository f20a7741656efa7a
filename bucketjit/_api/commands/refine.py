"""The command ``refine``: fixes the sizes of an exported module, without its Python code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from bucketjit._api.commands.command import Command, CommandError, UsageError, shown_name
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


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", nargs="?", help="the module; - is standard input")
    parser.add_argument(
        "--sizes",
        nargs="*",
        default=[],
        metavar="b=16",
        help="the size of each variable; of a portable artifact, the type of each argument",
    )
    parser.add_argument(
        "--platform", metavar="NAME", help="of a module for several platforms, the one to keep"
    )
    parser.add_argument("--text", action="store_true", help="write MLIR text in place of bytes")
    parser.add_argument(
        "--check", action="store_true", help="also compile the result for the device of this host"
    )
    parser.add_argument(
        "-o", "--output", metavar="OUT", help="the file to write; - is standard output"
    )


def _run(options: argparse.Namespace) -> None:
    if options.file is None:
        raise UsageError("name FILE, before --sizes, which takes all words up to the next option")
    if options.output == "-":
        options.output = None
    sizes = _sizes(options.sizes)
    to_terminal = options.output is None and sys.stdout.isatty()
    if to_terminal and not options.text:
        raise UsageError("the result is no text: name a file with -o, or ask for --text")
    fixed = refine(_read(options.file), sizes, options.platform)
    if options.check:
        try:
            compile_module(read_module(fixed))
        except BadModule as error:
            raise CommandError(str(error)) from None
    if options.text:
        fixed = (text_of(read_module(fixed)).rstrip("\n") + "\n").encode()
    _write(options.output, fixed)


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


def _read(name: str) -> bytes:
    if name == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("name a file, or pipe one in")
        return sys.stdin.buffer.read()
    try:
        return Path(name).read_bytes()
    except OSError as error:
        shown = shown_name(name) or "a file whose name is empty"
        raise CommandError(f"cannot read {shown}: {error.strerror or error}") from None


def _write(name: str | None, content: bytes) -> None:
    if name is None:
        sys.stdout.buffer.write(content)
        return
    try:
        Path(name).write_bytes(content)
    except OSError as error:
        shown = shown_name(name) or "a file whose name is empty"
        raise CommandError(f"cannot write {shown}: {error.strerror or error}") from None


COMMAND = Command(
    name="refine",
    summary="fix the sizes of an exported module",
    description=_DESCRIPTION,
    add_arguments=_add_arguments,
    run=_run,
)
