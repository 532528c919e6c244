"""`mtpstats bench -np 4` beside `-np 1` and `llama-server`, which gets four requests at a time.

Same model, prompts, flags and threads; tokens per second are all generated tokens over the time
from the first prompt's reading to the last token. Runs take turns, so that a noisy machine disturbs
all alike; what counts is the median of the ratios within a turn. Examples:

    python benchmarks/parallel.py --turns 7
    python benchmarks/parallel.py --turns 5 --big --predict 48
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "llama")]

from oracle import tool  # noqa: E402
from tinymodels import make  # noqa: E402

from mtpstats.llama import load  # noqa: E402
from mtpstats.prompts import builtin  # noqa: E402

N_CTX = 512


def bench(model: Path, prompts: list[str], n_parallel: int, args: argparse.Namespace) -> float:
    """Tokens per second of one `mtpstats bench` run as a user would start it."""
    command = [sys.executable, "-m", "mtpstats", "bench", "-m", str(model), "--json"]
    command += [word for text in prompts for word in ("-p", text)]
    command += ["--no-escape", "-n", str(args.predict), "--temp", "0", "-c", str(N_CTX)]
    command += ["-t", str(args.threads), "--spec-draft-n-max", str(args.n_max)]
    command += ["-np", str(n_parallel), *(["--no-stats"] if args.no_stats else [])]
    done = subprocess.run(command, capture_output=True, check=True)
    total = json.loads(done.stdout)["total"]
    return total["tokens"] / sum(total["seconds"].values())


class Server:
    """A running `llama-server`; the first request is over before it is handed out."""

    def __init__(self, port: int) -> None:
        self.port = port

    def complete(self, prompt: str, n_predict: int) -> int:
        """How many tokens it generated."""
        body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "cache_prompt": False}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)["timings"]["predicted_n"]

    def run(self, prompts: list[str], args: argparse.Namespace) -> float:
        """Tokens per second of all prompts, a new request as soon as one is answered."""
        with ThreadPoolExecutor(args.parallel) as pool:
            began = time.perf_counter()
            made = list(pool.map(lambda prompt: self.complete(prompt, args.predict), prompts))
            return sum(made) / (time.perf_counter() - began)


@contextmanager
def serving(prefix: Path, model: Path, args: argparse.Namespace) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(tool(prefix, "llama-server")), "-m", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "-np", str(args.parallel), "-c", str(N_CTX * args.parallel)]
    command += ["-t", str(args.threads), "--temp", "0", "--spec-type", "draft-mtp"]
    command += ["--spec-draft-n-max", str(args.n_max), "--spec-draft-p-min", "0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        server = Server(port)
        for _ in range(600):
            assert process.poll() is None, "llama-server ended"
            try:
                server.complete("x", 4)
                break
            except urllib.error.URLError:  # not there yet, or still loading
                time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Print one line per turn and the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--predict", type=int, default=128)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--n-max", type=int, default=3)
    parser.add_argument("--no-stats", action="store_true")
    parser.add_argument("--big", action="store_true", help="a random-weight model of 350 MB")
    parser.add_argument("-m", "--model", type=Path)
    args = parser.parse_args()
    prompts = [prompt.text for prompt in builtin()[: args.prompts]]
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or ROOT / "mtpstats" / "data" / "tiny-qwen35-mtp.gguf"
        if args.big:
            model = Path(scratch) / "big.gguf"
            make(model, "qwen35", n_vocab=32_000, n_embd=1024, n_layer=8, n_ff=3072, n_head=8)
        with serving(load().prefix, model, args) as server:
            runs = [
                lambda: bench(model, prompts, 1, args),
                lambda: bench(model, prompts, args.parallel, args),
                lambda: server.run(prompts, args),
            ]
            print(
                f"turn  -np 1 t/s  -np {args.parallel} t/s  llama-server t/s  to -np 1  to server"
            )
            ratios: tuple[list[float], list[float]] = ([], [])
            for turn in range(args.turns):
                found = {}
                for k in range(3):
                    which = (k + turn) % 3
                    found[which] = runs[which]()
                ratios[0].append(found[1] / found[0])
                ratios[1].append(found[1] / found[2])
                print(
                    f"{turn + 1:4}  {found[0]:9.1f}  {found[1]:9.1f}  {found[2]:16.1f}"
                    f"  {ratios[0][-1]:8.2f}  {ratios[1][-1]:9.2f}",
                    flush=True,
                )
    ours, theirs = map(statistics.median, ratios)
    print(f"median: {ours:.2f} times -np 1, {theirs:.2f} times llama-server")


if __name__ == "__main__":
    main()
