"""Bundles for air-gapped clusters: contents, scripts and checks. Images are in tests/image."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.commands import invoke
from tests.deploy.schemas import LOADER
from tests.facts.test_gguf import write
from tests.image.root_filesystem import ROOT, read_instructions
from tests.run.test_hub import COMMIT as HUB_COMMIT
from tests.run.test_hub import Hub, serve_hub

from bedplate.bundling.for_cluster import CONFIG

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MIRROR = "registry.example.com:5000/mirror"
DEPLOY = {"namespace": "llms", "mirror": MIRROR}
HUB_MODEL = "Qwen/Qwen3-8B"
TINY = ROOT / "tests" / "models" / "llama"


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a hub that cannot be reached."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    return tmp_path / "hf" / "hub"


def write_intent(folder: Path, *services: dict[str, Any], **deploy: Any) -> Path:
    pools = [{"name": "gpus", "accelerator": "H100 SXM", "count": 8, "gpus_per_node": 8}]
    described = {"pools": pools, "services": list(services), "deploy": {**DEPLOY, **deploy}}
    (folder / "platform.yaml").write_text(json.dumps(described))
    return folder / "platform.yaml"


def make_bundle(folder: Path, intent: Path, *options: str) -> tuple[Path, dict[str, Any]]:
    answer = invoke("bundle", "-f", str(intent), "--for", "kubernetes", "-o", str(folder / "site"), "--json", *options)
    assert answer.code == 0, answer.err
    found: dict[str, Any] = json.loads(answer.out)
    return folder / "site", found["bundle"]


def cache_files(hub: Path, repository: str, *files: Path) -> None:
    """Files in the cache of the hub's client, as it stores them: links to blobs."""
    folder = hub / f"models--{repository.replace('/', '--')}"
    for name in ("snapshots", "blobs", "refs"):
        (folder / name).mkdir(parents=True)
    (folder / "snapshots" / COMMIT).mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(files):
        (folder / "blobs" / str(number)).write_bytes(file.read_bytes())
        (folder / "snapshots" / COMMIT / file.name).symlink_to(f"../../blobs/{number}")


def list_jobs(site: Path) -> list[str]:
    trees = [tree for path in (site / "platform").glob("*.yaml") for tree in yaml.load_all(path.read_text(), LOADER)]
    return [tree["metadata"]["name"] for tree in trees if tree.get("kind") == "Job"]


