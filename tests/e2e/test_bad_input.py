"""Bad input gets a clear error and the right exit code, and no process is left."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest
from tests.commands import invoke
from tests.conftest import HANG_S, Served, has_no_new_children, wait_for


def run_bedplate(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs bedplate to its end, and checks that no child is left."""
    before = psutil.Process().children(recursive=True)
    done = subprocess.run(
        [sys.executable, "-m", "bedplate", *arguments],
        capture_output=True, text=True, timeout=HANG_S, env={**os.environ, **(env or {})},
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    wait_for(lambda: has_no_new_children(before), "its processes to end")
    return done


def assert_clear(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert "error: " in done.stderr and "hint: " in done.stderr, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def assert_refused_by_every_verb(model: Path, *said: str) -> None:
    """In this process, where an error is its message, cause and hint."""
    for words in (("serve", "--port", "0"), ("plan",), ("inspect",)):
        answer = invoke(*words, str(model))
        assert answer.code == 2 and len(answer.err.splitlines()) > 1, answer
        assert [word for word in said if word not in answer.err] == []


def test_reports_missing_file(tmp_path: Path) -> None:
    assert_clear(run_bedplate("serve", "--port", "0", str(tmp_path / "nothing.gguf")), 2, "nothing.gguf")
    assert_refused_by_every_verb(tmp_path / "nothing.gguf", "nothing.gguf")


def test_reports_truncated_gguf(tmp_path: Path, builtin_gguf: Path) -> None:
    cut = tmp_path / "cut.gguf"
    with builtin_gguf.open("rb") as whole:
        cut.write_bytes(whole.read(50_000_000))
    assert_refused_by_every_verb(cut, "cut.gguf", "cut short", "50,000,000")


def test_reports_file_that_is_not_gguf(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_text("<html>404 not found</html>")
    assert_refused_by_every_verb(other, "other.gguf")


def test_reports_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert_clear(run_bedplate("serve", "--port", str(port)), 3, f"port {port}", "in use", "--port")


def test_reports_address_of_another_machine() -> None:
    assert_clear(run_bedplate("serve", "--host", "192.0.2.1", "--port", "0"), 2, "192.0.2.1")


def test_reports_unwritable_home(tmp_path: Path) -> None:
    """A file has the folder's name: not even root can write there."""
    (tmp_path / "home").write_text("in the way")
    done = run_bedplate("serve", "--port", "0", env={"BEDPLATE_HOME": str(tmp_path / "home")})
    assert_clear(done, 3, "cannot write", "BEDPLATE_HOME")


def test_reports_full_disk_at_start(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        done = run_bedplate("serve", "--port", "0", env={"BEDPLATE_HOME": str(small)})
        assert_clear(done, 3, "not enough disk space", "BEDPLATE_HOME")
        assert not list(small.rglob("*.gguf"))
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_reports_missing_network_on_the_first_start(tmp_path: Path) -> None:
    nowhere = {
        "UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple",
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "UV_HTTP_RETRIES": "0",
    }
    env = {"BEDPLATE_HOME": str(tmp_path / "home"), **nowhere}
    done = run_bedplate("serve", "--port", "0", env=env)
    assert_clear(done, 3, "installing llama.cpp failed", "index")
    listed = json.loads(run_bedplate("engines", "--json", env=env).stdout)
    assert [engine["installed"] for engine in listed["engines"]] == [[] for _ in listed["engines"]]


def test_reports_unknown_engine() -> None:
    answer = invoke("plan", "--engine", "llama.ccp")
    assert answer.code == 2 and "did you mean llama.cpp" in answer.err


def test_reports_engine_that_cannot_run_here() -> None:
    answer = invoke("plan", "--engine", "tensorrt-llm")
    assert answer.code == 1 and "tensorrt-llm needs an NVIDIA GPU" in answer.out


def write_huge_gguf(path: Path) -> Path:
    """A model of 500 GB: a real header in a sparse file."""
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_block_count, 80), (writer.add_context_length, 8192), (writer.add_embedding_length, 8192),
        (writer.add_head_count, 64), (writer.add_head_count_kv, 8), (writer.add_feed_forward_length, 28672),
    ):  # fmt: skip
        add(value)
    writer.add_tensor_info("token_embd.weight", [250_000_000, 1000], np.dtype(np.float16), 500_000_000_000)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + 500_000_000_064)
    return path


def test_reports_model_that_does_not_fit(tmp_path: Path) -> None:
    model = write_huge_gguf(tmp_path / "huge.gguf")
    done = run_bedplate("serve", "--port", "0", str(model))
    assert_clear(done, 1, "weights 466 GiB", "more free memory")
    answer = invoke("plan", "--json", str(model))
    assert answer.code == 1 and json.loads(answer.out)["fits"] is False


@pytest.mark.parametrize("bad", [["--port", "70000"], ["--users", "0"], ["--no-such-option"], ["--context", "many"]])
def test_rejects_invalid_options(bad: list[str]) -> None:
    answer = invoke("serve", *bad)
    assert answer.code == 2 and bad[0] in answer.err


def test_reports_damaged_engine_environment(
    tmp_path: Path, bedplate_home: Path, builtin_gguf: Path, llama_environment: object
) -> None:
    """The engine cannot start: three attempts, then the reason, the log, and exit code 3."""
    home = tmp_path / "home"
    shutil.copytree(bedplate_home, home, symlinks=True, ignore=shutil.ignore_patterns("run", "services"))
    for program in home.glob("engines/llama.cpp/*/bin/llama-server"):
        program.write_text("import sys; sys.exit('the library is broken')")
    for manifest in home.glob("engines/llama.cpp/*/bedplate.json"):
        manifest.write_text(manifest.read_text().replace(str(bedplate_home), str(home)))
    done = run_bedplate("serve", "--port", "0", env={"BEDPLATE_HOME": str(home)})
    assert_clear(done, 3, "did not start", "the library is broken", "log")


def test_accepts_right_key_and_rejects_wrong_one(serve: Callable[..., Served]) -> None:
    served = serve(env={"BEDPLATE_API_KEY": "s3cret-key"})

    def ask(key: str | None) -> int:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(f"{served.url}/models", headers=headers)
        try:
            with urllib.request.urlopen(request) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    assert [ask(None), ask("wrong"), ask("s3cret-key")] == [401, 401, 200]
    with urllib.request.urlopen(f"{served.root}/health") as answer:
        assert answer.status == 200
    served.stop()
    assert "s3cret-key" not in "".join(served.stderr)
    assert "s3cret-key" not in Path(served.endpoint["log"]).read_text()


def test_closed_output_pipe_is_not_an_error() -> None:
    code = f"{sys.executable} -m bedplate plan | head -n 1"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
