"""Turns errors of click about the command line into bedplate's own, with a hint at what was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

import click

from bedplate.errors import UsageError
from bedplate.values.choices import join_with_or
from bedplate.values.quoting import join_shell

INSTALL = "engines install ID"
OTHER_WORDS = {
    "run": ("chat", "ask", "talk", "generate", "prompt", "complete", "cli"),
    "serve": ("start", "up", "launch", "server", "deploy-local"),
    "stop": ("kill", "down", "end"),
    "ps": ("services", "running"),
    "pull": ("download", "fetch", "get", "add"),
    "list": ("ls", "local"),
    "rm": ("remove", "delete", "uninstall"),
    "inspect": ("show", "describe", "model"),
    "probe": ("hardware", "gpu", "gpus", "cpu", "info", "machine", "system"),
    "plan": ("recommend", "decide", "choose", "which", "advise", "suggest", "why", "fit"),
    "bench": ("benchmark", "perf", "test", "measure", "load"),
    "init": ("setup", "configure", "config", "new", "wizard"),
    "status": ("state", "health", "top"),
    INSTALL: ("install",),
    "plan MODEL --emit kubernetes -o DIR": ("k8s", "kubernetes", "helm", "kubectl", "deploy", "manifest"),
    "plan MODEL --emit compose -o DIR": ("compose", "docker", "docker-compose", "podman", "container"),
    "plan MODEL --emit ray -o DIR": ("ray",),
    "plan MODEL --emit dynamo -o DIR": ("dynamo",),
    "plan MODEL --procure": ("buy", "procure", "rent", "price", "cost"),
    "serve --systemd": ("systemd", "service", "daemon"),
    "--help": ("help", "?"),
    "--version": ("version",),
}
"""Words that people try, by what bedplate has for them."""
UPGRADES = ("update", "upgrade", "self-update")
SAME_MEANING = (
    ("remove", "rm", "delete", "uninstall", "revoke", "discard"),
    ("add", "create", "new", "install"),
    ("list", "ls", "show"),
)
"""Names of commands below others, and words that people try for them."""
TAKE_MODELS = ("run", "serve", "pull", "rm", "inspect")
_SUGGESTED = {word: command for command, words in OTHER_WORDS.items() for word in words}


def translate(error: click.UsageError, arguments: Sequence[str]) -> UsageError:
    """The same error in bedplate's words. `arguments` are those of the whole command line."""
    context = error.ctx
    path = context.command_path if context is not None else " ".join(["bedplate", *arguments[:1]])
    if isinstance(error, click.MissingParameter):
        name, usage = _get_name(error.param), _describe_usage(context, path)
        choices = _describe_choices(error.param)
        return UsageError(f"{path} needs {name}", hint=f"{usage}; {choices}" if choices else usage)
    if isinstance(error, click.NoSuchOption):
        return UsageError(f"{path} has no option {error.option_name}", hint=_suggest_option(error, path))
    if isinstance(error, click.BadOptionUsage):
        return UsageError(f"{error.option_name} needs a value", hint=_describe_option(context, error.option_name, path))
    if isinstance(error, click.BadParameter) and error.param is not None:
        name = _get_name(error.param)
        what = _reword(error.message, error.param)
        return UsageError(f"{name}: {what}", hint=_describe_type(error.param) or f"{path} --help describes it")
    if found := re.match(r"No such command '(.*?)'\.", error.message):
        return make_unknown_command_error(found[1], context, arguments)
    if found := re.match(r"Got unexpected extra arguments? \((.*)\)", error.message):
        extra = found[1]
        hint = _suggest_quotes(extra, context, arguments) or _describe_usage(context, path)
        return UsageError(f"{path}: unexpected argument {extra!r}", hint=hint)
    return UsageError(
        error.message[:1].lower() + error.message[1:].rstrip("."), hint=f"{path} --help lists the options"
    )


def make_unknown_command_error(word: str, context: click.Context | None, arguments: Sequence[str]) -> UsageError:
    path = context.command_path if context is not None else "bedplate"
    names = sorted(context.command.commands) if context is not None and isinstance(context.command, click.Group) else []
    message = f"{path} has no command {word!r}"
    if path != "bedplate":
        alike = [name for group in SAME_MEANING if word.lower() in group for name in names if name in group]
        near = alike or difflib.get_close_matches(word, names, 1)
        hint = f"did you mean {path} {near[0]}?" if near else f"commands of {path}: {', '.join(names)}"
        return UsageError(message, hint=hint)
    if word.lower() in UPGRADES:
        return UsageError(message, hint="uv tool upgrade bedplate, pipx upgrade bedplate or pip install -U bedplate")
    if (command := _SUGGESTED.get(word.lower())) is not None:
        return UsageError(message, hint=_suggest_command(command, list(arguments[1:]), names))
    near = difflib.get_close_matches(word.lower(), names, 2)
    if near:
        return UsageError(message, hint=f"did you mean {' or '.join(f'bedplate {one}' for one in near)}?")
    if _is_model(word):
        return UsageError(message, hint=f"to chat with it: {join_shell(['bedplate', 'run', word])}")
    from bedplate.facts.short_names import list_family

    if family := list_family(word):
        return UsageError(message, hint=f"to chat with a model: bedplate run {join_with_or(family[:3])}")
    from bedplate.decide.intent import names_hardware

    words = " ".join(arguments)
    if names_hardware(words):
        return UsageError(message, hint=f'for this hardware: bedplate plan MODEL --hardware "{words}"')
    return UsageError(message, hint="bedplate --help lists the commands")


