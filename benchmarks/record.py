"""`mtpstats record` beside `mtpstats bench`: time of recording and of decoding; bytes a root.

Prompt by prompt in turns, so that a noisy machine disturbs both alike. Example:

    python benchmarks/record.py --threads 1
    python benchmarks/record.py --depth 16 -m model.gguf
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from mtpstats.prompts import builtin
from mtpstats.run import builtin_model
from mtpstats.trace import Trace


def mtpstats(command: str, *args: object) -> dict:
    """What a command prints as JSON."""
    line = [sys.executable, "-m", "mtpstats", command, "--json", *map(str, args)]
    return json.loads(subprocess.run(line, capture_output=True, check=True).stdout)


def main() -> None:
    """Print one line per prompt and the totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", type=Path, default=builtin_model())
    parser.add_argument("--predict", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--width", type=int, default=0)
    parser.add_argument("--n-max", type=int, default=8, help="of bench")
    args = parser.parse_args()
    common = ("-m", args.model, "-n", args.predict, "-t", args.threads, "-c", 512)
    ratios, sums, sizes, roots = [], [0.0, 0.0], 0, 0
    print("prompt                    bench s  record s  ratio  bytes/root")
    for i, prompt in enumerate(builtin()):
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "one.trace"

            def bench(text: str = prompt.text) -> float:
                total = mtpstats(
                    "bench", *common, "-p", text, "--no-escape",
                    "--spec-draft-n-max", args.n_max,
                )["total"]["seconds"]  # fmt: skip
                return total["target"] + total["head"] + total["other"]

            def record(text: str = prompt.text, path: Path = path) -> float:
                return mtpstats(
                    "record", *common, "-p", text, "--no-escape", "--depth", args.depth,
                    "--width", args.width, "--no-cost", "-o", path,
                )["recorded"]["seconds"]  # fmt: skip

            if i % 2:
                made, decoded = record(), bench()
            else:
                decoded, made = bench(), record()
            size, n = path.stat().st_size, Trace.load(path).n_roots
        ratios.append(made / decoded)
        sums = [sums[0] + decoded, sums[1] + made]
        sizes, roots = sizes + size, roots + n
        print(f"{prompt.id:24}  {decoded:7.2f}  {made:8.2f}  {ratios[-1]:5.2f}  {size / n:10.0f}")
    print(
        f"recording takes {sums[1] / sums[0]:.2f} times as long as decoding (median by prompt "
        f"{statistics.median(ratios):.2f}); {sizes / roots:.0f} bytes a root"
    )


if __name__ == "__main__":
    main()
