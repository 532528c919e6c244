"""The journal of a run: its finished prompts, on disk before the next ones start.

It lies beside the result as ``FILE.part`` and is gone when the result is complete: a line for the
run, then a line for each prompt. ``docs/files.md`` describes the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from mtpstats import merge, reading
from mtpstats import result as results
from mtpstats.appending import AppendFile, Removed, seal, unsealed
from mtpstats.closing import Closing
from mtpstats.errors import InputError, MtpStatsError
from mtpstats.forms import Prompt
from mtpstats.stats import Snapshot
from mtpstats.text import printable

SCHEMA: Final = "mtpstats.journal/1"
SUFFIX: Final = ".part"
MAX_LINE: Final = 64 << 20

_HEADER: Final = {**results.RUN, "prompts": [str]}
_LINE: Final = {"index": int, "record": results.PROMPT}


class Journal(Closing):
    """A :class:`mtpstats.loop.Keeper` in a file. Close it, whatever happens.

    Args:
        output: the result file; the journal is ``output`` with ``.part`` behind.
        resume: go on with a journal that is there; where a complete result is instead, nothing is
            left to run.
        tell: hears, in a line, of trouble that does not end the run.

    Raises:
        InputError: a journal is there and not to be resumed; it cannot be read or written, is
            damaged or none, or another run is writing to it; there is none to resume, but
            something else than a complete result.
    """

    def __init__(
        self, output: Path, resume: bool = False, tell: Callable[[str], None] | None = None
    ) -> None:
        self.path = output.with_name(output.name + SUFFIX)
        self._where = printable(str(self.path))
        self._tell = tell or (lambda _: None)
        self._file: AppendFile | None = None
        self._header: dict[str, Any] | None = None
        self._records: dict[int, dict[str, Any]] = {}
        self.n_kept = 0
        """Prompts that are in the file."""
        self.complete: dict[str, Any] | None = None
        """The result that stands there already; nothing is left to run, and nothing to write."""
        if os.path.lexists(self.path):
            self._open(resume)
        elif resume and output.exists():
            self._take(output)

    @property
    def seed(self) -> int | None:
        """The seed of the run that is resumed, if there is one."""
        seed = self._header["settings"]["seed"] if self._header is not None else None
        assert seed is None or isinstance(seed, int)
        return seed

    def begin(
        self, result: dict[str, Any], prompts: Sequence[Prompt]
    ) -> Mapping[int, dict[str, Any]]:
        """See :class:`mtpstats.loop.Keeper`."""
        run = {key: result[key] for key in ("environment", "model", "settings")}
        header = {"schema": SCHEMA, **run, "prompts": [_identity(prompt) for prompt in prompts]}
        if self._header is None:
            self._begin(header)
        else:
            self._compare(self._header, json.loads(json.dumps(header)), prompts)
            self._header = None
            if self.complete is not None:
                self._tell(f"{self._where} is complete: nothing is left to run")
        return self._records

    def append(self, index: int, record: dict[str, Any]) -> None:
        """See :class:`mtpstats.loop.Keeper`."""
        file = self._file
        if file is None:
            return
        end = file.end
        try:
            file.append(seal({"index": index, "record": record}))
        except Removed as error:
            file.close()
            self._file, self.n_kept = None, 0
            self._tell(f"{self._where}: {error.strerror}; the run goes on without it")
        except OSError as error:
            raise MtpStatsError(f"{self._where}: not written: {error.strerror or error}") from None
        finally:
            # An interruption may come when the record is there already.
            if self._file is not None and file.end > end:
                self.n_kept += 1

    def remove(self) -> None:
        """Remove the file: what it holds stands in the result."""
        if self._file is None:
            return
        self.n_kept = 0
        self.close()

    def close(self) -> None:
        """Close the file; one without a single prompt goes away. Closing twice is harmless."""
        if self._file is None:
            return
        if not self.n_kept:
            with suppress(OSError):
                self.path.unlink()
        self._file.close()
        self._file = None

    def _begin(self, header: dict[str, Any]) -> None:
        try:
            if self._file is None:
                self._file = AppendFile(self.path, new=True, on_removed=self._tell)
            self._file.append(seal(header))
        except OSError as error:
            raise InputError(
                f"{self._where}: cannot be written: {error.strerror or error}"
            ) from None

    def _take(self, output: Path) -> None:
        """Take over the records of a complete result, whose journal is gone."""
        result = results.read(output)
        found, planned = len(result["prompts"]), result["settings"]["n_prompts"]
        self._where = printable(str(output))
        if found != planned:
            raise InputError(
                f"{self._where}: there is no {printable(self.path.name)} to go on with, and the "
                f"result has {found} of {planned} prompts; to run it anew leave --resume out"
            )
        counters = [one["positions"] for one in result["prompts"] if one["positions"] is not None]
        try:
            Snapshot.from_dicts(counters)
        except InputError as error:
            raise InputError(f"{self._where}: {error}") from None
        self.complete = result
        self._records = dict(enumerate(result["prompts"]))
        self._header = result | {"prompts": [_name(one) for one in result["prompts"]]}

    def _open(self, resume: bool) -> None:
        try:
            self._file = AppendFile(self.path, new=False, on_removed=self._tell)
            with open(self._file.fileno(), "rb", closefd=False) as file:
                end = self._read(file)
            if self.n_kept and not resume:
                planned = len(self._header["prompts"]) if self._header is not None else 0
                raise InputError(
                    f"{self._where}: a run that was cut off finished {self.n_kept} of {planned} "
                    "prompts; go on with it (--resume), or remove this file"
                )
            if not resume:
                self._header, end = None, 0
            self._file.cut(end)
        except BaseException as error:
            if self._file is not None:
                self._file.close()
            if isinstance(error, OSError):
                why = error.strerror or error
                raise InputError(f"{self._where}: cannot be opened: {why}") from None
            raise

    def _read(self, file: BinaryIO) -> int:
        """Take over what the file holds; return where its whole lines end."""
        line = file.readline(MAX_LINE)
        start = b'{"schema": "%s' % SCHEMA.encode()
        if not line.endswith(b"\n") and start.startswith(line[: len(start)]):
            return 0  # cut off in its first line
        self._header = self._checked_header(line)
        end = file.tell()
        while (line := file.readline(MAX_LINE)).endswith(b"\n"):
            number = len(self._records) + 2
            found = unsealed(line)
            if found is None:
                raise self._damaged(f"the checksum of line {number} is not right")
            results.check(found, _LINE, f"{self._where}: line {number}", "")
            index = found["index"]
            if index >= len(self._header["prompts"]) or index in self._records:
                raise self._damaged(f"line {number} is of a prompt that cannot be there")
            self._records[index] = found["record"]
            end = file.tell()
        if len(line) == MAX_LINE:
            raise self._damaged("a line does not end")
        self.n_kept = len(self._records)
        return end

    def _checked_header(self, line: bytes) -> dict[str, Any]:
        try:
            header = reading.loads(line.decode())
        except ValueError:
            header = None
        if not isinstance(header, dict) or not str(header.get("schema")).startswith("mtpstats."):
            raise InputError(f"{self._where}: not a journal of mtpstats")
        if header["schema"] == SCHEMA and unsealed(line) is None:
            raise self._damaged("the checksum of its first line is not right")
        results.check_record(header, self._where, "journal of mtpstats", SCHEMA, _HEADER)
        return header

    def _damaged(self, how: str) -> InputError:
        return InputError(
            f"{self._where}: damaged: {how}; it cannot be resumed, remove it to begin anew"
        )

    def _compare(
        self, found: dict[str, Any], wanted: dict[str, Any], prompts: Sequence[Prompt]
    ) -> None:
        """Refuse to add to what another run began."""

        def another(what: str, here: object, there: object) -> InputError:
            return InputError(
                f"{self._where}: was begun with {what} {here}, not {there}: it cannot be resumed so"
            )

        unlike = merge.difference(found, wanted)
        if unlike is not None:
            raise another(*unlike)
        counts = len(found["prompts"]), len(prompts)
        if counts[0] != counts[1]:
            raise another("settings.n_prompts", *counts)
        for number, prompt in enumerate(prompts):
            if found["prompts"][number] != wanted["prompts"][number]:
                raise InputError(
                    f"{self._where}: was begun with another text, name or category of prompt "
                    f"{number + 1}, which is {printable(prompt.id)} now: it cannot be resumed so"
                )
        contexts = [header["settings"]["n_ctx"] for header in (found, wanted)]
        if contexts[0] != contexts[1]:
            raise another("settings.n_ctx", *contexts)


def _name(record: dict[str, Any]) -> str:
    """Return what a prompt is known by, from its record in a result."""
    return _hash([record["id"], record["category"], record["prompt_sha256"]])


def _identity(prompt: Prompt) -> str:
    return _hash([prompt.id, prompt.category, prompt.sha256])


def _hash(known: list[str | None]) -> str:
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()
