"""What is run on each node, if one command is not enough: several nodes, or replicas with a server each."""

from __future__ import annotations

from bedplate.engines import Engine
from bedplate.engines.base import find_cards
from bedplate.engines.visible import pick_cards, show_cards
from bedplate.facts.chips import find_accelerator_chip
from bedplate.values import Decision, Hardware, Launch, NodeLaunch, Plan, replace_fields

ADDRESS = "NODE_{node}_ADDRESS"
"""Written in commands instead of the address of a node, which a plan does not know."""


def count_host_cards(hardware: Hardware, engine: Engine) -> int:
    """Accelerators of one operating system. A rack whose GPUs share links still has many hosts."""
    cards = find_cards(hardware, engine.vendors)
    chip = find_accelerator_chip(cards[0]) if cards else None
    each = hardware.cards_per_node
    return max(1, min(each, (chip.per_host if chip is not None else None) or each))


def make_launch(plan: Plan, engine: Engine, hardware: Hardware, port: int) -> Launch:
    """The launch of a plan on this machine: if the plan names its accelerators, the process sees no others."""
    launch = engine.launch(plan, port)
    shown = show_cards(plan.settings.device, pick_cards(hardware, plan.settings.cards))
    return replace_fields(launch, env={**launch.env, **shown}) if shown else launch


def list_node_launches(plan: Plan, engine: Engine, hardware: Hardware, port: int) -> tuple[NodeLaunch, ...]:
    """The commands of all nodes; empty if one command is enough. Every command has an endpoint of its own."""
    layout, each = plan.parallelism, count_host_cards(hardware, engine)
    wide = layout.tensor * layout.pipeline
    is_separate = layout.data > 1 and not engine.starts_replicas(plan.model)
    if plan.settings.device == "cpu" or (wide * layout.data <= each and not is_separate):
        return ()
    if wide > each:
        return _launch_wide_replicas(plan, engine, port, -(-wide // each))
    if is_separate:
        return _launch_separate_replicas(plan, engine, hardware, port, each // wide)
    found: list[NodeLaunch] = []
    most, first = each // wide, 0
    while first < layout.data:
        here = replace_fields(plan, parallelism=replace_fields(layout, data=min(most, layout.data - first)))
        launch = make_launch(here, engine, hardware, port)
        found.append(NodeLaunch(node=len(found), replica=first, argv=launch.argv, env=launch.env))
        first += here.parallelism.data
    return tuple(found)


def _launch_separate_replicas(
    plan: Plan, engine: Engine, hardware: Hardware, port: int, each: int
) -> tuple[NodeLaunch, ...]:
    """A server for each replica, `each` of them on a node, with its own accelerators and port."""
    layout = plan.parallelism
    cards = pick_cards(hardware, plan.settings.cards) or hardware.accelerators
    alone, wide = replace_fields(plan, parallelism=replace_fields(layout, data=1)), layout.tensor * layout.pipeline
    found = []
    for replica in range(layout.data):
        node, place = divmod(replica, each)
        launch = engine.launch(alone, port + place)
        own = cards[place * wide : (place + 1) * wide]
        env = {**launch.env, **show_cards(plan.settings.device, own)} if each > 1 else launch.env
        found.append(NodeLaunch(node=node, replica=replica, argv=launch.argv, env=env))
    return tuple(found)


def _launch_wide_replicas(plan: Plan, engine: Engine, port: int, hosts: int) -> tuple[NodeLaunch, ...]:
    """Each replica on `hosts` nodes, the first of which has its endpoint."""
    alone = replace_fields(plan, parallelism=replace_fields(plan.parallelism, data=1))
    found: list[NodeLaunch] = []
    for replica in range(plan.parallelism.data):
        leader = replica * hosts
        for rank in range(1 if engine.node_starter is not None else hosts):
            address = ADDRESS.format(node=leader)
            launch = engine.launch_on_node(alone, port, nodes=hosts, rank=rank, leader=address)
            if launch is None:
                return ()
            found.append(
                NodeLaunch(
                    node=leader + rank,
                    starts=hosts if engine.node_starter is not None else 1,
                    replica=replica,
                    serves=rank == 0,
                    argv=launch.argv,
                    env=launch.env,
                )
            )
    return tuple(found)


def has_separate_replicas(decision: Decision) -> bool:
    """Whether several servers run on one node, each with a replica."""
    nodes = [one.node for one in decision.node_launches]
    return len(set(nodes)) < len(nodes)
