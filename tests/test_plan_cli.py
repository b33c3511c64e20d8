"""`bedplate plan`: --why-not, --what-if, --procure, --emit and usage errors."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import stat
import subprocess
from pathlib import Path

import pytest
from rich.console import Console
from tests.commands import invoke, run
from tests.facts.test_encoder_decoder import WHISPER

from bedplate.decide import questions
from bedplate.engines import load_engines
from bedplate.facts.chips import find_chip
from bedplate.show.alternatives import render_alternatives
from bedplate.values import Decision, from_json

CARD = ("plan", "Qwen/Qwen3-8B", "--hardware", "RTX 4090")
SERVERS = ("plan", "meta-llama/Meta-Llama-3.1-70B", "--hardware", "8x H100 SXM", "--concurrency", "64")


def bash_reads(path: Path) -> None:
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class TestWorkload:
    @pytest.mark.parametrize(
        ("asked", "shown"),
        [
            (("--users", "7"), "7 users · 512 + 256 tokens"),
            (("--set", "requests_per_s=2"), "2 requests/s · 512 + 256 tokens"),
            (("--users", "200", "--set", "think_time_s=30"), "200 users, think time 30 s · 512 + 256 tokens"),
            (("--users", "7", "--set", "requests_per_s=2", "--concurrency", "4"), "7 users · 512 + 256 tokens"),
        ],
    )
    def test_the_page_shows_the_workload(self, asked: tuple[str, ...], shown: str) -> None:
        assert shown in " ".join(invoke(*CARD, *asked).out.split())


class TestEngine:
    def test_a_requested_engine_is_planned(self) -> None:
        answer = invoke(*CARD, "--engine", "llama.cpp", "--json")
        decision = from_json(Decision, answer.out)
        assert answer.code == 0 and decision.engine == "llama.cpp"
        assert decision.reasons[0].rule == "operations.asked"

    def test_a_requested_engine_that_cannot_run_exits_with_1(self) -> None:
        asked = ("plan", "Qwen/Qwen3-8B", "--hardware", "Radeon RX 7900 XTX", "--engine", "exllamav3")
        answer = invoke(*asked)
        assert answer.code == 1 and "Not possible: exllamav3 needs an NVIDIA GPU" in answer.out
        decision = from_json(Decision, invoke(*asked, "--json").out)
        assert decision.engine is None and decision.refused[0].engine == "exllamav3" and decision.launch is None

    def test_an_unknown_engine_is_a_usage_error(self) -> None:
        answer = invoke(*CARD, "--engine", "vlm")
        assert answer.code == 2 and "did you mean vllm" in answer.err

    @pytest.mark.parametrize(
        ("said", "engine"), [("vLLM", "vllm"), ("llama-cpp", "llama.cpp"), ("ExLlama v3", "exllamav3")]
    )
    def test_every_spelling_of_an_engine_is_accepted(self, said: str, engine: str) -> None:
        assert from_json(Decision, invoke(*CARD, "--engine", said, "--json").out).engine == engine


class TestAlternatives:
    def test_the_table_lists_the_choice_and_every_alternative_within_80_columns(self) -> None:
        answer, decision = invoke(*SERVERS, "--alternatives"), from_json(Decision, invoke(*SERVERS, "--json").out)
        assert answer.code == 0 and decision.alternatives
        narrow = Console(file=io.StringIO(), width=80)
        narrow.print(render_alternatives(decision))
        assert isinstance(narrow.file, io.StringIO)
        for page in (answer.out, narrow.file.getvalue()):
            rows = [line.split()[0] for line in page.splitlines() if re.match(" [a-z]", line)]
            assert rows == ["engine", decision.engine, *(one.engine for one in decision.alternatives)]
            assert "chosen: 64 concurrent requests on GPUs: vLLM is the default (serve.default)" in page
            words = " ".join(page.split())
            assert all(" ".join(one.why_not.split()) in words for one in decision.alternatives)
        assert max(map(len, narrow.file.getvalue().splitlines())) <= 80

    def test_the_table_says_why_nothing_is_possible(self) -> None:
        page = invoke("plan", "meta-llama/Meta-Llama-3.1-405B", "--hardware", "RTX 4090", "--alternatives")
        assert page.code == 1 and "chosen" not in page.out and "not possible: " in page.out

    def test_it_is_a_question_of_its_own(self) -> None:
        assert "cannot be combined" in invoke(*CARD, "--alternatives", "--why-not", "vllm").err
        answer = invoke(*CARD, "--alternatives", "--json")
        assert answer.code == 2 and "the plan in --json has its alternatives" in answer.err


class TestWhyNot:
    def test_every_engine_has_a_reason(self) -> None:
        for name in load_engines():
            answer = invoke(*SERVERS, "--why-not", name)
            assert answer.code == 0 and name in answer.out and len(answer.out.strip()) > 30

    def test_a_refusal_names_the_chosen_engine(self) -> None:
        page = " ".join(invoke(*SERVERS, "--why-not", "llama.cpp").out.split())
        assert "not designed for" in page and "Chosen instead: vllm" in page
        value = json.loads(invoke(*SERVERS, "--why-not", "llama.cpp", "--json").out)
        assert value["engine"] == "llama.cpp" and value["kind"] == "unsuitable" and value["hint"]

    def test_a_challenger_and_the_choice_are_reported(self) -> None:
        assert "worth measuring" in invoke(*SERVERS, "--why-not", "sglang").out
        assert "is the choice" in invoke(*SERVERS, "--why-not", "vllm").out

    def test_an_unknown_name_is_a_usage_error(self) -> None:
        assert invoke(*SERVERS, "--why-not", "cuda").code == 2
        assert "did you mean" in invoke(*SERVERS, "--why-not", "tensorrt-lm").err

    def test_every_spelling_of_an_engine_is_accepted(self) -> None:
        assert json.loads(invoke(*SERVERS, "--why-not", "TRT-LLM", "--json").out)["engine"] == "tensorrt-llm"


class TestWhatIf:
    def test_changes_are_listed(self) -> None:
        answer = invoke(*CARD, "--what-if", "users=50,count=2", "--json")
        value = json.loads(answer.out)
        assert answer.code == 0
        assert (value["before"]["engine"], value["after"]["engine"]) == ("exllamav3", "vllm")
        assert {"engine", "rule"} <= {change["what"] for change in value["changes"]}
        page = invoke(*CARD, "--what-if", "users=50,count=2").out
        assert "exllamav3" in page and "vllm" in page and "serve.default" in page

    def test_count_replaces_the_count_in_the_machine_name(self) -> None:
        found = json.loads(invoke(*SERVERS, "--what-if", "count=2", "--json").out)
        cards = [found[side]["memory"]["devices"][0]["count"] for side in ("before", "after")]
        assert cards == [8, 2]
        # A name without a count, or of an unknown chip, is handled as before.
        assert invoke("plan", "Qwen/Qwen3-8B", "--hardware", "4x H900", "--what-if", "count=2").code == 2

    def test_no_change_is_reported(self) -> None:
        assert "nothing changes" in invoke(*CARD, "--what-if", "accelerator=4090").out

    @pytest.mark.parametrize(
        ("asked", "what", "after"),
        [
            ("price_per_hour=3", "cost per M tokens", ""),
            ("watts=400", "energy per M tokens", "kWh"),
            ("ttft_ms=60000", "latency targets", "within"),
        ],
    )
    def test_cost_energy_and_latency_are_compared(self, asked: str, what: str, after: str) -> None:
        (change,) = json.loads(invoke(*CARD, "--what-if", asked, "--json").out)["changes"]
        assert change["what"] == what and after in change["after"]
        assert change["before"] in ("none", "unknown")

    def test_targets_that_cannot_be_met_are_reported_with_the_closest_plan(self) -> None:
        found = json.loads(invoke(*SERVERS, "--what-if", "ttft_ms=1", "--json").out)
        changes = {one["what"]: one for one in found["changes"]}
        assert "MISSES" in changes["latency targets"]["after"] and changes["latency targets"]["before"] == "none"
        before, after = (found[side]["estimate"]["ttft_ms"]["value"] for side in ("before", "after"))
        assert after < before and "weights" in changes

    def test_a_change_that_does_not_fit_exits_with_1(self) -> None:
        answer = invoke(*CARD, "--what-if", "model=meta-llama/Meta-Llama-3.1-405B,ram_gb=16")
        assert answer.code == 1 and "nothing fits" in answer.out and "more free memory" in answer.out

    @pytest.mark.parametrize("asked", ["user=50", "users=none", "users", "=3", "accelerator=H900", "users=-1"])
    def test_invalid_fields_are_usage_errors(self, asked: str) -> None:
        answer = invoke(*CARD, "--what-if", asked)
        assert answer.code == 2 and not answer.out


class TestProcure:
    CHIPS = ("L4", "RTX 4090", "H100 SXM", "Apple M3 Max 40-core")

    @pytest.fixture(autouse=True)
    def few_chips(self, monkeypatch: pytest.MonkeyPatch) -> None:
        chips = tuple(find_chip(name).chip for name in self.CHIPS)
        monkeypatch.setattr(questions, "list_purchasable", lambda: chips)

    def test_machines_that_meet_the_workload_are_listed(self) -> None:
        asked = ("plan", "Qwen/Qwen3-32B", "--concurrency", "8", "--procure")
        offers = json.loads(invoke(*asked, "--json").out)
        assert offers and all(offer["count"] in questions.COUNTS for offer in offers)
        assert all(offer["decision"]["max_concurrency"] >= 8 for offer in offers)
        answer = invoke(*asked)
        assert answer.code == 0 and f"{len(offers)} of 4 known chips" in answer.out and "H100" in answer.out

    @pytest.mark.parametrize(
        ("said", "columns"),
        [
            ((), []),
            (("--set", "price_per_hour=2"), ["cost per M"]),
            (("--set", "watts=400"), ["kWh per M"]),
            (("--set", "price_per_hour=2,watts=400"), ["cost per M", "kWh per M"]),
        ],
    )
    def test_cost_and_energy_columns_need_their_prices(self, said: tuple[str, ...], columns: list[str]) -> None:
        asked = ("plan", "Qwen/Qwen3-8B", "--procure", *said)
        head = next(line for line in invoke(*asked).out.splitlines() if line.startswith(" cards"))
        assert [name for name in ("cost per M", "kWh per M") if name in head] == columns

    def test_no_suitable_machine_exits_with_1(self) -> None:
        answer = invoke("plan", "meta-llama/Meta-Llama-3.1-405B", "--procure", "--set", "tpot_ms=0.01")
        assert answer.code == 1 and "None of 4" in answer.out


class TestEmit:
    @pytest.mark.parametrize("name", sorted(load_engines()))
    def test_the_script_of_every_engine_is_valid_bash(self, name: str, tmp_path: Path) -> None:
        hardware = "Apple M3 Max 40-core" if name == "mlx" else "RTX 4090"
        arguments = [
            "plan",
            "meta-llama/Llama-3.2-3B-Instruct",
            "--hardware",
            hardware,
            "--set",
            "ram_gb=64",
            "--engine",
            name,
        ]
        arguments += ["--set", "os=macos"] if name == "mlx" else []
        path = tmp_path / "serve.sh"
        decision = from_json(Decision, invoke(*arguments, "--json").out)
        assert decision.launch is not None, decision.refused[0]
        answer = invoke(*arguments, "--emit", "command", "-o", str(path))
        assert answer.code == 0 and not answer.out
        bash_reads(path)
        text = path.read_text()
        assert text.startswith("#!/") and os.access(path, os.X_OK)
        launched = shlex.split(text[text.rindex("\nexec ") :].replace("\\\n", " "))
        assert launched[1:] == list(decision.launch.argv)
        for variable, value in decision.launch.env.items():
            assert f"export {variable}={shlex.quote(value)}" in text

    def test_the_script_of_the_built_in_model_is_executable(self, tmp_path: Path, builtin_gguf: Path) -> None:
        printed = run("plan", "--emit", "command")
        assert printed.code == 0 and printed.out.startswith("#!/usr/bin/env bash\n")
        path = tmp_path / "serve.sh"
        assert invoke("plan", "--emit", "command", "-o", str(path)).code == 0
        assert path.read_text() == printed.out and path.stat().st_mode & stat.S_IXUSR
        bash_reads(path)
        assert "exec llama-server" in printed.out and "--ctx-size" in printed.out and "--port 8080" in printed.out

    def test_a_script_with_a_conversion_creates_its_environment(self, tmp_path: Path) -> None:
        path = tmp_path / "serve.sh"
        assert invoke("plan", "--engine", "mlx", "--emit", "command", "-o", str(path)).code == 0
        bash_reads(path)
        text = path.read_text()
        assert 'pytorch="$HOME/.cache/bedplate-scripts/pytorch-' in text and "gguf==" in text
        unpack = next(line for line in text.splitlines() if '"$pytorch/bin/gguf-to-folder" ' in line)
        assert text.index('step programs "$pytorch" ') < text.index(unpack) < text.index("mlx_lm.convert")

    def test_nothing_is_emitted_without_a_decision(self, tmp_path: Path) -> None:
        path = tmp_path / "serve.sh"
        answer = invoke("plan", "meta-llama/Meta-Llama-3.1-405B", "--hardware", "RTX 3070", "--set", "ram_gb=16",
                        "--emit", "command", "-o", str(path))  # fmt: skip
        assert answer.code == 1 and "more free memory" in answer.err and not path.exists()

    def test_an_unknown_target_is_a_usage_error(self) -> None:
        answer = invoke(*CARD, "--emit", "terraform")
        assert answer.code == 2 and "unknown target" in answer.err

    def test_an_unwritable_path_is_an_external_failure(self, tmp_path: Path) -> None:
        answer = invoke(*CARD, "--emit", "command", "-o", str(tmp_path / "nowhere" / "serve.sh"))
        assert answer.code == 3 and "serve.sh" in answer.err


class TestUsageErrors:
    """No option is ignored silently, and errors come before anything is read."""

    @pytest.mark.parametrize(
        "options",
        [
            ("--procure", "--why-not", "vllm"),
            ("--procure", "--what-if", "users=5"),
            ("--procure", "--emit", "command"),
            ("--procure", "--engine", "vllm"),
            ("--procure", "--hardware", "RTX 4090"),
            ("--what-if", "users=5", "--why-not", "vllm"),
            ("--what-if", "users=5", "--emit", "command"),
            ("--why-not", "vllm", "--emit", "kubernetes"),
            ("--emit", "command", "--json"),
            ("--emit", "kubernetes", "--json"),
            ("-o", "serve.sh"),
            ("--why-not", "vllm", "-o", "why.txt"),
            ("--what-if", "users=5", "-o", "changes.txt"),
        ],
    )
    def test_incompatible_options_are_rejected(self, options: tuple[str, ...]) -> None:
        answer = invoke("plan", "no/such-model-at-all", *options)
        assert answer.code == 2 and not answer.out and "no/such-model-at-all" not in answer.err
        assert [option for option in options if option.startswith("-")][-1] in answer.err
        assert "\n" in answer.err, "it has a hint"

    @pytest.mark.parametrize(
        "options", [("--procure",), ("--what-if", "users=5"), ("--why-not", "vllm"), ("--engine", "vllm")]
    )
    @pytest.mark.parametrize("pools", ["", "pools: [{name: a, accelerator: H100 SXM, count: 8}]\n"])
    def test_options_for_one_model_are_rejected_with_services(
        self, options: tuple[str, ...], pools: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "bedplate.yaml"
        path.write_text(f"{pools}services: [{{model: no/such-model-at-all}}]\n")
        answer = invoke("plan", "-f", str(path), *options)
        assert answer.code == 2 and options[0] in answer.err and "1 service" in answer.err and not answer.out

    @pytest.mark.parametrize("services", ["", "services: []\n"])
    def test_pools_without_services_are_rejected(self, services: str, tmp_path: Path) -> None:
        path = tmp_path / "bedplate.yaml"
        path.write_text(f"pools: [{{name: a, accelerator: H100 SXM, count: 8}}]\n{services}")
        answer = invoke("plan", "-f", str(path))
        assert answer.code == 2 and answer.err.startswith("services:") and "\n" in answer.err and not answer.out

    def test_json_of_every_question_is_written_to_the_file(self, tmp_path: Path) -> None:
        services = tmp_path / "services.yaml"
        services.write_text("hardware: RTX 4090\nservices: [{model: Qwen/Qwen3-8B}]\n")
        asked: tuple[tuple[str, ...], ...] = (
            CARD, (*CARD, "--why-not", "vllm"), (*CARD, "--what-if", "users=5"), ("plan", "-f", str(services)),
        )  # fmt: skip
        for number, words in enumerate(asked):
            path = tmp_path / f"{number}.json"
            answer = invoke(*words, "--json", "-o", str(path))
            assert answer.code == 0 and not answer.out and json.loads(path.read_text())


class TestFields:
    def test_fields_override_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "bedplate.yaml"
        path.write_text("hardware: {accelerator: RTX 4090, ram_gb: 64}\nmodel: Qwen/Qwen3-8B\nworkload: {users: 1}\n")
        assert from_json(Decision, invoke("plan", "-f", str(path), "--json").out).engine == "exllamav3"
        fewer = invoke("plan", "-f", str(path), "--set", "volume=extreme", "--users", "50", "--json")
        assert from_json(Decision, fewer.out).engine == "vllm"
        several = invoke("plan", "-f", str(path), "--set", "users=50,count=2", "--set", "os=windows", "--json")
        assert from_json(Decision, several.out).engine == "llama.cpp"

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("workload: {user: 3}", "workload.user"),
            ("workload: {users: 0}", "workload.users"),
            ("workload: {users: many}", "workload.users"),
            ("operations: {incumbent: vlm}", "operations.incumbent"),
            ("operations: {machinery: docker}", "operations.machinery"),
            ("hardware: {accelerator: H900}", "H900"),
            ("hardware: {accelerator: RTX 4090, count: 0}", "hardware.count"),
            ("modle: Qwen/Qwen3-8B", "modle"),
            ("model: {params_b: -1}", "params_b"),
            ("model: no/such-model-at-all", "no/such-model-at-all"),
            ("- a\n- list", "mapping"),
            ("hardware: {accelerator: RTX 4090", "not YAML"),
        ],
    )
    def test_an_invalid_file_names_the_field(self, text: str, named: str, tmp_path: Path) -> None:
        path = tmp_path / "bedplate.yaml"
        path.write_text(text)
        answer = invoke("plan", "-f", str(path), "--json")
        assert answer.code == 2 and named in answer.err and not answer.out

    def test_a_missing_file_is_a_usage_error(self, tmp_path: Path) -> None:
        answer = invoke("plan", "-f", str(tmp_path / "none.yaml"))
        assert answer.code == 2 and "none.yaml" in answer.err

    @pytest.mark.parametrize("field", ["volume", "volume=huge", "nothing=3", "users=1.5"])
    def test_invalid_options_are_usage_errors(self, field: str) -> None:
        assert invoke(*CARD, "--set", field).code == 2


def test_embedding_has_no_time_per_output_token() -> None:
    decision = from_json(Decision, invoke(*CARD, "--set", "task=embed", "--json").out)
    assert decision.fits and decision.estimate.tpot_ms is None and decision.estimate.output_tok_s is None


def test_a_chip_may_be_named_by_a_number(tmp_path: Path) -> None:
    path = tmp_path / "bedplate.yaml"
    path.write_text("hardware: {accelerator: 4090}\nmodel: Qwen/Qwen3-8B\n")
    assert "RTX 4090" in invoke("plan", "-f", str(path)).out
    assert invoke("plan", "Qwen/Qwen3-8B", "--hardware", "RTX 3090", "--what-if", "accelerator=4090").code == 0


def test_the_page_shows_reasons_cost_and_launch_command() -> None:
    page = " ".join(invoke(*SERVERS, "--set", "price_per_hour=2.5").out.split())
    for words in ("vllm", "serve.default", "The source of each rule: docs/rules.md", "sglang", "worth measuring",
                  "BF16", "concurrent requests of 768 tokens", "Cost", "Launch", "--tensor-parallel-size"):  # fmt: skip
        assert words in page, words


def test_a_machine_file_from_probe_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(invoke("probe", "--json").out)
    decision = from_json(Decision, invoke("plan", "--hardware", str(path), "--json").out)
    assert decision.engine == "llama.cpp" and decision.model.startswith("SmolLM2")


class TestHints:
    def test_idle_cards_are_the_first_line_under_the_choice(self) -> None:
        page = [
            line.strip()
            for line in invoke("plan", "Qwen/Qwen3-8B", "--hardware", "4x L4").out.splitlines()
            if line.strip()
        ]
        assert page[1].startswith("Hints: 2 of 4 × NVIDIA L4 stay idle: 2 are enough for this workload")

    def test_json_has_the_kind_and_the_figures_of_each_hint(self) -> None:
        answer = invoke("plan", "Qwen/Qwen3-8B", "--hardware", "4x L4", "--concurrency", "2", "--users", "9", "--json")
        found = from_json(Decision, answer.out)
        assert answer.code == 0 and len(found.hints) == len(found.hint_details)
        assert {hint.kind for hint in found.hint_details} == {"idle-cards", "ignored-field"}
        assert {hint.field for hint in found.hint_details} == {None, "workload.users"}

    @pytest.mark.parametrize(
        ("hardware", "code"),
        [("8x Gaudi 3", 0), ("n300", 0), ("8x Ascend 910B", 1), ("inf2.48xlarge", 1), ("4x TPU v6e", 1)],
    )
    def test_no_usable_engine_exits_with_1_and_names_what_exists(self, hardware: str, code: int) -> None:
        answer = invoke("plan", "meta-llama/Llama-3.1-8B", "--hardware", hardware)
        assert answer.code == code, answer.err
        assert ("no engine that bedplate plans uses" in " ".join(answer.out.split())) == bool(code)
        assert invoke("plan", "meta-llama/Llama-3.1-8B", "--hardware", hardware, "--emit", "command").code == code

    def test_cpu_beside_idle_accelerators_has_to_be_requested(self) -> None:
        answer = invoke("plan", "Qwen/Qwen3-8B", "--hardware", "8x Ascend 910B", "--engine", "llama.cpp")
        assert answer.code == 0 and "8 of 8 × Huawei Ascend 910B stay idle" in " ".join(answer.out.split())


def test_a_speech_model_reads_audio_and_writes_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WHISPER))
    answer = invoke("plan", str(tmp_path), "--hardware", "RTX 4090")
    page = " ".join(answer.out.split())
    assert answer.code == 0 and "30 seconds of audio in, 256 text tokens out" in page
    assert "concurrent requests of 256 text tokens" in page and "512" not in page
