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

from bedplate.decide import decide
from bedplate.engines import get_engine, get_plan_engine, load_engines, sglang, vllm
from bedplate.engines.knobs import apply_values, with_engine_defaults
from bedplate.errors import UsageError
from bedplate.run.environments import find_adopted, read_registered_versions
from bedplate.values import Parallelism, Plan, Workload, replace_fields

OLDER = [(one.id, version) for one in load_engines().values() for version in one.checked_versions]
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
SMALL = Workload(concurrency=4)


def check_options(name: str, argv: tuple[str, ...]) -> dict[str, object]:
    """The options of a launch, checked against those of this version."""
    words = argv[2:] if argv[1] == "serve" else argv[4:]
    return parse_options(name.replace("@", "-"), words)


def test_older_versions_with_overlays_are_known() -> None:
    assert OLDER == [("sglang", "0.5.15"), ("vllm", "0.26.0")]


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
        registered = decide(on, model(LLAMA), Workload(users=64), versions={"vllm": "0.26.0", "gone": "1"})
        assert (registered.engine, registered.engine_version) == ("vllm", "0.26.0")
        assert "vllm" not in [one.engine for one in registered.refused]
        assert decide(on, model(LLAMA), SMALL, "vllm@0.32.0", versions={"vllm": "0.26.0"}).engine_version == "0.32.0"


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
        assert read_registered_versions() == {"vllm": "0.26.0"}

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

    def test_missing_version_is_rejected_before_the_start(self, python: Path) -> None:
        for words in (("serve", "--engine", "vllm@0.27.0"), ("bench", "--engines", "vllm@0.27.0")):
            answer = invoke(*words)
            assert answer.code == 2 and "vLLM 0.27.0 is not installed" in answer.err, words
        invoke("engines", "use", "vllm", "--python", str(python))
        answer = invoke("serve", "--engine", "vllm@0.27.0")
        assert answer.code == 2 and f"{python} has version 0.26.0" in answer.err

    def test_registered_environment_serves_only_its_version(self, python: Path) -> None:
        invoke("engines", "use", "vllm", "--python", str(python))
        assert find_adopted(get_engine("vllm")) is not None and find_adopted(get_engine("vllm@0.26.0")) is not None
        assert find_adopted(get_engine("vllm@0.32.0")) is None

    @pytest.mark.parametrize("wrong", ["vllm@", "vllm@new", "vllm@0.26.0 --x"])
    def test_missing_version_after_the_at_sign_is_a_usage_error(self, wrong: str) -> None:
        assert invoke("plan", LLAMA, "--engine", wrong).code == 2
