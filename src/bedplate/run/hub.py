"""The Hugging Face hub: chooses a GGUF file of a repository and downloads it."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit

from bedplate._version import __version__
from bedplate.errors import BedplateError, ExternalFailure, NotPossible, UsageError
from bedplate.facts.gguf import list_parts
from bedplate.facts.library import (
    find_hub_cache,
    find_quantization,
    is_language_model,
    is_same_quantization,
    split_reference,
)
from bedplate.facts.published_weights import WEIGHT_FILES, HubListing, RepositoryListing
from bedplate.home import hold_lock
from bedplate.run.checksums import compute_digest, compute_digest_of_bytes, is_digest, is_verified, record_verified
from bedplate.run.transport import refuse_plain_http
from bedplate.values import Model, replace_fields
from bedplate.values.units import format_size as human_size

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

    from bedplate.facts.safetensors import SafetensorsHeader

Progress = Callable[[int, int], None]
"""Called often, with the bytes done and the total bytes."""
Say = Callable[[str], None]

# Q4_K_M is the default of llama.cpp (-hf) and Ollama: about a third of the 16-bit size, and so three times the speed
# where memory bandwidth is the bottleneck, at a loss of quality that few tasks show. A repository without it usually
# has one of the others, which have about the same size.
_USUAL_QUANTIZATIONS = (
    "Q4_K_M", "UD-Q4_K_XL", "Q4_K_XL", "Q4_K_L", "MXFP4", "Q4_K_S", "IQ4_NL", "IQ4_XS", "Q4_1", "Q4_0", "NVFP4", "Q4_K",
)  # fmt: skip
_FOLDER_FILES = (".json", ".safetensors", ".model", ".jinja", ".txt")
"""What engines read of a model folder."""
_DISK_MARGIN_BYTES = 256 << 20
# Most headers are shorter; the others need a second request.
_FIRST_BYTES = (256 << 10) - 1
_TIMEOUT_S = 30.0
# An interrupted download is resumed while attempts transfer bytes; these are the pauses after attempts that did not.
_PAUSES_S = (0.2, 1.0, 3.0, 10.0)


@dataclass(frozen=True, slots=True)
class HubFile:
    path: str
    size_bytes: int
    digest: str | None = None
    """The SHA-256 of a large file, or git's SHA-1 of a small one, as the hub lists it; `None`: not listed."""


@dataclass(frozen=True, slots=True)
class HubChoice:
    """The files to download, and their sizes."""

    repo: str
    revision: str
    """The commit, so that the chosen files are downloaded even if the repository changes meanwhile."""
    quantization: str | None
    files: tuple[HubFile, ...]
    folder: Path
    """The repository's folder in the Hugging Face cache."""
    missing_bytes: int
    """Bytes still to download; less than the size if a part is cached already."""
    endpoint: str

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def name(self) -> str:
        return f"{self.repo}:{self.quantization}" if self.quantization else f"{self.repo}/{self.files[0].path}"


def choose_files(reference: str, *, fits: Callable[[int], bool]) -> HubChoice:
    """Chooses a GGUF file from `owner/name`, `owner/name:Q4_K_M` or `owner/name/file.gguf`.

    `fits` returns whether a model of so many bytes can run here; it is not called when `reference` names a file.
    """
    repo, quantization, file = split_reference(reference)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise UsageError(f"{reference} is not the name of a model on the hub", hint="write it as owner/name")
    info = _fetch_model_info(repo)
    groups = _group_files(info)
    if not groups:
        base = repo.split("/")[1]
        raise UsageError(
            f"{repo} has no GGUF files",
            cause=_describe_other_formats(info),
            hint=f"search the hub for a conversion: “{base}-GGUF” "
            f"(common names: bartowski/{base}-GGUF, unsloth/{base}-GGUF, ggml-org/{base}-GGUF)",
        )
    if file is not None:
        group = _find_file(groups, file, repo)
    elif quantization is not None:
        group = _find_quantization(groups, quantization, repo)
    else:
        group = _choose_best(groups, fits, repo)
    cache = find_hub_cache()
    folder = cache / ("models--" + repo.replace("/", "--"))
    revision = _get_commit(info, repo)
    missing = sum(f.size_bytes for f in group if not (folder / "snapshots" / revision / f.path).exists())
    return HubChoice(
        repo=repo,
        revision=revision,
        quantization=find_quantization(group[0].path),
        files=group,
        folder=folder,
        missing_bytes=missing,
        endpoint=_get_endpoint(),
    )


