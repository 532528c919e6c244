"""A result file from what a ``llama-server`` wrote. What the source does not hold is null.

A server counts by request; a request becomes a prompt of the result, without its text.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import mtpstats
from mtpstats import reading, serverlog
from mtpstats import result as results
from mtpstats.errors import InputError
from mtpstats.serverlog import RATES, TOTALS, TRACE, Log, Metrics, Request
from mtpstats.stats import MAX_POSITIONS, Snapshot
from mtpstats.text import printable

_KNOWN: Final = {
    TOTALS: {"verifications"},
    RATES: {"verifications", "reached", "accepted", "beyond_accepted"},
    TRACE: {
        *("verifications", "drafted", "reached", "accepted"),
        *("beyond_drafted", "beyond_reached", "beyond_accepted"),
    },
}
MAX_BYTES: Final = 4 << 30  # of a log
_PAGE: Final = 1 << 20  # more than any page of metrics
_SETTINGS: Final = (
    *("n_prompts", "n_predict", "n_max", "n_max_asked", "n_min", "p_min", "temp", "temp_source"),
    *("top_k", "top_p", "min_p", "seed", "n_ctx", "n_threads"),
)
_CONDITIONAL: Final = (
    "the server gives the acceptance of a position over all verifications; of those reached is "
    "made from it, as if every draft were of full length: where drafts were shorter (p_min, the "
    "end of a text), later positions are better than shown"
)
_NO_POSITIONS: Final = (
    "no figures by position: llama-server logs them with -lv 4, and every verification with "
    "LLAMA_TRACE=1 in its environment"
)


def from_files(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the result of a log, of a page of metrics, or of what lies between two pages.

    Raises InputError for files that are neither, or that cannot be read.
    """
    if len(paths) > 2:
        raise InputError("a log, a page of metrics, or two pages: more than two files are none")
    names = [path.name for path in paths]
    pages = []
    for path in paths:
        pieces = reading.chunks(path, MAX_BYTES)
        head = _page(pieces)
        reading.refuse_binary(head, reading.shown(path))
        text = head.decode("utf-8", "replace")
        if serverlog.is_metrics(text):
            pages.append(serverlog.read_metrics(text, reading.shown(path)))
        elif len(paths) == 1:
            return from_log(_lines(chain([head], pieces)), names[0])
    if len(pages) < len(paths):
        raise InputError("two files must be two pages of metrics; import logs one by one and merge")
    return from_metrics(pages, names)


def _page(pieces: Iterable[bytes]) -> bytes:
    """Return the first pieces, as many as a page of metrics can have."""
    head = bytearray()
    for piece in pieces:
        head += piece
        if len(head) >= _PAGE:
            break
    return bytes(head)


def _lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines; huge ones come in pieces."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), True)
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + decoder.decode(piece)).split("\n")
        yield from lines
        if len(rest) > serverlog.LONGEST_LINE:
            yield rest
            rest = ""
    yield rest


def from_log(lines: Iterable[str], name: str) -> dict[str, Any]:
    """Return the result of a log's lines; ``name`` is what it is called."""
    log = serverlog.read_log(lines)
    if not log.requests:
        raise InputError(
            f"{printable(name)}: no finished request of a llama-server is in it, nor is it a page "
            f"of its metrics{_cut(log)}"
        )
    if len(log.models) > 1:
        models = ", ".join(map(printable, log.models))
        raise InputError(f"{printable(name)}: model.file differs: the log is of {models}")
    unsure = 0
    prompts = []
    for number, request in enumerate(log.requests, 1):
        n, exact = serverlog.verifications(request)
        positions, also = _positions(request, n, log.level)
        unsure += not (exact and also)
        prompts.append(
            _prompt(f"{name}:{number}", request, n, positions),
        )
    notes = [{TOTALS: _NO_POSITIONS, RATES: _CONDITIONAL, TRACE: ""}[log.level]]
    if unsure:
        notes.append(
            f"the log rounds: of {unsure:,} of {len(prompts):,} requests verifications or counts "
            "by position are not known exactly, only to about half a percent"
        )
    if log.left_out:
        notes.append(f"left out: {log.left_out:,} requests{_cut(log)}")
    other = [printable(kind) for kind in log.kinds if kind != "draft-mtp"]
    if other:
        notes.append(f"not only an MTP head drafted: {', '.join(other)}")
    return _result("llama-server log", [name], notes, prompts, log)


def _cut(log: Log) -> str:
    return f" ({log.left_out:,} without an end, or with lines missing)" if log.left_out else ""


