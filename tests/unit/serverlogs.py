"""Lines as a llama-server logs them, from what it did: after its printf formats."""

from __future__ import annotations

from dataclasses import dataclass, field

TOTALS, RATES, TRACE = range(3)


@dataclass
class Served:
    """A request and its verifications, (drafted, accepted) each; plain steps draft nothing."""

    slot: int
    task: int
    verified: list[tuple[int, int]]
    plain: int = 0
    n_prompt: int = 11
    prompt_ms: float = 20.0
    ms: float = 250.0
    replayed: frozenset[int] = field(default_factory=frozenset)
    """Verifications after which a checkpoint was restored."""

    @property
    def drafted(self) -> int:
        return sum(n for n, _ in self.verified)

    @property
    def accepted(self) -> int:
        return sum(n for _, n in self.verified)

    @property
    def tokens(self) -> int:
        return 1 + self.plain + sum(n + 1 for _, n in self.verified)

    def _says(self, function: str, text: str) -> str:
        who = f"id {self.slot:2d} | task {self.task}"
        return f"0.01.009.933 I slot {function[:12]:>12}: {who} | {text}"

    def start(self) -> list[str]:
        return [self._says("launch_slot_", "processing task, is_child = 0")]

    def steps(self) -> list[str]:
        """What LLAMA_TRACE=1 adds."""
        lines = []
        for i, (sent, taken) in enumerate(self.verified):
            if i in self.replayed:
                lines.append(f"accepted {taken:2d}/{sent:2d} draft tokens (restore checkpoint)")
                sent, taken = taken + 1, taken + 1
            lines.append(f"accepted {taken:2d}/{sent:2d} draft tokens")
        return [self._says("operator()", line) for line in lines]

    def times(self, level: int = TOTALS, n_max: int = 4) -> list[str]:
        """What a finished request gets."""
        steps = len(self.verified)
        lines = [
            f"prompt eval time = {self.prompt_ms:10.2f} ms / {self.n_prompt:5d} tokens"
            f" ({1.0:8.2f} ms per token, {1.0:8.2f} tokens per second)",
            f"       eval time = {self.ms:10.2f} ms / {self.tokens:5d} tokens"
            f" ({1.0:8.2f} ms per token, {1.0:8.2f} tokens per second)",
            f"      total time = {self.prompt_ms + self.ms:10.2f} ms / {99:5d} tokens",
            f"   graphs reused = {17:10d}",
        ]
        if self.drafted:
            lines.append(
                f"draft acceptance = {self.accepted / self.drafted:0.5f} ({self.accepted:5d}"
                f" accepted / {self.drafted:5d} generated), mean len ="
                f" {1 + self.accepted / steps:5.2f}"
            )
            if level >= RATES:
                rates = ", ".join(f"{k / steps:.3f}" for k in self.by_position(n_max))
                lines.append(f"     acc per pos = ({rates})")
        return [self._says("print_timings", line) for line in lines]

    def by_position(self, n_max: int) -> list[int]:
        return [sum(taken > i for _, taken in self.verified) for i in range(n_max)]

    def end(self) -> list[str]:
        return [self._says("release", "stop processing: n_tokens = 45, truncated = 0")]

    def alone(self, level: int = TOTALS, calls: int | None = None, n_max: int = 4) -> list[str]:
        """The whole request with nothing beside it."""
        return [
            *self.start(),
            *(self.steps() if level == TRACE else ()),
            *self.times(level, n_max),
            *([statistics(calls)] if calls is not None else ()),
            *self.end(),
        ]


def statistics(calls: int, kind: str = "draft-mtp") -> str:
    """The running counts that -lv 4 adds after each request."""
    return (
        f"0.01.009.999 I spec common_specu: statistics {kind:>16}: #calls(b,g,a) = {2:4d}"
        f" {calls:6d} {calls:6d}, #gen drafts = {calls:6d}, #acc drafts = {1:5d}"
        f", #gen tokens = {1:6d}, #acc tokens = {1:5d}, #mean acc len = 1.80"
    )


def loading(path: str = "/models/m.gguf") -> str:
    return f"0.00.037.496 I srv    load_model: loading model '{path}'"