class TestContents:
    def test_images_and_models_that_are_not_here_are_fetched_by_a_script(self, tmp_path: Path) -> None:
        intent = write_intent(tmp_path, {"model": HUB_MODEL}, revisions={HUB_MODEL: COMMIT})
        site, bundle = make_bundle(tmp_path, intent)
        fetch, push = (site / "fetch.sh").read_text(), (site / "push.sh").read_text()
        (model,) = bundle["models"]
        assert model["revision"] == COMMIT and model["size_bytes"] is None
        assert f"hf download {HUB_MODEL} --revision {COMMIT} --local-dir {model['folder']}\n" in fetch
        assert bundle["images"]
        for one in bundle["images"]:
            assert one["target"] == f"{MIRROR}/{one['source']}"
            assert f'--override-arch amd64 copy "$@" docker://{one["source"]} oci:images:{one["target"]}\n' in fetch
            assert f"oci:images:{one['target']} docker://{one['target']}\n" in push
        emitted = "".join(path.read_text() for path in (site / "platform").glob("*.yaml"))
        assert "snapshot_download" not in emitted and f".{COMMIT}.copied" in emitted

    def test_scripts_are_executable_and_valid(self, tmp_path: Path) -> None:
        site, _ = make_bundle(tmp_path, write_intent(tmp_path, {"model": HUB_MODEL}))
        for name in ("fetch.sh", "push.sh", "apply.sh"):
            assert (site / name).stat().st_mode & stat.S_IXUSR
            assert subprocess.run(["sh", "-n", str(site / name)]).returncode == 0

    def test_apply_script_names_the_jobs_and_their_volumes(self, tmp_path: Path) -> None:
        site, bundle = make_bundle(tmp_path, write_intent(tmp_path, {"model": HUB_MODEL}))
        (model,), (job,) = bundle["models"], list_jobs(site)
        apply = (site / "apply.sh").read_text()
        assert f"\ncopy_model {job} {model['folder']} {model['path']} {model['marker']}\n" in apply
        assert "\nnamespace=llms\n" in apply and "kubectl wait -n llms" in apply

    def test_unknown_commit_is_reported(self, tmp_path: Path) -> None:
        intent = write_intent(tmp_path, {"model": HUB_MODEL})
        answer = invoke("bundle", "-f", str(intent), "--for", "kubernetes", "-o", str(tmp_path / "site"))
        assert answer.code == 0 and f"no commit is known of {HUB_MODEL} (" in answer.err

    def test_published_file_in_the_cache_is_volume_content_with_its_commit(self, tmp_path: Path, hub: Path) -> None:
        intent = write_intent(tmp_path, {"model": HUB_MODEL, "engine": "llama.cpp"})
        _, bundle = make_bundle(tmp_path, intent)
        (wanted,) = bundle["models"]
        assert wanted["name"] != HUB_MODEL and wanted["size_bytes"] is None
        (name,) = wanted["files"]
        cache_files(hub, wanted["name"], write(tmp_path / name), write(tmp_path / "other.gguf"))
        (tmp_path / "again").mkdir()
        site, bundle = make_bundle(tmp_path / "again", intent)
        (model,) = bundle["models"]
        assert model["revision"] == COMMIT and COMMIT in model["marker"]
        (packed,) = (site / model["folder"]).iterdir()
        assert packed.name == name and not packed.is_symlink() and packed.stat().st_size == model["size_bytes"]
        assert "hf download" not in (site / "fetch.sh").read_text()

    def test_folder_in_the_cache_is_packed_without_hidden_files(self, tmp_path: Path, hub: Path) -> None:
        files = [path for path in TINY.iterdir() if path.is_file()]
        (tmp_path / ".gitattributes").write_text("")
        cache_files(hub, "me/tiny", *files, tmp_path / ".gitattributes")
        site, bundle = make_bundle(tmp_path, write_intent(tmp_path, {"model": "me/tiny", "name": "chat"}))
        (model,) = bundle["models"]
        assert (model["name"], model["revision"]) == ("me/tiny", COMMIT)
        assert {path.name for path in (site / model["folder"]).iterdir()} == {path.name for path in files}

    def test_image_that_is_not_included_is_named(self, tmp_path: Path) -> None:
        site, _ = make_bundle(tmp_path, write_intent(tmp_path, {"model": HUB_MODEL}, endpoint=True))
        assert f"Not included: {MIRROR}/bedplate:" in (site / "README.txt").read_text()

    @pytest.mark.parametrize("target", ["dynamo", "ray"])
    def test_other_targets_have_a_job_for_each_volume(self, target: str, tmp_path: Path) -> None:
        site, bundle = make_bundle(tmp_path, write_intent(tmp_path, {"model": HUB_MODEL}), "--for", target)
        (job,) = list_jobs(site)
        assert bundle["target"] == target and f"\ncopy_model {job} " in (site / "apply.sh").read_text()

    def test_image_without_a_published_one_is_built_from_its_folder(self, tmp_path: Path) -> None:
        site, bundle = make_bundle(tmp_path, write_intent(tmp_path, {"model": HUB_MODEL, "engine": "mistral.rs"}))
        (name,), fetch = bundle["built"], (site / "fetch.sh").read_text()
        assert name.startswith(f"{MIRROR}/bedplate-mistralrs:")
        assert "--output type=oci,tar=false,dest=built/0 platform/images/mistral.rs\n" in fetch
        assert all(
            f"--build-context={one['target']}=docker-image://{one['source']} " in fetch for one in bundle["images"]
        )
        assert f'skopeo copy "$@" oci:built/0 docker://{name}\n' in (site / "push.sh").read_text()

    def test_model_without_files_is_refused(self, tmp_path: Path) -> None:
        model = {"task": "embed", "params_b": 0.11, "format": "onnx"}
        described = {"model": model, "workload": {"users": 20, "task": "embed"}, "engine": "onnxruntime"}
        answer = invoke(
            "bundle", "-f", str(write_intent(tmp_path, described)), "--for", "kubernetes", "-o", str(tmp_path / "site")
        )
        assert answer.code == 1 and "are not on this machine" in answer.err

    def test_services_with_the_same_files_share_a_folder(self, tmp_path: Path) -> None:
        services = [{"name": name, "model": HUB_MODEL} for name in ("one", "two")]
        site, bundle = make_bundle(tmp_path, write_intent(tmp_path, *services))
        assert [one["service"] for one in bundle["models"]] == ["one", "two"]
        assert len({one["folder"] for one in bundle["models"]}) == 1
        assert (site / "fetch.sh").read_text().count("hf download") == 1
        assert (site / "apply.sh").read_text().count("\ncopy_model ") == 2

    def test_local_file_is_copied_under_its_name_on_the_volume(self, tmp_path: Path) -> None:
        file = write(tmp_path / "my model.gguf")
        intent = write_intent(tmp_path, {"model": str(file), "engine": "llama.cpp", "name": "chat"})
        site, bundle = make_bundle(tmp_path, intent)
        (model,) = bundle["models"]
        assert model["path"] == "/models" and model["marker"] == "/models/my-model.gguf.copied"
        assert (site / model["folder"] / "my-model.gguf").read_bytes() == file.read_bytes()


