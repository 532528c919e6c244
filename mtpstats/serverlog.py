"""What a ``llama-server`` wrote about drafting: lines of its log, and its ``/metrics`` page.

How much a log holds depends on how it was started. By default: of each request the tokens drafted
and accepted, and a mean length with two decimals. With ``-lv 4``: also the rate of each position,
over all verifications, with three decimals. With ``LLAMA_TRACE=1``: every verification.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from mtpstats.errors import InputError
from mtpstats.text import printable

# A number of more digits than a server can have counted is a damaged one.
_N: Final = r"([0-9]{1,9})"
_MS: Final = r"([0-9]{1,12}\.[0-9]{1,3})"

_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SLOT: Final = re.compile(r"\bslot +(\S+): id +(\d+) \| task +(-?\d+) \| +(.*)")
_TIMING: Final = {
    "prompt eval time": re.compile(rf"= +{_MS} ms / +{_N} tokens \(.* per second\)"),
    "eval time": re.compile(rf"= +{_MS} ms / +{_N} tokens \(.* per second\)"),
    "draft acceptance": re.compile(
        rf"= +\S+ \( *{_N} accepted / +{_N} generated\), mean len = +([0-9]{{1,9}}\.[0-9][0-9])"
    ),
    "acc per pos": re.compile(r"= \(([01]\.[0-9]{1,9}(?:, [01]\.[0-9]{1,9})*)\)"),
}
_VERIFIED: Final = re.compile(rf"accepted +{_N}/ *{_N} draft tokens( \(restore checkpoint\))?")
_STATISTICS: Final = re.compile(rf"statistics +(\S+): #calls\(b,g,a\) = +\d+ +\d+ +{_N}, #gen")
_START: Final = re.compile(r"load_model: loading model '(.*)'\s*$")
_FACTS: Final = {
    "version": re.compile(r"common_params_print_info: (build \d+ \(\w+\))"),
    "architecture": re.compile(r"print_info: arch +=\s+(\S+)\s*$"),
    "quantisation": re.compile(r"print_info: file type += (.+?)\s*$"),
    "vocabulary": re.compile(rf"print_info: n_vocab +=\s+{_N}\s*$"),
    "nextn_blocks": re.compile(rf"\.nextn_predict_layers u32 +=\s+{_N}\s*$"),
    "n_ctx": re.compile(rf"load_model: initializing, .*n_ctx_slot = {_N}"),
    "n_threads": re.compile(rf"llama threadpool init, n_threads = {_N}"),
}

LONGEST_LINE: Final = 1 << 16
MOST_TRIED: Final = 1 << 20  # verifications of a request; rounded figures leave fewer open

TOTALS, RATES, TRACE = range(3)


@dataclass
class Request:
    """A finished request. ``mean_length`` and ``rates`` are text, as their decimals matter."""

    n_prompt: int | None = None
    prompt_seconds: float = 0.0
    tokens: int | None = None
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    mean_length: str = ""
    rates: tuple[str, ...] | None = None
    verified: list[tuple[int, int]] = field(default_factory=list)
    """(drafted, accepted) of each verification, when traced."""
    calls: int | None = None
    """Verifications by the server's own running count, when nothing else ran meanwhile."""
    timed: bool = False
    """Its times were printed: it is finished."""
    cut: bool = False
    """A line of it is damaged."""
    ended: bool = False
    """The slot was seen to be freed."""
    replayed: int | None = None
    """Length of the draft that is verified again in part, after a checkpoint was restored."""

    def level(self) -> int:
        """How much the log holds of this request."""
        if self.drafted == sum(n for n, _ in self.verified) and self.accepted == sum(
            n for _, n in self.verified
        ):
            return TRACE
        return TOTALS if self.rates is None else RATES


@dataclass
class Log:
    """The finished requests, in the order in which they ended, all known to ``level``."""

    requests: list[Request]
    level: int
    left_out: int
    """Requests of which a line is missing or cut."""
    models: list[str]
    """Every model that was loaded, without its path."""
    facts: dict[str, str]
    kinds: list[str]
    """Kinds of drafters that the log names."""


def read_log(lines: Iterable[str]) -> Log:
    """Read a log; lines of anything else are passed over."""
    reader = _Reader()
    for line in lines:
        reader.line(_message(line))
    reader.restart()
    log = reader.log
    whole = [r for r in log.requests if not r.cut]
    log.level = max((r.level() for r in whole if r.drafted), default=TOTALS)
    whole = [r for r in whole if not r.drafted or r.level() >= log.level]
    log.left_out += len(log.requests) - len(whole)
    log.requests = whole
    return log


def _message(line: str) -> str:
    """Return what was logged: of a --log-jsonl line its message; without colours."""
    if line.startswith('{"type":"log"'):
        try:
            line = str(json.loads(line).get("msg", ""))
        except (ValueError, RecursionError):
            return ""
    return _COLOUR.sub("", line) if "\x1b" in line else line


