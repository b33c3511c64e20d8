"""Every example in the pages and in `--help` that needs no engine, network or other machine runs as printed."""

from __future__ import annotations

import gzip
import lzma
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.commands import all_commands, invoke

from bedplate import store
from bedplate.measure.signing import get_key_path, load_key
from bedplate.values.record import from_json
from bedplate.values.run import Run

ROOT = Path(__file__).parents[1]
CAPTURES = ROOT / "tests" / "captures"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
VERBS = {
    "diagnose", "engines", "estimate", "inspect", "intent", "keys", "models", "plan", "probe", "report", "runs",
    "schema", "simulate", "workload",
}  # fmt: skip
"""Verbs that compute and start nothing; of the others, the options are checked (test_docs)."""
NOT_HERE = {
    "--measure": "measures this machine",
    "--observed": "needs the record of a service",
    "--rows -": "reads standard input",
    "engines build": "compiles an engine",
    "engines install": "installs an engine",
    "engines remove": "needs an installed engine",
    "engines use": "needs an installed engine",
    "engines forget": "needs an installed engine",
    "keys revoke 3f2a91c0": "names a key of another home",
    "keys open": "needs a home without keys",
    "20261115-a1": "names a run of another home",
    "model.gguf": "needs a model file",
    "./Qwen3-8B": "needs a model folder",
    "owner/name": "a placeholder",
    "trunc.gguf": "shows an error",
    "report --incumbent vllm": "needs a run of two engines",
    "diagnose --scenario": "needs a run of a scenario",
    "models refresh": "asks the hub",
}
NEGATIVE = {"models --context 32768 --min-tok-s 15", "--trace conversation_trace.jsonl --replicas 1..64"}
"""Here the answer may be no (exit 1): it depends on this machine, or on an excerpt of the trace."""
SLOW = ("--procure", "bedplate models", "bedplate simulate")
"""Seconds of computation each; other tests ask for the same with less."""
PLACEHOLDER = re.compile(
    r"…|\.\.\.(?!\d)|\b(?:PATH|FILE|FOLDER|ID|NAME|RUN\d?|URL|VERB|MODEL|DIR|PROGRAM|ENGINE)\b|~/|/etc/|https?:"
)


def printed_commands(text: str) -> Iterator[str]:
    for line in re.sub(r" *\\\n *", " ", text).splitlines():
        line = line.strip().removeprefix("$ ")
        if line.startswith("bedplate "):
            # Up to what is not part of it, which does not count within quotation marks.
            found = re.match(r"""(?:"[^"]*"|'[^']*'|(?!\s{2,}|\s+[|<>#;]| && |;).)*""", line)
            yield (found[0] if found else line).strip()


def examples() -> list[str]:
    found: list[str] = []
    for page in PAGES:
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            found += printed_commands(block)
    for _, command in all_commands():
        found += printed_commands(command.epilog or "")
    return sorted({line for line in found if can_run(line)})


def can_run(line: str) -> bool:
    words = line.split()
    known = len(words) > 1 and (words[1] in VERBS or words[1] in ("--help", "--version"))
    return known and not PLACEHOLDER.search(line) and not any(one in line for one in NOT_HERE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that examples name, and an empty home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    intent = (ROOT / "docs" / "intent.md").read_text(encoding="utf-8")
    (tmp_path / "bedplate.yaml").write_text(re.findall(r"^```yaml\n(.*?)^```", intent, re.MULTILINE | re.DOTALL)[0])
    run = lzma.decompress((CAPTURES / "runs" / "two-cores-llama.json.xz").read_bytes())
    for name in ("run.json", "llama.json"):
        (tmp_path / name).write_bytes(run)
    for name in ("exl3", "pytorch"):
        captured = lzma.decompress((CAPTURES / "runs" / f"h200-{name}.json.xz").read_bytes())
        (tmp_path / f"{name}.json").write_bytes(captured)
    traces = CAPTURES / "traces"
    shutil.copy(traces / "azure-2023-conv.csv", tmp_path / "AzureLLMInferenceTrace_conv.csv")
    shutil.copy(traces / "mooncake-conversation.jsonl", tmp_path / "conversation_trace.jsonl")
    with gzip.open(tmp_path / "conversation_trace.jsonl.gz", "wb") as packed:
        packed.write((traces / "mooncake-conversation.jsonl").read_bytes())
    shutil.copy(traces / "requests-constructed.jsonl", tmp_path / "requests.jsonl")
    row = "RTX 4090,llama.cpp,Llama 3.1 8B Q4_K_M,decode_tok_s_single"
    rows = [f"LCP-{number:05},{row}" for number in range(1, 12)]
    (tmp_path / "measured.csv").write_text("\n".join(["row_id,hardware,engine,model,metric", *rows, ""]))
    others = {"llama-bench.json": "llama-bench.json", "vllm.json": "vllm-bench-serve-real.json",
              "benchmarks.json": "guidellm-real.json", "profile_export.jsonl": "aiperf-records.jsonl",
              "agg_bmk.json": "inferencex.json"}  # fmt: skip
    for name, captured_name in others.items():
        shutil.copy(CAPTURES / "runs" / captured_name, tmp_path / name)
    shutil.copy(CAPTURES.parents[1] / "examples" / "platform.yaml", tmp_path)
    whole = from_json(Run, run)
    store.add_run(whole)
    for cell in whole.cells:
        store.add_cell(cell)
    invoke("keys", "add", "alice")
    return tmp_path


def test_there_are_examples_of_most_verbs() -> None:
    verbs = {line.split()[1] for line in examples()}
    assert len(examples()) > 40 and {"plan", "models", "inspect", "simulate", "schema", "engines"} <= verbs


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=[pytest.mark.nightly] * any(one in line for one in SLOW)) for line in examples()]
)
def test_example_runs_as_printed(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if line.startswith("bedplate workload"):
        (folder / "bedplate.yaml").unlink()
    if "result.json" in line or "results/" in line:
        (folder / "results").mkdir()
        assert invoke("runs", "export", "--sign", "-o", "result.json").code == 0
        shutil.copy(folder / "result.json", folder / "results")
    if line.startswith("bedplate runs import result.json"):  # somebody else's
        monkeypatch.setenv("BEDPLATE_HOME", str(folder / "another-home"))
    if "key.pem" in line:
        load_key()
        shutil.copy(get_key_path(), folder / "key.pem")
    answer = invoke(*shlex.split(line)[1:])
    assert answer.code == 0 or (answer.code == 1 and any(one in line for one in NEGATIVE)), answer.err or answer.out