def choose_folder(repo: str, revision: str | None = None) -> HubChoice:
    """All files of a repository, or of one of its branches, that an engine reads: weights, configuration, tokenizer."""
    info = _fetch_model_info(repo, revision)
    files = tuple(
        HubFile(sibling.rfilename, sibling.size or 0, _get_digest(sibling))
        for sibling in sorted(info.siblings or (), key=lambda one: one.rfilename != "config.json")
        if "/" not in sibling.rfilename and sibling.rfilename.endswith(_FOLDER_FILES)
    )
    if not any(file.path == "config.json" for file in files):
        raise _explain_unreadable(repo, info)
    folder, commit = find_hub_cache() / ("models--" + repo.replace("/", "--")), _get_commit(info, repo)
    missing = sum(file.size_bytes for file in files if not (folder / "snapshots" / commit / file.path).exists())
    return HubChoice(
        repo=repo,
        revision=commit,
        quantization=revision,
        files=files,
        folder=folder,
        missing_bytes=missing,
        endpoint=_get_endpoint(),
    )


def find_commit(repo: str, revision: str | None = None) -> str:
    """The newest commit of a repository, or of one of its branches."""
    return _get_commit(_fetch_model_info(repo, revision, check_access=False), repo)


def list_files(repo: str, revision: str | None = None) -> RepositoryListing:
    """The files of a repository and their sizes; nothing is downloaded."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = _fetch_model_info(repo, revision, check_access=False)
    except UsageError as error:
        if isinstance(error.__cause__, RepositoryNotFoundError) and not isinstance(error.__cause__, GatedRepoError):
            return RepositoryListing(missing=True)
        raise
    except ExternalFailure as error:
        if isinstance(error.__cause__, RevisionNotFoundError):
            return RepositoryListing(missing=True)
        raise
    return RepositoryListing(
        files={one.rfilename: one.size or 0 for one in info.siblings or () if one.rfilename.endswith(WEIGHT_FILES)}
    )


def list_published_files(keys: Sequence[str], progress: Callable[[int], None] = lambda done: None) -> HubListing:
    """The hub's listing of these repositories (owner/name, with @branch); `progress` gets the number that are done."""
    import datetime as dt

    found: dict[str, RepositoryListing] = {}
    for number, key in enumerate(keys, 1):
        repo, _, revision = key.partition("@")
        found[key] = list_files(repo, revision or None)
        progress(number)
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    return HubListing(listed_at=now, endpoint=_get_endpoint(), repositories=found)


def read_remote_model(repo: str) -> Model:
    """The facts from a repository's configuration and the headers of its weights, without downloading the weights."""
    from concurrent.futures import ThreadPoolExecutor

    from bedplate.facts.hf_config import read_config
    from bedplate.facts.model_files import MAX_CONFIG_BYTES, parse_json
    from bedplate.facts.model_folder import SENTENCE_CONFIG, apply_quantization_in_name, apply_tensors, limit_context
    from bedplate.facts.safetensors import MAX_INDEX_BYTES, parse_index

    info = _fetch_model_info(repo)
    endpoint, revision = _get_endpoint(), _get_commit(info, repo)
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
    digests = {sibling.rfilename: _get_digest(sibling) for sibling in info.siblings or ()}
    if "config.json" not in sizes:
        raise _explain_unreadable(repo, info)
    with _translate_errors(repo), _silence_hub():
        fetched = _RemoteRepository(repo, revision, endpoint, digests)
        fields = parse_json(fetched.read_file("config.json", MAX_CONFIG_BYTES), "config.json")
        quant = None
        if "hf_quant_config.json" in sizes:
            quant = parse_json(fetched.read_file("hf_quant_config.json", MAX_CONFIG_BYTES), "hf_quant_config.json")
        model = read_config(fields, name=repo, quant_file=quant, origin=f"the hub: {repo}, headers alone")
        if SENTENCE_CONFIG in sizes:
            model = limit_context(
                model, parse_json(fetched.read_file(SENTENCE_CONFIG, MAX_CONFIG_BYTES), SENTENCE_CONFIG)
            )
        shards = [name for name in sorted(sizes) if name.endswith(".safetensors") and "/" not in name]
        if "model.safetensors.index.json" in sizes:
            index = parse_index(
                fetched.read_file("model.safetensors.index.json", MAX_INDEX_BYTES), "model.safetensors.index.json"
            )
            shards = [name for name in index.files if name in sizes]
        if not shards:
            return apply_quantization_in_name(model)
        with ThreadPoolExecutor(max_workers=8) as pool:
            headers = list(pool.map(fetched.read_header, shards))
    model = apply_tensors(
        model, [tensor for header in headers for tensor in header.tensors], headers[0].metadata, fields, ()
    )
    return replace_fields(model, has_chat_template="chat_template.jinja" in sizes or "tokenizer_config.json" in sizes)


