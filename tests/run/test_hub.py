from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.facts.test_gguf import write

from bedplate.errors import ExternalFailure, NotPossible, UsageError
from bedplate.facts.hardware import probe
from bedplate.facts.library import locate
from bedplate.progress import SilentProgress
from bedplate.run import checksums, hub, ready
from bedplate.run.builtin import read_builtin_facts
from bedplate.run.models import fetch_model
from bedplate.values import replace_fields

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GB = 10**9


def accept_any_size(size: int) -> bool:
    return True


def fetch_gguf(
    reference: str, fits: Callable[[int], bool] = accept_any_size, progress: Callable[[int, int], None] | None = None
) -> Path:
    return hub.download(hub.choose_files(reference, fits=fits), progress=progress)


def make_content(name: str, size: int = 300_000) -> bytes:
    return (hashlib.sha256(name.encode()).digest() * (size // 32 + 1))[:size]


def is_large(name: str) -> bool:
    return name.endswith((".gguf", ".safetensors"))


@dataclass
class Hub:
    """A local hub: its files, its faults, and the requests that it received."""

    url: str = ""
    name: str = "me/model"
    files: dict[str, bytes] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    """Files that are listed only."""
    gated: bool = False
    need_token: str | None = None
    break_after: list[int] = field(default_factory=list)
    """How many bytes each of the next downloads sends before the line is cut."""
    ignore_ranges: bool = False
    statuses: list[int] = field(default_factory=list)
    """What the next downloads are answered with instead."""
    etag: str | None = None
    listed: dict[str, str] = field(default_factory=dict)
    """Digests that the listing has instead of the right ones."""
    commit: str | None = COMMIT
    cdn: str | None = None
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    sent: int = 0
    """Bytes of files that were sent whole."""

    def compute_digest(self, name: str) -> str:
        """SHA-256 for large files, which are in LFS; git's SHA-1 for small ones."""
        data = self.files.get(name, b"")
        if is_large(name):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def describe(self, name: str) -> dict[str, object]:
        """A file in the listing of the repository."""
        size = self.sizes.get(name, len(self.files.get(name, b"")))
        digest = self.listed.get(name) or self.compute_digest(name)
        if not is_large(name):
            return {"rfilename": name, "size": size, "blobId": digest}
        lfs = {"sha256": digest, "size": size, "pointerSize": 134}
        return {"rfilename": name, "size": size, "blobId": "0" * 40, "lfs": lfs}

    def downloads(self) -> list[str]:
        """The Range of each GET of a file."""
        return [headers.get("range", "") for verb, path, headers in self.asked if verb == "GET" and "/api/" not in path]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        headers = {key.lower(): value for key, value in self.headers.items()}
        hub.asked.append((self.command, self.path, headers))
        if re.fullmatch(rf"/api/models/{hub.name}(/revision/[^/]+)?", path):
            return self.listing()
        if re.fullmatch(rf"/api/models/{hub.name}/tree/[^/]+", path):
            return self.tree()
        if match := re.fullmatch(rf"/{hub.name}/resolve/([^/]+)/(.+)", path):
            if hub.need_token and headers.get("authorization") != f"Bearer {hub.need_token}":
                return self.reply(401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
            if match[2] not in hub.files:
                return self.reply(404, {"X-Error-Code": "EntryNotFound"})
            if hub.cdn and self.command == "HEAD":
                linked = self.linked(match[2])
                return self.reply(302, linked | {"Location": f"{hub.cdn}/{match[2]}?signature=xyz"})
            return self.file(match[2])
        return self.reply(404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})

    def listing(self) -> None:
        siblings = [self.hub.describe(name) for name in {**self.hub.files, **self.hub.sizes}]
        name = self.hub.name
        body: dict[str, object] = {"_id": "1", "id": name, "modelId": name, "sha": self.hub.commit}
        body |= {
            "private": False,
            "tags": [],
            "gated": "manual" if self.hub.gated else False,
            "downloads": 0,
            "likes": 0,
        }
        body["siblings"] = siblings
        self.reply(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def tree(self) -> None:
        """The listing that the hub's own client downloads from."""
        rows: list[dict[str, object]] = []
        for name, data in self.hub.files.items():
            row: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
            if is_large(name):
                row["lfs"] = {"oid": self.hub.compute_digest(name), "size": len(data), "pointerSize": 134}
            rows.append(row)
        self.reply(200, {"Content-Type": "application/json"}, json.dumps(rows).encode())

    def linked(self, name: str) -> dict[str, str]:
        data = self.hub.files[name]
        etag = self.hub.etag or self.hub.compute_digest(name)
        linked = {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(data))}
        return linked | {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}

    def file(self, name: str) -> None:
        data, hub = self.hub.files[name], self.hub
        if self.command == "GET" and hub.statuses:
            return self.reply(hub.statuses.pop(0), {})
        headers, status, start = self.linked(name), 200, 0
        end = len(data)
        if (match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))) and not hub.ignore_ranges:
            start, status = int(match[1]), 206
            end = min(end, int(match[2]) + 1) if match[2] else end
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        limit = hub.break_after.pop(0) if self.command == "GET" and hub.break_after else None
        if self.command == "GET" and limit is None:
            hub.sent += end - start
        self.reply(status, headers, data[start:end], limit)

    def reply(self, status: int, headers: dict[str, str], body: bytes = b"", limit: int | None = None) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:limit])
        if limit is not None:
            self.close_connection = True


