"""Live statistics in a drafting loop that mtpstats knows nothing of.

    python examples/attach.py [--jsonl FILE] [--port PORT]

``Engine`` stands for yours: a target that is always right, a head that guesses, several requests at
a time, drafts that end early, a budget that cuts them. Its own code is plain; the lines that feed
the statistics are those with ``stats`` in them.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

import numpy as np

from mtpstats import Collector, Snapshot
from mtpstats.export import JsonLines, PrometheusMetrics
from mtpstats.stats import compact
from mtpstats.summary import summarise
from mtpstats.verdict import deeper_or_wider

N_VOCAB = 200
N_MAX = 4
P_MIN = 0.15


class Engine:
    """A made-up language: each token has a likely successor and a less likely one."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.likely = self.rng.permutation(N_VOCAB)
        self.second = self.rng.permutation(N_VOCAB)
        self.drafted = self.accepted = self.passes = 0

    def target(self, token: int) -> int:
        """What the target says after a token."""
        kind = self.rng.choice(3, p=(0.65, 0.2, 0.15))
        return int((self.likely[token], self.second[token], self.rng.integers(N_VOCAB))[kind])

    def head(self, token: int, depth: int) -> np.ndarray:
        """The head's logits after a token; the deeper, the less it knows."""
        logits = self.rng.standard_normal(N_VOCAB).astype(np.float32)
        logits[self.likely[token]] += 6 - depth
        logits[self.second[token]] += 4.5 - depth
        return logits

    def generate(self, seq: int, prompt: list[int], budget: int, stats: Collector) -> Iterator[int]:
        """Draft and verify until ``budget`` tokens are made; yields after each verification."""
        stats.begin(seq)
        text = list(prompt)
        end = len(text) + budget
        while len(text) < end:
            n_past, id_last = len(text) - 1, text[-1]
            stats.draft(seq, n_past, id_last)  # this also resolves the draft before
            draft: list[int] = []
            token = id_last
            for depth in range(N_MAX):
                logits = self.head(token, depth)
                stats.candidates(seq, depth, logits)
                token = int(logits.argmax())
                if 1 / np.exp(logits - logits[token]).sum() < P_MIN:
                    stats.stop(seq, depth)  # seen, but not drafted
                    break
                draft.append(token)
            room = end - len(text) - 1
            reason = "budget" if len(draft) > room else "n_max"
            draft = draft[:room]
            stats.verify(seq, draft, reason)  # what is really sent

            choice, n_accepted = self.target(id_last), 0
            while n_accepted < len(draft) and draft[n_accepted] == choice:
                text.append(choice)
                n_accepted += 1
                choice = self.target(choice)
            text.append(choice)
            self.drafted += len(draft)
            self.accepted += n_accepted
            self.passes += 1
            yield n_accepted
        stats.finish(seq, len(text) - 1, text[-1])


def serve(engine: Engine, stats: Collector) -> None:
    """Twelve requests, four at a time, step by step as a server runs its slots."""
    waiting = [([i, i + 1], 40 + 10 * i) for i in range(12)]
    slots: dict[int, Iterator[int]] = {}
    while waiting or slots:
        for seq in range(4):
            if seq not in slots and waiting:
                prompt, budget = waiting.pop(0)
                slots[seq] = engine.generate(seq, prompt, budget, stats)
        for seq, slot in list(slots.items()):
            if next(slot, None) is None:
                del slots[seq]


def main() -> Snapshot:
    """Run it, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jsonl", metavar="FILE", help="append the counters to this file")
    parser.add_argument("--port", type=int, help="serve them to Prometheus while this runs")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        sinks = []
        if args.jsonl:
            sinks.append(stack.enter_context(JsonLines(args.jsonl)))
        if args.port:
            import prometheus_client

            sinks.append(PrometheusMetrics({"model": "made-up"}))
            prometheus_client.REGISTRY.register(sinks[-1])
            prometheus_client.start_http_server(args.port, "127.0.0.1")

        def tell(snapshot: Snapshot) -> None:
            for sink in sinks:
                sink(snapshot)

        engine = Engine(seed=1)
        stats = Collector(N_MAX, every=64, sink=tell)
        serve(engine, stats)
        snapshot = stats.snapshot()
        tell(snapshot)
    print(compact(snapshot))
    print(f"the engine itself counted {engine.drafted} drafted, {engine.accepted} accepted")
    print(deeper_or_wider(summarise(snapshot)))
    return snapshot


if __name__ == "__main__":
    main()
