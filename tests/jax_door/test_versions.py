"""The releases of JAX that are promised, and what happens where JAX lacks a name."""

import ast
import re
import subprocess
import time
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

import bucketjit
from bucketjit import BucketedExec
from bucketjit._jax import arrays, config, names
from bucketjit._jax.arrays import with_type
from bucketjit._jax.config import parts_of_a_linearization, set_linearization
from bucketjit._jax.names import NEWEST, OLDEST, USES, trouble_of_versions
from bucketjit.errors import FallbackWarning
from tests.alone import ROOT, run_python

# As many as there are: fewer is better, and one more needs a reason in the table.
MOST_NAMES = 58


# --- the window -------------------------------------------------------------------------------


def test_this_jax_is_tested() -> None:
    assert names.is_tested(jax.__version__)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.10.1", False),
        ("0.10.2", True),
        ("0.11.2", True),
        ("0.12.0.1", True),
        ("0.12.9", True),
        ("0.13.0", False),
        ("0.13.0.dev20260101", False),
        ("1.0", False),
    ],
)
def test_which_releases_are_tested(version: str, expected: bool) -> None:
    assert names.is_tested(version) is expected


def test_all_files_promise_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (needed,) = [line for line in project["dependencies"] if re.match(r"jax\W", line)]
    assert needed.startswith(f"jax>={OLDEST}")
    named = [c.rpartition(" ")[2] for c in project["classifiers"] if "Python :: 3." in c]
    pythons = f"Python {named[0]} to {named[-1]}"
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"jax {OLDEST} to {NEWEST}" in readme and pythons in readme
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert all(f'"{python}"' in workflow for python in named)
    lanes = re.findall(r'"(0\.\d+\.[\d.]+)"', workflow)
    assert lanes[0] == OLDEST and max(lanes).startswith(NEWEST)
    assert all(map(names.is_tested, lanes))


def test_the_lanes_have_promised_releases_and_tests_that_there_are() -> None:
    makefile, run = ((ROOT / name).read_text() for name in ("Makefile", ".ci/run"))
    releases = re.findall(r"JAX=(\S+)", run)
    assert len(releases) == 3 and all(map(names.is_tested, releases))
    (lane,) = re.findall(r"^LANE := (.+)$", makefile, re.M)
    assert all((ROOT / path).exists() for path in lane.split())


# --- the table --------------------------------------------------------------------------------


def door() -> dict[str, ast.Module]:
    files = ROOT.glob("bucketjit/_jax/**/*.py")
    return {path.stem: ast.parse(path.read_text()) for path in files}


def used_names() -> Iterator[tuple[str, str]]:
    """Each attribute that the door asks of a module below ``jax._src``, with the module."""
    for tree in door().values():
        modules = {
            target.id: node.value.args[0].value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) == "names.module"
            for target in node.targets
            if isinstance(target, ast.Name) and isinstance(node.value.args[0], ast.Constant)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            if isinstance(node.value, ast.Name) and node.value.id in modules:
                yield modules[node.value.id], node.attr
            elif ast.unparse(node.value).startswith("names.module("):
                yield ast.unparse(node.value).split("'")[1], node.attr


def held_names() -> set[tuple[str, str]]:
    """The names of the table, with the module."""
    return {
        (place, name)
        for places, names in USES
        for place in places.split("|")
        for name in names.split()
    }


def test_every_name_that_is_used_is_looked_up_at_import() -> None:
    held = {(module, name.split(".")[0]) for module, name in held_names()}
    assert set(used_names()) <= held, "bucketjit/_jax/names.py lacks these"


def test_every_name_that_is_looked_up_is_used() -> None:
    texts = "".join(ast.unparse(tree) for name, tree in door().items() if name != "names")
    unused = {name for _, name in held_names() if name.split(".")[-1] not in texts}
    # Python looks `len` up among the names of the module that has `convolve`.
    assert unused <= {"convolve"}


def test_every_name_says_why_since_when_and_until_when() -> None:
    text = Path(names.__file__).read_text()
    (table,) = re.findall(r"^USES = \(\n(.*?)^\)", text, re.S | re.M)
    entries = re.findall(r"((?:    #.*\n)*)    \(\n?\s*\"([\w.|]+)\"", table)
    assert len(entries) == len(USES)
    told = {place for comment, place in entries if comment}
    assert all(re.search(r"Since 0\.\d.*Until ", c, re.S) for c, _ in entries if c)
    assert told | {"ops.scatter"} >= {places for places, _ in USES}


def test_how_many_names_are_not_public() -> None:
    print(f"{names.FOUND} names of jax._src")
    assert names.FOUND <= MOST_NAMES


def test_looking_the_names_up_takes_no_time() -> None:
    def once() -> float:
        began = time.perf_counter()
        names._look_up()
        return time.perf_counter() - began

    assert min(once() for _ in range(5)) < 0.02


# --- names that are missing -------------------------------------------------------------------