def _suggest_command(command: str, words: Sequence[str], names: Sequence[str]) -> str:
    """The command with the words that followed, if it takes such words."""
    if command == "--help" and words and words[0] in names:
        return f"bedplate {words[0]} --help"
    if command == INSTALL and words and _is_model(words[0]):
        return join_shell(["bedplate", "pull", *words])
    keeps = command in TAKE_MODELS and not any(word.startswith("-") for word in words)
    return join_shell(["bedplate", command, *words]) if keeps else f"bedplate {command}"


def _is_model(word: str) -> bool:
    from bedplate.facts.short_names import resolve_short_name

    return word.lower().endswith(".gguf") or "/" in word or resolve_short_name(word) is not None


def _get_name(param: click.Parameter | None) -> str:
    if param is None:
        return "a value"
    return param.make_metavar(click.Context(click.Command("x"))) if isinstance(param, click.Argument) else param.opts[0]


def _suggest_option(error: click.NoSuchOption, path: str) -> str:
    known = [
        name
        for param in (error.ctx.command.params if error.ctx is not None else ())
        for name in (*param.opts, *param.secondary_opts)
    ]
    wanted = error.option_name.removeprefix("--")
    if wanted == "slo" and "--set" in known:
        return "latency targets are fields of the workload: --set ttft_ms=500 --set tpot_ms=50"
    # Without the dashes, which all names have in common.
    near = [
        f"--{name}" for name in difflib.get_close_matches(wanted, [one[2:] for one in known if one.startswith("--")], 2)
    ]
    return f"did you mean {' or '.join(near)}?" if near else f"{path} --help lists the options"


def _describe_usage(context: click.Context | None, path: str) -> str:
    pieces = context.command.collect_usage_pieces(context) if context is not None else []
    return f"usage: {' '.join([path, *pieces])}"


def _describe_option(context: click.Context | None, name: str, path: str) -> str:
    params = context.command.params if context is not None else []
    param = next((one for one in params if name in (*one.opts, *one.secondary_opts)), None)
    return (_describe_type(param) if param is not None else None) or f"{path} --help describes it"


def _describe_choices(param: click.Parameter | None) -> str | None:
    if param is None or not isinstance(param.type, click.Choice):
        return None
    return f"choose {join_with_or([str(getattr(one, 'value', one)) for one in param.type.choices])}"


def _describe_type(param: click.Parameter) -> str | None:
    """What values a parameter takes, with an example."""
    name, kind = _get_name(param), param.type
    if choices := _describe_choices(param):
        return choices
    if isinstance(kind, click.types._NumberRangeBase):
        what = "an integer" if isinstance(kind, click.IntRange) else "a number"
        if kind.min is not None and kind.max is not None:
            return f"{name} takes {what} from {kind.min:g} to {kind.max:g}"
        is_length = "context" in name or "tokens" in name
        example = f", such as {name} {4096 if is_length else max(int(kind.min or 0), 1) * 10}"
        return f"{name} takes {what}{f' of at least {kind.min:g}' if kind.min is not None else ''}{example}"
    if kind.name in ("integer", "float"):
        return f"{name} takes {'an integer' if kind.name == 'integer' else 'a number'}, such as {name} 10"
    if isinstance(param, click.Option) and param.metavar and param.help:
        return f"{name} {param.metavar}: {param.help}"
    return None


def _reword(message: str, param: click.Parameter) -> str:
    text = message.rstrip(".")
    for old, new in (
        ("a valid integer range", "an integer"), ("a valid float range", "a number"), ("a valid integer", "an integer"),
        ("a valid float", "a number"), ("a valid boolean", "true or false"),
    ):  # fmt: skip
        text = text.replace(old, new)
    text = re.sub(r" is not in the range .*", " is out of range", text)
    return re.sub(r" is not one of .*", " is not known", text) if isinstance(param.type, click.Choice) else text


def _suggest_quotes(extra: str, context: click.Context | None, arguments: Sequence[str]) -> str | None:
    """The option whose value has spaces and lacks quotes, if that explains the extra words."""
    if context is None:
        return None
    values = {name for param in context.command.params if not getattr(param, "is_flag", True) for name in param.opts}
    words = list(arguments)
    for index, word in enumerate(words):
        if word in values:
            end = next((at for at in range(index + 1, len(words)) if words[at].startswith("-")), len(words))
            value = words[index + 1 : end]
            if len(value) > 1 and extra.split()[-1] in value:
                return f'quote a value that has spaces: {word} "{" ".join(value)}"'
    return None
