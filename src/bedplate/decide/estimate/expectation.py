"""The estimate for a plan: times for this machine, model, engine, layout and workload."""

from __future__ import annotations

from bedplate.decide.estimate import local
from bedplate.decide.estimate.arrivals import RequestArrivals, choose_arrivals
from bedplate.decide.estimate.bands import find_bands
from bedplate.decide.estimate.calibration import Band, Expectation, Limit, find_limit
from bedplate.decide.estimate.engines import divides_by_memory, get_timed_engine, get_traits
from bedplate.decide.estimate.local import HostWeights, LocalEstimator
from bedplate.decide.estimate.machine import MachineRates, get_host_rates, get_machine_rates, get_pipeline_rates
from bedplate.decide.estimate.physics import ModelShape, get_shape
from bedplate.values import Estimate, Figure, Hardware, Model, Parallelism, Workload
from bedplate.values.fit import Offload

HOST_READ_SHARE = 0.7
"""Share of the host's memory bandwidth that reading weights reaches (fitted on CPUs)."""
HOST_COMPUTE_SHARE = 0.8
"""Share of the CPU kernels' rate that prompt computation reaches while the host waits for a GPU."""
FEW = 32
"""Requests in flight on one replica; above this, no token is as fast as that of a single request."""
BUSIEST = 0.95
"""Upper limit of the share of time spent on the prompts of others: requests in flight wait for each other."""
BACKENDS = {"nvidia": "cuda", "amd": "rocm", "apple": "metal", "intel": "sycl"}


def estimate_for(
    hardware: Hardware,
    model: Model,
    engine: str,
    layout: Parallelism,
    workload: Workload,
    *,
    slots: int,
    offload: Offload | None = None,
    factor: float = 1.0,
    kv_bits: float = 16.0,
) -> Estimate:
    """The estimate for one plan; figures that cannot be computed are absent."""
    found = compute_expectation(
        hardware, model, engine, layout, workload, slots=slots, offload=offload, factor=factor, kv_bits=kv_bits
    )
    return Estimate() if found is None else to_estimate(found)


def to_estimate(expectation: Expectation) -> Estimate:
    def make_figure(value: float, band: Band) -> Figure:
        low, high = band.get_bounds(value)
        return Figure(value=value, low=low, high=high, basis="estimate", source=expectation.source)

    return Estimate(
        ttft_ms=make_figure(expectation.ttft_s * 1000, expectation.ttft_band),
        tpot_ms=make_figure(expectation.tpot_s * 1000, expectation.tpot_band),
        output_tok_s=make_figure(expectation.output_tok_s, expectation.output_band),
    )


def get_limit(expectation: Expectation) -> Limit:
    """The bottleneck: where the largest part of the time between two tokens is spent."""
    return expectation.limit