def _explain_unreadable(repo: str, info: ModelInfo) -> UsageError:
    if any(is_language_model(sibling.rfilename) for sibling in info.siblings or ()):
        return UsageError(
            f"{repo} contains GGUF files, whose facts can be read only after the download",
            hint=f"bedplate serve {repo} downloads and serves one",
        )
    return UsageError(
        f"{repo} has no config.json",
        cause=_describe_other_formats(info),
        hint="give a repository that contains a model",
    )


class _RemoteRepository:
    """Reads parts of files of one commit of a repository."""

    def __init__(self, repo: str, revision: str, endpoint: str, digests: Mapping[str, str | None]) -> None:
        self.repo, self.revision, self.endpoint, self.digests = repo, revision, endpoint, digests

    def read_file(self, path: str, most: int) -> bytes:
        data = self._read_range(path, 0, most)
        if len(data) > most:
            raise UsageError(f"{path} of {self.repo} is larger than the limit of {human_size(most)}")
        expected = self.digests.get(path)
        if expected is not None and compute_digest_of_bytes(data, expected) != expected:
            raise _make_checksum_error(path, self.repo)
        return data

    def read_header(self, path: str) -> SafetensorsHeader:
        """The header of a safetensors file: the first request reads its length, and usually all of it."""
        from bedplate.facts.safetensors import parse_header, parse_header_length

        data = self._read_range(path, 0, _FIRST_BYTES)
        length = parse_header_length(data, path)
        if 8 + length > len(data):
            data += self._read_range(path, len(data), 8 + length - 1)
        if len(data) < 8 + length:
            raise UsageError(
                f"{path} of {self.repo} is truncated: its header alone needs {8 + length:,} bytes",
                hint="report this to the owner of the repository",
            )
        return parse_header(data[8 : 8 + length], path)

    def _read_range(self, path: str, start: int, end: int) -> bytes:
        """Bytes `start` to `end`, both included; fewer at the end of the file, and never more than requested."""
        from huggingface_hub import hf_hub_url

        utils = _import_utils()
        headers = utils.build_hf_headers(library_name="bedplate", library_version=__version__)
        headers |= {"Accept-Encoding": "identity", "Range": f"bytes={start}-{end}"}
        url = hf_hub_url(self.repo, path, revision=self.revision, endpoint=self.endpoint)
        found, skip = bytearray(), 0
        with _open_stream(url, headers) as response:
            if response.status_code != 206:
                skip = start
            for chunk in response.iter_bytes():
                found += chunk
                if len(found) - skip > end - start:
                    break
        return bytes(found[skip : skip + end - start + 1])


def download(choice: HubChoice, *, progress: Progress | None = None, say: Say | None = None) -> Path:
    """Downloads every file of the choice to the cache; returns the path of the first.

    After a broken connection or Ctrl-C, the next call resumes the download.
    """
    _check_free_space(choice)
    with _translate_errors(choice.repo), _silence_hub():
        done = 0
        for file in choice.files:
            base = done

            def report(file_bytes: int, base: int = base) -> None:
                if progress:
                    progress(base + file_bytes, choice.size_bytes)

            _download_file(choice, file, report, say)
            done += file.size_bytes
            report(file.size_bytes)
    _record_main_revision(choice)
    return choice.folder / "snapshots" / choice.revision / choice.files[0].path


