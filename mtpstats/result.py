"""The result file: made, checked, read and written here.

A result is a plain dict of JSON types; DESIGN names its keys. Only what cannot be derived is
stored, so rates and intervals are computed when a result is shown. A missing number is None.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import takewhile
from pathlib import Path
from typing import Any

import mtpstats
from mtpstats import reading
from mtpstats.errors import InputError, MtpStatsError
from mtpstats.text import printable

SCHEMA = "mtpstats.result/1"
MAX_BYTES = 1 << 30
"""Of a result, plan, cost or validation file: some 100,000 prompts."""
SECONDS = ("prompt", "target", "head", "other")
MAX_NUMBER = 1e100
"""No time, speed or share is larger, and what is made of such numbers is still finite."""
COUNTS = ("n_prompt", "tokens", "verifications", "drafted", "accepted", "near_ties")


class Signed(int):
    """Stands in the lists below for an integer that may be negative."""


# What check() takes: PROMPT is a prompt's record, RUN a result without its prompts.
# A key that ends in "?" may be missing. An imported result knows only the generation as a whole.
_SECONDS = {**dict.fromkeys(SECONDS, (float, None)), "generation?": (float, None)}
_COUNTS = {**dict.fromkeys(COUNTS, (int, None)), "tokens": int}
_TREES: dict[str, Any] = dict.fromkeys(("nodes", "levels", "rows"), int)
PROMPT: dict[str, Any] = {
    "id": str,
    "index?": int,
    "category": (str, None),
    "prompt_sha256": (str, None),
    **_COUNTS,
    "text": (str, None),
    "repeated_4grams": (float, None),
    "stop": (str, None),
    "seconds": _SECONDS,
    "positions": (dict, None),
    "baseline": ({"tokens": int, "same_text": bool, "seconds": _SECONDS}, None),
    "tree?": _TREES,
}
_MODEL: dict[str, Any] = {
    **dict.fromkeys(("file", "sha256", "architecture", "quantisation"), (str, None)),
    **dict.fromkeys(("size", "parameters", "vocabulary", "nextn_blocks"), (int, None)),
}
RUN: dict[str, Any] = {
    "schema": str,
    "environment": {
        "mtpstats": str,
        "time": (str, None),
        "library": (dict, None),
        "devices": list,
        "source?": ({"kind": str, "files": [str], "notes": [str]}, None),
        "merged?": [{"time": (str, None)}],
        "set_aside?": [{"id": str, "why": str}],
    },
    "model": {**_MODEL, "draft_model?": _MODEL},
    "settings": {
        "n_predict": (Signed, None),
        "temp_source": (str, None),
        **dict.fromkeys(("temp", "top_p", "min_p", "p_min"), (float, None)),
        **dict.fromkeys(
            ("n_prompts", "n_max", "n_max_asked", "n_min", "top_k", "seed", "n_ctx", "n_threads"),
            (int, None),
        ),
        "n_parallel?": int,
        "tree?": {
            **dict.fromkeys(("policy", "memory"), str),
            **dict.fromkeys(("nodes", "leaves", "depth", "rows"), int),
        },
        "shard?": {"numbers": [int], "of": int, "prompts": int},
        "chat_template?": (str, None),
        "chat_template_kwargs?": dict,
        "chat_prompts?": (int, None),
    },
}
_RESULT: dict[str, Any] = {
    **RUN,
    "prompts": [PROMPT],
    "total": {
        **_COUNTS,
        "seconds": _SECONDS,
        "positions": (dict, None),
        "tokens_per_second": (float, None),
        "baseline_tokens_per_second": (float, None),
        "tree?": _TREES,
    },
}


def make(
    environment: dict[str, Any],
    model: dict[str, Any],
    settings: dict[str, Any],
    prompts: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Return a result with its ``total`` summed up from ``prompts``."""
    return {
        "schema": SCHEMA,
        "environment": environment,
        "model": model,
        "settings": settings,
        "prompts": list(prompts),
        "total": _total(prompts),
    }


