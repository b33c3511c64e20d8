"""Rules that several engines share: what the options say, how the layout divides the model, and what stays idle."""

from __future__ import annotations

from collections.abc import Iterator

from bedplate.engines import get_plan_engine
from bedplate.engines.base import ComputeTarget, find_cards, get_card_family
from bedplate.engines.checks import LaunchRule, PlannedLaunch
from bedplate.engines.shared import name_quantization
from bedplate.engines.visible import pick_cards, show_cards
from bedplate.values import Accelerator, Model

LEADER = "node-0"
"""Stands for the address of the first node, to ask whether an engine has a launch for several nodes."""


def check_system(launch: PlannedLaunch) -> str | None:
    """The engine runs on the operating system of the machine."""
    engine = get_plan_engine(launch.plan)
    return None if launch.hardware.os in engine.systems else f"{engine.name} does not run on {launch.hardware.os}"


def check_device(launch: PlannedLaunch) -> str | None:
    """The machine has the device that the launch computes on, with a compute capability that has kernels."""
    engine = get_plan_engine(launch.plan)
    if launch.device == "cpu":
        return None if engine.cpu else f"{engine.name} does not compute on a CPU"
    if not launch.cards:
        return f"{engine.name} has no accelerator here that it supports"
    if launch.capability is not None and launch.capability < engine.capability:
        least, has = (".".join(map(str, one)) for one in (engine.capability, launch.capability))
        return f"the kernels of {engine.name} need compute capability {least}; this GPU has {has}"
    return None


def check_task(launch: PlannedLaunch) -> str | None:
    """The engine serves the task of the workload."""
    engine, task = get_plan_engine(launch.plan), launch.plan.workload.task
    return None if task in engine.tasks else f"{engine.name} does not serve the task {task}"


def check_weights(launch: PlannedLaunch) -> str | None:
    """The weights exist in the planned format: as published, or made by a step of the plan or while loading."""
    engine, weights, model = get_plan_engine(launch.plan), launch.plan.weights, launch.model
    if weights.format not in engine.formats:
        return f"{engine.name} does not load {weights.format} weights"
    if model.format not in (*engine.formats, *engine.converts, "facts"):
        return f"nothing converts {model.format} weights for {engine.name}"
    if weights.made == "converted" and not any(step.kind == "convert" for step in launch.launch.prepare):
        return f"no step of the plan converts the weights to {weights.label}"
    stored = (model.quantization or "").upper()
    if weights.made == "as it is" and stored and stored != weights.label.upper():
        return f"the weights are published in {stored}, not in {weights.label}"
    return None


def check_kernels(launch: PlannedLaunch) -> str | None:
    """The engine's table of quantizations has a row for these weights on this device and chip."""
    engine, method = get_plan_engine(launch.plan), name_quantization(launch.plan.weights, launch.loaded)
    if method is None or not engine.quantizations or engine.find_quantization(method, _describe_target(launch)):
        return None
    where = launch.chip.name if launch.chip is not None else launch.device
    return f"{engine.name} has no kernels for {launch.plan.weights.label} weights ({method}) on {where}"


def _describe_target(launch: PlannedLaunch) -> ComputeTarget:
    features = launch.chip.features if launch.chip is not None else frozenset()
    return ComputeTarget(device=launch.device, count=len(launch.cards), features=features, capability=launch.capability)


def check_published(launch: PlannedLaunch) -> str | None:
    """Published weights are fetched by the launch or by a step, in a quantization that the engine loads."""
    published = launch.plan.weights.published
    if published is None or launch.model.files:
        return None
    steps = [step for step in launch.launch.prepare if published.repository in step.argv]
    if not steps and published.repository not in launch.launch.argv:
        return f"neither the command nor a step fetches {published.repository}"
    if steps and published.revision is not None and published.revision not in steps[0].argv:
        return f"the step fetches another branch of {published.repository} than {published.revision}"
    words = (*launch.launch.argv, *(word for step in launch.launch.prepare for word in step.argv))
    if steps and not any(step.where.rpartition("/")[2] in word for step in steps for word in words):
        return f"nothing reads {steps[0].where}, which is fetched"
    return None


