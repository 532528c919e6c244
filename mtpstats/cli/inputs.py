"""Options into prompts and settings, for every command that runs a model."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from mtpstats.cli import options
from mtpstats.errors import InputError

if TYPE_CHECKING:
    from mtpstats.prepare import Selection
    from mtpstats.prompts import Prompt
    from mtpstats.run import BenchSettings


def with_seed(sampling: options.SamplingOptions) -> options.SamplingOptions:
    """Draw the seed if it is to be random, for the order of the prompts hangs on it, too."""
    if sampling.seed >= 0:
        return sampling
    import secrets

    return replace(sampling, seed=secrets.randbelow(2**32))


def check_shard(shard: tuple[int, int] | None, sampling: options.SamplingOptions) -> None:
    """Refuse shards that would not be of one run."""
    if shard is not None and sampling.seed < 0:
        raise InputError(
            "--shard needs one --seed for all shards: a random one (-1) is another in each"
        )


def gather(texts: options.PromptOptions, shuffle_seed: int | None = None) -> list[Prompt]:
    """Return the prompts of all sources, the built-in ones if there are none."""
    from mtpstats import prompts

    found = prompts.gather(
        prompts.Sources(
            texts.prompt,
            texts.file,
            texts.prompts,
            texts.suite,
            texts.escape,
            prompts.Fields(texts.prompt_field, texts.category_field),
        )
    )
    return found if shuffle_seed is None else prompts.shuffled(found, shuffle_seed)


def selection(choice: options.SelectionOptions, shard: tuple[int, int] | None = None) -> Selection:
    """Return which of the prompts run; raises InputError for choices that contradict."""
    from mtpstats import prepare

    chosen = prepare.Selection(
        chat=choice.chat,
        template_kwargs=choice.chat_template_kwargs,
        min_tokens=choice.min_tokens,
        max_tokens=choice.max_tokens,
        limit=choice.limit,
        shuffled=choice.shuffle,
        shard=None if shard is None else prepare.Shard(*shard),
    )
    if choice.max_tokens is not None and choice.max_tokens < choice.min_tokens:
        raise InputError("--max-tokens is less than --min-tokens: no prompt can have both")
    if choice.chat_template is None:
        return chosen
    if choice.chat is False:
        raise InputError("--no-chat uses no chat template: leave out --chat-template")
    source, name = prepare.read_template(choice.chat_template)
    return replace(chosen, template=source, template_name=name)


def settings(
    model: options.ModelOptions,
    devices: options.DeviceOptions,
    sampling: options.SamplingOptions,
    selection: Selection,
    n_predict: int,
) -> BenchSettings:
    """Return the settings of a run, drafting and statistics aside."""
    from mtpstats.llama import Placement
    from mtpstats.run import BenchSettings, builtin_model
    from mtpstats.speculate import Sampling

    built_in = builtin_model()
    path = model.model or built_in
    temp, temp_source = sampling.temp, "asked"
    if temp is None:
        is_built_in = _same_file(path, built_in)
        temp = options.BUILT_IN_TEMP if is_built_in else 0.0
        temp_source = "built-in model" if is_built_in else "default"
    return BenchSettings(
        model=path,
        draft_model=model.draft_model,
        n_predict=n_predict,
        sampling=Sampling(temp, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed),
        n_ctx=model.n_ctx,
        n_batch=model.n_batch,
        n_ubatch=model.n_ubatch,
        n_threads=model.n_threads if model.n_threads > 0 else None,
        n_threads_batch=model.n_threads_batch if model.n_threads_batch > 0 else None,
        n_gpu_layers=model.n_gpu_layers,
        placement=Placement(
            devices=devices.devices,
            split_mode=devices.split_mode,
            tensor_split=devices.tensor_split or (),
            main_gpu=devices.main_gpu,
            override_tensor=tuple(chain(*devices.override_tensor)),
        ),
        rpc=tuple(chain(*devices.rpc)),
        flash_attn=model.flash_attn,
        type_k=model.type_k,
        type_v=model.type_v,
        temp_source=temp_source,
        selection=selection,
    )


def _same_file(path: Path, other: Path) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return path == other
