"""Tables of an executor: in terminals, files and notebooks."""

import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec
from bucketjit._api.commands.app import main
from bucketjit._runtime import statistics
from bucketjit._stages.report import picture_of
from bucketjit.errors import FallbackWarning, SpecError
from tests.comparison import ones


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
    assert "Python loop" in parser.text


STRIPS = {
    "few": ([(3, 2), (5, 2), (7, 2)], ["n: 3 calls of 3 sizes, 2 buckets, 25 % padding", "4, 8."]),
    "full": ([(8, 2)], ["n: 1 call of 1 size, 1 bucket, 0 % padding", "buckets 8."]),
    "none": ([(0, 2)], ["n: 1 call of 1 size, 0 buckets, 0 % padding", "buckets none."]),
    "two": ([(3, 9), (40, 999)], ["n: 2 calls of 2 sizes, 2 buckets", "s: 2 calls", "16, 1024."]),
    "many": ([(n, 2) for n in range(1, 200, 23)], ["9 sizes, 5 buckets", "1, 32, 64, 128, 256."]),
}


@pytest.mark.parametrize("name", STRIPS)
def test_a_notebook_shows_a_picture_with_a_text_alternative(name: str) -> None:
    shapes, told = STRIPS[name]
    axes = "n, s" if name == "two" else "n, _"
    executor = bucketjit.jit(lambda x: x * 2, dynamic_axes=axes, buckets="pow2")
    for shape in shapes:
        executor(np.ones(shape, np.float32))
    report = executor.report()
    assert report.picture in report._repr_html_()
    svg = ElementTree.fromstring(report.picture)
    of = {tag: svg.findall(f".//{{*}}{tag}") for tag in ("title", "rect", "text")}
    (title,) = of["title"]
    assert svg.get("role") == "img" and all(part in str(title.text) for part in told), title.text
    width, height = map(float, str(svg.get("viewBox")).split()[2:])
    for box in of["rect"]:
        x, y, w, h = (float(str(box.get(key))) for key in ("x", "y", "width", "height"))
        assert min(x, y, w, h) >= 0 and x + w <= width and y + h <= height
    # Bars of calls and lines of buckets have two colours; text has that of the page.
    lines = sum(
        len({b.sizes[v] for b in executor.stats().buckets if not b.exact})
        for v in axes[:4:3]
        if v != "_"
    )
    assert sum(box.get("width") == "1.5" for box in of["rect"]) == lines
    assert {text.get("fill") for text in of["text"]} == {None} and svg.get("fill") == "currentColor"


def test_a_picture_of_thousands_of_buckets_stays_small() -> None:
    picture = picture_of(
        {
            "size_counts": {"n": dict.fromkeys(range(1, 5001), 1)},
            "buckets": [{"exact": False, "sizes": {"n": n}} for n in range(1, 5001)],
            "dimension_waste": {"n": 0.25},
        }
    )
    assert "5,000 buckets" in picture and "19, 20, ..., 5000." in picture
    assert len(picture) < 50_000


def test_no_picture_without_calls_and_plain_words_in_tables() -> None:
    executor = bucketjit.jit(lambda x: x * math.sqrt(x.shape[0]), dynamic_axes="n")
    assert executor.report().picture == "" and "<svg" not in executor._repr_html_()
    executor(np.ones(3, np.float32))
    text = str(executor.report())
    assert "traced at several sizes" in text and "paired" not in text and "inlined" not in text


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


def test_memory_of_a_device() -> None:
    double = bucketjit.jit(lambda x: x * 2, buckets="pow2")
    double(np.ones(3, np.float32))
    (bucket,) = double.stats().buckets
    assert bucket.memory["results"] == 16 <= bucket.nbytes
    report = double.report(memory=bucket.memory["results"])
    assert "1 of 1 executable need" in report.exceeding and "batch=4 (" in report.exceeding
    assert double.report().exceeding == ""
    for wrong in (0, "16 GB"):
        with pytest.raises(SpecError, match="memory must be a number of bytes"):
            double.report(memory=wrong)  # type: ignore[arg-type]


# --- drawings ---


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


# --- the line that says what bucketing has saved ---


def exponentials(x: jax.Array, times: int = 1) -> jax.Array:
    return jnp.exp(x).sum() * times


def test_a_stream() -> None:
    executor = BucketedExec(exponentials).with_pow2()
    assert executor.stats().summary == "no calls yet"
    for n in (5, 6, 7, 8, 5, 5, 9):
        executor(ones(n))
    stats = executor.stats()
    assert stats.shapes == 5
    saved = 3 * min(b.compile_seconds for b in stats.buckets)
    told = re.fullmatch(
        r"5 shapes, 2 executables: 3 compiles, about ([\d.]+) (m?)s, saved; padding (\d+) %",
        stats.summary,
    )
    assert told and float(told[1]) * (1e-3 if told[2] else 1) == pytest.approx(saved, rel=0.5)
    assert int(told[3]) == round(100 * stats.padding_waste) == 30
    assert str(executor.report()).splitlines()[0] == stats.summary


def test_shapes_are_those_that_jit_compiles_for() -> None:
    """Combinations of the sizes of all variables, other axes, types and static arguments."""
    fn = BucketedExec(exponentials, dynamic_axes=("b, s, _",), static_argnames="times").with_pow2()
    plain = jax.jit(exponentials, static_argnames="times")
    for dtype, width, times in (
        (np.float32, 2, 1),
        (np.float32, 3, 1),
        (np.int32, 2, 1),
        (np.float32, 2, 2),
    ):
        for b, s in ((3, 5), (3, 6), (4, 5), (4, 6), (3, 5)):
            fn(ones(b, s, width, dtype=dtype), times=times)
            plain(ones(b, s, width, dtype=dtype), times=times)
    stats = fn.stats()
    assert stats.shapes == plain._cache_size() == 16
    assert stats.summary.startswith("16 shapes, 4 executables: 12 compiles, about ")


def test_examples_of_map() -> None:
    executor = BucketedExec(lambda x: x * 2, dynamic_axes="n, _").with_pow2()
    executor.map([ones(n, 2) for n in (3, 4, 3, 7)])
    assert executor.stats().shapes == 3
    executor(ones(7, 2))
    assert executor.stats().shapes == 3


def test_nothing_saved() -> None:
    same = BucketedExec(exponentials).with_pow2()
    for _ in range(3):
        same(ones(4))
    assert same.stats().summary == "1 shape, 1 executable: no compile saved yet; padding 0 %"
    exact = BucketedExec(exponentials)
    for n in (3, 4):
        exact(ones(n))
    assert exact.stats().summary == "2 shapes, 2 executables: no compile saved yet; padding 0 %"
    warm = BucketedExec(exponentials).with_pow2()
    warm.warmup(ones(1), sizes={"batch": [2, 4, 8]}, progress=False)
    assert warm.stats().summary == "no calls yet, 3 executables ready"
    warm(ones(3))
    assert warm.stats().summary == ("1 shape, 3 executables: no compile saved yet; padding 25 %")


def test_compiles_that_wait_in_the_background_save_no_more_time() -> None:
    seconds = (1.5, 29.5, 1.4, 20.4)
    stats: dict[str, Any] = dict(calls=50, shapes=16, compiles=4, loads=0, fallback_calls=0)
    stats |= dict(padding_waste=0.5, compile_seconds=sum(seconds))
    stats["buckets"] = [{"compile_seconds": s} for s in seconds]
    assert statistics.summary_of(stats) == (
        "16 shapes, 4 executables: 12 compiles, about 18 s, saved; padding 50 %"
    )
