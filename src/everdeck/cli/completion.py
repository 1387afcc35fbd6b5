"""``everdeck completion``: the shell asks the command itself what may come next.

The scripts are a few lines each; all knowledge is in the parsers, so a new option completes without being named twice.
"""

import os
import sys
from argparse import Action, ArgumentParser, Namespace
from pathlib import Path

from everdeck.cli import ALIASES, DONE, VERBS, parser_of
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
_NAMING = {"start", "stop", "restart", "reset", "rm", "ps", "inspect", "send", "feed", "logs", "events"}


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
    typed = next((word for word in before if not word.startswith("-") and (word in VERBS or word in ALIASES)), None)
    if typed is None:
        words = (*VERBS, "help", "--state", "--help", "--version")
        return [] if before[-1:] == ["--state"] else [name for name in words if name.startswith(begun)]
    if "--" in before:
        return []
    verb = ALIASES.get(typed, typed)
    within = before[before.index(typed) + 1 :]
    if verb == "feed":
        from everdeck.cli.feed import words_of

        within = words_of(within)
    parser = _innermost(parser_of(verb), within)
    option, equals, value = begun.partition("=")
    if equals and begun.startswith("--"):
        return [f"{option}={choice}" for choice in _values(parser, option, state) if choice.startswith(value)]
    if before[-1].startswith("-") and _takes_a_value(parser, before[-1]):
        return [choice for choice in _values(parser, before[-1], state) if choice.startswith(begun)]
    if begun.startswith("-"):
        return sorted(option for option in _options(parser) if option.startswith(begun))
    positional = [action for action in parser._actions if not action.option_strings]  # noqa: SLF001 - argparse has no public list of its options
    choices = [str(choice) for action in positional for choice in action.choices or () if choice]
    if verb in _NAMING:
        choices += _names(state)
    return [choice for choice in choices if choice.startswith(begun)]


def _innermost(parser: ArgumentParser, words: list[str]) -> ArgumentParser:
    """The parser of the verb within a verb that was typed last, such as ``feed dead-letters list``."""
    for word in words:
        for action in parser._actions:  # noqa: SLF001 - as above
            inner = (action.choices or {}).get(word) if isinstance(action.choices, dict) else None
            if isinstance(inner, ArgumentParser):
                parser = inner
                break
    return parser


def _options(parser: ArgumentParser) -> dict[str, Action]:
    return parser._option_string_actions  # noqa: SLF001 - as above


def _takes_a_value(parser: ArgumentParser, option: str) -> bool:
    action = _options(parser).get(option)
    return action is not None and action.nargs != 0


def _values(parser: ArgumentParser, option: str, state: Path) -> list[str]:
    """What may follow an option; nothing for a file, which the shell completes itself."""
    action = _options(parser).get(option)
    if action is None:
        return []
    if option == "--template":
        import json

        try:
            return sorted(json.loads(StateDir(state).applied.read_text(encoding="utf-8"))["templates"])
        except (OSError, ValueError, KeyError):
            return []
    return [str(choice) for choice in action.choices or ()]


def _names(state: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(StateDir(state).workers) if entry.is_dir())
    except OSError:
        return []