def _positions(request: Request, n: int | None, level: int) -> tuple[dict[str, Any], bool]:
    """Return the counters of a request, and whether they are exact."""
    counters, exact = Snapshot(), True
    known = set(_KNOWN[level])
    if n is None:
        known -= {"verifications", "reached", "accepted", "beyond_accepted"}
    counters.verifications = n or 0
    if level == TRACE:
        for sent, taken in request.verified:
            counters.drafted[:sent] += 1
            counters.reached[: min(sent, taken + 1)] += 1
            counters.accepted[:taken] += 1
            counters.beyond_drafted += max(0, sent - MAX_POSITIONS)
            counters.beyond_reached += max(0, min(sent, taken + 1) - MAX_POSITIONS)
            counters.beyond_accepted += max(0, taken - MAX_POSITIONS)
    elif level == RATES and n:
        accepted, exact = serverlog.accepted_by_position(request, n)
        _fill(counters, accepted)
    return counters.to_dict({name for name in counters.to_dict() if name not in known}), exact


def _fill(counters: Snapshot, accepted: Sequence[int]) -> None:
    """Enter what was accepted at each position, and as reached what was accepted before it."""
    for i, (before, here) in enumerate(
        zip((counters.verifications, *accepted), accepted, strict=False)
    ):
        if i < MAX_POSITIONS:
            counters.reached[i], counters.accepted[i] = before, here
        else:
            counters.beyond_accepted += here


def _prompt(name: str, request: Request, n: int | None, positions: Any) -> dict[str, Any]:
    return {
        "id": name,
        "category": None,
        "prompt_sha256": None,
        "n_prompt": request.n_prompt,
        "tokens": request.tokens,
        "text": None,
        "verifications": n,
        "drafted": request.drafted,
        "accepted": request.accepted,
        "near_ties": None,
        "repeated_4grams": None,
        "stop": None,
        "seconds": {
            "prompt": request.prompt_seconds,
            **dict.fromkeys(("target", "head", "other")),
            "generation": request.seconds,
        },
        "positions": positions,
        "baseline": None,
    }


def from_metrics(pages: Sequence[Metrics], names: Sequence[str]) -> dict[str, Any]:
    """Return the result of a page of metrics, or of what happened between two."""
    where = " and ".join(map(printable, names))
    page = pages[0] if len(pages) == 1 else serverlog.between(pages[0], pages[1], where)
    count = {name: round(value) for name, value in page.counters.items()}
    n, accepted = count["spec_decode_num_drafts_total"], list(page.accepted)
    steps = [max(n, *accepted[:1]), *accepted] if accepted else [n]
    drafted = count["spec_decode_num_draft_tokens_total"]
    # the sum over positions is exact, the total has six digits
    taken = sum(accepted) if accepted else count["spec_decode_num_accepted_tokens_total"]
    sound = steps[0] <= n and steps == sorted(steps, reverse=True) and taken <= drafted
    if not page.rounded and not sound:
        raise InputError(f"{where}: its counters contradict each other")
    level = RATES if accepted else TOTALS
    request = Request(
        n_prompt=count["prompt_tokens_total"],
        prompt_seconds=page.counters["prompt_seconds_total"],
        tokens=count["tokens_predicted_total"],
        seconds=page.counters["tokens_predicted_seconds_total"],
        drafted=max(drafted, taken),
        accepted=taken,
    )
    counters = Snapshot()
    counters.verifications = steps[0]
    _fill(counters, accepted)
    known = _KNOWN[level]
    positions = counters.to_dict({name for name in counters.to_dict() if name not in known})
    notes = ["one sum over all requests: intervals take every token as independent"]
    if accepted:
        notes.append(_CONDITIONAL)
    if page.rounded:
        notes.append("a counter passed a million, and the server prints six digits of it")
    prompt = _prompt("all requests", request, steps[0], positions)
    log = Log([], level, 0, [], {}, [])
    return _result("llama-server metrics", list(names), notes, [prompt], log, len(accepted) or None)


def _result(
    kind: str,
    files: list[str],
    notes: list[str],
    prompts: list[dict[str, Any]],
    log: Log,
    n_max: int | None = None,
) -> dict[str, Any]:
    facts = log.facts
    depths = {len(request.rates) for request in log.requests if request.rates}

    def number(name: str) -> int | None:
        return int(facts[name]) if name in facts else None

    environment: dict[str, Any] = {
        "mtpstats": mtpstats.__version__,
        "time": None,
        "library": {"version": facts["version"]} if "version" in facts else None,
        "devices": [],
        "source": {"kind": kind, "files": files, "notes": [note for note in notes if note]},
    }
    model = {
        "file": log.models[0] if log.models else None,
        "size": None,
        "sha256": None,
        "architecture": facts.get("architecture"),
        "parameters": None,
        "vocabulary": number("vocabulary"),
        "nextn_blocks": number("nextn_blocks"),
        "quantisation": facts.get("quantisation"),
    }
    settings = {
        **dict.fromkeys(_SETTINGS),
        "n_max": depths.pop() if len(depths) == 1 else n_max,
        "n_ctx": number("n_ctx"),
        "n_threads": number("n_threads"),
    }
    return results.make(environment, model, settings, prompts)
