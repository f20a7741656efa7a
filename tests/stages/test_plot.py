"""Drawings of an executor."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit.errors import SpecError


def test_what_is_drawn(tmp_path: Path) -> None:
    executor = BucketedExec(lambda x: x * 2, dynamic_axes="b, s").with_pow2()
    executor.plot(tmp_path / "empty.svg")
    assert ElementTree.parse(tmp_path / "empty.svg").getroot().tag.endswith("svg")
    for b, s in ((3, 17), (5, 9), (7, 33)):
        executor(np.ones((b, s), np.float32))
    executor.plot(tmp_path / "cache.SVG")
    assert (tmp_path / "cache.SVG").read_text() == executor.report().picture
    for path in ("", "plot", "plot.png", tmp_path, None, 5):
        with pytest.raises(SpecError, match=r"a path that ends in \.svg, got"):
            executor.plot(path)  # type: ignore[arg-type]
