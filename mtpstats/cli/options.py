"""Every option of the command line, defined once.

Options of one subject are the fields of a small dataclass; a command asks for the dataclasses it
needs with :func:`takes` and receives them filled in. Names, meanings and defaults are llama.cpp's
where llama.cpp has the option; where a default differs, the help says why.
"""

# ruff: noqa: RUF009  (_option only wraps dataclasses.field)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from mtpstats.cli import values
from mtpstats.cli.groups import Command as Command
from mtpstats.cli.groups import file_argument as file_argument
from mtpstats.cli.groups import option as _option
from mtpstats.cli.groups import takes as takes

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
BUILT_IN_TEMP = 0.7
SPLIT_MODES = ("none", "layer", "row", "tensor")


@dataclass(frozen=True)
class ModelFile:
    """Which model."""

    HEADING = "Model"

    model: Path | None = _option(
        "-m",
        "--model",
        type=values.file(),
        metavar="FILE",
        help="GGUF file with an MTP (NextN) head.  [default: the small built-in model]",
    )
    draft_model: Path | None = _option(
        "-md",
        "--spec-draft-model",
        "--model-draft",
        type=values.file(),
        metavar="FILE",
        help="GGUF file with the head alone: an assistant, or the MTP blocks of a model whose "
        "file has none.  [default: the model's own head]",
    )


@dataclass(frozen=True)
class ModelOptions(ModelFile):
    """Which model, and how it runs."""

    n_gpu_layers: int = _option(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        type=values.gpu_layers,
        default="auto",
        show_default=True,
        metavar="N",
        help="Layers to keep in device memory: a number, auto (or -1) or all. auto is all here: "
        "nothing is fitted to the free memory.",
    )
    n_ctx: int | None = _option(
        "-c",
        "--ctx-size",
        type=values.whole(0),
        default=None,
        metavar="N",
        help="Context size in tokens of one sequence (with -np, each has as many); 0: the "
        "model's own.  [default: what the longest prompt and -n need, so that models with huge "
        "contexts fit into memory]",
    )
    n_batch: int = _option(
        "-b",
        "--batch-size",
        type=values.whole(1),
        default=2048,
        show_default=True,
        metavar="N",
        help="Most tokens in one decode call.",
    )
    n_ubatch: int = _option(
        "-ub",
        "--ubatch-size",
        type=values.whole(1),
        default=512,
        show_default=True,
        metavar="N",
        help="Most tokens computed at once.",
    )
    n_threads: int = _option(
        "-t",
        "--threads",
        type=values.whole(-1, 512),
        default=-1,
        metavar="N",
        help="CPU threads while generating; -1: one per core.  [default: -1]",
    )
    n_threads_batch: int = _option(
        "-tb",
        "--threads-batch",
        type=values.whole(-1, 512),
        default=-1,
        metavar="N",
        help="CPU threads while reading prompts.  [default: as --threads]",
    )
    flash_attn: str = _option(
        "-fa",
        "--flash-attn",
        type=values.flash_attn,
        default="auto",
        show_default=True,
        metavar="MODE",
        help="Flash attention: on, off or auto (or as llama.cpp takes them: true, 1, false, 0).",
    )
    type_k: str = _option(
        "-ctk",
        "--cache-type-k",
        type=click.Choice(CACHE_TYPES),
        default="f16",
        metavar="TYPE",
        help=f"KV cache type of K: {', '.join(CACHE_TYPES)}.  [default: f16]",
    )
    type_v: str = _option(
        "-ctv",
        "--cache-type-v",
        type=click.Choice(CACHE_TYPES),
        default="f16",
        metavar="TYPE",
        help="KV cache type of V, likewise.  [default: f16]",
    )


