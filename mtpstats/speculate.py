"""The draft-verify loop: the only driver of a model and its MTP head.

One round, as llama.cpp's ``draft-mtp`` does it: the head drafts from the last accepted token and
the target's hidden row before it; one target pass verifies ``[id_last, d[0], ..., d[L-1]]``; the
same batch goes through the head with every token paired with the hidden row of the token before
it, which rebuilds the head's KV from true rows; what was rejected is removed from both memories.
Drafted and accepted counts and the text equal those of ``llama-speculative-simple``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from types import TracebackType

from mtpstats._core import Sampler
from mtpstats.errors import InputError
from mtpstats.head import ChainHead, DraftSettings, Head, SharedHead, Slot
from mtpstats.llama import Batch, Context, Model
from mtpstats.stats import Collector, Snapshot

__all__ = ["DraftSettings", "Generation", "Sampling", "Seconds", "Speculator"]

NEAR_TIE = 1e-2
"""A target choice with a smaller margin may differ under another batch shape (DESIGN 4)."""


@dataclass(frozen=True)
class Sampling:
    """How the target chooses: ``temp`` 0 is greedy; else a draw keyed by (seed, position)."""

    temp: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0


@dataclass
class Seconds:
    """Wall-clock seconds: reading the prompt, target passes, head passes, everything else."""

    prompt: float = 0.0
    target: float = 0.0
    head: float = 0.0
    other: float = 0.0

    @property
    def generation(self) -> float:
        """All of the generation: target + head + other."""
        return self.target + self.head + self.other


@dataclass
class Generation:
    """What one prompt gave.

    ``tokens`` holds every generated token, an end-of-generation token included; ``text`` leaves
    that one out. ``margins`` holds the target's margin at each token: the gap between its two best
    logits, or for a sampled target the distance of the draw from the nearest edge of the chosen
    token's interval. ``verifications`` holds (drafted, accepted) of each target pass, in order;
    their sums are ``drafted`` and ``accepted``. ``stop`` is ``"eog"``, ``"n_predict"``,
    ``"context"`` or ``"nan"`` (the target gave no finite logit).
    """

    tokens: list[int] = field(default_factory=list)
    text: bytes = b""
    verifications: list[tuple[int, int]] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    stop: str = "n_predict"
    seconds: Seconds = field(default_factory=Seconds)
    snapshot: Snapshot | None = None

    @property
    def drafted(self) -> int:
        """Tokens sent to verification."""
        return sum(drafted for drafted, _ in self.verifications)

    @property
    def accepted(self) -> int:
        """Drafted tokens the target agreed with."""
        return sum(accepted for _, accepted in self.verifications)

    @property
    def near_ties(self) -> int:
        """Tokens whose margin is below ``NEAR_TIE``."""
        return sum(margin < NEAR_TIE for margin in self.margins)


class _Text(Slot):
    """A slot and what it has generated."""

    def __init__(self, seq: int, row_bytes: int, n_predict: int) -> None:
        super().__init__(seq, row_bytes)
        self.result = Generation()
        self.n_predict = n_predict
        self.n_done = 0


class Speculator:
    """Generates text with a model and its MTP head.

    Owns its two contexts; ``close()`` (or the end of a ``with`` block) frees them, the model stays
    the caller's. ``draft=None`` decodes plainly, without a head, as a baseline. Raises
    ``ModelError`` when the model has no head that can be driven.

    ``n_ctx`` is the number of positions a text can have, ``n_max`` the draft length in force:
    a model with a chain of NextN blocks drafts at most one token per block.
    """

    def __init__(
        self,
        model: Model,
        *,
        draft: DraftSettings | None,
        sampling: Sampling | None = None,
        n_ctx: int = 0,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        flash_attn: str = "auto",
        type_k: str = "f16",
        type_v: str = "f16",
        collector: Collector | None = None,
    ) -> None:
        sampling = sampling or Sampling()
        self.model = model
        self.collector = collector if collector is not None and collector.enabled else None
        n_max = draft.n_max if draft else 0

        def context(n_rs_seq: int, n_outputs: int, target: Context | None) -> Context:
            return Context(
                model,
                n_ctx=n_ctx if target is None else target.n_ctx,
                n_batch=n_batch,
                n_ubatch=n_ubatch,
                n_rs_seq=n_rs_seq,
                n_outputs_max=n_outputs,
                n_threads=n_threads,
                n_threads_batch=n_threads_batch,
                flash_attn=flash_attn,
                type_k=type_k,
                type_v=type_v,
                mtp=target is not None,
                other=target,
            )

        self._head: Head | None = None
        self._target = target = context(n_max, 1 + n_max, None)
        try:
            capacity = max(target.n_batch, 1 + n_max)
            self._batch = Batch(capacity)
            if draft:
                if target.rollback == "none":
                    raise InputError(
                        f"{model.arch}: its memory cannot take back rejected tokens; "
                        "drafting with it is not supported"
                    )
                own = context(0, 1, target)
                kind = Head
                if own.shares_memory:
                    kind = SharedHead
                elif model.n_layer_nextn > 1:
                    kind = ChainHead
                self._head = kind(own, draft, model.n_vocab, capacity, self.collector)
        except BaseException:
            self.close()
            raise
        self.n_ctx = target.n_ctx
        self.n_max = self._head.n_max if self._head else 0
        self._sampler = Sampler(
            sampling.temp, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed
        )
        self._row_bytes = 4 * model.n_embd_out
        self._target_ns = 0

    def close(self) -> None:
        """Free both contexts; closing twice is harmless."""
        self._target.close()

    def __enter__(self) -> Speculator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self,
        prompt: Sequence[int],
        n_predict: int,
        *,
        on_text: Callable[[bytes], None] | None = None,
    ) -> Generation:
        """Continue ``prompt`` and return what happened.

        As in ``llama-speculative-simple`` the verification that brings the count past
        ``n_predict`` is the last one and is kept whole, so a few tokens more than ``n_predict``
        may come. ``n_predict`` -1 goes on to the end of generation or of the context. Memory is
        cleared first: calls are independent. ``on_text`` receives each verification's bytes, which
        may end inside a UTF-8 character. Raises ``InputError`` for a prompt that is empty or
        longer than the context.
        """
        if not prompt:
            raise InputError("the prompt is empty: there is nothing to continue")
        if len(prompt) > self.n_ctx:
            raise InputError(
                f"the prompt has {len(prompt)} tokens, the context holds {self.n_ctx}: "
                "shorten it or raise --ctx-size"
            )
        text = _Text(0, self._row_bytes, n_predict)
        result, collector, head = text.result, self.collector, self._head
        start = perf_counter_ns()
        self._read_prompt(text, prompt)
        begun = perf_counter_ns()
        result.seconds.prompt = (begun - start) * 1e-9
        if collector is not None:
            collector.begin(text.seq)
        self._target_ns = 0
        if head is not None:
            head.ns = 0
        try:
            while not self._round(text, on_text):
                pass
        finally:
            total = perf_counter_ns() - begun
            head_ns = head.ns if head is not None else 0
            result.seconds.target = self._target_ns * 1e-9
            result.seconds.head = head_ns * 1e-9
            result.seconds.other = (total - self._target_ns - head_ns) * 1e-9
            if collector is not None:
                collector.finish(text.seq, text.n_past, text.id_last)
                result.snapshot = collector.take(text.seq)
        return result

    def _read_prompt(self, text: _Text, prompt: Sequence[int]) -> None:
        """Fill both memories with all of the prompt but its last token."""
        target, head, batch = self._target, self._head, self._batch
        target.seq_rm(text.seq)
        if head is not None:
            head.clear(text)
        last = len(prompt) - 1
        while text.n_past < last:
            chunk = prompt[text.n_past : min(text.n_past + target.n_batch, last)]
            batch.clear()
            batch.extend(chunk, text.n_past, text.seq)
            target.decode(batch)
            if head is not None:
                head.follow([(text, chunk, 0)], target.nextn_rows_address())
                text.keep_row(target.nextn_address(len(chunk) - 1))
            text.n_past += len(chunk)
        text.id_last = prompt[last]

    def _round(self, text: _Text, on_text: Callable[[bytes], None] | None) -> bool:
        """Draft, verify, accept; return True when the text has ended."""
        collector, target, head = self.collector, self._target, self._head
        seq, result, n_past = text.seq, text.result, text.n_past
        room = self.n_ctx - n_past - 1
        if room < 0:
            result.stop = "context"
            return True
        if collector is not None:
            collector.draft(seq, n_past, text.id_last)
        if head is not None:
            budget = text.n_predict - text.n_done - 1 if text.n_predict >= 0 else None
            text.plan(head.n_max, head.settings.n_min, room - 1, budget)
            head.draft([text])
        draft = text.draft

        batch = self._batch
        batch.clear()
        sent = [text.id_last, *draft]
        batch.extend(sent, n_past, seq, "all")
        before = perf_counter_ns()
        target.decode(batch)
        logits = target.logits_address(0)
        self._target_ns += perf_counter_ns() - before
        if head is not None:
            head.follow([(text, sent, 0)], target.nextn_rows_address())

        chosen = self._verify(draft, n_past, logits, result.margins)
        if not chosen:
            result.stop = "nan"
            if collector is not None:
                collector.invalid(seq)
            return True
        n_accepted = len(chosen) - 1
        result.verifications.append((len(draft), n_accepted))
        text.n_done += len(chosen)
        for i, token in enumerate(chosen):
            if self.model.is_eog(token):
                result.stop = "eog"
                del chosen[i + 1 :]
                del result.margins[len(result.tokens) + i + 1 :]
                break
        result.tokens += chosen
        text.n_past += len(chosen)
        text.id_last = chosen[-1]
        ended = result.stop == "eog"
        made = b"".join([self.model.piece(token) for token in (chosen[:-1] if ended else chosen)])
        result.text += made
        if on_text is not None and made:
            on_text(made)
        if ended or 0 <= text.n_predict < text.n_done:
            return True
        if head is not None:
            text.keep_row(target.nextn_address(n_accepted))
            if n_accepted < len(draft):
                target.seq_rm(seq, text.n_past, -1)
                head.rewind(text)
        return False

    def _verify(
        self, draft: Sequence[int], n_past: int, logits: int, margins: list[float]
    ) -> list[int]:
        """Return the target's tokens: the accepted prefix and one more; empty on NaN."""
        sampler, target, model = self._sampler, self._target, self.model
        n_logits, n_vocab, n_draft = target.n_vocab, model.n_vocab, len(draft)
        chosen: list[int] = []
        for i in range(n_draft + 1):
            if i:
                logits = target.logits_address(i)
            token = sampler.sample_at(logits, n_logits, n_past + 1 + i, n_vocab)
            if token < 0:
                return []
            chosen.append(token)
            margins.append(sampler.margin)
            if i == n_draft or token != draft[i]:
                break
            # llama.cpp accepts an end-of-generation token only as the last of a draft.
            if i + 1 < n_draft and model.is_eog(token):
                break
        return chosen
