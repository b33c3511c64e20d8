"""`bedplate models refresh` against a server that answers as the hub's API is documented."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner

from bedplate.cli.app import app
from bedplate.errors import ExternalFailure, UsageError
from bedplate.facts.known_models import find_model
from bedplate.facts.published_weights import get_listing_path, list_published, list_repository_keys, read_listing
from bedplate.run.hub import list_published_files
from bedplate.run.published_listing import store_listing

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "Qwen/Qwen3-8B"


@dataclass
class ListedHub:
    """Repositories by name, with @branch, each with its files and their sizes."""

    repositories: dict[str, dict[str, int]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """The path of each request."""


class Handler(BaseHTTPRequestHandler):
    """GET /api/models/{owner}/{name}[/revision/{branch}]?blobs=true, as in the hub's API."""

    hub: ListedHub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        self.hub.asked.append(self.path)
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", asked.path)
        name, branch = (match[1], match[2]) if match else ("", None)
        if not any(key.partition("@")[0] == name for key in self.hub.repositories):
            return self.reply(404, {"error": "Repository not found"}, "RepoNotFound")
        files = self.hub.repositories.get(f"{name}@{branch}" if branch else name)
        if files is None:
            return self.reply(404, {"error": f"Invalid rev id: {branch}"}, "RevisionNotFound")
        siblings: list[dict[str, object]] = [{"rfilename": file} for file in files]
        if parse_qs(asked.query).get("blobs"):
            siblings = [
                {"rfilename": file, "size": size, "blobId": "0" * 40, "lfs": {"sha256": "0" * 64, "size": size,
                 "pointerSize": 134}}
                for file, size in files.items()
            ]  # fmt: skip
        body = {
            "_id": "1", "id": name, "modelId": name, "sha": COMMIT, "private": False, "gated": False, "tags": [],
            "downloads": 0, "likes": 0, "siblings": siblings,
        }  # fmt: skip
        return self.reply(200, body)

    def reply(self, status: int, body: dict[str, object], code: str | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ListedHub]:
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    state = ListedHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": state}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def publish_all(hub: ListedHub) -> None:
    """Every repository of one model, with the file that plans need."""
    for key in list_repository_keys([MODEL]):
        hub.repositories[key] = {"config.json": 700, "model.safetensors": 5_000_000_000}
    hub.repositories["unsloth/Qwen3-8B-GGUF"] = {"Qwen3-8B-Q4_K_M.gguf": 5_027_783_488, "README.md": 10}


def refresh(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["models", "refresh", *words], catch_exceptions=True)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


class TestRefresh:
    def test_plans_use_what_the_hub_lists(self, hub: ListedHub) -> None:
        publish_all(hub)
        code, output = refresh(MODEL)
        assert code == 0 and str(get_listing_path()) in output.replace("\n", "")
        found = {(one.format, one.label): one.weights for one in list_published(find_model(MODEL))}
        assert found["gguf", "Q4_K_M"].size_bytes == 5_027_783_488
        assert found["gguf", "Q4_K_M"].size_basis == "reported"
        assert ("gguf", "Q8_0") not in found, "the hub no longer has this file"
        assert found["safetensors", "FP8"].size_bytes == 5_000_000_000

    def test_it_downloads_nothing(self, hub: ListedHub) -> None:
        publish_all(hub)
        refresh(MODEL)
        assert hub.asked and all(path.startswith("/api/models/") for path in hub.asked)

    def test_a_repository_that_is_gone_is_not_planned(self, hub: ListedHub) -> None:
        publish_all(hub)
        del hub.repositories["Qwen/Qwen3-8B-AWQ"]
        _, output = refresh(MODEL)
        assert "Qwen/Qwen3-8B-AWQ" in output
        assert "AWQ-Int4" not in {one.label for one in list_published(find_model(MODEL))}

    def test_a_branch_that_is_gone_is_not_planned(self, hub: ListedHub) -> None:
        publish_all(hub)
        hub.repositories["turboderp/Qwen3-8B-exl3"] = hub.repositories.pop("turboderp/Qwen3-8B-exl3@4.0bpw")
        refresh(MODEL)
        found = {one.weights.revision for one in list_published(find_model(MODEL)) if one.format == "exl3"}
        assert found == {"6.0bpw"}, "the branches that the hub lists"

    def test_a_second_model_keeps_the_first(self, hub: ListedHub) -> None:
        publish_all(hub)
        refresh(MODEL)
        store_listing(list_published_files(["Qwen/Qwen3-8B-FP8"]))
        listing = read_listing()
        assert listing is not None and set(listing.repositories) == set(list_repository_keys([MODEL]))

    def test_an_unknown_model_is_a_usage_error(self, hub: ListedHub) -> None:
        with pytest.raises(UsageError, match="does not have me/model"):
            refresh("me/model")
        assert hub.asked == []


class TestWithoutNetwork:
    def test_an_unreachable_hub_is_an_external_failure(self, hub: ListedHub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(ExternalFailure, match=r"http://127\.0\.0\.1:9") as caught:
            refresh(MODEL)
        assert caught.value.hint is not None and "network" in caught.value.hint
        assert not get_listing_path().exists()

    def test_an_earlier_listing_stays(self, hub: ListedHub, monkeypatch: pytest.MonkeyPatch) -> None:
        publish_all(hub)
        refresh(MODEL)
        before = get_listing_path().read_bytes()
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(ExternalFailure):
            refresh(MODEL)
        assert get_listing_path().read_bytes() == before
