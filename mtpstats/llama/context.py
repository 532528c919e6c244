"""An owned ``llama_context``: what libllama would abort on, or do silently wrong, raises first."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NoReturn

from mtpstats._core import stop_address, stop_asked
from mtpstats.closing import Closing
from mtpstats.errors import ContextFull, InputError, Interrupted, LlamaError
from mtpstats.llama import limits
from mtpstats.llama.handle import Handle
from mtpstats.llama.interrupt import DeferredInterrupt
from mtpstats.llama.sequences import Sequences
from mtpstats.llama.structs import CONSTANTS
from mtpstats.text import printable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mtpstats.llama.batch import Batch
    from mtpstats.llama.model import Model

_MTP = CONSTANTS["LLAMA_CONTEXT_TYPE_MTP"]


class Context(Closing, Sequences):
    """A context on ``model``; with ``mtp`` the one that runs its MTP block.

    Creating an MTP context switches the hidden rows of both contexts on: masked in its own where
    the architecture allows it, one per batch token in ``other``, the target. Close it, or use it
    as a context manager; a context closes before its model, and before the context it names as
    ``other``.

    Attributes: ``n_ctx`` (positions a sequence can have), ``n_batch``, ``n_ubatch``,
    ``n_seq_max``, ``n_rs_seq`` (as granted, 0 where the architecture has no snapshots),
    ``n_outputs_max``, ``n_vocab``, ``n_embd_out`` (width of a hidden row), ``mtp``,
    ``shares_memory`` (the MTP context reads the target's cells), ``rollback``.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int = 0,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        n_rs_seq: int = 0,
        n_outputs_max: int = 0,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        flash_attn: str = "auto",
        type_k: str = "f16",
        type_v: str = "f16",
        kv_unified: bool = False,
        swa_full: bool = False,
        beyond_training: bool = False,
        mtp: bool = False,
        other: Context | None = None,
    ) -> None:
        """Create the context; names, meanings and defaults are llama.cpp's.

        ``n_ctx = 0`` is the model's training context; more than that needs ``beyond_training``.
        ``n_threads = None`` is the number of physical cores. Raises InputError for a setting that
        cannot work, ModelError if the model has no MTP block to run, LlamaError with libllama's
        own words for what only it can know (memory, devices).
        """
        self.model = model
        self.other = other
        self.mtp = mtp
        self._fn = fn = model.lib.fn
        n_threads = limits.default_threads() if n_threads is None else n_threads
        n_threads_batch = n_threads if n_threads_batch is None else n_threads_batch
        params = fn.llama_context_default_params()
        fields = {
            "n_ctx": n_ctx, "n_batch": n_batch, "n_ubatch": n_ubatch or n_batch,
            "n_seq_max": n_seq_max, "n_rs_seq": n_rs_seq, "n_outputs_max": n_outputs_max,
            "n_threads": n_threads, "n_threads_batch": n_threads_batch,
            "flash_attn_type": limits.choice("flash_attn", flash_attn, limits.FLASH_ATTN),
            "type_k": limits.choice("type_k", type_k, limits.CACHE_TYPES),
            "type_v": limits.choice("type_v", type_v, limits.CACHE_TYPES),
            "kv_unified": kv_unified, "ctx_type": _MTP if mtp else 0,
        }  # fmt: skip
        limits.check_settings(model, fields, beyond_training)
        if mtp:
            limits.check_mtp(model, n_rs_seq, None if other is None else other.model)
        else:
            limits.check_target(model)
        if other is not None and (other.mtp or not mtp):
            raise InputError("`other` is the target's context of an MTP context")
        fields["n_ctx"] = limits.cells(n_ctx or model.n_ctx_train, 1 if kv_unified else n_seq_max)
        for name, value in fields.items():
            setattr(params, name, value)
        if hasattr(params, "swa_full"):
            params.swa_full = swa_full
        params.ctx_other = other.ptr if other is not None else None
        parents = (model.handle,) if other is None else (model.handle, other.handle)
        with DeferredInterrupt():
            try:
                ptr = fn.llama_init_from_model(model.ptr, params)
            except LlamaError as error:
                kind = "MTP context" if mtp else "context"
                raise LlamaError(f"no {kind} on {printable(model.path.name)}: {error}") from None
            self._handle: Handle = Handle("context", ptr, fn.llama_free, parents)
            self._handle.own(self)
        # Graphs on the CPU stop between two nodes; a device ends what it began.
        fn.llama_set_abort_callback(ptr, stop_address(), None)
        self._memory: int = fn.llama_get_memory(ptr)
        # Where one sequence ends: n_ctx itself is shared out among the sequences.
        self.n_ctx = int(fn.llama_n_ctx_seq(ptr) if fn.has("llama_n_ctx_seq") else
                         fn.llama_n_ctx(ptr) // (1 if kv_unified else n_seq_max))  # fmt: skip
        self.n_batch = int(fn.llama_n_batch(ptr))
        self.n_ubatch = int(fn.llama_n_ubatch(ptr))
        self.n_seq_max = int(fn.llama_n_seq_max(ptr))
        self.n_rs_seq = int(fn.llama_n_rs_seq(ptr)) if fn.has("llama_n_rs_seq") else 0
        self.n_outputs_max = n_outputs_max or self.n_batch
        self.kv_unified = kv_unified
        self.n_vocab = model.n_vocab
        self.n_embd_out = model.n_embd_out
        self.shares_memory = (
            other is not None
            and fn.has("llama_get_ctx_other")
            and fn.llama_get_ctx_other(ptr) == other.ptr
        )
        # A state that cannot be cut at any position: recurrent layers, except in the MTP block.
        self._recurrent = (model.is_hybrid or model.is_recurrent) and not mtp
        # An MTP context has attention memory whatever its target has.
        self._whole_sequences = model.kind.whole_sequences and not mtp
        self._couples = kv_unified and not model.kind.whole_sequences
        self._start_tracking(other if self.shares_memory else None)
        self._start_decoding()
        if mtp:
            self.set_nextn(True, masked=not model.kind.unmasked)
            if other is not None:
                other.set_nextn(True, masked=False)

    def _start_decoding(self) -> None:
        self._batch_struct = self.model.lib.structs["llama_batch"]
        self._decode = self._fn.llama_decode
        self._logits_ith = self._fn.llama_get_logits_ith
        self._nextn_ith = self._fn.llama_get_embeddings_nextn_ith
        self._width = self.n_embd_out if self.mtp else 0
        self._nextn: tuple[bool, bool] = (False, False)
        # What the last decode left: number of tokens, indices with logits, whether these are all,
        # rows as set then.
        self._n_decoded = 0
        self._outputs: set[int] = set()
        self._all_outputs = False
        self._rows: tuple[bool, bool] = (False, False)
        # Address of the first logits and hidden row where all are asked for, 0 before the first
        # call: the others follow in the order of the batch, and a call costs more than a sum.
        self._first_logits = self._first_row = 0

    @property
    def ptr(self) -> int:
        """The ``llama_context *``; raises InputError after ``close``."""
        return self._handle.get()

    @property
    def handle(self) -> Handle:
        """The owning handle, for contexts that read this one's memory."""
        return self._handle

    # -- decoding -----------------------------------------------------------------------------

    def decode(self, batch: Batch) -> None:
        """Run the batch. Every check of it comes before the call.

        Raises InputError for a batch this context cannot take, ContextFull when there is no room
        (the memory is untouched), Interrupted after ``_core.stop(True)``, DecodeError. After the
        last two the sequences of the batch hold what was decoded of it, or nothing at all where
        memory is recurrent.
        """
        n = batch.n_tokens
        ptr = self._handle.ptr
        following, last_allowed, n_seq = self._next, self.n_ctx, self.n_seq_max
        fits = (
            ptr is not None
            and 0 < n <= self.n_batch
            and batch.max_token < self.n_vocab
            and batch.n_embd == self._width
            and len(batch.outputs) <= self.n_outputs_max
            and (not batch.coupled or self._couples)
        )
        spans = batch.spans
        if fits:
            for seq, (first, last) in spans.items():
                if seq >= n_seq or first != following[seq] or last >= last_allowed:
                    fits = False
        if not fits:
            self._refuse(batch)
        if stop_asked():
            raise Interrupted("interrupted")
        try:
            self._decode(ptr, batch.struct(self._batch_struct))
        except BaseException as error:  # Ctrl-C is raised here when the call returns
            self._n_decoded, self._outputs = 0, set()
            self._resync(spans, isinstance(error, ContextFull))
            raise
        if not self.shares_memory:
            for seq, (_, last) in spans.items():
                following[seq] = last + 1
        self._n_decoded = n
        self._outputs = batch.outputs
        self._all_outputs = len(batch.outputs) == n
        self._rows = self._nextn
        self._first_logits = self._first_row = 0
        if self._recurrent:
            self._note_snapshots(batch)

    def _refuse(self, batch: Batch) -> NoReturn:
        self._handle.get()
        n = batch.n_tokens
        if n == 0:
            raise InputError("the batch is empty")
        if n > self.n_batch:
            raise InputError(f"{n} tokens in the batch; n_batch is {self.n_batch}")
        if batch.max_token >= self.n_vocab:
            raise InputError(f"token {batch.max_token} is outside the vocabulary of {self.n_vocab}")
        if batch.n_embd != self._width:
            raise InputError(
                f"an MTP context takes tokens with hidden rows of {self._width}; the batch has "
                f"rows of {batch.n_embd}"
                if self.mtp
                else f"the target takes tokens only; the batch has rows of {batch.n_embd}"
            )
        if len(batch.outputs) > self.n_outputs_max:
            raise InputError(
                f"logits of {len(batch.outputs)} tokens asked for; n_outputs_max is "
                f"{self.n_outputs_max}"
            )
        if batch.coupled and not self._couples:
            raise InputError(
                f"{self.model.arch} cannot have a token in several sequences"
                if self.kv_unified
                else "without kv_unified a token belongs to one sequence"
            )
        for seq, (first, last) in batch.spans.items():
            if seq >= self.n_seq_max:
                raise InputError(f"sequence {seq}; n_seq_max is {self.n_seq_max}")
            if first != self._next[seq]:
                raise InputError(
                    f"sequence {seq} goes on at position {self._next[seq]}, the batch at {first}"
                )
            if last >= self.n_ctx:
                raise ContextFull(
                    f"position {last} of sequence {seq} does not fit into a context of "
                    f"{self.n_ctx}",
                    1,
                )
        raise InputError("the batch does not fit this context")

    def synchronize(self) -> None:
        """Wait until the last decode is finished; reading logits or rows does so as well."""
        self._fn.llama_synchronize(self.ptr)

    # -- results ------------------------------------------------------------------------------

    def logits_address(self, i: int) -> int:
        """Address of the logits (float32[n_vocab]) of token ``i`` of the last batch.

        Valid until the next decode or ``close``. Raises InputError if none were asked for.
        """
        if i not in self._outputs or i >= self._n_decoded or self._handle.ptr is None:
            self._no_row("logits", i)
        address: int | None
        if not self._all_outputs:
            address = self._logits_ith(self._handle.ptr, i)
            return address or self._no_row("logits", i)
        if not self._first_logits:
            address = self._logits_ith(self._handle.ptr, 0)
            self._first_logits = address or self._no_row("logits", 0)
        return self._first_logits + 4 * self.n_vocab * i

    def logits(self, i: int) -> NDArray[np.float32]:
        """Logits of token ``i`` of the last batch as a view, float32[n_vocab].

        The view reads llama.cpp's memory: it dies at the next decode or ``close``; copy to keep.
        """
        return _view(self.logits_address(i), self.n_vocab)

    def set_nextn(self, value: bool, masked: bool) -> None:
        """Switch the hidden rows the MTP block is fed with on or off, from the next decode on.

        Masked: rows of the tokens with logits; unmasked: of all tokens, in batch order. A change
        makes the rows of the last decode unreadable.
        """
        self._fn.llama_set_embeddings_nextn(self.ptr, value, masked)
        if self._nextn != (value, masked):
            self._nextn, self._rows = (value, masked), (False, False)

    def nextn_address(self, i: int) -> int:
        """Address of the hidden row (float32[n_embd_out]) of token ``i`` of the last batch.

        Valid until the next decode or ``close``. Raises InputError if there is no such row.
        """
        value, masked = self._rows
        if (
            not value
            or not 0 <= i < self._n_decoded
            or (masked and i not in self._outputs)
            or self._handle.ptr is None
        ):
            self._no_row("hidden row", i)
        address: int | None
        if masked and not self._all_outputs:
            address = self._nextn_ith(self._handle.ptr, i)
            return address or self._no_row("hidden row", i)
        if not self._first_row:
            address = self._nextn_ith(self._handle.ptr, 0)
            self._first_row = address or self._no_row("hidden row", 0)
        return self._first_row + 4 * self.n_embd_out * i

    def nextn_rows_address(self) -> int:
        """Address of all hidden rows of the last batch, float32[n_tokens, n_embd_out].

        In batch order; unmasked only. Valid until the next decode or ``close``. Raises InputError.
        """
        if self._rows != (True, False) or not self._n_decoded:
            self._no_row("unmasked hidden rows", 0)
        return self.nextn_address(0)

    def nextn(self, i: int) -> NDArray[np.float32]:
        """Hidden row of token ``i`` of the last batch as a view, float32[n_embd_out].

        The view reads llama.cpp's memory: it dies at the next decode or ``close``; copy to keep.
        """
        return _view(self.nextn_address(i), self.n_embd_out)

    def _no_row(self, what: str, i: int) -> NoReturn:
        self._handle.get()
        raise InputError(f"no {what} for token {i} of the last batch ({self._n_decoded} tokens)")

    def set_nextn_layer_offset(self, offset: int) -> None:
        """Choose the NextN block the next decodes run, for models with a chain of them."""
        if not self.mtp or not 0 <= offset < self.model.n_layer_nextn:
            raise InputError(f"no NextN block {offset} of {self.model.n_layer_nextn} here")
        self._fn.llama_set_nextn_layer_offset(self.ptr, offset)

    # -- lifetime -----------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called, here or on the model."""
        return self._handle.ptr is None

    def close(self) -> None:
        """Free the context, contexts that read its memory first. Does nothing the second time."""
        self._handle.close()


def _view(address: int, count: int) -> NDArray[np.float32]:
    import numpy as np

    memory: Any = (ctypes.c_float * count).from_address(int(address))
    view: NDArray[np.float32] = np.frombuffer(memory, dtype=np.float32)
    return view
