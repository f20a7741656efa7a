"""How large the house is: lines, files, packages, floors, names. What is here only ever goes down.

The aims are 26,000 lines of code, 42,000 lines, 220 files, and `decide` asked in four files.
"""

import ast
import functools
import importlib
import inspect
import io
import tokenize
from collections import Counter
from pathlib import Path

from tests.test_layers import PACKAGES, modules, package, packages_used, parsed

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def code_lines(path: Path) -> int:
    """The lines with a token, without docstrings, comments and blank lines; imports count."""
    tokens = list(tokenize.generate_tokens(io.StringIO(path.read_text()).readline))
    lines: set[int] = set()
    begins = True
    for token, after in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
        if token.type in _NO_CODE:
            begins = begins or token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            continue
        ends = after.type in (tokenize.NEWLINE, tokenize.COMMENT)
        if not (token.type == tokenize.STRING and begins and ends):
            lines.update(range(token.start[0], token.end[0] + 1))
        begins = False
    return len(lines)


def test_lines_and_files() -> None:
    paths = list(modules().values())
    assert sum(map(code_lines, paths)) <= LIMIT["code"]
    assert sum(path.read_text().count("\n") for path in paths) <= LIMIT["lines"]
    assert len(paths) <= LIMIT["files"]
    tests = Path(__file__).parent.rglob("*.py")
    assert sum(map(code_lines, tests)) <= LIMIT["tests"]
    long = [m for m, path in modules().items() if path.read_text().count("\n") > 400]
    assert len(long) <= LIMIT["long"], long


def test_packages_and_floors() -> None:
    folders = {package(m) for m in modules() if m.count(".")}
    assert len(folders) <= LIMIT["packages"]
    used: dict[str, set[str]] = {name: set() for name in PACKAGES}
    for module, path in modules().items():
        used[package(module)] |= packages_used(path) - {package(module)}

    @functools.cache
    def floor(name: str) -> int:
        return 1 + max(map(floor, used[name] & folders), default=0)

    assert max(map(floor, folders)) <= LIMIT["floors"]


def test_names_of_classes() -> None:
    names = Counter(
        node.name
        for path in modules().values()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    )
    several = sorted(name for name, count in names.items() if count > 1)
    assert len(several) <= LIMIT["names"], several


def test_private_methods_are_not_overridden() -> None:
    overridden: set[str] = set()
    for module in modules():
        if module == "__main__":
            continue
        name = "bucketjit" if module == "__init__" else f"bucketjit.{module}"
        for _, cls in inspect.getmembers(importlib.import_module(name), inspect.isclass):
            bases = [b for b in cls.__mro__[1:] if b.__module__.startswith("bucketjit")]
            for attribute, value in vars(cls).items():
                is_private = attribute.startswith("_") and not attribute.startswith("__")
                is_method = inspect.isfunction(value) or isinstance(value, property)
                if is_private and is_method and any(attribute in vars(b) for b in bases):
                    overridden.add(f"{cls.__module__}.{cls.__name__}.{attribute}")
    assert len(overridden) <= LIMIT["overridden"], sorted(overridden)


def test_decisions_are_asked_for_in_few_files() -> None:
    asking = [
        module
        for module, path in modules().items()
        if any(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "decide"
            for node in ast.walk(parsed(path))
        )
    ]
    assert len(asking) <= LIMIT["asking"], asking


LIMIT = {
    "code": 28_982,
    "lines": 45_773,
    "files": 213,
    "tests": 31_393,
    "long": 0,
    "packages": 13,
    "floors": 9,
    "names": 0,
    "overridden": 0,
    "asking": 4,
}
