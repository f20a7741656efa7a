"""Every model of every library equals `jax.jit`, and hardly any runs exact."""

from typing import Any

import pytest

from tests.ecosystem.model import WAYS, Model
from tests.ecosystem.runner import libraries, run

LEAST_SHARE = 0.99  # of the models, masked or paired
DAILY = 1  # models of each library that run in every change


def cases() -> list[Any]:
    found = []
    for library, models, skipped in libraries():
        if skipped:
            found.append(pytest.param(None, id=library, marks=pytest.mark.skip(reason=skipped)))
        for i, model in enumerate(models):
            marks = [pytest.mark.xfail(reason=model.defect, strict=True)] if model.defect else []
            marks += [] if i < DAILY else [pytest.mark.slow]
            name = f"{library}: {model.name} ({', '.join(model.axes())})"
            found.append(pytest.param(model, id=name, marks=marks))
    return found


CASES = cases()


@pytest.mark.parametrize("model", CASES)
def test_equals_jit(model: Model) -> None:
    outcome = run(model)
    assert not outcome.problem, outcome.problem
    served = f"is {outcome.way}, and was to be {model.way}: {outcome.reason}"
    assert WAYS.index(outcome.way) >= WAYS.index(model.way), served


def test_names_are_unique() -> None:
    names = [case.id for case in CASES]
    assert len(names) == len(set(names))


def test_hardly_any_runs_exact() -> None:
    models = [case.values[0] for case in CASES if case.values[0] is not None]
    lost = [m.name for m in models if m.defect or m.way == "exact"]
    assert len(lost) <= (1 - LEAST_SHARE) * len(models), lost
