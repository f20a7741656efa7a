"""The direction of imports, read off the source; and that importing the package does nothing."""

import ast
import functools
import importlib
import json
import operator
import re
import sys
import textwrap
from pathlib import Path

import pytest

import bucketjit
from tests.alone import run_well

PACKAGE = Path(bucketjit.__file__).parent
ARCHITECTURE = PACKAGE.parent / "docs" / "architecture.md"

# Downhill only: a package imports from those that stand before it, and from itself. The files at
# the root of the package have their places too.
PACKAGES = (
    *("_version", "errors", "_raised", "_extras", "_events", "_environment", "strategies"),
    *("_config", "_jax", "_ir", "_arrays", "_tracing", "_masking", "_compile", "_runtime"),
    *("_processes", "_stages", "_artifact", "_api", "metrics", "rules", "stages", "types"),
    *("integrations", "__init__", "__main__"),
)

# Features that have a folder, each with the file that others import from.
DOORS = {"_tracing.computed": "sizes", "_runtime.learning": "learning"}


@functools.cache
def modules() -> dict[str, Path]:
    """Every module, by its dotted name inside the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts)] = path
    return found


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def package(module: str) -> str:
    """``_masking.rules.control`` is in the package ``_masking``."""
    return module.split(".")[0]


def imported(path: Path) -> list[tuple[str, ast.stmt]]:
    """What a module imports, at any depth: dotted names with the statements."""
    found: list[tuple[str, ast.stmt]] = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: a relative import"
            found += [(f"{node.module}.{alias.name}", node) for alias in node.names]
    return found


def packages_used(path: Path) -> set[str]:
    return {
        part if (part := name.split(".")[1]) in PACKAGES else "__init__"
        for name, _ in imported(path)
        if name.startswith("bucketjit.")
    }


def modules_used(path: Path) -> set[str]:
    """The modules of the package that a module imports, by their dotted names."""
    known, used = modules(), set()
    for name, _ in imported(path):
        parts = name.split(".")[1:] if name.startswith("bucketjit.") else []
        while parts and ".".join(parts) not in known:
            parts = parts[:-1]
        if parts:
            used.add(".".join(parts))
    return used


def test_every_package_has_its_place() -> None:
    # A package that comes later finds its place in the tuple here, and is then held to it.
    assert {package(m) for m in modules()} == set(PACKAGES)


def test_imports_go_downhill() -> None:
    assert [
        f"{module} imports {used}, which is above it"
        for module, path in modules().items()
        for used in packages_used(path)
        if PACKAGES.index(used) > PACKAGES.index(package(module))
    ] == []


@pytest.mark.parametrize("folder", DOORS)
def test_a_feature_has_one_door(folder: str) -> None:
    door = DOORS[folder]
    assert f"`{door}`" in (ast.get_docstring(parsed(modules()[f"{folder}.__init__"])) or "")
    outside = (path for module, path in modules().items() if not module.startswith(folder))
    used = {name for path in outside for name in modules_used(path)}
    assert {name for name in used if name.startswith(f"{folder}.")} == {f"{folder}.{door}"}


def test_nothing_imports_in_a_circle() -> None:
    graph = {module: modules_used(path) - {module} for module, path in modules().items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for used in graph[name]:
                visit(used, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_the_file_of_a_package_is_its_docstring() -> None:
    # Public names, and the table of all families.
    others = {"strategies.__init__", "integrations.__init__", "_masking.rules.__init__"}
    for module in [m for m in modules() if m.endswith(".__init__") and m not in others]:
        tree = parsed(modules()[module])
        assert len(tree.body) == 1 and (ast.get_docstring(tree) or "").strip(), module


def test_the_architecture_lists_the_folders() -> None:
    rows = re.findall(r"^\| (`.+?`) \|", ARCHITECTURE.read_text().split("\n## ")[2], re.M)
    listed = {name for row in rows for name in re.findall("`(.+?)`", row)}
    folders = {m.removesuffix(".__init__") for m in modules() if m.endswith(".__init__")}
    inside = {name.replace(".", "/") + "/" for name in folders if "." in name}
    assert listed == {*PACKAGES, *inside} - {"__init__", "__main__"}


def test_rules_and_their_interpreter_do_not_know_each_other() -> None:
    """The table is an argument."""
    used = modules_used(modules()["_masking.interpreter"])
    assert not [name for name in used if name.startswith("_masking.rules")]
    rules = [m for m in modules() if m.startswith("_masking.rules.")]
    assert not [m for m in rules if "_masking.interpreter" in modules_used(modules()[m])]


def test_the_cache_and_the_learner_know_nothing_of_jax() -> None:
    for name, _ in imported(modules()["_compile.cache"]):
        assert not name.startswith(("jax", "bucketjit", "numpy")), name
    for name, _ in imported(modules()["_runtime.learning.learner"]):
        assert not name.startswith(("jax", "bucketjit._")), name


def test_strategies_know_nothing_of_jax() -> None:
    for module, path in modules().items():
        if package(module) == "strategies":
            assert not [n for n, _ in imported(path) if n.startswith("jax")]
            allowed = {"strategies", *(() if "._search." in module else ("errors",))}
            assert packages_used(path) <= allowed


def test_errors_import_nothing_of_the_package() -> None:
    assert packages_used(modules()["errors"]) == set()


def test_only_one_door_to_non_public_jax() -> None:
    private = []
    for module, path in modules().items():
        if package(module) == "_jax":
            continue
        private += [
            f"{module}: {name}, line {node.lineno}"
            for name, node in imported(path)
            if name.startswith(("jax.", "jaxlib")) and ("._" in name or name.startswith("jaxlib"))
        ]
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute) and node.attr == "_src":
                private.append(f"{module}: ._src, line {node.lineno}")
    assert private == []


def test_each_use_of_non_public_jax_is_explained() -> None:
    """Every function of `_jax` says why and, where it reaches behind the API, since when."""
    for module, path in modules().items():
        if package(module) == "_jax":
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    is_public = not node.name.startswith("_")
                    says = f"{module}.{node.name} says nothing"
                    assert not is_public or ast.get_docstring(node), says


ALLOWED_AT_IMPORT = (
    *(ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign),
    *(ast.AugAssign, ast.If),
)


def test_modules_only_define() -> None:
    for module, path in modules().items():
        for node in parsed(path).body:
            text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            assert text or isinstance(node, ALLOWED_AT_IMPORT), f"{module}, line {node.lineno}"


def test_the_package_file_only_names() -> None:
    """What it imports for type checkers is what it finds at run time, and what it lists."""
    named: dict[str, str] = {}
    for node in ast.walk(parsed(modules()["__init__"])):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("bucketjit"):
            assert not any(alias.asname for alias in node.names)
            named |= {alias.name: str(node.module) for alias in node.names}
    assert named.keys() == set(bucketjit.__all__) <= set(dir(bucketjit))
    del named["__version__"]
    for name, module in named.items():
        value = importlib.import_module(f"{module}.{name}" if module == "bucketjit" else module)
        wanted = value if module == "bucketjit" else getattr(value, name)
        assert getattr(bucketjit, name) is wanted
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = bucketjit.nothing  # type: ignore[attr-defined]


_IMPORT = """
    import sys, threading
    before = set(threading.enumerate())
    import jax
    config = {k: v for k, v in jax.config.values.items()}
    hash_before = hash(tuple(map(str, config.items())))
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda e, *_, **__: compiled.append(e))
    import bucketjit
    own = [name for name in sys.modules if name.startswith("bucketjit")]
    assert len(own) <= 60, own
    for name in bucketjit.__all__:
        getattr(bucketjit, name)
    from jax._src import xla_bridge
    assert not xla_bridge.backends_are_initialized(), "a backend was started"
    assert compiled == [], compiled
    assert hash(tuple(map(str, jax.config.values.items()))) == hash_before, "configuration"
    assert set(threading.enumerate()) == before, "threads"
    from jax._src.export import shape_poly
    assert "__bool__" not in vars(shape_poly._DimExpr), "hooks"
    heavy = {"optax", "sklearn", "matplotlib", "rich", "hypothesis", "pytest", "scipy.optimize"}
    heavy |= {"equinox", "flax", "prometheus_client"}
    assert not heavy & set(sys.modules), heavy & set(sys.modules)
    print("imported", bucketjit.__version__)
