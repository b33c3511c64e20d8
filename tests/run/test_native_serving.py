"""serve --build native: the engine that is built, the notes, and the fallback when the build fails its test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.engines.plans import machine, model
from tests.engines.plans import plan as engine_plan
from tests.run.test_environments import own_home
from tests.run.test_native import Notes

from bedplate.engines import get_engine
from bedplate.engines.knobs import apply_values, make_build_knob
from bedplate.errors import ExternalFailure, UsageError
from bedplate.facts.hardware import probe
from bedplate.run import ready, trials
from bedplate.run.builtin import read_builtin_facts
from bedplate.run.environments import EngineEnvironment
from bedplate.run.listening import ListenOptions
from bedplate.run.native import BuildNotUsable, BuildTestResult
from bedplate.serving.serve import serve
from bedplate.values import Settings, replace_fields

__all__ = ["own_home"]
LLAMA = get_engine("llama.cpp")


def make_environment_record(path: Path, version: str, **more: Any) -> EngineEnvironment:
    return EngineEnvironment(
        engine="llama.cpp", version=version, path=str(path), packages=(), python="", made_at="", disk_bytes=0, **more
    )


class TestEngineToBuild:
    def test_chooses_the_only_buildable_engine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ready, "find_toolchain", lambda *_: None)
        assert ready._choose_build_engine(None, machine("cpu")).id == "llama.cpp"
        assert ready._choose_build_engine("llama.cpp", machine("cpu")).id == "llama.cpp"

    def test_rejects_engines_that_cannot_be_built(self) -> None:
        with pytest.raises(UsageError, match="does not build vLLM"):
            ready._choose_build_engine("vllm", machine("cpu"))

    def test_reports_missing_compiler_before_the_download(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_home: Path
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ExternalFailure, match=r"C\+\+ compiler"):
            serve(build="native", listen=ListenOptions(port=0))
        assert not (own_home / "models").exists()


class TestNotes:
    def test_note_about_idle_gpu(self) -> None:
        on = machine("H100 SXM", 1)
        chosen = engine_plan(
            LLAMA, on, model("Qwen/Qwen3-32B"), label="Q4_K_M", settings=Settings(slots=1, context_tokens=512)
        )
        words = str(ready._describe_idle_accelerators(LLAMA, on, chosen))
        assert "--build native" in words and on.accelerators[0].name in words and "only the CPU" in words

    def test_no_note_if_the_gpu_is_used(self) -> None:
        on = machine("H100 SXM", 1)
        chosen = engine_plan(LLAMA, on, model("Qwen/Qwen3-32B"), label="Q4_K_M")
        assert chosen.settings.device == "cuda" and ready._describe_idle_accelerators(LLAMA, on, chosen) is None
        cpu = engine_plan(LLAMA, machine("cpu"), model("Qwen/Qwen3-32B"), label="Q4_K_M")
        assert ready._describe_idle_accelerators(LLAMA, machine("cpu"), cpu) is None

    def test_note_about_unused_instructions(self, own_home: Path) -> None:
        x86 = machine("cpu")
        chosen = engine_plan(LLAMA, x86, model("Qwen/Qwen3-32B"), label="Q4_K_M")
        assert ready._describe_unused_instructions(LLAMA, x86, chosen) is None
        arm = replace_fields(x86, cpu=replace_fields(x86.cpu, instruction_sets=("neon", "dotprod")))
        words = str(ready._describe_unused_instructions(LLAMA, arm, chosen))
        assert "without dot product instructions" in words and "--build native builds it from source" in words
        elsewhere = replace_fields(chosen, settings=replace_fields(chosen.settings, device="cuda"))
        assert ready._describe_unused_instructions(LLAMA, arm, elsewhere) is None


class TestFailedBuild:
    @pytest.fixture(autouse=True)
    def no_good(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuses(*_: object) -> EngineEnvironment:
            raise BuildNotUsable("it gives wrong answers", ("after 'a' it says 'b'",))

        monkeypatch.setattr(ready, "provide_native_environment", refuses)
        monkeypatch.setattr(ready, "make_environment", lambda *_, **__: make_environment_record(tmp_path, "packaged"))

    def test_cpu_falls_back_to_the_packaged_engine_with_a_warning(self) -> None:
        notes = Notes()
        chosen = engine_plan(LLAMA, machine("cpu"), model("Qwen/Qwen3-32B"), label="Q4_K_M")
        found = ready._choose_environment(chosen, machine("cpu"), "native", notes, None)
        assert found.version == "packaged"
        said = "\n".join(notes.said)
        assert "WARNING" in said and "wrong answers" in said and "after 'a' it says 'b'" in said

    def test_gpu_has_no_fallback(self) -> None:
        on = machine("H100 SXM", 1)
        chosen = engine_plan(LLAMA, on, model("Qwen/Qwen3-32B"), label="Q4_K_M")
        with pytest.raises(ExternalFailure, match="is not used: it gives wrong answers") as caught:
            ready._choose_environment(chosen, on, "native", Notes(), None)
        assert "after 'a'" in str(caught.value.cause)

    def test_measurement_has_no_fallback(self) -> None:
        chosen = engine_plan(LLAMA, machine("cpu"), model("Qwen/Qwen3-32B"), label="Q4_K_M")
        with pytest.raises(ExternalFailure, match="is not used: it gives wrong answers"):
            ready._choose_environment(chosen, machine("cpu"), "native", Notes(), None, to_measure=True)


class TestTunedBuild:
    """A tuned native build is used if it is installed; otherwise there is a note."""

    @pytest.mark.parametrize("there", [True, False])
    def test_uses_tuned_native_build(self, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        built = make_environment_record(tmp_path, "built", built=True)
        monkeypatch.setattr(ready, "find_usable_build", lambda *_: built if there else None)
        monkeypatch.setattr(ready, "make_environment", lambda *_, **__: make_environment_record(tmp_path, "packaged"))
        on, notes = machine("cpu"), Notes()
        plain = engine_plan(LLAMA, on, model("Qwen/Qwen3-32B"), label="Q4_K_M")
        tuned = apply_values(plain, (make_build_knob(),), {"build": "native"})
        assert ready._choose_environment(plain, on, "packages", notes, None).version == "packaged" and not notes.said
        assert ready._choose_environment(tuned, on, "packages", notes, None).version == (
            "built" if there else "packaged"
        )
        assert ("--build native builds it" in "".join(notes.said)) == (not there)


class TestTrial:
    """With a program that crashes like a build with an unsupported instruction."""

    def test_distinguishes_crash_from_answers(
        self, tmp_path: Path, own_home: Path, llama_environment: EngineEnvironment, builtin_gguf: Path
    ) -> None:
        (tmp_path / "bin").mkdir()
        program = tmp_path / "bin" / "llama-server"
        program.write_text(f"#!/bin/sh\necho $OMP_WAIT_POLICY > '{tmp_path}/policy'\nkill -ILL $$\n")
        program.chmod(0o755)
        dead = make_environment_record(tmp_path, "native", program="bin/llama-server", built=True)
        facts = read_builtin_facts()
        found = trials._run_trial(LLAMA, machine("cpu"), facts, None, None, Notes(), dead)
        assert not found.runs and "SIGILL" in found.why
        assert (
            tmp_path / "policy"
        ).read_text() == "passive\n"  # blocking threads, so that the trial is not slow on a busy machine

    def test_trial_returns_answers(
        self, own_home: Path, llama_environment: EngineEnvironment, builtin_gguf: Path
    ) -> None:
        class Asks:
            async def ask(self, chosen: Any, url: str, key: str | None) -> str:
                return f"{chosen.model.name} by {key is not None}"

            def judge(self, chosen: Any, built: Any, packaged: Any) -> BuildTestResult:
                return BuildTestResult(runs=True, right=built == packaged, why=f"{built}")

        facts = read_builtin_facts()
        facts = replace_fields(facts, files=(str(builtin_gguf),))
        found = trials._run_trial(LLAMA, probe(), facts, llama_environment, Asks(), Notes(), llama_environment)
        assert found.runs and found.right and "SmolLM2" in found.why and "True" in found.why