def _download_file(choice: HubChoice, file: HubFile, report: Callable[[int], None], say: Say | None) -> None:
    """Downloads one file to the cache, in the cache's layout: blobs/ETAG, and a link to it in snapshots/COMMIT.

    huggingface_hub restarts an interrupted download from zero, which is slow for 40 GB. So bedplate downloads the
    bytes to the blob that huggingface_hub expects, and then lets huggingface_hub find the blob and create the link.
    """
    from huggingface_hub import hf_hub_download

    linked = choice.folder / "snapshots" / choice.revision / file.path
    if linked.exists() and file.digest is not None and is_verified(linked, file.digest, report):
        return
    url, digest, size = _locate_file(choice, file)
    blob = choice.folder / "blobs" / digest
    # huggingface_hub's own lock, so that its command line and bedplate do not download the same file twice.
    with hold_lock(choice.folder.parent / ".locks" / choice.folder.name / digest, f"downloading {file.path}", say):
        if (linked.exists() and not is_verified(linked, digest)) or (blob.exists() and not is_verified(blob, digest)):
            if say is not None:
                say(f"the cached {file.path} does not have the checksum that {choice.repo} lists: downloading it again")
            linked.unlink(missing_ok=True)
            blob.unlink(missing_ok=True)
        if not blob.exists():
            partial = blob.with_name(f"{digest}.incomplete")
            _transfer(choice, file, partial, url, size, report)
            if compute_digest(partial, digest) != digest:
                partial.unlink()
                raise _make_checksum_error(file.path, choice.repo)
            partial.replace(blob)
            record_verified(blob, digest)
    hf_hub_download(
        choice.repo,
        file.path,
        revision=choice.revision,
        cache_dir=choice.folder.parent,
        endpoint=choice.endpoint,
        library_name="bedplate",
        library_version=__version__,
    )


def _transfer(
    choice: HubChoice, file: HubFile, partial: Path, url: str, size: int, report: Callable[[int], None]
) -> None:
    """Appends to `partial` until it has `size` bytes; retries while attempts transfer bytes."""
    failed_attempts = 0
    with partial.open("ab") as target:
        if target.tell() > size:
            target.truncate(0)
            target.seek(0)
        while (before := target.tell()) < size:
            report(before)
            try:
                _stream(url, choice, target, size, report)
                if target.tell() >= size:
                    break
                failure: Exception = ConnectionError("the connection was closed early")
            except Exception as error:
                if not _is_transient(error):
                    raise
                failure = error
            target.flush()
            failed_attempts = 0 if target.tell() > before else failed_attempts + 1
            if failed_attempts > len(_PAUSES_S):
                raise failure
            time.sleep(_PAUSES_S[max(0, failed_attempts - 1)])
            # The signed URL may have expired during a long download.
            url, _, _ = _locate_file(choice, file)


def _stream(url: str, choice: HubChoice, target: BinaryIO, size: int, report: Callable[[int], None]) -> None:
    utils = _import_utils()
    headers = utils.build_hf_headers(library_name="bedplate", library_version=__version__)
    if urlsplit(url).netloc != urlsplit(choice.endpoint).netloc:
        # A signed URL of a content delivery network; the token is only for the hub.
        headers.pop("authorization", None)
    headers["Accept-Encoding"] = "identity"
    start = target.tell()
    if start:
        headers["Range"] = f"bytes={start}-"
    with _open_stream(url, headers) as response:
        if start and response.status_code != 206:
            target.truncate(0)
            target.seek(0)
        for chunk in response.iter_bytes():
            if target.tell() + len(chunk) > size:
                raise ExternalFailure(
                    f"{urlsplit(url).netloc} sends more bytes than the size that the hub lists",
                    hint="run it again later",
                )
            target.write(chunk)
            report(target.tell())


@contextlib.contextmanager
def _open_stream(url: str, headers: dict[str, str]) -> Iterator[Any]:
    """Opens a URL of the hub or of its content delivery network; redirects to plain http are refused."""
    utils = _import_utils()
    refuse_plain_http(url, "a file of the hub")
    with utils.get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True) as response:
        for one in (*response.history, response):
            refuse_plain_http(str(one.url), "a file of the hub")
        utils.hf_raise_for_status(response)
        yield response


