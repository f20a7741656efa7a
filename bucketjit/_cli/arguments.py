"""Types of arguments that several commands take."""

from __future__ import annotations

import argparse


def positive_int(text: str) -> int:
    """An int of at least 1.

    Raises:
        ArgumentTypeError: It is none.
    """
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"expected a positive int, got {text!r}")
    return int(text)
