"""The tokens of one ``llama_decode`` call, in arrays that are allocated once."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mtpstats._core import copy
from mtpstats.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAX_POS = 2**31 - 2


def _int32(count: int) -> tuple[Any, memoryview]:
    # Items are set through a memoryview: a third of the time an item of a ctypes array takes.
    array = (ctypes.c_int32 * count)()
    return array, memoryview(array).cast("B").cast("i")


class Batch:
    """Up to ``capacity`` tokens; with ``n_embd`` each also carries a float32 row of that width.

    The target takes batches without rows, an MTP context takes both token and row
    (``n_embd = context.n_embd_out``). ``n_seq_max`` bounds the sequences of one *token*; more than
    one is for trees, where a node belongs to all leaves below it. Positions of a sequence must be
    consecutive. Not bound to a context; may be decoded any number of times.
    """

    __slots__ = (
        "_embd", "_keep", "_n_seq", "_n_seq_id", "_n_tokens", "_output", "_pos", "_row_bytes",
        "_seq", "_struct", "_token", "capacity", "coupled", "max_token", "n_embd", "n_tokens",
        "outputs", "spans",
    )  # fmt: skip

    def __init__(self, capacity: int, *, n_embd: int = 0, n_seq_max: int = 1) -> None:
        """Allocate. Raises InputError for sizes below 1 or rows of negative width."""
        if capacity < 1 or n_seq_max < 1 or n_embd < 0:
            raise InputError(
                f"a batch of {capacity} tokens, {n_seq_max} sequences each, rows of {n_embd}"
            )
        self.capacity = capacity
        self.n_embd = n_embd
        self._n_seq = n_seq_max
        self._row_bytes = 4 * n_embd
        token, self._token = _int32(capacity)
        pos, self._pos = _int32(capacity)
        n_seq_id, self._n_seq_id = _int32(capacity)
        seq, self._seq = _int32(capacity * n_seq_max)
        output = (ctypes.c_int8 * capacity)()
        self._output = memoryview(output).cast("B").cast("b")
        base = ctypes.addressof(seq)
        # Ends in NULL, as llama_batch_init makes it.
        seq_id = (ctypes.c_void_p * (capacity + 1))(
            *(base + 4 * n_seq_max * i for i in range(capacity)), None
        )
        embd = (ctypes.c_float * (capacity * n_embd))() if n_embd else None
        self._embd = ctypes.addressof(embd) if embd is not None else 0
        # The structure holds bare addresses: this tuple keeps what they point to.
        self._keep = (token, pos, n_seq_id, seq, output, seq_id, embd)
        self._struct: Any = None
        for i in range(capacity):
            self._n_seq_id[i] = 1
        self.n_tokens, self.coupled = 0, False
        self.clear()

    def clear(self) -> None:
        """Empty the batch; rows keep their old content until they are set."""
        if self.coupled:
            for i in range(self.n_tokens):
                self._n_seq_id[i] = 1
        self.n_tokens = 0
        # sequence -> [first position, last position]
        self.spans: dict[int, list[int]] = {}
        # indices with logits asked for; a new set, since a context keeps the one it decoded
        self.outputs: set[int] = set()
        self.max_token = -1
        self.coupled = False

    def add(self, token: int, pos: int, seq: int | Iterable[int] = 0, output: bool = False) -> int:
        """Append a token and return its index; ``output`` asks for its logits.

        ``seq`` is one sequence or several. Raises InputError for a full batch, a negative token,
        position or sequence, and for a position that does not follow the sequence's last one.
        """
        i = self.n_tokens
        if i >= self.capacity:
            raise InputError(f"the batch is full ({self.capacity} tokens)")
        if seq.__class__ is not int:
            return self._add_general(token, pos, seq, output)
        span = self.spans.get(seq)
        if token < 0 or pos < 0 or pos > _MAX_POS or seq < 0:
            raise InputError(f"token {token} at position {pos} of sequence {seq}: out of range")
        if span is None:
            self.spans[seq] = [pos, pos]
        elif pos == span[1] + 1:
            span[1] = pos
        else:
            raise InputError(
                f"position {pos} of sequence {seq} does not follow position {span[1]} in the batch"
            )
        self._token[i] = token
        self._pos[i] = pos
        self._seq[i * self._n_seq] = seq
        self._output[i] = 1 if output else 0
        if output:
            self.outputs.add(i)
        if token > self.max_token:
            self.max_token = token
        self.n_tokens = i + 1
        return i

    def set_single(self, token: int, pos: int, seq: int, row: int) -> None:
        """Hold one token with logits asked for and the row at address ``row``: a draft step.

        The same as ``clear``, ``add`` and ``set_rows``, at a third of their time. The address is
        trusted. Raises InputError as ``add`` does.
        """
        if token < 0 or pos < 0 or pos > _MAX_POS or seq < 0 or not self._embd:
            raise InputError(f"token {token} at position {pos} of sequence {seq}: out of range")
        self._token[0], self._pos[0], self._seq[0], self._output[0] = token, pos, seq, 1
        if self.coupled:
            self.clear()
        self.spans, self.outputs = {seq: [pos, pos]}, {0}
        self.max_token, self.n_tokens = token, 1
        copy(self._embd, row, self._row_bytes)

    def _add_general(self, token: int, pos: int, seq: Any, output: bool) -> int:
        try:
            seqs = [operator.index(seq)]
        except TypeError:
            seqs = [operator.index(one) for one in seq]
        token, pos = operator.index(token), operator.index(pos)
        if not 0 < len(seqs) <= self._n_seq or len(set(seqs)) != len(seqs):
            raise InputError(
                f"a token in {len(seqs)} sequences; this batch takes 1 to {self._n_seq} different"
            )
        # All but the first are checked here, so that a refused token leaves the batch unchanged.
        for one in seqs[1:]:
            span = self.spans.get(one)
            if one < 0 or (span is not None and pos != span[1] + 1):
                raise InputError(f"position {pos} of sequence {one} does not follow in the batch")
        i = self.add(token, pos, seqs[0], output)
        for k, one in enumerate(seqs[1:], 1):
            self._seq[i * self._n_seq + k] = one
            self.spans.setdefault(one, [pos, pos])[1] = pos
        self._n_seq_id[i] = len(seqs)
        if len(seqs) > 1:
            self.coupled = True
        return i

    def extend(self, tokens: Iterable[int], pos: int, seq: int = 0, outputs: str = "none") -> range:
        """Append ``tokens`` from position ``pos`` on; ``outputs`` is "none", "last" or "all".

        Returns their indices. Raises InputError as ``add`` does.
        """
        if outputs not in ("none", "last", "all"):
            raise InputError(f"outputs={outputs!r}; use none, last or all")
        first = self.n_tokens
        add, every = self.add, outputs == "all"
        for token in tokens:
            add(token, pos, seq, every)
            pos += 1
        if outputs == "last" and self.n_tokens > first:
            self._output[self.n_tokens - 1] = 1
            self.outputs.add(self.n_tokens - 1)
        return range(first, self.n_tokens)

    def embd_address(self, i: int) -> int:
        """Address of row ``i`` (float32[n_embd]); owned by the batch. Raises InputError."""
        if not 0 <= i < self.capacity or not self.n_embd:
            raise InputError(f"no row {i} in a batch of {self.capacity} rows of {self.n_embd}")
        return self._embd + i * self._row_bytes

    def set_rows(self, i: int, address: int, count: int = 1) -> None:
        """Copy ``count`` float32 rows of width ``n_embd`` from ``address`` to rows ``i``...

        The address is trusted. Raises InputError if the rows do not fit.
        """
        if i < 0 or count < 0 or i + count > self.capacity or not self.n_embd:
            raise InputError(f"rows {i}..{i + count} in a batch of {self.capacity} rows")
        copy(self._embd + i * self._row_bytes, address, count * self._row_bytes)

    def rows(self) -> NDArray[np.float32]:
        """All rows as a view, float32[capacity, n_embd]; it keeps the memory alive."""
        import numpy as np

        memory: Any = self._keep[6]
        if memory is None:
            raise InputError("the batch has no rows")
        rows: NDArray[np.float32] = np.frombuffer(memory, dtype=np.float32)
        return rows.reshape(self.capacity, self.n_embd)

    def struct(self, made: type[ctypes.Structure]) -> Any:
        """Return the ``llama_batch`` for a decode now; made at first use, then reused."""
        if self._struct is None or self._struct.__class__ is not made:
            self._bind(made)
        self._n_tokens[0] = self.n_tokens
        return self._struct

    def _bind(self, made: Any) -> None:
        token, pos, n_seq_id, _, output, seq_id, embd = self._keep
        self._struct = made(
            token=ctypes.addressof(token),
            embd=ctypes.addressof(embd) if embd is not None else None,
            pos=ctypes.addressof(pos),
            n_seq_id=ctypes.addressof(n_seq_id),
            seq_id=ctypes.addressof(seq_id),
            logits=ctypes.addressof(output),
        )
        start = made.n_tokens.offset
        self._n_tokens = memoryview(self._struct).cast("B")[start : start + 4].cast("i")
