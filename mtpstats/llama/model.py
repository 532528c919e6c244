"""An owned ``llama_model``: the file is checked before libllama sees it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpstats.closing import Closing
from mtpstats.errors import InputError, LlamaError, ModelError
from mtpstats.llama import arch, gguf, vocabulary
from mtpstats.llama.arch import Arch
from mtpstats.llama.functions import PROGRESS
from mtpstats.llama.handle import Handle
from mtpstats.llama.interrupt import DeferredInterrupt
from mtpstats.llama.placement import Placement
from mtpstats.llama.stack import call_with_stack
from mtpstats.llama.structs import CONSTANTS
from mtpstats.text import printable

if TYPE_CHECKING:
    from mtpstats.llama.library import Library

_INT32_MAX = 2**31 - 1
_LEAST_STACK = 1 << 20
_VOCAB_TYPE_NONE = CONSTANTS["LLAMA_VOCAB_TYPE_NONE"]


class Model(Closing):
    """A loaded GGUF model. Close it, or use it as a context manager; contexts close first."""

    def __init__(
        self,
        lib: Library,
        path: str | os.PathLike[str],
        *,
        n_gpu_layers: int = -1,
        placement: Placement | None = None,
        vocab_only: bool = False,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """Check the file's header, then load it with its MTP blocks.

        ``placement`` says which devices get what; None leaves it to llama.cpp. ``progress`` gets a
        fraction from 0 to 1; an exception in it stops the loading and comes out here. Raises
        ModelError with what is wrong with the file, or libllama's own last words, InputError for a
        placement that cannot be.
        """
        self.lib = lib
        self.path = Path(path)
        self.header = gguf.read_model(self.path)
        self.arch = printable(self.header.arch)
        self.vocab_only = vocab_only
        fn = self._fn = lib.fn
        params = fn.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        self._placed = placement.apply(lib, params) if placement is not None else []
        params.vocab_only = vocab_only
        params.load_mtp = True
        ptr = self._load(params, progress)
        lib.models.add(self)
        self._vocab: int = fn.llama_model_get_vocab(ptr)
        self.n_vocab = int(fn.llama_vocab_n_tokens(self._vocab))
        self.n_ctx_train = int(fn.llama_model_n_ctx_train(ptr))
        self.n_layer = int(fn.llama_model_n_layer(ptr))
        self.n_layer_nextn = int(fn.llama_model_n_layer_nextn(ptr))
        self.n_embd = int(fn.llama_model_n_embd(ptr))
        self.n_embd_out = int(fn.llama_model_n_embd_out(ptr))
        self.n_params = int(fn.llama_model_n_params(ptr))
        self.size = int(fn.llama_model_size(ptr))
        # Sliding window in positions, 0 without one.
        self.n_swa = int(fn.llama_model_n_swa(ptr)) if fn.has("llama_model_n_swa") else 0
        self.is_hybrid = bool(fn.llama_model_is_hybrid(ptr))
        self.is_recurrent = bool(fn.llama_model_is_recurrent(ptr))
        self._eog: dict[int, bool] = {}
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self._buffer = ctypes.create_string_buffer(256)

    def _load(self, params: Any, progress: Callable[[float], None] | None) -> int:
        stopped: list[BaseException] = []
        interrupt = DeferredInterrupt()

        def report(fraction: float, _user_data: Any) -> bool:
            try:
                if progress is not None:
                    progress(fraction)
            except BaseException as error:
                stopped.append(error)
            return not stopped and not interrupt.pending

        callback = PROGRESS(report)
        params.progress_callback = ctypes.cast(callback, ctypes.c_void_p)
        with interrupt:
            try:
                ptr: int = self._fn.llama_model_load_from_file(os.fsencode(self.path), params)
            except LlamaError as error:
                if stopped:
                    raise stopped[0] from None
                shown = printable(str(self.path))
                raise ModelError(f"{shown}: cannot be loaded: {error}") from None
            # Inside, so that an interrupt delivered on the way out finds it owned.
            self._handle = Handle("model", ptr, self._fn.llama_model_free)
            self._handle.own(self)
        return ptr

    @property
    def ptr(self) -> int:
        """The ``llama_model *``; raises InputError after ``close``."""
        return self._handle.get()

    @property
    def handle(self) -> Handle:
        """The owning handle, for contexts."""
        return self._handle

    @property
    def desc(self) -> str:
        """llama.cpp's one-line description."""
        return printable(self._string(partial(self._fn.llama_model_desc, self.ptr)) or "")

    @property
    def ftype(self) -> str:
        """Name of the quantisation, for instance ``F16`` or ``Q4_K - Medium``."""
        fn = self._fn
        if fn.has("llama_ftype_name") and fn.has("llama_model_ftype"):
            return printable(fn.llama_ftype_name(fn.llama_model_ftype(self.ptr)) or b"unknown")
        return str(self.header.first.integer("general.file_type"))

    @property
    def kind(self) -> Arch:
        """What is known of the architecture, or what its NextN blocks suggest."""
        return arch.of(self.header.arch, self.n_layer_nextn)

    @property
    def has_mtp(self) -> bool:
        """Whether the file holds an MTP block that a context of type MTP can run."""
        return self.mtp_obstacle() is None

    def mtp_obstacle(self) -> str | None:
        """Return why no MTP context is possible on this model, None if one is."""
        if self.header.arch in arch.NO_MTP_GRAPH:
            return (
                f"{self.arch} files carry NextN metadata, but llama.cpp has no MTP graph for them"
            )
        if self.vocab_only:
            return "only the vocabulary was loaded"
        if self.n_layer_nextn == 0 and self.header.arch in arch.COMPANIONS:
            companion = arch.COMPANIONS[self.header.arch]
            return f"its head is a {companion} GGUF of its own: name it as the draft model"
        missing = self._eh_proj()
        if missing is not None:
            return (
                f"its metadata promises {self.header.hparam('nextn_predict_layers')} NextN "
                f"block(s), but the file holds the trunk only: {missing} is missing; name the file "
                "that has it as the draft model"
            )
        if self.n_layer_nextn == 0:
            return f"the model has {self.n_layer} layers and no NextN block"
        if self.kind.heads == "single" and self.n_layer_nextn > 1:
            return f"{self.n_layer_nextn} NextN blocks; llama.cpp runs one for {self.arch}"
        return None

    def trunk_obstacle(self) -> str | None:
        """Return why the model cannot be a target, None if it can."""
        if self.kind.target:
            return f"it is a head for {self.kind.target} models, not a model by itself"
        tensors = (name for file in self.header.files for name in file.tensors)
        if self.n_layer_nextn and not any(name.startswith("blk.0.") for name in tensors):
            return "it holds NextN blocks only, not a model by itself"
        return None

    def _eh_proj(self) -> str | None:
        """Name the tensor of the first NextN block that the metadata promises but no file has."""
        nextn = self.header.hparam("nextn_predict_layers") or 0
        if not nextn or arch.of(self.header.arch, nextn).heads == "shared":
            return None
        needed = f"blk.{(self.header.hparam('block_count') or 0) - nextn}.nextn.eh_proj.weight"
        return None if self.header.has_tensor(needed) else needed

    def meta(self, key: str) -> str | None:
        """Return the metadata value as llama.cpp prints it, None if there is none."""
        return self._string(partial(self._fn.llama_model_meta_val_str, self.ptr, key.encode()))

    def metadata(self) -> dict[str, str]:
        """Return all scalar metadata as llama.cpp prints it, unfiltered: render it printable."""
        fn, ptr = self._fn, self.ptr
        found = {}
        for index in range(fn.llama_model_meta_count(ptr)):
            key = self._string(partial(fn.llama_model_meta_key_by_index, ptr, index))
            value = self._string(partial(fn.llama_model_meta_val_str_by_index, ptr, index))
            if key is not None:
                found[key] = value or ""
        return found

    def chat_template(self, name: str | None = None) -> str | None:
        """Return the model's chat template as stored, None if there is none."""
        raw = self._fn.llama_model_chat_template(self.ptr, name.encode() if name else None)
        return raw.decode("utf-8", "replace") if raw is not None else None

    def _string(self, call: Callable[[Any, int], int]) -> str | None:
        # snprintf's convention: the length it would take, negative for "no such thing".
        size = 1024
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = call(buffer, size)
            if length < 0:
                return None
            if length < size:
                return buffer.raw[:length].decode("utf-8", "replace")
            size = length + 1

    def tokenize(
        self, text: str, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the tokens of ``text``.

        Raises InputError for text that is not valid Unicode, ModelError for a model without a
        tokenizer, or with one that asks for a token it does not have.
        """
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"the text is not valid Unicode at character {error.start}") from None
        if len(raw) > _INT32_MAX // 4:
            raise InputError(f"the text is {len(raw)} bytes long; {_INT32_MAX // 4} are possible")
        vocab = self._tokenizer()
        if add_special:
            self._check_ends(vocab)
        obstacle = self.header.vocabulary.obstacle(text)
        if obstacle is not None:
            raise InputError(f"the text cannot become tokens: {obstacle}")
        count, stack = len(raw) + 8, vocabulary.stack_size(text)
        for _ in range(2):
            tokens = (ctypes.c_int32 * count)()
            call = partial(self._fn.llama_tokenize, vocab, raw, len(raw), tokens, count,
                           add_special, parse_special)  # fmt: skip
            made = call_with_stack(stack + _LEAST_STACK, call) if stack else call()
            if made >= 0:
                return list(tokens[:made])
            if made == -_INT32_MAX - 1:
                break
            count = -made
        raise InputError("the text makes more tokens than a context can hold")

    def piece(self, token: int, special: bool = True) -> bytes:
        """Return the text of a token; control tokens are empty unless ``special``."""
        cached = self._pieces.get((token, special))
        if cached is not None:
            return cached
        self._check_token(token)
        vocab, buffer = self._tokenizer(), self._buffer
        length = self._fn.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, special)
        if length < 0:
            buffer = self._buffer = ctypes.create_string_buffer(-length)
            length = self._fn.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, special)
        text = self._pieces[token, special] = buffer.raw[: max(length, 0)]
        return text

    def is_eog(self, token: int) -> bool:
        """Whether generation ends with this token."""
        known = self._eog.get(token)
        if known is None:
            self._check_token(token)
            known = self._eog[token] = bool(self._fn.llama_vocab_is_eog(self._tokenizer(), token))
        return known

    @property
    def bos(self) -> int:
        """The token that begins a text, -1 if there is none."""
        return int(self._fn.llama_vocab_bos(self._vocab_ptr()))

    @property
    def eos(self) -> int:
        """The token that ends a text, -1 if there is none."""
        return int(self._fn.llama_vocab_eos(self._vocab_ptr()))

    @property
    def adds(self) -> tuple[bool, bool]:
        """Whether ``tokenize`` puts BOS before a text, and EOS behind it."""
        vocab = self._vocab_ptr()
        return (
            bool(self._fn.llama_vocab_get_add_bos(vocab)),
            bool(self._fn.llama_vocab_get_add_eos(vocab)),
        )

    def _check_token(self, token: int) -> None:
        if not 0 <= token < self.n_vocab:
            raise InputError(f"token {token} is outside the vocabulary of {self.n_vocab}")

    def _vocab_ptr(self) -> int:
        # The vocabulary lives inside the model.
        self._handle.get()
        return self._vocab

    def _tokenizer(self) -> int:
        vocab = self._vocab_ptr()
        if self._fn.llama_vocab_type(vocab) == _VOCAB_TYPE_NONE:
            raise ModelError(f"{printable(self.path.name)} has no tokenizer")
        return vocab

    def _check_ends(self, vocab: int) -> None:
        fn = self._fn
        for wanted, token, what in (
            (fn.llama_vocab_get_add_bos, fn.llama_vocab_bos, "begin"),
            (fn.llama_vocab_get_add_eos, fn.llama_vocab_eos, "end"),
        ):
            if wanted(vocab) and not 0 <= token(vocab) < self.n_vocab:
                raise ModelError(
                    f"{printable(self.path.name)} asks for a token to {what} a text with and has "
                    "none"
                )

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._handle.ptr is None

    def close(self) -> None:
        """Close the contexts of this model, then free it. Does nothing the second time."""
        self._handle.close()
