"""What the files around the code say of it is so."""

import re
import tomllib
from pathlib import Path

import bucketjit
from tests.test_cases import CASES, QUICK

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOME = PROJECT["urls"]["Homepage"]


def test_the_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", text, re.M) == [bucketjit.__version__]
    assert f"repository-code: {HOME}\n" in text and f"license: {PROJECT['license']}\n" in text


def test_addresses_are_of_one_repository() -> None:
    places = [ROOT / name for name in ("CITATION.cff", "SECURITY.md", "pyproject.toml")]
    places += (ROOT / ".github").rglob("*.yml")
    for place in places:
        for url in re.findall(r"https://github\.com/[^\s\"')]+", place.read_text()):
            assert url.startswith(HOME), f"{place.name}: {url}"
    for url in PROJECT["urls"].values():
        page = re.match(rf"{HOME}/(?:blob|tree)/main/(.+)", url)
        assert page is None or (ROOT / page[1]).exists(), url


def test_classifiers_are_what_is_tested() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    tested = set(re.findall(r"\"(3\.\d+)\"", workflow))
    tested -= set(re.findall(r"python: \"(3\.\d+)\" } # not promised", workflow))
    named = (c.rpartition(" :: ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c)
    assert set(named) == tested
    assert PROJECT["requires-python"] == ">=" + min(tested)


def test_every_extra_that_is_named_is_there() -> None:
    extras = set(PROJECT["optional-dependencies"])
    for path in (*(ROOT / "bucketjit").rglob("*.py"), *ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        for name in re.findall(r"(?:bucketjit|'\.)\[(\w+)\]", path.read_text()):
            assert name in extras, f"{path.name}: {name}"


def test_the_quick_tests_have_each_rule_and_public_name() -> None:
    assert {p for case in QUICK for p in case.covers} == {p for c in CASES for p in c.covers}
    listed = (ROOT / "Makefile").read_text().split("QUICK := ")[1].split("\n\n")[0]
    tests = [ROOT / path for path in listed.replace("\\\n", "").split() if path.endswith(".py")]
    run = "\n".join(path.read_text() for path in tests)
    for path in (ROOT / "bucketjit").rglob("*.py"):
        run += "\n".join(re.findall(r"^ *(?:>>>|\.\.\.) .*", path.read_text(), re.M))
    names = (*bucketjit.__all__, *(m for m in dir(bucketjit.BucketedExec) if m[0] != "_"))
    assert not [name for name in names if not re.search(rf"\b{name}\b", run)]


def test_reports_of_bugs_come_with_what_is_needed() -> None:
    templates = ROOT / ".github" / "ISSUE_TEMPLATE"
    for name in ("bug_report.yml", "wrong_result.yml", "feature_request.yml"):
        text = (templates / name).read_text()
        assert "stats().to_json()" in text and ".explain(" in text, name