KUBECTL = """#!/bin/sh
# One Job that is not complete, with one pod whose commands run here, on a folder.
case "$1 $2" in
    "get pod") echo pod/one ;;
    exec*) shift 8; for word; do shift; set -- "$@" "$(echo "$word" | sed "s|/models|$VOLUME|")"; done; exec "$@" ;;
esac
"""


class TestFetch:
    def test_downloads_the_pinned_files_from_the_hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The real `hf`; tests/image runs the copies of images with the real skopeo."""
        for hub in serve_hub(Hub(files={"config.json": b"{}", "model.safetensors": b"weights"}, name=HUB_MODEL)):
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            site, bundle = make_bundle(tmp_path, write_intent(tmp_path, {"model": HUB_MODEL}))
            (model,) = bundle["models"]
            assert model["revision"] == HUB_COMMIT
            programs = tmp_path / "bin"
            programs.mkdir()
            (programs / "skopeo").write_text("#!/bin/sh\nmkdir -p images && touch images/index.json\n")
            (programs / "skopeo").chmod(0o755)
            path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
            env = {**os.environ, "PATH": path, "HF_TOKEN": "", "NO_PROXY": "127.0.0.1"}
            done = subprocess.run([str(site / "fetch.sh")], env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert {one.name for one in (site / model["folder"]).iterdir()} == {"config.json", "model.safetensors"}
            assert f"  {model['folder']}/model.safetensors\n" in (site / "FETCHED.SHA256SUMS").read_text()
            assert invoke("bundle", "--check", str(site)).code == 0


class TestApply:
    """tests/cluster runs the script with a real API server."""

    def run_script(self, folder: Path, *, change: str | None = None) -> tuple[int, str, Path]:
        site, bundle = make_bundle(folder, write_intent(folder, {"model": str(TINY), "name": "chat"}))
        (model,) = bundle["models"]
        if change is not None:
            (site / model["folder"] / "config.json").write_text(change)
        volume, programs = folder / "volume", folder / "bin"
        for path in (volume, programs):
            path.mkdir()
        (programs / "kubectl").write_text(KUBECTL)
        (programs / "kubectl").chmod(0o755)
        env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "VOLUME": str(volume)}
        done = subprocess.run([str(site / "apply.sh")], env=env, capture_output=True, text=True)
        return done.returncode, done.stderr, volume

    def test_copies_the_files_and_creates_the_marker(self, tmp_path: Path) -> None:
        code, err, volume = self.run_script(tmp_path)
        assert code == 0, err
        assert {path.name for path in (volume / "llama").iterdir()} == {path.name for path in TINY.iterdir()}
        assert (volume / "llama.copied").exists()

    def test_changed_file_is_found_in_the_pod(self, tmp_path: Path) -> None:
        code, err, volume = self.run_script(tmp_path, change="{}")
        assert code != 0 and "1 computed checksum did NOT match" in err
        assert not (volume / "llama.copied").exists()


class TestCheck:
    @pytest.fixture
    def site(self, tmp_path: Path) -> Path:
        return make_bundle(tmp_path, write_intent(tmp_path, {"model": HUB_MODEL}))[0]

    def test_fetched_files_are_accepted_and_others_are_not(self, site: Path) -> None:
        folder = json.loads((site / "bedplate-bundle.json").read_text())["models"][0]["folder"]
        for name in ("images/index.json", f"{folder}/model.safetensors", "FETCHED.SHA256SUMS"):
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).write_text("")
        assert invoke("bundle", "--check", str(site)).code == 0
        (site / "platform" / "more.yaml").write_text("")
        answer = invoke("bundle", "--check", str(site))
        assert answer.code == 3 and "platform/more.yaml is not in the manifest" in answer.err

    def test_changed_script_is_found(self, site: Path) -> None:
        with (site / "push.sh").open("a") as file:
            file.write("true\n")
        answer = invoke("bundle", "--check", str(site))
        assert answer.code == 3 and "push.sh has" in answer.err

    def test_archive_is_checked_and_not_served(self, tmp_path: Path) -> None:
        path = tmp_path / "site.tar"
        intent = str(write_intent(tmp_path, {"model": HUB_MODEL}))
        assert invoke("bundle", "-f", intent, "--for", "kubernetes", "-o", str(path)).code == 0
        assert invoke("bundle", "--check", str(path)).code == 0
        answer = invoke("serve", "--bundle", str(path))
        assert answer.code == 1 and "is for a cluster" in answer.err and "apply.sh" in answer.err

    @pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "platform/../../outside"])
    def test_manifest_that_names_other_files_is_refused(self, path: str, site: Path) -> None:
        manifest = json.loads((site / "bedplate-bundle.json").read_text())
        manifest["files"][0]["path"] = path
        (site / "bedplate-bundle.json").write_text(json.dumps(manifest))
        answer = invoke("bundle", "--check", str(site))
        assert answer.code == 3 and "is not safe to open" in answer.err


@pytest.mark.parametrize(
    ("deploy", "options", "words"),
    [
        ({"mirror": None}, [], "deploy.mirror in the intent"),
        ({}, ["--base", "x.tar"], "the intent has no gateway"),
        ({"endpoint": True}, ["--base", "x.tar"], "x.tar does not exist"),
        ({}, ["--python", "3.12"], "--python needs --for with a machine"),
        ({}, ["--engine", "vllm"], "--engine needs a single model"),
    ],
)
def test_reports_usage_errors(deploy: dict[str, Any], options: list[str], words: str, tmp_path: Path) -> None:
    intent = write_intent(tmp_path, {"model": HUB_MODEL}, **deploy)
    answer = invoke("bundle", "-f", str(intent), "--for", "kubernetes", "-o", str(tmp_path / "site"), *options)
    assert answer.code == 2 and words in answer.err
    assert [one for one in tmp_path.iterdir() if "site" in one.name] == []


def test_base_needs_a_cluster() -> None:
    answer = invoke("bundle", "--base", "x.tar")
    assert answer.code == 2 and "--base needs --for with a cluster" in answer.err


def test_image_has_the_settings_of_the_dockerfile() -> None:
    found = read_instructions((ROOT / "Dockerfile").read_text(encoding="utf-8"))
    last = found[max(index for index, (name, _) in enumerate(found) if name == "FROM") :]
    settings = {name: rest for name, rest in last if name != "ENV"}
    assert CONFIG["Env"] == [rest for name, rest in last if name == "ENV"]
    assert CONFIG["User"] == settings["USER"] and CONFIG["WorkingDir"] == settings["WORKDIR"]
    assert CONFIG["Entrypoint"] == json.loads(settings["ENTRYPOINT"]) and CONFIG["Cmd"] == json.loads(settings["CMD"])
    assert list(CONFIG["Volumes"]) == [settings["VOLUME"]] and list(CONFIG["ExposedPorts"]) == [
        f"{settings['EXPOSE']}/tcp"
    ]