@dataclass(frozen=True)
class DeviceOptions:
    """Which devices, and what goes where."""

    HEADING = "Devices (mtpstats info lists them)"

    devices: tuple[str, ...] | None = _option(
        "-dev",
        "--device",
        type=values.names,
        default=None,
        metavar="DEV,...",
        help="Devices to offload to, in this order; none: offload nothing.  [default: all]",
    )
    split_mode: str | None = _option(
        "-sm",
        "--split-mode",
        type=click.Choice(SPLIT_MODES),
        default=None,
        help="How devices share the model: whole on one (none), by layer, rows of each tensor, "
        "or tensors with their KV.  [default: layer]",
    )
    tensor_split: tuple[float, ...] | None = _option(
        "-ts",
        "--tensor-split",
        type=values.shares,
        default=None,
        metavar="N0,N1,...",
        help="Share of each device, in proportions such as 3,1.  [default: by free memory]",
    )
    main_gpu: int | None = _option(
        "-mg",
        "--main-gpu",
        type=values.whole(0),
        default=None,
        metavar="INDEX",
        help="The device of --split-mode none, or of intermediate results with row.  [default: 0]",
    )
    override_tensor: tuple[tuple[tuple[str, str], ...], ...] = _option(
        "-ot",
        "--override-tensor",
        type=values.override,
        multiple=True,
        metavar="PATTERN=TYPE,...",
        help="Put tensors whose name matches the regular expression into a buffer of this type, "
        "such as exps=CPU. Repeatable.",
    )
    rpc: tuple[tuple[str, ...], ...] = _option(
        "--rpc",
        type=values.servers,
        multiple=True,
        metavar="HOST:PORT,...",
        help="Use the devices of these rpc-server processes, too (builds made with --rpc). "
        "Repeatable.",
    )


@dataclass(frozen=True)
class PromptOptions:
    """What is continued; all sources add up: ``prompt``, ``file``, ``prompts``, ``suite``."""

    HEADING = "Prompts (all of them are used; none given: the built-in ones)"

    prompt: tuple[str, ...] = _option(
        "-p",
        "--prompt",
        multiple=True,
        metavar="TEXT",
        help="A prompt. Repeatable.",
    )
    file: tuple[Path, ...] = _option(
        "-f",
        "--file",
        type=values.file(),
        multiple=True,
        metavar="FILE",
        help="A file that is one prompt as a whole, a directory of such files, or - for standard "
        "input. Repeatable.",
    )
    prompts: tuple[Path, ...] = _option(
        "--prompts",
        type=values.file(),
        multiple=True,
        metavar="FILE",
        help="A file of many prompts, a directory of such files, or - for standard input: .txt one "
        'per line; .jsonl and .json with OpenAI "messages" (and "tools"), ShareGPT '
        '"conversations", or "prompt"; .csv and .tsv with a column "prompt". "id" and "category" '
        "are kept. Repeatable.",
    )
    suite: bool = _option(
        "--suite",
        is_flag=True,
        help="The built-in conversations for real models: 45 in 9 categories, from code to prose.",
    )
    prompt_field: str | None = _option(
        "--prompt-field",
        metavar="NAME",
        help='JSON key or CSV column of the prompt.  [default: "messages", "conversations" or '
        '"prompt", whichever comes first]',
    )
    category_field: str | None = _option(
        "--category-field",
        metavar="NAME",
        help='JSON key or CSV column of the category.  [default: "category"; of several files, '
        "else the file's name]",
    )
    escape: bool = _option(
        "-e",
        "--escape/--no-escape",
        default=True,
        help=r"Turn \n \r \t \' \" \\ \xHH in -p and -f texts into what they stand for, as "
        "llama.cpp does.  [default: --escape]",
    )


@dataclass(frozen=True)
class SelectionOptions:
    """Which prompts run, and what makes text of conversations."""

    HEADING = "Chat template and selection"

    chat: bool | None = _option(
        "--chat/--no-chat",
        default=None,
        help="--chat: every text prompt is a user's message; --no-chat: no template, conversations "
        "are their texts.  [default: conversations go through the model's chat template, texts "
        "stay as they are]",
    )
    chat_template: Path | None = _option(
        "--chat-template",
        "--chat-template-file",
        type=values.file(),
        metavar="FILE",
        help="A Jinja file to use as template.  [default: the one that the model carries]",
    )
    chat_template_kwargs: dict[str, Any] = _option(
        "--chat-template-kwargs",
        type=values.json_object,
        default="{}",
        metavar="JSON",
        help="Variables for the template, for instance '{\"enable_thinking\": false}'.  "
        "[default: {}]",
    )
    shuffle: bool = _option(
        "--shuffle", is_flag=True, help="Take the prompts in an order that --seed decides."
    )
    limit: int | None = _option(
        "--limit",
        type=values.whole(1),
        metavar="N",
        help="Run at most N prompts, the first ones.  [default: all]",
    )
    min_tokens: int = _option(
        "--min-tokens",
        type=values.whole(0),
        default=0,
        metavar="N",
        help="Leave out prompts with fewer tokens.  [default: 0]",
    )
    max_tokens: int | None = _option(
        "--max-tokens",
        type=values.whole(1),
        metavar="N",
        help="Leave out prompts with more tokens.  [default: as many as the context holds]",
    )


