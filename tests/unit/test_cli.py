"""The command line without libllama: parsing, errors, exit codes."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest
from commands import error_line, settings_of

import mtpstats
from mtpstats import cli, run
from mtpstats.cli import options
from mtpstats.errors import (
    CheckFailed,
    InputError,
    Interrupted,
    LibraryNotFound,
    MtpStatsError,
)

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
