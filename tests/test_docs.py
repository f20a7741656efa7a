"""The documentation runs: every Python block of every page, and the examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import bucketjit

ROOT = Path(__file__).parents[1]
PAGES = sorted(p for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")) if p.is_file())
BLOCK = re.compile(
    r"^(?P<indent> *)```python(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=indent)```", re.M | re.S
)


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """``(line, info, code)`` of each Python block of a page."""
    text = page.read_text()
    found = []
    for match in BLOCK.finditer(text):
        indent = len(match["indent"])
        code = "\n".join(line[indent:] for line in match["code"].splitlines())
        found.append((text[: match.start()].count("\n") + 2, match["info"].strip(), code))
    return found


WITH_CODE = [p for p in PAGES if blocks(p)]


def run(page: Path) -> dict[str, Any]:
    """Runs the blocks of a page one after the other, in one namespace, as a reader would."""
    names: dict[str, Any] = {"__name__": "__page__"}
    for line, info, code in blocks(page):
        # Blocks that need optional libraries run in tests/integrations/test_recipes.py.
        if "no-run" in info or "needs=" in info:
            continue
        # Line numbers of a traceback are those of the page.
        source = "\n" * (line - 1) + code
        if ">>>" in code:
            test = doctest.DocTestParser().get_doctest(code, names, page.name, str(page), line - 1)
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            runner = doctest.DebugRunner(optionflags=flags)
            runner.run(test, clear_globs=False)
            names.update(test.globs)
        else:
            exec(compile(source, str(page), "exec"), names)
    return names


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(page)


def test_the_readme_shows_code() -> None:
    assert (ROOT / "README.md") in WITH_CODE


def test_a_block_that_fails_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Text\n\n```python\nx = 1\n```\n\nmore\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as raised:
        run(page)
    assert raised.traceback[-1].lineno == 9  # counted from 0
    page.write_text("```python\n>>> 1 + 1\n3\n\n```\n")
    with pytest.raises(doctest.DocTestFailure):
        run(page)


def modules() -> list[ModuleType]:
    found = [bucketjit]
    for info in pkgutil.walk_packages(bucketjit.__path__, "bucketjit."):
        found.append(importlib.import_module(info.name))
    return found


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.__name__)
def test_the_examples_in_docstrings_run(module: ModuleType) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, _ = doctest.testmod(module, optionflags=flags, raise_on_error=False)
    assert failed == 0


def test_there_are_examples_in_docstrings() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    count = sum(len(t.examples) for m in modules() for t in finder.find(m))
    assert count >= 10


@pytest.mark.parametrize(
    "name", sorted(n for n in vars(bucketjit) if not n.startswith("_") and n != "strategies")
)
def test_public_names_say_what_they_are(name: str) -> None:
    value = getattr(bucketjit, name)
    assert (value.__doc__ or "").strip(), f"bucketjit.{name} has no docstring"
    if isinstance(value, type):
        for member, function in vars(value).items():
            if not member.startswith("_") and callable(function):
                assert function.__doc__, f"bucketjit.{name}.{member} has no docstring"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