class _Reader:
    """Follows a server's slots line by line."""

    def __init__(self) -> None:
        self.log = Log([], TOTALS, 0, [], {}, [])
        self.running: dict[tuple[str, str], Request] = {}
        self.timed: list[Request] = []
        self.printing: Request | None = None  # the one whose times were printed last
        self.alone: Request | None = None  # one that no other runs beside
        self.calls: int | None = None  # verifications so far, while nothing runs

    def restart(self) -> None:
        """The log ends, or a server starts: what runs has no end."""
        for request in self.timed:
            request.cut |= request.tokens is None or request.n_prompt is None
            if not request.drafted:
                # the line on drafting is missing, or may be yet to come
                drafts = request.rates is not None or request.verified
                request.cut |= bool(drafts) or not request.ended
        self.log.requests += self.timed
        self.log.left_out += sum(not request.timed for request in self.running.values())
        self.running, self.timed, self.printing, self.alone = {}, [], None, None
        self.calls = 0

    def line(self, text: str) -> None:
        """Take one line."""
        slot = _SLOT.search(text)
        if slot is not None:
            function, number, task, words = slot.groups()
            self._slot(function, (number, task), words.rstrip())
        elif "print_timing" in text and self.printing is not None:
            self.printing.cut = True  # whose line this was is lost
        elif counted := _STATISTICS.search(text):
            self._count(counted[1], int(counted[2]))
        elif started := _START.search(text):
            self.restart()
            name = re.split(r"[/\\]", started[1])[-1]
            if name not in self.log.models:
                self.log.models.append(name)
        else:
            for name, pattern in _FACTS.items():
                if name not in self.log.facts and (found := pattern.search(text)):
                    self.log.facts[name] = found[1]

    def _slot(self, function: str, key: tuple[str, str], words: str) -> None:
        if words.startswith("processing task"):
            self.alone = None if self.running else Request()
            self.running[key] = self.alone or Request()
        elif words.startswith("stop processing"):
            request = self.running.pop(key, Request())
            request.ended = True
            if not request.timed:
                self.calls = None  # cancelled: how often it was verified is not told
        elif function.startswith("print_timing"):
            self._timing(key, words)
        elif verified := _VERIFIED.fullmatch(words):
            self._verified(self.running.setdefault(key, Request()), *verified.groups())

    def _timing(self, key: tuple[str, str], words: str) -> None:
        """Take one of the lines that a finished request gets."""
        request = self.running.setdefault(key, Request())
        for begins, pattern in _TIMING.items():
            if not words.startswith(begins):
                # a line cut within its first words, or one that goes over into the next
                request.cut |= begins.startswith(words) or "| task" in words
                continue
            if begins == "prompt eval time" and request.n_prompt is not None:
                request = self.running[key] = Request()  # the same numbers again
            self.printing = request
            if not request.timed:
                request.timed = True
                self.timed.append(request)
            found = pattern.fullmatch(words[len(begins) :].strip())
            if found is None:
                request.cut = True
            elif begins == "prompt eval time":
                request.prompt_seconds, request.n_prompt = float(found[1]) / 1000, int(found[2])
            elif begins == "eval time":
                request.seconds, request.tokens = float(found[1]) / 1000, int(found[2])
            elif begins == "draft acceptance":
                request.accepted, request.drafted = int(found[1]), int(found[2])
                request.mean_length = found[3]
                request.cut |= request.accepted > request.drafted
            else:
                request.rates = tuple(found[1].split(", "))
            return

    def _verified(
        self, request: Request, accepted: str, drafted: str, restored: str | None
    ) -> None:
        taken, sent = int(accepted), int(drafted)
        if restored:
            request.replayed = sent if request.replayed is None else request.replayed
            return
        if request.replayed is not None:
            # what is verified again holds one token more: the target's own
            taken, sent, request.replayed = max(0, taken - 1), request.replayed, None
        request.verified.append((sent, taken))

    def _count(self, kind: str, calls: int) -> None:
        """Take the server's running count, which it prints after each request."""
        if kind not in self.log.kinds:
            self.log.kinds.append(kind)
        request = self.printing
        if request is not None and request is self.alone and self.calls is not None:
            request.calls = calls - self.calls
        settled = len(self.running) <= 1 and len(self.log.kinds) == 1
        self.calls = calls if settled else None


# ---- counts from rounded figures


