"""Drawings of an executor."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit.errors import MissingExtraError, SpecError


def used() -> BucketedExec:
    executor = BucketedExec(lambda x: x * 2, dynamic_axes="b, s").with_pow2()
    for b, s in ((3, 17), (5, 9), (7, 33)):
        executor(np.ones((b, s), np.float32))
    return executor


def test_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures = []
    from matplotlib.figure import Figure

    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, path: (figures.append(self), save(self, path))
    )
    used().plot(tmp_path / "cache.png")
    assert (tmp_path / "cache.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    b, s, waste, _ = figure.axes
    assert sorted(line.get_xdata()[0] for line in b.get_lines()) == [4, 8]
    assert sorted(line.get_xdata()[0] for line in s.get_lines()) == [16, 32, 64]
    assert sum(bar.get_height() for bar in b.patches) == 3
    assert [text.get_text() for text in waste.get_xticklabels()] == ["b", "s", "all"]
    assert pyplot.get_fignums() == []


def test_an_executor_that_has_done_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    BucketedExec(lambda x: x).plot(tmp_path / "empty.svg")
    assert ElementTree.parse(tmp_path / "empty.svg").getroot().tag.endswith("svg")


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SpecError, match=r"ends in one of .*svg.*plot\.cake"):
        used().plot(tmp_path / "plot.cake")
    for path in ("", "plot", tmp_path, None, 5):
        with pytest.raises(SpecError, match="a path that ends in a format"):
            used().plot(path)  # type: ignore[arg-type]
    for module in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # type: ignore[arg-type]
    with pytest.raises(MissingExtraError, match=r"plots need matplotlib.*'bucketjit\[cli\]'"):
        used().plot(tmp_path / "plot.png")