def serve_hub(state: Hub) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": state}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(hub, "_PAUSES_S", (0.0, 0.0))
    for state in serve_hub(Hub()):
        monkeypatch.setenv("HF_ENDPOINT", state.url)
        yield state


@pytest.fixture
def cdn() -> Iterator[Hub]:
    """A second server with the bytes, like the hub's content delivery network."""
    state = Hub()
    for _ in serve_hub(state):
        yield state


SIZES = {
    "m-BF16.gguf": 16 * GB,
    "m-Q8_0.gguf": 8 * GB,
    "m-Q6_K.gguf": 6 * GB,
    "m-Q4_K_M.gguf": 5 * GB,
    "m-Q4_K_S.gguf": 4 * GB,
    "m-Q3_K_M.gguf": 3 * GB,
    "m-Q2_K.gguf": 2 * GB,
    "mmproj-m-F16.gguf": 1 * GB,
    "README.md": 10,
}


def test_finds_the_newest_commit(server: Hub) -> None:
    server.sizes = SIZES
    assert hub.find_commit("me/model") == COMMIT


class TestChoice:
    def chosen(self, server: Hub, sizes: dict[str, int], limit: int = 10**15, text: str = "me/model") -> str | None:
        server.sizes = sizes
        return hub.choose_files(text, fits=lambda size: size <= limit).quantization

    def test_chooses_usual_4_bit_quantization_even_if_a_larger_one_fits(self, server: Hub) -> None:
        assert self.chosen(server, SIZES) == "Q4_K_M"

    @pytest.mark.parametrize(("limit", "label"), [(5, "Q4_K_M"), (4, "Q4_K_S"), (3, "Q3_K_M"), (2, "Q2_K")])
    def test_chooses_largest_smaller_quantization_if_4_bit_does_not_fit(
        self, server: Hub, limit: int, label: str
    ) -> None:
        assert self.chosen(server, SIZES, limit * GB) == label

    def test_reports_smallest_file_if_none_fits(self, server: Hub) -> None:
        with pytest.raises(NotPossible) as caught:
            self.chosen(server, SIZES, GB)
        assert caught.value.message == "no GGUF of me/model fits: the smallest is Q2_K, 2 GB"

    def test_chooses_smallest_larger_quantization_without_a_4_bit_one(self, server: Hub) -> None:
        sizes = {name: size for name, size in SIZES.items() if "Q4" not in name}
        assert self.chosen(server, sizes) == "Q6_K"
        assert self.chosen(server, sizes, 5 * GB) == "Q3_K_M"

    def test_chooses_similar_quantization_if_the_usual_one_is_missing(self, server: Hub) -> None:
        assert self.chosen(server, {"m-Q8_0.gguf": 8, "m-UD-Q4_K_XL.gguf": 5, "m-IQ4_XS.gguf": 4}) == "UD-Q4_K_XL"
        assert self.chosen(server, {"gpt-oss-20b-mxfp4.gguf": 12}) == "MXFP4"

    def test_named_quantization_is_used_even_if_it_does_not_fit(self, server: Hub) -> None:
        assert self.chosen(server, SIZES, 0, "me/model:q8_0") == "Q8_0"
        assert self.chosen(server, SIZES, 0, "me/model/m-Q6_K.gguf") == "Q6_K"

    def test_missing_quantization_error_lists_existing_ones(self, server: Hub) -> None:
        with pytest.raises(UsageError) as caught:
            self.chosen(server, {"m-Q8_0.gguf": 8 * GB, "m-Q4_K_M.gguf": 5 * GB}, text="me/model:Q5_K_M")
        assert caught.value.message == "me/model has no Q5_K_M"
        assert caught.value.hint == "it has Q4_K_M (5 GB), Q8_0 (8 GB)"

    def test_missing_file_is_a_usage_error(self, server: Hub) -> None:
        with pytest.raises(UsageError, match=r"has no file other\.gguf"):
            self.chosen(server, SIZES, text="me/model/other.gguf")

    def test_split_files_are_one_model_with_their_total_size(self, server: Hub) -> None:
        parts = {f"Q4_K_M/m-Q4_K_M-0000{n}-of-00003.gguf": 40 * GB for n in (1, 2, 3)}
        server.sizes = {"m-Q2_K.gguf": 50 * GB, **parts}
        choice = hub.choose_files("me/model", fits=accept_any_size)
        assert [file.path for file in choice.files] == list(parts)
        assert choice.size_bytes == choice.missing_bytes == 120 * GB
        assert self.chosen(server, server.sizes, 100 * GB) == "Q2_K"

    def test_ignores_split_model_with_a_missing_part(self, server: Hub) -> None:
        assert self.chosen(server, {"m-Q4_K_M-00001-of-00002.gguf": 1, "m-Q2_K.gguf": 1}) == "Q2_K"

    def test_choice_is_complete_before_the_download(self, server: Hub, tmp_path: Path) -> None:
        server.sizes = SIZES
        choice = hub.choose_files("me/model", fits=accept_any_size)
        assert choice.name == "me/model:Q4_K_M"
        assert choice.revision == COMMIT
        assert choice.size_bytes == 5 * GB
        assert choice.folder == tmp_path / "hf" / "hub" / "models--me--model"
        assert server.downloads() == []
        assert not choice.folder.exists()

    def test_repository_without_gguf_gets_a_hint(self, server: Hub) -> None:
        server.sizes = {"model.safetensors": 1, "config.json": 1}
        with pytest.raises(UsageError) as caught:
            hub.choose_files("me/model", fits=accept_any_size)
        assert caught.value.message == "me/model has no GGUF files"
        assert caught.value.cause == "it has .safetensors files"
        assert caught.value.hint is not None
        assert "model-GGUF" in caught.value.hint