def with_prompts(result: dict[str, Any], prompts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the result of the same run with these prompts and their total."""
    return make(result["environment"], result["model"], result["settings"], prompts)


def _total(prompts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    from mtpstats.stats import Snapshot

    positions = [p["positions"] for p in prompts if p["positions"] is not None]
    merged = None
    if positions:
        snapshots, unknown = Snapshot.from_partial(positions)
        merged = Snapshot.merge(*snapshots).to_dict(unknown)
    seconds = _added([p["seconds"] for p in prompts])
    plain = [p["baseline"] for p in prompts if p["baseline"] is not None]
    counts = {key: _sum([p[key] for p in prompts]) for key in COUNTS}
    trees = [p["tree"] for p in prompts if "tree" in p]
    branched = {"tree": {key: _sum([t[key] for t in trees]) for key in _TREES}} if trees else {}
    return {
        **counts,
        "seconds": seconds,
        "positions": merged,
        "tokens_per_second": _rate(counts["tokens"], seconds),
        "baseline_tokens_per_second": _rate(
            sum(b["tokens"] for b in plain), _added([b["seconds"] for b in plain])
        ),
        **branched,
    }


def _sum(numbers: Sequence[Any]) -> Any:
    """Return the exact sum; None where a part is not known."""
    if any(number is None for number in numbers):
        return None
    whole = not any(isinstance(number, float) for number in numbers)
    return sum(numbers) if whole else math.fsum(numbers)


def _added(parts: Sequence[dict[str, float | None]]) -> dict[str, Any]:
    total = {part: _sum([p[part] for p in parts]) if parts else 0.0 for part in SECONDS}
    if any("generation" in p for p in parts):
        total["generation"] = _sum([generation_seconds(p) for p in parts])
    return total


def generation_seconds(seconds: dict[str, float | None]) -> float | None:
    """Return the time of one generation or of many: by its parts, or as a whole."""
    if seconds.get("generation") is not None:
        return seconds["generation"]
    return _sum([seconds[part] for part in SECONDS[1:]])  # type: ignore[no-any-return]


def _rate(tokens: int, seconds: dict[str, float | None]) -> float | None:
    spent = generation_seconds(seconds)
    return tokens / spent if spent else None


@dataclass(frozen=True)
class Timing:
    """Speed and where the time went; None where nothing was measured.

    ``seconds`` are the generation's (the prompt's reading is apart) by part, ``shares`` the same
    as parts of 1. ``speedup`` is drafted over plain tokens/s.
    """

    tokens_per_second: float | None
    baseline_tokens_per_second: float | None
    speedup: float | None
    prompt_seconds: float | None
    generation_seconds: float | None
    seconds: dict[str, float | None]
    shares: dict[str, float | None]


def timing(result: dict[str, Any]) -> Timing:
    """Return the figures of time that a report shows."""
    total = result["total"]
    seconds = {part: total["seconds"][part] for part in SECONDS[1:]}
    spent = generation_seconds(total["seconds"])
    drafted, plain = total["tokens_per_second"], total["baseline_tokens_per_second"]
    return Timing(
        tokens_per_second=drafted,
        baseline_tokens_per_second=plain,
        speedup=drafted / plain if drafted is not None and plain else None,
        prompt_seconds=total["seconds"]["prompt"],
        generation_seconds=spent,
        seconds=seconds,
        shares={
            part: value / spent if spent and value is not None else None
            for part, value in seconds.items()
        },
    )


@dataclass(frozen=True)
class Wood:
    """What drafts that branch came to; ``per_...`` are means, None where nothing was verified."""

    nodes: int
    accepted: int
    wasted: int
    nodes_per_token: float | None
    nodes_per_verification: float | None
    levels_per_verification: float | None
    rows_per_verification: float | None


def wood(result: dict[str, Any]) -> Wood | None:
    """Return the figures of a run's trees; None for a run of chains."""
    total = result["total"]
    trees = total.get("tree")
    if trees is None:
        return None
    passes, tokens = total["verifications"], total["tokens"]
    return Wood(
        nodes=trees["nodes"],
        accepted=total["accepted"],
        wasted=trees["nodes"] - total["accepted"],
        nodes_per_token=trees["nodes"] / tokens if tokens else None,
        **{
            f"{name}_per_verification": trees[name] / passes if passes else None
            for name in ("nodes", "levels", "rows")
        },
    )


