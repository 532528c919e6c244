"""Write the trained model to GGUF, read a GGUF back into PyTorch, and write reference logits.

The reference is computed from the weights as stored (rounded to F16 where the file holds F16), in
float32, by PyTorch alone: a test can hold libllama's rows against it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from corpus import END_OF_TEXT, SPECIAL_TOKENS
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType, TokenType
from model import Model, Shape
from tokenizers import Tokenizer
from torch import Tensor

ARCHITECTURE = "qwen35"
NAME = "mtpstats tiny"
DESCRIPTION = (
    "A language model of 3.4 million parameters with one multi-token-prediction block, for trying "
    "and testing mtpstats. Its text looks like Python code and documentation and means nothing."
)
PROVENANCE = (
    "Trained from scratch by training/train.py of mtpstats on text of CPython 3.11.2 as packaged "
    "by Debian (libpython3.11-minimal, libpython3.11-stdlib, python3.11-doc, version "
    "3.11.2-6+deb12u9; PSF License Version 2): the standard library without tests, and the "
    "documentation's reStructuredText."
)
REFERENCE_PROMPT = (
    "def read_config(path, encoding=None):\n"
    '    """Read the configuration file and return a dictionary."""\n'
    "    with open(path, encoding=encoding) as file:\n"
)
REFERENCE_TOKENS = 24

# Matrices that llama.cpp multiplies in F16; everything else is small and stays F32.
HALF_NAMES = ("token_embd", "attn_", "ffn_", "ssm_out", "eh_proj")


def stored_as_half(name: str, tensor: Tensor) -> bool:
    """Whether the GGUF holds this tensor in F16."""
    return tensor.ndim == 2 and any(part in name for part in HALF_NAMES)


def add_metadata(writer: GGUFWriter, shape: Shape, tokenizer_json: Path) -> None:
    """Write every key that llama.cpp needs to load and run the model, and where it came from."""
    writer.add_name(NAME)
    writer.add_description(DESCRIPTION)
    writer.add_license("MIT")
    writer.add_string("general.source.note", PROVENANCE)
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    writer.add_block_count(shape.n_trunk + 1)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.rope_dim)
    writer.add_rope_dimension_sections(list(shape.rope_sections))
    writer.add_ssm_conv_kernel(shape.conv_kernel)
    writer.add_ssm_inner_size(shape.delta_inner)
    writer.add_ssm_state_size(shape.delta_state)
    writer.add_ssm_time_step_rank(shape.n_delta_head)
    writer.add_ssm_group_count(shape.n_delta_head)
    writer.add_uint32(f"{ARCHITECTURE}.full_attention_interval", shape.full_attention_interval)
    writer.add_uint32(f"{ARCHITECTURE}.nextn_predict_layers", 1)

    bpe = json.loads(tokenizer_json.read_text())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(ARCHITECTURE)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL if token in SPECIAL_TOKENS else TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_eos_token_id(END_OF_TEXT)
    writer.add_eot_token_id(END_OF_TEXT)
    writer.add_pad_token_id(END_OF_TEXT)
    writer.add_add_bos_token(False)


def write_gguf(model: Model, tokenizer_json: Path, path: Path) -> None:
    """Write `model` as an F16 GGUF."""
    writer = GGUFWriter(path, ARCHITECTURE)
    add_metadata(writer, model.shape, tokenizer_json)
    for name, tensor in model.state_dict().items():
        if name.endswith("ssm_a_log"):
            name, tensor = name.removesuffix("_log"), -tensor.exp()
        dtype = np.float16 if stored_as_half(name, tensor) else np.float32
        writer.add_tensor(name, tensor.numpy().astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(path: Path) -> Model:
    """Load the weights of a GGUF with the default shape into a float32 `Model`.

    Raises:
        ValueError: if the file holds quantised tensors.
        RuntimeError: if names or shapes differ from the model's.
    """
    state: dict[str, Tensor] = {}
    for tensor in GGUFReader(path).tensors:
        if tensor.tensor_type not in (GGMLQuantizationType.F16, GGMLQuantizationType.F32):
            raise ValueError(f"{path}: {tensor.name} is {tensor.tensor_type.name}, not F16 or F32")
        values = torch.from_numpy(tensor.data.astype(np.float32))
        if tensor.name.endswith("ssm_a"):
            state[f"{tensor.name}_log"] = (-values).log()
        else:
            state[tensor.name] = values
    model = Model()
    model.load_state_dict(state)
    return model.eval()


@torch.no_grad()
def reference_rows(model: Model, prompt: list[int]) -> tuple[list[float], list[float], int]:
    """Rows to hold libllama against, for a prompt x[0..n-1].

    Returns the trunk's logits at position n - 1; the head's logits at position n, where it takes
    the token that is best in the trunk's row together with the trunk's hidden row of n - 1 (its
    earlier rows being made from the prompt in the same way, zeros before position 0); and that
    token.
    """
    hidden = model.hidden(torch.tensor([prompt]))
    row = model.logits(hidden[0, -1])
    next_token = int(row.argmax())
    # The head's row at n needs hidden rows up to n - 1 only, so any filler will do at n.
    extended = torch.cat([hidden, torch.zeros_like(hidden[:, :1])], 1)
    (steps,) = model.draft_steps(torch.tensor([[*prompt, next_token]]), extended, [1])
    return row.tolist(), model.logits(steps[0, -1]).tolist(), next_token


def write_reference(gguf: Path, tokenizer_json: Path, path: Path) -> None:
    """Write the reference rows of `gguf` as JSON; logits are rounded to 4 decimals."""
    model = read_gguf(gguf)
    prompt = Tokenizer.from_file(str(tokenizer_json)).encode(REFERENCE_PROMPT).ids
    prompt = prompt[:REFERENCE_TOKENS]
    logits, head_logits, next_token = reference_rows(model, prompt)
    reference = {
        "sha256": hashlib.sha256(gguf.read_bytes()).hexdigest(),
        "prompt_tokens": prompt,
        "logits": [round(value, 4) for value in logits],
        "next_token": next_token,
        "head_logits": [round(value, 4) for value in head_logits],
    }
    path.write_text(json.dumps(reference) + "\n")


def main() -> None:
    """Write the GGUF of a checkpoint and, if asked, the reference rows of that GGUF."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("work", type=Path, help="folder of the training run")
    parser.add_argument("gguf", type=Path, help="GGUF file to write")
    parser.add_argument("--reference", type=Path, help="JSON file of reference logits to write")
    args = parser.parse_args()
    checkpoint = torch.load(args.work / "checkpoint.pt", weights_only=True)
    model = Model()
    model.load_state_dict(checkpoint["model"])
    write_gguf(model, args.work / "tokenizer.json", args.gguf)
    print(f"step {checkpoint['step']}: {args.gguf}, {args.gguf.stat().st_size} bytes")
    print("sha256", hashlib.sha256(args.gguf.read_bytes()).hexdigest())
    if args.reference:
        write_reference(args.gguf, args.work / "tokenizer.json", args.reference)


if __name__ == "__main__":
    main()
