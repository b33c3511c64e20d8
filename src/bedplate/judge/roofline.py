"""The inputs of a diagnosis besides measurements: the model's bytes and operations, and the machine's rates."""

from __future__ import annotations

from typing import NamedTuple

from bedplate.decide.cards import keep_cards
from bedplate.decide.estimate.machine import get_host_rates, get_machine_rates
from bedplate.decide.estimate.physics import ModelShape, get_link_bytes_s, get_shape
from bedplate.engines.visible import pick_cards
from bedplate.facts.known_models import apply_label
from bedplate.values import Figure, Hardware, Model, replace_fields
from bedplate.values.run import RunEnvironment, Subject


class Roofline(NamedTuple):
    """`None`: unknown; the diagnosis reports it."""

    shape: ModelShape | None = None
    bandwidth: Figure | None = None
    """Memory bandwidth in bytes per second, of all devices that share a step."""
    operations: Figure | None = None
    """Matrix operations per second, of all devices that share a step."""
    cores: int | None = None
    """Physical cores."""
    link_bytes_s: float | None = None
    """Bandwidth between the devices that share a step."""
    device: str = "cpu"


def build_roofline(
    subject: Subject, model: Model | None, hardware: Hardware | None, environment: RunEnvironment | None = None
) -> Roofline:
    """Pass `hardware` only if it is the machine of the run; `environment` always is."""
    device = subject.device or (subject.settings.device if subject.settings is not None else None)
    if device is None:
        device = "cpu" if hardware is None or not hardware.accelerators else "cuda"
    if hardware is not None and subject.settings is not None and subject.settings.cards:
        hardware = keep_cards(hardware, pick_cards(hardware, subject.settings.cards))
    devices = max(1, subject.parallelism.tensor)
    shape = get_shape(apply_quantization(model, subject.quantization)) if model is not None else None
    bandwidth, operations = _find_rates(hardware, device, shape, environment)
    links = get_link_bytes_s(get_machine_rates(hardware), devices) if hardware is not None and devices > 1 else None
    return Roofline(
        shape=shape,
        bandwidth=_multiply_figure(bandwidth, devices),
        operations=_multiply_figure(operations, devices),
        cores=hardware.cpu.allowed_physical_cores if hardware is not None else None,
        link_bytes_s=links,
        device=device,
    )


def apply_quantization(model: Model, label: str | None) -> Model:
    """The model in the quantization that the engine served."""
    if label is None or label == model.quantization:
        return model
    return apply_label(model, label.upper().replace(" ", ""))


def _find_rates(
    hardware: Hardware | None, device: str, shape: ModelShape | None, environment: RunEnvironment | None
) -> tuple[Figure | None, Figure | None]:
    bandwidth = operations = None
    if hardware is not None:
        if device == "cpu":
            machine, bandwidth = get_host_rates(hardware), hardware.memory.bandwidth_bytes_s
        else:
            card = hardware.accelerators[0] if hardware.accelerators else None
            machine, bandwidth = get_machine_rates(hardware), card.bandwidth_bytes_s if card is not None else None
        if bandwidth is None and machine.bandwidth_bytes_s > 0:
            bandwidth = _make_exact_figure(machine.bandwidth_bytes_s, "spec", machine.name)
        operations = _find_matrix_rate(hardware, device, shape)
    if environment is None:
        return bandwidth, operations
    is_measured = bandwidth is not None and bandwidth.basis == "measured"
    if not is_measured and environment.bandwidth_bytes_s is not None:
        bandwidth = _make_exact_figure(environment.bandwidth_bytes_s, "measured", "bedplate probe --measure")
    if operations is None and environment.operations_s is not None:
        operations = _make_exact_figure(environment.operations_s, "measured", "bedplate probe --measure")
    return bandwidth, operations


def _make_exact_figure(value: float, basis: str, source: str) -> Figure:
    return Figure(
        value=value, low=value, high=value, basis="measured" if basis == "measured" else "spec", source=source
    )


def _find_matrix_rate(hardware: Hardware, device: str, shape: ModelShape | None) -> Figure | None:
    """The measured rate of the data type that engines multiply these weights in, or else the rate of the data sheet."""
    where = "cpu" if device == "cpu" else str(hardware.accelerators[0].index) if hardware.accelerators else "0"
    measured = {one.data_type: one.operations_s for one in (hardware.measured.matrix if hardware.measured else ())
                if one.device == where}  # fmt: skip
    if device == "cpu":
        narrow = shape is not None and shape.bits < 12
        order, machine = ("int8", "fp32") if narrow else ("fp32", "int8"), get_host_rates(hardware)
    else:
        order, machine = ("bf16", "fp16"), get_machine_rates(hardware)
    found = next((measured[name] for name in order if name in measured), None)
    return found or _make_spec_figure(machine.rate(*order), machine.name)


def _make_spec_figure(rate: float | None, name: str) -> Figure | None:
    return None if rate is None else _make_exact_figure(rate, "spec", name)


def _multiply_figure(figure: Figure | None, devices: int) -> Figure | None:
    if figure is None or devices == 1:
        return figure
    return replace_fields(figure, value=figure.value * devices, low=figure.low * devices, high=figure.high * devices)