def dumps(result: dict[str, Any]) -> str:
    """Return the result as JSON in pure ASCII: a line for each key, and one for each prompt."""
    lines = []
    for key, value in result.items():
        if key == "prompts" and value:
            text = "[\n  " + ",\n  ".join(map(_compact, value)) + "\n ]"
        else:
            text = _compact(value)
        lines.append(f" {_compact(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _compact(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def read(path: Path) -> dict[str, Any]:
    """Return the result in a file; ``InputError`` names the key that is not as it should be."""
    result = read_json(path, "result of mtpstats")
    validate(result, printable(str(path)))
    return result  # type: ignore[no-any-return]


def read_json(path: Path, what: str) -> Any:
    """Return what a JSON file holds; ``InputError`` says that it is not a ``what``, and why."""
    other = f"{reading.shown(path)}: not a {what}"
    text = reading.decoded(reading.content(path, MAX_BYTES), other)
    try:
        return reading.loads(text)
    except ValueError as error:
        raise InputError(f"{other}: {printable(str(error))}") from None


def validate(result: Any, where: str) -> None:
    """Raise ``InputError`` unless ``result`` has the schema and every key the right type."""
    check_record(result, where, "result of mtpstats", SCHEMA, _RESULT)
    for key, counts in (
        *((f"prompts[{i}]", prompt) for i, prompt in enumerate(result["prompts"])),
        ("total", result["total"]),
    ):
        if (counts["positions"] is None) != (result["total"]["positions"] is None):
            raise InputError(f"{where}: {key}.positions and total.positions: only one is null")
        drafted, accepted = counts["drafted"], counts["accepted"]
        if drafted is not None and accepted is not None and accepted > drafted:
            raise InputError(f"{where}: {key}: {accepted} of {drafted} drafted tokens accepted")


def check_record(record: Any, where: str, what: str, schema: str, spec: dict[str, Any]) -> None:
    """Raise ``InputError`` unless ``record`` has the schema and the keys of ``spec``.

    ``spec`` maps keys (a key that ends in "?" may be missing) to a type, a dict of keys, [what each
    of a list is], or (what it is if not None, None).
    """
    if not isinstance(record, dict) or "schema" not in record:
        raise InputError(f'{where}: not a {what}: it has no "schema"')
    if record["schema"] != schema:
        raise InputError(
            f"{where}: schema {printable(repr(record['schema']))} is unknown; "
            f"this version reads {schema}"
        )
    check(record, spec, where, "")


def check(value: Any, spec: Any, where: str, key: str) -> None:
    """Check one value: ``spec`` is as for :func:`check_record`, ``key`` where the value stands."""
    if isinstance(spec, tuple):
        if value is not None:
            check(value, spec[0], where, key)
    elif isinstance(spec, dict):
        check(value, dict, where, key)
        for named, inner in spec.items():
            name = named.removesuffix("?")
            if name in value:
                check(value[name], inner, where, f"{key}.{name}" if key else name)
            elif name == named:
                raise InputError(f"{where}: {f'{key}.{name}' if key else name} is missing")
    elif isinstance(spec, list):
        check(value, list, where, key)
        for i, item in enumerate(value):
            check(item, spec[0], where, f"{key}[{i}]")
    elif not _is_a(value, spec):
        raise InputError(f"{where}: {key} is {described(value)}, expected {_NAMES[spec]}")


_NAMES = {
    str: "a string",
    int: "a count",
    Signed: "an integer",
    float: "a number from 0 to 1e100",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


def _is_a(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, (int, float)) and 0 <= value <= MAX_NUMBER
    if kind is int:
        return isinstance(value, int) and 0 <= value < 2**64
    return isinstance(value, int if kind is Signed else kind)


def described(value: Any) -> str:
    """Return a value of a file as an error line quotes it: one short, printable line."""
    if value is None:
        return "null"
    if isinstance(value, (dict, list)):
        return _NAMES[type(value)]
    shown = printable(repr(value))
    return shown if len(shown) <= 40 else shown[:37] + "..."


def told_apart(here: Any, there: Any) -> tuple[str, str]:
    """Return two values that differ as an error line quotes them: so that they look different."""
    shown = described(here), described(there)
    if shown[0] != shown[1]:
        return shown
    texts = [printable(json.dumps(value)) for value in (here, there)]
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))))
    start = max(same - 20, 0)
    cut = [text[start : start + 40] for text in texts]
    dots = "..." if start else ""
    return f"{dots}{cut[0]}", f"{dots}{cut[1]}"


def check_writable(path: Path) -> None:
    """Raise ``InputError`` now if a file could not be written there after a long run."""
    where = printable(str(path))
    try:
        if path.is_dir():
            raise InputError(f"{where}: is a directory; name a file to write to")
        if path.exists() and not os.access(path, os.W_OK):
            raise InputError(f"{where}: may not be overwritten: permission denied")
        if is_ordinary(path):
            handle, name = _temporary(Path(os.path.realpath(path)))
            os.close(handle)
            os.unlink(name)
    except OSError as error:
        raise InputError(f"{where}: cannot be written: {error.strerror or error}") from None


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result, whole or not at all; what stood there before stays if writing fails."""
    write_file(path, dumps(result).encode())


def write_file(path: Path, data: bytes) -> None:
    """Write any file in the same way."""
    try:
        if is_ordinary(path):
            _replace(Path(os.path.realpath(path)), data)
        else:
            path.write_bytes(data)
    except OSError as error:
        raise MtpStatsError(
            f"{printable(str(path))}: not written: {error.strerror or error}"
        ) from None


def is_ordinary(path: Path) -> bool:
    """Whether the path is a regular file or nothing yet; a pipe or device is not replaced."""
    return not path.exists() or stat.S_ISREG(path.stat().st_mode)


def _replace(path: Path, data: bytes) -> None:
    handle, name = _temporary(path)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _temporary(path: Path) -> tuple[int, str]:
    return tempfile.mkstemp(prefix=f".{path.name[:80]}.", suffix=".part", dir=path.parent)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def environment(
    library: dict[str, Any] | None, devices: Sequence[dict[str, Any]], command: Sequence[str]
) -> dict[str, Any]:
    """Return what the machine and the software were.

    ``library`` says which libllama (path, version, source, backend, flags), ``devices`` what it
    found, ``command`` the command line.
    """
    import numpy as np

    return {
        "mtpstats": mtpstats.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "library": library,
        "devices": list(devices),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": list(command),
    }


def _cpu() -> str:
    """Return the processor's name as the system gives it."""
    if sys.platform == "linux":
        try:
            text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def sha256(paths: Sequence[Path], on_bytes: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of the files, one after another; ``on_bytes`` hears how far it is."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(4 << 20))
    done = 0
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(block):
                digest.update(block[:count])
                done += count
                if on_bytes is not None:
                    on_bytes(done)
    return digest.hexdigest()
