"""The command line without libllama: parsing, errors, exit codes, streams."""

import io
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest

import mtpstats
from mtpstats import cli, run
from mtpstats.cli import live, options
from mtpstats.errors import (
    CheckFailed,
    InputError,
    Interrupted,
    LibraryNotFound,
    MtpStatsError,
)
from mtpstats.prompts import Prompt
from mtpstats.run import BenchStopped, Progress

FAKE = {"prompts": [{}], "settings": {"n_prompts": 1}}


@pytest.fixture
def bench(monkeypatch):
    """Replace ``run.bench``; the returned list collects the calls' arguments."""
    calls = []

    def fake(settings, prompts, **hooks):
        calls.append((settings, prompts, hooks))
        return FAKE

    monkeypatch.setattr(run, "bench", fake)
    return calls


def settings_of(bench, *args):
    """Return what ``mtpstats bench --json ARGS`` asked ``run.bench`` for."""
    assert cli.main(["bench", "--json", *args]) == 0
    return bench[-1][0]


def error_line(capsys, *args, code):
    """Run, expect the exit code, and return the one line on standard error."""
    assert cli.main(list(args)) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"mtpstats: error: [^\n]+\n", captured.err), captured.err
    return captured.err


# ---- help


@pytest.mark.parametrize("args", [["--help"], ["-h"], *([name, "-h"] for name in cli.COMMANDS)])
def test_help_has_an_example_and_fits(args, capsys):
    assert cli.main(args) == 0
    captured = capsys.readouterr()
    assert "Examples:\n  mtpstats " in captured.out
    assert captured.err == ""
    assert max(map(len, captured.out.splitlines())) <= 100


def test_each_command_is_listed_with_the_first_line_of_its_help(capsys):
    cli.main(["--help"])
    listed = capsys.readouterr().out
    for name, short in cli.COMMANDS.items():
        command = import_module(f"mtpstats.cli.{cli.module(name)}").command
        assert command.name == name
        assert command.help.splitlines()[0] == short
        assert f"\n  {name}  " in listed
        assert short in " ".join(listed.split())


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_option_is_documented_with_its_default(name):
    command = import_module(f"mtpstats.cli.{cli.module(name)}").command
    for param in command.params:
        if isinstance(param, click.Argument):  # its name is in the usage line
            continue
        assert param.help, param.name
        assert param.help.endswith((".", "]", "with."))
        takes_a_value = not param.is_flag and not param.multiple
        if takes_a_value and param.name not in ("output",):
            assert param.show_default or "[default: " in param.help, param.name


def test_options_carry_llama_cpps_names(capsys):
    cli.main(["bench", "--help"])
    shown = capsys.readouterr().out
    for names in [
        "-m, --model", "-p, --prompt", "-f, --file", "-n, --predict, --n-predict",
        "-c, --ctx-size", "-b, --batch-size", "-ub, --ubatch-size", "-t, --threads",
        "-tb, --threads-batch", "-ngl, --gpu-layers, --n-gpu-layers", "-fa, --flash-attn",
        "-ctk, --cache-type-k", "-ctv, --cache-type-v", "--temp, --temperature", "--top-k",
        "--top-p", "--min-p", "-s, --seed", "--spec-draft-n-max", "--spec-draft-n-min",
        "--spec-draft-p-min, --draft-p-min", "-e, --escape / --no-escape", "-v, --verbose",
        "-o, --output", "--json", "--baseline", "--no-stats", "--stats-every", "--prompts",
        "-np, --parallel", "-md, --spec-draft-model, --model-draft", "-dev, --device",
        "-sm, --split-mode", "-ts, --tensor-split", "-mg, --main-gpu", "-ot, --override-tensor",
        "--rpc", "--compat-counts",
    ]:  # fmt: skip
        assert names in shown, names


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mtpstats {mtpstats.__version__}\n"


