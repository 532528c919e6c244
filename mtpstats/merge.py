"""Results of shards added to one: exact, in any order, and refused where the runs were unlike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from mtpstats import result as results
from mtpstats.errors import InputError
from mtpstats.text import printable

# Settings that may differ between shards. The context is as large as a shard's longest prompt
# needs; where it was too small for one, that prompt's ``stop`` says so.
_ADDED: Final = ("n_prompts", "chat_prompts")
_MAY_DIFFER: Final = "n_ctx"
_SHARD: Final = "shard"  # of what, must be alike; which one, not

_MODEL: Final = (
    *("sha256", "size", "architecture", "parameters", "vocabulary", "nextn_blocks"),
    *("quantisation", "file"),
)
_LIBRARY: Final = ("version", "source", "source_version", "backend", "flags")
_DEVICE: Final = ("name", "type", "backend", "description")


def merge(shards: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Add the results of a run that was split up by prompts.

    Args:
        shards: (name for messages, result) of each. Order does not matter, and merging what was
            merged gives the same as merging everything at once.

    Returns:
        A result whose prompts are in the order of the whole run if they are of ``--shard``, else
        sorted by id. All shards of a run give its result, as if it had not been split.
        ``environment.merged`` lists the shards.

    Raises:
        InputError: fewer than two shards; runs that differ in a field that can change a number
            (the message names it); a prompt id that occurs twice.
    """
    if len(shards) < 2:
        raise InputError("merging needs at least two results")
    first_name, first = shards[0]
    for name, other in shards[1:]:
        unlike = difference(first, other)
        if unlike is not None:
            field, here, there = unlike
            raise InputError(
                f"{printable(first_name)} and {printable(name)} are not of one run: {field} is "
                f"{here} in the first and {there} in the second"
            )
    _refuse_duplicates(shards)
    every = [result for _, result in shards]
    settings = merged_settings([result["settings"] for result in every])
    prompts = sorted(
        (prompt for result in every for prompt in result["prompts"]),
        key=lambda prompt: place(prompt["id"], prompt.get("index")),
    )
    if _SHARD not in settings:
        prompts = [{k: v for k, v in prompt.items() if k != "index"} for prompt in prompts]
    return results.make(merged_environment(every), _model(every), settings, prompts)


def difference(first: dict[str, Any], other: dict[str, Any]) -> tuple[str, str, str] | None:
    """Return the first field in which two results are not of one run, and both values as words.

    Their prompts, and what comes of those, may differ. None if they are of one run.
    """
    for field in _fields(first, other):
        here, there = _at(first, field), _at(other, field)
        if here != there:
            return field, *results.told_apart(here, there)
    return None


def _fields(first: dict[str, Any], other: dict[str, Any]) -> Iterable[str]:
    for key in _MODEL:
        # the hash, compared before, says more than the file's name
        if key != "file" or first["model"].get("sha256") is None:
            yield f"model.{key}"
        yield f"model.draft_model.{key}"
    for key in sorted({*first["settings"], *other["settings"]} - {*_ADDED, _MAY_DIFFER, _SHARD}):
        yield f"settings.{key}"
    yield from ("settings.shard.of", "settings.shard.prompts")
    yield "environment.mtpstats"
    for key in _LIBRARY:
        yield f"environment.library.{key}"
    yield "environment.cpu"
    yield "environment.devices"
    yield "environment.source.kind"


def _at(result: dict[str, Any], field: str) -> Any:
    """Return a field by its dotted name; None where it, or what it is in, is missing."""
    value: Any = result
    for key in field.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if field == "environment.devices":  # free memory changes all the time
        return [{key: d.get(key) for key in _DEVICE} for d in value if isinstance(d, dict)]
    return value


def _refuse_duplicates(shards: Sequence[tuple[str, dict[str, Any]]]) -> None:
    seen: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, result in shards:
        for prompt in result["prompts"]:
            if prompt["id"] not in seen:
                seen[prompt["id"]] = name, prompt
                continue
            before, same = seen[prompt["id"]]
            text = prompt["prompt_sha256"]
            if text == same["prompt_sha256"] and (text is not None or prompt == same):
                problem = "it would count twice"
            elif text is not None:
                problem = "with another text: give the prompts of each shard ids of their own"
            else:
                problem = "of sources with one name: rename one and import it again"
            raise InputError(
                f"prompt {printable(prompt['id'])} is in {printable(before)} and in "
                f"{printable(name)}, {problem}"
            )


def place(name: str, index: int | None) -> tuple[int, list[tuple[int, int, str]]]:
    """Return a key that sorts prompts by their place in the whole run, or by their ids."""
    return (-1, _natural(name)) if index is None else (index, [])


def _natural(text: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts prompt-2 before prompt-10."""
    parts = re.split(r"([0-9]+)", text)
    return [(i % 2, len(part.lstrip("0")) if i % 2 else 0, part) for i, part in enumerate(parts)]


def _model(every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    models = [result["model"] for result in every]
    return {**models[0], "file": min((m["file"] for m in models if m["file"]), default=None)}


def merged_settings(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of runs that are alike; of all shards of one run, those of that run."""
    contexts = {s.get(_MAY_DIFFER) for s in settings}
    merged = {**settings[0], _MAY_DIFFER: contexts.pop() if len(contexts) == 1 else None}
    shards = [s[_SHARD] for s in settings if _SHARD in s]
    if shards:
        numbers = sorted({number for shard in shards for number in shard["numbers"]})
        merged[_SHARD] = {**shards[0], "numbers": numbers}
    for key in _ADDED:
        if any(key in s for s in settings):
            counts = [s.get(key) for s in settings]
            merged[key] = None if None in counts else sum(counts)
    if shards and merged["n_prompts"] == shards[0]["prompts"]:
        del merged[_SHARD]
    return merged


def merged_environment(every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the shards' environments share, and each shard's time and command."""
    environments = [result["environment"] for result in every]
    first = environments[0]
    shared = {
        key: first[key] for key in first if all(e.get(key, ...) == first[key] for e in environments)
    }
    shards = [shard for result in every for shard in _shards(result)]
    times = [shard["time"] for shard in shards if shard["time"] is not None]
    merged: dict[str, Any] = {
        **shared,
        "mtpstats": first["mtpstats"],
        "library": _library(environments),
        "devices": _at(every[0], "environment.devices"),
        "time": min(times, default=None),
        "merged": sorted(shards, key=repr),
    }
    for key in ("command", "workers", "set_aside"):
        merged.pop(key, None)
    aside = [one for environment in environments for one in environment.get("set_aside", ())]
    if aside:
        merged["set_aside"] = sorted(aside, key=repr)
    sources = [e["source"] for e in environments if e.get("source")]
    if sources:
        merged["source"] = {
            "kind": sources[0]["kind"],
            "files": sorted({file for source in sources for file in source["files"]}),
            "notes": sorted({note for source in sources for note in source["notes"]}),
        }
    return dict(sorted(merged.items()))


def _library(environments: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return what the builds share; two builds of one source may differ in when they were made."""
    libraries = [e["library"] for e in environments]
    if not all(libraries):
        return None
    return {
        key: value
        for key, value in sorted(libraries[0].items())
        if all(library.get(key, ...) == value for library in libraries)
    }


def _shards(result: dict[str, Any]) -> list[dict[str, Any]]:
    environment = result["environment"]
    if "merged" in environment:
        found: list[dict[str, Any]] = environment["merged"]
        return found
    return [
        {
            "time": environment["time"],
            "command": environment.get("command"),
            "prompts": len(result["prompts"]),
        }
    ]
