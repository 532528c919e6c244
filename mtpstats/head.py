"""The MTP head: how each kind of it follows the target and drafts.

``Head`` is one NextN block, fed with its own hidden rows past the first step. ``ChainHead`` has a
block per draft step, and each step decodes the whole draft so far under its own block.
``SharedHead`` reads the target's cells: it has no memory of its own, nothing to follow, and every
draft step stands at the same position.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

from mtpstats._core import Row, copy
from mtpstats.errors import InputError
from mtpstats.llama import Batch, Context
from mtpstats.policy import Branching, GatedSiblings
from mtpstats.slot import Slot
from mtpstats.stats import Collector


@dataclass(frozen=True)
class DraftSettings:
    """How far the head drafts; llama.cpp's ``--spec-draft-n-max``, ``-n-min`` and ``-p-min``.

    ``tree``: drafts branch as it says; make such settings with :meth:`branching`.
    """

    n_max: int = 8
    n_min: int = 0
    p_min: float = 0.0
    tree: Branching | None = None

    def __post_init__(self) -> None:
        if self.n_max < 1:
            raise InputError(f"n_max is {self.n_max}: it must be at least 1")
        if not 0 <= self.n_min <= self.n_max:
            raise InputError(f"n_min is {self.n_min}: it must lie between 0 and n_max {self.n_max}")
        if not 0.0 <= self.p_min <= 1.0:
            raise InputError(f"p_min is {self.p_min}: it must lie between 0 and 1")

    @classmethod
    def branching(cls, tree: Branching) -> DraftSettings:
        """Return the settings that draft a tree; ``InputError`` for one without nodes."""
        if isinstance(tree, GatedSiblings):
            return cls(tree.n_max, tree.n_min, tree.p_min, tree)
        if not len(tree):
            raise InputError("the tree has no nodes: there is nothing to draft")
        return cls(tree.depth, tree=tree)


class Head:
    """One NextN block in a context of its own, for any number of slots at once.

    ``ns`` counts the nanoseconds spent in the head's decodes; ``batch`` is what it decodes.
    """

    kind = "single"
    deepest: int | None = None
    """Most tokens the head can draft, None for no limit."""

    # Positions from one draft step to the next, where a step decodes one token; else None.
    _alone: int | None = 1

    def __init__(
        self,
        context: Context,
        settings: DraftSettings,
        n_vocab: int,
        collector: Collector | None,
    ) -> None:
        self.context = context
        self.settings = settings
        self.n_max = settings.n_max
        self.ns = 0
        self._n_logits = context.n_vocab
        self._n_vocab = n_vocab
        self._p_min = settings.p_min
        self._collector = collector
        self._row_bytes = 4 * context.n_embd_out
        self.batch = Batch(context.n_batch, n_embd=context.n_embd_out)
        self._row = Row()

    def follow(self, parts: Sequence[tuple[Slot, Sequence[int], int]], rows: int) -> None:
        """Decode what the target just decoded, each token with the row before it.

        ``parts`` holds (slot, tokens, index of the first token in the target's batch), ``rows``
        the address of the target's hidden rows in batch order. The first token of a slot takes the
        slot's own row.
        """
        batch, row_bytes = self.batch, self._row_bytes
        batch.clear()
        for slot, tokens, index in parts:
            here = batch.embd_address(batch.n_tokens)
            batch.extend(tokens, slot.n_past, slot.seq)
            copy(here, slot.row, row_bytes)
            if len(tokens) > 1:
                source = rows + index * row_bytes
                copy(here + row_bytes, source, (len(tokens) - 1) * row_bytes)
        before = perf_counter_ns()
        self._follow(parts)
        self.ns += perf_counter_ns() - before

    def follow_path(self, slot: Slot, tokens: Sequence[int], rows: Sequence[int]) -> None:
        """``follow`` for tokens whose rows do not lie in a row: ``rows`` are their addresses."""
        batch, row_bytes = self.batch, self._row_bytes
        batch.clear()
        for i, row in zip(batch.extend(tokens, slot.n_past, slot.seq), rows, strict=True):
            copy(batch.embd_address(i), row, row_bytes)
        before = perf_counter_ns()
        self._follow([(slot, tokens, 0)])
        self.ns += perf_counter_ns() - before

    def _follow(self, parts: Sequence[tuple[Slot, Sequence[int], int]]) -> None:
        self.context.decode(self.batch)

    def prepare(self, slots: Sequence[Slot]) -> None:
        """Take back plans that this head cannot draft for."""

    def draft(self, slots: Sequence[Slot]) -> None:
        """Fill ``slot.draft`` of every slot and tell the collector what was seen and sent."""
        self.prepare(slots)
        drafting = [slot for slot in slots if slot.n_steps]
        if len(drafting) == 1 and self._alone is not None:
            self._draft_alone(drafting[0], self._alone)
        else:
            self._draft_together(drafting)
        self.forget(slots)
        for slot in slots:
            self._send(slot)

    def _draft_alone(self, slot: Slot, stride: int) -> None:
        """Draft for one slot, ``stride`` positions a step: this loop's own time shows."""
        context, batch, see, fill = self.context, self.batch, self._see, self.batch.set_single
        decode, logits_of, row_of = context.decode, context.logits_address, context.nextn_address
        position, seq, n_steps = slot.n_past, slot.seq, slot.n_steps
        hidden, token = slot.row, slot.id_last
        spent = 0
        for step in range(n_steps):
            fill(token, position, seq, hidden)
            before = perf_counter_ns()
            decode(batch)
            logits = logits_of(0)
            spent += perf_counter_ns() - before
            if not see(slot, step, logits):
                break
            token = slot.draft[-1]
            position += stride
            if step + 1 < n_steps:
                hidden = row_of(0)
        self.ns += spent

    def _draft_together(self, drafting: list[Slot]) -> None:
        """Draft for several slots, a step of all of them in one batch."""
        context, batch = self.context, self.batch
        batch.clear()
        outputs = [self.feed(slot, slot.id_last, slot.row) for slot in drafting]
        step = 0
        while drafting:
            before = perf_counter_ns()
            self.step(drafting, step)
            rows = [context.logits_address(output) for output in outputs]  # waits for the step
            self.ns += perf_counter_ns() - before
            batch.clear()
            going, indices = [], []
            for slot, output, logits in zip(drafting, outputs, rows, strict=True):
                if self._see(slot, step, logits) and len(slot.draft) < slot.n_steps:
                    indices.append(self.feed(slot, slot.draft[-1], self.hidden(output, step)))
                    going.append(slot)
            drafting, outputs = going, indices
            step += 1

    def _see(self, slot: Slot, step: int, logits: int) -> bool:
        """Read a row of logits; True if its best token was drafted."""
        collector, row = self._collector, self._row
        if collector is not None:
            row.read_at(logits, self._n_logits, self._n_vocab)
            collector.candidates_row(slot.seq, step, row)
        else:
            row.best_at(logits, self._n_logits, self._n_vocab)
        token = row.best
        if token < 0:
            slot.failed = True
            return False
        if self._p_min and row.p_top10 < self._p_min:
            if collector is not None:
                collector.stop(slot.seq, step)
            return False
        slot.draft.append(token)
        return True

    def _send(self, slot: Slot) -> None:
        """Throw away or cut the draft as llama.cpp does."""
        collector = self._collector
        if slot.failed:
            # No finite logit to draft from: the round says nothing about the head.
            slot.draft = []
            if collector is not None:
                collector.invalid(slot.seq)
        elif slot.n_steps and len(slot.draft) < self.settings.n_min:
            slot.draft = []
            if collector is not None:
                collector.drop(slot.seq)
        else:
            del slot.draft[slot.limit :]
            if collector is not None:
                collector.verify(slot.seq, slot.draft, slot.reason)

    def feed(self, slot: Slot, token: int, hidden: int) -> int:
        """Add the next step's input; return the batch index whose logits it will read.

        ``token`` is the last of ``slot.draft`` (``id_last`` before the first step), ``hidden`` the
        address of the row before it.
        """
        batch = self.batch
        index = batch.add(token, slot.n_past + len(slot.draft), slot.seq, True)
        copy(batch.embd_address(index), hidden, self._row_bytes)
        return index

    def hidden(self, output: int, step: int) -> int:
        """Address of the row that a step left and the next one goes on from."""
        return self.context.nextn_address(output)

    def step(self, drafting: Sequence[Slot], step: int) -> None:
        """Decode what was fed: the inputs of ``drafting``, one of each."""
        self.context.decode(self.batch)

    def forget(self, slots: Sequence[Slot]) -> None:
        """Remove what drafting left in the head's memory."""
        for slot in slots:
            if slot.n_steps:
                self.context.seq_rm(slot.seq, slot.n_past, -1)

    def rewind(self, slot: Slot) -> None:
        """Remove everything from ``slot.n_past`` on: what was not accepted."""
        self.context.seq_rm(slot.seq, slot.n_past, -1)

    def clear(self, slot: Slot) -> None:
        """Remove the slot's text."""
        self.context.seq_rm(slot.seq)

    @property
    def memory(self) -> Context:
        """The context whose cells the head attends to."""
        return self.context

    def fork(self, slot: Slot, other: Slot) -> None:
        """Bring ``other``, whose sequence is empty, as far in its draft as ``slot`` is."""
        other.n_past, other.id_last, other.draft = slot.n_past, slot.id_last, list(slot.draft)
        self.memory.seq_cp(slot.seq, other.seq)


class ChainHead(Head):
    """A NextN block per draft step; ``n_max`` is clamped to their number.

    KV is kept per block, so a step removes the draft and decodes all of it again under its block:
    tokens ``[id_last, d[0], ...]`` with rows ``[row, h[0], ...]``, each ``h`` from the step before.
    Every decode chooses its block first.
    """

    kind = "chain"
    _alone = None

    def __init__(
        self,
        context: Context,
        settings: DraftSettings,
        n_vocab: int,
        collector: Collector | None,
    ) -> None:
        super().__init__(context, settings, n_vocab, collector)
        self.deepest = self._n_blocks = context.model.n_layer_nextn
        self.n_max = min(settings.n_max, self._n_blocks)
        if settings.n_min > self.n_max:
            raise InputError(
                f"n_min is {settings.n_min}: this model has heads for {self._n_blocks} tokens, "
                "every draft would be thrown away"
            )
        self._chains: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._rows_of_all = context.model.kind.rows_of_all
        if self._rows_of_all:
            # As masked rows those of several slots would be mixed up.
            context.set_nextn(True, masked=False)

    def _follow(self, parts: Sequence[tuple[Slot, Sequence[int], int]]) -> None:
        for block in range(self._n_blocks):
            for slot, _, _ in parts:
                self.context.seq_rm(slot.seq, slot.n_past, -1)
            self.context.set_nextn_layer_offset(block)
            self.context.decode(self.batch)

    def _chain(self, slot: Slot) -> int:
        """Address of the rows of ``[id_last, d[0], ...]``."""
        if slot.seq not in self._chains:
            size = self._n_blocks * self._row_bytes
            self._chains[slot.seq] = ctypes.create_string_buffer(size)
        return ctypes.addressof(self._chains[slot.seq])

    def feed(self, slot: Slot, token: int, hidden: int) -> int:
        """See :class:`Head`."""
        batch, row_bytes = self.batch, self._row_bytes
        chain = self._chain(slot)
        tokens = [slot.id_last, *slot.draft]
        copy(chain + len(slot.draft) * row_bytes, hidden, row_bytes)
        first = batch.n_tokens
        for i, one in enumerate(tokens):
            index = batch.add(one, slot.n_past + i, slot.seq, i == len(tokens) - 1)
        copy(batch.embd_address(first), chain, len(tokens) * row_bytes)
        return index

    def fork(self, slot: Slot, other: Slot) -> None:
        """See :class:`Head`."""
        super().fork(slot, other)
        copy(self._chain(other), self._chain(slot), (len(slot.draft) + 1) * self._row_bytes)

    def hidden(self, output: int, step: int) -> int:
        """See :class:`Head`."""
        # A step's batch holds step + 1 tokens of each slot, the output last.
        return self.context.nextn_address(output - step if self._rows_of_all else output)

    def step(self, drafting: Sequence[Slot], step: int) -> None:
        """See :class:`Head`."""
        for slot in drafting:
            self.context.seq_rm(slot.seq, slot.n_past, -1)
        self.context.set_nextn_layer_offset(step)
        super().step(drafting, step)


class SharedHead(Head):
    """A head that attends to the target's own cells, all draft steps at position ``n_past``."""

    kind = "shared"
    _alone = 0

    def follow(self, parts: Sequence[tuple[Slot, Sequence[int], int]], rows: int) -> None:
        """Do nothing: the target's cells are the head's."""

    def follow_path(self, slot: Slot, tokens: Sequence[int], rows: Sequence[int]) -> None:
        """Do nothing, likewise."""

    def prepare(self, slots: Sequence[Slot]) -> None:
        """Draft nothing before the first token: there are no cells to attend to."""
        for slot in slots:
            if slot.n_past == 0:
                slot.n_steps, slot.limit, slot.reason = 0, 0, "context"

    def feed(self, slot: Slot, token: int, hidden: int) -> int:
        """See :class:`Head`."""
        batch = self.batch
        index = batch.add(token, slot.n_past, slot.seq, True)
        copy(batch.embd_address(index), hidden, self._row_bytes)
        return index

    def forget(self, slots: Sequence[Slot]) -> None:
        """Do nothing: drafting wrote no cells."""

    def rewind(self, slot: Slot) -> None:
        """Do nothing: the target's own removal did it."""

    def clear(self, slot: Slot) -> None:
        """Do nothing: the target's own removal did it."""

    @property
    def memory(self) -> Context:
        """The target's context."""
        assert self.context.other is not None
        return self.context.other


def head_of(
    context: Context,
    settings: DraftSettings,
    n_vocab: int,
    collector: Collector | None,
) -> Head:
    """Return the head that drives this MTP context."""
    made = Head
    if context.shares_memory:
        made = SharedHead
    elif context.model.n_layer_nextn > 1:
        made = ChainHead
    return made(context, settings, n_vocab, collector)
