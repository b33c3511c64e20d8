"""llama.cpp: GGUF weights on any hardware, one server process."""

from __future__ import annotations

import importlib.resources
import json
import re
from typing import ClassVar

from bedplate.engines.base import BorrowedLibrary, Engine, EngineState, Failure, MemoryUse, Recipe
from bedplate.values import Hardware, Launch, Model, Plan, Refusal, Settings, Workload

MIN_HTTP_THREADS = 96
SPARE_HTTP_THREADS = 8
"""The server gives each connection a thread, health checks included: with too few, a busy engine looks dead."""
PROCESS_BYTES = 58_000_000
"""Interpreter, library and threads, without model and scratch: what is left of the measured size (docs/memory.md)."""
SLOT_BYTES_PER_WORD = 24
"""For each slot and word of the vocabulary: logits, candidates and probabilities (docs/memory.md)."""
MICRO_BATCH = 512
COMPUTE_BYTES_PER_HIDDEN = 64
"""Scratch memory for each element of a micro-batch's hidden state: 17 MB at a hidden size of 576, by the log."""
EVERYDAY_CONTEXT = 8192
"""Context that a chat is given when nobody asked for a length: most conversations stay below it."""
MAX_SLOTS = 256
EVERYDAY_SLOTS = 4
"""Clients send a second request (a title, a retry) beside the first; an idle slot costs memory but no time."""

_KNOWN_FAILURES: tuple[tuple[str, Failure], ...] = (
    (
        r"data is not within the file bounds|gguf_init_from_\w+: failed to read ",
        Failure(
            message="the model file is damaged: it ends before its header says so",
            hint="download it again, and check that the disk is not full",
        ),
    ),
    (
        r"invalid magic characters",
        Failure(
            message="the model file is not a GGUF file",
            hint="give a .gguf file; `bedplate inspect FILE` says what a file is",
        ),
    ),
    (
        r"unknown model architecture: '(?P<what>[^']+)'",
        Failure(
            message="this build of llama.cpp does not know the architecture {what}",
            hint="a newer build may: see whether bedplate has an update, or choose another engine with --engine",
        ),
    ),
    (
        r"unknown (?:pre-)?tokenizer(?: type)?:? '?(?P<what>[^'\s]+)",
        Failure(
            message="this build of llama.cpp does not know the tokenizer {what}",
            hint="a newer build may: see whether bedplate has an update",
        ),
    ),
    (
        r"(?:failed to allocate|unable to allocate|cannot allocate memory|std::bad_alloc)",
        Failure(
            message="there was not enough memory for the model and its cache",
            hint="ask for less: --context 4096, --concurrency 1, or a smaller quantization",
        ),
    ),
    (
        r"n_seq_max must be <= (?P<what>\d+)",
        Failure(
            message="llama.cpp takes at most {what} requests at once",
            hint="ask for fewer: --concurrency {what}",
        ),
    ),
    (
        r"failed to open GGUF file '(?P<what>.+)' \(Permission denied\)",
        Failure(
            message="{what} may not be read",
            hint="change its permissions, or run bedplate as its owner",
        ),
    ),
    (
        r"failed to open GGUF file '(?P<what>.+)' \(No such file or directory\)",
        Failure(
            message="{what} is not there any more",
            hint="was it moved, or is its disk not mounted? name the file where it is now",
        ),
    ),
    (
        r"std::system_error'\s+what\(\):\s+Resource temporarily unavailable",
        Failure(
            message="it could not start its threads: a limit on processes or on memory was reached",
            hint="raise the limit (ulimit -u, ulimit -v, or the container's own), or stop other programs",
            lasting=False,
        ),
    ),
    (
        r"couldn't bind HTTP server socket",
        Failure(
            message="the private port was taken by another program in the same moment",
            hint="start again; another port is chosen then",
            lasting=False,
        ),
    ),
)


