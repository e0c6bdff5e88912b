"""Scripts by which bash and zsh complete a command that `argparse` reads.

In: the parser. Out: the script's text. The first word is a command; after it, options, the choices
of an option's value and of positional arguments are completed, and files elsewhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

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
    """The script for ``shell``, "bash" or "zsh", of a parser with commands.

    ``words`` has the completions of arguments without choices, by their ``dest``.
    """
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