def compute_expectation(
    hardware: Hardware,
    model: Model,
    engine: str,
    layout: Parallelism,
    workload: Workload,
    *,
    slots: int,
    offload: Offload | None = None,
    factor: float = 1.0,
    kv_bits: float = 16.0,
    arrivals: RequestArrivals | None = None,
) -> Expectation | None:
    """Times for requests of the workload's length; `None` if the machine's rates are unknown.

    `factor` is the measured speed of this machine relative to the fitted efficiencies: 1.1 is 10% faster. `arrivals`:
    how requests arrive, if not as the workload says.
    """
    engine = get_timed_engine(engine)
    by_memory = layout.pipeline > 1 and divides_by_memory(engine)
    machine = get_pipeline_rates(hardware) if by_memory else get_machine_rates(hardware)
    if machine.bandwidth_bytes_s <= 0 or model.task != "generate" or workload.task != "generate":
        return None
    shape = get_shape(model)
    replicas = max(1, layout.data)
    in_flight = max(1, -(-workload.compute_in_flight() // replicas))
    if in_flight > 1 and get_traits(engine).kernels == "serving" and machine.kind != "cpu":
        from bedplate.decide.estimate import serving

        return serving.expect(
            machine, shape, engine, layout, concurrency=workload.compute_in_flight(),
            prompt_tokens=workload.prompt_tokens,
            output_tokens=workload.output_tokens, slots=slots, cached_tokens=workload.repeated_prefix_tokens,
            factor=factor, arrivals=arrivals or choose_arrivals(workload), kv_bits=kv_bits,
            least_token_s=_compute_one_stream_s(engine, machine, shape, layout, workload, in_flight, kv_bits),
        )  # fmt: skip
    question = local.make_local_estimator(
        engine, get_backend(engine, machine), machine, shape, tensor=layout.tensor, pipeline=layout.pipeline,
        host=get_host_weights(hardware, shape, offload) if offload is not None and offload.host_bytes else None,
        kv_bits=kv_bits, served=True,
    )  # fmt: skip
    return _expect_locally(question, workload, in_flight, max(1, slots), replicas, factor)


def _compute_one_stream_s(
    engine: str, machine: MachineRates, shape: ModelShape, layout: Parallelism, workload: Workload, in_flight: int,
    kv_bits: float,
) -> float:  # fmt: skip
    """The time per token of a single request, as a lower bound: the efficiencies that were fitted on many requests in
    flight are 20% too optimistic for two or three."""
    if in_flight > FEW or layout.expert > 1:
        return 0.0
    question = local.make_local_estimator(
        engine, get_backend(engine, machine), machine, shape, tensor=layout.tensor, pipeline=layout.pipeline,
        kv_bits=kv_bits,
    )  # fmt: skip
    return question.step_s(1, workload.prompt_tokens + workload.output_tokens / 2)


def _expect_locally(
    question: LocalEstimator, workload: Workload, in_flight: int, slots: int, replicas: int, factor: float
) -> Expectation:
    resident = min(in_flight, slots)
    prompt, output = workload.prompt_tokens, workload.output_tokens
    cached = min(workload.repeated_prefix_tokens, prompt - 1)
    part = question.make_step_part(resident, prompt + output / 2)
    step = local.forward(question.profile, part.work)
    step_s = max(step.total_s, part.floor_s)
    prefill_s = question.estimate_prefill_s(prompt - cached, 1, cached)
    accept_s = _get_accept_s(question)
    # The other requests wait while a prompt is computed, so on average every prompt delays every token.
    tpot_s = step_s + prefill_s * (resident - 1) / output
    # A request that arrives waits for the end of a pass, which is half done on average, and for other prompts.
    busy = min(BUSIEST, prefill_s * (resident - 1) / (output * tpot_s))
    queued_s = (step_s + prefill_s * busy / (1 - busy)) / 2 if resident > 1 else 0.0
    request_s = accept_s + prefill_s + output * tpot_s
    waiting_s = max(0.0, in_flight / resident - 1) * request_s
    speed = 1 / factor
    tokens = find_bands(
        "decode" if resident == 1 else "batched decode", question.engine, question.machine, question.shape
    )
    prompts = find_bands("prefill", question.engine, question.machine, question.shape)
    parts = step.split_by_limit()
    parts["compute"] += prefill_s * (resident - 1) / output
    return Expectation(
        ttft_s=(accept_s + prefill_s + step_s + queued_s + waiting_s) * speed,
        tpot_s=tpot_s * speed,
        output_tok_s=min(replicas * resident, workload.compute_in_flight()) * output / request_s * factor,
        limit=find_limit(parts),
        parts_s={name: part * speed for name, part in parts.items()},
        ttft_band=prompts.eighty.invert(),
        tpot_band=tokens.eighty.invert(),
        output_band=tokens.eighty,
        source=_describe_source(question, factor) + tokens.describe_distance(),
        accept_s=accept_s * speed,
    )


def _get_accept_s(question: LocalEstimator) -> float:
    """Time to accept a request and to send its first token, where it was fitted: serving engines on accelerators."""
    if question.traits.kernels != "serving" or question.machine.kind == "cpu":
        return 0.0
    from bedplate.decide.estimate.batching import classify_weights, get_efficiencies

    weights = classify_weights(question.shape)
    return get_efficiencies(question.engine, question.machine.family, weights).request_s


def _describe_source(question: LocalEstimator, factor: float) -> str:
    engines = f"engines {question.key}" if question.key.startswith("like ") else question.key
    source = f"bytes and operations at the efficiencies of {engines}, fitted on published measurements"
    if question.host is not None and question.host.assumed:
        source += "; the host's memory bandwidth is unknown, two channels of DDR5-4800 are assumed"
    return source if factor == 1.0 else f"{source}, times {factor:.2f} as measured on this machine"


def get_backend(engine: str, machine: MachineRates) -> str:
    if machine.kind == "cpu":
        return "cpu"
    graphics = get_traits(engine).graphics_backend
    if graphics is not None and machine.family.startswith("rdna"):
        return graphics
    return BACKENDS.get(machine.vendor, "other")


def get_host_weights(hardware: Hardware, shape: ModelShape, offload: Offload) -> HostWeights | None:
    cpu = get_host_rates(hardware)
    # Two channels of DDR5-4800, the minimum of current machines.
    bandwidth = cpu.bandwidth_bytes_s or 76.8e9
    share = shape.expert_share if shape.experts and offload.kind == "experts" else _compute_read_share(shape)
    read = offload.host_bytes * share
    return HostWeights(
        bytes=read,
        bandwidth_bytes_s=bandwidth * HOST_READ_SHARE,
        cores_ops_s=cpu.plain_ops_s * HOST_COMPUTE_SHARE,
        params=read * 8 / max(shape.bits, 1.0),
        assumed=not cpu.bandwidth_bytes_s,
    )


def _compute_read_share(shape: ModelShape) -> float:
    """The share of all weights that one token reads."""
    if not shape.total_bytes:
        return 1.0
    return min(1.0, (shape.dense_bytes + shape.expert_bytes * shape.expert_share) / shape.total_bytes)
