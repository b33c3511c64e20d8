"""Air-gapped clusters: a mirror for every image, pinned revisions, and models that are copied onto their volumes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import yaml
from tests.deploy.intents import WRITTEN, build_platform, emit_files
from tests.deploy.schemas import LOADER
from tests.deploy.walk import read_all_documents, read_manifests

from bedplate.deploy.air_gap import complete_name
from bedplate.deploy.emit import emit_target
from bedplate.deploy.kubernetes import Files
from bedplate.errors import UsageError
from bedplate.values import replace_fields

MIRROR = "registry.example.com:5000/mirror"
COMMIT = "a" * 40


def emit(name: str, target: str, **deploy: Any) -> Files:
    platform = build_platform(name)
    return emit_target(replace(platform, deploy=replace_fields(platform.deploy, **deploy)), target)


def list_images(value: Any) -> list[str]:
    """All image references at any depth."""
    if isinstance(value, dict):
        own = [value["image"]] if isinstance(value.get("image"), str) else []
        return own + [one for part in value.values() for one in list_images(part)]
    return [one for part in value for one in list_images(part)] if isinstance(value, list) else []


def list_bases(files: Files) -> list[str]:
    texts = [text for name, text in files.items() if name.endswith("Dockerfile")]
    return [one for text in texts for one in re.findall(r"^(?:FROM |COPY --from=)(\S+)", text, re.MULTILINE)]


@pytest.mark.parametrize(("name", "target"), WRITTEN)
def test_every_image_comes_from_the_mirror(name: str, target: str) -> None:
    files, plain = emit(name, target, mirror=MIRROR, registry=None), emit_files(name, target)
    used = {*list_images(read_all_documents(files)), *list_bases(files)}
    assert used and all(one.startswith(f"{MIRROR}/") for one in used)
    pairs = dict(line.split() for line in files["images.txt"].splitlines() if not line.startswith("#"))
    built = {line.split()[-1] for line in files["images.txt"].splitlines() if line.startswith("# Build")}
    assert used == {*pairs.values(), *built}
    images = [*list_images(read_all_documents(plain)), *list_bases(plain)]
    sources = {complete_name(one) for one in images if "bedplate" not in one}
    assert set(pairs) == sources, "the list has the original names"
    assert all(target == f"{MIRROR}/{source}" for source, target in pairs.items())


def test_images_that_are_built_go_to_the_registry() -> None:
    files = emit("teams", "kubernetes", mirror=MIRROR, registry="own.example.com")
    assert "image: own.example.com/bedplate:" in files["endpoint.yaml"]
    assert "# Build it and push it: own.example.com/bedplate:" in files["images.txt"]
    (one,) = yaml.load(emit("teams", "kubernetes", mirror=MIRROR, registry=None)["kustomization.yaml"], LOADER)[
        "images"
    ]
    assert one["name"] == f"{MIRROR}/bedplate", "the port of a registry is not a tag"


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("vllm/vllm-openai:v1", "docker.io/vllm/vllm-openai:v1"),
        ("python:3.12", "docker.io/library/python:3.12"),
        ("ghcr.io/a/b@sha256:00", "ghcr.io/a/b@sha256:00"),
        ("localhost/a:1", "localhost/a:1"),
    ],
)
def test_names_are_completed_as_container_engines_do(name: str, full: str) -> None:
    assert complete_name(name) == full


@pytest.mark.parametrize("mirror", ["https://registry.example.com", "Registry/a", "a b", "a/"])
def test_rejects_what_is_no_registry(mirror: str) -> None:
    with pytest.raises(UsageError, match=r"deploy\.mirror"):
        emit("h100-chat", "kubernetes", mirror=mirror)


class TestRevisions:
    def test_pinned_commit_is_downloaded_to_a_volume_of_its_own(self) -> None:
        plain, repository = emit("h100-chat", "kubernetes"), find_repository("h100-chat")
        pinned = emit("h100-chat", "kubernetes", revisions={repository: COMMIT})
        assert f"revision=''{COMMIT}''" in pinned["meta-llama-3-1-70b.yaml"].replace("'", "''").replace("''''", "''")
        assert find_claims(pinned) != find_claims(plain)

    def test_rejects_other_repositories_and_other_texts(self) -> None:
        with pytest.raises(UsageError, match="no service downloads acme/other") as caught:
            emit("h100-chat", "kubernetes", revisions={"acme/other": COMMIT})
        assert find_repository("h100-chat") in (caught.value.hint or "")
        with pytest.raises(UsageError, match="is not a commit"):
            emit("h100-chat", "kubernetes", revisions={find_repository("h100-chat"): "a b"})


class TestCopiedModels:
    @pytest.mark.parametrize(
        ("name", "target"), [("h100-chat", "kubernetes"), ("gateway", "ray"), ("idle", "kubernetes")]
    )
    def test_jobs_wait_for_the_files_and_nothing_is_downloaded(self, name: str, target: str) -> None:
        files = emit(name, target, models="copy")
        assert "snapshot_download" not in "".join(files.values())
        rows = [line.split() for line in files["models.txt"].splitlines() if not line.startswith("#")]
        jobs = {tree["metadata"]["name"]: tree for tree in read_manifests(files) if tree["kind"] == "Job"}
        for service, _, revision, path, marker, *_ in rows:
            (job,) = (one for name, one in jobs.items() if name.startswith(f"{service}-model-"))
            first = job["spec"]["template"]["spec"]["initContainers"][0]
            assert first["name"] == "wait" and f"[ -e {marker} ]" in first["command"][-1]
            assert path.startswith("/models") and revision == "main"

    def test_another_revision_is_another_volume(self) -> None:
        repository = find_repository("h100-chat")
        one, other = (
            emit("h100-chat", "kubernetes", models="copy", revisions={repository: commit * 40}) for commit in "ab"
        )
        assert find_claims(one) != find_claims(other) and f" {'a' * 40} " in one["models.txt"]


def find_repository(name: str) -> str:
    row = next(line for line in emit(name, "kubernetes", models="copy")["models.txt"].splitlines() if line[0] != "#")
    return row.split()[1]


def find_claims(files: Files) -> set[str]:
    return {tree["metadata"]["name"] for tree in read_manifests(files) if tree["kind"] == "PersistentVolumeClaim"}
