"""``mtpstats info``."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from mtpstats.cli import options
from mtpstats.cli.streams import last_words, show_log, to_stdout
from mtpstats.errors import InputError
from mtpstats.text import printable

EXAMPLES = """\
Examples:
  mtpstats info
      what is installed, and which build a run would use
  mtpstats info -m model.gguf
      whether and how this model's MTP head can be driven
  mtpstats info -m gemma4.gguf -md assistant.gguf
      the same of a head in a file of its own
"""

_HEADS = {
    "single": "one head, which drafts deeper from its own hidden state",
    "chain": "chained heads, one per draft step",
    "shared": "a head that shares the target's memory",
}
_ROLLBACK = {
    "any": "rejected tokens are simply removed",
    "snapshots": "rejected tokens are undone through recurrent snapshots",
    "none": "rejected tokens cannot be undone",
}


@click.command("info", cls=options.Command, epilog=EXAMPLES)
@options.takes(model=options.ModelFile, output=options.JsonOption, log=options.LogOption)
def command(model: options.ModelFile, output: options.JsonOption, log: options.LogOption) -> None:
    """Show the libllama builds, the devices, and how a model can be driven.

    Works without any build, too, and then says how to make one.
    """
    from mtpstats import describe
    from mtpstats.cli.live import ProgressLine
    from mtpstats.loop import Progress

    record, lib = describe.installation()
    if lib is not None and log.verbose:
        lib.verbose(show_log)
    if lib is not None:
        lib.on_abort(last_words)
    if model.draft_model is not None and model.model is None:
        raise InputError("-md names a head; -m must name the model it drafts for")
    if model.model is not None:
        line = ProgressLine(None if log.verbose else sys.stderr)
        try:
            record["model"] = describe.inspect(
                model.model,
                lib,
                lambda share: line(Progress("loading the model", 100 * share, 100, "%")),
                model.draft_model,
            )
        finally:
            line.clear()
    if output.json:
        to_stdout(json.dumps(record, indent=1) + "\n")
    else:
        to_stdout(render(record))


def render(record: dict[str, Any]) -> str:
    """Return the text form of what ``describe`` found."""
    rows = [
        ("mtpstats", record["mtpstats"]),
        ("Python", f"{record['python']}, NumPy {record['numpy']}"),
        ("kernel", record["kernel"]),
    ]
    used = record["library"]
    if used is not None:
        rows += [
            ("libllama", f"{used['version']} ({used['why']})"),
            ("", used["path"]),
        ]
    else:
        rows.append(("libllama", f"none: {record['problem']}"))
    sections = [_table(rows), _builds(record), _devices(record)]
    if "model" in record:
        sections.append(_model(record["model"]))
    return "\n".join(section for section in sections if section)


def _table(rows: list[tuple[str, str]]) -> str:
    return "".join(f"{name:<13}{printable(str(value))}".rstrip() + "\n" for name, value in rows)


def _builds(record: dict[str, Any]) -> str:
    lines = [f"builds in {printable(record['builds_directory'])} (* = used)\n"]
    for build in record["builds"]:
        mark = "*" if build["used"] else " "
        text = f"{build['key']}: {build['source']}, {build['backend']}"
        if build["flags"]:
            text += f", {' '.join(build['flags'])}"
        lines.append(f"  {mark} {printable(text)}, built {printable(build['built'])}\n")
    if not record["builds"]:
        lines.append("  none; ./build_llama.sh makes one (--help lists the backends)\n")
    return "".join(lines)


def _devices(record: dict[str, Any]) -> str:
    if record["library"] is None:
        return ""
    lines = ["devices\n"]
    for device in record["devices"]:
        memory = ""
        if device["memory_total"]:
            free, total = device["memory_free"] / 2**30, device["memory_total"] / 2**30
            memory = f", {free:.1f} of {total:.1f} GiB free"
        text = f"{device['name']} ({device['backend']}): {device['description']}{memory}"
        lines.append(f"    {printable(text)}\n")
    return "".join(lines)


def _model(model: dict[str, Any]) -> str:
    drive, draft = model["drive"], model.get("draft_model")
    rows: list[tuple[str, Any]] = [
        ("model", model["file"]),
        ("size", f"{model['size'] / 1e6:,.1f} MB"),
        ("architecture", model["architecture"]),
        ("parameters", _count(model["parameters"])),
        ("quantisation", model["quantisation"] or "unknown"),
        ("layers", f"{_count(model['layers'])} and {model['nextn_blocks']} NextN (MTP)"),
        ("vocabulary", _count(model["vocabulary"])),
        ("context", _count(model["context"])),
    ]
    if model["memory"]:
        rows.append(("memory", model["memory"]))
    if draft is not None:
        rows.append(("draft model", f"{draft['file']}, {draft['architecture']}"))
    if drive["possible"]:
        rows.append(("MTP", f"can be driven: {_HEADS[drive['heads']]};"))
        rows.append(("", _ROLLBACK.get(drive["rollback"], drive["rollback"])))
    elif drive["possible"] is None:
        rows.append(("MTP", f"unknown: {drive['reason']}"))
    else:
        rows.append(("MTP", f"cannot be driven: {drive['reason']}"))
    return _table(rows)


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
