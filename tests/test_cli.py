"""The command line: exit codes, what goes to which stream, and the numbers of the report."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autopar import Cluster, Plan
from autopar.base.errors import InputError
from autopar.base.units import format_bytes, format_seconds
from autopar.cli import main
from autopar.cli.wording import in_commands
from autopar.cost_models.presets import PRESET_NAMES
from autopar.planning.setting import TIME_LIMIT_S
from autopar.report.progress import show_progress

MODELS = """
import torch
from torch import nn

DEVICES = []

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x), y)

def net():
    DEVICES.append(torch.empty(0).device.type)
    return Net(), (torch.zeros(8, 16), torch.zeros(8, 16))

def needs_values():
    DEVICES.append(torch.ones(1).mul(2).item())
    return net()

def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )
    ids = torch.zeros(8, 8, dtype=torch.long)
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}

def no_loss():
    return nn.Linear(16, 4), torch.zeros(8, 16)

def broken():
    raise RuntimeError("no weights here")

def odd():
    return Net()

number = 3
"""
COMMANDS = (
    "plan", "estimate-memory", "show", "explain", "diff", "report", "trace", "figure", "profile",
    "clusters", "cluster", "schema", "completion",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    (path / "cli_models.py").write_text(MODELS)
    (path / "cli_imports.py").write_text("import cli_missing\n")
    return path


@pytest.fixture(autouse=True)
def _in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])


@pytest.fixture(scope="module")
def llama_plan(folder: Path) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it, from the folder of the model."""
    command = [
        sys.executable, "-m", "autopar", "plan", "cli_models:llama", "--cluster", "h100-sxm:2x2",
        "--precision", "bf16", "-o", "llama.json", "--report", "llama.html",
    ]  # fmt: skip
    environment = {name: text for name, text in os.environ.items() if name != "COLUMNS"}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, env=environment
    )


def commanded(text: str) -> str:
    """A report as the command line has it, where it ends with its two commands."""
    text = text.replace("plan.report('full')", "autopar show llama.json --full")
    return text.replace("plan.explain('NAME')", "autopar explain llama.json NAME")


def test_a_llama_on_the_meta_device_is_planned(
    llama_plan: subprocess.CompletedProcess[str], folder: Path
) -> None:
    assert llama_plan.returncode == 0, llama_plan.stderr
    plan = Plan.from_json(folder / "llama.json")
    assert llama_plan.stdout == f"{commanded(str(plan))}\n"
    assert plan.cluster == Cluster.preset("h100-sxm", nodes=2, devices_per_node=2)
    assert "search" in llama_plan.stderr
    assert "Traceback" not in llama_plan.stderr
    assert "\x1b" not in llama_plan.stdout + llama_plan.stderr
    page = (folder / "llama.html").read_text()
    assert str(plan).splitlines()[0] in page
    assert "The search: " in page  # which a plan that was read from its file does not have


