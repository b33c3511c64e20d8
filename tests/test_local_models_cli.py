"""`pull`, `list` and `rm` with a local hub: what is downloaded, where it is, and what may be removed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import invoke, run
from tests.contract.documents import check_document
from tests.facts.test_gguf import write
from tests.run.test_hub import Hub, server
from tests.terminals import Terminal

from bedplate.facts.gguf import read_gguf
from bedplate.facts.library import find_hub_cache
from bedplate.facts.published_weights import list_published
from bedplate.home import get_models_dir
from bedplate.run.models import find_known_model

__all__ = ["server"]
SMALL, LARGE = "model-Q4_K_M.gguf", "model-Q8_0.gguf"


@pytest.fixture(autouse=True)
def no_other_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))


def add_files(server: Hub, tmp_path: Path) -> None:
    for name in (SMALL, LARGE):
        server.files[name] = write(tmp_path / name).read_bytes() + name.encode()


def list_names() -> list[str]:
    document = json.loads(check_text("local-models", invoke("list", "--json").out))
    return [one["name"] for one in document["models"]]


def check_text(name: str, text: str) -> str:
    check_document(name, text)
    return text


def test_pull_list_and_rm(server: Hub, tmp_path: Path) -> None:
    add_files(server, tmp_path)
    assert list_names() == [] and "no model is on this machine" in invoke("list").out
    answer = invoke("pull", "me/model:Q4_K_M")
    assert answer.code == 0 and "me/model:Q4_K_M downloaded" in answer.out
    assert len(server.downloads()) == 1
    again = invoke("pull", "me/model:Q4_K_M", "--json")
    assert json.loads(check_text("local-model", again.out))["size_bytes"] == len(server.files[SMALL])
    assert len(server.downloads()) == 1  # it was here
    invoke("pull", f"me/model/{LARGE}")
    assert sorted(list_names()) == ["me/model:Q4_K_M", "me/model:Q8_0"]
    shown = invoke("list").out
    assert "the Hugging Face cache" in shown and "never" in shown and "2 in total" in shown

    removed = invoke("rm", "me/model:Q4_K_M", "--yes", "--json")
    assert json.loads(check_text("removed-models", removed.out))["freed_bytes"] == len(server.files[SMALL])
    assert list_names() == ["me/model:Q8_0"]
    blobs = [path.stat().st_size for path in find_hub_cache().glob("models--me--model/blobs/*")]
    assert blobs == [len(server.files[LARGE])]
    assert "ME/model:q8_0" not in list_names() and invoke("rm", "ME/model:q8_0", "-y").code == 0
    assert list_names() == [] and not (find_hub_cache() / "models--me--model").exists()


def test_a_model_in_use_stays(server: Hub, tmp_path: Path) -> None:
    """Another process uses it, as a service does; when that ends, it can be removed, and its last use is known."""
    add_files(server, tmp_path)
    invoke("pull", "me/model:Q4_K_M")
    path = json.loads(invoke("pull", "me/model:Q4_K_M", "--json").out)["path"]
    program = (
        "import sys; from pathlib import Path; from bedplate.facts.gguf import read_gguf;"
        "from bedplate.run.local_models import record_use;"
        f"record_use(read_gguf(Path({path!r}))); print('used', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None and user.stdout.readline() == b"used\n"
        assert json.loads(invoke("list", "--json").out)["models"][0]["in_use"] is True
        answer = invoke("rm", "me/model:Q4_K_M", "--yes")
        assert answer.code == 1 and "in use by a running bedplate" in answer.err
        assert read_gguf(Path(path)).files
        assert user.stdin is not None
        user.stdin.close()
    (one,) = json.loads(invoke("list", "--json").out)["models"]
    assert one["in_use"] is False and one["used_at"] is not None and "just now" in invoke("list").out
    assert invoke("rm", "me/model:Q4_K_M", "--yes").code == 0


def test_own_models_of_several_parts_are_removed_as_a_whole(server: Hub, tmp_path: Path) -> None:
    folder = get_models_dir() / "mine"
    folder.mkdir(parents=True)
    for number in (1, 2):
        write(folder / f"split-{number:05}-of-00002.gguf")
    (name,) = list_names()
    assert invoke("rm", name, "--yes").code == 0
    assert not folder.exists() and get_models_dir().exists()


def test_models_of_other_programs_and_own_files_stay(server: Hub, tmp_path: Path) -> None:
    mine = write(tmp_path / "mine.gguf")
    answer = invoke("rm", str(mine), "--yes")
    assert answer.code == 1 and "delete it yourself" in answer.err and mine.exists()
    studio = Path.home() / ".lmstudio" / "models" / "me" / "other"
    studio.mkdir(parents=True)
    write(studio / "other-Q8_0.gguf")
    answer = invoke("rm", "me/other/other-Q8_0.gguf", "--yes")
    assert answer.code == 1 and "remove it with LM Studio" in answer.err and list_names()


def test_names_that_are_not_here(server: Hub) -> None:
    answer = invoke("rm", "me/nothing", "--yes")
    assert answer.code == 2 and "bedplate list" in answer.err
    assert not server.asked


def test_rm_asks_on_a_terminal(server: Hub, tmp_path: Path) -> None:
    add_files(server, tmp_path)
    invoke("pull", "me/model:Q4_K_M")
    assert "needs a confirmation" in invoke("rm", "me/model:Q4_K_M").err
    with Terminal("rm", "me/model:Q4_K_M") as terminal:
        terminal.read_until(r"remove this\? \[y/N\]: ")
        terminal.type("n\r")
        assert terminal.wait() == 1
    with Terminal("rm", "me/model:Q4_K_M") as terminal:
        terminal.read_until(r"remove this\? \[y/N\]: ")
        terminal.interrupt_prompt()
        assert terminal.wait() == 130 and "Aborted" not in terminal.shown
    assert list_names() == ["me/model:Q4_K_M"]


def test_a_folder_of_safetensors_in_the_hub_cache_is_listed_and_removed(server: Hub) -> None:
    snapshot = find_hub_cache() / "models--me--folder" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"\0" * 1000)
    assert list_names() == ["me/folder"]
    assert invoke("rm", "me/folder", "--yes").code == 0
    assert not (find_hub_cache() / "models--me--folder").exists()


def test_a_short_name_is_pulled_once_and_removed(server: Hub, tmp_path: Path) -> None:
    """The plan for this machine chooses the file. The second time the hub is not asked."""
    server.name = "bartowski/SmolLM2-360M-Instruct-GGUF"
    for form in list_published(find_known_model("smollm2:360m")):
        server.files[form.weights.file or ""] = write(tmp_path / "one.gguf").read_bytes() + form.label.encode()
    pulled = json.loads(invoke("pull", "smollm2:360m", "--json").out)
    assert pulled["name"].startswith(f"{server.name}:") and len(server.downloads()) == 1
    server.asked.clear()
    again = run("pull", "smollm2:360m")
    assert again.code == 0 and "is already here" in again.out and server.asked == []
    assert "smollm2:360m is HuggingFaceTB/SmolLM2-360M-Instruct" in again.err
    assert invoke("rm", "smollm2:360m", "--yes").code == 0
    assert list_names() == []
    assert "did you mean smollm2:" in invoke("pull", "smollm2:3b").err and server.asked == []