def _locate_file(choice: HubChoice, file: HubFile) -> tuple[str, str, int]:
    """The URL of a file, its digest, which names it in the cache, and its size."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(choice.repo, file.path, revision=choice.revision, endpoint=choice.endpoint)
    metadata = get_hf_file_metadata(url, timeout=_TIMEOUT_S, endpoint=choice.endpoint)
    etag = metadata.etag or ""
    if not is_digest(etag):
        raise ExternalFailure(
            f"the answer of {choice.endpoint} has no checksum (ETag) for {file.path}, which the hub always sends",
            hint="check HF_ENDPOINT and any proxy between here and the hub",
        )
    size = file.size_bytes if metadata.size is None else metadata.size
    if etag != (file.digest or etag) or size != (file.size_bytes or size):
        raise ExternalFailure(
            f"{choice.endpoint} lists another checksum or size for {file.path} than it sends",
            cause=f"listed: {file.digest}, {file.size_bytes} bytes; sent: {etag}, {size} bytes",
            hint="check HF_ENDPOINT and any proxy between here and the hub",
        )
    return metadata.location, etag, size


def _get_commit(info: ModelInfo, repo: str) -> str:
    """The commit of the listed files: a branch may change between two requests."""
    if not re.fullmatch(r"[0-9a-f]{40}", info.sha or ""):
        raise ExternalFailure(
            f"{_get_endpoint()} does not say which commit of {repo} it lists",
            hint="check HF_ENDPOINT and any proxy between here and the hub",
        )
    return str(info.sha)


def _get_digest(sibling: RepoSibling) -> str | None:
    """The digest of a file in a repository's listing."""
    found = (sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id) or ""
    return found if is_digest(found) else None


def _make_checksum_error(path: str, repo: str) -> ExternalFailure:
    return ExternalFailure(
        f"the downloaded {path} does not have the checksum that {repo} lists",
        hint="run it again; if the error repeats, a proxy between here and the hub may change files",
    )


def _group_files(info: ModelInfo) -> list[tuple[HubFile, ...]]:
    """The models of a repository: single files, and split ones of which every part exists."""
    files = {
        sibling.rfilename: HubFile(sibling.rfilename, sibling.size or 0, _get_digest(sibling))
        for sibling in info.siblings or ()
        if is_language_model(sibling.rfilename)
    }
    groups = []
    for path in sorted(files):
        pure = PurePosixPath(path)
        if parts := list_parts(Path(pure.name)):
            names = [str(pure.with_name(part.name)) for part in parts]
            if path == names[0] and all(name in files for name in names):
                groups.append(tuple(files[name] for name in names))
        else:
            groups.append((files[path],))
    # Of two files with the same label, the one nearer to the root with the shorter name is the standard one.
    return sorted(groups, key=lambda group: (group[0].path.count("/") - (len(group) > 1), len(group[0].path)))


def _sum_bytes(group: tuple[HubFile, ...]) -> int:
    return sum(file.size_bytes for file in group)


def _find_file(groups: list[tuple[HubFile, ...]], file: str, repo: str) -> tuple[HubFile, ...]:
    for group in groups:
        if any(file in (member.path, PurePosixPath(member.path).name) for member in group):
            return group
    raise UsageError(
        f"{repo} has no file {file}", cause=f"it has {_list_labels(groups)}", hint=f"use {repo}:QUANTIZATION"
    )


def _find_quantization(groups: list[tuple[HubFile, ...]], wanted: str, repo: str) -> tuple[HubFile, ...]:
    labelled = [(find_quantization(group[0].path) or "", group) for group in groups]
    for label, group in labelled:
        if label == wanted.upper():
            return group
    for label, group in labelled:
        if is_same_quantization(label, wanted):
            return group
    raise UsageError(f"{repo} has no {wanted}", hint=f"it has {_list_labels(groups)}")


def _list_labels(groups: list[tuple[HubFile, ...]]) -> str:
    shown = [
        f"{find_quantization(group[0].path) or group[0].path} ({human_size(_sum_bytes(group))})"
        for group in sorted(groups, key=_sum_bytes)
    ]
    return ", ".join(shown[:20]) + (f" and {len(shown) - 20} more" if len(shown) > 20 else "")


