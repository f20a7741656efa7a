"""Argument types that several commands share."""

from __future__ import annotations

import argparse


def positive_int(text: str) -> int:
    """Parse an int of at least 1."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"expected a positive int, got {text!r}")
    return int(text)
