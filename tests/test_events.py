"""Log lines and listeners: what they are told, and in which words."""

import logging
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bucketjit import BucketedExec
from bucketjit.errors import FallbackWarning, SpecError
from bucketjit.types import Event
from tests.alone import run_well
from tests.comparison import ones


def news(told: list[Event]) -> list[str]:
    """The details of new signatures, without what they were traced as."""
    details = [e.detail for e in told if e.kind == "signature"]
    return [d.split("; traced as")[0] for d in details]


def watched(fn: Any, **options: Any) -> tuple[BucketedExec, list[Event]]:
    told: list[Event] = []
    return BucketedExec(fn, **options).with_pow2().with_on_event(told.append), told


def test_the_first_signature() -> None:
    executor, told = watched(lambda x, w: x @ w, dynamic_axes=("b, _", None))
    for n in (3, 4, 9):
        executor(ones(n, 2), ones(2, 2))
    assert [e.kind for e in told] == ["signature", "compile", "compile"]
    assert told[0].detail == "new; traced as x: float32[b, 2]"
    assert told[0].sizes == {"b": 3} and told[0].seconds > 0


def test_sizes_and_many_arguments() -> None:
    executor, told = watched(lambda n, xs: sum(x.sum() for x in xs) + n, dynamic_axes=("n", "n"))
    executor(3, [ones(3) for _ in range(40)])
    line = told[0].detail
    assert line.startswith("new; traced as n: size n, xs[0]: float32[n], ")
    assert line.endswith(", xs[6]: float32[n] and 33 more")


def test_an_axis_that_varies() -> None:
    executor, told = watched(lambda x: x.sum())
    for shape in ((3, 32), (5, 32), (5, 48), (4, 50)):
        executor(ones(*shape))
    assert news(told) == ["new", "traced anew: axis 1 of x varies (32, then 48): opened as axis1"]


def test_axes_that_part() -> None:
    executor, told = watched(lambda x, y: x.sum() + y.sum())
    executor(ones(3), ones(3))
    executor(ones(3), ones(5))
    assert news(told)[1:] == ["traced anew: axis 0 of y is 5 where batch is 3: opened as batch_1"]


def test_an_axis_that_cannot_be_opened() -> None:
    executor, told = watched(lambda x: x @ np.ones((x.shape[1].__index__(), 2)))
    executor(ones(3, 2))
    executor(ones(3, 4))
    assert "axis 1 of x varies (2, then 4)" in news(told)[1]


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        (ones(3, dtype=np.int32), "x: traced for float32[_], called with int32[_]"),
        (ones(3, 2), "x: traced for float32[_], called with float32[_, _]"),
        ([ones(3)], "x: traced for float32[_], called with a container of x[0]"),
    ],
)
def test_another_type(argument: Any, reason: str) -> None:
    executor, told = watched(lambda x: jax.tree.map(jnp.sum, x))
    executor(ones(3))
    executor(argument)
    assert [n for n in news(told) if n.startswith(f"traced anew: {reason}")], news(told)


def test_the_reason_is_told_against_what_is_nearest() -> None:
    executor, told = watched(lambda x: x * 2)
    executor(ones(3, 4))
    executor(ones(3, 4, 2))
    executor(ones(3, 4).astype(np.int32))
    assert news(told)[1:] == [
        "traced anew: x: traced for float32[_, _], called with float32[_, _, _]",
        "traced anew: x: traced for float32[_, _], called with int32[_, _]",
    ]


def test_a_guard_that_breaks_and_a_static_size() -> None:
    executor, told = watched(lambda x: x.sum() if x.shape[0] > 4 else x.max(), dynamic_axes="b, _")
    executor(ones(3, 2))
    executor(ones(6, 2))
    executor(ones(7, 2))  # the program for b >= 5 serves it
    executor(ones(7, 3))
    assert news(told)[1:] == [
        "traced anew: b = 6 breaks the guard b <= 4",
        "traced anew: axis 1 of x is 3, not 2",
    ]


def test_explaining_is_no_event() -> None:
    executor, told = watched(lambda x: x * 2)
    executor.explain(ones(3))
    assert told == []
    executor(ones(3))
    assert news(told) == ["new"]


def test_one_line_each_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def total(x: Any) -> Any:
        return sum(x[i] for i in range(x.shape[0]))

    executor = BucketedExec(total).with_pow2().with_maxsize(1)
    with caplog.at_level(logging.INFO, "bucketjit"), pytest.warns(FallbackWarning):
        for n in (3, 4):
            executor(ones(n))
    lines = [record.getMessage() for record in caplog.records if record.name == "bucketjit"]
    kinds = [line.split(" ")[1].rstrip(":") for line in lines]
    assert kinds == ["signature", "compile", "fallback", "signature", "evict", "compile"]
    assert all(line.endswith(": an exact shape") for line in lines if "compile" in line)
    assert lines[-2].endswith("=3: the least recently used, for want of room (maxsize=1)")
    assert all(line.startswith("total: ") and "\n" not in line for line in lines)
    assert [r.levelname for r in caplog.records if "fallback" in r.getMessage()] == ["WARNING"]


def test_what_is_told_is_one_line() -> None:
    assert str(Event("error", "f", detail="two\n  lines")) == "f: error: two lines"


def test_a_listener_that_fails_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fails(event: Event) -> None:
        raise RuntimeError("no disk")

    executor, told = watched(lambda x: x * 2)
    executor = executor.with_on_event(fails).with_on_event(told.append)
    np.testing.assert_array_equal(executor(ones(3)), 2 * ones(3))
    assert [e.kind for e in told] == ["signature"] * 2 + ["compile"] * 2  # both listen
    assert "no disk" in caplog.text


def test_what_is_no_listener() -> None:
    with pytest.raises(SpecError, match="on_event: expected a function of an event, got 3"):
        BucketedExec(jnp.sum).with_on_event(3)  # type: ignore[arg-type]


_WITHOUT_LOGGING = """
    import numpy as np, jax.numpy as jnp
    from bucketjit import BucketedExec
    total = BucketedExec(lambda x: jnp.linalg.eigvals(x[:, None] * x).real).with_pow2()
    total(np.ones(3, np.float32))
    total(np.ones(5, np.float32))
"""


def test_a_warning_is_told_once_where_logging_is_not_configured() -> None:
    done = run_well("-c", textwrap.dedent(_WITHOUT_LOGGING))
    assert done.stderr.count("padding would mix") == 1
    assert "FallbackWarning" in done.stderr and "bucketjit <lambda>: fallback" not in done.stderr


def test_a_program_that_configures_logging_gets_the_lines(caplog: pytest.LogCaptureFixture) -> None:
    executor, told = watched(lambda x: jnp.linalg.eigvals(x[:, None] * x).real)
    with caplog.at_level(logging.WARNING, "bucketjit"), pytest.warns(FallbackWarning) as warned:
        executor(ones(3))
    assert [e.kind for e in told].count("fallback") == 1 and len(warned) == 1
    assert [r.levelname for r in caplog.records if "fallback" in r.getMessage()] == ["WARNING"]
