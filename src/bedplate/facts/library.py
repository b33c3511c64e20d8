"""Models that are already on this machine, in the stores of the programs that downloaded them."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from bedplate import home
from bedplate.errors import UsageError
from bedplate.facts.gguf import QUANTIZATION_NAME, list_parts, strip_file_name
from bedplate.facts.model_folder import PICKLES, is_model_folder
from bedplate.values.units import format_size as human_size

_MODEL_LAYER = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_HUB_PREFIX = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/")
_MAX_MANIFEST_BYTES = 1 << 20
# A folder of models is small. The limits also give an answer if the user specifies /.
_MAX_ENTRIES = 20_000
_MAX_DEPTH = 4
_FILES = {".gguf", ".json", ".safetensors", ".onnx"} | PICKLES
"""File name endings of models and of files that identify themselves as models."""


@dataclass(frozen=True, slots=True)
class LocatedModel:
    """A model found on this machine."""

    name: str
    """The name that selects this model and no other."""
    path: Path
    """The path for an engine: the file, or the first part of a split model."""
    origin: str
    """Where it comes from, in words."""
    size_bytes: int
    quantization: str | None = None


def locate(text: str) -> LocatedModel | None:
    """Find the model that `text` names: a file, a folder, or a name in a program's store; None if it is not here."""
    text = text.strip()
    if not text:
        raise UsageError("no model is specified", hint="specify a .gguf file, a folder or owner/name")
    path = _find_path(text)
    explicit = _is_path(text)
    if path is not None and path.is_file() and (explicit or path.suffix.lower() in _FILES):
        return _locate_file(path)
    if path is not None and path.is_dir() and (found := _locate_in_folder(path, text, must=explicit)):
        return found
    if explicit:
        raise _make_missing_path_error(text, path)
    for store in (_find_in_hub_cache, _find_in_lm_studio, _find_in_ollama, _find_by_name):
        if found := store(text):
            return found
    return None


def list_local_models() -> tuple[LocatedModel, ...]:
    """Every model in the known stores, once each, by name."""
    seen: dict[Path, LocatedModel] = {}
    for found in (*_list_own_models(), *_list_hub_models(), *_list_lm_studio_models(), *_list_ollama_models()):
        # Stores link to each other's files. The first name is kept.
        seen.setdefault(_resolve_path(found.path), found)
    return tuple(sorted(seen.values(), key=lambda model: (model.name.lower(), model.origin)))


def find_hub_cache() -> Path:
    """The cache of huggingface_hub. Its environment variables are read on every call."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(variable):
            return Path(os.path.expandvars(value)).expanduser()
    if value := os.environ.get("HF_HOME"):
        return Path(os.path.expandvars(value)).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "huggingface" / "hub"


def find_quantization(file_name: str) -> str | None:
    """The quantization at the end of a file name, as a label: `foo-q4_k_m.gguf` is Q4_K_M."""
    parts = list_parts(Path(PurePosixPath(file_name).name))
    stem = PurePosixPath(file_name).name
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", stem[:-5]) if parts or stem.lower().endswith(".gguf") else stem
    match = QUANTIZATION_NAME.search(stem)
    if match is None:
        return None
    label = match["label"].upper()
    return {"FP16": "F16", "FP32": "F32", "MXFP4_MOE": "MXFP4"}.get(label, label)


def is_language_model(file_name: str) -> bool:
    """False for companion files: image projectors, importance matrices, draft heads."""
    name = PurePosixPath(file_name).name.lower()
    if not name.endswith(".gguf"):
        return False
    return not re.search(r"mmproj|imatrix|(?:^|[-_.])(?:mtp|eagle3|dflash|dspark)-", name)


def is_same_quantization(label: str | None, wanted: str) -> bool:
    """Whether a label is the requested one. UD- marks Unsloth's variant and may be omitted."""
    return label is not None and label.upper().removeprefix("UD-") == wanted.upper().removeprefix("UD-")