@dataclass(frozen=True)
class DraftOptions:
    """How far the head drafts."""

    HEADING = "Drafting"

    n_max: int = _option(
        "--spec-draft-n-max",
        type=values.whole(1, 1024),
        default=8,
        show_default=True,
        metavar="N",
        help="Tokens to draft per verification. llama.cpp's default is 3; statistics want depth, "
        "so here it is 8. Speed is best judged at the depth you run.",
    )
    n_min: int = _option(
        "--spec-draft-n-min",
        type=values.whole(0, 1024),
        default=0,
        show_default=True,
        metavar="N",
        help="Throw shorter drafts away.",
    )
    p_min: float = _option(
        "--spec-draft-p-min",
        "--draft-p-min",
        type=values.real(0, 1),
        default=0.0,
        show_default=True,
        metavar="P",
        help="Stop drafting where the head's probability (softmax over its 10 best) is lower.",
    )


@dataclass(frozen=True)
class SamplingOptions:
    """How the target chooses."""

    HEADING = "Sampling"

    temp: float | None = _option(
        "--temp",
        "--temperature",
        type=values.real(0),
        default=None,
        metavar="T",
        help="Temperature of the target; 0 is greedy.  [default: 0, so that runs compare; for the "
        f"built-in model {BUILT_IN_TEMP}, because models that small loop when greedy]",
    )
    top_k: int = _option(
        "--top-k",
        type=values.top_k,
        default=40,
        show_default=True,
        metavar="N",
        help="Draw from the N best; 0 or less: off.",
    )
    top_p: float = _option(
        "--top-p",
        type=values.real(0, 1),
        default=0.95,
        show_default=True,
        metavar="P",
        help="Draw from the smallest set with this probability; 1: off.",
    )
    min_p: float = _option(
        "--min-p",
        type=values.real(0, 1),
        default=0.05,
        show_default=True,
        metavar="P",
        help="Drop tokens below this share of the best one's probability; 0: off.",
    )
    seed: int = _option(
        "-s",
        "--seed",
        type=values.whole(-1, 2**32 - 1),
        default=0,
        show_default=True,
        metavar="N",
        help="Seed of the draws; -1: a random one, which the result names. llama.cpp's default is "
        "-1; here 0, so that a run repeats.",
    )


@dataclass(frozen=True)
class RunOptions:
    """What is run and measured."""

    HEADING = "Run"

    n_predict: int = _option(
        "-n",
        "--predict",
        "--n-predict",
        type=values.whole(-1, 2**31 - 1),
        default=128,
        show_default=True,
        metavar="N",
        help="Tokens to generate per prompt; -1: until the model ends or the context is full. "
        "llama.cpp's default is -1; here 128, so that prompts weigh alike.",
    )
    n_parallel: int = _option(
        "-np",
        "--parallel",
        type=values.whole(1, 256),
        default=1,
        show_default=True,
        metavar="N",
        help="Prompts to decode together. tokens/s is that of all of them.",
    )
    baseline: bool = _option(
        "--baseline",
        is_flag=True,
        help="Also run every prompt without drafting, in turns with the other run: the measured "
        "speed-up.",
    )
    no_stats: bool = _option(
        "--no-stats",
        is_flag=True,
        help="Collect no statistics; time only.",
    )
    compat_counts: bool = _option(
        "--compat-counts",
        is_flag=True,
        help="For targets that cannot take tokens back, count drafts as llama.cpp prints them: "
        "only the second verification, of the accepted part.",
    )
    stats_every: int = _option(
        "--stats-every",
        type=values.whole(0),
        default=0,
        metavar="N",
        help="Print the statistics so far on standard error every N verifications; 0: never.  "
        "[default: 0]",
    )
    stream: bool = _option(
        "--stream",
        is_flag=True,
        help="Print prompts and text on standard error as they are made; with -np one after "
        "the other, the first of them live.",
    )


@dataclass(frozen=True)
class OutputOptions:
    """Where results go."""

    HEADING = "Output"

    output: Path | None = _option(
        "-o",
        "--output",
        type=values.file(written=True),
        metavar="FILE",
        help="Write the result here as JSON, whole or not at all.",
    )
    json: bool = _option(
        "--json",
        is_flag=True,
        help="Print the result as JSON instead of the table.",
    )


@dataclass(frozen=True)
class JsonOption:
    """JSON for commands that write no file."""

    HEADING = "Output"

    json: bool = _option("--json", is_flag=True, help="Print JSON instead of text.")


@dataclass(frozen=True)
class LogOption:
    """What libllama says."""

    HEADING = "Output"

    verbose: bool = _option(
        "-v", "--verbose", is_flag=True, help="Show llama.cpp's log on standard error."
    )
