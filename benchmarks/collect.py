"""What collecting statistics costs: the same driver with and without a collector, in turns.

Both generate the same text on one model in one process, a few tokens at a time, so that a noisy
machine disturbs both alike. Shown are medians over the pairs: of the whole time, and of the time
outside the model's passes alone, where the collector works and no pass hides it. Example:

    python benchmarks/collect.py --vocab 248320 --pairs 40
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "llama")]

from tinymodels import make  # noqa: E402

from mtpstats.llama import Model, load  # noqa: E402
from mtpstats.run import builtin_model  # noqa: E402
from mtpstats.speculate import DraftSettings, Speculator  # noqa: E402
from mtpstats.stats import Collector  # noqa: E402


def main() -> None:
    """Print the median cost and the quartiles of the pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--predict", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocab", type=int, help="a random-weight model of this vocabulary")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = builtin_model()
        if args.vocab:
            path = Path(scratch) / "model.gguf"
            make(path, "qwen35", n_vocab=args.vocab, n_embd=256, n_layer=4, n_ff=768, n_head=4)
        with Model(load(), path) as model:
            prompt = model.tokenize("def main(args):")
            options = {"draft": DraftSettings(8), "n_ctx": 256, "n_threads": args.threads}
            with (
                Speculator(model, collector=Collector(8), **options) as on,
                Speculator(model, **options) as off,
            ):
                costs, shares = [], []
                for i in range(-2, args.pairs):
                    pair = (on, off) if i % 2 else (off, on)
                    runs = {one: one.generate(prompt, args.predict) for one in pair}
                    assert runs[on].tokens == runs[off].tokens
                    if i >= 0:
                        seen, unseen = runs[on].seconds, runs[off].seconds
                        costs.append(seen.generation / unseen.generation - 1)
                        shares.append((seen.other - unseen.other) / unseen.generation)
    for what, values in (("whole runs", costs), ("outside the model's passes", shares)):
        low, median, high = statistics.quantiles(values, n=4)
        print(f"{what}: {median:+.2%} (quartiles {low:+.2%} to {high:+.2%}, {args.pairs} pairs)")


if __name__ == "__main__":
    main()