def test_help_imports_neither_numpy_nor_the_bridge():
    code = (
        "import sys; from mtpstats.cli import main; main(['bench', '--help']);"
        "bad = {'numpy', 'mtpstats.llama', 'mtpstats._core'} & set(sys.modules);"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_the_reference_is_up_to_date():
    root = Path(mtpstats.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, root / "docs" / "make_cli.py", "--check"],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_reference_has_every_command_and_option():
    page = (Path(mtpstats.__file__).parents[1] / "docs" / "cli.md").read_text()
    sections = page.split("\n## mtpstats ")
    for name in cli.COMMANDS:
        (section,) = [text for text in sections if text.startswith(f"{name}\n")]
        command = import_module(f"mtpstats.cli.{cli.module(name)}").command
        for param in command.params:
            for option in param.opts if isinstance(param, click.Option) else ():
                assert f"`{option}`" in section
        for line in command.epilog.splitlines()[1:]:
            assert line.strip() in section


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("mtpstats re", {"report", "replay"}),
        ("mtpstats compare --fail-on sp", {"speed"}),
        ("mtpstats report --ht", {"--html"}),
    ],
)
def test_a_shell_is_told_what_may_follow(words, expected, monkeypatch, capsys):
    monkeypatch.setenv("_MTPSTATS_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert cli.main([]) == 0
    captured = capsys.readouterr()
    offered = {line.split(",")[1] for line in captured.out.splitlines()}
    assert expected <= offered
    assert captured.err == ""


def test_a_shell_is_told_how_to_ask(monkeypatch, capsys):
    monkeypatch.setenv("_MTPSTATS_COMPLETE", "zsh_source")
    assert cli.main([]) == 0
    assert "_MTPSTATS_COMPLETE=zsh_complete mtpstats" in capsys.readouterr().out


# ---- parsing


def test_defaults(bench):
    settings = settings_of(bench)
    assert settings.model == run.builtin_model()
    assert settings.n_predict == 128
    assert (settings.draft.n_max, settings.draft.n_min, settings.draft.p_min) == (8, 0, 0.0)
    sampling = settings.sampling
    assert (sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed) == (40, 0.95, 0.05, 0)
    assert (settings.n_ctx, settings.n_batch, settings.n_ubatch) == (None, 2048, 512)
    assert (settings.n_threads, settings.n_threads_batch, settings.n_gpu_layers) == (None, None, -1)
    assert (settings.flash_attn, settings.type_k, settings.type_v) == ("auto", "f16", "f16")
    assert (settings.baseline, settings.stats, settings.stats_every) == (False, True, 0)


def test_multi_letter_short_options_in_any_order(bench):
    settings = settings_of(
        bench,
        *["-ngl", "0", "-n", "64", "-fa", "on", "-ub", "256", "-b", "1024", "-ctk", "q8_0"],
        *["-tb", "3", "-ctv", "bf16", "-t", "2", "-c", "4096", "-s", "7", "-m", "x.gguf"],
    )
    assert settings.n_gpu_layers == 0
    assert settings.n_predict == 64
    assert settings.flash_attn == "on"
    assert (settings.n_ubatch, settings.n_batch) == (256, 1024)
    assert (settings.type_k, settings.type_v) == ("q8_0", "bf16")
    assert (settings.n_threads, settings.n_threads_batch) == (2, 3)
    assert (settings.n_ctx, settings.sampling.seed) == (4096, 7)
    assert settings.model == Path("x.gguf")


@pytest.mark.parametrize(
    ("args", "name", "value"),
    [
        (["-ngl", "auto"], "n_gpu_layers", -1),
        (["-ngl", "all"], "n_gpu_layers", -1),
        (["-ngl", "-1"], "n_gpu_layers", -1),
        (["-ngl", "-2"], "n_gpu_layers", -1),
        (["-fa", "1"], "flash_attn", "on"),
        (["-fa", "true"], "flash_attn", "on"),
        (["-fa", "enabled"], "flash_attn", "on"),
        (["-fa", "0"], "flash_attn", "off"),
        (["-fa", "false"], "flash_attn", "off"),
        (["-fa", "disabled"], "flash_attn", "off"),
        (["-fa", "-1"], "flash_attn", "auto"),
        (["-np", "4"], "n_parallel", 4),
        (["--parallel", "256"], "n_parallel", 256),
        (["-md", "h.gguf"], "draft_model", Path("h.gguf")),
        (["--model-draft", "h.gguf"], "draft_model", Path("h.gguf")),
        (["--compat-counts"], "compat_counts", True),
        (["--rpc", "a:1,b:2", "--rpc", "[::1]:3"], "rpc", ("a:1", "b:2", "[::1]:3")),
        (["--gpu-layers", "99"], "n_gpu_layers", 99),
        (["--n-gpu-layers=7"], "n_gpu_layers", 7),
        (["--n-predict", "-1"], "n_predict", -1),
        (["-n64"], "n_predict", 64),
        (["-c", "0"], "n_ctx", 0),
        (["-t", "-1"], "n_threads", None),
        (["--no-stats"], "stats", False),
        (["--stats-every", "16"], "stats_every", 16),
        (["--baseline"], "baseline", True),
    ],
)
def test_forms_of_one_option(bench, args, name, value):
    assert getattr(settings_of(bench, *args), name) == value


@pytest.mark.parametrize(
    ("args", "name", "value"),
    [
        ([], "devices", None),
        (["-dev", "none"], "devices", ()),
        (["--device", "CUDA1,CUDA0"], "devices", ("CUDA1", "CUDA0")),
        (["-sm", "row"], "split_mode", "row"),
        (["-ts", "3,1"], "tensor_split", (3.0, 1.0)),
        (["--tensor-split", "0.5/0/2"], "tensor_split", (0.5, 0.0, 2.0)),
        (["-mg", "2"], "main_gpu", 2),
        (
            ["-ot", r"blk\.1\.=CPU,exps=CUDA0", "-ot", "a=b=c"],
            "override_tensor",
            ((r"blk\.1\.", "CPU"), ("exps", "CUDA0"), ("a", "b=c")),
        ),
    ],
)
def test_device_options(bench, args, name, value):
    assert getattr(settings_of(bench, *args).placement, name) == value


@pytest.mark.parametrize(("given", "expected"), [("-1", 0), ("-2147483648", 0), ("7", 7)])
def test_a_negative_top_k_is_off(bench, given, expected):
    assert settings_of(bench, "--top-k", given).sampling.top_k == expected


def test_drafting_and_sampling_options(bench):
    settings = settings_of(
        bench,
        *["--spec-draft-n-max", "5", "--spec-draft-n-min", "2", "--draft-p-min", "0.5"],
        *["--temperature", "0.8", "--top-k", "0", "--top-p", "1", "--min-p", "0"],
    )
    assert (settings.draft.n_max, settings.draft.n_min, settings.draft.p_min) == (5, 2, 0.5)
    sampling = settings.sampling
    assert (sampling.temp, sampling.top_k, sampling.top_p, sampling.min_p) == (0.8, 0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("args", "temp", "source"),
    [
        ([], 0.7, "built-in model"),
        (["-m", str(run.builtin_model())], 0.7, "built-in model"),
        (["-m", "other.gguf"], 0.0, "default"),
        (["--temp", "0"], 0.0, "asked"),
        (["-m", "other.gguf", "--temp", "1.5"], 1.5, "asked"),
    ],
)
def test_temperature_and_who_chose_it(bench, args, temp, source):
    settings = settings_of(bench, *args)
    assert settings.sampling.temp == temp
    assert settings.temp_source == source


def test_model_is_hashed_only_for_a_result_that_is_kept(bench, monkeypatch, tmp_path):
    monkeypatch.setattr("mtpstats.report.text.render", lambda result: "table\n")
    assert settings_of(bench).hash_model
    assert cli.main(["bench"]) == 0
    assert not bench[-1][0].hash_model
    assert cli.main(["bench", "-o", str(tmp_path / "r.json")]) == 0
    assert bench[-1][0].hash_model


# ---- prompts


def test_prompts_of_all_sources_add_up(bench, tmp_path):
    (tmp_path / "a.txt").write_text("whole\nfile\n")
    (tmp_path / "b.txt").write_text("line one\nline two\n")
    (tmp_path / "c.jsonl").write_text('{"prompt": "json", "id": "a.txt"}\n')
    settings_of(
        bench,
        *["--prompts", str(tmp_path / "b.txt"), "-f", str(tmp_path / "a.txt"), "-p", r"x\ny"],
        *["--prompts", str(tmp_path / "c.jsonl"), "-p", "second"],
    )
    assert [(prompt.id, prompt.text) for prompt in bench[-1][1]] == [
        ("prompt-1", "x\ny"),
        ("prompt-2", "second"),
        ("a.txt", "whole\nfile"),
        ("b.txt:1", "line one"),
        ("b.txt:2", "line two"),
        ("a.txt~2", "json"),
    ]


def test_no_escape(bench):
    settings_of(bench, "-p", r"x\ny", "--no-escape")
    assert bench[-1][1][0].text == r"x\ny"


def test_built_in_prompts_without_any(bench):
    from mtpstats.prompts import builtin

    settings_of(bench, "-m", "any.gguf")
    assert bench[-1][1] == builtin()


def test_prompts_by_field_from_a_directory_and_the_suite(bench, tmp_path):
    from mtpstats.prompts import suite

    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "maths.csv").write_text("question,kind\nwhy?,x\n")
    settings_of(
        bench,
        *["--prompts", str(tmp_path / "p"), "--prompt-field", "question"],
        *["--category-field", "kind", "--suite"],
    )
    first, *others = bench[-1][1]
    assert (first.text, first.category) == ("why?", "x")
    assert others == suite()


