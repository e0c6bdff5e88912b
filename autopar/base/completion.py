"""Scripts by which bash, fish and zsh complete a command that `argparse` reads.

In: the parser. Out: the script's text. The first word is a command; after it, options, the choices
of an option's value and of positional arguments are completed, and files elsewhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

SHELLS = ("bash", "fish", "zsh")
_FIRST = "__fish_use_subcommand"
"""The condition of fish that no command is there yet."""
_BASH = """\
_{name}() {{
    local command="${{COMP_WORDS[1]}}" current="${{COMP_WORDS[COMP_CWORD]}}"
    local previous="${{COMP_WORDS[COMP_CWORD-1]}}" choices=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        choices="{commands}"
    else
        case "$command $previous" in
{values}
        *)
            case "$command $current" in
{words}
            esac
        esac
    fi
    COMPREPLY=( $(compgen -W "$choices" -- "$current") )
}}
complete -o default -F _{name} {name}
"""
_ZSH = """\
(( $+functions[compdef] )) || { autoload -U +X compinit && compinit }
autoload -U +X bashcompinit && bashcompinit
"""


def completion_script(
    parser: argparse.ArgumentParser, shell: str, words: Mapping[str, Sequence[str]]
) -> str:
    """The script for ``shell``, one of `SHELLS`, of a parser with commands.

    ``words`` has the completions of arguments without choices, by their ``dest``.
    """
    if shell == "fish":
        return "".join(f"{line}\n" for line in _fish(parser, words))
    commands = _commands(parser)
    first = [*commands, *_options(parser)]
    values, others = [], []
    for name, each in commands.items():
        values += list(_values(name, each, words))
        others += [
            f'            "{name} -"*) choices="{" ".join(_options(each))}" ;;',
            f'            "{name} "*) choices="{" ".join(_positional(each, words))}" ;;',
        ]
    text = _BASH.format(
        name=parser.prog, commands=" ".join(first), values="\n".join(values),
        words="\n".join(others),
    )  # fmt: skip
    return _ZSH + text if shell == "zsh" else text


def _commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    found = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return found.choices


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [text for action in parser._actions for text in action.option_strings]


def _values(
    command: str, parser: argparse.ArgumentParser, words: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """A branch of ``case`` for each option with a value; without words, file names complete."""
    for action in parser._actions:
        if action.option_strings and action.nargs != 0:
            pattern = "|".join(f'"{command} {text}"' for text in action.option_strings)
            yield f'        {pattern}) choices="{" ".join(_words(action, words))}" ;;'


def _positional(parser: argparse.ArgumentParser, words: Mapping[str, Sequence[str]]) -> list[str]:
    actions = [each for each in parser._actions if not each.option_strings]
    return [word for each in actions for word in _words(each, words)]


def _words(action: argparse.Action, words: Mapping[str, Sequence[str]]) -> Sequence[str]:
    return [str(each) for each in action.choices or words.get(action.dest, ())]


# --- fish ----------------------------------------------------------------------------------------
def _fish(parser: argparse.ArgumentParser, words: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """One ``complete`` for each command, for each option, and for the words of each argument."""
    commands = _commands(parser)
    for name, each in commands.items():
        text = (each.description or "").partition("\n")[0].rstrip(".")
        yield _complete(parser, _FIRST, "-f", "-a", name, "-d", text)
    for action in parser._actions:
        if action.option_strings:
            yield _complete(parser, _FIRST, "-f", *_fish_option(action, words))
    for name, each in commands.items():
        is_command = f"__fish_seen_subcommand_from {name}"
        positional = [action for action in each._actions if not action.option_strings]
        found = _positional(each, words)
        if found or not positional:  # fish offers files by itself
            no_files = ["-f"] if all(action.choices for action in positional) else []
            yield _complete(parser, is_command, *no_files, *_fish_words(found))
        for action in each._actions:
            if action.option_strings:
                yield _complete(parser, is_command, *_fish_option(action, words))


def _fish_option(action: argparse.Action, words: Mapping[str, Sequence[str]]) -> list[str]:
    """An option's names, whether it has a value, the words of that, and its help."""
    found = []
    for text in action.option_strings:
        found += ["-l", text[2:]] if text.startswith("--") else ["-s", text[1:]]
    if action.nargs != 0:
        found += ["-r", *(["-f"] if action.choices else []), *_fish_words(_words(action, words))]
    return [*found, "-d", action.help] if action.help else found


def _fish_words(found: Sequence[str]) -> list[str]:
    return ["-a", " ".join(found)] if found else []


def _complete(parser: argparse.ArgumentParser, condition: str, *arguments: str) -> str:
    texts = ["complete", "-c", parser.prog, "-n", condition, *arguments]
    return " ".join(map(_fish_quoted, texts))


def _fish_quoted(text: str) -> str:
    """The text as one word of fish, in which a backslash and a quote are escaped inside quotes."""
    if text and all(each.isalnum() or each in "-_." for each in text):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
