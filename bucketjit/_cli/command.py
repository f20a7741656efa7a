"""The record that describes a command, and the errors by which a command fails."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple


class CommandError(Exception):
    """The work failed; the message is one line for the user. Exit code 1."""


class UsageError(Exception):
    """The options make no sense together; the message is one line. Exit code 2."""


class Command(NamedTuple):
    """One command. Its module defines it as ``COMMAND``, and `app` lists it.

    Attributes:
        name: The word on the command line.
        summary: One line for the list of commands.
        description: What it does, for its own help.
        add_arguments: Adds its arguments to its parser.
        run: Does the work and prints the result. Raises `CommandError` if the work fails, and
            `UsageError` if the options contradict each other.
    """

    name: str
    summary: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]
