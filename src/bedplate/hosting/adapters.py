"""LoRA adapters of a running service: listed, loaded and unloaded."""

from __future__ import annotations

import contextlib
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from bedplate.engines import get_engine as engine_by_id
from bedplate.errors import BedplateError, ExternalFailure, NotPossible, UsageError
from bedplate.hosting.control import Tell
from bedplate.run.starting import list_adapter_fields
from bedplate.values.record import Record
from bedplate.values.workload import LoraAdapter

if TYPE_CHECKING:
    from bedplate.engines.traits import AdapterTraits
    from bedplate.hosting.host import Host, HostedEngine, HostedService

POST_LIMIT_S = 300.0
"""How long an engine may take to read an adapter."""
DRAIN_S = 300.0
"""How long requests for an adapter may take before it is unloaded."""


class AdapterRequest(Record, frozen=True, kw_only=True):
    do: Literal["list", "load", "unload"] = "list"
    model: str | None = None
    """The served name of the base model; None for the only one."""
    name: str = ""
    path: str = ""
    """Of an adapter that the engine has not loaded before."""
    tenants: Annotated[tuple[str, ...], msgspec.Meta(max_length=1000)] = ()
    """Those that may use it; empty: those of its model."""


class ServedAdapter(Record, frozen=True, kw_only=True):
    """A LoRA adapter of a running service."""

    name: str
    """The model name that requests use."""
    model: str
    """The base model."""
    path: str
    state: Literal["loaded", "unloaded"]
    """unloaded: requests cannot use it; an engine that loads adapters only at its start still has it in memory."""
    at_run_time: bool
    """Whether it was loaded into the running engine."""
    tenants: tuple[str, ...] = ()
    """Those that may use it; empty: everybody."""


class AdapterReport(Record, frozen=True, kw_only=True):
    service: str
    adapters: tuple[ServedAdapter, ...]


async def change_adapters(host: Host, asked: AdapterRequest, tell: Tell) -> AdapterReport:
    if asked.do == "list":
        services = [host.get_service(asked.model)] if asked.model is not None else list(host.services.values())
        return AdapterReport(service=host.name, adapters=tuple(one for s in services for one in list_adapters(s)))
    service = _find_owner(host, asked.name) if asked.do == "unload" and asked.model is None else None
    service = service or host.get_service(asked.model)
    service.check_swappable()
    if host.state != "ready" or service.current_operation is not None or service.state != "ready":
        cause = service.current_operation or f"it is {service.state}"
        raise NotPossible(f"the adapters of {service.name} cannot be changed now", cause=cause, hint="try again later")
    with service.engage(f"changing the adapter {asked.name}"):
        await (_load(host, service, asked) if asked.do == "load" else _unload(host, service, asked.name))
    return AdapterReport(service=host.name, adapters=tuple(list_adapters(service)))


def list_adapters(service: HostedService) -> list[ServedAdapter]:
    named = {name for name, _ in list_adapter_fields(service.readied.plan)} if service.on is None else set()
    offered = {one.model for engine in service.engines for one in engine.backend.followers}
    known = [one for one in service.readied.plan.workload.adapters if one.served_name in named]
    return [
        ServedAdapter(
            name=one.served_name, model=service.name, path=one.path, at_run_time=at_run_time,
            state="loaded" if one.served_name in offered or not service.engines else "unloaded",
            tenants=one.tenants or service.wanted.tenants,
        )
        for at_run_time, adapters in ((False, known), (True, service.loaded_adapters.values()))
        for one in adapters
    ]  # fmt: skip


def _find_owner(host: Host, name: str) -> HostedService | None:
    return next((s for s in host.services.values() for one in list_adapters(s) if one.name == name), None)