def test_selection(bench, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    plain = settings_of(bench).selection
    assert (plain.chat, plain.template, plain.template_kwargs) == (None, None, {})
    assert (plain.limit, plain.min_tokens, plain.max_tokens, plain.shuffled) == (
        None,
        0,
        None,
        False,
    )
    found = settings_of(
        bench,
        *["--chat", "--chat-template", str(tmp_path / "t.jinja"), "--limit", "7"],
        *["--chat-template-kwargs", '{"enable_thinking": false}'],
        *["--min-tokens", "5", "--max-tokens", "9", "--shuffle"],
    ).selection
    assert found.chat is True
    assert found.template == "{{ messages }}"
    assert found.template_name == str(tmp_path / "t.jinja")
    assert found.template_kwargs == {"enable_thinking": False}
    assert (found.limit, found.min_tokens, found.max_tokens, found.shuffled) == (7, 5, 9, True)
    assert settings_of(bench, "--no-chat").selection.chat is False


def test_shuffle_is_by_the_seed_also_by_a_random_one(bench):
    from mtpstats.prompts import builtin, shuffled

    settings_of(bench, "--shuffle")
    assert bench[-1][1] == shuffled(builtin(), 0)
    seed = settings_of(bench, "--shuffle", "-s", "-1").sampling.seed
    assert seed >= 0
    assert bench[-1][1] == shuffled(builtin(), seed)


# ---- errors: one plain line, the right exit code


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["no command", "mtpstats --help"]),
        (["nonsense"], ["nonsense"]),
        (["bench", "--nonsense"], ["--nonsense", "mtpstats bench --help"]),
        (["bench", "-x"], ["-x"]),
        (["bench", "extra"], ["extra"]),
        (["bench", "-n"], ["-n", "argument"]),
        (["bench", "-n", "many"], ["many"]),
        (["bench", "-n", "-2"], ["-2"]),
        (["bench", "-n", "99999999999999999999"], ["99999999999999999999"]),
        (["bench", "-fa", "maybe"], ["maybe", "on"]),
        (["bench", "-ctk", "q9_9"], ["q9_9", "q8_0"]),
        (["bench", "-ngl", "9999999999"], ["9999999999"]),
        (["bench", "--limit", "0"], ["0", "range"]),
        (["bench", "--min-tokens", "3", "--max-tokens", "2"], ["--max-tokens", "--min-tokens"]),
        (["bench", "--chat-template", "no/such.jinja"], ["no/such.jinja", "No such file"]),
        (["bench", "--no-chat", "--chat-template", "x"], ["--no-chat", "--chat-template"]),
        (["bench", "--chat-template-kwargs", "{"], ["JSON object"]),
        (["bench", "--chat-template-kwargs", "[1]"], ["JSON object"]),
        (["bench", "--prompts", "no/such"], ["no/such", "No such file"]),
        (["bench", "-ngl", "some"], ["some"]),
        (["bench", "-b", "0"], ["0"]),
        (["bench", "-np", "0"], ["-np", "1 to 256"]),
        (["bench", "-md", ""], ["-md", "empty"]),
        (["bench", "--top-k", "-3000000000"], ["-3000000000"]),
        (["bench", "-dev", "a,,b"], ["-dev", "empty name"]),
        (["bench", "-sm", "diagonal"], ["diagonal", "layer"]),
        (["bench", "-ts", "1,two"], ["'two' is not a number"]),
        (["bench", "-ts", "1,-2"], ["-2", "0 or more"]),
        (["bench", "-ts", ""], ["-ts"]),
        (["bench", "-mg", "-1"], ["-1"]),
        (["bench", "-ot", "exps"], ["exps", "PATTERN=TYPE"]),
        (["bench", "-ot", "=CPU"], ["PATTERN=TYPE"]),
        (["bench", "--rpc", "localhost"], ["localhost", "HOST:PORT"]),
        (["bench", "--rpc", "a:1,b:70000"], ["b:70000", "HOST:PORT"]),
        (["bench", "--temp", "nan"], ["nan"]),
        (["bench", "--temp", "inf"], ["inf"]),
        (["bench", "--temp", "-1"], ["-1"]),
        (["bench", "--top-p", "1.5"], ["1.5"]),
        (["bench", "--spec-draft-p-min", "NaN"], ["NaN"]),
        (["bench", "--spec-draft-n-max", "0"], ["0"]),
        (["bench", "--spec-draft-n-max", "2", "--spec-draft-n-min", "3"], ["n_min", "n_max"]),
        (["bench", "-s", "-2"], ["-2"]),
        (["bench", "-p", ""], ["empty"]),
        (["bench", "-f", "no/such.txt"], ["no/such.txt", "No such file"]),
        (["bench", "--prompts", "no/such.jsonl"], ["no/such.jsonl", "No such file"]),
        (["bench", "--prompts", "x.yaml"], ["x.yaml"]),
        (["bench", "-o", "no/such/dir/r.json"], ["no/such/dir/r.json", "No such file"]),
        (["bench", "-o", "."], ["is a directory"]),
        (["bench", "-o", "-"], ["--json"]),
        (["bench", "-o", ""], ["-o", "empty"]),
        (["bench", "-m", ""], ["-m", "empty"]),
        (["bench", "-f", ""], ["-f", "empty"]),
        (["bench", "--prompts", ""], ["--prompts", "empty"]),
        (["info", "-m", ""], ["-m", "empty"]),
        (["bench", "-n", "1\x1b[2J"], [r"\x1b"]),
        (["info", "--baseline"], ["--baseline"]),
        (["info", "-md", "h.gguf"], ["-m must name"]),
    ],
)
def test_bad_usage_is_one_line_and_2(args, words, capsys, bench):
    line = error_line(capsys, *args, code=2)
    for word in words:
        assert word in line
    assert bench == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MtpStatsError("what\nwhere\x07"), 1),
        (LibraryNotFound("no libllama"), 1),
        (InputError("bad file"), 2),
        (CheckFailed("slower"), 3),
        (Interrupted("stopped"), 130),
        (KeyboardInterrupt(), 130),
        (MemoryError(), 1),
        (OSError(28, "No space left on device"), 1),
        (TypeError("a bug"), 1),
    ],
)
def test_exceptions_become_exit_codes(error, code, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(run, "bench", fail)
    line = error_line(capsys, "bench", code=code)
    assert "Traceback" not in line
    if isinstance(error, TypeError):
        assert "unexpected TypeError: a bug (MTPSTATS_TRACEBACK=1 shows where)" in line
    if "what" in str(error):
        assert line == "mtpstats: error: what where\\x07\n"


def test_a_line_stays_readable_whatever_it_quotes(monkeypatch, capsys):
    line = error_line(capsys, "bench", "-n", "\x1b" + "9" * 100_000 + "!", code=2)
    assert len(line) < 2100
    assert line.endswith("is not a whole number. (see mtpstats bench --help)\n")


def test_traceback_on_request(monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise InputError("bad file")

    monkeypatch.setattr(run, "bench", fail)
    monkeypatch.setenv("MTPSTATS_TRACEBACK", "1")
    assert cli.main(["bench"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("mtpstats: error: bad file\n")


def test_reader_that_went_away_is_no_error(monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise BrokenPipeError

    monkeypatch.setattr(run, "bench", fail)
    monkeypatch.setattr(cli.streams, "discard", lambda: None)
    assert cli.main(["bench"]) == 0
    assert capsys.readouterr().err == ""


# ---- output


def test_json_goes_to_standard_output(bench, capsys):
    assert cli.main(["bench", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == FAKE


def test_file_and_table(bench, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("mtpstats.report.text.render", lambda result: f"table of {result}\n")
    path = tmp_path / "r.json"
    assert cli.main(["bench", "-o", str(path)]) == 0
    assert json.loads(path.read_text()) == FAKE
    assert capsys.readouterr().out == f"table of {FAKE}\n"


def test_table_survives_a_file_that_cannot_be_written(bench, capsys, monkeypatch):
    monkeypatch.setattr("mtpstats.report.text.render", lambda result: "table\n")
    assert cli.main(["bench", "-o", "/dev/full"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "table\n"
    assert captured.err == "mtpstats: error: /dev/full: not written: No space left on device\n"


def test_unwritable_output_is_noticed_before_the_run(bench, capsys):
    assert "/proc/r.json" in error_line(capsys, "bench", "-o", "/proc/r.json", code=2)
    assert bench == []


def test_interrupted_run_shows_and_writes_what_was_finished(monkeypatch, capsys, tmp_path):
    partial = {"prompts": [{}], "settings": {"n_prompts": 12}}

    def stop(*args, **kwargs):
        raise BenchStopped(partial)

    monkeypatch.setattr(run, "bench", stop)
    path = tmp_path / "r.json"
    assert cli.main(["bench", "--json", "-o", str(path)]) == 130
    captured = capsys.readouterr()
    assert json.loads(captured.out) == partial == json.loads(path.read_text())
    assert captured.err == "mtpstats: error: interrupted: 1 of 12 prompts were finished\n"


def test_interrupted_before_anything_was_finished(monkeypatch, capsys, tmp_path):
    def stop(*args, **kwargs):
        raise BenchStopped({"prompts": [], "settings": {"n_prompts": 12}})

    monkeypatch.setattr(run, "bench", stop)
    path = tmp_path / "r.json"
    assert "0 of 12" in error_line(capsys, "bench", "-o", str(path), code=130)
    assert not path.exists()


RESCUE = """
import sys
from mtpstats import cli, run
from mtpstats.report import text
text.render = lambda result: f"table of {len(result['prompts'])}\\n"
def fake(settings, prompts, *, on_abort, **hooks):
    on_abort(sys.argv[1], eval(sys.argv[2]))
run.bench = fake
cli.main(["bench", *sys.argv[3:]])
"""
SOME = {"prompts": [{}, {}], "settings": {"n_prompts": 12}}


def gave_up(why, finished, *args):
    """Return exit code, standard output and the last line on standard error."""
    done = subprocess.run(
        [sys.executable, "-c", RESCUE, why, repr(finished), *args],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stderr.count("\n") == 1
    return done.returncode, done.stdout, done.stderr


def test_what_was_finished_survives_an_abort_of_llama_cpp(tmp_path):
    path = tmp_path / "r.json"
    code, out, err = gave_up("/src/ggml/ggml.c:12: GGML_ASSERT(x) failed", SOME, "-o", str(path))
    assert (code, out) == (1, "table of 2\n")
    assert json.loads(path.read_text()) == SOME
    assert err.startswith("mtpstats: error: llama.cpp gave up (ggml.c:12: GGML_ASSERT(x) failed): ")
    assert err.endswith(f"; 2 of 12 prompts were finished and are in {path}\n")


@pytest.mark.parametrize(
    ("finished", "said"),
    [
        (None, "nothing was written"),
        ({**SOME, "prompts": []}, "0 of 12 prompts were finished, nothing was written"),
    ],
)
def test_an_abort_before_anything_was_finished(finished, said, tmp_path):
    path = tmp_path / "r.json"
    code, out, err = gave_up("no", finished, "-o", str(path))
    assert (code, out) == (1, "")
    assert err.endswith(f"; {said}\n")
    assert not path.exists()


def test_an_abort_and_a_file_that_cannot_be_written():
    code, out, err = gave_up("no", SOME, "-o", "/dev/full")
    assert (code, out) == (1, "table of 2\n")
    assert err.endswith("lost: /dev/full: not written: No space left on device\n")


def test_a_server_that_died_is_not_taken_for_a_damaged_model():
    code, _, err = gave_up("rpc.cpp:1: Remote RPC server crashed or returned ...", SOME)
    assert code == 1
    assert "a server of --rpc ended" in err
    assert err.endswith("; 2 of 12 prompts were finished\n")


def test_closed_standard_output_needs_a_file(monkeypatch, capsys, bench, tmp_path):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["bench"]) == 2
    assert "standard output is closed" in capsys.readouterr().err
    monkeypatch.setattr("mtpstats.report.text.render", lambda result: "table\n")
    assert cli.main(["bench", "-o", str(tmp_path / "r.json")]) == 0


def test_text_outside_the_terminals_encoding_is_escaped(monkeypatch, bench, tmp_path):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr("mtpstats.report.text.render", lambda result: "é\n")
    assert cli.main(["bench"]) == 0
    assert raw.getvalue() == b"\\xe9\n"


def test_statistics_on_the_way_go_to_standard_error(monkeypatch, capsys):
    from mtpstats.stats import Snapshot

    def fake(settings, prompts, *, on_stats, **hooks):
        on_stats(Snapshot())
        return FAKE

    monkeypatch.setattr(run, "bench", fake)
    assert cli.main(["bench", "--json", "--stats-every", "4"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("mtpstats: 0 verifications")
    assert json.loads(captured.out) == FAKE


def test_stream_and_log_go_to_standard_error_without_control_characters(monkeypatch, capsys):
    def fake(settings, prompts, *, on_text, on_log, **hooks):
        prompt = Prompt("a", None, "one\ntwo\x1b]0;x\x07")
        on_log("info", "loading\x1b[2J")
        for piece in (b"caf\xc3", b"\xa9\x1b[31m", b" \xff", b""):
            on_text(prompt, piece)
        on_text(Prompt("b", None, "three"), b"\n")
        return FAKE

    monkeypatch.setattr(run, "bench", fake)
    assert cli.main(["bench", "--json", "--stream", "-v"]) == 0
    captured = capsys.readouterr()
    assert captured.err == (
        "llama.cpp info: loading\\x1b[2J\n"
        "--- a\none\ntwo\\x1b]0;x\\x07café\\x1b[31m �\n"
        "--- b\nthree\n\n"
    )
    assert json.loads(captured.out) == FAKE


def test_several_texts_at_once_are_shown_one_after_the_other():
    shown = []
    stream = live.TextStream(shown.append)
    a, b, c = (Prompt(name, None, f"{name}:") for name in "abc")
    for prompt, piece in [(a, b"1"), (b, b"1"), (c, b"\xc3"), (a, b"2"), (b, b"2"), (b, b"")]:
        stream(prompt, piece)
    # The first is live, also when another has ended.
    assert "".join(shown) == "--- a\na:12"
    stream(c, b"\xa9")
    stream(a, b"")
    # Then b, which is whole, and what there is of c, live from now on.
    assert "".join(shown) == "--- a\na:12\n--- b\nb:12\n--- c\nc:\u00e9"
    stream(c, b"2\xc3")
    assert shown[-1] == "2"
    stream.close()
    assert "".join(shown).endswith("\u00e92\ufffd\n")


def test_a_stream_that_is_closed_early_shows_what_was_held_back():
    shown = []
    stream = live.TextStream(shown.append)
    stream(Prompt("a", None, "a:"), b"1")
    stream(Prompt("b", None, "b:"), b"2")
    stream.close()
    assert "".join(shown) == "--- a\na:1\n--- b\nb:2\n"


def test_without_terminal_nobody_asks_for_progress(bench):
    settings_of(bench)
    hooks = bench[-1][2]
    assert hooks["on_progress"] is None
    assert hooks["on_text"] is None
    assert hooks["on_stats"] is None
    assert hooks["on_log"] is None


# ---- progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(times_and_events):
    """Return what a progress line wrote for (time, event) pairs."""
    now = [0.0]
    terminal = Terminal()
    line = live.ProgressLine(terminal, lambda: now[0])
    for at, event in times_and_events:
        now[0] = at
        line(event)
    return terminal.getvalue(), line


def test_progress_is_silent_for_two_seconds():
    text, _ = shown([(t / 10, Progress("prompt 1/2", t, 100, "tokens")) for t in range(20)])
    assert text == ""


def test_progress_shows_share_rate_and_time_left():
    events = [(0, Progress("prompt 1/2", 0, 400, "tokens"))]
    events.append((4, Progress("prompt 2/2", 100, 400, "tokens")))
    text, _ = shown(events)
    assert text == "\rprompt 2/2  25 %  25 tokens/s  0:12 left"


def test_progress_without_a_known_end_shows_the_rate():
    text, _ = shown([(0, Progress("prompt 1/1", 0, None, "tokens")),
                     (4, Progress("prompt 1/1", 10, None, "tokens"))])  # fmt: skip
    assert text == "\rprompt 1/1  2.5 tokens/s"


def test_a_stage_without_length_is_shown_at_once_and_cleared():
    text, line = shown([(0, Progress("warming up"))])
    assert text == "\rwarming up ..."
    line.clear()
    assert line._stream.getvalue() == text + "\r" + " " * len("warming up ...") + "\r"


def test_a_shorter_line_leaves_nothing_of_a_longer_one():
    text, _ = shown([(0, Progress("a long stage")), (1, Progress("b"))])
    assert text.split("\r")[-1] == "b ...".ljust(len("a long stage ..."))


def test_a_file_is_no_terminal():
    stream = io.StringIO()
    line = live.ProgressLine(stream)
    assert not line.enabled
    line(Progress("warming up"))
    line.clear()
    assert stream.getvalue() == ""
    assert not live.ProgressLine(None).enabled


# ---- options


def test_groups_receive_exactly_their_options():
    @click.command(cls=options.Command)
    @options.takes(drafting=options.DraftOptions, output=options.JsonOption)
    def command(drafting, output):
        click.echo(f"{drafting} {output}")

    from click.testing import CliRunner

    done = CliRunner().invoke(command, ["--json", "--spec-draft-n-max", "3"])
    assert done.output == "DraftOptions(n_max=3, n_min=0, p_min=0.0) JsonOption(json=True)\n"
    unknown = CliRunner().invoke(command, ["--temp", "1"])
    assert unknown.exit_code == 2


# ---- info


@pytest.fixture
def no_build(monkeypatch, tmp_path):
    monkeypatch.delenv("MTPSTATS_LIBLLAMA", raising=False)
    monkeypatch.setenv("MTPSTATS_BUILDS", str(tmp_path / "builds"))
    return tmp_path / "builds"


def test_info_without_a_build_says_how_to_make_one(no_build, capsys):
    assert cli.main(["info"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert f"builds in {no_build}" in captured.out
    assert "./build_llama.sh" in captured.out
    assert cli.main(["info", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["library"] is None
    assert record["builds"] == record["devices"] == []


def test_info_text_names_what_is_used_and_why():
    from mtpstats.cli.info import render

    build = {
        "key": "k1", "source": "llama-x", "source_version": "1", "backend": "cuda",
        "flags": ["rpc", "-DX=1"], "built": "2026-01-02T03:04:05Z",
    }  # fmt: skip
    record = {
        "mtpstats": "9.9", "python": "3.12.0", "numpy": "2.0", "kernel": "avx2",
        "builds_directory": "/b", "problem": None,
        "library": {"version": "0.5", "path": "/b/k1/lib/libllama.so", "why": "the only build"},
        "builds": [
            {**build, "prefix": "/b/k1", "used": True},
            {**build, "key": "k2\x1b", "prefix": "/b/k2", "used": False, "flags": []},
        ],
        "devices": [
            {"name": "CUDA0", "description": "H200", "type": "gpu", "backend": "CUDA",
             "memory_free": 3 << 30, "memory_total": 4 << 30},
            {"name": "CPU", "description": "EPYC", "type": "cpu", "backend": "CPU",
             "memory_free": 0, "memory_total": 0},
        ],
        "model": {
            "file": "m.gguf", "size": 7_014_368, "sha256": None, "architecture": "qwen35",
            "parameters": 3_428_496, "vocabulary": 4096, "nextn_blocks": 1, "quantisation": "F16",
            "layers": 4, "context": 512, "embedding": 192, "description": "", "memory": "hybrid",
            "drive": {"possible": True, "heads": "single", "rollback": "any", "reason": None},
        },
    }  # fmt: skip
    expected = """\
mtpstats     9.9
Python       3.12.0, NumPy 2.0
kernel       avx2
libllama     0.5 (the only build)
             /b/k1/lib/libllama.so

builds in /b (* = used)
  * k1: llama-x, cuda, rpc -DX=1, built 2026-01-02T03:04:05Z
    k2\\x1b: llama-x, cuda, built 2026-01-02T03:04:05Z

devices
    CUDA0 (CUDA): H200, 3.0 of 4.0 GiB free
    CPU (CPU): EPYC

model        m.gguf
size         7.0 MB
architecture qwen35
parameters   3,428,496
quantisation F16
layers       4 and 1 NextN (MTP)
vocabulary   4,096
context      512
memory       hybrid
MTP          can be driven: one head, which drafts deeper from its own hidden state;
             rejected tokens are simply removed
"""
    assert render(record) == expected
    record["model"]["drive"] = {
        "possible": False, "heads": None, "rollback": None, "reason": "it has no NextN block"
    }  # fmt: skip
    assert "MTP          cannot be driven: it has no NextN block\n" in render(record)


# ---- as a process


def process(*args, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "mtpstats", *args],
        stderr=subprocess.PIPE,
        check=False,
        timeout=60,
        **kwargs,
    )


def test_head_gets_its_line_and_nobody_complains():
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = process("bench", "--help", stdout=writing)
    finally:
        os.close(writing)
    assert done.returncode == 0
    assert done.stderr == b""


def test_full_disk_under_standard_output_is_one_line():
    with open("/dev/full", "wb") as full:
        done = process("bench", "--help", stdout=full)
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1
    assert b"output: No space left on device" in done.stderr


CTRL_C = "import signal; signal.raise_signal(signal.SIGINT)"


@pytest.mark.parametrize(
    ("when", "code"),
    [
        # while the command line is still being imported
        (f"sys.modules.pop('click', 0); sys.addaudithook(lambda event, args: exec({CTRL_C!r}) "
         "if event == 'import' and args[0] == 'click' else None)", 130),
        # in a dataclass in the making: CPython would die of SIGINT at its end
        (f"from mtpstats import cli; cli.cli.make_context = lambda *args: exec({CTRL_C!r})", 130),
        # in the error's own line
        ("from mtpstats import cli; cli.cli.make_context = None; "
         f"cli._failed = lambda *args: exec({CTRL_C!r})", 130),
        # when everything is done
        (f"import atexit; atexit.register(lambda: exec({CTRL_C!r}))", 0),
    ],
)  # fmt: skip
def test_ctrl_c_at_odd_moments_is_at_most_one_line(when, code, tmp_path):
    (tmp_path / "driver.py").write_text(
        f"import sys; sys.argv[1:] = ['--version']\n{when}\n"
        "from mtpstats.__main__ import run\nrun()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "driver"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(mtpstats.__file__).parents[1])},
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code
    assert done.stderr == (b"mtpstats: error: interrupted\n" if code else b"")


def test_closed_streams_do_not_matter():
    closed = 'exec "$0" -m mtpstats --version <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", closed, sys.executable], check=False, timeout=60)
    assert done.returncode == 0
