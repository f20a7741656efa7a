"""Lengths of real sentences: those of Python's manual, as examples/embed_sentences.py has them."""

import importlib
import re
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def sentence_lengths(count):
    """Words and marks in each of so many sentences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
        example = importlib.import_module("embed_sentences")
    return [len(re.findall(r"\w+|[^\w\s]", s)) for s in example.load_sentences(count)]
