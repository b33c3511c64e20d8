"""Tunable settings: apply chosen values to a plan, and apply a plan's tuned options to its command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from bedplate.errors import UsageError
from bedplate.values import Launch, Plan, Settings, Weights, replace_fields
from bedplate.values.decision import TunedSettings
from bedplate.values.tuning import SettingChoice, TunableSetting

SPIN = (
    SettingChoice(value="default"),
    SettingChoice(value="active", variables=(("OMP_WAIT_POLICY", "active"),), restless=True),
    SettingChoice(value="passive", variables=(("OMP_WAIT_POLICY", "passive"),)),
)
"""Whether idle OpenMP threads spin or block."""


def find_choice(knob: TunableSetting, value: str) -> SettingChoice:
    found = next((one for one in knob.choices if one.value == value), None)
    if found is None:
        known = ", ".join(one.value for one in knob.choices)
        raise UsageError(f"{knob.name} has no value {value!r}", hint=f"choose one of {known}")
    return found


def apply_values(plan: Plan, knobs: Iterable[TunableSetting], values: Mapping[str, str]) -> Plan:
    """The plan with these values of its settings; values that are already set change nothing."""
    chosen = [
        (knob, find_choice(knob, values[knob.name])) for knob in knobs if values.get(knob.name, knob.now) != knob.now
    ]
    if not chosen:
        return plan
    before = plan.settings.turned or TunedSettings()
    fields: dict[str, Any] = {}
    options, without, variables, weights = before.options, before.without, dict(before.variables), plan.weights
    for _, choice in chosen:
        fields |= dict(choice.settings)
        options += choice.options
        without += choice.without
        variables |= dict(choice.variables)
        if choice.weights is not None and choice.weights != plan.weights.label:
            stored = choice.weights_format or plan.weights.format
            weights = Weights(label=choice.weights, made="converted", format=stored)
    turned = TunedSettings(
        knobs=(*before.knobs, *((knob.name, choice.value) for knob, choice in chosen)),
        options=options,
        without=without,
        variables=tuple(sorted(variables.items())),
        native=before.native or any(choice.native for _, choice in chosen),
    )
    return replace_fields(plan, weights=weights, settings=replace_fields(plan.settings, **fields, turned=turned))


def make_draft_knob(options: Sequence[str], model: str) -> TunableSetting:
    """The setting for speculative decoding with a draft model of the same vocabulary."""
    name = PurePath(model).name
    return TunableSetting(
        name="draft", meaning=f"speculative decoding with {name} as draft model", now="off", own="off",
        choices=(SettingChoice(value="off"), SettingChoice(value=name, options=tuple(options))),
        limits=("memory bandwidth", "runtime overhead"), risk=("answers", "memory", "start"), prior=0.5,
        source="requested",
    )  # fmt: skip


def make_build_knob() -> TunableSetting:
    """The setting for a native build. Offered only if one exists: a build takes longer than all trials."""
    return TunableSetting(
        name="build", meaning="the packaged engine, or the one built for this machine", now="packages",
        own="packages", own_choice="packages",
        choices=(SettingChoice(value="packages"), SettingChoice(value="native", native=True)),
        limits=("compute", "memory bandwidth", "runtime overhead"), risk=("answers", "start"), prior=0.8,
        source="bedplate engines build",
    )  # fmt: skip


def make_slots_knob(
    plan: Plan, counts: Iterable[int], *, own: int | None, source: str, prior: float = 0.2
) -> TunableSetting:
    """The setting for engines whose plan specifies the number of concurrent requests."""
    now = plan.settings.slots
    known = {now, *(one for one in (*counts, own) if one is not None and one > 0)}
    return TunableSetting(
        name="slots", meaning="concurrent requests; others wait", now=str(now), own=str(own or "none"),
        own_choice=None if own is None else str(own), ordered=True,
        choices=make_field_choices(known, "slots"),
        limits=("scheduler", "KV cache", "runtime overhead"), risk=("memory",), prior=prior, source=source,
    )  # fmt: skip


def make_threads_knob(plan: Plan, cores: int, *, own: str, source: str, prior: float = 0.2) -> TunableSetting:
    """The setting for engines whose server has `--threads`."""
    counts = {max(1, cores // 2), cores, 2 * cores, plan.settings.threads or cores}
    return TunableSetting(
        name="threads", meaning="threads", now=str(plan.settings.threads or cores), own=own,
        choices=make_option_choices(counts, "--threads"), ordered=True, prior=prior, source=source,
        limits=("compute", "memory bandwidth", "runtime overhead"),
    )  # fmt: skip


def make_cache_knob(plan: Plan, source: str) -> TunableSetting:
    """The setting for engines that support an 8-bit KV cache."""
    return TunableSetting(
        name="kv-type", meaning="type of the KV cache", own="16 bits", own_choice="16 bits",
        now="8 bits" if plan.settings.kv_type == "fp8" else "16 bits",
        choices=(SettingChoice(value="16 bits", settings=(("kv_type", "16-bit"),)),
                 SettingChoice(value="8 bits", settings=(("kv_type", "fp8"),))),
        limits=("KV cache", "memory bandwidth"), risk=("answers", "start"), prior=0.15, source=source,
    )  # fmt: skip


def keep_tunable(knobs: Iterable[TunableSetting]) -> tuple[TunableSetting, ...]:
    return tuple(knob for knob in knobs if len(knob.choices) > 1)


def is_native(settings: Settings) -> bool:
    return settings.turned is not None and settings.turned.native


def with_engine_defaults(plan: Plan) -> Plan:
    return replace_fields(plan, settings=replace_fields(plan.settings, turned=TunedSettings(own_defaults=True)))


def uses_engine_defaults(settings: Settings) -> bool:
    return settings.turned is not None and settings.turned.own_defaults


def apply_tuned_options(launch: Launch, settings: Settings) -> Launch:
    """The launch with the tuned options and variables, which replace those of the plan."""
    turned = settings.turned
    if turned is None or turned.own_defaults:
        return launch
    argv = merge_options(launch.argv, turned.options, turned.without)
    return replace_fields(launch, argv=argv, env={**launch.env, **dict(turned.variables)})


def merge_options(argv: Sequence[str], options: Sequence[str], without: Sequence[str] = ()) -> tuple[str, ...]:
    """A command line with these options, which replace those of the same name; the last of several wins."""
    head, groups = _group_options(argv)
    _, more = _group_options(options)
    new = {group[0]: group for group in more}
    removed = {*new, *without, *(_negate_option(name) for name in new)}
    kept = [group for group in groups if group[0] not in removed]
    return (*head, *(word for group in (*kept, *new.values()) for word in group))


def _group_options(words: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The words before the first long option, and each long option with its values."""
    head: list[str] = []
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            groups.append([word])
        elif groups:
            groups[-1].append(word)
        else:
            head.append(word)
    return head, groups


def _negate_option(option: str) -> str:
    return f"--{option.removeprefix('--no-')}" if option.startswith("--no-") else f"--no-{option.removeprefix('--')}"


def make_option_choices(values: Iterable[int], option: str, *more: str) -> tuple[SettingChoice, ...]:
    """Choices of these numbers for one or several command-line options."""
    return tuple(
        SettingChoice(value=str(value), options=tuple(word for name in (option, *more) for word in (name, str(value))))
        for value in sorted(set(values))
    )


def make_field_choices(values: Iterable[int], field: str) -> tuple[SettingChoice, ...]:
    """Choices of these numbers for one field of `Settings`."""
    return tuple(SettingChoice(value=str(value), settings=((field, value),)) for value in sorted(set(values)))


def make_variable_choices(values: Iterable[int], variable: str) -> tuple[SettingChoice, ...]:
    """Choices of these numbers for one environment variable."""
    return tuple(SettingChoice(value=str(value), variables=((variable, str(value)),)) for value in sorted(set(values)))
