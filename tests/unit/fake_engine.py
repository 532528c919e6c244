"""A stand-in for libllama: an engine and drivers whose every number is known."""

from typing import ClassVar

from mtpstats import result as results
from mtpstats import run
from mtpstats.errors import MtpStatsError
from mtpstats.prompts import Prompt
from mtpstats.run import Progress
from mtpstats.speculate import Generation, Seconds

PROMPTS = [Prompt("a", "code", "one two"), Prompt("b", None, "three four five")]
FOUR = [Prompt(name, None, "w " * n) for name, n in (("a", 2), ("b", 3), ("c", 4), ("d", 5))]


class FakeDriver:
    """Generates ``n_predict`` tokens 7; to the collector: 7 accepted, then 5 instead of 7.

    Texts run ``n_parallel`` at a time, two tokens each a round. A round is logged in ``rounds``.
    """

    def __init__(self, engine, draft, n_ctx, collector):
        self.engine = engine
        self.draft = draft
        self.n_ctx = n_ctx
        self.n_max = min(draft.n_max, engine.n_heads) if draft else 0
        self.collector = collector if collector and collector.enabled else None
        self.name = "plain" if draft is None else "draft"
        self.open = 0

    def rounds(self, prompts, n_predict, *, on_text=None, on_done=None):
        engine = self.engine
        engine.calls.append((self.name, [len(prompt) for prompt in prompts], n_predict))
        waiting = [Text(number, self.collector) for number in range(len(prompts))]
        active, free = [], list(range(engine.settings.n_parallel))
        self.open += 1
        try:
            while waiting or active:
                while waiting and free:
                    active.append(waiting.pop(0))
                    active[-1].begin(free.pop())
                engine.rounds.append((self.name, [text.number for text in active]))
                if len(engine.rounds) == engine.interrupt_at:
                    raise engine.interrupt_by
                made = 2 * len(active)
                for text in list(active):
                    text.round(on_text)
                    if text.n == engine.lengths.get(text.number, n_predict if n_predict > 0 else 4):
                        active.remove(text)
                        free.append(text.seq)
                        result = self.generation(text)
                        if on_done:
                            on_done(text.number, result)
                yield made
        finally:
            self.open -= 1

    def generation(self, text):
        n, drafts = text.n, self.draft is not None
        if self.collector:
            self.collector.finish(text.seq, 10 + n, 5)
        return Generation(
            tokens=[7] * n if drafts else [7] * (n - 1) + [self.engine.last_plain],
            text=b"x\xff" * (n // 2),
            verifications=[(2, 1)] * (n // 2),
            margins=[0.001, 1.0] * (n // 2),
            stop="n_predict",
            seconds=Seconds(0.25, 1.0 if drafts else 0.5, 0.5 if drafts else 0.0, 0.125),
            snapshot=self.collector.take(text.seq) if self.collector else None,
        )

    def close(self):
        assert not self.open, "closed in the middle of a round"
        self.engine.closed.append("driver")


class Text:
    def __init__(self, number, collector):
        self.number, self.collector = number, collector
        self.n = 0

    def begin(self, seq):
        self.seq = seq
        if self.collector:
            self.collector.begin(seq)

    def round(self, on_text):
        if self.collector:
            self.collector.draft(self.seq, 10 + self.n, 5)
            self.collector.candidates(self.seq, 0, ROW)
            self.collector.candidates(self.seq, 1, ROW)
            self.collector.verify(self.seq, [7, 7])
        self.n += 2
        if on_text:
            on_text(self.number, b"x\xff")


def row():
    import array

    values = array.array("f", [0.0] * 12)
    values[7] = 5.0
    return values


ROW = row()


class FakeEngine:
    last = None
    interrupt_at = None
    interrupt_by = KeyboardInterrupt()
    n_ctx_train = 512
    last_plain = 7
    n_heads = 99
    lengths: ClassVar = {}
    draft_files = ()

    def __init__(self, settings, tell, on_log, on_abort):
        self.settings = settings
        self.on_abort = on_abort
        self.calls = []
        self.rounds = []
        self.closed = []
        self.drivers = []
        self.files = [settings.model]
        self.n_threads = settings.n_threads or 4
        FakeEngine.last = self
        tell(Progress("loading the model", 50, 100, "%"))

    def environment(self, command):
        return results.environment({"version": "0"}, [], command)

    def model(self):
        return {
            "file": "m.gguf",
            "size": 1,
            "sha256": None,
            "architecture": "qwen35",
            "parameters": 1,
            "vocabulary": 12,
            "nextn_blocks": 1,
            "quantisation": "F16",
        }

    def tokenize(self, text):
        return list(range(len(text.split())))

    def driver(self, draft, n_ctx, collector):
        self.drivers.append(FakeDriver(self, draft, n_ctx or self.n_ctx_train, collector))
        return self.drivers[-1]

    def close(self):
        self.closed.append("model")


def bench(settings, prompts=PROMPTS, engine=FakeEngine, **hooks):
    return run.bench(settings, prompts, engine=engine, **hooks)


class Kept:
    """A keeper in memory; ``full_at``: that many records fit."""

    def __init__(self, done=(), full_at=99):
        self.done, self.full_at = dict(done), full_at
        self.begun, self.appended, self.engine_rounds = [], [], []

    def begin(self, result, prompts):
        self.begun.append((result, [(prompt.id, prompt.text) for prompt in prompts]))
        return dict(self.done)

    def append(self, index, record):
        self.engine_rounds.append(len(FakeEngine.last.rounds))
        if len(self.appended) == self.full_at:
            raise MtpStatsError("the disk is full")
        self.appended.append((index, record))
