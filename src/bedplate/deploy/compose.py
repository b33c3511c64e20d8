"""One machine as a Compose file: what fills the models' volume, then an engine for each service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bedplate._version import __version__
from bedplate.deploy.kubernetes import Files, built_images, head_of
from bedplate.deploy.platform import Placed, Platform
from bedplate.deploy.pods import Tree, noted_arguments
from bedplate.deploy.served import GIB, PORT, SETTINGS, Served, served
from bedplate.deploy.yaml_writer import Why, document, why
from bedplate.engines.traits import MODELS
from bedplate.errors import AnswerIsNo
from bedplate.values.intent import Deploy
from bedplate.values.units import seconds

FIRST_PORT = 8000
ROCM_GROUPS = ("video", "render")


def compose(platform: Platform) -> Files:
    """A file for each machine: one, or one for each pool."""
    pools = list(dict.fromkeys(placed.pool.name for placed in platform.services))
    files: Files = {}
    for name in pools:
        here = [copy for placed in platform.services if placed.pool.name == name for copy in _copies(placed)]
        _check_one_machine(here)
        folder = f"{name}/" if len(pools) > 1 else ""
        made = _machine(here, platform.deploy)
        files |= {f"{folder}{path}": text for path, text in made.items()}
    return files


def _copies(placed: Placed) -> list[Placed]:
    """Each a container of its own."""
    if placed.copies == 1:
        return [placed]
    return [replace(placed, name=f"{placed.name}-{number}", copies=1) for number in range(1, placed.copies + 1)]


def _check_one_machine(placed: Sequence[Placed]) -> None:
    pool = placed[0].pool
    if pool.nodes > 1:
        raise AnswerIsNo(
            f"Compose starts containers on one machine, and {pool.name} has {pool.nodes} nodes",
            hint="--emit kubernetes, dynamo or ray; or a pool of one node",
        )


def _machine(here: Sequence[Placed], deploy: Deploy) -> Files:
    units = [served(placed, deploy, whole=True) for placed in here]
    services: Tree = {}
    taken = 0
    for number, unit in enumerate(units):
        services |= _filling(unit, taken, len(units) > 1)
        services[unit.name] = why(_engine(unit, FIRST_PORT + number, taken, len(units) > 1), head_of(unit))
        taken += unit.cards
    tree: Tree = {
        "name": "bedplate",
        "services": services,
        "volumes": {"models": why({}, "the weights, fetched once"), "cache": why({}, "what engines compile, kept")},
    }
    if configs := {f"{unit.name}-{name}": text for unit in units for name, text in unit.files.items()}:
        tree["configs"] = {_config_name(name): {"content": text} for name, text in configs.items()}
    head = (
        f"Made by bedplate {__version__}. Start with: docker compose up --detach --wait\n"
        "A gated model needs HF_TOKEN in the environment, or in a file .env beside this one."
    )
    return {"compose.yaml": document(tree, head)} | built_images(units)


def _filling(unit: Served, first_card: int, several: bool) -> Tree:
    """A container for each step that fills the volume, one after the other; the engine waits for the last."""
    found: Tree = {}
    before: str | None = None
    for step in unit.steps:
        name = f"{unit.name}-{step.name}"
        if step.name == "wait":
            continue
        copied = [_bound(unit)] if unit.steps[0].name == "wait" else []
        entry: Tree = {
            "image": step.image,
            "build": f"./images/{unit.engine.id}" if step.image == unit.image.name and unit.image.dockerfile else None,
            "depends_on": {before: {"condition": "service_completed_successfully"}} if before else None,
            "entrypoint": [_undollared(word) for word in step.command[:1]],
            "command": [_undollared(word) for word in step.command[1:]],
            "user": why("0:0", "volumes are root's when they are new"),
            "environment": {"HF_TOKEN": "${HF_TOKEN:-}", "HOME": "/cache", **step.env},
            "volumes": [f"models:{MODELS}", *copied, "cache:/cache"],
            **(_cards(unit, first_card, several) if step.cards else {}),
            "restart": "on-failure:4",
            "security_opt": ["no-new-privileges:true"],
        }
        found[name] = why(entry, step.note)
        before = name
    return found


def _bound(unit: Served) -> str:
    """A model that is on this machine already is mounted where it lies."""
    origin = unit.placed.plan.model
    where = origin.files[0] if origin.files else f"./{unit.model_path.rpartition('/')[2]}"
    if not where.endswith(".gguf") and origin.files:
        where = where.rpartition("/")[0]
    return f"{where}:{unit.plan.model_path}:ro"


def _undollared(text: str) -> str:
    """Compose would put variables of its own in the place of what begins with a dollar."""
    return text.replace("$", "$$")


def _engine(unit: Served, port: int, first_card: int, several: bool) -> Tree:
    command, arguments = unit.program
    # A model that is made of another, or that lies in a store, is on the volume.
    copied = [step.name for step in unit.steps] == ["wait"]
    filled = [f"{unit.name}-{step.name}" for step in unit.steps if step.name != "wait"]
    found: Tree = {
        "image": why(unit.image.name, unit.image.note) if unit.image.note else unit.image.name,
        "build": f"./images/{unit.engine.id}" if unit.image.dockerfile is not None else None,
        "depends_on": {filled[-1]: {"condition": "service_completed_successfully"}} if filled else None,
        "entrypoint": list(command),
        "command": noted_arguments(unit, [_undollared(word) for word in arguments]),
        "environment": {"HOME": "/cache", "USER": "engine", **unit.launch.env, **_key(unit)},
        "ports": why([f"127.0.0.1:{port}:{PORT}"], "this machine alone: put a gateway with keys before it"),
        "volumes": [*([_bound(unit)] if copied else [f"models:{MODELS}:ro"]), "cache:/cache"],
        "configs": [
            {"source": _config_name(f"{unit.name}-{name}"), "target": f"{SETTINGS}/{name}"} for name in unit.files
        ] or None,
        "shm_size": f"{unit.shm_bytes // GIB}gb" if unit.shm_bytes else None,
        **_cards(unit, first_card, several),
        "healthcheck": _health(unit),
        "stop_grace_period": why(f"{unit.grace_s}s", unit.grace_words + _left(unit)),
        "restart": "unless-stopped",
        "user": why("0:0", "its volumes are root's; of root's rights it has none"),
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "logging": {"driver": "json-file", "options": {"max-size": "50m", "max-file": "3"}},
    }  # fmt: skip
    return found


def _left(unit: Served) -> str:
    if unit.engine.container.drains:
        return ""
    return f". {unit.engine.name} ends at once all the same: stop its clients first"


def _key(unit: Served) -> Tree:
    return {unit.engine.key_variable: f"${{{unit.engine.key_variable}:-}}"} if unit.engine.key_variable else {}


def _cards(unit: Served, first: int, several: bool) -> Tree:
    """The cards of one service; of a machine with several, those that the others leave."""
    limits: Tree = {"limits": {"memory": why(f"{unit.memory_bytes // GIB}G", "processes, /dev/shm and files")}}
    if not unit.cards:
        limits["limits"]["memory"] = why(f"{unit.memory_bytes // GIB}G", "weights, cache and overhead")
        return {"deploy": {"resources": limits}}
    numbers = [str(first + card) for card in range(unit.cards)]
    if unit.plan.settings.device == "cuda":
        device: Tree = {"driver": "nvidia", "capabilities": ["gpu"]}
        device |= {"device_ids": numbers} if several else {"count": unit.cards}
        return {"deploy": {"resources": {**limits, "reservations": {"devices": [device]}}}}
    shown: Tree = {"devices": ["/dev/kfd", "/dev/dri"], "group_add": list(ROCM_GROUPS)}
    if unit.plan.settings.device != "rocm":
        shown = {"devices": ["/dev/dri"], "group_add": ["render"]}
    return {"deploy": {"resources": limits}, **shown}


def _health(unit: Served) -> Why:
    url = f"http://127.0.0.1:{PORT}{unit.launch.health_path}"
    return why(
        {
            "test": ["CMD", *unit.engine.health_command(url)],
            "interval": "15s",
            "timeout": "10s",
            "retries": 8,
            "start_period": f"{unit.start_failures * 10}s",
        },
        f"{unit.load_words}. {seconds(unit.start_failures * 10)} are allowed before it counts as failed",
    )


def _config_name(name: str) -> str:
    return name.replace(".", "-")