class TestRefusals:
    def test_reports_missing_repository(self, server: Hub) -> None:
        with pytest.raises(UsageError, match="me/other is not on the hub, or it is private"):
            hub.choose_files("me/other", fits=accept_any_size)

    @pytest.mark.parametrize("text", ["llama3", "a/b c", "", "../../etc"])
    def test_rejects_invalid_name(self, server: Hub, text: str) -> None:
        with pytest.raises(UsageError, match="not the name of a model"):
            hub.choose_files(text, fits=accept_any_size)
        assert server.asked == []

    def test_reports_gated_repository_before_the_download(self, server: Hub) -> None:
        server.files, server.gated, server.need_token = {"m-Q4_K_M.gguf": make_content("m")}, True, "hf_good"
        with pytest.raises(UsageError) as caught:
            hub.choose_files("me/model", fits=accept_any_size)
        assert "me/model is gated" in caught.value.message
        assert caught.value.hint is not None
        assert f"{server.url}/me/model" in caught.value.hint
        assert "hf auth login" in caught.value.hint

    def test_gated_repository_works_with_a_token(self, server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        server.files, server.gated, server.need_token = {"m-Q4_K_M.gguf": make_content("m")}, True, "hf_good"
        monkeypatch.setenv("HF_TOKEN", "hf_good")
        assert fetch_gguf("me/model", fits=accept_any_size).read_bytes() == make_content("m")

    def test_offline(self, server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(ExternalFailure, match="HF_HUB_OFFLINE"):
            hub.choose_files("me/model", fits=accept_any_size)
        assert server.asked == []

    def test_no_network(self, server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(ExternalFailure) as caught:
            hub.choose_files("me/model", fits=accept_any_size)
        assert caught.value.message == "cannot download me/model from http://127.0.0.1:9"
        assert caught.value.hint is not None
        assert "network" in caught.value.hint

    def test_refuses_plain_http(self, server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example:8080")
        with pytest.raises(UsageError, match=r"over plain http from mirror\.example") as caught:
            hub.choose_files("me/model", fits=accept_any_size)
        assert "BEDPLATE_ALLOW_HTTP=mirror.example" in str(caught.value.hint)

    def test_refuses_redirect_to_plain_http(self, server: Hub) -> None:
        server.files = {"m-Q4_K_M.gguf": make_content("m")}
        server.cdn = "http://cdn.example"
        with pytest.raises(UsageError, match=r"over plain http from cdn\.example"):
            fetch_gguf("me/model")

    def test_checks_disk_space_before_downloading_from_the_hub(self, server: Hub) -> None:
        server.sizes = {"m-Q4_K_M.gguf": 10**18}
        choice = hub.choose_files("me/model", fits=accept_any_size)
        with pytest.raises(ExternalFailure) as caught:
            hub.download(choice)
        assert "not enough disk space for me/model:Q4_K_M" in caught.value.message
        assert caught.value.hint is not None
        assert "HF_HOME" in caught.value.hint
        assert server.downloads() == []


class TestDownload:
    def test_downloads_to_the_hugging_face_cache(self, server: Hub, tmp_path: Path) -> None:
        from huggingface_hub import try_to_load_from_cache

        server.files = {"m-Q4_K_M.gguf": make_content("m")}
        seen: list[tuple[int, int]] = []
        choice = hub.choose_files("me/model", fits=accept_any_size)
        path = hub.download(choice, progress=lambda done, total: seen.append((done, total)))
        assert path.read_bytes() == make_content("m")
        cache = tmp_path / "hf" / "hub"
        assert (choice.name, choice.size_bytes) == ("me/model:Q4_K_M", 300_000)
        assert choice.folder == cache / "models--me--model"
        assert path == cache / "models--me--model" / "snapshots" / COMMIT / "m-Q4_K_M.gguf"
        assert try_to_load_from_cache("me/model", "m-Q4_K_M.gguf", cache_dir=cache) == str(path)
        located = locate("me/model")
        assert located is not None
        assert located.path == path
        assert seen[-1] == (300_000, 300_000)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert not list(cache.rglob("*.incomplete"))

    def test_does_not_download_cached_file_again(self, server: Hub) -> None:
        server.files = {"m-Q4_K_M.gguf": make_content("m")}
        first = fetch_gguf("me/model", fits=accept_any_size)
        choice = hub.choose_files("me/model", fits=accept_any_size)
        assert choice.missing_bytes == 0
        assert hub.download(choice) == first
        assert len(server.downloads()) == 1

    def test_downloads_all_parts(self, server: Hub) -> None:
        names = [f"Q4_K_M/m-Q4_K_M-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
        server.files = {name: make_content(name) for name in names}
        seen: list[tuple[int, int]] = []
        path = fetch_gguf("me/model", fits=accept_any_size, progress=lambda done, total: seen.append((done, total)))
        assert path.name == "m-Q4_K_M-00001-of-00003.gguf"
        assert [(path.parent / Path(name).name).read_bytes() for name in names] == [
            make_content(name) for name in names
        ]
        assert seen[-1] == (900_000, 900_000)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)

    def test_resumes_after_a_broken_connection(self, server: Hub) -> None:
        data = make_content("m", 3_000_000)
        server.files, server.break_after = {"m-Q4_K_M.gguf": data}, [1_000_000, 500_000]
        path = fetch_gguf("me/model", fits=accept_any_size)
        assert path.read_bytes() == data
        assert server.downloads() == ["", "bytes=1000000-", "bytes=1500000-"]

    def test_resumes_partial_file_of_an_earlier_attempt(self, server: Hub) -> None:
        data = make_content("m", 3_000_000)
        server.files, server.break_after = {"m-Q4_K_M.gguf": data}, [1_000_000, 0, 0, 0, 0]
        choice = hub.choose_files("me/model", fits=accept_any_size)
        with pytest.raises(ExternalFailure) as caught:
            hub.download(choice)
        assert caught.value.hint is not None
        assert "the next attempt resumes the download" in caught.value.hint
        server.asked.clear()
        server.break_after.clear()
        assert hub.download(choice).read_bytes() == data
        assert server.downloads() == ["bytes=1000000-"]

    def test_restarts_download_if_the_server_supports_no_ranges(self, server: Hub) -> None:
        data = make_content("m", 3_000_000)
        server.files, server.break_after, server.ignore_ranges = {"m-Q4_K_M.gguf": data}, [1_000_000], True
        assert fetch_gguf("me/model", fits=accept_any_size).read_bytes() == data

    def test_retries_overloaded_server(self, server: Hub) -> None:
        server.files, server.statuses = {"m-Q4_K_M.gguf": make_content("m")}, [503, 503]
        assert fetch_gguf("me/model", fits=accept_any_size).read_bytes() == make_content("m")

    def test_discards_file_with_wrong_checksum(self, server: Hub, tmp_path: Path) -> None:
        server.files, server.etag = {"m-Q4_K_M.gguf": make_content("m")}, "0" * 64
        server.listed = {"m-Q4_K_M.gguf": "0" * 64}
        with pytest.raises(ExternalFailure, match="does not have the checksum"):
            fetch_gguf("me/model", fits=accept_any_size)
        assert not [path for path in (tmp_path / "hf").rglob("*") if path.is_file() and path.stat().st_size]

    def test_refuses_file_whose_checksum_is_not_the_listed_one(self, server: Hub, tmp_path: Path) -> None:
        server.files, server.listed = {"m-Q4_K_M.gguf": make_content("m")}, {"m-Q4_K_M.gguf": "0" * 64}
        with pytest.raises(ExternalFailure, match="lists another checksum or size") as caught:
            fetch_gguf("me/model", fits=accept_any_size)
        assert "0" * 64 in str(caught.value.cause)
        assert server.downloads() == []

    def test_refuses_file_whose_size_is_not_the_listed_one(self, server: Hub) -> None:
        server.files, server.sizes = {"m-Q4_K_M.gguf": make_content("m")}, {"m-Q4_K_M.gguf": 299_999}
        with pytest.raises(ExternalFailure, match="lists another checksum or size"):
            fetch_gguf("me/model", fits=accept_any_size)

    def test_checks_the_whole_file_after_a_resumed_download(self, server: Hub, tmp_path: Path) -> None:
        data = make_content("m", 3_000_000)
        server.files, server.break_after = {"m-Q4_K_M.gguf": data}, [1_000_000, 0, 0, 0, 0]
        choice = hub.choose_files("me/model", fits=accept_any_size)
        with pytest.raises(ExternalFailure):
            hub.download(choice)
        (partial,) = (tmp_path / "hf").rglob("*.incomplete")
        partial.write_bytes(b"x" * partial.stat().st_size)
        server.break_after.clear()
        with pytest.raises(ExternalFailure, match="does not have the checksum"):
            hub.download(choice)
        assert not list((tmp_path / "hf").rglob("*.gguf"))
        assert hub.download(choice).read_bytes() == data

    def test_checks_small_file_by_the_digest_of_git(self, server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(globals(), "is_large", lambda name: False)
        server.files = {"m-Q4_K_M.gguf": make_content("m", 2000)}
        assert fetch_gguf("me/model").read_bytes() == make_content("m", 2000)
        server.files = {"n-Q4_K_M.gguf": make_content("n", 2000)}
        server.etag, server.listed = "0" * 40, {"n-Q4_K_M.gguf": "0" * 40}
        with pytest.raises(ExternalFailure, match="does not have the checksum"):
            fetch_gguf("me/model")

    def test_downloads_changed_file_of_the_cache_again(self, server: Hub) -> None:
        data = make_content("m")
        server.files = {"m-Q4_K_M.gguf": data}
        path = fetch_gguf("me/model")
        path.resolve().write_bytes(b"x" * len(data))
        said: list[str] = []
        again = hub.download(hub.choose_files("me/model", fits=accept_any_size), say=said.append)
        assert again == path and again.read_bytes() == data
        assert ["checksum" in text for text in said] == [True]
        assert len(server.downloads()) == 2

    def test_hashes_an_unchanged_file_of_the_cache_once(self, server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        server.files = {"m-Q4_K_M.gguf": make_content("m")}
        path = fetch_gguf("me/model")
        digest = path.resolve().name

        def fail(*_: object) -> str:
            raise AssertionError("the file was hashed again")

        with monkeypatch.context() as patch:
            patch.setattr(checksums, "compute_digest", fail)
            assert checksums.is_verified(path, digest)
        path.touch()
        assert checksums.is_verified(path, digest)

    def test_serving_refuses_a_cached_model_that_was_changed(
        self, server: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.files = {"m-Q4_K_M.gguf": make_content("m")}
        path = fetch_gguf("me/model")
        model = replace_fields(read_builtin_facts(), name="me/model", files=(str(path),))
        monkeypatch.setattr(ready, "find_local_model", lambda name: model)
        assert ready.fetch_facts("me/model", probe(), SilentProgress()) == model
        path.resolve().write_bytes(b"x" * 300_000)
        with pytest.raises(ExternalFailure, match=r"m-Q4_K_M\.gguf in the Hugging Face cache") as caught:
            ready.fetch_facts("me/model", probe(), SilentProgress())
        assert str(path.resolve()) in str(caught.value.cause)

    @pytest.mark.parametrize("commit", [None, "main", "0123"])
    def test_refuses_listing_without_a_commit(self, server: Hub, commit: str | None) -> None:
        server.files, server.commit = {"m-Q4_K_M.gguf": make_content("m")}, commit
        with pytest.raises(ExternalFailure, match="which commit"):
            hub.choose_files("me/model", fits=accept_any_size)

    @pytest.mark.parametrize("etag", ["../../../evil", "a/b", "x"])
    def test_rejects_etag_with_a_path(self, server: Hub, tmp_path: Path, etag: str) -> None:
        server.files, server.etag = {"m-Q4_K_M.gguf": make_content("m")}, etag
        with pytest.raises(ExternalFailure, match=r"no checksum \(ETag\)"):
            fetch_gguf("me/model", fits=accept_any_size)
        assert not list(tmp_path.rglob("*evil*"))

    def test_sends_token_only_to_the_hub(self, server: Hub, cdn: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        server.files = {"m-Q4_K_M.gguf": make_content("m")}
        # The second server has the file under the same path, and answers like the first.
        cdn.files, server.cdn = server.files, f"{cdn.url}/me/model/resolve/main"
        assert fetch_gguf("me/model", fits=accept_any_size).read_bytes() == make_content("m")
        assert cdn.downloads() == [""]
        assert all("authorization" not in headers for _, _, headers in cdn.asked)
        assert any(headers.get("authorization") == "Bearer hf_secret" for _, _, headers in server.asked)

    def test_concurrent_downloads_transfer_the_file_once(self, server: Hub) -> None:
        server.files = {"m-Q4_K_M.gguf": make_content("m", 2_000_000)}
        choice = hub.choose_files("me/model", fits=accept_any_size)
        paths: list[Path] = []
        threads = [threading.Thread(target=lambda: paths.append(hub.download(choice))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(paths) == 3
        assert paths[0].read_bytes() == make_content("m", 2_000_000)
        assert len(server.downloads()) == 1

    def test_nothing_is_printed(self, server: Hub, capfd: pytest.CaptureFixture[str]) -> None:
        server.files, server.break_after = {"m-Q4_K_M.gguf": make_content("m", 3_000_000)}, [1_000_000]
        fetch_gguf("me/model", fits=accept_any_size)
        assert capfd.readouterr() == ("", "")


CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}  # fmt: skip


def make_shard(names: dict[str, int], pad: int = 0) -> bytes:
    """A safetensors file of 16-bit vectors, with a header made longer by `pad` bytes."""
    entries: dict[str, object] = {"__metadata__": {"note": "x" * pad}}
    end = 0
    for name, length in names.items():
        entries[name] = {"dtype": "BF16", "shape": [length], "data_offsets": [end, end + 2 * length]}
        end += 2 * length
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


class TestHeadersAlone:
    def test_reads_model_facts_without_weights(self, server: Hub) -> None:
        server.files = {
            "config.json": json.dumps(CONFIG).encode(),
            "model.safetensors": make_shard(
                {"model.embed_tokens.weight": 5_000_000, "model.layers.0.mlp.up_proj.weight": 128}
            ),
        }
        model = hub.read_remote_model("me/model")
        assert (model.name, model.origin) == ("me/model", "the hub: me/model, headers alone")
        assert model.weight_bytes == 2 * 5_000_128
        assert model.files == ()
        assert server.sent < 400_000

    def test_reads_header_longer_than_the_first_request(self, server: Hub) -> None:
        server.files = {
            "config.json": json.dumps(CONFIG).encode(),
            "model.safetensors": make_shard({"lm_head.weight": 9}, pad=600_000),
        }
        assert hub.read_remote_model("me/model").weight_bytes == 18

    def test_reads_header_from_server_without_ranges(self, server: Hub) -> None:
        server.ignore_ranges = True
        server.files = {
            "config.json": json.dumps(CONFIG).encode(),
            "model.safetensors": make_shard({"lm_head.weight": 9}, pad=600_000),
        }
        assert hub.read_remote_model("me/model").weight_bytes == 18

    def test_reads_shards_of_the_index(self, server: Hub) -> None:
        names = {f"model-0000{n}-of-00003.safetensors": f"model.layers.0.mlp.w{n}.weight" for n in (1, 2, 3)}
        server.files = {file: make_shard({name: 100}) for file, name in names.items()}
        server.files["config.json"] = json.dumps(CONFIG).encode()
        index = {"weight_map": {name: file for file, name in names.items()}}
        server.files["model.safetensors.index.json"] = json.dumps(index).encode()
        server.files["other.safetensors"] = make_shard({"unrelated": 7})
        assert hub.read_remote_model("me/model").weight_bytes == 600

    def test_reads_the_longest_input_of_sentence_transformers(self, server: Hub) -> None:
        files = {"config.json": json.dumps(CONFIG).encode()}
        server.files = {**files, "sentence_bert_config.json": b'{"max_seq_length": 40}'}
        assert hub.read_remote_model("me/model").max_context == 40

    def test_reads_hf_quant_config(self, server: Hub) -> None:
        quant = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
        server.files = {"config.json": json.dumps(CONFIG).encode(), "hf_quant_config.json": json.dumps(quant).encode()}
        details = hub.read_remote_model("me/model").quantization_details
        assert details is not None
        assert details.kv_cache == "FP8"

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"1234",
            (2**63).to_bytes(8, "little") + b"{}",
            (500).to_bytes(8, "little") + b"{}",
            b"\x02" + bytes(7) + b"[]",
        ],
    )
    def test_rejects_hostile_headers(self, server: Hub, content: bytes) -> None:
        server.files = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": content}
        with pytest.raises(UsageError):
            hub.read_remote_model("me/model")

    def test_rejects_invalid_configuration(self, server: Hub) -> None:
        server.files = {"config.json": b"<html>", "model.safetensors": make_shard({"a": 1})}
        with pytest.raises(UsageError, match="not JSON"):
            hub.read_remote_model("me/model")

    def test_refuses_configuration_with_wrong_checksum(self, server: Hub) -> None:
        server.files = {"config.json": json.dumps(CONFIG).encode()}
        server.listed = {"config.json": "0" * 40}
        with pytest.raises(ExternalFailure, match=r"config\.json does not have the checksum"):
            hub.read_remote_model("me/model")

    def test_gguf_repository_gets_a_hint(self, server: Hub) -> None:
        server.files = {"m-Q4_K_M.gguf": make_content("m")}
        with pytest.raises(UsageError, match="contains GGUF files"):
            hub.read_remote_model("me/model")

    def test_reports_gated_repository(self, server: Hub) -> None:
        server.files = {"config.json": json.dumps(CONFIG).encode()}
        server.gated, server.need_token = True, "hf_good"
        with pytest.raises(UsageError, match="gated"):
            hub.read_remote_model("me/model")

    def test_inspect_contacts_the_hub_only_for_unknown_models(
        self, server: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from bedplate.run.models import find_inspected_model

        server.files = {"config.json": json.dumps(CONFIG).encode()}
        assert find_inspected_model("meta-llama/Meta-Llama-3.1-8B").origin == "known facts"
        assert server.asked == []
        assert find_inspected_model("me/model").name == "me/model"


class TestPublishedWeights:
    """The name of a known original model fetches weights that somebody has published."""

    def test_the_file_that_the_plan_chooses(self, server: Hub, tmp_path: Path) -> None:
        server.name = "bartowski/SmolLM2-360M-Instruct-GGUF"
        for label in ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"):
            name = f"SmolLM2-360M-Instruct-{label}.gguf"
            server.files[name] = write(tmp_path / name).read_bytes()
        model = ready.fetch_facts("HuggingFaceTB/SmolLM2-360M-Instruct", probe(), SilentProgress())
        assert model.format == "gguf" and server.name.replace("/", "--") in model.files[0]
        assert len(server.downloads()) == 1, "one file is downloaded"

    def test_a_quantization_of_the_original_name(self, server: Hub, tmp_path: Path) -> None:
        server.name = "bartowski/SmolLM2-360M-Instruct-GGUF"
        for label in ("Q4_K_M", "Q8_0"):
            name = f"SmolLM2-360M-Instruct-{label}.gguf"
            server.files[name] = write(tmp_path / name).read_bytes()
        model = fetch_model("HuggingFaceTB/SmolLM2-360M-Instruct:Q8_0", GB, SilentProgress())
        assert model.files[0].endswith("SmolLM2-360M-Instruct-Q8_0.gguf")

    def test_a_folder_of_one_branch(self, server: Hub) -> None:
        server.files = {"README.md": b"text", "model.safetensors": make_content("weights"), "config.json": b"{}"}
        choice = hub.choose_folder("me/model", "4.0bpw")
        path = hub.download(choice)
        assert path.name == "config.json"
        assert sorted(one.name for one in path.parent.iterdir()) == ["config.json", "model.safetensors"]
        assert any(asked[1].startswith("/api/models/me/model/revision/4.0bpw") for asked in server.asked)

    def test_a_folder_without_a_configuration(self, server: Hub) -> None:
        server.files = {"model.safetensors": make_content("weights")}
        with pytest.raises(UsageError, match=r"has no config\.json"):
            hub.choose_folder("me/model")