class LlamaCpp(Engine):
    id = "llama.cpp"
    name = "llama.cpp"
    formats = ("gguf",)
    version = "2026.10.11549"
    recipe = Recipe(
        packages=("xllamacpp==2026.10.11549",),
        programs=(("llama-server", "llama_server.py"),),
        # The wheel is built with OpenMP and leaves its runtime to the system; a minimal Debian has none.
        libraries=(
            BorrowedLibrary(soname="libgomp.so.1", package="treelite==4.8.1", file="treelite.libs/libgomp-*.so*"),
        ),
        download_bytes=34_000_000,
        disk_bytes=127_000_000,
        check="import xllamacpp; xllamacpp.CommonParams()",
    )
    # The server then tells its load progress on stdout, and ends when its stdin closes.
    supervised_env: ClassVar[dict[str, str]] = {"LLAMA_SERVER_ROUTER_PORT": "1"}
    uses = MemoryUse(
        process_bytes=PROCESS_BYTES,
        device_bytes=450_000_000,
        prefill_tokens=MICRO_BATCH,
        spread=0.4,
        source="measured: docs/memory.md",
    )
    max_slots = MAX_SLOTS
    key_variable = "LLAMA_API_KEY"
    strength = "laptops, edge boxes and unusual hardware; little VRAM and much RAM"

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        if model.format not in self.formats:
            return self.refusal("impossible", f"loads GGUF files, not {model.format}", "give a GGUF of the same model")
        if workload.task in ("classify", "other"):
            return self.refusal("unsuitable", "serves text generation and embeddings only", "onnxruntime fits")
        return None

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        longest = model.max_context or EVERYDAY_CONTEXT
        asked = workload.context_tokens
        everyday = max(workload.request_tokens, EVERYDAY_CONTEXT)
        in_flight = workload.in_flight()
        stated = workload.concurrency is not None or workload.users > 1
        return Settings(
            slots=min(in_flight if stated else max(in_flight, EVERYDAY_SLOTS), MAX_SLOTS),
            context_tokens=min(asked if asked is not None else everyday, longest),
            threads=hardware.cpu.allowed_physical_cores,
            gpu_layers=model.num_layers + 1 if hardware.has("apple") else 0,
        )

    def overhead_bytes(self, model: Model, settings: Settings) -> float:
        scratch = MICRO_BATCH * (model.hidden_size or 4096) * COMPUTE_BYTES_PER_HIDDEN
        return PROCESS_BYTES + scratch + settings.slots * SLOT_BYTES_PER_WORD * (model.vocab_size or 0)

    def launch(self, plan: Plan, port: int) -> Launch:
        settings = plan.settings
        # A model that is known by its facts alone has no file yet.
        path = plan.model.files[0] if plan.model.files else f"{plan.model.name}.gguf"
        argv = ["llama-server", "--model", path, "--alias", plan.model.served_name]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--threads-http", str(_http_threads(settings))]
        # The server divides its context among the slots, so ask for all of it at once.
        argv += ["--ctx-size", str(settings.context_tokens * settings.slots), "--parallel", str(settings.slots)]
        argv += ["--threads", str(settings.threads), "--threads-batch", str(settings.threads)]
        argv += ["--n-gpu-layers", str(settings.gpu_layers or 0)]
        # Its cache of old prompts may take 8 GiB by default, which no plan would have counted.
        argv += ["--cache-ram", "0", "--fit", "off", "--metrics", "--slots", "--no-webui"]
        if plan.model.task == "embed":
            argv += ["--embeddings"]
        if template := with_tools(plan.model.chat_template):
            argv += ["--chat-template", template]
        return Launch(argv=tuple(argv), prepare=self.installation())

    def connections(self, settings: Settings) -> int | None:
        return _http_threads(settings) - SPARE_HTTP_THREADS

    def progress(self, line: str) -> float | None:
        mark = "cmd_child_to_router:state:"
        if mark not in line:
            return None
        try:
            said = json.loads(line.split(mark, 1)[1])
            payload = said["payload"] if said["state"] == "loading" else {}
            stages = payload.get("stages") or [None]
            done = stages.index(payload["current"]) if payload.get("current") in stages else 0
            return float((done + payload["value"]) / len(stages))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def explain(self, log: str) -> Failure | None:
        for pattern, known in _KNOWN_FAILURES:
            if found := re.search(pattern, log):
                words = found.groupdict()
                return Failure(
                    message=known.message.format(**words), hint=known.hint.format(**words), lasting=known.lasting
                )
        return None

    def read(self, metrics: str) -> EngineState:
        figures = dict(re.findall(r"^llamacpp:(\w+) ([\d.eE+-]+)$", metrics, re.MULTILINE))
        running, waiting = figures.get("requests_processing"), figures.get("requests_deferred")
        return EngineState(
            running=float(running) if running is not None else None,
            waiting=float(waiting) if waiting is not None else None,
        )


def _http_threads(settings: Settings) -> int:
    # As many requests again as are computed may wait inside of the engine, so that a free slot never waits for one.
    return max(MIN_HTTP_THREADS, 2 * settings.slots + SPARE_HTTP_THREADS)


def with_tools(template: str | None) -> str | None:
    """A ChatML template that does not know tools, with a way to offer them; unchanged for requests without any.

    Without it the server drops a request's tools without a word.
    """
    if template is None or "<|im_start|>" not in template or "tools" in template:
        return None
    offering = (importlib.resources.files("bedplate.engines") / "shipped" / "chatml-tools.jinja").read_text()
    return f"{{% if tools %}}{offering.rstrip()}{{% else %}}{template}{{% endif %}}"


ENGINE = LlamaCpp()