def split_reference(text: str) -> tuple[str, str | None, str | None]:
    """Split `owner/name`, `owner/name:Q4_K_M` or `owner/name/file.gguf` into repository, quantization and file."""
    text = _HUB_PREFIX.sub("", text.strip(), count=1).strip("/")
    pieces = text.split("/")
    if len(pieces) > 2:
        # A browser URL: owner/name/blob/main/file.gguf.
        rest = pieces[4:] if pieces[2] in ("blob", "resolve") and len(pieces) > 4 else pieces[2:]
        return "/".join(pieces[:2]), None, "/".join(rest).partition("?")[0]
    repo, _, quantization = text.partition(":")
    return repo, quantization or None, None


def _find_path(text: str) -> Path | None:
    try:
        path = Path(text).expanduser().absolute()
        path.exists()
    except PermissionError:
        raise UsageError(f"no permission to access {text}", hint="check the folders' permissions") from None
    except (OSError, ValueError, RuntimeError):
        return None
    return path


def _is_path(text: str) -> bool:
    """Whether the text can only mean a path."""
    if text.startswith(("/", "./", "../", "~", ".\\", "..\\")) or text in (".", "..") or "\\" in text:
        return True
    pieces = text.split("/")
    if not text.lower().endswith((".gguf", ".safetensors", ".json", ".onnx")) or _HUB_PREFIX.match(text):
        return False
    # owner/name/file.gguf is a file on the hub, unless a folder of that name exists here.
    return len(pieces) < 3 or Path(pieces[0]).is_dir()


def _make_missing_path_error(text: str, path: Path | None) -> UsageError:
    if path is None:
        return UsageError(f"{text!r} is not a valid path", hint="check the spelling")
    if path.exists():
        return UsageError(f"{text} is not a regular file", hint="specify a .gguf file, a folder or owner/name")
    if path.is_symlink():
        return UsageError(f"{text} is a broken link: it points to {path.readlink()}", hint="download the model again")
    near: list[str] = []
    if path.parent.is_dir():
        try:
            names = [entry.name for _, entry in zip(range(_MAX_ENTRIES), path.parent.iterdir(), strict=False)]
        except OSError:
            names = []
        near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
        near = near or sorted(name for name in names if name.lower().endswith(".gguf"))[:3]
        hint = f"that folder contains {_join_names(near)}" if near else f"{path.parent} contains no GGUF file"
    else:
        known = {model.path.name: model.name for model in list_local_models()}
        near = [known[match] for match in difflib.get_close_matches(path.name, list(known), n=3, cutoff=0.5)]
        hint = f"the folder {path.parent} does not exist either"
        hint += f"; this machine has {_join_names(near)}" if near else ""
    return UsageError(f"there is no file {text}", hint=hint)


def _join_names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _locate_file(path: Path, name: str | None = None, origin: str = "a file") -> LocatedModel:
    """The model at `path`, or its first part. The content is not checked here."""
    parts = list_parts(path) or (path,)
    present = [part for part in parts if part.is_file()]
    first = parts[0] if parts[0].is_file() else path
    return LocatedModel(
        name=name or strip_file_name(path.name) or path.name,
        path=first,
        origin=origin,
        size_bytes=sum(part.stat().st_size for part in present),
        quantization=find_quantization(path.name),
    )


def _locate_in_folder(folder: Path, text: str, *, must: bool) -> LocatedModel | None:
    """The one model in a folder. Without `must`, a folder without a model is ignored."""
    files = [path for path in folder.iterdir() if is_language_model(path.name) and path.is_file()]
    models = _select_models(files or _find_ggufs(folder))
    if not models and is_model_folder(folder):
        return _locate_folder(folder, origin="a folder")
    if not models:
        if not must:
            return None
        others = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in PICKLES)[:3]
        cause = f"it contains {_join_names(others)}, Python pickles, which bedplate never opens" if others else None
        raise UsageError(
            f"the folder {text} contains no model",
            cause=cause,
            hint="specify a .gguf file, or a folder with safetensors files",
        )
    if len(models) == 1:
        return _locate_file(models[0], origin="a folder")
    raise _make_choices_error(f"the folder {text}", [(str(path), _locate_file(path).size_bytes) for path in models])