"""


def test_nothing_runs_at_import() -> None:
    strict = ("-W", "error::DeprecationWarning:bucketjit")
    done = run_well(*strict, "-c", textwrap.dedent(_IMPORT), PYTHONPATH=str(PACKAGE.parent))
    assert done.stdout.strip() == f"imported {bucketjit.__version__}"
    assert done.stderr == ""


_FIRST_CALL = """
    import json, sys
    import jax, numpy as np
    jax.jit(lambda x: (x * 2).sum())(np.ones(5, np.float32))
    at_start = set(sys.modules)
    import bucketjit
    at_import = set(sys.modules) - at_start
    total = bucketjit.jit(lambda x: (x * 2).sum())
    at_jit = set(sys.modules) - at_start
    total(np.ones(5, np.float32))
    at_call = set(sys.modules) - at_start
    total(np.ones(5, np.float32))  # modules that the first call loads do not make another key
    assert total.stats().compiles == 1 and total.stats().fallback_calls == 0
    print(json.dumps([*map(sorted, (at_import, at_jit, at_call))]))
"""

# What a first call does not use; ``_stages.views`` has methods of the executor.
_UNUSED = (
    *("_artifact", "_processes", "_stages.(?!views)", "_runtime.rows", "_runtime.equations"),
    *("_runtime.checked_calls", "_compile.(rows|files.(fingerprint|stored))", "_masking.checks"),
    *("_masking.vector_signs", "_masking.rules.(?!elementwise|reductions)"),
    *("_tracing.(concrete|made_for|pairing|skeleton|computed.(?!sizes))", "metrics"),
    *("strategies.(_search|fitting)", "integrations"),
)
# What traces, masks and lowers.
_UNUSED_BY_JIT = (
    *("_masking", "_tracing.(attempt|signature|symbolic|traced_programs)", "_ir.jax_patches"),
    *("_compile.(bodies|kernel|workarounds)", "_jax.size_hooks", "_runtime.learning.learner"),
)


def test_what_is_not_used_is_not_imported() -> None:
    done = run_well("-c", textwrap.dedent(_FIRST_CALL), PYTHONPATH=str(PACKAGE.parent))
    at_import, at_jit, at_call = json.loads(done.stdout)
    assert at_import == ["bucketjit", "bucketjit._version"]
    for loaded, unused, most in (
        (at_jit, (*_UNUSED, *_UNUSED_BY_JIT), 105),
        (at_call, _UNUSED, 165),
    ):
        ours = [name for name in loaded if name.startswith("bucketjit")]
        assert len(ours) <= most, f"{len(ours)} modules"
        names = re.compile(rf"bucketjit\.({'|'.join(unused)})")
        assert [name for name in ours if names.match(name)] == []
        others = {name.split(".")[0] for name in loaded} - sys.stdlib_module_names
        assert others <= {"bucketjit", "cachetools", "jax", "numpy"}


PUBLIC = ("errors", "integrations", "metrics", "rules", "stages", "strategies", "types")


def test_public_names() -> None:
    assert len(bucketjit.__all__) <= 20
    assert {n for n in bucketjit.__all__ if not isinstance(getattr(bucketjit, n), type)} >= set(
        PUBLIC
    )


@pytest.mark.parametrize("module", ["", *PUBLIC, "integrations.equinox", "integrations.nnx"])
def test_a_public_module_lists_its_names(module: str) -> None:
    found = operator.attrgetter(module)(bucketjit) if module else bucketjit
    assert sorted(set(found.__all__)) == found.__all__
    held = {name for name in dir(found) if not name.startswith("_")}
    assert set(found.__all__) - {"__version__"} <= held
    # A module that only collects names holds no others.
    if module in ("rules", "stages", "types"):
        assert set(found.__all__) == held


def without_docstrings(node: ast.AST) -> int:
    """The lines of a definition, its docstrings and those of what is inside left out."""
    lines = set(range(node.lineno, node.end_lineno + 1))
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner):
            lines -= set(range(inner.body[0].lineno, inner.body[0].end_lineno + 1))
    return len(lines)


def test_nothing_is_too_long_to_read() -> None:
    for module, path in modules().items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                assert without_docstrings(node) <= 60, f"{module}.{node.name}"
            if isinstance(node, ast.ClassDef):
                assert without_docstrings(node) <= 320, f"{module}.{node.name}"
