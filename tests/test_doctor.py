"""`bedplate doctor`: what it collects, the problems it finds, and the private data it leaves out."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tests.conftest import HANG_S

from bedplate.cli.doctor import _check_engines
from bedplate.facts import doctor
from bedplate.facts.doctor import (
    DoctorProblem,
    DoctorReport,
    EngineCheck,
    FoundModel,
    anonymize,
    find_problems,
    hide_secrets,
    is_port_free,
    is_writable,
    list_settings,
    make_report,
    read_log_tails,
    read_swap_used,
    redact,
)
from bedplate.run.environments import EngineEnvironment
from bedplate.show.doctor import render_report
from bedplate.values import Accelerator, Cpu, Disk, GpuProcess, Hardware, Memory, from_json, replace_fields, to_json

GIB = 1 << 30
MACHINE = Hardware(
    os="linux",
    os_version="Debian GNU/Linux 12 (bookworm)",
    cpu=Cpu(
        name="Intel(R) Xeon(R) Processor", arch="x86_64", logical_cores=2, allowed_cores=2.0, allowed_physical_cores=2
    ),
    memory=Memory(total_bytes=24 * GIB, available_bytes=20 * GIB),
    disk=Disk(path="/home/ann/.cache/bedplate", total_bytes=10**12, free_bytes=5 * 10**11),
)
HEALTHY = DoctorReport(
    bedplate="0.1.0",
    python="CPython 3.12.1",
    uv="0.9.0",
    system="Debian",
    hardware=MACHINE,
    home="~/.cache/bedplate",
    home_writable=True,
    port_free=True,
)


def find_problems_after(**changes: Any) -> list[DoctorProblem]:
    return list(find_problems(replace_fields(HEALTHY, **changes)))


def make_hardware(**changes: Any) -> dict[str, Any]:
    return {"hardware": replace_fields(MACHINE, **changes)}


class TestProblems:
    def test_a_healthy_machine_has_no_problems(self) -> None:
        assert find_problems_after() == []
        assert HEALTHY.is_healthy

    @pytest.mark.parametrize(
        ("changes", "says", "hint"),
        [
            (
                make_hardware(disk=Disk(path="/", total_bytes=10**12, free_bytes=10**9)),
                "nearly full: 1 GB",
                "larger disk",
            ),
            (
                make_hardware(disk=Disk(path="/", total_bytes=10**12, free_bytes=4 * 10**10)),
                "nearly full: 40 GB",
                "BEDPLATE_HOME",
            ),
            ({"swap_used_bytes": 3 * GIB}, "3 GiB of memory is swapped out", "free memory"),
            ({"uv": None}, "uv is missing", "pip install uv"),
            ({"home_writable": False}, "is not writable", "BEDPLATE_HOME"),
            (
                make_hardware(memory=Memory(total_bytes=24 * GIB, available_bytes=GIB // 2)),
                "only 512 MiB",
                "smaller model",
            ),
            (make_hardware(cpu=replace_fields(MACHINE.cpu, allowed_cores=0.5)), "only 0.5 CPU cores", "CPU limit"),
            (
                make_hardware(notes=("an NVIDIA driver is loaded but its library is missing: …",)),
                "library is missing",
                None,
            ),
            (
                {"engines": (EngineCheck(engine="llama.cpp", version="1", failure="no module"),)},
                "llama.cpp 1 no longer runs: no module",
                "bedplate engines remove llama.cpp",
            ),
        ],
    )
    def test_each_problem_has_a_hint(self, changes: dict[str, Any], says: str, hint: str | None) -> None:
        (problem,) = find_problems_after(**changes)
        assert problem.kind == "problem"
        assert says in problem.what
        assert problem.hint is None if hint is None else hint in (problem.hint or "")
        assert not replace_fields(HEALTHY, problems=(problem,)).is_healthy

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            (
                make_hardware(memory=Memory(total_bytes=24 * GIB, available_bytes=3 * GIB, limit_bytes=4 * GIB)),
                "4 GiB of the",
            ),
            (make_hardware(notes=("CUDA_VISIBLE_DEVICES=0 hides 1 of 2 NVIDIA GPUs",)), "hides 1 of 2"),
            ({"port_free": False}, "port 8080"),
        ],
    )
    def test_possibly_intended_settings_are_remarks(self, changes: dict[str, Any], says: str) -> None:
        (remark,) = find_problems_after(**changes)
        assert (remark.kind, says in remark.what) == ("remark", True)
        assert replace_fields(HEALTHY, problems=(remark,)).is_healthy


class TestSecrets:
    @pytest.mark.parametrize(
        ("name", "value", "shown"),
        [
            ("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz", "(set, hidden)"),
            ("BEDPLATE_API_KEY", "hunter2", "(set, hidden)"),
            ("UV_INDEX_PRIVATE_PASSWORD", "hunter2", "(set, hidden)"),
            ("UV_PUBLISH_USERNAME", "ann", "(set, hidden)"),
            ("UV_KEYRING_PROVIDER_ENABLED", "1", "1"),
            (
                "UV_DEFAULT_INDEX",
                "https://ann:hunter2@index.example:8443/t0ken/simple",
                "https://…@index.example:8443/…",
            ),
            (
                "PIP_EXTRA_INDEX_URL",
                "https://a.example/ https://b:c@d.example/x",
                "https://a.example/ https://…@d.example/…",
            ),
            ("HTTPS_PROXY", "http://us@er:p@ss@proxy.example:3128", "http://…@proxy.example:3128"),
            ("UV_FIND_LINKS", "/srv/wheels", "/srv/wheels"),
            ("UV_OFFLINE", "1", "1"),
            ("HF_ENDPOINT", "https://mirror.example?token=abc", "https://mirror.example/…"),
            ("BEDPLATE_NOTE", "my key is sk-abcdefghijklmnop1234", "my key is …"),
            ("HF_HOME", "", "(empty)"),
        ],
    )
    def test_values_are_shown_without_secrets(self, name: str, value: str, shown: str) -> None:
        assert hide_secrets(name, value) == shown

    def test_only_relevant_settings_are_listed(self) -> None:
        environment = {
            "UV_OFFLINE": "1",
            "PATH": "/bin",
            "AWS_SECRET_ACCESS_KEY": "x",
            "https_proxy": "http://p.example",
        }
        assert [one.name for one in list_settings(environment)] == ["UV_OFFLINE", "https_proxy"]

    @given(st.sampled_from(["user", "u", ""]), st.from_regex(r"[A-Za-z0-9_@:!/,?#-]{3,30}", fullmatch=True))
    def test_passwords_are_removed_from_urls(self, user: str, password: str) -> None:
        shown = hide_secrets("UV_DEFAULT_INDEX", f"https://{user}:{password}@host.example/simple/")
        assert shown == "https://…@host.example/…"

    @given(st.text())
    def test_any_text_is_redacted_without_error(self, text: str) -> None:
        redact(text)
        hide_secrets("HF_HOME", text)

    def test_paths_contain_no_user_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Path, "home", lambda: Path("/home/ann"))
        assert hide_secrets("HF_HOME", "/home/ann/models") == "~/models"
        assert anonymize(MACHINE).disk == replace_fields(MACHINE.disk, path="~/.cache/bedplate")  # type: ignore[type-var]

    def test_cards_are_shown_without_ids_and_processes(self) -> None:
        card = Accelerator(
            name="NVIDIA H200",
            vendor="nvidia",
            uuid="GPU-1234",
            pci_address="0000:00:06.0",
            processes=(GpuProcess(pid=1, name="secret-project"),),
        )
        (shown,) = anonymize(replace_fields(MACHINE, accelerators=(card,))).accelerators
        assert (shown.name, shown.uuid, shown.pci_address, shown.processes) == ("NVIDIA H200", None, None, ())


class TestLogs:
    def test_log_tails_omit_prompts(self, tmp_path: Path) -> None:
        for age, name in enumerate(("new.log", "old.log", "oldest.log")):
            (tmp_path / name).write_text(
                f"{name} begins\n"
                "slot print_timing: prompt eval time = 469.63 ms\n"
                'srv request: {"messages":[{"role":"user","content":"my diary"}]}\n'
                "srv prompt: 'my diary'\n"
                "<|im_start|>user my diary\n"
                "fetching https://ann:hunter2@hub.example/model\n"
                "authorization: bearer abcdef\n"
            )
            os.utime(tmp_path / name, (1000 - age, 1000 - age))
        first, second = read_log_tails(tmp_path)
        assert (first.name, second.name) == ("new.log", "old.log")
        assert first.lines == (
            "new.log begins",
            "slot print_timing: prompt eval time = 469.63 ms",
            "fetching https://…@hub.example/…",
            "authorization: bearer …",
        )

    def test_only_the_end_of_a_large_log_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "a.log").write_text("x" * 300 + "\n" + "\n".join(f"line {number}" for number in range(100_000)))
        (tail,) = read_log_tails(tmp_path)
        assert tail.lines[-1] == "line 99999"
        assert len(tail.lines) == doctor.LOG_LINES

    def test_a_missing_folder_has_no_logs(self, tmp_path: Path) -> None:
        assert list(read_log_tails(tmp_path / "nowhere")) == []


class TestReading:
    def test_used_swap_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/meminfo").write_text("SwapTotal:       8388604 kB\nSwapFree:        5242876 kB\n")
        assert read_swap_used(tmp_path) == 3145728 * 1024
        (tmp_path / "proc/meminfo").write_text("SwapTotal:       8388604 kB\n")
        assert read_swap_used(tmp_path) is None

    def test_a_port_with_a_listener_is_not_free(self) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            port = listener.getsockname()[1]
            assert not is_port_free(port)
        assert is_port_free(port)

    def test_a_home_that_can_be_created_is_writable(self, tmp_path: Path) -> None:
        assert is_writable(tmp_path / "not/yet")
        assert not (tmp_path / "not").exists()
        (tmp_path / "file").write_text("")
        assert not is_writable(tmp_path / "file/below")

    def test_the_report_round_trips_and_can_be_shown(self, tmp_path: Path) -> None:
        report = make_report(
            replace_fields(
                MACHINE, accelerators=(Accelerator(name="NVIDIA H200", vendor="nvidia", driver_version="580"),)
            ),
            home=tmp_path,
            uv="0.9.0",
            engines=[EngineCheck(engine="llama.cpp", version="1", python="3.12", disk_bytes=10**8)],
            models=[FoundModel(name=f"model-{number}", origin="a file", bytes=10**9) for number in range(20)],
            environment={"HF_TOKEN": "hf_secretsecretsecret"},
        )
        assert from_json(DoctorReport, to_json(report)) == report
        assert "secretsecret" not in to_json(report)
        console = Console(width=120, color_system=None)
        with console.capture() as captured:
            console.print(render_report(report))
        page = captured.get()
        for expected in ("uv 0.9.0", "llama.cpp 1 · Python 3.12 · 100 MB · runs", "driver 580", "and 8 more"):
            assert expected in page
        assert "HF_TOKEN=(set, hidden)" in page


class TestCommand:
    def run(self, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {
            **os.environ,
            "BEDPLATE_HOME": str(home),
            "HF_TOKEN": "hf_secretsecretsecret",
            "BEDPLATE_API_KEY": "hunter2",
        }
        command = [sys.executable, "-m", "bedplate", "doctor", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=HANG_S, check=False)

    def test_prints_a_report_as_json(self, tmp_path: Path) -> None:
        done = self.run(tmp_path, "--json")
        report = from_json(DoctorReport, done.stdout)
        assert done.returncode == (0 if report.is_healthy else 1)
        assert report.uv is not None and report.bedplate
        assert report.engines == ()
        assert "hunter2" not in done.stdout and "secretsecret" not in done.stdout
        assert {"BEDPLATE_API_KEY", "BEDPLATE_HOME", "HF_TOKEN"} <= {setting.name for setting in report.settings}

    def test_an_environment_without_python_is_a_problem(self, tmp_path: Path) -> None:
        folder = tmp_path / "engines/llama.cpp/2026.1-0123456789"
        folder.mkdir(parents=True)
        (folder / "bedplate.json").write_text(json.dumps({"engine": "llama.cpp"}))
        done = self.run(tmp_path)
        assert done.returncode == 1
        assert "llama.cpp 2026.1 no longer runs" in " ".join(done.stdout.split())
        assert "bedplate engines remove llama.cpp" in done.stdout
        assert "\x1b" not in done.stdout


def test_engines_are_checked_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def check(path: Path, recipe: object, limit_s: float) -> str | None:
        both.wait(HANG_S)  # the first check ends only when the second has begun
        return "broken" if path.name == "b" else None

    found = [
        EngineEnvironment(
            engine=engine, version="1", path=f"/{name}", packages=(), python="3", made_at="now", disk_bytes=0
        )
        for engine, name in (("pytorch", "b"), ("vllm", "a"))
    ]
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("bedplate.run.environments.list_installed", lambda: found)
    monkeypatch.setattr("bedplate.run.environments.explain_not_running", check)
    assert [(one.engine, one.failure) for one in _check_engines()] == [("pytorch", "broken"), ("vllm", None)]