async def _load(host: Host, service: HostedService, asked: AdapterRequest) -> None:
    plan = service.readied.plan
    known = {one.served_name: one for one in plan.workload.adapters if plan.workload.names_adapters}
    if asked.name in service.withdrawn:
        service.withdrawn.discard(asked.name)
        if service.on_demand:
            host.gateway.register_models(asked.name)
        host.gateway.allow(asked.name, asked.tenants or known[asked.name].tenants or service.wanted.tenants)
        for engine in service.engines:
            host.offer_adapters(service, engine.backend, engine.plan, [asked.name])
        host.say(f"the adapter {asked.name} of {service.name} is loaded again")
        return
    if host.gateway.find_route(asked.name) is not None:
        raise UsageError(f"{asked.name} is already the name of a served model", hint="choose another name")
    traits = _check_loads(service)
    if not asked.path:
        raise UsageError("the path of the adapter is missing", hint=f"bedplate adapters load {asked.name} PATH")
    adapter = LoraAdapter(path=asked.path, name=asked.name, tenants=asked.tenants)
    if adapter.served_name != asked.name:
        raise UsageError(f"{asked.name!r} cannot be the name of an adapter", hint=f"for example {adapter.served_name}")
    done: list[HostedEngine] = []
    try:
        for engine in service.engines:
            await post_adapter(engine, traits.load_path, adapter)
            done.append(engine)
    except BedplateError:
        for engine in done:
            with contextlib.suppress(BedplateError):
                await post_adapter(engine, traits.unload_path, adapter)
        raise
    service.loaded_adapters[asked.name] = adapter
    host.gateway.allow(asked.name, asked.tenants or service.wanted.tenants)
    if service.on_demand:
        host.gateway.register_models(asked.name)
    for engine in service.engines:
        host.offer_adapters(service, engine.backend, engine.plan, [asked.name])
    host.say(f"the adapter {asked.name} of {service.name} is loaded")


def _check_loads(service: HostedService) -> AdapterTraits:
    """The traits of an engine that loads adapters while it runs; raises if this one does not."""
    plan = service.readied.plan
    engine = engine_by_id(plan.engine)
    traits = engine.adapters
    if traits is None or traits.selects is None:
        raise NotPossible(
            f"{engine.name} cannot choose a LoRA adapter for each request", hint="an engine that can: docs/plan.md"
        )
    if traits.load_path is None:
        raise NotPossible(
            f"{engine.name} loads LoRA adapters only at its start",
            hint="list it in workload.lora_adapters of the intent file and start the service again",
        )
    if not plan.workload.adapters or plan.workload.names_adapters:
        raise NotPossible(
            f"{engine.name} was started without room for adapters that are loaded later",
            cause="workload.lora_adapters has no number" if not plan.workload.adapters else "it has a list of adapters",
            hint="workload: {lora_adapters: 4} in the intent file reserves the memory of four",
        )
    return traits


async def _unload(host: Host, service: HostedService, name: str) -> None:
    found = {one.name: one for one in list_adapters(service) if one.state == "loaded"}
    if name not in found:
        names = ", ".join(found) or "none"
        raise NotPossible(f"{service.name} has no loaded adapter {name}", hint=f"loaded: {names}")
    backends = [one for engine in service.engines for one in engine.backend.followers if one.model == name]
    for engine in service.engines:
        engine.backend.followers = [one for one in engine.backend.followers if one.model != name]
    for backend in backends:
        if not await host.gateway.remove(backend, within_s=DRAIN_S):
            await host.gateway.remove(backend, within_s=0, cut=True)
    if service.on_demand:
        host.gateway.unregister_model(name)
    if (adapter := service.loaded_adapters.pop(name, None)) is None:
        service.withdrawn.add(name)
    else:
        traits = _check_loads(service)
        for engine in service.engines:
            await post_adapter(engine, traits.unload_path, adapter)
    host.say(f"the adapter {name} of {service.name} is unloaded")


async def post_adapter(engine: HostedEngine, path: str | None, adapter: LoraAdapter) -> None:
    """Lets a running engine load or unload an adapter; raises with its reason if it refuses."""
    import aiohttp

    if path is None or engine.url is None:
        raise NotPossible(f"{engine.id} is not ready", hint="try again later")
    key = engine.backend.engine_key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"lora_name": adapter.served_name, "lora_path": adapter.path}
    name = engine.supervisor.engine.name
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=POST_LIMIT_S), trust_env=False) as session,
            session.post(f"{engine.url}{path}", json=body, headers=headers) as answer,
        ):
            text = await answer.text(errors="replace")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ExternalFailure(f"{name} did not answer", cause=str(error) or type(error).__name__) from error
    if answer.status != HTTPStatus.OK:
        raise NotPossible(f"{name} refused the adapter {adapter.served_name}", cause=_find_message(text))


def _find_message(text: str) -> str:
    try:
        found: Any = msgspec.json.decode(text)
        message = (found.get("error") or found)["message"]
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError):
        message = text
    return " ".join(str(message).split())[:300]
