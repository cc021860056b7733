"""`thunderagent completion`: a script that lets a shell complete commands, options and their values."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

DESCRIPTION = """\
Print a script that lets a shell complete commands, options, and values that are one of some words.

  source <(thunderagent completion bash)      in ~/.bashrc
  source <(thunderagent completion zsh)       in ~/.zshrc, after compinit
  thunderagent completion fish | source       in ~/.config/fish/config.fish
"""

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
_thunderagent() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} path=thunderagent word
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case " $(_thunderagent_words "$path") " in *" $word "*) [[ $word == -* ]] || path="$path $word" ;; esac
    done
    local values=$(_thunderagent_words "$path $prev")
    if [[ $prev == -* && -n $values ]]; then
        COMPREPLY=($(compgen -W "$values" -- "$cur"))
    else
        COMPREPLY=($(compgen -W "$(_thunderagent_words "$path")" -- "$cur"))
    fi
}}
_thunderagent_words() {{
    case $1 in
{cases}
    esac
}}
complete -o default -F _thunderagent thunderagent
"""

_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the script for the commands of `parser`; return the exit status."""
    words = dict(_words_of(parser, "thunderagent"))
    print(_fish(words) if args.shell == "fish" else (_ZSH if args.shell == "zsh" else "") + _bash(words), end="")
    return 0


def _words_of(parser: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield what may follow: the path of each command, and of each option with a list of values."""
    parser.format_help()  # a command may not know its options before
    words: list[str] = []
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to its options
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            words += action.choices
            for name, inner in action.choices.items():
                yield from _words_of(inner, f"{path} {name}")
            continue
        words += [each for each in action.option_strings if each.startswith("--")]
        choices = [str(each) for each in action.choices or ()]
        if not action.option_strings:
            words += choices
        elif choices:
            for each in action.option_strings:
                yield f"{path} {each}", choices
    yield path, words


def _bash(words: dict[str, list[str]]) -> str:
    cases = "\n".join(f'    "{path}") echo "{" ".join(each)}" ;;' for path, each in words.items())
    return _BASH.format(cases=cases)


def _fish(words: dict[str, list[str]]) -> str:
    lines = ["complete -c thunderagent -n __fish_use_subcommand -f -a " + f"'{' '.join(words['thunderagent'])}'"]
    for path, each in words.items():
        _, *commands = path.split()
        if not commands:
            continue
        within = "; and ".join(f"__fish_seen_subcommand_from {name}" for name in commands if not name.startswith("-"))
        if commands[-1].startswith("-"):
            lines.append(
                f"complete -c thunderagent -n '{within}' -l {commands[-1].lstrip('-')} -x -a '{' '.join(each)}'"
            )
            continue
        options = [word.removeprefix("--") for word in each if word.startswith("--") and f"{path} {word}" not in words]
        lines += [f"complete -c thunderagent -n '{within}' -l {option}" for option in options]
        if inner := [word for word in each if not word.startswith("--")]:
            lines.append(f"complete -c thunderagent -n '{within}' -f -a '{' '.join(inner)}'")
    return "\n".join(lines) + "\n"
