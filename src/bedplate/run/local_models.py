"""Models on this machine: lists them with their last use, and removes those that were downloaded."""

from __future__ import annotations

import datetime as dt
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Literal

from bedplate.errors import NotPossible, UsageError
from bedplate.facts.gguf import list_parts
from bedplate.facts.library import LocatedModel, find_hub_cache, is_same_quantization, list_local_models, locate
from bedplate.facts.published_weights import find_published_name, load_catalogue
from bedplate.home import get_home, get_models_dir, make_disk_failure, make_folder
from bedplate.run.builtin import NAME, get_builtin_path
from bedplate.run.models import expand_name, is_builtin
from bedplate.run.prepare import hold
from bedplate.run.prepared_weights import lock_use_mark
from bedplate.values import Model
from bedplate.values.record import Record


class LocalModel(Record, frozen=True, kw_only=True):
    """A model on this machine."""

    name: str
    path: str
    origin: str
    size_bytes: int
    quantization: str | None = None
    used_at: str | None = None
    """When bedplate last started an engine with it; `None`: never."""
    in_use: bool = False
    """Whether a running bedplate uses it."""


class LocalModelList(Record, frozen=True, kw_only=True):
    """What `bedplate list --json` prints."""

    schema: Literal["local-models/1"] = "local-models/1"
    models: tuple[LocalModel, ...]


class RemovedModels(Record, frozen=True, kw_only=True):
    """What `bedplate rm --json` prints."""

    schema: Literal["removed-models/1"] = "removed-models/1"
    models: tuple[LocalModel, ...]
    freed_bytes: int


def record_use(model: Model) -> None:
    """Notes the time, and protects the model's files from `rm` while this process runs."""
    if not model.files:
        return
    first = Path(model.files[0])
    mark = _get_mark(first if model.format == "gguf" else first.parent)
    try:
        make_folder(mark.parent)
        hold(mark)
        os.utime(f"{mark}.use")
    except OSError as error:
        raise make_disk_failure(error, mark.parent) from error


def list_models() -> list[LocalModel]:
    """Every model in the known stores, the most recently used first."""
    found = [_describe(one) for one in list_local_models()]
    return sorted(found, key=lambda one: (one.used_at or "", one.name), reverse=True)


def find_local(text: str | None) -> LocalModel | None:
    """The model in a store that a name or a path means; `None`: it is not on this machine."""
    if text is None or is_builtin(text):
        return next((one for one in list_models() if Path(one.path) == get_builtin_path()), None)
    for one in list_models():
        if text.lower() == one.name.lower():
            return one
    located = locate(text)
    if located is not None:
        return _describe(located)
    return _find_published(text)


def _find_published(text: str) -> LocalModel | None:
    """The downloaded weights of a known model, by its short name or its hub name."""
    name, _, label = expand_name(text).partition(":")
    known = find_published_name(name)
    if known is None:
        return None
    repositories = [one.repository.lower() for one in load_catalogue().models[known].repositories]
    here = [one for one in list_models() if one.name.lower().startswith(tuple(repositories))]
    found = [one for one in here if not label or is_same_quantization(one.quantization, label)]
    if len(found) > 1:
        raise UsageError(f"{text} is here more than once", hint=f"name one: {', '.join(one.name for one in found)}")
    return found[0] if found else None


def describe_model(model: Model) -> LocalModel:
    """The entry of a model whose files are here."""
    first = Path(model.files[0])
    path = first if model.format == "gguf" else first.parent
    known = (one for one in list_models() if Path(one.path).resolve() == path.resolve())
    size = sum(Path(file).stat().st_size for file in model.files if Path(file).is_file())
    return next(known, LocalModel(name=model.name, path=str(path), origin=model.origin or "a file", size_bytes=size))


def select_removable(names: Sequence[str]) -> list[LocalModel]:
    """The models that the names mean. Raises for those that are not here, in use, or kept by another program."""
    found: dict[str, LocalModel] = {}
    for name in names:
        one = find_local(name)
        if one is None:
            raise UsageError(f"{name} is not on this machine", hint="bedplate list shows the models that are")
        _check_removable(one)
        found[one.path] = one
    return list(found.values())


def remove_models(models: Sequence[LocalModel]) -> RemovedModels:
    for one in models:
        path = Path(one.path)
        try:
            with _lock_unused(one):
                if _is_below(path, find_hub_cache()):
                    _remove_from_hub_cache(path)
                else:
                    _remove_files(path)
        except OSError as error:
            raise make_disk_failure(error, path) from error
    return RemovedModels(models=tuple(models), freed_bytes=sum(one.size_bytes for one in models))


def _describe(located: LocatedModel) -> LocalModel:
    mark = Path(f"{_get_mark(located.path)}.use")
    with lock_use_mark(mark.with_suffix("")) as free:
        used = mark.stat().st_mtime if mark.exists() else None
    return LocalModel(
        name=NAME if located.path == get_builtin_path() else located.name,
        path=str(located.path),
        origin="built in" if located.path == get_builtin_path() else located.origin,
        size_bytes=located.size_bytes,
        quantization=located.quantization,
        used_at=dt.datetime.fromtimestamp(used, dt.UTC).isoformat(timespec="seconds") if used is not None else None,
        in_use=not free,
    )


def _get_mark(path: Path) -> Path:
    """Where the uses of a model are noted. A hash, since a path may be longer than a file name."""
    return get_home() / "used" / sha256(os.fsencode(path.resolve())).hexdigest()[:24]


def _check_removable(one: LocalModel) -> None:
    if one.in_use:
        raise _make_in_use_error(one)
    path = Path(one.path)
    if _is_below(path, get_models_dir()) or _is_below(path, find_hub_cache()):
        return
    is_own = one.origin in ("a file", "a folder")
    raise NotPossible(
        f"{path} is {one.origin}" if is_own else f"{one.name} belongs to {one.origin}: {path}",
        cause="bedplate removes only its own models and those in the Hugging Face cache",
        hint="delete it yourself if nothing else needs it" if is_own else f"remove it with {one.origin}",
    )


def _make_in_use_error(one: LocalModel) -> NotPossible:
    return NotPossible(
        f"{one.name} is in use by a running bedplate", hint="bedplate ps lists the services; stop it first"
    )


@contextmanager
def _lock_unused(one: LocalModel) -> Iterator[None]:
    with lock_use_mark(_get_mark(Path(one.path))) as free:
        if not free:
            raise _make_in_use_error(one)
        yield


def _is_below(path: Path, folder: Path) -> bool:
    return path.absolute().is_relative_to(folder.absolute())


def _remove_files(path: Path) -> None:
    for part in list_parts(path) or (path,):
        part.unlink(missing_ok=True)
    if path.parent != get_models_dir() and not any(path.parent.iterdir()):
        path.parent.rmdir()


def _remove_from_hub_cache(path: Path) -> None:
    """Removes the files, what they link to, and every other link to that; and the repository if no weights remain."""
    inside = path.relative_to(find_hub_cache())
    repository = find_hub_cache() / inside.parts[0]
    if path.is_dir():
        shutil.rmtree(repository)
        return
    blobs = {part.resolve() for part in list_parts(path) or (path,)}
    for link in (repository / "snapshots").rglob("*"):
        if (link.is_file() or link.is_symlink()) and link.resolve() in blobs:
            link.unlink()
    for blob in blobs:
        blob.unlink(missing_ok=True)
    weights = (".gguf", ".safetensors", ".bin", ".onnx")
    if not any(file.suffix in weights for file in (repository / "snapshots").rglob("*")):
        shutil.rmtree(repository)