def test_plans_are_read_back(
    llama_plan: subprocess.CompletedProcess[str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = Plan.from_json(folder / "llama.json")
    for arguments, output in (
        (["show", "llama.json"], commanded(str(plan))),
        (["show", "llama.json", "--full"], plan.report("full")),
        (["diff", "llama.json", "llama.json"], "the plans are equal"),
        (["report", "llama.json", "-o", "r.html"], ""),
        (["trace", "llama.json", "-o", "t.json"], ""),
    ):
        assert main(arguments) == 0
        assert capsys.readouterr() == (output + "\n" * bool(output), "")
    (folder / "llama_on_two_nodes_of_two_devices.json").write_text(plan.to_json())
    assert main(["show", "llama_on_two_nodes_of_two_devices.json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) <= 40
    assert str(plan).splitlines()[0] in (folder / "r.html").read_text()
    slices = [e for e in json.loads((folder / "t.json").read_text())["traceEvents"] if "dur" in e]
    assert slices[0]["name"] == "0F0"
    assert slices[0]["dur"] >= plan.prediction.forward_s * 1e6  # with the communication in it
    end_us = max(each["ts"] + each["dur"] for each in slices)
    assert end_us == pytest.approx(plan.prediction.step_time_s * 1e6, rel=1e-3)


def test_factories_run_under_the_meta_device_where_they_allow_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import cli_models  # type: ignore[import-not-found]

    for factory, seen in (("net", ["meta"]), ("needs_values", [2.0, "cpu"])):
        cli_models.DEVICES.clear()
        assert main(["plan", f"cli_models:{factory}", "--cluster", "cpu:1x2", "--quiet"]) == 0
        assert seen == cli_models.DEVICES
        assert capsys.readouterr().err == ""


def test_options_reach_the_plan(folder: Path) -> None:
    options = ["--mesh", "dp=2,tp", "--num-microbatches", "2", "--recompute", "none", "--quiet"]
    arguments = ["plan", "cli_models:net", "--cluster", "cpu:1x4", "-o", "net.json", *options]
    assert main(arguments) == 0
    plan = Plan.from_json(folder / "net.json")
    assert plan.mesh.axis_names == ("dp", "tp")
    assert plan.mesh.axis_sizes == (2, 2)
    assert plan.schedule.num_microbatches == 2


def test_what_is_not_asked_for_is_left_to_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def note(*_: object, **options: object) -> None:
        asked.update(options)
        raise InputError("noted")

    monkeypatch.setattr("autopar.api.plan", note)
    for given, offload, recompute in (
        ([], None, None),
        (["--offload", "--recompute", "8589934592"], True, 8 << 30),
        (["--no-offload", "--recompute", "0.5"], False, 0.5),
        (["--recompute", "8GiB"], None, "8GiB"),
    ):
        assert main(["plan", "cli_models:net", "--cluster", "cpu", *given]) == 1
        assert (asked["offload"], asked["recompute"]) == (offload, recompute)
        assert type(asked["recompute"]) is type(recompute)


def test_memory_of_strategies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate-memory", "cli_models:net", "--cluster", "a100-80:1x2", "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "under the plan, counted" in text
    assert "optimizer state" in text
    assert re.search(r"estimated op by op.*\n.*\n +this plan +x=2 +[\d.]+ KiB +yes\n", text)
    assert "DDP" in text
    assert "Estimated as if all were kept at once" in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["plan", "cli_model:net", "--cluster", "cpu"],
            "'cli_model:net': there is no module cli_model in the current folder or the "
            "environment; write MODULE:FACTORY, such as models:llama for llama() in models.py; did "
            "you mean 'cli_models'?",
        ),
        (["plan", "cli_models.x:net", "--cluster", "cpu"], "there is no module cli_models.x in"),
        (
            ["plan", "cli_imports:net", "--cluster", "cpu"],
            "cannot import cli_imports: ModuleNotFoundError: No",
        ),
        (["plan", "cli_models:nott", "--cluster", "cpu"], "has no 'nott'"),
        (["plan", "cli_models:number", "--cluster", "cpu"], "write a function"),
        (["plan", "cli_models:odd", "--cluster", "cpu"], "return model, "),
        (["plan", "cli_models:broken", "--cluster", "cpu"], "RuntimeError: no weights here ("),
        (["plan", "cli_models:net", "--cluster", "h1000"], "there is no preset 'h1000'"),
        (["plan", "cli_models:net", "--cluster", "h1000"], "autopar cluster h100-sxm > cluster"),
        (["cluster", "nowhere.json"], "cannot read 'nowhere.json'"),
        (["show", "nowhere.json"], "cannot read 'nowhere.json'"),
        (
            ["show", "cli_models.py"],
            "autopar: 'cli_models.py': the plan is refused: it is not JSON",
        ),
    ],
)
def test_errors_are_explained_without_a_traceback(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("autopar: ")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["plan"], "MODULE:FACTORY"),
        (["shwo"], "shwo"),
        (["plan", "a:b"], "--cluster"),
        (["plan", "a:b", "--cluster", "cpu", "--mesh", "dp=x"], "'dp=x'; write each axis once"),
        (["plan", "a:b", "--cluster", "cpu", "--num-stages", "x"], "'x'"),
        (["plan", "a:b", "--cluster", "h100-sxm:8"], "size is '8'; write nodes x devices a node"),
        (["cluster", "h100-sxm:8"], "h100-sxm:8x8"),
        (["cluster", "cpu:0x4"], "size is '0x4'; write nodes x devices a node: cpu:8x8"),
        (["plan", "models", "--cluster", "cpu"], "'models' is not a factory; write MODULE:FACTORY"),
        (
            ["profile", "a:b", "--devices", "0"],
            "'0' is neither a number of devices nor a device; write",
        ),
        (
            ["profile", "a:b", "--devices", "2", "--num-steps", "-1"],
            "'-1' is not a number of steps",
        ),
        (["completion", "tcsh"], "choose from 'bash', 'fish', 'zsh'"),
        (["plan", "a:b", "--cluster", "cpu", "-o", "no/p.json"], "'no/p.json' is in 'no', not a"),
        (["report", "p.json", "-o", "/"], "'/' is a folder; write the name of a file"),
    ],
)
def test_a_wrong_command_line_exits_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage: autopar" in err
    assert message in err


