"""The inputs of a diagnosis besides measurements: the model's bytes and operations, and the machine's rates."""

from __future__ import annotations

from typing import NamedTuple

from bedplate.decide.estimate.machine import host_machine, machine_of
from bedplate.decide.estimate.physics import Shape, link_bytes_s, shape_of
from bedplate.facts.known_models import with_label
from bedplate.values import Figure, Hardware, Model, replaced
from bedplate.values.run import Environment, Subject


class Ground(NamedTuple):
    """`None`: unknown; the diagnosis reports it."""

    shape: Shape | None = None
    bandwidth: Figure | None = None
    """Memory bandwidth in bytes per second, of all devices that share a step."""
    operations: Figure | None = None
    """Matrix operations per second, of all devices that share a step."""
    cores: int | None = None
    """Physical cores."""
    link_bytes_s: float | None = None
    """Bandwidth between the devices that share a step."""
    device: str = "cpu"


def ground_for(
    subject: Subject, model: Model | None, hardware: Hardware | None, environment: Environment | None = None
) -> Ground:
    """Pass `hardware` only if it is the machine of the run; `environment` always is."""
    device = subject.device or (subject.settings.device if subject.settings is not None else None)
    if device is None:
        device = "cpu" if hardware is None or not hardware.accelerators else "cuda"
    devices = max(1, subject.parallelism.tensor)
    shape = shape_of(as_served(model, subject.quantization)) if model is not None else None
    bandwidth, operations = _rates(hardware, device, shape, environment)
    links = link_bytes_s(machine_of(hardware), devices) if hardware is not None and devices > 1 else None
    return Ground(
        shape=shape,
        bandwidth=_times(bandwidth, devices),
        operations=_times(operations, devices),
        cores=hardware.cpu.allowed_physical_cores if hardware is not None else None,
        link_bytes_s=links,
        device=device,
    )


def as_served(model: Model, label: str | None) -> Model:
    """The model in the quantization that the engine served."""
    if label is None or label == model.quantization:
        return model
    return with_label(model, label.upper().replace(" ", ""))


def _rates(
    hardware: Hardware | None, device: str, shape: Shape | None, environment: Environment | None
) -> tuple[Figure | None, Figure | None]:
    bandwidth = operations = None
    if hardware is not None:
        if device == "cpu":
            machine, bandwidth = host_machine(hardware), hardware.memory.bandwidth_bytes_s
        else:
            card = hardware.accelerators[0] if hardware.accelerators else None
            machine, bandwidth = machine_of(hardware), card.bandwidth_bytes_s if card is not None else None
        if bandwidth is None and machine.bandwidth_bytes_s > 0:
            bandwidth = _exactly(machine.bandwidth_bytes_s, "spec", machine.name)
        operations = _matrix_rate(hardware, device, shape)
    if environment is None:
        return bandwidth, operations
    is_measured = bandwidth is not None and bandwidth.basis == "measured"
    if not is_measured and environment.bandwidth_bytes_s is not None:
        bandwidth = _exactly(environment.bandwidth_bytes_s, "measured", "bedplate probe --measure")
    if operations is None and environment.operations_s is not None:
        operations = _exactly(environment.operations_s, "measured", "bedplate probe --measure")
    return bandwidth, operations


def _exactly(value: float, basis: str, source: str) -> Figure:
    return Figure(
        value=value, low=value, high=value, basis="measured" if basis == "measured" else "spec", source=source
    )


def _matrix_rate(hardware: Hardware, device: str, shape: Shape | None) -> Figure | None:
    """The measured rate of the data type that engines multiply these weights in, or else the rate of the data sheet."""
    where = "cpu" if device == "cpu" else "0"
    measured = {one.data_type: one.operations_s for one in (hardware.measured.matrix if hardware.measured else ())
                if one.device == where}  # fmt: skip
    if device == "cpu":
        narrow = shape is not None and shape.bits < 12
        order, machine = ("int8", "fp32") if narrow else ("fp32", "int8"), host_machine(hardware)
    else:
        order, machine = ("bf16", "fp16"), machine_of(hardware)
    found = next((measured[name] for name in order if name in measured), None)
    return found or _sheet(machine.rate(*order), machine.name)


def _sheet(rate: float | None, name: str) -> Figure | None:
    return None if rate is None else _exactly(rate, "spec", name)


def _times(figure: Figure | None, devices: int) -> Figure | None:
    if figure is None or devices == 1:
        return figure
    return replaced(figure, value=figure.value * devices, low=figure.low * devices, high=figure.high * devices)
