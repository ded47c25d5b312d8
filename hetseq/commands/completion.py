"""`hetseq completion SHELL`: a script that completes commands, options and their values in bash, zsh and fish.

Responsible for the text of the scripts. Everything in them follows from the tables that the parsers use: `Command` of
each command, and the fields of the options of `hetseq train` and of the included tasks. Options of a user's own task
are missing, since they are known only once its file is imported.

The one idea: a script is a table that is made once. A press of Tab starts no Python, which would take a second.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetseq import registry
from hetseq.config import all_options
from hetseq.config.command_line import Argument, Command, CommandOption
from hetseq.errors import EXIT_DONE

#: values that are files or folders, by their names in a help text
_FILES = re.compile(r"(?:FILE|DIR|PATH|RUN|PY)[0-9]?")


@dataclass(frozen=True)
class Flag:
    """An option: its spellings, the one to offer first; `words` are values to offer, `takes_file` offers files too."""

    spellings: tuple[str, ...]
    about: str
    takes_value: bool
    words: tuple[str, ...] = ()
    takes_file: bool = False


@dataclass(frozen=True)
class Line:
    """A command line. `words`: for its first argument; `train`: where options of `hetseq train` may be in it."""

    name: str
    about: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...] = ()
    takes_file: bool = False
    train: str = ""


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """Print the script; returns the exit code."""
    shell = COMMAND.read(words)["SHELL"]
    for line in SHELLS[shell](lines()).splitlines():
        say(line)
    return EXIT_DONE


def lines() -> dict[str, Line]:
    """Every command line by its name; the actions of `checkpoints` are lines of their own."""
    from hetseq.commands import demo, doctor, drop, evaluate, run_script, selftest, top
    from hetseq.commands.checkpoints import command as checkpoints
    from hetseq.commands.plan import command as plan
    from hetseq.commands.script import command as script
    from hetseq.commands.ssh import command as ssh
    from hetseq.monitor.report import command as report

    modules = (run_script, checkpoints, report, doctor, top, drop, script, ssh, selftest, demo)
    described = [*(module.COMMAND for module in modules), *evaluate.COMMANDS.values(), plan.PLAN, plan.SIMULATE]
    described += [*checkpoints.ACTIONS.values(), COMMAND]
    found = [Line("train", "Train a task.", _flags_of_train())]
    found += [_line(command, checkpoints.ACTIONS if command is checkpoints.COMMAND else ()) for command in described]
    names = tuple(line.name for line in found if " " not in line.name)
    found.append(Line("help", "Show the help of a command.", (), names))
    return {line.name: line for line in found}


def of_tasks() -> dict[str, tuple[Flag, ...]]:
    """The options of each included task's own."""
    return {task: _flags_of([section]) for task, section in registry.included_options().items()}


def _line(command: Command, actions: Iterable[str]) -> Line:
    first = next((word for word in command.words if isinstance(word, Argument)), None)
    among = tuple(actions) or (() if first is None else first.among)
    options = [_flag_of(word) for word in command.words if isinstance(word, CommandOption)]
    helps = Flag(("--help", "-h"), "Show the help.", takes_value=False)
    takes_file = first is not None and not among
    return Line(command.name, command.about, (*options, helps), among, takes_file, command.train)


def _flag_of(option: CommandOption) -> Flag:
    is_file = _FILES.fullmatch(option.value) is not None
    return Flag((option.flag, *option.also), option.help, bool(option.value), option.among, is_file)


def _flags_of_train() -> tuple[Flag, ...]:
    own = {
        "--config": Flag(("--config",), "read options from a YAML file", takes_value=True, takes_file=True),
        "--help": Flag(("--help", "-h"), "show the basic options", takes_value=False),
        "--help-all": Flag(("--help-all",), "show every option", takes_value=False),
    }
    return (*own.values(), *_flags_of(None))


def _flags_of(sections: Sequence[type] | None) -> tuple[Flag, ...]:
    """The options of `hetseq train`, or of these dataclasses; retired ones are left out."""
    found = []
    for item in all_options(sections):
        named = registry.included_names(item.name) if item.name in ("task", "optimizer", "lr_scheduler") else ()
        words = named or item.choices or tuple(re.findall(r"(?:^|(?<=\|))[a-z]+(?=\||$)", item.metavar))
        is_file = item.name == "task" or any(_FILES.fullmatch(part) for part in item.metavar.split("|"))
        is_switch = item.kind is bool and not item.is_list
        found.append(Flag(item.flags, item.help, not is_switch, words, is_file))
    return tuple(found)