def _choose_best(groups: list[tuple[HubFile, ...]], fits: Callable[[int], bool], repo: str) -> tuple[HubFile, ...]:
    """The usual 4-bit quantization if it fits; otherwise the largest below; without a 4-bit one, the smallest above."""
    fitting = [group for group in groups if fits(_sum_bytes(group))]
    if not fitting:
        smallest = min(groups, key=_sum_bytes)
        raise NotPossible(
            f"no GGUF of {repo} fits: the smallest is "
            f"{find_quantization(smallest[0].path) or smallest[0].path}, {human_size(_sum_bytes(smallest))}",
            hint="use a smaller model, or name a quantization to try it anyway (OWNER/NAME:Q2_K)",
        )
    by_label: dict[str | None, tuple[HubFile, ...]] = {}
    for group in groups:
        by_label.setdefault(find_quantization(group[0].path), group)
    usual = next((by_label[label] for label in _USUAL_QUANTIZATIONS if label in by_label), None)
    if usual is None:
        above = [group for group in fitting if _read_bits(group) > 4]
        return min(above, key=_sum_bytes) if above else max(fitting, key=_sum_bytes)
    if usual in fitting:
        return usual
    below = [group for group in fitting if _sum_bytes(group) < _sum_bytes(usual)]
    return max(below or fitting, key=_sum_bytes)


def _read_bits(group: tuple[HubFile, ...]) -> int:
    digits = re.search(r"\d+", find_quantization(group[0].path) or "")
    return int(digits[0]) if digits else 0


def _describe_other_formats(info: ModelInfo) -> str | None:
    endings = {PurePosixPath(sibling.rfilename).suffix for sibling in info.siblings or ()}
    found = sorted(endings & {".safetensors", ".bin", ".pt", ".onnx", ".msgpack"})
    return f"it has {', '.join(found)} files" if found else None