def check_context(launch: PlannedLaunch) -> str | None:
    """The context is at most that of the model, and holds the longest request of the workload."""
    name = get_plan_engine(launch.plan).launch_options.context
    tokens = launch.get_count(name, launch.plan.settings.context_tokens)
    most, asked = launch.model.max_context, launch.plan.workload.request_tokens
    if most is not None and tokens > most:
        return f"the context of {tokens:,} tokens exceeds that of the model, {most:,}"
    if tokens < asked:
        return f"requests have up to {asked:,} tokens, but the context is {tokens:,}"
    return None


def check_slots(launch: PlannedLaunch) -> str | None:
    """The number of concurrent requests is one that the engine supports."""
    engine = get_plan_engine(launch.plan)
    slots = launch.get_count(engine.launch_options.slots, launch.plan.settings.slots)
    if slots < 1:
        return "no request is computed at a time"
    if engine.max_slots is not None and slots > engine.max_slots:
        return f"{engine.name} computes at most {engine.max_slots:,} requests at a time, not {slots:,}"
    return None


def check_port(launch: PlannedLaunch) -> str | None:
    """The port is one that the engine can listen on."""
    engine = get_plan_engine(launch.plan)
    name = engine.launch_options.port
    port = launch.options.get(name) if name is not None else None
    if port is not None and not (port.isdigit() and 1 <= int(port) <= engine.highest_port):
        return f"{port} is not a port from 1 to {engine.highest_port}"
    return None


def check_cache_type(launch: PlannedLaunch) -> str | None:
    """An 8-bit KV cache is planned only where the engine has kernels for it: by device, chip and kind of attention."""
    if launch.plan.settings.kv_type == "16-bit" or launch.device == "cpu":
        return None
    engine = get_plan_engine(launch.plan)
    why = (
        engine.refuse_eight_bit_cache(_describe_target(launch), launch.model)
        if engine.eight_bit_cache is not None
        else None
    )
    return f"an 8-bit KV cache is not possible with {engine.name} here: {why}" if why is not None else None


def check_layout_kinds(launch: PlannedLaunch) -> str | None:
    """The layout has only kinds of parallelism that the engine supports."""
    engine, layout = get_plan_engine(launch.plan), launch.plan.parallelism
    for kind in ("tensor", "pipeline", "data", "expert", "attention_data"):
        if getattr(layout, kind) > 1 and kind not in engine.ways:
            return f"{engine.name} has no {kind.replace('_', ' ')} parallelism"
    return None


def check_cards(launch: PlannedLaunch) -> str | None:
    """The machine has as many accelerators as the layout needs, and the options name the same number."""
    wanted = _count_ranks(launch)
    if launch.device == "cpu":
        return "the layout divides the model among accelerators, but the CPU computes" if wanted > 1 else None
    if wanted > len(launch.cards):
        return f"the layout needs {wanted} accelerators, but there are {len(launch.cards)}"
    named = get_plan_engine(launch.plan).count_launch_cards(launch)
    if named is not None and named != wanted:
        return f"the options are for {named} accelerators, the layout is for {wanted}"
    return None


def check_hosts(launch: PlannedLaunch) -> str | None:
    """A layout on several hosts belongs to an engine that has a launch for several hosts."""
    if launch.hosts == 1:
        return None
    engine = get_plan_engine(launch.plan)
    if engine.launch_on_node(launch.plan, 8080, nodes=launch.hosts, rank=0, leader=LEADER) is None:
        return f"{engine.name} does not distribute a model over {launch.hosts} hosts"
    return None


def check_heads(launch: PlannedLaunch) -> str | None:
    """Tensor ranks divide the attention heads and the KV heads, or hold whole copies of a KV head."""
    ranks, model = _count_attention_ranks(launch), launch.model
    if model.num_heads and model.num_heads % ranks:
        return f"{model.num_heads} attention heads cannot be divided among {ranks} tensor ranks"
    kv_heads = model.num_kv_heads
    if kv_heads and model.kv_lora_rank is None and kv_heads % ranks and ranks % kv_heads:
        return f"{kv_heads} KV heads cannot be divided among {ranks} tensor ranks"
    return None