def verifications(request: Request) -> tuple[int | None, bool]:
    """How many verifications a request took, and whether that is exact.

    The log gives it through rounded figures: the mean length ``1 + accepted / n``, and the rates
    of the positions. Where several counts fit, it is the one nearest to the mean length.
    """
    if request.drafted == 0:
        return 0, True
    if request.level() == TRACE:
        return len(request.verified), True
    depth = len(request.rates) if request.rates else None
    low = -(-request.drafted // depth) if depth else 1
    high = request.drafted
    mean, half = _rounded(request.mean_length)
    if request.accepted:
        low = max(low, math.ceil(request.accepted / (mean + half - 1) - 1e-9))
        if mean - half > 1:
            high = min(high, math.floor(request.accepted / (mean - half - 1) + 1e-9))
        guess = request.accepted / max(mean - 1, half)
    else:
        guess = float((request.tokens or 1) - 1)
    if high - low > MOST_TRIED:
        return None, False
    fitting = [n for n in range(low, high + 1) if _shares(request, n) is not None]
    if request.calls in fitting:
        return request.calls, True
    if not fitting:
        return None, False
    return min(fitting, key=lambda n: abs(n - guess)), len(fitting) == 1


def accepted_by_position(request: Request, n: int) -> tuple[list[int], bool]:
    """Accepted tokens of each position out of ``n`` verifications, and whether that is exact."""
    bounds = _shares(request, n) or []
    counts, left = [low for low, _ in bounds], request.accepted - sum(low for low, _ in bounds)
    room = sum(high - low for low, high in bounds)
    for i, (low, high) in enumerate(bounds):
        more = min(left, high - low)
        counts[i] += more
        left -= more
    return counts, request.accepted - sum(low for low, _ in bounds) in (0, room)


def _shares(request: Request, n: int) -> list[tuple[int, int]] | None:
    """The least and most of each position that n verifications round to; None if none fit."""
    found = []
    for rate in request.rates or ():
        value, half = _rounded(rate)
        low = max(0, math.ceil((value - half) * n - 1e-9))
        high = min(n, math.floor((value + half) * n + 1e-9))
        if low > high:
            return None
        found.append((low, high))
    if request.rates and not sum(x for x, _ in found) <= request.accepted <= sum(
        x for _, x in found
    ):
        return None
    return found


def _rounded(text: str) -> tuple[float, float]:
    """A printed number and half a unit of its last digit."""
    return float(text), 0.5 * 10.0 ** -len(text.partition(".")[2])


# ---- /metrics


_METRIC: Final = re.compile(r"^llamacpp:(\w+)(?:\{(.*)\})? (\S+)\s*$")
_POSITION: Final = re.compile(rf'\bposition="{_N}"')
_PER_POSITION: Final = "spec_decode_num_accepted_tokens_per_pos_total"
_NEEDED: Final = (
    "prompt_tokens_total",
    "prompt_seconds_total",
    "tokens_predicted_total",
    "tokens_predicted_seconds_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_drafts_total",
)


@dataclass(frozen=True)
class Metrics:
    """The counters of a ``/metrics`` page, by name without the prefix.

    ``accepted`` is [positions]. ``rounded`` says that a counter passed a million: the server
    prints six digits.
    """

    counters: dict[str, float]
    accepted: tuple[int, ...]
    rounded: bool


def is_metrics(text: str) -> bool:
    """Whether this is a page of metrics, not a log."""
    return any(line.startswith(("# HELP llamacpp:", "llamacpp:")) for line in text.splitlines())


def read_metrics(text: str, where: str) -> Metrics:
    """Read a page; InputError names what is missing or no count."""
    counters: dict[str, float] = {}
    accepted: dict[int, int] = {}
    rounded = False
    for line in text.splitlines():
        found = _METRIC.match(line)
        if found is None:
            continue
        name, labels, number = found.groups()
        if name not in _NEEDED and name != _PER_POSITION:
            continue
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not 0 <= value < 2**48:
            raise InputError(f"{where}: {name} is {printable(number)[:40]}, which is no count")
        rounded |= "e+" in number
        position = _POSITION.search(labels or "")
        if name == _PER_POSITION and position is not None:
            accepted[int(position[1])] = int(value)
        else:
            counters[name] = value
    for name in _NEEDED:
        if name not in counters:
            raise InputError(
                f"{where}: llamacpp:{name} is missing: this is no whole page of a llama-server "
                "that counts its drafts (start it with --metrics)"
            )
    if sorted(accepted) != list(range(len(accepted))):
        raise InputError(f"{where}: {_PER_POSITION} lacks a position")
    return Metrics(counters, tuple(accepted[i] for i in sorted(accepted)), rounded)


def between(first: Metrics, second: Metrics, where: str) -> Metrics:
    """What happened between two pages; InputError when a counter went down."""
    counters = {name: second.counters[name] - first.counters[name] for name in _NEEDED}
    before: Sequence[int] = first.accepted + (0,) * (len(second.accepted) - len(first.accepted))
    accepted = tuple(b - a for a, b in zip(before, second.accepted, strict=False))
    fell = [name for name, value in counters.items() if value < 0]
    if min(accepted, default=0) < 0 or len(second.accepted) < len(first.accepted):
        fell.append(_PER_POSITION)
    if fell:
        raise InputError(
            f"{where}: {fell[0]} went down: the pages are in the wrong order, or the server was "
            "started again in between"
        )
    return Metrics(counters, accepted, first.rounded or second.rounded)