def run(script: str, names: dict[str, list[str]]) -> subprocess.CompletedProcess[str]:
    """Run a script in a process whose JAX lacks names of some modules."""
    lines = ["import importlib, warnings", "import jax, jax.export"]
    for module, missing in names.items():
        lines.append(f"module = importlib.import_module('jax._src.{module}')")
        lines += [f"del module.{name}" for name in missing]
    return run_python("-c", "\n".join([*lines, script]))


def told(missing: str) -> str:
    return (
        f"bucketjit {bucketjit.__version__} is tested with jax {OLDEST} to {NEWEST}; this is "
        f"{jax.__version__}: these names are missing: {missing}; upgrade bucketjit or pin jax"
    )


def test_essential_names_that_are_missing_are_one_error() -> None:
    missing = {"core": ["trace_ctx"], "lax.lax": ["_reduce_jvp"]}
    done = run("import bucketjit; bucketjit.jit", missing)
    assert done.returncode == 1
    expected = told("jax._src.core.trace_ctx, jax._src.lax.lax._reduce_jvp")
    assert done.stderr.splitlines()[-1] == f"bucketjit.errors.VersionError: {expected}"
    assert done.stderr.count("VersionError: ") == 1 and "Warning" not in done.stderr


def test_a_jax_that_is_too_old_is_to_be_upgraded() -> None:
    script = "jax.__version__ = '0.10.1'\nimport bucketjit; bucketjit.jit"
    done = run(script, {"random.core": ["prng"]})
    last = done.stderr.splitlines()[-1]
    assert "this is 0.10.1: these names are missing: jax._src.random.core.prng" in last
    assert last.endswith("; upgrade jax")


def test_an_unknown_jax_that_has_all_names_is_logged() -> None:
    script = """
import logging
logging.basicConfig(level="INFO")
warnings.simplefilter("error")
jax.__version__ = "9.9"
import bucketjit
bucketjit.jit
"""
    done = run(script, {})
    assert done.returncode == 0, done.stderr
    assert f"is tested with jax {OLDEST} to {NEWEST}; this is 9.9" in done.stderr


def test_a_name_that_is_missing_at_run_time_is_no_defect_of_a_rule(monkeypatch: Any) -> None:
    def rule(ctx: Any, operand: Any) -> Any:
        return with_type(operand.sum(), operand.dtype, False)

    executor = BucketedExec(lambda x: x.sum()).with_pow2().with_rules({jax.lax.reduce_sum_p: rule})
    with monkeypatch.context() as patch:
        patch.delattr(jax.lax, "convert_element_type")
        with pytest.warns(
            FallbackWarning, match=f"tested with jax {OLDEST} to {NEWEST}; in {jax.__version__}"
        ):
            assert executor(np.ones(5, np.float32)) == 5
    (reason,) = executor.stats().fallback_reasons
    assert "module 'jax.lax' has no attribute" in reason and "a defect" not in reason


def error_of(work: Callable[[], object]) -> Exception:
    with pytest.raises((AttributeError, ImportError)) as caught:
        work()
    return caught.value


def test_which_errors_are_trouble_of_versions() -> None:
    import jax._src.core as core

    def imported() -> None:
        from jax._src.core import no_such_name  # noqa: F401

    def no_module() -> None:
        import jax._src.no_such_module  # noqa: F401

    of_versions = [lambda: core.no_such_name, lambda: jax.no_such_name, imported, no_module]
    assert all(map(trouble_of_versions, map(error_of, of_versions)))
    assert "no attribute 'no_such_name'" in trouble_of_versions(error_of(of_versions[0]))

    def import_of_others() -> None:
        import no_such_package  # noqa: F401

    others = [lambda: jnp.ones(3).no_such_name, lambda: np.no_such_name, import_of_others]
    assert not any(map(trouble_of_versions, map(error_of, others)))
    # An attribute of an object of JAX's counts where the door asks for it.
    in_door = types.FunctionType((lambda x: x.no_such_name).__code__, vars(arrays))
    assert trouble_of_versions(error_of(lambda: in_door(jnp.ones(3))))


def test_a_rule_of_the_user_that_fails_is_a_defect_still() -> None:
    def rule(ctx: Any, operand: Any) -> Any:
        return operand.no_such_name

    executor = BucketedExec(lambda x: x.sum()).with_pow2().with_rules({jax.lax.reduce_sum_p: rule})
    with pytest.warns(FallbackWarning, match="this is a defect of the rule"):
        assert executor(np.ones(5, np.float32)) == 5


def test_a_linearization_with_other_parts_is_left_to_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts_of_a_linearization() in (4, 5)
    primitive = jax.extend.core.Primitive("of_no_linearization")
    monkeypatch.setattr(config, "parts_of_a_linearization", lambda: 6)
    set_linearization(primitive, lambda *args: None)
    assert primitive not in config._ad.primitive_linearizations
