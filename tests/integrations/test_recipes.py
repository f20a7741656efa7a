"""The recipes of docs/frameworks.md run, each by itself, where their libraries are installed."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.test_docs import ROOT, blocks

PAGE = ROOT / "docs" / "frameworks.md"
RECIPES = blocks(PAGE)


def libraries(info: str) -> list[str]:
    return info.removeprefix("needs=").split(",")


def test_every_library_has_a_recipe() -> None:
    needed = [library for _, info, _ in RECIPES for library in libraries(info)]
    assert needed.count("flax") == 2  # NNX and linen
    others = {"equinox", "haiku", "keras", "optax", "jraph", "numpyro", "tokenizers", "grain"}
    assert set(needed) == {"flax", *others}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("recipe", RECIPES, ids=[info for _, info, _ in RECIPES])
def test_a_recipe_runs(recipe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    line, info, code = recipe
    # That a recipe is short, and compares with the library's own `jit`, can be read off it.
    assert len(code.splitlines()) <= 30
    assert "assert_allclose" in code and "compiles ==" in code
    if "keras" in info:
        monkeypatch.setenv("KERAS_BACKEND", "jax")
    # The libraries themselves warn.
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        for library in libraries(info):
            pytest.importorskip(library)
        monkeypatch.chdir(tmp_path)
        names: dict[str, Any] = {"__name__": "__recipe__"}
        # Line numbers of a traceback are those of the page.
        exec(compile("\n" * (line - 1) + code, str(PAGE), "exec"), names)
