"""Argument types that several commands share."""

from __future__ import annotations

import argparse


def positive_int(text: str) -> int:
    """Parse an int of at least 1.

    Args:
        text: The text on the command line.

    Returns:
        The int.

    Raises:
        ArgumentTypeError: The text is no such int.
    """
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"expected a positive int, got {text!r}")
    return int(text)
