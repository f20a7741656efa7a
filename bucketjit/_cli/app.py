"""Parse the command line, run the command, and turn failures into one line and an exit code."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from bucketjit._cli import bench, cache, plan, report
from bucketjit._cli.command import Command, CommandError, UsageError
from bucketjit._errors import BucketJitError, in_one_line
from bucketjit._events import one_line
from bucketjit._version import __version__

COMMANDS: tuple[Command, ...] = (plan.COMMAND, report.COMMAND, cache.COMMAND, bench.COMMAND)

PROGRAM = "python -m bucketjit"
FAILURE, USAGE, INTERRUPTED = 1, 2, 130


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: error: {one_line(message)} (see {self.prog} --help)\n")


class _CommandParser(_Parser):
    """A parser of a command, whose options may stand between its other arguments too."""

    _is_apart = False  # options and other arguments are parsed one after the other

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse options first, wherever they are."""
        if self._is_apart:
            return super().parse_known_args(args, namespace)
        self._is_apart = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_apart = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words after ``python -m bucketjit``; those of this process by default.

    Returns:
        0; 1 if the work failed; 130 if it was interrupted.

    Raises:
        SystemExit: With code 2 if the command line is wrong; with 0 after ``--help``.
    """
    description = "Plans of buckets, reports of executors, and their files."
    parser = _Parser(prog=PROGRAM, description=description)
    parser.add_argument("--version", action="version", version=f"bucketjit {__version__}")
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=_CommandParser
    )
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=command.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, parser=subparser)
    _open_streams()
    options = parser.parse_args(argv)
    try:
        options.run(options)
        sys.stdout.flush()
    except UsageError as error:
        options.parser.error(str(error))
    except CommandError as error:
        print(f"{options.parser.prog}: {one_line(str(error))}", file=sys.stderr)
        return FAILURE
    except BucketJitError as error:
        print(f"{options.parser.prog}: {one_line(in_one_line(error))}", file=sys.stderr)
        return FAILURE
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # who reads has seen enough
            print(f"{options.parser.prog}: {one_line(in_one_line(error))}", file=sys.stderr)
        # What is still buffered must not fail at exit once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _open_streams() -> None:
    """Write to nowhere where a stream is closed, and what an encoding lacks by its number."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
