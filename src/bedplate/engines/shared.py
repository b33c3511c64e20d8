"""Failures that every engine on PyTorch shares, and the reading of Prometheus text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bedplate.engines.base import Failure

Known = tuple[tuple[str, Failure], ...]
"""Patterns, the most telling first: a log of a failed start often ends with a general line about it."""

PORT_IN_USE: Known = (
    (
        r"(?i)address already in use",
        Failure(
            message="the private port was taken by another program in the same moment",
            hint="start again; another port is chosen then",
            lasting=False,
        ),
    ),
)
HUB: Known = (
    (
        r"Cannot access gated repo|You are trying to access a gated repo|GatedRepoError",
        Failure(
            message="the model's owner gives it only to those who have asked for it",
            hint="ask for access on the model's page, then give a token of your account as HF_TOKEN",
        ),
    ),
    (
        r"401 Client Error|Repository Not Found for url|RepositoryNotFoundError|is not a valid model identifier",
        Failure(
            message="the hub has no such model, or does not show it without a token",
            hint="check the name as owner/name; a private model needs HF_TOKEN",
        ),
    ),
    (
        r"LocalEntryNotFoundError|outgoing traffic has been disabled|Cannot reach https://huggingface\.co"
        r"|couldn't connect to 'https://huggingface\.co'",
        Failure(
            message="the model is not on this machine and the hub was not reached",
            hint="download it first, or name a folder that holds it",
        ),
    ),
)
TORCH: Known = (
    (
        r"Error while creating shared memory segment|posix_fallocate failed|/dev/shm[^\n]{0,200}No space left on device"
        r"|insufficient shared memory \(shm\)",
        Failure(
            message="the shared memory that its processes exchange through is too small",
            hint="in a container, start it with --shm-size 16g or --ipc=host",
        ),
    ),
    (
        r"(?:torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory|HIP out of memory|XPU out of memory)"
        r"|CUDA error: out of memory|cudaErrorMemoryAllocation",
        Failure(
            message="the GPU ran out of memory",
            hint="ask for less: a shorter --context, a lower --concurrency, a smaller quantization; or free the GPU",
        ),
    ),
    (
        r"NCCL error|ncclSystemError|ncclInternalError|ncclUnhandledCudaError|DistBackendError|RCCL error",
        Failure(
            message="the GPUs could not talk to each other (NCCL)",
            hint="start again with NCCL_DEBUG=INFO for the cause; often a driver, a network interface or shared memory",
        ),
    ),
    (
        r"no kernel image is available for execution on the device",
        Failure(
            message="this build has no kernels for this GPU",
            hint="a GPU of a generation that the engine's packages are built for, or another engine with --engine",
        ),
    ),
    (
        r"CUDA driver version is insufficient|The NVIDIA driver on your system is too old|Found no NVIDIA driver",
        Failure(
            message="the GPU's driver is missing or older than the engine's CUDA",
            hint="update the driver; `bedplate doctor` says what it found",
        ),
    ),
)


def explained(log: str, *known: Known) -> Failure | None:
    """The first known failure that a log shows; named groups of its pattern fill in the words."""
    for pattern, failure in (entry for entries in known for entry in entries):
        if found := re.search(pattern, log):
            words = {name: value or "" for name, value in found.groupdict().items()}
            return Failure(
                message=failure.message.format(**words), hint=failure.hint.format(**words), lasting=failure.lasting
            )
    return None


def samples(metrics: str, name: str) -> list[float]:
    """The values of one metric, of all its labels, in Prometheus text."""
    pattern = rf"^{re.escape(name)}(?:\{{[^\n]*\}})? +([0-9.eE+-]+|NaN|[+-]Inf)(?: +\d+)?$"
    return [value for value in map(_number, re.findall(pattern, metrics, re.MULTILINE)) if value is not None]


def total(metrics: str, *names: str) -> float | None:
    """Summed over its labels; of several spellings the first that is there."""
    return next((sum(found) for name in names if (found := samples(metrics, name))), None)


def highest(metrics: str, *names: str) -> float | None:
    return next((max(found) for name in names if (found := samples(metrics, name))), None)


def progress_of_shards(line: str) -> float | None:
    """What the weight loaders of vLLM, SGLang and transformers print: `… checkpoint shards:  50% Completed | 2/4`."""
    found = re.search(r"(?:checkpoint shards|safetensors weights[^:]*|Loading weights)[^:]*:\s*(\d{1,3})%", line)
    return min(int(found[1]), 100) / 100 if found else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value == value and abs(value) != float("inf") else None


def joined(options: Iterable[tuple[str, object | None]]) -> list[str]:
    """Options with values, those without one left out."""
    return [word for name, value in options if value is not None for word in (name, str(value))]
