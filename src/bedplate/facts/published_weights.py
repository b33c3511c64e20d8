"""Quantized weights of well-known models that are published on the hub, so that a plan fetches instead of converting.

The data file names for each original model the repositories, what each contains, and where that was read. Sizes that
no source states are computed from the model's shape. `bedplate models refresh` asks the hub for the present files.
"""

from __future__ import annotations

import difflib
import importlib.resources
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec

from bedplate import home
from bedplate.errors import UsageError
from bedplate.facts.known_models import apply_label, list_known_names, look_up_model, parse_model_name
from bedplate.values import Model, replace_fields
from bedplate.values.decision import PublishedWeights, list_part_names
from bedplate.values.model import Quantization
from bedplate.values.record import Record

LISTING = "published-weights.json"
"""The file in BEDPLATE_HOME with the hub's answers."""
WEIGHT_FILES = (".gguf", ".safetensors", ".npz")
ASSUMED_LABELS = {"gguf": "Q4_K_M", "exl3": "4.0BPW", "exl2": "4.0BPW"}
"""By format, the quantization of a repository that has several, if its name states none. llama-server has the same
default for --hf-repo (common/arg.cpp of b11549), and most repositories have the others."""
_FORMAT_WORD = re.compile(r"(?<![a-z0-9])(gguf|exl[23])(?![a-z0-9])")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)/(?P<file>[\w./-]+\.gguf)", re.IGNORECASE)
ListingVersion = tuple[str, int, int]
"""Path, modification time and size of the stored listing."""