def _fetch_model_info(repo: str, revision: str | None = None, *, check_access: bool = True) -> ModelInfo:
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url

    endpoint = _get_endpoint()
    _refuse_offline(repo)
    with _translate_errors(repo), _silence_hub():
        api = HfApi(endpoint=endpoint, library_name="bedplate", library_version=__version__)
        info = api.model_info(repo, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
        models = [s.rfilename for s in info.siblings or () if is_language_model(s.rfilename)]
        if check_access and info.gated and models:
            # Everyone can list a gated repository; only a request for a file shows whether we have access.
            get_hf_file_metadata(
                hf_hub_url(repo, models[0], revision=info.sha, endpoint=endpoint),
                timeout=_TIMEOUT_S,
                endpoint=endpoint,
            )
    return info


def _get_endpoint() -> str:
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    refuse_plain_http(endpoint, "the model hub (HF_ENDPOINT)")
    return endpoint


def _refuse_offline(repo: str) -> None:
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE"):
            raise ExternalFailure(
                f"{repo} is not on this machine, and {variable} disables downloads",
                hint=f"unset {variable}, or use a model that is on this machine",
            )


def _record_main_revision(choice: HubChoice) -> None:
    """Records the commit as `main` in the cache, since other programs look for `main`."""
    ref = choice.folder / "refs" / "main"
    with contextlib.suppress(OSError):
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(choice.revision, encoding="utf-8")


def _check_free_space(choice: HubChoice) -> None:
    blobs = choice.folder / "blobs"
    try:
        blobs.mkdir(parents=True, exist_ok=True)
        partial_bytes = sum(partial.stat().st_size for partial in blobs.glob("*.incomplete"))
        free = shutil.disk_usage(blobs).free
    except OSError as error:
        raise _explain_unwritable(choice.repo, error) from error
    missing_bytes = max(0, choice.missing_bytes - partial_bytes)
    if missing_bytes and missing_bytes + _DISK_MARGIN_BYTES > free:
        raise ExternalFailure(
            f"not enough disk space for {choice.name}: the download needs {human_size(missing_bytes)}, "
            f"and {human_size(free)} are free in {choice.folder.parent}",
            hint="free some space (hf cache prune), or set HF_HOME to a folder on a larger disk",
        )


@contextlib.contextmanager
def _silence_hub() -> Iterator[None]:
    """Keeps huggingface_hub from printing progress bars and warnings."""
    utils = _import_utils()
    bars, verbosity = not utils.are_progress_bars_disabled(), utils.logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        utils.disable_progress_bars()
        utils.logging.set_verbosity(utils.logging.CRITICAL)
        try:
            yield
        finally:
            utils.logging.set_verbosity(verbosity)
            if bars:
                utils.enable_progress_bars()


def _import_utils() -> Any:
    """huggingface_hub.utils, whose names are public but not exported for type checkers."""
    return importlib.import_module("huggingface_hub.utils")


def _is_transient(error: BaseException) -> bool:
    """Whether a retry may help: interrupted connections, overloaded servers, and expired signed URLs."""
    if isinstance(error, BedplateError):
        return False
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status in (403, 408, 429) or status >= 500
    # huggingface_hub has changed its HTTP client twice (requests, httpx, httpx2); the base classes keep their names.
    if any(kind.__name__ in ("TransportError", "RequestException") for kind in type(error).__mro__):
        return True
    return isinstance(error, ConnectionError | TimeoutError)


@contextlib.contextmanager
def _translate_errors(repo: str) -> Iterator[None]:
    """Converts errors of huggingface_hub to errors with a hint."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    endpoint = _get_endpoint()
    try:
        yield
    except BedplateError:
        raise
    except GatedRepoError as error:
        raise UsageError(
            f"{repo} is gated: only users who have accepted its licence may download it",
            hint=f"accept the licence at {endpoint}/{repo}, then log in (hf auth login) or set HF_TOKEN",
        ) from error
    except RepositoryNotFoundError as error:
        raise UsageError(
            f"{repo} is not on the hub, or it is private",
            hint="check the spelling; for a private repository, log in (hf auth login) or set HF_TOKEN",
        ) from error
    except HFValidationError as error:
        raise UsageError(f"{repo} is not the name of a model on the hub", cause=str(error)) from error
    except OfflineModeIsEnabled as error:
        raise ExternalFailure(
            f"{repo} is not on this machine, and HF_HUB_OFFLINE disables downloads",
            hint="unset HF_HUB_OFFLINE, or use a model that is on this machine",
        ) from error
    except (EntryNotFoundError, RevisionNotFoundError) as error:
        if isinstance(error, FileNotFoundError):  # raised by huggingface_hub when the hub is unreachable
            raise _explain_unreachable(endpoint, repo, error) from error
        raise ExternalFailure(f"{repo} changed while it was read", hint="run it again") from error
    except HfHubHTTPError as error:
        raise _explain_http_error(endpoint, repo, error) from error
    except OSError as error:
        if _is_transient(error):
            raise _explain_unreachable(endpoint, repo, error) from error
        raise _explain_unwritable(repo, error) from error
    except Exception as error:
        if _is_transient(error):
            raise _explain_unreachable(endpoint, repo, error) from error
        raise


def _explain_unwritable(repo: str, error: OSError) -> ExternalFailure:
    return ExternalFailure(
        f"cannot write {repo} to {find_hub_cache()}",
        cause=error.strerror or str(error),
        hint="check the disk, or set HF_HOME to a writable folder",
    )


def _explain_unreachable(endpoint: str, repo: str, error: BaseException) -> ExternalFailure:
    return ExternalFailure(
        f"cannot download {repo} from {endpoint}",
        cause=str(error).splitlines()[0] if str(error) else type(error).__name__,
        hint="check the network and any proxy, or set HF_ENDPOINT to a mirror; the next attempt resumes the download",
    )


def _explain_http_error(endpoint: str, repo: str, error: Any) -> BedplateError:
    status = error.response.status_code
    if status in (401, 403):
        return UsageError(
            f"{endpoint} denies access to {repo} (HTTP {status})",
            hint="the token may be invalid or lack the permission: log in again (hf auth login) or set HF_TOKEN",
        )
    if status == 429:
        return ExternalFailure(
            f"{endpoint} limits the rate of requests (HTTP 429)", hint="wait a few minutes, or log in"
        )
    return ExternalFailure(f"{endpoint} answers with HTTP {status} for {repo}", hint="run it again later")
