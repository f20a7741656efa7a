"""Tables of an executor: in terminals, files and notebooks."""

from __future__ import annotations

import io
from html.parser import HTMLParser
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit._api.commands.app import main
from bucketjit.errors import FallbackWarning


def used(fn: Any = lambda x: x.sum(axis=1)) -> BucketedExec:
    executor = BucketedExec(fn).with_pow2()
    for n in (3, 5, 7):
        executor(np.ones((n, 2), np.float32))
    return executor


def test_plain_where_the_output_is_piped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    file = io.StringIO()
    print(used().report(), file=file)
    text = file.getvalue()
    assert "\x1b" not in text and "Executables" in text and "x: float32[batch, 2]" in text
    assert ["4", "0"] in [line.split()[:2] for line in text.splitlines()]


def test_sizes_have_no_unit() -> None:
    """Whatever their variables are called."""
    executor = BucketedExec(lambda x: x * 2, dynamic_axes="seconds, n_bytes, since").with_pow2()
    executor(np.ones((3, 1500, 5), np.float32))
    lines = [line.split()[:3] for line in str(executor.report()).splitlines()]
    assert ["4", "2,048", "8"] in lines


def test_no_wider_than_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, str(used().report()).splitlines()[2:])) <= 60


def test_the_command_line_shows_the_same(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    executor = used()
    (tmp_path / "stats.json").write_text(executor.stats().to_json())
    assert main(["report", str(tmp_path / "stats.json")]) == 0
    summary, head, tables = str(executor.report()).split("\n", 2)
    assert (summary, head) == (executor.stats().summary, repr(executor))
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert shown == [summary, *(line.rstrip() for line in tables.splitlines())]


class Texts(HTMLParser):
    """Tags that are open, and the text of cells."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def test_html_is_well_formed_and_escaped() -> None:
    def evil(x: Any, how: Any) -> Any:
        return sum(x[i] for i in range(x.shape[0]))

    evil.__qualname__ = "<script>alert('x')</script>"
    executor = BucketedExec(evil, static_argnames="how").with_pow2()
    with pytest.warns(FallbackWarning):
        executor(np.ones(3, np.float32), how="<b>")
    html = executor._repr_html_()
    parser = Texts()
    parser.feed(html)
    assert parser.open == [] and "script" not in parser.tags and "b" in parser.tags
    assert "<script>alert('x')</script>" in parser.text
    assert "symbolic size" in parser.text


def test_repr_is_one_line() -> None:
    class Wide:
        def bucket(self, n: int) -> int:
            return n

        def __repr__(self) -> str:
            return "Wide(\n  1)"

    executor = BucketedExec(jnp.sum).with_strategy(Wide())
    assert repr(executor) == "<BucketedExec sum, Wide( 1), 0 executables>"
    executor(np.ones(3, np.float32))
    assert str(executor) == repr(executor) == "<BucketedExec sum, Wide( 1), 1 executable>"


def test_of_an_executor_that_has_done_nothing() -> None:
    executor = BucketedExec(lambda x: x)
    assert "calls" in str(executor.report()) and "Executables" not in str(executor.report())
    assert "calls" in executor._repr_html_()
