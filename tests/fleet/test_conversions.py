"""Conversions for real: unpacked, packed again, quantized, compared, interrupted."""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.conftest import HANG_S, wait_for

from bedplate.decide import decide
from bedplate.decide import plan as planned
from bedplate.engines import get_engine
from bedplate.facts.gguf import read_gguf
from bedplate.facts.hardware import probe
from bedplate.facts.model_folder import read_folder
from bedplate.measure.prefixes import list_fixed_prefixes
from bedplate.run.builtin import read_builtin_facts
from bedplate.run.environments import EngineEnvironment, build_command, make_environment
from bedplate.run.prepare import MANIFEST, PreparationRecord, get_prepared_dir, prepare
from bedplate.values import Launch, Model, Plan, Workload, replace_fields

check: Any = importlib.import_module("bedplate.engines.shipped.conversion_check")
WORK = Workload(concurrency=1)
PIECES = (
    "\n", "\n\n", "\r\n", "  ", "\t", "1", "23", "4567", "½", "٣", "Ⅷ", "你好", "カタカナ", "한국", "😀", "👩‍👩‍👧",
    "e\u0301", "'s", "'LL", "<|im_start|>", "<|im_end|>", "_", "(", "}", "...", "—", "नमस्ते", "\u200b", "\u00a0", "0x1F",
    "ABC", "ß",
)  # fmt: skip
IDS = """
import json, sys
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
print(json.dumps([tokenizer.encode(text).ids for text in json.load(sys.stdin)]))
"""


@pytest.fixture(scope="module")
def pytorch(bedplate_home: Path) -> EngineEnvironment:
    return make_environment(get_engine("pytorch"))


@pytest.fixture(scope="module")
def unpacked(pytorch: EngineEnvironment, llama_environment: EngineEnvironment, builtin_gguf: Path) -> Path:
    decision = decide(probe(), read_builtin_facts(), WORK, "pytorch")
    assert decision.launch is not None
    folder = prepare(planned(decision, read_builtin_facts(), WORK), decision.launch.prepare, pytorch)
    assert folder is not None
    return folder


def record(folder: Path) -> PreparationRecord:
    return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=PreparationRecord)


def plan_for(model: Model, label: str) -> tuple[Plan, Launch]:
    llama, hardware = get_engine("llama.cpp"), replace_fields(probe(), accelerators=(), links=())
    target = llama.find_target(hardware)
    assert target is not None
    form = next(form for form in llama.list_weights(target, model, WORK) if form.label == label)
    plan = Plan(
        engine=llama.id, engine_version="", model=model, workload=WORK, weights=form,
        settings=llama.settle(hardware, model, WORK),
    )  # fmt: skip
    return plan, llama.launch(plan, 1)


def test_dequantized_model_was_compared(unpacked: Path) -> None:
    ids, answers = record(unpacked).checked
    assert "texts agree with the source" in ids and "clear next tokens" in answers


def test_any_text_has_the_token_ids_of_llama_cpp(
    unpacked: Path, pytorch: EngineEnvironment, llama_environment: EngineEnvironment, builtin_gguf: Path
) -> None:
    chance = random.Random(7)
    words = " ".join(list_fixed_prefixes()[::20]).split()
    texts = [
        "".join(chance.choice((chance.choice(PIECES), " " + chance.choice(words))) for _ in range(12))
        for _ in range(400)
    ]
    argv = [str(pytorch.interpreter), "-I", "-c", IDS, str(next(unpacked.glob("*/tokenizer.json")))]
    done = subprocess.run(argv, input=json.dumps(texts), capture_output=True, text=True, check=True)
    command = build_command(llama_environment, Launch(argv=("llama-server",)))
    theirs = check.LlamaCppModel(builtin_gguf, json.dumps(command))
    try:
        for text, ids in zip(texts, json.loads(done.stdout), strict=True):
            assert theirs.ids(text, begin=True) == ids, text
    finally:
        theirs.close()


@pytest.mark.parametrize("label", ["Q8_0", "Q4_1"])
def test_folder_is_converted_to_gguf(label: str, unpacked: Path, llama_environment: EngineEnvironment) -> None:
    model = read_folder(next(unpacked.glob("*/config.json")).parent)
    plan, launch = plan_for(model, label)
    folder = prepare(plan, launch.prepare, llama_environment)
    assert folder is not None
    made = read_gguf(folder / launch.argv[launch.argv.index("--model") + 1])
    assert made.quantization == label and made.parameters == model.parameters
    ids, answers = record(folder).checked
    assert "texts agree with the source" in ids and "clear next tokens" in answers
    last = [step for step in launch.prepare if step.kind == "convert"][-1]
    assert last.disk_bytes is not None and 0.9 < made.weight_bytes / last.disk_bytes < 1.1


def test_interrupted_conversion_leaves_no_files(unpacked: Path, tmp_path: Path, bedplate_home: Path) -> None:
    source = tmp_path / "another"
    source.mkdir()
    for file in next(unpacked.glob("*/config.json")).parent.iterdir():
        (source / file.name).hardlink_to(file)
    (source / "notes.txt").write_text(str(os.getpid()))  # other content, so that it is made again
    before = set(get_prepared_dir().iterdir())
    argv = [sys.executable, "-m", "bedplate", "serve", str(source), "--engine", "llama.cpp", "--port", "0"]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: list(get_prepared_dir().glob(".making-*")) or None, "the conversion to begin")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert {path for path in set(get_prepared_dir().iterdir()) - before if path.is_dir()} == set()
