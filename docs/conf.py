"""The site: ``make docs`` builds it from the pages of this folder, and fails if Sphinx warns."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jupytext

import bucketjit
from bucketjit._api.options import Options
from bucketjit._config import Config

ROOT = Path(__file__).parents[1]
FORGE = "https://github.com/bucketjit/bucketjit"
COMMANDS = ("plan", "report", "cache", "bench", "unpack")

project = "bucketjit"
author = "The bucketjit developers"
release = bucketjit.__version__
extensions = [
    *("myst_nb", "sphinx_copybutton"),
    *("sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"),
]
exclude_patterns = ["_build"]
default_role = "py:obj"
maximum_signature_line_length = 90
html_theme = "furo"
html_title = "bucketjit"
html_favicon = "_static/icon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_theme_options = {
    "source_repository": FORGE,
    "source_branch": "main",
    "source_directory": "docs/",
}

# Journeys are executed when they have changed. The lines that a page prints are one output.
nb_execution_mode = "cache"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
myst_heading_anchors = 3

autodoc_typehints = "none"  # docstrings tell them in words
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autosummary_generate = False
napoleon_use_ivar = True
napoleon_use_rtype = False

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

_LINK = re.compile(r"\]\((?P<path>\.\.?/[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")


def _linked(text: str, folder: Path) -> str:
    """A page of a folder with links that are right on the site.

    The page of the benchmarks is on it. Other files outside ``docs/`` are on the forge.
    """

    def target(match: re.Match[str]) -> str:
        found, anchor = (folder / match["path"]).resolve(), match["anchor"] or ""
        if found == ROOT / "benchmarks" / "README.md":
            return f"](/benchmarks.md{anchor})"
        if found.is_relative_to(ROOT / "docs"):
            return f"](/{found.relative_to(ROOT / 'docs')}{anchor})"
        return f"]({FORGE}/blob/main/{found.relative_to(ROOT)}{anchor})"

    return _LINK.sub(target, text)


def _help(command: str) -> str:
    """What a command of ``python -m bucketjit`` tells of itself."""
    words = [sys.executable, "-m", "bucketjit", command, "--help"]
    environment = {**os.environ, "COLUMNS": "88"}
    return subprocess.run(
        words, check=True, stdout=subprocess.PIPE, text=True, env=environment
    ).stdout


def _read(app: Any, name: str, source: list[str]) -> None:
    """Complete the text of a page by what is written elsewhere, and mend its links."""
    page = ROOT / "docs" / f"{name}.md"
    if name == "benchmarks":
        page = ROOT / "benchmarks" / "README.md"
        app.env.note_dependency(str(page))
        source[0] = page.read_text()
    if name == "reference/command_line":
        source[0] += "".join(f"\n## {c}\n\n```text\n{_help(c)}```\n" for c in COMMANDS)
    if page.parent.name == "journeys":
        link = f'\n<p><a href="{page.stem}.ipynb" download>This page as a notebook</a></p>\n'
        source[0] = re.sub(r"^# .*\n", lambda m: m[0] + link, source[0], count=1, flags=re.M)
    source[0] = _linked(source[0], page.parent)


def _write_notebooks(app: Any, error: Exception | None) -> None:
    """Write each journey as a notebook beside its page."""
    if error is None and app.builder.name == "html":
        for page in (ROOT / "docs" / "journeys").glob("*.md"):
            notebook = Path(app.outdir) / "journeys" / f"{page.stem}.ipynb"
            jupytext.write(jupytext.read(page), notebook)


def _is_field(app: Any, what: str, name: str, found: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of a named tuple, which its docstring tells."""
    return True if type(found).__name__ == "_tuplegetter" else None


def _with_options(
    app: Any, what: str, name: str, found: Any, options: Any, signature: str | None, returns: Any
) -> tuple[str, Any] | None:
    """Show the options of a bucketed function in the place of ``**options``, with defaults."""
    if not (signature or "").endswith("**options)"):
        return None
    fields = {field.name: field.default for field in dataclasses.fields(Config)}
    shown = []
    for option in Options.__annotations__:
        default = fields.get(option)
        default = default.value if isinstance(default, enum.Enum) else default
        default = "auto" if (name, option) == ("bucketjit.jit", "buckets") else default
        is_left_out = default in ((), dataclasses.MISSING)
        shown.append(f"{option}={None if is_left_out else default!r}")
    return signature.replace("**options", f"*, {', '.join(shown)}"), returns


def setup(app: Any) -> None:
    """Connect the functions of this file."""
    app.connect("autodoc-process-signature", _with_options)
    app.connect("source-read", _read)
    app.connect("build-finished", _write_notebooks)
    app.connect("autodoc-skip-member", _is_field)
