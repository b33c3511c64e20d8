"""Workload: the shape of the work that is asked for."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from bedplate.values.model import Task
from bedplate.values.record import Record

Count = Annotated[int, msgspec.Meta(ge=1)]
Tokens = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
DEFAULT_THINK_TIME_S = 30.0


class LatencyTarget(Record, frozen=True, kw_only=True):
    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None


class Workload(Record, frozen=True, kw_only=True):
    schema: Literal["workload/1"] = "workload/1"
    users: Count = 1
    concurrency: Count | None = None
    requests_per_s: Positive | None = None
    think_time_s: Positive | None = None
    prompt_tokens: Count = 512
    output_tokens: Count = 256
    context_tokens: Count | None = None
    """The longest conversation a request may have; when absent, prompt and output together."""
    shared_prefix_tokens: Tokens = 0
    structured_output: bool = False
    precision_sensitive: bool = False
    task: Task = "generate"
    volume: Literal["normal", "extreme"] = "normal"
    latency: LatencyTarget | None = None
    origin: Literal["default", "asked", "observed"] = "asked"

    @property
    def request_tokens(self) -> int:
        """The length of one request when it ends."""
        return max(self.prompt_tokens + self.output_tokens, self.context_tokens or 0)

    def in_flight(self, request_s: float | None = None) -> int:
        """Requests in flight: as stated, else by Little's law from the arrival rate, or from users who think.

        Without a known request time everyone is taken to be active at once: an upper bound, never too small a plan.
        """
        if self.concurrency is not None:
            return self.concurrency
        if request_s is None:
            return self.users
        if self.requests_per_s is not None:
            return max(1, math.ceil(self.requests_per_s * request_s))
        think_s = self.think_time_s or DEFAULT_THINK_TIME_S
        return max(1, math.ceil(self.users * request_s / (request_s + think_s)))
