"""The documentation runs: every Python block of every page. Docstrings run as doctests do."""

import doctest
import importlib
import inspect
import pkgutil
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import bucketjit

ROOT = Path(__file__).parents[1]
BUILT = ROOT / "docs" / "_build"
PAGES = sorted(
    p
    for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
    if p.is_file() and not p.is_relative_to(BUILT)
)
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
    with warnings.catch_warnings(action="error"):
        run(page)


def test_the_readme_shows_code() -> None:
    assert (ROOT / "README.md") in WITH_CODE


# --- prose ------------------------------------------------------------------------------------

# Pages that a reader meets first: short sentences, and words that are explained before.
PLAIN = [
    page
    for page in PAGES
    if page.name not in ("CHANGELOG.md", "CONTRIBUTING.md", "coverage.md")
    and page.name not in ("ragged_rows.md", "frameworks.md")
]
LONGEST_SENTENCE = 30  # words


def paragraphs(text: str) -> list[str]:
    """The prose of a page: without blocks of code, tables, headings and comments."""
    text = re.sub(r"^( *)```.*?^\1```", "\n", text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^(\||#| {4}).*$", "", text, flags=re.M)
    text = re.sub(r"^ *([-*]|\d+\.) ", "\n", text, flags=re.M)
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def sentences(text: str) -> list[str]:
    found = []
    for paragraph in paragraphs(text):
        # A link is as long as what is shown of it; a piece of code is one word.
        shown = re.sub(r"\]\([^)]*\)", "]", paragraph)
        shown = re.sub(r"`[^`]*`", "`", shown)
        found += re.split(r"(?<=[.!?])[)*\"']*\s+", shown)
    return found


def test_no_sentence_of_a_page_is_long() -> None:
    every = [(page.name, s) for page in PLAIN for s in sentences(page.read_text())]
    assert [(page, s) for page, s in every if len(s.split()) > LONGEST_SENTENCE] == []


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 200
    # Code in a sentence counts by its words, too.
    whole = [s for part in paragraphs(text) for s in re.split(r"(?<=[.!?])\s+", part)]
    assert not [s for s in whole if len(s.split()) > LONGEST_SENTENCE]


def test_long_sentences_are_found() -> None:
    text = "# T\n\nShort. " + "word " * 31 + "end.\n\n- " + "item " * 30 + "\n- x y\n"
    assert [len(s.split()) for s in sentences(text)] == [1, 32, 30, 2]
    assert sentences("```python\na b\n```\n\n| a | b |\n\nOne [two](three four). Five.") == [
        "One [two].",
        "Five.",
    ]


def test_each_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = [p.relative_to(ROOT / "docs") for p in PAGES if p.parent.name in ("docs", "journeys")]
    missing = [
        str(page)
        for page in pages
        if f"]({page})" not in index or f"\n{page.with_suffix('')}\n" not in index
    ]
    assert missing == ["index.md"]


@pytest.mark.parametrize("file", sorted(ROOT.glob("docs/pictures/*.svg")), ids=lambda p: p.stem)
def test_the_pictures_are_those_of_their_scripts(file: Path) -> None:
    name = f"docs.pictures.{file.stem}"
    assert file.read_text() == importlib.import_module(name).picture(), f"python -m {name}"


# --- the page of all public names -------------------------------------------------------------

REFERENCE = ROOT / "docs" / "reference"


def described() -> list[str]:
    """The names that the pages of the reference describe, by the docstrings."""
    text = "\n".join(page.read_text() for page in sorted(REFERENCE.glob("*.md")))
    return re.findall(r"^\.\. auto(?!summary)\w+:: bucketjit\.([\w.]+)$", text, re.M)


def listed() -> list[str]:
    """The names that the index of the reference lists, each with a line."""
    text = (REFERENCE / "index.md").read_text()
    return re.findall(r"^   bucketjit\.([\w.]+)$", text, re.M)


def public_modules() -> list[ModuleType]:
    """The modules without an underscore below `bucketjit`."""
    names = [m.name for m in pkgutil.iter_modules(bucketjit.__path__)]
    names = [name for name in names if not name.startswith("_")]
    found = [importlib.import_module(f"bucketjit.{name}") for name in names]
    for package in [m for m in found if hasattr(m, "__path__") and m.__name__ != STRATEGIES]:
        # The modules of a public package are public, too, as those of the integrations are.
        for info in pkgutil.iter_modules(package.__path__):
            if not info.name.startswith("_"):
                found.append(importlib.import_module(f"{package.__name__}.{info.name}"))
    return found


STRATEGIES = "bucketjit.strategies"  # its modules are shown by the package alone


def public_names() -> set[str]:
    """Every public name as the reference writes it: ``jit``, ``errors.SpecError``."""
    names = set(bucketjit.__all__) - {"__version__"}
    for module in public_modules():
        prefix = module.__name__.removeprefix("bucketjit.")
        names |= {f"{prefix}.{name}" for name in getattr(module, "__all__", ())}
    return names


def methods() -> set[str]:
    members = inspect.getmembers(bucketjit.BucketedExec, callable)
    return {f"BucketedExec.{name}" for name, _ in members if not name.startswith("_")}


def test_the_reference_has_every_public_name() -> None:
    packages = {m.__name__.removeprefix("bucketjit.") for m in public_modules()}
    public = (public_names() | methods()) - packages
    assert sorted(described()) == sorted(public)
    assert sorted(listed()) == sorted(public)


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


def test_there_are_examples_in_docstrings() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    count = sum(len(t.examples) for m in modules() for t in finder.find(m))
    assert count >= 10


def test_public_names_say_what_they_are() -> None:
    for name in sorted(n for n in bucketjit.__all__ if n != "__version__"):
        value = getattr(bucketjit, name)
        assert (value.__doc__ or "").strip(), f"bucketjit.{name} has no docstring"
        for member, function in vars(value).items() if isinstance(value, type) else ():
            if not member.startswith("_") and callable(function):
                assert function.__doc__, f"bucketjit.{name}.{member} has no docstring"


# The package index shows README.md without the tree, so its links name files by these addresses.
FORGE = re.compile(
    r"https://(?:github\.com/bucketjit/bucketjit/blob|raw\.githubusercontent\.com/bucketjit/bucketjit)"
    r"/main/"
)


def broken_links(page: Path, text: str) -> list[str]:
    """The links of a page that should lead to a file of the tree, and do not."""
    broken = []
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        in_tree = FORGE.match(target)
        path = ROOT / target[in_tree.end() :] if in_tree else page.parent / target
        if (in_tree or not re.match(r"[a-z]+:", target)) and not path.exists():
            broken.append(target)
    return broken


def test_links_inside_the_repository_lead_somewhere() -> None:
    broken = {str(page): broken_links(page, page.read_text()) for page in PAGES}
    assert {page: targets for page, targets in broken.items() if targets} == {}
    blob = "https://github.com/bucketjit/bucketjit/blob/main/docs/"
    text = f"[a]({blob}axes.md#x) [b]({blob}gone.md) [c](gone.md) [d](https://example.com/gone)"
    assert broken_links(ROOT / "README.md", text) == [f"{blob}gone.md", "gone.md"]


def test_the_readme_can_be_read_on_the_package_index() -> None:
    targets = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert [target for target in targets if not target.startswith("https://")] == []
