"""Parses the command line, runs the command, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from bucketjit._api.commands import saved, sizes
from bucketjit._api.commands.command import CommandError, UsageError
from bucketjit._events import one_line
from bucketjit._raised import in_one_line
from bucketjit._version import __version__
from bucketjit.errors import BucketJitError

COMMANDS = (sizes.plan, saved.report, saved.cache, sizes.bench, saved.unpack)

FAILURE, USAGE, INTERRUPTED = 1, 2, 130


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error as one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: error: {one_line(message)} (see {self.prog} --help)\n")


def _parser(prog: str, description: str) -> _Parser:
    return _Parser(prog, None, description, formatter_class=argparse.RawDescriptionHelpFormatter)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands = {command.name: command for command in COMMANDS}
    listed = "\n".join(f"  {name:<8}{command.summary}" for name, command in commands.items())
    all_commands = _parser(
        _program(),
        f"Plans of buckets, reports of bucketed functions, and their files. Commands:\n\n{listed}",
    )
    all_commands.add_argument("--version", action="version", version=f"bucketjit {__version__}")
    all_commands.add_argument("command", metavar="COMMAND", choices=commands)
    _open_streams()
    command = commands[all_commands.parse_args(words[:1]).command]
    parser = _parser(f"{_program()} {command.name}", command.description)
    for names, how in command.arguments:
        parser.add_argument(*names, **how)
    options = parser.parse_intermixed_args(words[1:])  # options may stand between other words
    try:
        command.run(options)
        sys.stdout.flush()
    except UsageError as error:
        parser.error(str(error))
    except (CommandError, BucketJitError, OSError) as error:
        if not isinstance(error, BrokenPipeError):  # `head` and the like close the pipe early
            print(f"{parser.prog}: {one_line(_told(error))}", file=sys.stderr)
        if isinstance(error, OSError) and error.filename is None:
            # The interpreter flushes standard output at exit; what is buffered must not fail again.
            with contextlib.suppress(io.UnsupportedOperation):  # it is no file of the system
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _told(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot open {error.filename}: {error.strerror}"
    return str(error) if isinstance(error, CommandError) else in_one_line(error)


def _program() -> str:
    """How this program was started, as the first words of its messages."""
    is_script = Path(sys.argv[0]).stem == "bucketjit"
    return "bucketjit" if is_script else "python -m bucketjit"


def _open_streams() -> None:
    """Replace closed streams by the null device, and write unencodable characters as escapes."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
