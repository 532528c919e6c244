"""Replayed chains beside live runs of the same chains, verification by verification.

One recording of each prompt, then every policy live; the lists of (drafted, accepted) must be equal
up to the first near tie, and where the text is the same llama-speculative-simple must print the
same totals. Takes a while; exits 1 if anything differs.

    python benchmarks/exact.py                          20 prompts of 256 tokens, greedy
    python benchmarks/exact.py --temp 0.8 --seed 7      sampled (llama.cpp draws otherwise)
    python benchmarks/exact.py --oracle                 llama-speculative-simple's totals as well
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "llama")]

from oracle import speculative_simple  # noqa: E402

from mtpstats.llama import Model, load  # noqa: E402
from mtpstats.policy import Chain  # noqa: E402
from mtpstats.prompts import Prompt, builtin  # noqa: E402
from mtpstats.record import RecordSettings, record  # noqa: E402
from mtpstats.replay import replay  # noqa: E402
from mtpstats.run import BenchSettings, builtin_model  # noqa: E402
from mtpstats.speculate import DraftSettings, Sampling, Speculator  # noqa: E402
from mtpstats.trace import Trace  # noqa: E402


def texts(count: int) -> list[Prompt]:
    """The built-in prompts, then their first halves."""
    whole = list(builtin())
    halves = [
        Prompt(f"{one.id}-half", one.category, one.text[: len(one.text) // 2]) for one in whole
    ]
    return (whole + halves)[:count]


def main() -> int:
    """Print one line per policy; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--predict", type=int, default=256)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n-max", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    parser.add_argument("--p-min", type=float, nargs="+", default=[0.0, 0.3, 0.6, 0.9])
    parser.add_argument("--oracle", action="store_true")
    parser.add_argument("-m", "--model", type=Path, default=builtin_model())
    args = parser.parse_args()
    prompts, sampling = texts(args.prompts), Sampling(args.temp, seed=args.seed)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "exact.trace"
        run = BenchSettings(
            args.model, n_predict=args.predict, sampling=sampling, n_threads=1, n_ctx=512
        )
        record(RecordSettings(run, costs=False), prompts, path)
        trace = Trace.load(path)
    lib = load()
    failed = equal = runs = compared = made = same_totals = asked = 0
    with Model(lib, args.model) as model:
        for n_max in args.n_max:
            for p_min in args.p_min:
                replayed = replay(trace, Chain(n_max, p_min)).prompts
                wrong = 0
                with Speculator(
                    model, draft=DraftSettings(n_max, 0, p_min), sampling=sampling,
                    n_threads=1, n_ctx=512,
                ) as live:  # fmt: skip
                    for prompt, mine in zip(prompts, replayed, strict=True):
                        theirs = live.generate(model.tokenize(prompt.text), args.predict)
                        a = [tuple(pair) for pair in mine.verifications.tolist()]
                        b = theirs.verifications
                        first = next(
                            (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                            min(len(a), len(b)),
                        )
                        runs += 1
                        equal += a == b
                        made += len(b)
                        compared += first
                        if a != b and (mine.near_tie is None or first < mine.near_tie):
                            wrong += 1
                            print(
                                f"{prompt.id}: at {first} of {len(b)}: {a[first : first + 1]}, "
                                f"live {b[first : first + 1]}, near tie at {mine.near_tie}"
                            )
                        if args.oracle:
                            asked += 1
                            reference = speculative_simple(
                                lib.prefix, args.model, prompt.text, args.predict, "-c", "512",
                                "--spec-draft-n-max", str(n_max), "--spec-draft-p-min", str(p_min),
                            )  # fmt: skip
                            if reference.text == theirs.text.rstrip(b"\n") and a == b:
                                totals = (sum(x for x, _ in a), sum(x for _, x in a))
                                same_totals += 1
                                if totals != (reference.drafted, reference.accepted):
                                    wrong += 1
                                    print(f"{prompt.id}: {totals}, llama.cpp {reference}")
                failed += wrong
                print(f"n_max {n_max} p_min {p_min}: {wrong} differ", flush=True)
    print(
        f"{runs} runs, {equal} of them equal to the end; {compared} of {made} verifications equal "
        f"before a near tie; {failed} differences"
    )
    if args.oracle:
        print(f"llama-speculative-simple: the same totals in {same_totals} of {asked} runs")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
