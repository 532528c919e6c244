"""`mtpstats report` of a result with many prompts: time and memory of the whole command.

    python benchmarks/report.py --prompts 1000

prints also what `import click` takes, next to `mtpstats --help`, as the measure of a start.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from mtpstats import result as results
from mtpstats.stats import Snapshot

DEPTH, VERIFICATIONS = 8, 50
RANKS = (0.60, 0.12, 0.05, 0.04, 0.03, 0.03, 0.02, 0.02, 0.09)  # the last is the misses
MODEL = {
    "file": "made-up.gguf", "size": 1, "sha256": None, "architecture": "qwen35",
    "parameters": 1_000_000, "vocabulary": 4096, "nextn_blocks": 1, "quantisation": "F16",
}  # fmt: skip
SETTINGS = {
    "n_predict": 128, "n_max": DEPTH, "n_max_asked": DEPTH, "n_min": 0, "p_min": 0.0,
    "temp": 0.0, "temp_source": "default", "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 0,
    "n_ctx": 256, "n_threads": 1,
}  # fmt: skip


def prompt(number: int, rng: np.random.Generator) -> dict:
    """One prompt's record with counters as full as a run's."""
    counters = Snapshot()
    counters.verifications = reached = VERIFICATIONS
    for i in range(DEPTH):
        counters.drafted[i], counters.reached[i] = VERIFICATIONS, reached
        seen = rng.multinomial(reached, RANKS)
        counters.rank[i], counters.miss[i], counters.accepted[i] = seen[:8], seen[8], seen[0]
        for sums in (counters.sum_p_units, counters.sum_p_top10_units):
            sums[i] = rng.integers(0, 1 + reached * (1 << 21), 8)
        for calibration in (counters.calib_p1, counters.calib_p2):
            calibration[i, :, 0] = rng.multinomial(reached, [0.1] * 10)
            calibration[i, :, 1] = calibration[i, :, 0] // 2
        reached = int(seen[0])
    return {
        "id": f"prompt-{number}", "category": None, "prompt_sha256": f"{number:064x}",
        "n_prompt": 30, "tokens": counters.tokens_accepted + VERIFICATIONS, "text": "word " * 128,
        "verifications": VERIFICATIONS, "drafted": counters.tokens_drafted,
        "accepted": counters.tokens_accepted, "near_ties": 0, "repeated_4grams": 0.1,
        "stop": "n_predict", "baseline": None, "positions": counters.to_dict(),
        "seconds": {"prompt": 0.1, "target": float(rng.random()), "head": 0.5, "other": 0.1},
    }  # fmt: skip


def run(*command: str) -> tuple[float, float]:
    """Wall and processor seconds of one command."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    prompts = [prompt(i, rng) for i in range(args.prompts)]
    settings = {**SETTINGS, "n_prompts": len(prompts)}
    result = results.make(results.environment(None, [], []), MODEL, settings, prompts)
    mtpstats = (sys.executable, "-m", "mtpstats")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "result.json"
        results.write(path, result)
        commands = {
            "import click": (sys.executable, "-c", "import click"),
            "mtpstats --help": (*mtpstats, "--help"),
            "mtpstats report": (*mtpstats, "report", str(path)),
        }
        for name, command in commands.items():
            walls, cpus = zip(*(run(*command) for _ in range(args.runs)), strict=True)
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
            print(
                f"{name:16} {statistics.median(walls):6.3f} s, "
                f"{statistics.median(cpus):6.3f} s of processor, peak so far {peak:.0f} MiB"
            )


if __name__ == "__main__":
    main()
