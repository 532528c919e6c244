"""`mtpstats bench` beside `llama-speculative-simple`: same model, prompts, flags, threads.

Runs alternate, so that a noisy machine disturbs both alike; what counts is the median of the
paired ratios. Example:

    python benchmarks/speed.py --pairs 7 --threads 2
    python benchmarks/speed.py --vocab 248320 --pairs 7 --predict 48
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "llama")]

from oracle import speculative_simple  # noqa: E402
from tinymodels import make  # noqa: E402

from mtpstats.llama import load  # noqa: E402
from mtpstats.prompts import builtin  # noqa: E402


def bench(model: Path, prompt: str, args: argparse.Namespace, *options: str) -> dict:
    """One `mtpstats bench --json` run as a user would start it."""
    command = [sys.executable, "-m", "mtpstats", "bench", "-m", str(model), "-p", prompt]
    command += [
        "-n",
        str(args.predict),
        "--temp",
        "0",
        "-t",
        str(args.threads),
        "-c",
        "512",
        "--json",
    ]
    command += ["--spec-draft-n-max", str(args.n_max), *options]
    done = subprocess.run(command, capture_output=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    """Print one line per pair and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--predict", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--n-max", type=int, default=8)
    parser.add_argument("--vocab", type=int, help="a random-weight model of this vocabulary")
    parser.add_argument("-m", "--model", type=Path)
    args = parser.parse_args()
    prefix = load().prefix
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or ROOT / "mtpstats" / "data" / "tiny-qwen35-mtp.gguf"
        if args.vocab:
            model = Path(scratch) / "model.gguf"
            # A trunk of about 3 million parameters, a hundredth of the smallest real ones.
            make(model, "qwen35", n_vocab=args.vocab, n_embd=256, n_layer=4, n_ff=768, n_head=4)
        ratios, others, costs = [], [], []
        prompts = builtin()
        print("pair  llama.cpp t/s  mtpstats t/s  ratio  outside decode  statistics cost")
        for i in range(args.pairs):
            prompt = prompts[i % len(prompts)].text
            runs = [
                lambda p=prompt: bench(model, p, args),
                lambda p=prompt: bench(model, p, args, "--no-stats"),
            ]
            theirs = speculative_simple(
                prefix, model, prompt, args.predict,
                "--spec-draft-n-max", str(args.n_max), "-c", "512", threads=args.threads,
            )  # fmt: skip
            on, off = (run() for run in (runs if i % 2 else reversed(runs)))
            if not i % 2:
                on, off = off, on
            seconds = on["prompts"][0]["seconds"]
            spent = seconds["target"] + seconds["head"] + seconds["other"]
            ours = on["prompts"][0]["tokens"] / spent
            ratios.append(ours / theirs.tokens_per_second)
            others.append(seconds["other"] / spent)
            quiet = off["prompts"][0]["seconds"]
            costs.append(spent / (quiet["target"] + quiet["head"] + quiet["other"]) - 1)
            print(
                f"{i + 1:4}  {theirs.tokens_per_second:13.1f}  {ours:12.1f}  {ratios[-1]:5.2f}"
                f"  {others[-1]:14.1%}  {costs[-1]:+15.1%}"
            )
        print(
            f"median ratio {statistics.median(ratios):.3f}, outside llama_decode "
            f"{statistics.median(others):.1%}, statistics {statistics.median(costs):+.1%}"
        )


if __name__ == "__main__":
    main()