# bash and zsh: the same tables and the same search, as functions of the shell

_SEARCH = """\
_hetseq_find() {  # CURRENT PREVIOUS...: sets _hetseq_list, and _hetseq_files if a file may be meant
    local current=$1 name='' last='' task='' one='' takes='' also='' ends=''
    _hetseq_list='' _hetseq_files=''
    shift
    if [ $# -eq 0 ]; then
        _hetseq_list=$(_hetseq_commands)
        return
    fi
    name=$1
    shift
    if [ "$name" = checkpoints ] && [ $# -gt 0 ]; then
        name="checkpoints $1"
        shift
    fi
    for one in "$@"; do
        if [ "$last" = --task ]; then task=$one; fi
        if [ "$one" = -- ]; then ends=yes; fi
        last=$one
    done
    also=$(_hetseq_train "$name")
    if [ -n "$ends" ]; then name=train also=''; fi
    if [ "$also" = among ]; then also=train; else also=''; fi
    if takes=$(_hetseq_takes "$name" "$last") || takes=$(_hetseq_takes "${also:-$name}" "$last") ||
        takes=$(_hetseq_takes "task $task" "$last"); then
        case $takes in *@) _hetseq_files=yes ;; esac
        _hetseq_list=${takes%@}
        return
    fi
    case $current in
    -*) _hetseq_list="$(_hetseq_flags "$name") $(_hetseq_flags "$also") $(_hetseq_flags "task $task")" ;;
    *)
        takes=$(_hetseq_words "$name")
        case $takes in *@) _hetseq_files=yes ;; esac
        if [ $# -eq 0 ]; then _hetseq_list=${takes%@}; fi
        if [ -z "$_hetseq_list$_hetseq_files" ]; then
            _hetseq_list="$(_hetseq_flags "$name") $(_hetseq_flags "task $task")"
        fi
        ;;
    esac
}
"""

_BASH = """\
_hetseq() {
    local current=${COMP_WORDS[COMP_CWORD]} place=$COMP_CWORD IFS=$' \\t\\n'
    # bash divides --flag=value at the sign
    if [ "$current" = = ]; then
        current=''
    elif [ "${COMP_WORDS[COMP_CWORD-1]}" = = ]; then
        place=$((place - 1))
    fi
    _hetseq_find "$current" "${COMP_WORDS[@]:1:place-1}"
    COMPREPLY=($(compgen -W "$_hetseq_list" -- "$current"))
    if [ -n "$_hetseq_files" ] && [ "${current:0:1}" != - ]; then
        IFS=$'\\n'
        COMPREPLY+=($(compgen -f -- "$current"))
        compopt -o filenames 2> /dev/null
    fi
}
complete -F _hetseq hetseq
"""

_ZSH = """\
_hetseq() {
    local -a before
    before=("${(@)words[2,CURRENT-1]}")
    if [[ $PREFIX == --*=* ]]; then
        before+=("${PREFIX%%=*}")
        compset -P '*='
    fi
    _hetseq_find "$PREFIX" "${(@)before}"
    compadd -- ${=_hetseq_list}
    if [[ -n $_hetseq_files && $PREFIX != -* ]]; then _files; fi
}
if [[ ${funcstack[1]} == _hetseq ]]; then _hetseq "$@"; else compdef _hetseq hetseq; fi
"""


def bash(commands: Mapping[str, Line]) -> str:
    """The script for bash."""
    return f"# completion of hetseq in bash: source <(hetseq completion bash)\n{_tables(commands)}{_SEARCH}{_BASH}"


def zsh(commands: Mapping[str, Line]) -> str:
    """The script for zsh."""
    return f"#compdef hetseq\n# in ~/.zshrc: source <(hetseq completion zsh)\n{_tables(commands)}{_SEARCH}{_ZSH}"


def _tables(commands: Mapping[str, Line]) -> str:
    tasks = of_tasks()
    flags = {name: line.flags for name, line in commands.items()} | {f"task {task}": own for task, own in tasks.items()}
    names = [name for name in commands if " " not in name]
    offered = {
        name: " ".join([*(flag.spellings[0] for flag in own), *(["--"] if _is_behind(commands, name) else [])])
        for name, own in flags.items()
    }
    takes = {
        f"{name} {spelling}": " ".join(flag.words) + "@" * flag.takes_file
        for name, own in flags.items()
        for flag in own
        for spelling in flag.spellings
        if flag.takes_value
    }
    first = {name: " ".join(line.words) + "@" * line.takes_file for name, line in commands.items()}
    return "".join(
        [
            f"_hetseq_commands() {{\n    echo '{' '.join(names)}'\n}}\n",
            _function("flags", offered),
            _function("words", first),
            _function("train", {name: line.train for name, line in commands.items()}),
            _function("takes", takes, subject="$1 $2", otherwise="return 1"),
        ]
    )


