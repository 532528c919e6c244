"""The draft-verify loop: the only driver of a model and its MTP head.

One round, as llama.cpp's ``draft-mtp`` does it: the head drafts from the last accepted token and
the target's hidden row before it; one target pass verifies ``[id_last, d[0], ..., d[L-1]]``; the
same batch goes through the head with every token paired with the hidden row of the token before
it, which rebuilds the head's KV from true rows; what was rejected is removed from both memories.
Drafted and accepted counts and the text equal those of ``llama-speculative-simple``.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Generator, Iterable, Sequence
from operator import attrgetter
from time import perf_counter_ns
from typing import Any

from mtpstats._core import Sampler
from mtpstats.closing import Closing
from mtpstats.errors import InputError
from mtpstats.generation import NEAR_TIE, Generation, Sampling, Seconds
from mtpstats.head import DraftSettings, Head, head_of
from mtpstats.llama import Batch, Context, Model, limits
from mtpstats.probe import Prober
from mtpstats.recovery import Cut, Memory, Probes, Replay
from mtpstats.slot import Slot, Text
from mtpstats.stats import Collector

__all__ = ["NEAR_TIE", "DraftSettings", "Generation", "Sampling", "Seconds", "Speculator"]


OnText = Callable[[int, bytes], None]
OnDone = Callable[[int, Generation], None]


class Speculator(Closing):
    """Generates text with a model and its MTP head, ``n_parallel`` prompts at a time.

    Owns its two contexts; ``close()`` (or the end of a ``with`` block) frees them, the models stay
    the caller's. The head is the model's own, or ``draft_model``'s: an assistant or a file with
    the MTP blocks alone. ``draft=None`` decodes plainly, without a head, as a baseline. Raises
    ``ModelError`` when there is no head that can be driven.

    ``n_ctx`` is the number of positions one text can have, 0 the model's training context;
    ``n_max`` the draft length in force: a model with a chain of NextN blocks drafts at most one
    token per block. ``compat_counts`` counts verifications as llama.cpp does for a target whose
    memory gives no tokens back: a draft that is accepted in part is verified again, shortened to
    that part and the target's own token, and only this second, fully accepted draft is counted.
    The collector's statistics are those of the first verification in either case.

    ``prober`` sees every verification and drafts at every root, for one text at a time. Its
    sequences live in the memory that the head attends to, where sliding windows forget nothing.
    ``n_rows``: logits that a pass or a step of the head can give at least, for measurements.
    """

    def __init__(
        self,
        model: Model,
        *,
        draft: DraftSettings | None,
        draft_model: Model | None = None,
        sampling: Sampling | None = None,
        n_parallel: int = 1,
        n_ctx: int = 0,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        flash_attn: str = "auto",
        type_k: str = "f16",
        type_v: str = "f16",
        compat_counts: bool = False,
        collector: Collector | None = None,
        prober: Prober | None = None,
        n_rows: int = 0,
    ) -> None:
        sampling = sampling or Sampling()
        most = model.lib.max_sequences
        if not 1 <= n_parallel <= most:
            raise InputError(f"{n_parallel} texts at a time: 1 to {most} are possible")
        if prober is not None and (n_parallel > 1 or draft is None):
            raise InputError("a text can be probed only if it is drafted for, one at a time")
        self.model = model
        self.n_parallel = n_parallel
        self.collector = collector if collector and collector.enabled else None
        n_max = draft.n_max if draft else 0

        def context(model: Model, n_ctx: int, n_outputs: int, **options: Any) -> Context:
            return Context(
                model,
                n_ctx=n_ctx * n_parallel,
                n_batch=n_batch,
                n_ubatch=n_ubatch,
                n_outputs_max=n_outputs * n_parallel,
                n_threads=n_threads,
                n_threads_batch=n_threads_batch,
                flash_attn=flash_attn,
                type_k=type_k,
                type_v=type_v,
                **options,
            )

        n_ctx = n_ctx or model.n_ctx_train
        rows = min(1 + n_max, limits.cells(n_ctx))
        if n_parallel * rows > n_batch:
            raise InputError(
                f"n_batch is {n_batch}; a draft of {rows - 1} tokens and one more, {n_parallel} at "
                f"a time, make {n_parallel * rows}: raise --batch-size or draft less"
            )
        shared = (draft_model or model).kind.heads == "shared"
        probe: Probes | None = prober or (self._forks(draft) if draft else None)
        n_probes, probed = (probe.n_sequences, probe.context()) if probe else (0, {})
        target = context(
            model,
            n_ctx,
            max(1 + n_max, n_rows),
            n_seq_max=n_parallel,
            n_rs_seq=n_max,
        )
        self._target = target
        self.n_ctx = target.n_ctx
        self._head: Head | None = None
        try:
            memory = self._memory(target) if draft else Memory()
            if prober is not None and shared:
                # What the head would write takes cells for a moment.
                options = {"n_rs_seq": n_max, **probed}
                memory = Memory(Cut, options, 2 * n_probes, 1 + n_probes)
            if memory.options:
                target.close()
                self._target = target = context(
                    model,
                    self.n_ctx + memory.n_cells,
                    max(1 + n_max, n_rows, memory.n_outputs),
                    **memory.options,
                    beyond_training=True,
                )
            self._batch = Batch(target.n_batch)
            self._recovery = memory.recovery(target, n_parallel, self._batch)
            if draft:
                own = context(
                    draft_model or model,
                    self.n_ctx + (probe.n_cells if probe and not shared else 0),
                    max(1 + n_probes, n_rows),
                    **{"n_seq_max": n_parallel, **probed},
                    beyond_training=True,
                    mtp=True,
                    other=target,
                )
                self._head = head_of(own, draft, model.n_vocab, self.collector)
                if prober is not None:
                    prober.attach(target, self._head, model.n_vocab)
        except BaseException:
            self.close()
            raise
        self.n_max = self._head.n_max if self._head else 0
        self._compat_counts = compat_counts and memory.recovery is Replay
        self._prober = prober
        self._sampler = Sampler(
            sampling.temp, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed
        )
        self._row_bytes = 4 * model.n_embd_out
        self._target_ns = 0

    def _forks(self, draft: DraftSettings) -> Probes | None:
        """Return what the head needs to draft in several sequences, None for one."""
        if draft.tree is not None:
            raise InputError("drafts that branch need a TreeSpeculator")
        return None

    def _memory(self, target: Context) -> Memory:
        """Return what the target's memory has to be to get rid of what is rejected."""
        if target.rollback != "none":
            return Memory()
        if 2 * self.n_parallel > self.model.lib.max_sequences:
            raise InputError(
                f"{self.n_parallel} texts at a time: 1 to {self.model.lib.max_sequences // 2} are "
                f"possible on {self.model.arch}, which needs two sequences for each"
            )
        # Two sequences per text, which share their cells.
        return Memory(Replay, {"n_seq_max": 2 * self.n_parallel, "kv_unified": True})

    @property
    def tree(self) -> dict[str, Any] | None:
        """What a result says of drafts that branch; None for chains."""
        return None

    def close(self) -> None:
        """Free both contexts; closing twice is harmless."""
        self._target.close()

    def generate(
        self,
        prompt: Sequence[int],
        n_predict: int,
        *,
        on_text: Callable[[bytes], None] | None = None,
    ) -> Generation:
        """Continue one prompt: ``generate_all`` of a single one."""
        stream = None if on_text is None else lambda _number, text: on_text(text)
        (result,) = self.generate_all([prompt], n_predict, on_text=stream)
        return result

    def generate_all(
        self,
        prompts: Iterable[Sequence[int]],
        n_predict: int,
        *,
        on_text: OnText | None = None,
        on_done: OnDone | None = None,
    ) -> list[Generation]:
        """Continue every prompt and return what happened, in the order of the prompts.

        As in ``llama-speculative-simple`` the verification that brings a text past ``n_predict``
        tokens is its last one and is kept whole, so a few tokens more may come. ``n_predict`` -1
        goes on to the end of generation or of the context. Texts are independent of one another;
        a finished one makes room for the next prompt at once, and ``on_done`` receives its number
        and result. ``on_text`` receives the number and each verification's bytes, which may end
        inside a UTF-8 character. ``seconds`` of texts that ran together are equal shares of the
        time that passed, so their sum is that time. Raises ``InputError`` for a prompt that is
        empty or longer than the context.
        """
        results: dict[int, Generation] = {}

        def keep(number: int, result: Generation) -> None:
            results[number] = result
            if on_done is not None:
                on_done(number, result)

        for _ in self.rounds(prompts, n_predict, on_text=on_text, on_done=keep):
            pass
        return [results[number] for number in range(len(results))]

    def rounds(
        self,
        prompts: Iterable[Sequence[int]],
        n_predict: int,
        *,
        on_text: OnText | None = None,
        on_done: OnDone | None = None,
    ) -> Generator[int, None, None]:
        """``generate_all`` a round at a time: yield how many tokens each round made.

        Between two rounds the time is the caller's and counts nowhere. One such iterator at a time;
        close it to give up the texts that are not finished.
        """
        waiting = enumerate(prompts)
        free = list(range(self.n_parallel))
        active: list[Text] = []
        try:
            while True:
                while free:
                    number, prompt = next(waiting, (-1, ()))
                    if number < 0:
                        break
                    self._check_prompt(prompt)
                    text = Text(number, free.pop(0), self._row_bytes, n_predict)
                    # llama.cpp splits a batch wherever a sequence is not the one after the last.
                    insort(active, text, key=attrgetter("seq"))
                    self._begin(text, prompt)
                if not active:
                    return
                made = -sum(len(text.result.tokens) for text in active)
                ended = self._round(active, on_text)
                made += sum(len(text.result.tokens) for text in active)
                for text in ended:
                    active.remove(text)
                    free.append(text.seq)
                    result = self._end(text)
                    if on_done is not None:
                        on_done(text.number, result)
                yield made
        finally:
            for text in active:
                self._end(text)

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise InputError("the prompt is empty: there is nothing to continue")
        if len(prompt) > self.n_ctx:
            raise InputError(
                f"the prompt has {len(prompt)} tokens, the context holds {self.n_ctx}: "
                "shorten it or raise --ctx-size"
            )

    def _begin(self, text: Text, prompt: Sequence[int]) -> None:
        """Fill both memories with all of the prompt but its last token."""
        target, head, batch = self._target, self._head, self._batch
        start = perf_counter_ns()
        self._recovery.clear(text)
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
        text.result.seconds.prompt = (perf_counter_ns() - start) * 1e-9
        if self.collector is not None:
            self.collector.begin(text.seq)

    def _end(self, text: Text) -> Generation:
        if self.collector is not None:
            self.collector.finish(text.seq, text.n_past, text.id_last)
            text.result.snapshot = self.collector.take(text.seq)
        return text.result

    def _round(self, active: Sequence[Text], on_text: OnText | None) -> list[Text]:
        """Draft, verify and accept once for every text; return those that have ended."""
        head, collector = self._head, self.collector
        start = perf_counter_ns()
        self._target_ns = 0
        if head is not None:
            head.ns = 0
        ended: list[Text] = []
        going: list[Text] = []
        drafting: list[Text] = []
        for text in active:
            if text.replays:
                going.append(text)
                continue
            room = self.n_ctx - text.n_past - 1
            if room < 0:
                text.result.stop = "context"
                ended.append(text)
                continue
            going.append(text)
            if collector is not None:
                collector.draft(text.seq, text.n_past, text.id_last)
            if head is not None:
                budget = text.n_predict - text.n_done - 1 if text.n_predict >= 0 else None
                text.plan(head.n_max, head.settings.n_min, room - 1, budget)
                drafting.append(text)
        if head is not None and drafting:
            self._draft(head, drafting)
        for group in self._groups(going):
            self._pass(group)
            partly: list[tuple[Slot, list[int]]] = []
            ended += [text for text in group if self._accept(text, partly, on_text)]
            before = perf_counter_ns()
            self._recovery.keep(partly)
            self._target_ns += perf_counter_ns() - before
        head_ns = head.ns if head is not None else 0
        share = 1e-9 / len(active)
        spent = perf_counter_ns() - start
        for text in active:
            seconds = text.result.seconds
            seconds.target += self._target_ns * share
            seconds.head += head_ns * share
            seconds.other += (spent - self._target_ns - head_ns) * share
        return ended

    def _draft(self, head: Head, texts: Sequence[Text]) -> None:
        head.draft(texts)

    def _groups(self, texts: Sequence[Text]) -> list[Sequence[Text]]:
        """Split into texts that one target pass can verify and roll back together.

        Recurrent memory wants them equally long, so shorter ones are filled up where that fits;
        the filling is rolled back with what is rejected.
        """
        for text in texts:
            text.n_rows = len(text.draft) + 1
        if len(texts) < 2:
            return [texts] if texts else []
        if self._target.rollback == "snapshots":
            width = max(text.n_rows for text in texts)
            for text in texts:
                if text.n_past + width <= self.n_ctx:
                    text.n_rows = width
        groups = self._target.groups({text.seq: text.n_rows for text in texts})
        by_seq = {text.seq: text for text in texts}
        return [[by_seq[seq] for seq in group] for group in groups]

    def _pass(self, group: Sequence[Text]) -> None:
        """Run the target over ``[id_last, d[0], ...]`` of each text, then the head after it."""
        target, head, batch = self._target, self._head, self._batch
        self._recovery.before(group)
        batch.clear()
        for text in group:
            text.index = batch.n_tokens
            sent = text.sent
            batch.extend(sent, text.n_past, text.seq, "all")
            if len(sent) < text.n_rows:
                filling = [text.id_last] * (text.n_rows - len(sent))
                batch.extend(filling, text.n_past + len(sent), text.seq)
        before = perf_counter_ns()
        target.decode(batch)
        target.logits_address(group[0].index)  # waits for the pass to end
        self._target_ns += perf_counter_ns() - before
        if head is not None:
            parts = [(text, text.sent, text.index) for text in group]
            head.follow(parts, target.nextn_rows_address())

    def _accept(
        self, text: Text, partly: list[tuple[Slot, list[int]]], on_text: OnText | None
    ) -> bool:
        """Take the accepted prefix and the target's own token; return True at the text's end.

        ``partly`` receives the text and what it keeps of the pass if that is not all of it.
        """
        result, sent = text.result, text.sent
        chosen = self._verify(text)
        if not chosen:
            result.stop = "nan"
            if self.collector is not None and not text.failed:
                self.collector.invalid(text.seq)
            return True
        n_accepted = len(chosen) - 1
        if self._compat_counts and n_accepted < len(text.draft):
            self._verify_again(text, chosen)
            return False
        text.replays = False
        result.verifications.append((len(text.draft), n_accepted))
        text.n_done += len(chosen)
        for i, token in enumerate(chosen):
            if self.model.is_eog(token):
                result.stop = "eog"
                del chosen[i + 1 :]
                del result.margins[len(result.tokens) + i + 1 :]
                break
        result.tokens += chosen
        if self._prober is not None:
            self._prober.see(text, chosen, text.index)
        text.n_past += len(chosen)
        text.id_last = chosen[-1]
        ended = result.stop == "eog"
        made = b"".join([self.model.piece(token) for token in (chosen[:-1] if ended else chosen)])
        result.text += made
        if on_text is not None and made:
            on_text(text.number, made)
        if ended or 0 <= text.n_predict < text.n_done:
            return True
        if self._head is not None:
            kept = self._settle(self._head, text, n_accepted)
            if kept < text.n_rows:
                partly.append((text, sent[:kept]))
        return False

    def _settle(self, head: Head, text: Text, n_accepted: int) -> int:
        """Leave the head's memory with what was accepted; return how much of the pass to keep."""
        text.keep_row(self._target.nextn_address(text.index + n_accepted))
        if n_accepted + 1 < text.n_rows:
            head.rewind(text)
        return n_accepted + 1

    def _verify_again(self, text: Text, chosen: list[int]) -> None:
        """Make what was accepted and the target's own token the next draft, as llama.cpp does."""
        head, recovery, result = self._head, self._recovery, text.result
        assert head is not None
        assert isinstance(recovery, Replay)
        # At the end of the generation the second pass says nothing about the first.
        if self.collector is not None and not self.model.is_eog(chosen[-1]):
            self.collector.verify(text.seq, chosen)
        del result.margins[len(result.tokens) :]
        # llama.cpp pairs the first token of the second pass with the last row of the first.
        text.keep_row(self._target.nextn_address(text.index + len(text.draft)))
        recovery.restore(text)
        head.rewind(text)
        text.draft, text.replays = chosen, True

    def _verify(self, text: Text) -> list[int]:
        """Return the target's tokens: the accepted prefix and one more; empty on NaN."""
        sampler, target, draft = self._sampler, self._target, text.draft
        n_logits, n_vocab, n_draft = target.n_vocab, self.model.n_vocab, len(text.draft)
        chosen: list[int] = []
        for i in range(n_draft + 1):
            logits = target.logits_address(text.index + i)
            token = sampler.sample_at(logits, n_logits, text.n_past + 1 + i, n_vocab)
            if token < 0:
                return []
            chosen.append(token)
            text.result.margins.append(sampler.margin)
            if i == n_draft or token != draft[i]:
                break
            # llama.cpp accepts an end-of-generation token only as the last of a draft.
            if i + 1 < n_draft and self.model.is_eog(token):
                break
        return chosen