def _locate_folder(folder: Path, origin: str, name: str | None = None) -> LocatedModel:
    """A model folder in Hugging Face's layout: configuration and weights."""
    sizes = [
        path.stat().st_size
        for path in folder.iterdir()
        if path.suffix in (".safetensors", ".onnx", ".data") and path.is_file()
    ]
    return LocatedModel(name=name or folder.name, path=folder, origin=origin, size_bytes=sum(sizes))


def _make_choices_error(where: str, models: Iterable[tuple[str, int]]) -> UsageError:
    listed = sorted(models)
    shown = "; ".join(f"{name} ({human_size(size)})" for name, size in listed[:12])
    more = f"; and {len(listed) - 12} more" if len(listed) > 12 else ""
    return UsageError(f"{where} has {len(listed)} models", cause=shown + more, hint="specify one of them")


def _find_ggufs(folder: Path, depth: int = _MAX_DEPTH) -> Iterator[Path]:
    """Language models under a folder, with limits on depth and number. Unreadable folders are skipped."""
    entries = 0
    for root, folders, files in os.walk(folder):
        level = len(Path(root).relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if not name.startswith(".")) if level < depth else []
        entries += len(files) + len(folders)
        for name in sorted(files):
            path = Path(root) / name
            # A dangling link is a download that the program has deleted.
            if is_language_model(name) and path.is_file():
                yield path
        if entries > _MAX_ENTRIES:
            return


def _select_models(files: Iterable[Path]) -> list[Path]:
    """One path per model: single files, and the first part of each split model."""
    firsts = {(parts[0] if (parts := list_parts(path)) else path): None for path in files}
    return list(firsts)


def _is_complete(path: Path) -> bool:
    return all(part.is_file() for part in list_parts(path) or (path,))


