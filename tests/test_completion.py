"""Completion scripts, run by the shells that they are for."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
from pathlib import Path
from shlex import quote as quoted

import pytest

from autopar.base.completion import completion_script

WORDS = {"cluster": ("cpu", "h100-sxm"), "figure": ("memory", "step")}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="autopar")
    made.add_argument("--version", action="version", version="1")
    commands = made.add_subparsers()
    plan = commands.add_parser("plan")
    plan.add_argument("factory")
    plan.add_argument("--cluster")
    plan.add_argument("--precision", choices=("bf16", "fp16"))
    plan.add_argument("-o", "--output")
    plan.add_argument("--quiet", action="store_true", help="the user's \\ choice")
    figure = commands.add_parser("figure")
    figure.add_argument("plan")
    figure.add_argument("figure")
    commands.add_parser("schema")
    return made


SHOW = "print -r -- $COMPREPLY"

CASES = [
    (("p",), "plan"),
    (("",), "plan figure schema -h --help --version"),
    (("plan", "--c"), "--cluster"),
    (("plan", "--cluster", "h"), "h100-sxm"),
    (("plan", "a:b", "--precision", ""), "bf16 fp16"),
    (("plan", "--quiet", "--o"), "--output"),
    (("plan", "-o", "pl"), ""),
    (("plan", "mod"), ""),
    (("figure", "plan.json", "m"), "memory"),
    (("schema", "-"), "-h --help"),
    (("other", "-"), ""),
]


@pytest.mark.parametrize(("words", "expected"), CASES)
def test_bash_completes(words: tuple[str, ...], expected: str) -> None:
    script = completion_script(parser(), "bash", WORDS)
    typed = " ".join(f"'{word}'" for word in ("autopar", *words))
    code = f"{script}COMP_WORDS=({typed})\nCOMP_CWORD={len(words)}\n_autopar\n"
    done = subprocess.run(
        ["bash", "--norc", "-c", f'{code}echo "${{COMPREPLY[*]}}"; complete -p autopar'],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.splitlines() == [expected, "complete -o default -F _autopar autopar"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
@pytest.mark.parametrize(("words", "expected"), CASES)
def test_zsh_completes(words: tuple[str, ...], expected: str) -> None:
    """As ``bashcompinit`` calls it: under ``emulate sh``, and it matches the word itself."""
    script = completion_script(parser(), "zsh", WORDS)
    typed = " ".join(f"'{word}'" for word in ("autopar", *words))
    call = f"COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _autopar"
    done = subprocess.run(
        ["zsh", "-f", "-c", f"compdef() {{ :; }}\n{script}emulate sh -c {quoted(call)}\n{SHOW}"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    found = [each for each in done.stdout.split() if each.startswith(words[-1])]
    assert found == expected.split()


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@pytest.mark.parametrize(("words", "expected"), CASES)
def test_fish_completes(words: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    """Options are offered for a word that begins with a dash only, and files by fish itself."""
    (tmp_path / "autopar.fish").write_text(completion_script(parser(), "fish", WORDS))
    typed = " ".join(("autopar", *words))
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source autopar.fish; complete -C {quoted(typed)}"],
        capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stderr == ""
    found = {line.partition("\t")[0] for line in done.stdout.splitlines()} - {"autopar.fish"}
    wanted = {word for word in expected.split() if word[0] != "-" or words[-1].startswith("-")}
    assert found == wanted


def test_a_fish_script_has_every_command_option_and_word() -> None:
    """By its text: fish runs it where it is installed, in the test above."""
    lines = [
        shlex.split(line.replace("\\'", "'\\''"))
        for line in completion_script(parser(), "fish", WORDS).splitlines()
    ]
    for line in lines:
        assert line[:4] == ["complete", "-c", "autopar", "-n"]
    assert all(each[4] == "__fish_use_subcommand" for each in lines[:5])
    by_command = {name: [] for name in ("plan", "figure", "schema")}
    for line in lines[5:]:
        by_command[line[4].removeprefix("__fish_seen_subcommand_from ")].append(line[5:])
    assert [line[line.index("-a") + 1] for line in lines[:3]] == list(by_command)
    help_of = ["-s", "h", "-l", "help", "-d", "show this help message and exit"]
    assert by_command == {
        "plan": [
            help_of,
            ["-l", "cluster", "-r", "-a", "cpu h100-sxm"],
            ["-l", "precision", "-r", "-f", "-a", "bf16 fp16"],
            ["-s", "o", "-l", "output", "-r"],
            ["-l", "quiet", "-d", "the user's \\\\ choice"],
        ],
        "figure": [["-a", "memory step"], help_of],
        "schema": [["-f"], help_of],
    }