def test_only_commands_that_search_or_train_import_torch(
    llama_plan: subprocess.CompletedProcess[str], folder: Path
) -> None:
    lines = [
        ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS),
        ["show", "llama.json"], ["show", "llama.json", "--full"], ["diff", *["llama.json"] * 2],
        ["explain", "llama.json", "model.layers.1"], ["report", "llama.json", "-o", "r.html"],
        ["trace", "llama.json", "-o", "t.json"], ["figure", "llama.json", "step", "-o", "s.svg"],
        ["clusters"], ["cluster", "a100-80:2x4"], ["schema"], ["completion", "bash"],
    ]  # fmt: skip
    code = (
        "import contextlib, io, sys\n"
        "from autopar.cli import main\n"
        f"for line in {lines}:\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        main(line)\n"
        "    assert 'torch' not in sys.modules, line\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=folder, timeout=120, check=True)


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        text = capsys.readouterr().out
        assert "example" in text or arguments == ["--version"]
        assert "--time-limit" not in text or f"({TIME_LIMIT_S:g})" in text


def test_help_and_tables_fit_80_columns_and_have_no_escape_codes(
    llama_plan: subprocess.CompletedProcess[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in (["--help"], *([name, "--help"] for name in COMMANDS)):
        with pytest.raises(SystemExit):
            main(arguments)
    for arguments in (
        ["clusters"],
        ["show", "llama.json"],
        ["show", "llama.json", "--full"],
        ["explain", "llama.json", "model.layers.1"],
        ["diff", "llama.json", "llama.json"],
    ):
        assert main(arguments) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    blocks = text.partition("strategy by block")[2].partition("memory of a device")[0]
    assert "..." not in blocks
    first = [line.split()[0] for line in text.splitlines() if line.startswith("  ")]
    assert set(PRESET_NAMES) <= set(first)  # not broken


@pytest.mark.parametrize(("columns", "width"), [(None, 100), ("80", 80), ("300", 100), ("9", 40)])
def test_a_report_in_a_pipe_is_as_wide_as_reports_are_or_as_columns_says(
    columns: str | None,
    width: int,
    llama_plan: subprocess.CompletedProcess[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert main(["show", "llama.json", "--full"]) == 0
    widest = max(map(len, capsys.readouterr().out.splitlines()))
    assert 0.9 * width < widest <= width


def test_advice_names_commands_and_options(
    llama_plan: subprocess.CompletedProcess[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the calls of Python, but for pins, which are constraints of Python only."""
    for arguments, words in (
        (["show", "llama.json"], "autopar explain llama.json NAME"),
        (["explain", "llama.json", "model.layers.1"], "in Python, autopar.plan(..., constraints="),
        (["explain", "llama.json", "model.layers.1"], "then autopar diff llama.json OTHER."),
    ):
        assert main(arguments) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert words in out
        assert not re.search(r"plan\.\w+\(", out)
    to_plan = ["plan", "cli_models:net", "--cluster", "cpu:1x4", "--quiet"]
    for arguments, words in (
        (["explain", "llama.json", "layers"], "autopar show llama.json lists blocks"),
        (["show", "cli_models.py"], "autopar plan makes a new one"),
        ([*to_plan, "--num-stages", "3"], "choose --num-stages so that it does"),
        ([*to_plan, "--time-limit", "-1"], "such as --time-limit 60"),
        ([*to_plan, "--recompute", "foo"], "--recompute is 'foo'; write none, full, or what"),
        ([*to_plan, "--mesh", "dp=5"], "autopar: --mesh dp=5 has 5 devices, the cluster "),
        (["plan", "cli_models:no_loss", "--cluster", "cpu"], "whose forward returns its loss, or"),
    ):
        assert main(arguments) == 1
        err = capsys.readouterr().err
        assert words in err
        assert not re.search(r"(?<!mesh d)\w=|num_|\w\(|None", err)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num_microbatches must divide it", "--num-microbatches must divide it"),
        ("the mesh or its schedule", "the mesh or its schedule"),
        ("use num_microbatches=4", "use --num-microbatches 4"),
        ("write mesh={'dp': 2, 'tp': None}", "write --mesh dp=2,tp"),
        ("offload=True or offload=False", "--offload or --no-offload"),
        ("recompute='8GiB', or 1e3", "--recompute 8GiB, or 1e3"),
        ("leave schedule= out", "leave --schedule out"),
        ("recompute is nan; a fraction", "--recompute is nan; a fraction"),
        (
            "mesh {'dp': 3} has 3 devices, or leave some out as None",
            "--mesh dp=3 has 3 devices, or leave some out",
        ),
        ("mesh is {'dp': 0}; give", "--mesh dp=0; give"),
        ("schedules are many", "schedules are many"),
        ("mesh axes of the plan", "mesh axes of the plan"),
        ("num_devices=4, plan=x", "num_devices=4, plan=x"),
        ("constraints=[Pin('a')], schedule='1f1b'", "constraints=[Pin('a')], schedule='1f1b'"),
    ],
)
def test_arguments_in_advice_become_options(text: str, expected: str) -> None:
    options = {"num_microbatches", "mesh", "offload", "recompute", "schedule"}
    assert in_commands(text, options) == expected


def test_figures_are_written(
    llama_plan: subprocess.CompletedProcess[str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = Plan.from_json(folder / "llama.json")
    for name, start in (("f.svg", b"<?xml"), ("f.pdf", b"%PDF"), ("f.png", b"\x89PNG")):
        assert main(["figure", "llama.json", "memory", "-o", name]) == 0
        assert (folder / name).read_bytes().startswith(start)
    assert capsys.readouterr() == ("", "")
    for arguments, message in (
        (["memry", "-o", "f.svg"], "did you mean 'memory'"),
        (["memory", "-o", "f.txt"], "'f.txt' is not a picture file; write -o memory.svg"),
    ):
        assert main(["figure", "llama.json", *arguments]) == 1
        assert message in capsys.readouterr().err
    assert plan.figure("memory")


def test_steps_are_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["profile", "cli_models:net", "--devices", "2", "--num-steps", "2"]
    assert main([*command, "--trace", "steps.json", "-o", "numbers.json"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("2 measured steps: ")
    assert "predicted" in text
    numbers = json.loads((folder / "numbers.json").read_text())
    assert len(numbers["step_times_s"]) == 2
    rows = {row["name"]: (format_bytes, row["measured_bytes"]) for row in numbers["memory"]}
    rows |= {row["name"]: (format_seconds, row["measured_s"] or []) for row in numbers["phases"]}
    assert {"exposed communication", "tensors", "process grows by", "forward"} <= set(rows)
    for name, (as_text, values) in rows.items():
        assert re.search(r"\s+".join([re.escape(name), ".*", *map(as_text, values)]), text)
    assert json.loads((folder / "steps.json").read_text())["traceEvents"]


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_completion_knows_all_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "h100-sxm" in script
    assert "timeline" in script
    if shell == "fish":
        assert all(f" -a {name} " in script for name in COMMANDS)
        return
    code = f"{script}COMP_WORDS=(autopar '')\nCOMP_CWORD=1\n_autopar\necho ${{COMPREPLY[@]}}"
    done = subprocess.run(
        ["bash", "-c", code if shell == "bash" else code.partition("bashcompinit\n")[2]],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert {*COMMANDS, "--version"} <= set(done.stdout.split())


@pytest.mark.parametrize("no_color", [False, True])
def test_progress_has_no_escape_codes_without_a_terminal_or_with_no_color(
    no_color: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with show_progress(True) as say:
        say("search on mesh x=4")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r" +0\.\d s  search on mesh x=4\n", err)


def test_clusters_and_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clusters"]) == 0
    assert "h100-sxm" in capsys.readouterr().out
    assert main(["cluster", "a100-80:2x4"]) == 0
    text = capsys.readouterr().out
    assert Cluster.from_json(text) == Cluster.preset("a100-80", nodes=2, devices_per_node=4)
    assert main(["schema"]) == 0
    assert "Plan" in json.loads(capsys.readouterr().out)["$defs"]