def _resolve_path(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path


def _list_own_models() -> Iterator[LocatedModel]:
    for path in _select_models(_find_ggufs(home.get_models_dir())):
        if _is_complete(path):
            yield _locate_file(path, origin="bedplate's own models")


def _list_hub_snapshots(repo_folder: Path) -> list[Path]:
    """Snapshots of a repository: the one of `main` first, then the newest."""
    try:
        snapshots = [path for path in (repo_folder / "snapshots").iterdir() if path.is_dir()]
    except OSError:
        return []
    try:
        main = (repo_folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        main = ""
    return sorted(snapshots, key=lambda path: (path.name == main, path.stat().st_mtime), reverse=True)


def find_hub_snapshot(repo: str, revision: str | None) -> Path | None:
    """The cached files of a commit or branch of a repository, complete or not; its folder is named by the commit."""
    folder = find_hub_cache() / ("models--" + repo.replace("/", "--"))
    try:
        commit = (folder / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = revision or ""
    snapshot = folder / "snapshots" / commit
    return snapshot if re.fullmatch(r"[0-9a-f]{40}", commit) and snapshot.is_dir() else None


def _list_hub_files(repo_folder: Path) -> list[tuple[str, Path]]:
    """Complete models of a cached repository, as path in the repository and local path; the newest of each."""
    found: dict[str, Path] = {}
    for snapshot in _list_hub_snapshots(repo_folder):
        for path in _select_models(_find_ggufs(snapshot)):
            if _is_complete(path):
                found.setdefault(path.relative_to(snapshot).as_posix(), path)
    return list(found.items())


def _list_hub_models() -> Iterator[LocatedModel]:
    try:
        folders = sorted(find_hub_cache().glob("models--*"))
    except OSError:
        return
    for folder in folders:
        repo = folder.name.removeprefix("models--").replace("--", "/")
        files = _list_hub_files(folder)
        for name, path in files:
            label = find_quantization(name)
            alone = label is not None and sum(find_quantization(other) == label for other, _ in files) == 1
            yield _locate_file(
                path, name=f"{repo}:{label}" if alone else f"{repo}/{name}", origin="the Hugging Face cache"
            )
        whole = None if files else next((one for one in _list_hub_snapshots(folder) if _has_weights(one)), None)
        if whole is not None:
            yield _locate_folder(whole, "the Hugging Face cache", repo)


def _find_in_hub_cache(text: str) -> LocatedModel | None:
    repo, quantization, file = split_reference(text)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        return None
    folder = find_hub_cache() / ("models--" + repo.replace("/", "--"))
    if not _exists(folder):
        # Names on the hub are case-insensitive.
        folder = next(
            (path for path in find_hub_cache().glob("models--*") if path.name.lower() == folder.name.lower()), folder
        )
    found = _pick_file(text, repo, quantization, file, _list_hub_files(folder), "the Hugging Face cache")
    if found is None and quantization is None and file is None:
        whole = next((snapshot for snapshot in _list_hub_snapshots(folder) if _has_weights(snapshot)), None)
        return _locate_folder(whole, "the Hugging Face cache", repo) if whole else None
    return found


def _has_weights(snapshot: Path) -> bool:
    """Whether a snapshot contains weights and not only a configuration."""
    return (snapshot / "config.json").is_file() and any(path.is_file() for path in snapshot.glob("*.safetensors"))


def _pick_file(
    text: str, repo: str, quantization: str | None, file: str | None, files: list[tuple[str, Path]], origin: str
) -> LocatedModel | None:
    """The requested file of a repository; None if it is not downloaded yet."""
    if file is not None:
        wanted = list_parts(Path(PurePosixPath(file).name))
        name = wanted[0].name if wanted else PurePosixPath(file).name
        files = [(inside, path) for inside, path in files if inside == file or PurePosixPath(inside).name == name]
    elif quantization is not None:
        exact = [(inside, path) for inside, path in files if find_quantization(inside) == quantization.upper()]
        files = exact or [
            (inside, path) for inside, path in files if is_same_quantization(find_quantization(inside), quantization)
        ]
    if not files:
        return None
    if len(files) > 1:
        listed = [(f"{repo}:{find_quantization(name) or name}", _locate_file(path).size_bytes) for name, path in files]
        if len({name for name, _ in listed}) < len(listed):
            listed = [(f"{repo}/{name}", _locate_file(path).size_bytes) for name, path in files]
        raise _make_choices_error(f"{text} in {origin}", listed)
    return _locate_file(files[0][1], name=text if quantization or file else repo, origin=origin)


def _list_lm_studio_folders() -> list[Path]:
    return [Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"]


def _list_lm_studio_models() -> Iterator[LocatedModel]:
    for folder in _list_lm_studio_folders():
        for path in _select_models(_find_ggufs(folder)):
            if _is_complete(path):
                yield _locate_file(path, name=path.relative_to(folder).as_posix(), origin="LM Studio")


def _find_in_lm_studio(text: str) -> LocatedModel | None:
    repo, quantization, file = split_reference(text)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        return None
    for folder in _list_lm_studio_folders():
        inside = folder / repo
        files = [(p.relative_to(inside).as_posix(), p) for p in _select_models(_find_ggufs(inside)) if _is_complete(p)]
        if found := _pick_file(text, repo, quantization, file, files, "LM Studio"):
            return found
    return None


def _list_ollama_folders() -> list[Path]:
    if chosen := os.environ.get("OLLAMA_MODELS"):
        return [Path(chosen).expanduser()]
    return [Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]


def _list_ollama_models() -> Iterator[LocatedModel]:
    for folder in _list_ollama_folders():
        manifests = folder / "manifests"
        for root, folders, files in os.walk(manifests):
            folders.sort()
            for tag in sorted(files):
                pieces = (*Path(root).relative_to(manifests).parts, tag)
                if len(pieces) == 4 and (blob := _find_ollama_blob(folder, Path(root) / tag)):
                    yield _locate_file(blob, name=_format_ollama_name(*pieces), origin="Ollama")


def _format_ollama_name(host: str, namespace: str, model: str, tag: str) -> str:
    """The name in `ollama list`, which omits defaults."""
    where = "" if host == "registry.ollama.ai" else f"{host}/"
    who = "" if not where and namespace == "library" else f"{namespace}/"
    return f"{where}{who}{model}:{tag}"


def _find_ollama_blob(folder: Path, manifest: Path) -> Path | None:
    """The GGUF file of a manifest; None if the model is not one complete GGUF file."""
    try:
        with manifest.open("rb") as file:
            content = json.loads(file.read(_MAX_MANIFEST_BYTES))
        layers = content["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _MODEL_LAYER]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # Only a valid digest becomes part of a path.
    match = _DIGEST.fullmatch(digests[0]) if len(digests) == 1 and isinstance(digests[0], str) else None
    blob = folder / "blobs" / f"sha256-{match[1]}" if match else None
    return blob if blob is not None and _exists(blob) else None


def _find_in_ollama(text: str) -> LocatedModel | None:
    pieces = _HUB_PREFIX.sub("hf.co/", text, count=1).removeprefix("ollama.com/").split("/")
    model, _, tag = pieces[-1].partition(":")
    if not 1 <= len(pieces) <= 3 or not all(re.fullmatch(r"[\w.-]+", piece) for piece in (*pieces[:-1], model)):
        return None
    host = pieces[0] if len(pieces) == 3 else "registry.ollama.ai"
    namespace = pieces[-2] if len(pieces) > 1 else "library"
    for folder in _list_ollama_folders():
        manifests = _find_ignoring_case(folder / "manifests" / host / namespace, model)
        tags = _list_names(manifests)
        if tag:
            tags = [name for name in tags if name.lower() == tag.lower()]
        elif "latest" in tags:
            tags = ["latest"]
        found = [(name, blob) for name in tags if (blob := _find_ollama_blob(folder, manifests / name))]
        if len(found) > 1:
            raise _make_choices_error(
                f"{text} in Ollama",
                [
                    (_format_ollama_name(host, namespace, manifests.name, name), _locate_file(blob).size_bytes)
                    for name, blob in found
                ],
            )
        if found:
            return _locate_file(
                found[0][1], name=_format_ollama_name(host, namespace, manifests.name, found[0][0]), origin="Ollama"
            )
    return None


def _find_ignoring_case(folder: Path, name: str) -> Path:
    return folder / next((other for other in _list_names(folder) if other.lower() == name.lower()), name)


def _list_names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def _find_by_name(text: str) -> LocatedModel | None:
    """A model by its common name, if the stores have exactly one: `smollm2-135m-instruct`."""
    wanted, _, quantization = text.lower().removesuffix(".gguf").partition(":")
    calls: tuple[Callable[[LocatedModel], str], ...] = (
        lambda model: model.name.lower(),
        lambda model: model.path.name.lower().removesuffix(".gguf"),
        lambda model: strip_file_name(model.path.name).lower(),
    )
    models = [
        model
        for model in list_local_models()
        if any(call(model) in (wanted, text.lower()) for call in calls)
        and (
            not quantization
            or model.name.lower() == text.lower()
            or is_same_quantization(model.quantization, quantization)
        )
    ]
    if len(models) > 1:
        raise _make_choices_error(f"{text}: this machine", [(f"{model.name}", model.size_bytes) for model in models])
    return models[0] if models else None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False
