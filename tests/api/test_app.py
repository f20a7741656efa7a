"""The command line as a whole: exit codes, one line for each error, pipes."""

import importlib
import sys
import tomllib
from pathlib import Path

import pytest

import bucketjit
from bucketjit._api.commands import app
from bucketjit._api.commands.command import Command
from tests.alone import run_python

ROOT = Path(bucketjit.__file__).parents[1]


def one_line(error):
    assert error.endswith("\n") and error.count("\n") == 1, error
    return error


def piped(command):
    """What a shell does with a command line of bucketjit."""
    command = command.replace("bucketjit", f"'{sys.executable}' -m bucketjit")
    script = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
    return run_python("-c", script, "bash", "-o", "pipefail", "-c", command, PYTHONUNBUFFERED="")


def test_sizes_may_be_piped_in():
    done = piped("printf '17\\n18\\n200\\n' | bucketjit plan --k 2 --json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Boundaries([18, 200])" in done.stdout


def test_a_reader_that_has_seen_enough_is_no_error_to_report():
    done = piped("seq 1 20000 | bucketjit plan --k 1 --json | head -1")
    assert (done.stdout, done.stderr) == ("{\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_device_that_is_full_is_one_line_and_code_1():
    done = piped("echo 3 | bucketjit plan - --json > /dev/full")
    assert done.returncode == 1
    assert "No space left on device" in one_line(done.stderr)


@pytest.mark.parametrize("words", [("plan", "a\nb"), ("plan", "x", "--a\nb")])
def test_errors_of_words_with_newlines_are_one_line(tmp_path, words):
    done = run_python("-m", "bucketjit", *words, folder=tmp_path)
    assert done.returncode != 0 and "a b" in one_line(done.stderr)


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "required: COMMAND"),
        (["bake"], "invalid choice: 'bake'"),
        (["plan", "--k"], "--k: expected one argument"),
        (["plan", "--k", "0"], "--k: expected a positive int, got '0'"),
        (["plan", "--multiple-of", "s=8"], "--multiple-of: expected a positive int, got 's=8'"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        app.main(words)
    assert caught.value.code == 2
    assert message in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("command", ["plan", "report"])
def test_a_file_that_cannot_be_read_is_one_line_and_code_1(command, tmp_path, capsys):
    assert app.main([command, str(tmp_path / "none")]) == 1
    error = one_line(capsys.readouterr().err)
    assert error.startswith(f"python -m bucketjit {command}: cannot open {tmp_path}/none: No such")

    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert app.main([command, str(tmp_path / "binary")]) == 1
    assert one_line(capsys.readouterr().err).endswith("/binary is not text\n")


@pytest.mark.parametrize("command", ["plan", "report"])
def test_a_terminal_is_no_file(command, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    with pytest.raises(SystemExit) as caught:
        app.main([command, "-"])
    assert caught.value.code == 2
    assert "name a file, or pipe one in" in one_line(capsys.readouterr().err)


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as caught:
        app.main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for command in app.COMMANDS:
        assert command.name in out and command.summary in out
        with pytest.raises(SystemExit):
            app.main([command.name, "--help"])
        assert command.description.splitlines()[0] in capsys.readouterr().out


def test_the_script_names_itself(capsys, monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["bucketjit"].partition(":")
    assert getattr(importlib.import_module(module), name) is app.main
    for program in ("/opt/bin/bucketjit", r"bucketjit.exe"):
        monkeypatch.setattr(sys, "argv", [program, "plan", "nowhere"])
        assert app.main() == 1
        assert one_line(capsys.readouterr().err).startswith("bucketjit plan: cannot open nowhere")


def test_tables(tmp_path, capsys):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("3\n17\n")
    assert app.main(["plan", str(lengths), "--k", "2"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("2 calls of ") and out[1].split() == [
        *("plan", "executables", "waste", "strategy")
    ]
    assert [line.split()[1] for line in out if line.startswith("pow2 ")] == ["2"]
    assert any("Boundaries([" in line and "%" in line for line in out)
    assert app.main(["cache", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("0 executables, 0 B\nfunction ")


def test_version(capsys):
    with pytest.raises(SystemExit):
        app.main(["--version"])
    assert capsys.readouterr().out == f"bucketjit {bucketjit.__version__}\n"


def test_an_interrupt_is_no_traceback(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    command = Command("wait", "waits", (), interrupted)
    monkeypatch.setattr(app, "COMMANDS", (command,))
    assert app.main(["wait"]) == 130
    assert capsys.readouterr() == ("", "")
