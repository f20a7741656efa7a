"""docs/coverage.md is up to date, and every rule has a case."""

from docs.coverage_page import ALL_CASES, PAGE, UNCOVERED, cases_of, keys, keys_here, page


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: make coverage-page"


def test_every_rule_has_a_case() -> None:
    missing = {name for name in keys_here() if not cases_of(name)} - UNCOVERED.keys()
    assert not missing, f"no case covers {sorted(missing)}"


def test_exceptions_are_rules() -> None:
    assert UNCOVERED.keys() <= keys()


def test_cases_cover_primitives_that_have_a_rule() -> None:
    known = keys()
    for case in ALL_CASES:
        assert set(case.covers) <= known, f"{case.name} covers {set(case.covers) - known}"
