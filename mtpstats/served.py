"""The policies of a validation through ``llama-server``, by its own timings."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mtpstats.errors import Interrupted
from mtpstats.loop import WARM_UP_TOKENS, Progress
from mtpstats.price import flags_of, kind_of
from mtpstats.run import BenchSettings
from mtpstats.server import Completion, Server
from mtpstats.trace import Trace
from mtpstats.validate import Taken, Validation, prompt_of, turned

__all__ = ["run_server", "server_flags"]


def run_server(
    trace: Trace,
    validation: Validation,
    settings: BenchSettings,
    program: Path,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    start: Callable[[Path, Sequence[str]], Server] = Server,
) -> Validation:
    """Return the validation with what ``llama-server`` says of its policies.

    Each repeat starts a server for each policy, in turns, with the flags that a plan prints. A
    sampled text is another one here: llama.cpp's draws are not those of the trace.

    Raises ``MtpStatsError`` when a server does not start or does not answer.
    """
    # llama.cpp runs chains only.
    run = [one for one in validation.policies if kind_of(one.policy) in ("none", "chain")]
    policies = [checked.policy for checked in run]
    taken = [Taken() for _ in policies]
    n_ctx = max(prompt.n_ctx for prompt in trace.prompts)
    sampling = settings.sampling
    asked = {
        "temperature": sampling.temp, "top_k": sampling.top_k, "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed if sampling.seed >= 0 else secrets.randbelow(2**32),
    }  # fmt: skip
    tell = on_progress or (lambda _progress: None)
    runs = [(r, i) for r in range(validation.repeats) for i in turned(len(policies), r)]
    for one in taken:
        for _ in range(validation.repeats):
            one.begin()
    try:
        for number, (repeat, which) in enumerate(runs):
            flags = [*server_flags(settings, n_ctx), *flags_of(policies[which])]
            tell(Progress("llama-server", number, len(runs), "runs"))
            with start(program, flags) as server:
                first = prompt_of(trace.prompts[0])[:WARM_UP_TOKENS]
                server.complete(first, WARM_UP_TOKENS, **asked)
                for prompt in trace.prompts:
                    got = server.complete(prompt_of(prompt), trace.n_predict, **asked)
                    _keep_server(taken[which], repeat, got)
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None
    served = {
        id(one): replace(
            one,
            server=found.speed(),
            server_drafted=sum(found.drafted[0]),
            server_accepted=sum(found.accepted[0]),
        )
        for one, found in zip(run, taken, strict=True)
    }
    checked = tuple(served.get(id(one), one) for one in validation.policies)
    return replace(validation, policies=checked)


def _keep_server(taken: Taken, repeat: int, got: Completion) -> None:
    taken.tokens[repeat].append(got.tokens)
    taken.seconds[repeat].append(got.seconds)
    taken.drafted[repeat].append(got.drafted)
    taken.accepted[repeat].append(got.accepted)


def server_flags(settings: BenchSettings, n_ctx: int) -> list[str]:
    """Return model, context and placement as flags of llama-server, without those of drafting."""
    flags = ["-m", str(settings.model), "-c", str(n_ctx), "-np", "1"]
    flags += ["-b", str(settings.n_batch), "-ub", str(settings.n_ubatch)]
    for name, threads in (("-t", settings.n_threads), ("-tb", settings.n_threads_batch)):
        flags += [name, str(threads)] if threads else []
    if settings.n_gpu_layers >= 0:
        flags += ["-ngl", str(settings.n_gpu_layers)]
    if settings.draft_model is not None:
        flags += ["-md", str(settings.draft_model)]
    placement = settings.placement
    for name, value in (
        ("-dev", None if placement.devices is None else ",".join(placement.devices) or "none"),
        ("-sm", placement.split_mode),
        ("-ts", ",".join(f"{share:g}" for share in placement.tensor_split)),
        ("-mg", placement.main_gpu),
        ("-ot", ",".join("=".join(pair) for pair in placement.override_tensor)),
        ("--rpc", ",".join(settings.rpc)),
    ):
        flags += [name, str(value)] if value not in (None, "") else []
    return [*flags, "-fa", settings.flash_attn, "-ctk", settings.type_k, "-ctv", settings.type_v]
