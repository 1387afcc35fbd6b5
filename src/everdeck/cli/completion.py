"""``everdeck completion``: the shell asks the command itself what may come next.

The scripts are a few lines each; all knowledge is in the parsers, so a new option completes without being named twice.
"""

import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from everdeck.cli import DONE, VERBS, parser_of
from everdeck.statedir import StateDir

_BASH = """\
_everdeck() {
    local IFS=$'\\n'
    COMPREPLY=($(everdeck complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    [[ ${#COMPREPLY[@]} -eq 0 ]] && COMPREPLY=($(compgen -f -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -F _everdeck everdeck
"""
_ZSH = """\
#compdef everdeck
_everdeck() {
    local -a answers
    answers=(${(f)"$(everdeck complete -- "${(@)words[2,$CURRENT]}" 2>/dev/null)"})
    if (( ${#answers} )); then compadd -- $answers; else _files; fi
}
compdef _everdeck everdeck
"""
_FISH = """\
complete -c everdeck -f -a '(everdeck complete -- (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_NAMING = {"start", "stop", "restart", "reset", "rm", "logs", "events"}


def completion_options(parser: ArgumentParser) -> None:
    """Options of completion."""
    shell = Path(os.environ.get("SHELL", "bash")).name
    default = shell if shell in _SCRIPTS else "bash"
    parser.add_argument("shell", choices=sorted(_SCRIPTS), nargs="?", default=default, help=f"default: {default}")
    parser.epilog = (
        "examples:\n"
        "  everdeck completion bash >> ~/.bashrc\n"
        "  everdeck completion zsh > ~/.zfunc/_everdeck\n"
        "  everdeck completion fish > ~/.config/fish/completions/everdeck.fish"
    )


def completion(options: Namespace) -> int:
    """Print the completion script of a shell: verbs, options and the names of your workers."""
    sys.stdout.write(_SCRIPTS[options.shell])
    return DONE


def complete_options(parser: ArgumentParser) -> None:
    """Options of complete."""
    del parser


def complete(options: Namespace) -> int:
    """Print what may stand where the last word begins; for the scripts above."""
    words: list[str] = options.command_line or [""]
    for answer in _answers(words[:-1], words[-1], options.state):
        print(answer)
    return DONE


def _answers(before: list[str], begun: str, state: Path) -> list[str]:
    verb = next((word for word in before if not word.startswith("-") and word in VERBS), None)
    if verb is None:
        return [name for name in (*VERBS, "--state", "--help", "--version") if name.startswith(begun)]
    if verb == "feed" or "--" in before:
        return []
    parser = parser_of(verb)
    if begun.startswith("-"):
        return sorted(option for option in parser._option_string_actions if option.startswith(begun))  # noqa: SLF001 - argparse has no public list of its options
    positional = [action for action in parser._actions if not action.option_strings]  # noqa: SLF001 - as above
    choices = [str(choice) for action in positional for choice in action.choices or ()]
    if verb in _NAMING:
        folder = StateDir(state).workers
        if folder.is_dir():
            choices += sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    return [choice for choice in choices if choice.startswith(begun)]
