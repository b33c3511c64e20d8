"""The records that every room speaks in."""

from bedplate.values.decision import (
    Challenger,
    Decision,
    Estimate,
    Launch,
    Parallelism,
    Plan,
    Preparation,
    Reason,
    Refusal,
    Remedy,
    Settings,
    Shortage,
    Weights,
)
from bedplate.values.endpoint import Endpoint
from bedplate.values.fit import DeviceNeed, Fit, Offload
from bedplate.values.hardware import (
    Accelerator,
    Cache,
    Cpu,
    Disk,
    GpuProcess,
    Hardware,
    Link,
    Memory,
    NumaNode,
    Pcie,
)
from bedplate.values.measurements import Measurements
from bedplate.values.model import LayerGroup, Model, Part, Quantization, TensorGroup
from bedplate.values.record import Basis, Figure, Record, estimate, from_json, replaced, to_json
from bedplate.values.workload import LatencyTarget, Workload

__all__ = [
    "Accelerator", "Basis", "Cache", "Challenger", "Cpu", "Decision", "DeviceNeed", "Disk", "Endpoint",
    "Estimate", "Figure", "Fit", "GpuProcess", "Hardware", "LatencyTarget", "Launch", "LayerGroup", "Link",
    "Measurements", "Memory", "Model", "NumaNode", "Offload", "Parallelism", "Part", "Pcie", "Plan",
    "Preparation", "Quantization", "Reason", "Record", "Refusal", "Remedy", "Settings", "Shortage",
    "TensorGroup", "Weights", "Workload", "estimate", "from_json", "replaced", "to_json",
]  # fmt: skip
