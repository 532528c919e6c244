"""Every option of the command line, defined once.

Options of one subject are the fields of a small dataclass; a command asks for the dataclasses it
needs with :func:`takes` and receives them filled in. Names, meanings and defaults are llama.cpp's
where llama.cpp has the option; where a default differs, the help says why.
"""

# ruff: noqa: RUF009  (_option only wraps dataclasses.field)

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import click

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
BUILT_IN_TEMP = 0.7

Function = TypeVar("Function", bound=Callable[..., Any])


class GroupedOption(click.Option):
    """A click option that knows under which heading the help lists it."""

    def __init__(self, *args: Any, heading: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


class Command(click.Command):
    """A command whose help lists options by heading and keeps the epilog's line breaks."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section per heading, in the order of declaration; ``--help`` comes last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and not isinstance(param, click.Argument):
                heading = getattr(param, "heading", "Other")
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=26)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples as they stand."""
        if self.epilog:
            formatter.write("\n")
            for line in self.epilog.strip("\n").splitlines():
                formatter.write(line + "\n")


def _whole(low: int, high: int = 2**31 - 1) -> Callable[[str | int], int]:
    """Return what reads an integer between the bounds."""

    def read(value: str | int) -> int:
        try:
            number = int(value)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a whole number.") from None
        if not low <= number <= high:
            raise click.BadParameter(f"{number} is not in the range {low} to {high}.")
        return number

    return read


def _real(low: float, high: float = math.inf) -> Callable[[str | float], float]:
    """Return what reads a number between the bounds; nan, which passes comparisons, is refused."""

    def read(value: str | float) -> float:
        try:
            number = float(value)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a number.") from None
        if not math.isfinite(number) or not low <= number <= high:
            bounds = f"{low:g} or more" if high == math.inf else f"{low:g} to {high:g}"
            raise click.BadParameter(f"{value} is not in the range {bounds}.")
        return number

    return read


def _gpu_layers(value: str | int) -> int:
    """Read ``-ngl``: a count, or ``auto`` or ``all``, which are -1: libllama's word for all."""
    if value in ("auto", "all", -1):
        return -1
    try:
        layers = int(value)
    except ValueError:
        layers = -1
    if not 0 <= layers < 2**31:
        raise click.BadParameter(f"{value!r} is neither a number of layers nor auto nor all.")
    return layers


def _option(*names: str, **settings: Any) -> Any:
    """Declare a dataclass field that is filled from the command line."""
    return field(metadata={"names": names, "settings": settings})


class _File(click.Path):
    """A path. An empty one, of a variable that was not set, would be the current directory."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "":
            self.fail("the file name is empty.", param, ctx)
        return super().convert(value, param, ctx)


def _file(**kinds: bool) -> click.Path:
    return _File(path_type=Path, **kinds)


def file_argument(name: str, **settings: Any) -> Callable[[Function], Function]:
    """Give a command a file name, or several with ``nargs=-1``, as its argument."""
    return click.argument(name, type=_file(), **settings)


def takes(**groups: type) -> Callable[[Function], Callable[..., Any]]:
    """Give a command the options of ``groups``; it receives one filled dataclass per keyword.

    ``@takes(model=ModelOptions)`` over ``def info(model: ModelOptions)`` adds every option of
    ``ModelOptions``, in the order of its fields, under the heading ``ModelOptions.HEADING``.
    """

    def decorate(function: Function) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(**values: Any) -> Any:
            filled = {
                name: group(**{f.name: values.pop(f.name) for f in fields(group)})
                for name, group in groups.items()
            }
            return function(**filled, **values)

        decorated: Callable[..., Any] = call
        for group in reversed(groups.values()):
            for item in reversed(fields(group)):
                add = click.option(
                    *item.metadata["names"],
                    item.name,
                    cls=GroupedOption,
                    heading=group.HEADING,  # type: ignore[attr-defined]
                    **item.metadata["settings"],
                )
                decorated = add(decorated)
        return decorated

    return decorate


@dataclass(frozen=True)
class ModelFile:
    """Which model."""

    HEADING = "Model"

    model: Path | None = _option(
        "-m",
        "--model",
        type=_file(),
        metavar="FILE",
        help="GGUF file with an MTP (NextN) head.  [default: the small built-in model]",
    )


@dataclass(frozen=True)
class ModelOptions(ModelFile):
    """Which model, and how it runs."""

    n_gpu_layers: int = _option(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        type=_gpu_layers,
        default="auto",
        show_default=True,
        metavar="N",
        help="Layers to keep in device memory: a number, auto or all. auto is all here: nothing "
        "is fitted to the free memory.",
    )
    n_ctx: int | None = _option(
        "-c",
        "--ctx-size",
        type=_whole(0),
        default=None,
        metavar="N",
        help="Context size in tokens; 0: the model's own.  [default: what the longest prompt and "
        "-n need, so that models with huge contexts fit into memory]",
    )
    n_batch: int = _option(
        "-b",
        "--batch-size",
        type=_whole(1),
        default=2048,
        show_default=True,
        metavar="N",
        help="Most tokens in one decode call.",
    )
    n_ubatch: int = _option(
        "-ub",
        "--ubatch-size",
        type=_whole(1),
        default=512,
        show_default=True,
        metavar="N",
        help="Most tokens computed at once.",
    )
    n_threads: int = _option(
        "-t",
        "--threads",
        type=_whole(-1, 512),
        default=-1,
        metavar="N",
        help="CPU threads while generating; -1: one per core.  [default: -1]",
    )
    n_threads_batch: int = _option(
        "-tb",
        "--threads-batch",
        type=_whole(-1, 512),
        default=-1,
        metavar="N",
        help="CPU threads while reading prompts.  [default: as --threads]",
    )
    flash_attn: str = _option(
        "-fa",
        "--flash-attn",
        type=click.Choice(["on", "off", "auto"]),
        default="auto",
        show_default=True,
        help="Flash attention.",
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
class PromptOptions:
    """What is continued; all sources add up, ``prompt`` first, then ``file``, then ``prompts``."""

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
        type=_file(),
        multiple=True,
        metavar="FILE",
        help="A file that is one prompt as a whole. Repeatable.",
    )
    prompts: tuple[Path, ...] = _option(
        "--prompts",
        type=_file(),
        multiple=True,
        metavar="FILE",
        help="A file of many prompts: .txt one per line; .jsonl one string or object with "
        '"prompt" (and "id", "category" if you like) per line; .json a list of such. Repeatable.',
    )
    escape: bool = _option(
        "-e",
        "--escape/--no-escape",
        default=True,
        help=r"Turn \n \r \t \' \" \\ \xHH in -p and -f texts into what they stand for, as "
        "llama.cpp does.  [default: --escape]",
    )


@dataclass(frozen=True)
class DraftOptions:
    """How far the head drafts."""

    HEADING = "Drafting"

    n_max: int = _option(
        "--spec-draft-n-max",
        type=_whole(1, 1024),
        default=8,
        show_default=True,
        metavar="N",
        help="Tokens to draft per verification. llama.cpp's default is 3; statistics want depth, "
        "so here it is 8. Speed is best judged at the depth you run.",
    )
    n_min: int = _option(
        "--spec-draft-n-min",
        type=_whole(0, 1024),
        default=0,
        show_default=True,
        metavar="N",
        help="Throw shorter drafts away.",
    )
    p_min: float = _option(
        "--spec-draft-p-min",
        "--draft-p-min",
        type=_real(0, 1),
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
        type=_real(0),
        default=None,
        metavar="T",
        help="Temperature of the target; 0 is greedy.  [default: 0, so that runs compare; for the "
        f"built-in model {BUILT_IN_TEMP}, because models that small loop when greedy]",
    )
    top_k: int = _option(
        "--top-k",
        type=_whole(0),
        default=40,
        show_default=True,
        metavar="N",
        help="Draw from the N best; 0: off.",
    )
    top_p: float = _option(
        "--top-p",
        type=_real(0, 1),
        default=0.95,
        show_default=True,
        metavar="P",
        help="Draw from the smallest set with this probability; 1: off.",
    )
    min_p: float = _option(
        "--min-p",
        type=_real(0, 1),
        default=0.05,
        show_default=True,
        metavar="P",
        help="Drop tokens below this share of the best one's probability; 0: off.",
    )
    seed: int = _option(
        "-s",
        "--seed",
        type=_whole(-1, 2**32 - 1),
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
        type=_whole(-1, 2**31 - 1),
        default=128,
        show_default=True,
        metavar="N",
        help="Tokens to generate per prompt; -1: until the model ends or the context is full. "
        "llama.cpp's default is -1; here 128, so that prompts weigh alike.",
    )
    baseline: bool = _option(
        "--baseline",
        is_flag=True,
        help="Also run every prompt without drafting: the measured speed-up.",
    )
    no_stats: bool = _option(
        "--no-stats",
        is_flag=True,
        help="Collect no statistics; time only.",
    )
    stats_every: int = _option(
        "--stats-every",
        type=_whole(0),
        default=0,
        metavar="N",
        help="Print the statistics so far on standard error every N verifications; 0: never.  "
        "[default: 0]",
    )
    stream: bool = _option(
        "--stream",
        is_flag=True,
        help="Print prompts and text on standard error as they are made.",
    )


@dataclass(frozen=True)
class ReplayOptions:
    """What is replayed from a trace."""

    HEADING = "Replay"

    policy: tuple[str, ...] = _option(
        "--policy",
        multiple=True,
        metavar="SPEC",
        help="chain:n_max=4,p_min=0.6 (and n_min); gated:n_max=4,p1_max=0.7,p2_min=0.2 (and "
        "p_min, n_min, p3_min); adaptive:n_max=8 (and low, start, up, down, p_min); "
        "tree:[[0],[1],[0,0]] or tree:FILE.json. Repeatable.  [default: llama.cpp's own, "
        "chain:n_max=3, and the longest chain recorded]",
    )
    starts: str = _option(
        "--starts",
        type=click.Choice(["policy", "uniform"]),
        default="policy",
        show_default=True,
        help="policy: the roots at which the policy starts, as in a run; uniform: every root once.",
    )
    n_predict: int | None = _option(
        "-n",
        "--predict",
        "--n-predict",
        type=_whole(0),
        default=None,
        metavar="N",
        help="Tokens to generate per prompt.  [default: as many as were recorded]",
    )
    n_ctx: int | None = _option(
        "-c",
        "--ctx-size",
        type=_whole(1),
        default=None,
        metavar="N",
        help="Context of the run, in tokens.  [default: large enough]",
    )
    trees: tuple[int, ...] = _option(
        "--trees",
        type=_whole(1, 256),
        multiple=True,
        metavar="N",
        help="Also find, score and draw the best tree of N nodes. Repeatable.",
    )


@dataclass(frozen=True)
class OutputOptions:
    """Where results go."""

    HEADING = "Output"

    output: Path | None = _option(
        "-o",
        "--output",
        type=_file(),
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