def check_widths(launch: PlannedLaunch) -> str | None:
    """Tensor ranks divide the width of each MLP into whole quantization groups or blocks."""
    ranks = _count_attention_ranks(launch)
    if ranks == 1:
        return None
    step = _count_step(launch.loaded)
    for what, width in _list_widths(launch.model):
        if width % ranks or (width // ranks) % step:
            unit = f" in groups of {step}" if step > 1 else ""
            return f"the {what} of {width:,} cannot be divided among {ranks} tensor ranks{unit}"
    return None


def check_experts(launch: PlannedLaunch) -> str | None:
    """Expert ranks get whole experts, and tensor ranks get whole quantization groups of each expert."""
    model, layout = launch.model, launch.plan.parallelism
    if layout.expert > 1:
        if not model.num_experts or model.num_experts < 2:
            return "expert parallelism is planned for a model without experts"
        if model.num_experts % layout.expert:
            return f"{model.num_experts} experts cannot be divided among {layout.expert} ranks"
        return None
    width, step = model.moe_intermediate_size, _count_step(launch.loaded)
    if model.num_experts and width and layout.tensor > 1 and (width % layout.tensor or width // layout.tensor % step):
        unit = f" in groups of {step}" if step > 1 else ""
        return f"the experts' width of {width:,} cannot be divided among {layout.tensor} tensor ranks{unit}"
    return None


def check_stages(launch: PlannedLaunch) -> str | None:
    """Every pipeline stage has at least one layer."""
    stages = launch.plan.parallelism.pipeline
    if stages > max(1, launch.model.num_layers):
        return f"{launch.model.num_layers} layers cannot be divided among {stages} pipeline stages"
    return None


def check_idle_cards(launch: PlannedLaunch) -> str | None:
    """Weights stay in host memory only if the layout uses every accelerator of one host."""
    settings, engine = launch.plan.settings, get_plan_engine(launch.plan)
    placed = settings.gpu_layers
    on_host = bool(settings.host_expert_layers) or (placed is not None and placed < launch.model.num_layers)
    if launch.device == "cpu" or not on_host or "pipeline" not in engine.ways:
        return None
    family = get_card_family(launch.cards[0]) if launch.cards else ""
    cards = [
        card
        for card in find_cards(launch.hardware, engine.vendors)
        if get_card_family(card) == family and card.unified_memory == launch.cards[0].unified_memory
    ]
    here = min(len(cards), launch.hardware.cards_per_node)
    others = [card for card in cards if card not in launch.cards]
    # A card with less memory than the others may be left out: experts are divided evenly.
    least = min((_get_memory(card) for card in launch.cards), default=0)
    if len(launch.cards) < here and any(_get_memory(card) >= least for card in others):
        return f"weights are in host memory while {here - len(launch.cards)} of {here} accelerators are idle"
    return None


def _get_memory(card: Accelerator) -> int:
    return (card.free_bytes if card.free_bytes is not None else card.memory_bytes) or 0


def check_named_cards(launch: PlannedLaunch) -> str | None:
    """A plan for some of the machine's accelerators names as many as its layout has, all of one vendor, and its process
    sees these and no others."""
    named, settings = launch.plan.settings.cards, launch.plan.settings
    if not named:
        return None
    wanted, found = _count_ranks(launch), pick_cards(launch.hardware, named)
    if len(set(named)) != wanted:
        return f"the plan names {len(set(named))} accelerators for a layout of {wanted}"
    if len(found) < len(named):
        missing = sorted(set(named) - {card.index for card in found})
        return f"the machine has no accelerator {', '.join(map(str, missing))}"
    if len({get_card_family(card) for card in found}) > 1:
        return "one process does not compute on accelerators of different vendors"
    shown = show_cards(settings.device, found)
    wrong = [name for name, value in shown.items() if launch.launch.env.get(name) != value]
    return f"{wrong[0]} does not name the accelerators of the plan" if wrong else None


def _count_ranks(launch: PlannedLaunch) -> int:
    layout = launch.plan.parallelism
    return layout.tensor * layout.pipeline * layout.data


def check_adapters(launch: PlannedLaunch) -> str | None:
    """The launch loads every LoRA adapter of the workload, and has memory for their rank."""
    engine, wanted = get_plan_engine(launch.plan), launch.plan.workload.adapters
    traits = engine.adapters
    if not wanted:
        return None
    if traits is None:
        return f"{engine.name} {engine.no_adapters}"
    rank = launch.get_count(traits.rank, engine.choose_adapter_rank(launch.plan.workload))
    if rank < launch.plan.workload.adapter_rank:
        return f"{traits.rank} {rank} is less than the rank of the adapters, {launch.plan.workload.adapter_rank}"
    if traits.slots is not None and not launch.get_count(traits.slots, 0):
        return f"no memory is reserved for LoRA adapters: {traits.slots} is missing"
    if traits.names is None or (traits.slots is not None and not launch.plan.workload.names_adapters):
        return None
    named = launch.get_values(traits.names)
    if traits.separator is not None:
        named = tuple(one for value in named for one in value.split(traits.separator))
    return f"{traits.names} lists {len(named)} of {len(wanted)} adapters" if len(named) < len(wanted) else None


def _count_attention_ranks(launch: PlannedLaunch) -> int:
    """Tensor ranks that divide attention and dense MLPs; attention replicas each have all of it."""
    layout = launch.plan.parallelism
    return max(1, layout.tensor // max(1, layout.attention_data))


def _count_step(model: Model) -> int:
    """Weights that share a scale, and so cannot be divided."""
    details = model.quantization_details
    return max(details.group_size or 1, *(details.block or (1,))) if details is not None else 1


def _list_widths(model: Model) -> Iterator[tuple[str, int]]:
    """Widths of the dense MLPs, as far as the model has such weights."""
    dense = model.num_experts is None or any(part.name == "mlp" for part in model.parts)
    if dense and model.intermediate_size:
        yield "MLP width", model.intermediate_size
    if model.num_experts and model.shared_expert_intermediate_size:
        yield "shared experts' width", model.shared_expert_intermediate_size


TABLE = "the engine's rows in docs/quantizations.md"
OPTIONS = "the engine's own parser of options"
DIVISION = "arithmetic: a rank gets whole heads, groups and layers"
GENERAL_RULES = (
    LaunchRule("plan.system", "systems that the engine's package is built for", check_system),
    LaunchRule("plan.device", "architectures that the engine's kernels are built for", check_device),
    LaunchRule("plan.task", OPTIONS, check_task),
    LaunchRule("weights.available", "the model's own files", check_weights, "the same model in another format"),
    LaunchRule("weights.kernels", TABLE, check_kernels, "the same model in another quantization"),
    LaunchRule("weights.published", "the entry's sources in facts/data/published_weights.json", check_published),
    LaunchRule("context.length", "the model's configuration", check_context, "a shorter --context"),
    LaunchRule("slots.count", OPTIONS, check_slots, "fewer concurrent requests"),
    LaunchRule("cache.type", TABLE, check_cache_type, "a 16-bit KV cache"),
    LaunchRule("launch.port", "RFC 6335, section 6", check_port),
    LaunchRule("layout.kinds", OPTIONS, check_layout_kinds),
    LaunchRule("layout.cards", OPTIONS, check_cards),
    LaunchRule("layout.visible-cards", "the vendors' variables for visible devices", check_named_cards),
    LaunchRule("layout.hosts", OPTIONS, check_hosts, "an engine that has a launch for several nodes"),
    LaunchRule("layout.heads", DIVISION, check_heads),
    LaunchRule("layout.width", DIVISION, check_widths),
    LaunchRule("layout.experts", DIVISION, check_experts),
    LaunchRule("layout.stages", DIVISION, check_stages),
    LaunchRule("adapters.loaded", OPTIONS, check_adapters, "an engine that serves LoRA adapters"),
    LaunchRule("layout.idle-cards", "physics: accelerator memory is faster than host memory", check_idle_cards),
)