class PublishedRepository(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One repository of the data file, with its quantizations."""

    repository: str
    format: Literal["gguf", "safetensors", "mlx", "exl3"]
    method: str | None = None
    """`None`: the format says it, or the repository is a known model itself."""
    bits: float | None = None
    group: int | None = None
    block: tuple[int, int] | None = None
    file: str | None = None
    """The pattern of GGUF file names; {type} stands for the label."""
    files: dict[str, str] = {}
    """By label, file names that differ from the pattern."""
    revisions: dict[str, str] = {}
    """By label, the branch."""
    weights: dict[str, int | None]
    """By label, the bytes; `None`: no source states them."""
    sources: tuple[str, ...]

    def get_file(self, label: str) -> str | None:
        pattern = self.file.replace("{type}", label) if self.file is not None else None
        return self.files.get(label, pattern)


class PublishedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    repositories: tuple[PublishedRepository, ...]
    short: str | None = None
    """The name in the style of Ollama."""
    also: tuple[str, ...] = ()
    """Earlier names of the original repository."""


class PublishedCatalogue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sources: dict[str, str]
    """Address by the name that entries cite."""
    models: dict[str, PublishedModel]
    """By the hub name of the original model."""


class RepositoryListing(Record, frozen=True, kw_only=True):
    """The files of one repository, or of one of its branches, as the hub listed them."""

    files: dict[str, int] = msgspec.field(default_factory=dict)
    """Bytes by file name."""
    missing: bool = False
    """Whether the hub has no such repository, or does not show it."""


class HubListing(Record, frozen=True, kw_only=True):
    """What the hub said about the repositories of the catalogue."""

    schema: Literal["published-weights/1"] = "published-weights/1"
    listed_at: str
    endpoint: str
    repositories: dict[str, RepositoryListing]
    """By owner/name, with @branch if it is not the default branch."""


class PublishedForm(msgspec.Struct, frozen=True, kw_only=True):
    """One quantization of one model in one repository."""

    label: str
    format: str
    model: Model
    """The original model with these weights."""
    weights: PublishedWeights


@lru_cache(maxsize=1)
def load_catalogue() -> PublishedCatalogue:
    shipped = importlib.resources.files("bedplate.facts") / "data" / "published_weights.json"
    return msgspec.json.decode(shipped.read_bytes(), type=PublishedCatalogue)


@lru_cache(maxsize=1)
def _index_models() -> dict[str, str]:
    """The catalogue's name of each original model, by every name in lower case."""
    return {known.lower(): name for name, model in load_catalogue().models.items() for known in (name, *model.also)}


def find_published_name(name: str) -> str | None:
    """The original model in the catalogue that has this hub name, with or without a quantization after a colon.

    A model of the same shape is another model.
    """
    return _index_models().get(name.strip().lower().partition(":")[0])


def list_published(model: Model) -> tuple[PublishedForm, ...]:
    """The published quantizations of a known model, or the requested one, if its name says which.

    None for the user's own files, which may be a fine-tune.
    """
    name = find_published_name(model.name)
    if name is None and not model.files and model.format in ASSUMED_LABELS:
        return _list_named(model)
    original = look_up_model(name) if name is not None and not model.files else None
    if name is None or original is None:
        return ()
    if model.quantization == original.quantization:
        return _list_forms(name, model, _find_listing())
    original = replace_fields(original, name=model.name)
    return tuple(form for form in _list_forms(name, original, _find_listing()) if form.label == model.quantization)


def look_up_named_weights(text: str) -> Model | None:
    """The facts of the model with this name, in the format of the repository that the text names, if it names one.

    `unsloth/Qwen3-8B-GGUF` has no other weights. Without a quantization in the name, one is assumed, and the origin
    says so.
    """
    repository, _, label = text.strip().partition(":")
    known = _index_repositories().get(repository.lower())
    model = look_up_model(text)
    if model is None and known is not None:
        original = look_up_model(f"{known[0]}:{label}" if label else known[0])
        model = replace_fields(original, name=text.strip()) if original is not None else None
    word = _FORMAT_WORD.search(repository.rpartition("/")[2].lower())
    if model is None or word is None or not _HUB_ID.fullmatch(repository):
        return model
    form, asked = word[1], parse_model_name(text).label or label
    if asked:
        return replace_fields(model, format=form) if model.format == "exl3" != form else model
    choices = list(known[1].weights) if known is not None else []
    assumed = ASSUMED_LABELS[form]
    chosen = assumed if assumed in choices or not choices else choices[0]
    named = f"{repository}:{chosen if form == 'gguf' else chosen.lower()}"
    others = f" (of {', '.join(choices)})" if len(choices) > 1 else ""
    return replace_fields(
        apply_label(model, chosen), name=named, format=form,
        origin=f"known facts; {chosen} is assumed{others}: {repository}:… names another",
    )  # fmt: skip


@lru_cache(maxsize=1)
def _index_repositories() -> dict[str, tuple[str, PublishedRepository]]:
    """By the name of a repository in lower case: the original model and the entry."""
    return {
        one.repository.lower(): (name, one)
        for name, model in load_catalogue().models.items()
        for one in model.repositories
        if one.format in ASSUMED_LABELS
    }


def _list_named(model: Model) -> tuple[PublishedForm, ...]:
    """The weights of the repository that the model is named after, whose file or branch must be fetched."""
    repository, _, asked = model.name.partition(":")
    named = _HUB_FILE.fullmatch(repository)
    repository = named["repository"] if named is not None else repository
    is_named = named is not None or _FORMAT_WORD.search(repository.lower()) is not None
    if not _HUB_ID.fullmatch(repository) or not is_named:
        return ()
    known = _index_repositories().get(repository.lower())
    original = look_up_model(known[0]) if known is not None else None
    if known is not None and original is not None and named is None:
        forms = _list_forms(known[0], replace_fields(original, name=model.name), _find_listing())
        wanted = (form for form in forms if form.weights.repository == known[1].repository)
        if found := tuple(form for form in wanted if form.label == model.quantization):
            return found
    label = asked or model.quantization or ""
    base = re.sub(r"[-_.]?gguf$", "", repository.rpartition("/")[2], flags=re.IGNORECASE)
    file = (known[1].get_file(label) if known is not None else None) or f"{base}-{label}.gguf"
    file = named["file"] if named is not None else file
    published = PublishedWeights(
        repository=repository,
        file=file if model.format == "gguf" else None,
        revision=label.lower().replace(" ", "") if model.format != "gguf" else None,
        size_bytes=_count_file_bytes(model),
        size_basis="computed",
        sources=(),
    )
    return (PublishedForm(label=model.quantization or label, format=model.format, model=model, weights=published),)


def get_published_model(model: Model, published: PublishedWeights) -> Model:
    """The model with these published weights."""
    found = (form.model for form in list_published(model) if form.weights == published)
    return next(found, model)


def find_gguf_repository(name: str) -> str | None:
    """The repository with GGUF files of this original model, the one with the most quantizations."""
    known = find_published_name(name)
    if known is None:
        return None
    found = [one for one in load_catalogue().models[known].repositories if one.format == "gguf"]
    return max(found, key=lambda one: len(one.weights)).repository if found else None


def find_original(model: Model) -> str | None:
    """The original of a quantized repository of the catalogue, of which other weights are published as well."""
    repository = model.name.partition(":")[0].lower()
    return None if model.files else _index_originals().get(repository)


@lru_cache(maxsize=1)
def _index_originals() -> dict[str, str]:
    models = load_catalogue().models
    return {one.repository.lower(): name for name, model in models.items() for one in model.repositories}


def get_listing_key(repository: str, revision: str | None) -> str:
    return f"{repository}@{revision}" if revision is not None else repository


def list_repository_keys(names: Sequence[str] = ()) -> tuple[str, ...]:
    """The repositories of these original models, or of all, and every branch that the catalogue names."""
    models = load_catalogue().models
    wanted = [find_published_name(name) for name in names] or list(models)
    for name, known in zip(names, wanted, strict=False):
        if known is None:
            near = difflib.get_close_matches(name, list(models), n=3)
            raise UsageError(
                f"the catalogue of published weights does not have {name}",
                hint=f"did you mean {' or '.join(near)}?" if near else "name an original model, as owner/name",
            )
    found: dict[str, None] = {}
    for known in wanted:
        for one in models[str(known)].repositories:
            for label in one.weights:
                found.setdefault(get_listing_key(one.repository, one.revisions.get(label)))
    return tuple(found)


def get_listing_path() -> Path:
    return home.get_home() / LISTING


def read_listing() -> HubListing | None:
    """What the hub said when it was last asked; `None`: it was not, or the file is unreadable."""
    version = _find_listing()
    return _read_listing(version) if version is not None else None


def _find_listing() -> ListingVersion | None:
    path = get_listing_path()
    try:
        status = path.stat()
    except OSError:
        return None
    return str(path), status.st_mtime_ns, status.st_size


@lru_cache(maxsize=4)
def _read_listing(version: ListingVersion) -> HubListing | None:
    """The stored listing; a file of another version, or a damaged one, counts as none."""
    try:
        return msgspec.json.decode(Path(version[0]).read_bytes(), type=HubListing)
    except (OSError, msgspec.DecodeError):
        return None


@lru_cache(maxsize=256)
def _list_forms(name: str, model: Model, version: ListingVersion | None) -> tuple[PublishedForm, ...]:
    catalogue = load_catalogue()
    listing = _read_listing(version) if version is not None else None
    found: list[PublishedForm] = []
    for repository in catalogue.models[name].repositories:
        sources = tuple(catalogue.sources[one] for one in repository.sources)
        for label, stated in repository.weights.items():
            size = _find_size(repository, label, stated, listing)
            if size == 0:
                continue
            made = _make_model(model, repository, label, size)
            published = PublishedWeights(
                repository=repository.repository,
                file=repository.get_file(label),
                revision=repository.revisions.get(label),
                size_bytes=size or _count_file_bytes(made),
                size_basis="reported" if size else "computed",
                sources=sources,
            )
            found.append(
                PublishedForm(label=made.quantization or label, format=repository.format, model=made, weights=published)
            )
    return tuple(found)


def _find_size(
    repository: PublishedRepository, label: str, stated: int | None, listing: HubListing | None
) -> int | None:
    """The bytes of these weights; 0 if the hub no longer has them, `None` if neither it nor a source was read."""
    key = get_listing_key(repository.repository, repository.revisions.get(label))
    listed = listing.repositories.get(key) if listing is not None else None
    if listed is None:
        return stated
    if listed.missing:
        return 0
    file = repository.get_file(label)
    if file is None:
        return sum(size for name, size in listed.files.items() if name.endswith(WEIGHT_FILES))
    names = list_part_names(file)
    return sum(listed.files[name] for name in names) if all(name in listed.files for name in names) else 0


def _count_file_bytes(model: Model) -> int:
    """GGUF files are without the vision encoder, which is a file of its own."""
    return model.weight_bytes - (model.vision_weight_bytes if model.format == "gguf" else 0)


def _make_model(model: Model, repository: PublishedRepository, label: str, size: int | None) -> Model:
    if repository.repository in _list_known_names():
        # Its configuration says exactly how the weights are stored.
        known = look_up_model(repository.repository)
        if known is not None and known.quantization is not None:
            return replace_fields(known, name=model.name, sources=model.sources)
    made = apply_label(model, label)
    details = made.quantization_details
    if details is not None and repository.method is not None:
        details = Quantization(
            method=repository.method,
            bits=repository.bits or details.bits,
            group_size=repository.group or details.group_size,
            block=repository.block,
            kv_cache=details.kv_cache,
        )
    made = replace_fields(made, format=repository.format, quantization_details=details)
    whole = _count_file_bytes(made)
    if not size or not whole:
        return made
    ratio, vision = size / whole, made.vision_weight_bytes
    parts = tuple(
        part if part.name == "vision" else replace_fields(part, bytes=round(part.bytes * ratio)) for part in made.parts
    )
    return replace_fields(made, parts=parts, weight_bytes=size + (vision if made.format == "gguf" else 0))


@lru_cache(maxsize=1)
def _list_known_names() -> frozenset[str]:
    return frozenset(list_known_names())
