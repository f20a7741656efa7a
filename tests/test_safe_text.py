"""What others wrote is safe wherever it leaves: no escape sequence, and UTF-8 can hold it."""

import io
import logging
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bucketjit import BucketedExec, Fallback
from bucketjit._events import LONGEST, LONGEST_LABEL, one_line, printable
from bucketjit.errors import FallbackError, MaskingError
from bucketjit.types import Event

# Clears a screen, half a character, a title, other directions of writing, and what ends lines.
EVIL = "\x1b[2J \ud800 \x1b]0;title\x07 \u202eabc \x85 \u2028 \x00 \t \r end"

NAME = EVIL.replace("\ud800", "")  # of functions and arguments: JAX takes no such half


def is_safe(text: str) -> bool:
    text.encode()
    return all(c.isprintable() or c == "\n" for c in text)


def test_only_line_ends_stay() -> None:
    assert printable("a\nb ü 漢") == "a\nb ü 漢"
    assert printable("\r\n\x7f\xa0\U000e0001") == "\\r\n\\x7f\\xa0\\U000e0001"
    assert one_line(" a\n\tb\u2028c\x1b ") == "a b c\\x1b"
    assert is_safe(printable(EVIL)) and is_safe(one_line(EVIL))


@pytest.mark.parametrize("text", ["", "short", "x" * 500, "x" * 501, "\x1b" * 130, "ab " * 1000])
def test_what_is_long_loses_its_middle(text: str) -> None:
    for safe in (printable, one_line):
        whole, cut = safe(text), safe(text, 500)
        assert len(cut) <= 500 and is_safe(cut)
        if len(text) <= 500 and len(whole) <= 500:
            assert cut == whole
        else:
            start, end = cut.split(" ... ")
            assert text.startswith(start.replace("\\x1b", "\x1b").rstrip("\\x1"))
            assert len(end) in range(160, 170)


def test_labels_are_of_a_length_that_monitoring_systems_take() -> None:
    assert len(one_line("\U0001f600" * 10**5, LONGEST_LABEL).encode()) <= 2048


def refuses(ctx: Any, operand: Any) -> Any:
    raise MaskingError(f"no sine of {EVIL}{'x' * 10**5}", f"ask {EVIL}")


def fails(ctx: Any, operand: Any) -> Any:
    raise ValueError(EVIL)


def evil_executor(rule: Any = refuses, **options: Any) -> BucketedExec:
    def fn(**arguments: Any) -> Any:
        return [jnp.sin(x) for x in arguments.values()]

    fn.__name__, fn.__qualname__ = NAME, EVIL
    return (
        BucketedExec(fn, dynamic_axes={NAME: "b"}, **options)
        .with_pow2()
        .with_rules({lax.sin_p: rule})
    )


def called(executor: BucketedExec, *sizes: int) -> list[str]:
    """The warnings of some calls."""
    with warnings.catch_warnings(record=True, action="always") as warned:
        for n in sizes:
            executor(**{NAME: np.ones(n, np.float32)})
    return [str(w.message) for w in warned]


@pytest.mark.parametrize("rule", [refuses, fails])
def test_events_log_lines_and_warnings(rule: Any, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Event] = []
    with caplog.at_level(logging.DEBUG, "bucketjit"):
        messages = called(evil_executor(rule).with_on_event(told.append), 3, 5)
    kinds = {event.kind for event in told}
    assert kinds >= {"signature", "compile", "fallback"}
    for event in told:
        assert is_safe(event.name) and is_safe(event.detail) and len(event.detail) <= LONGEST
        assert all(map(is_safe, event.sizes))
    lines = [record.getMessage() for record in caplog.records if record.name == "bucketjit"]
    assert len(lines) == len(told) and all(map(is_safe, lines))
    assert not any("\n" in line for line in lines)
    (message,) = messages
    assert is_safe(message) and len(message) <= LONGEST and "\\x1b[2J" in message


def test_an_event_that_is_printed_is_safe() -> None:
    assert is_safe(str(Event("error", EVIL, {EVIL: 3}, detail=EVIL)))


def test_listeners_get_what_is_safe_already_as_it_is() -> None:
    told: list[Event] = []
    executor = BucketedExec(lambda x: x * 2).with_pow2().with_on_event(told.append)
    executor(np.ones(3, np.float32))
    assert [e.name for e in told] == ["<lambda>"] * 2 and told[0].sizes == {"batch": 3}


def test_metrics() -> None:
    client = pytest.importorskip("prometheus_client")
    from bucketjit import metrics

    registry = client.CollectorRegistry()
    good = BucketedExec(lambda x: x * 2).with_pow2()
    metrics.prometheus(good, name="good", registry=registry)
    evil, unnamed = evil_executor(), BucketedExec(lambda **k: k, dynamic_axes={NAME: "_"})
    for executor, name in ((evil, None), (unnamed, "unnamed")):
        metrics.prometheus(executor, name=name, registry=registry)
        called(executor, 3, 5)
    good(np.ones(3, np.float32))
    text = client.generate_latest(registry).decode()
    assert is_safe(text) and 'bucketjit_calls_total{function="good"} 1.0' in text
    labels = [v for f in registry.collect() for s in f.samples for v in s.labels.values()]
    assert all(map(is_safe, labels)) and max(map(len, labels)) <= LONGEST_LABEL
    assert any(label.startswith("sin: no sine of \\x1b[2J") for label in labels)


def test_tables_html_and_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    executor = evil_executor()
    called(executor, 3, 5)
    report = executor.report()
    explained = executor.explain(**{NAME: np.ones(3, np.float32)})
    shown = [str(report), repr(report), executor._repr_html_(), report._repr_html_()]
    shown += [repr(executor), str(explained)]
    warmed = executor.warmup(sizes={"b": [9]}, **{NAME: np.ones(3, np.float32)}, progress=True)
    shown += [str(warmed), *capsys.readouterr()]
    assert all(map(is_safe, shown))
    assert "\\x1b[2J" in shown[0] and "\\x1b[2J" in shown[2] and "\\x1b[2J" in shown[-1]
    assert "\n" not in repr(executor)


def test_drawings(tmp_path: Any) -> None:
    executor = evil_executor()
    called(executor, 3, 5)
    executor.plot(tmp_path / "evil.svg")
    assert is_safe((tmp_path / "evil.svg").read_text(encoding="utf-8"))


def test_errors_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    from bucketjit._api.commands.app import main

    for words in (["report", "\x1b[2J"], ["cache", "list", "\udcff\x1b[2J"], ["plan", "\x1b[2J"]):
        assert main(words) == 1
        error = capsys.readouterr().err
        assert is_safe(error) and "\\x1b[2J" in error
    with pytest.raises(SystemExit):
        main(["\x1b[2J"])
    assert is_safe(capsys.readouterr().err)


def test_exceptions_hold_what_was_said() -> None:
    """They do not leave: whoever catches one finds the text as it was."""
    executor = evil_executor(fallback=Fallback.ERROR)
    with pytest.raises(FallbackError) as raised:
        called(executor, 3)
    assert EVIL in raised.value.reason


def test_a_stream_of_utf8_takes_what_is_printed() -> None:
    executor = evil_executor()
    called(executor, 3)
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    print(executor.report(), executor, file=stream, flush=True)
