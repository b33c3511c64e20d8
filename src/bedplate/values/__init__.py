"""The records that the packages of bedplate exchange."""

from bedplate.values.arrival import ArrivalProcess, RequestLoad
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
from bedplate.values.model import LayerGroup, Model, ModelPart, Quantization, TensorGroup
from bedplate.values.record import Basis, Figure, Record, from_json, make_estimate, replace_fields, to_json
from bedplate.values.workload import LatencyTarget, Workload

__all__ = [
    "Accelerator",
    "ArrivalProcess",
    "Basis",
    "Cache",
    "Challenger",
    "Cpu",
    "Decision",
    "DeviceNeed",
    "Disk",
    "Endpoint",
    "Estimate",
    "Figure",
    "Fit",
    "GpuProcess",
    "Hardware",
    "LatencyTarget",
    "Launch",
    "LayerGroup",
    "Link",
    "Measurements",
    "Memory",
    "Model",
    "ModelPart",
    "NumaNode",
    "Offload",
    "Parallelism",
    "Pcie",
    "Plan",
    "Preparation",
    "Quantization",
    "Reason",
    "Record",
    "Refusal",
    "Remedy",
    "RequestLoad",
    "Settings",
    "Shortage",
    "TensorGroup",
    "Weights",
    "Workload",
    "from_json",
    "make_estimate",
    "replace_fields",
    "to_json",
]  # fmt: skip
