"""Endpoints elsewhere of a host: they are added to the gateway, and checked regularly."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from bedplate.errors import UsageError
from bedplate.run.gateway.choosing import ChoosingRoute
from bedplate.run.gateway.elsewhere import RemoteAddress, RemoteBackend, read_key
from bedplate.run.gateway.translate.front import NATIVE
from bedplate.values.capabilities import Capabilities
from bedplate.values.service import RemoteEndpointStatus

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.client import _RequestContextManager

    from bedplate.run.gateway import Gateway
    from bedplate.run.ready import PreparedModel
    from bedplate.values.service import EndpointOrder, Order

CHECK_S = 5.0
CHECK_TIMEOUT_S = 5.0
LOST_AFTER = 3
"""After so many failed checks in a row the endpoint gets no requests, and its running ones are sent elsewhere."""
ANSWERS_WITHOUT_LIST = (404, 405, 501)
"""Statuses of endpoints that work and do not list their models."""
UNKNOWN_PATH = (200, *ANSWERS_WITHOUT_LIST)
"""Statuses of a path that an endpoint does not have. Those that have it reject a request without content."""


def make_endpoints(order: Order, made: Sequence[PreparedModel]) -> list[RemoteBackend]:
    """The backends of an order, with the names of the local models that they join. Raises `UsageError`."""
    local = {
        alias.lower(): one for one in made for alias in (one.name, one.plan.model.name, *one.plan.model.files)
    }  # fmt: skip
    found = [_make_endpoint(one, order, made, local) for one in order.endpoints]
    for endpoint, backend in zip(order.endpoints, found, strict=True):
        same = [one.tenants for one, other in zip(order.endpoints, found, strict=True) if other.model == backend.model]
        if any(set(tenants) != set(endpoint.tenants) for tenants in same):
            raise UsageError(f"the endpoints of {backend.model} have different tenants", hint="give all the same ones")
    return found


def check_endpoints(order: Order) -> None:
    """Checks addresses and keys before anything is installed."""
    for one in order.endpoints:
        read_key(one.key_env, _parse_address(one, order))
    if order.endpoints and order.bundle is not None:
        raise UsageError("--bundle and endpoints elsewhere cannot be combined: a bundle uses no network")
    if order.routing is not None and not order.endpoints:
        raise UsageError("routing: there are no endpoints elsewhere to choose from", hint="services: [{url: …}]")


def _parse_address(one: EndpointOrder, order: Order) -> RemoteAddress:
    address = RemoteAddress.from_url(one.url, "url")
    if address.is_loopback and address.port == order.port:
        raise UsageError(f"url: {one.url} is the address of this endpoint itself")
    return address


def _make_endpoint(
    one: EndpointOrder, order: Order, made: Sequence[PreparedModel], local: Mapping[str, PreparedModel]
) -> RemoteBackend:
    address = _parse_address(one, order)
    name = one.name or one.model or (made[0].name if made else None)
    if name is None:
        raise UsageError(f"{one.url}: the model is not named", hint="model: NAME, as the endpoint lists it")
    joined = local.get(name.lower())
    if joined is not None and joined.decided.wanted.is_on_demand:
        raise UsageError(f"{joined.name}: ttl cannot be combined with an endpoint elsewhere of the same name")
    if joined is not None and one.tenants and set(one.tenants) != set(joined.decided.wanted.tenants):
        raise UsageError(f"{joined.name}: an endpoint elsewhere must have the tenants of the model that it joins")
    model = joined.name if joined is not None else name
    backend = RemoteBackend(model, address, read_key(one.key_env, address), sent_name=one.model or model)
    backend.share, backend.price, backend.rank = one.share, one.price_per_million_tokens, one.rank
    backend.wait_s = one.wait_s
    return backend


class EndpointWatch:
    """Checks the endpoints of one host and sets their state."""

    def __init__(self, backends: Sequence[RemoteBackend], say: Callable[[str], None]) -> None:
        self.backends = backends
        self._say = say
        self._failures = dict.fromkeys(backends, 0)
        self.checked = asyncio.Event()
        """Set when each endpoint was checked once."""

    async def run(self) -> None:
        import aiohttp

        # Neither a proxy nor a .netrc of the environment: the key goes to the endpoint alone.
        timeout = aiohttp.ClientTimeout(total=CHECK_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
            while True:
                await asyncio.gather(*(self._check(backend, session) for backend in self.backends))
                self.checked.set()
                await asyncio.sleep(CHECK_S)

    async def _check(self, backend: RemoteBackend, session: aiohttp.ClientSession) -> None:
        failure = await _find_failure(backend, session)
        if failure is None:
            self._failures[backend] = 0
            if backend.state != "ready":
                backend.lacking_apis = await _find_lacking_apis(backend, session)
                self._say(f"the endpoint {backend.engine} answers, for {backend.model}")
                backend.reason = None
                backend.state = "ready"
            return
        self._failures[backend] += 1
        if backend.state == "ready" and self._failures[backend] < LOST_AFTER:
            return
        was_ready, known = backend.state == "ready", backend.reason == failure
        backend.reason = failure
        if not known:
            self._say(f"the endpoint {backend.engine} cannot be used for {backend.model}: {failure}")
        if was_ready or backend.state == "loading":
            backend.state = "restarting"
        if was_ready and backend.drop_requests is not None:
            backend.drop_requests()


async def _find_failure(backend: RemoteBackend, session: aiohttp.ClientSession) -> str | None:
    """Why the endpoint cannot be used; `None`: it can."""
    import aiohttp

    try:
        async with _request(backend, session, "GET", "/v1/models") as answer:
            status = answer.status
            with contextlib.suppress(ValueError, aiohttp.ClientPayloadError):
                listed = await answer.json(content_type=None)
                rows = {str(row.get("id")).lower(): row for row in listed["data"]} if status == 200 else {}
                if rows and backend.sent_name.lower() not in rows:
                    return f"it does not list the model {backend.sent_name!r}"
                if rows:
                    _read_row(backend, rows[backend.sent_name.lower()])
    except (LookupError, TypeError, AttributeError):
        return None  # it answers, in a format of its own
    except TimeoutError:
        return f"no answer within {CHECK_TIMEOUT_S:g} s"
    except aiohttp.ClientConnectorCertificateError:
        return "its TLS certificate is not valid"
    except (aiohttp.ClientError, OSError) as error:
        cause = getattr(error, "strerror", None) or type(error).__name__
        return f"it cannot be reached ({cause})"
    if status < 300 or status in ANSWERS_WITHOUT_LIST:
        return None
    if status in (401, 403):
        return "it rejects the API key" if backend.engine_key else "it requires an API key: set key_env"
    if status < 400:
        return "it answers with a redirect, which is not followed"
    return f"it answers with status {status}"


def _request(
    backend: RemoteBackend, session: aiohttp.ClientSession, method: str, path: str, body: bytes | None = None
) -> _RequestContextManager:
    headers = {"Authorization": f"Bearer {backend.engine_key}"} if backend.engine_key else {}
    if body is not None:
        headers["Content-Type"] = "application/json"
    options = {"ssl": backend.connect_options["ssl"]} if backend.connect_options else {}
    url = f"{backend.remote.url if backend.remote is not None else ''}{path}"
    return session.request(method, url, data=body, headers=headers, allow_redirects=False, **options)


def _read_row(backend: RemoteBackend, row: Mapping[str, Any]) -> None:
    """Takes over what an endpoint lists: vLLM and SGLang the context of the model, bedplate its capabilities too."""
    context = row.get("max_model_len")
    backend.context_tokens = context if type(context) is int and context > 0 else None
    try:
        known = msgspec.convert(row.get("capabilities"), Capabilities | None)
    except msgspec.ValidationError:  # another service has something else of this name
        known = None
    if known != backend.capabilities:
        backend.capabilities = known
        backend.notify()


async def _find_lacking_apis(backend: RemoteBackend, session: aiohttp.ClientSession) -> frozenset[str]:
    """The other APIs that the endpoint does not have, so that requests are translated for it."""
    import aiohttp

    # An endpoint with several models answers 404 to a request that names none.
    empty = msgspec.json.encode({"model": backend.sent_name})
    lacking = set()
    for path, api in NATIVE.items():
        if path.count(b"/") > 2:  # a path below the API's own
            continue
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with _request(backend, session, "POST", path.decode(), empty) as answer:
                if answer.status in UNKNOWN_PATH:
                    lacking.add(api)
    return frozenset(lacking)


def describe_endpoints(gateway: Gateway, backends: Sequence[RemoteBackend]) -> tuple[RemoteEndpointStatus, ...]:
    latencies = {
        link.backend: latency.ttft_s
        for route in gateway.routes
        if isinstance(route, ChoosingRoute)
        for link, latency in route.latencies.items()
    }
    found = []
    for one in backends:
        ttft_s = latencies.get(one)
        found.append(
            RemoteEndpointStatus(
                url=f"{one.remote.url}/v1" if one.remote is not None else "",
                model=one.model,
                remote_model=one.sent_name,
                state=one.state,
                reason=one.reason if one.state != "ready" else None,
                ejected=not one.health.is_healthy,
                share=one.share,
                price_per_million_tokens=one.price,
                in_flight=one.in_flight,
                sent=one.sent,
                ttft_ms=ttft_s * 1000 if ttft_s is not None else None,
            )
        )
    return tuple(found)