def _is_behind(commands: Mapping[str, Line], name: str) -> bool:
    return name in commands and commands[name].train == "behind"


def _function(name: str, table: Mapping[str, str], *, subject: str = "$1", otherwise: str = "") -> str:
    """A function of the shell that prints the entry of its argument; keys with the same entry share a line."""
    keys: dict[str, list[str]] = {}
    for key, value in table.items():
        if value or otherwise:
            keys.setdefault(value, []).append(key)
    cases = [f"    {' | '.join(repr(key) for key in same)}) echo {value!r} ;;" for value, same in keys.items()]
    cases += [f"    *) {otherwise} ;;"] if otherwise else []
    return "\n".join([f"_hetseq_{name}() {{", f'    case "{subject}" in', *cases, "    esac", "}", ""])


# fish: one line for each option, with its meaning


def fish(commands: Mapping[str, Line]) -> str:
    """The script for fish."""
    text = ["# completion of hetseq in fish: hetseq completion fish | source", "complete -c hetseq -f"]
    for name, line in commands.items():
        if " " not in name:
            text.append(f"complete -c hetseq -n __fish_use_subcommand -a {name} -d {_fish(line.about)}")
    for name, line in commands.items():
        text += _fish_lines(commands, name, line)
    for task, own in of_tasks().items():
        condition = f"__fish_seen_subcommand_from train; and contains -- {task} (commandline -opc)"
        text += [_fish_flag(condition, flag) for flag in own]
    return "\n".join(text) + "\n"


def _fish_lines(commands: Mapping[str, Line], name: str, line: Line) -> Iterator[str]:
    condition = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
    if line.words:
        words = " ".join(line.words)
        is_open = f"{condition}; and not __fish_seen_subcommand_from {words}"
        yield f"complete -c hetseq -n {_fish(is_open)} -a {_fish(words)}"
    if line.takes_file:
        yield f"complete -c hetseq -n {_fish(condition)} -F"
    yield from (_fish_flag(condition, flag) for flag in line.flags)
    if line.train == "among":
        taken = {spelling for flag in line.flags for spelling in flag.spellings}
        others = [flag for flag in commands["train"].flags if taken.isdisjoint(flag.spellings)]
        yield from (_fish_flag(condition, flag) for flag in others)
    elif line.train == "behind":  # fish takes what follows -- for arguments, so options are offered as such
        condition += "; and contains -- -- (commandline -opc)"
        names = " ".join(flag.spellings[0] for flag in commands["train"].flags)
        yield f"complete -c hetseq -n {_fish(condition)} -a {_fish(names)}"
        for flag in commands["train"].flags:
            if flag.words or flag.takes_file:
                follows = f"{condition}; and contains -- (commandline -opc)[-1] {' '.join(flag.spellings)}"
                files = " -F" * flag.takes_file
                yield f"complete -c hetseq -n {_fish(follows)}{files} -a {_fish(' '.join(flag.words))}"


def _fish_flag(condition: str, flag: Flag) -> str:
    value = ""
    if flag.takes_value:
        value = (" -r -F" if flag.takes_file else " -x") + (f" -a {_fish(' '.join(flag.words))}" if flag.words else "")
    about = re.split(r"[;:.] |\.$", flag.about)[0]
    return f"complete -c hetseq -n {_fish(condition)} -l {flag.spellings[0][2:]}{value} -d {_fish(about)}"


def _fish(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SHELLS: dict[str, Callable[[Mapping[str, Line]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
COMMAND = Command(
    "completion",
    "Print a script that completes hetseq's commands, options and their values in your shell.",
    usage=("SHELL",),
    words=(Argument("SHELL", "bash, zsh or fish", among=tuple(SHELLS)),),
    examples=("hetseq completion bash > ~/.local/share/bash-completion/completions/hetseq",),
    notes=(
        "For this terminal alone: `source <(hetseq completion bash)`, the same with zsh, or"
        " `hetseq completion fish | source`. Options of a task of your own are not in the script.",
    ),
)
