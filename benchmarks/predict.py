"""How far predictions are off: chains predicted from a trace, run for real in the same session.

Records a trace of the built-in model and prompts (or takes one), then lets 18 chains and no
drafting continue its prompts in turns, with the costs measured in between. Example:

    python benchmarks/predict.py --prompts 15 --repeats 3 --threads 1
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mtpstats import origin, prompts, validate
from mtpstats.generation import Sampling
from mtpstats.policy import Chain, Tree
from mtpstats.price import NO_DRAFTING, kind_of
from mtpstats.record import RecordSettings, record
from mtpstats.report.validate import render
from mtpstats.run import BenchSettings, LlamaEngine, builtin_model
from mtpstats.trace import Trace
from mtpstats.trees import best_trees

POLICIES = [Chain(n_max, p_min) for n_max in (1, 2, 3, 4, 6, 8) for p_min in (0.0, 0.3, 0.6)]
SIZES = (6, 8, 12, 16, 24)
SMALL = (
    [(1,), (2,)],
    [(1,), (2,), (1, 1)],
    [(1,), (2,), (3,), (4,)],
    [(1,), (2,), (1, 1), (2, 1)],
    [(1,), (2,), (1, 1), (1, 2), (1, 1, 1)],
)


def trees(trace: Trace) -> list[Tree]:
    """Small trees, and the best ones of some sizes, as far as they branch."""
    best = best_trees(trace, max(SIZES))
    found = [best[n - 1] for n in SIZES if len(best[n - 1]) == n and best[n - 1].leaves > 1]
    return [*dict.fromkeys([*map(Tree, SMALL), *found])]


def recorded(model: Path, path: Path, n_predict: int, threads: int) -> Path:
    settings = BenchSettings(
        model, n_predict=n_predict, n_threads=threads, sampling=Sampling(temp=0.7)
    )
    record(RecordSettings(settings, depth=8, costs=False), prompts.builtin(), path)
    return path


def main() -> None:
    """Print the table of ``mtpstats validate`` and the figures that matter."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="default: one is recorded")
    parser.add_argument("--model", type=Path, default=builtin_model())
    parser.add_argument("--n-predict", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trees", action="store_true", help="trees beside two chains")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.trace or recorded(args.model, Path(folder) / "t", args.n_predict, args.threads)
        trace = validate.chosen(Trace.load(path), args.prompts)
    settings = origin.settings_of(trace, args.model)
    with closing(LlamaEngine(settings, lambda _: None)) as engine:
        origin.check_model(trace, engine.files)
        policies = [*POLICIES[:9:6], *trees(trace)] if args.trees else POLICIES
        found = validate.run(
            trace, [NO_DRAFTING, *policies], engine,
            measure=lambda: origin.measured(engine, trace, lambda _: None), repeats=args.repeats,
        )  # fmt: skip
    print(render(found))
    for kind in ("chain", "tree"):
        errors = [abs(one.error) for one in found.policies if kind_of(one.policy) == kind]
        if errors:
            print(
                f"{len(errors)} {kind}s: median absolute error "
                f"{100 * statistics.median(errors):.1f} %, at most {100 * max(errors):.1f} %"
            )
    same = sum(checked.same for checked in found.policies)
    print(
        f"the best predicted policy measures {100 * found.shortfall:.1f} % below the best; {same} "
        f"of {len(found.policies) * found.n_prompts} texts drafted as replayed; load "
        f"{os.getloadavg()[0]:.1f}"
    )
    if args.json:
        args.json.write_text(json.dumps(validate.to_dict(found, trace)))


if __name__ == "__main__":
    main()
