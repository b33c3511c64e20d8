"""Actions of the live page: load, unload, migrate and cancel, with the operations of the control socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from bedplate.errors import BedplateError
from bedplate.run.gateway.origins import is_loopback
from bedplate.run.gateway.pages import PageRequest, PageResponse, respond_error, respond_json
from bedplate.run.gateway.sse import UNREADABLE
from bedplate.values.live import ActionReport
from bedplate.values.migration import Migration
from bedplate.values.record import Record

if TYPE_CHECKING:
    from bedplate.hosting.control import Operation
    from bedplate.hosting.host import Host

OFFERED = ("load", "unload", "migrate", "cancel")


class ActionRequest(Record, frozen=True, kw_only=True):
    """The same as on the control socket; `with` are the arguments of the operation."""

    do: str
    arguments: dict[str, Any] = msgspec.field(default_factory=dict, name="with")


class PageActions:
    """Starts operations that are requested on the page. They continue when the page is closed."""

    def __init__(self, host: Host, operations: Mapping[str, Operation]) -> None:
        self._host = host
        self._operations = {name: operations[name] for name in OFFERED if name in operations}
        self._tasks: set[asyncio.Task[None]] = set()
        self.report: ActionReport | None = None

    def may_act(self, visit: PageRequest) -> bool:
        """Whether the viewer may act: the operator and admins.

        Where no key is required, everybody who can reach the endpoint; then it has to listen on loopback.
        """
        host = self._host
        return visit.sees_all and bool(self._operations) and (host.gateway.needs_key or is_loopback(host.listen.host))

    def handle(self, visit: PageRequest, body: bytes) -> PageResponse:
        """Start the action and answer at once; the page shows its progress."""
        if not self.may_act(visit):
            message = "only the operator and admins may do this; without API keys, only on a loopback address"
            return respond_error(403, message, "action_not_allowed")
        try:
            asked = msgspec.json.decode(body, type=ActionRequest)
            operation = self._operations.get(asked.do)
            if operation is None:
                return respond_error(400, f"{asked.do!r} is not one of {', '.join(self._operations)}", "unknown_action")
            arguments = msgspec.convert(asked.arguments, operation.asks)
        except UNREADABLE as error:  # also where the types are wrong
            return respond_error(400, f"the request body is not valid: {error}", "bad_body")
        model = getattr(arguments, "model", None)
        report = self.report = ActionReport(do=asked.do, model=model, state="running", text="running")
        task = asyncio.get_running_loop().create_task(self._run(operation, arguments, report))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return respond_json({"accepted": asked.do}, 202)

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _run(self, operation: Operation, arguments: Record, report: ActionReport) -> None:
        failed, text = False, "done"
        try:
            outcome = await operation.does(self._host, arguments, lambda text: None)
            if isinstance(outcome, Migration):
                failed = outcome.outcome != "migrated" and outcome.stage != "cancelled"
                text = outcome.outcome + (f": {outcome.reason}" if outcome.reason else "")
        except BedplateError as error:
            failed, text = True, error.summary + (f"; {error.hint}" if error.hint else "")
            self._host.say(f"{report.do} on the live page failed: {error.summary}")
        done = ActionReport(do=report.do, model=report.model, state="failed" if failed else "done", text=text)
        if self.report is report or report.do != "cancel":
            self.report = done
