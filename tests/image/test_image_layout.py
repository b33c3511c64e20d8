"""The image that a bundle for a cluster contains, read by other programs: skopeo, umoci and a registry of Debian."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.bundling.test_oci import build, store, write_base, write_tree
from tests.commands import run
from tests.conftest import wait_for
from tests.image.root_filesystem import BuildStage, explain_absence, install_base

from bedplate.bundling.oci import read_base
from bedplate.run.supervisor import find_free_port

pytestmark = pytest.mark.nightly
PAGE = Path(__file__).parents[2] / "docs" / "platform.md"
INTENT: dict[str, Any] = {
    "hardware": {"cpu": "Ampere Altra", "cores": 32, "ram_gb": 128, "arch": platform.machine()},
    "services": [{"name": "chat", "model": "builtin", "engine": "llama.cpp", "workload": {"concurrency": 4}}],
    "deploy": {"endpoint": True, "namespace": "serving"},
}
GATEWAY = """
import json, pathlib, subprocess, sys, urllib.request
pathlib.Path("/tmp/gateway.yaml").write_text('services: [{url: "http://127.0.0.1:9/v1", model: a}]')
words = ["bedplate", "serve", "--file", "/tmp/gateway.yaml", "--port", "0", "--json"]
gateway = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
text = ""
for line in gateway.stdout:
    text += line
    if text.count("{") == text.count("}"):
        break
with urllib.request.urlopen(json.loads(text)["url"] + "/models") as answer:
    print(json.load(answer)["data"][0]["id"])
gateway.terminate()
sys.exit(gateway.wait())
"""


class Site(NamedTuple):
    folder: Path
    image: dict[str, Any]
    images: list[dict[str, str]]
    registry: str


def skip_without(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed here (Debian: apt-get install {program})")


def make_site(folder: Path, base: Path, registry: str) -> Site:
    intent = folder / "intent.yaml"
    intent.write_text(json.dumps({**INTENT, "deploy": {**INTENT["deploy"], "mirror": f"{registry}/mirror"}}))
    words = ("bundle", "-f", str(intent), "--for", "kubernetes", "--base", str(base), "-o", str(folder / "site"))
    answer = run(*words, "--json")
    assert answer.code == 0, answer.err
    bundle = json.loads(answer.out)["bundle"]
    return Site(folder / "site", bundle["own_image"], bundle["images"], registry)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (reason := explain_absence()) is not None:
        pytest.skip(reason)
    path = tmp_path_factory.mktemp("base") / "base.tar"
    install_base(path, ("python3", "ca-certificates"))
    return path


@pytest.fixture(scope="module")
def site(base: Path, tmp_path_factory: pytest.TempPathFactory, bedplate_home: Path) -> Site:
    return make_site(tmp_path_factory.mktemp("site"), base, f"127.0.0.1:{find_free_port()}")


def test_the_same_base_gives_the_same_digest(site: Site, base: Path, tmp_path: Path) -> None:
    assert make_site(tmp_path, base, site.registry).image["digest"] == site.image["digest"]


def test_skopeo_reads_the_layout(site: Site, tmp_path: Path) -> None:
    skip_without("skopeo")
    layout = f"oci:{site.folder / 'bedplate'}:{site.image['name'].rpartition(':')[2]}"
    done = subprocess.run(["skopeo", "inspect", layout], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["Digest"] == f"sha256:{site.image['digest']}" and shown["Architecture"] == site.image["architecture"]
    copy = ["skopeo", "--insecure-policy", "copy", layout, f"dir:{tmp_path / 'copy'}"]
    assert subprocess.run(copy, capture_output=True).returncode == 0


def test_unpacked_image_runs_the_gateway_on_a_read_only_root(site: Site, tmp_path: Path) -> None:
    skip_without("umoci")
    tag = site.image["name"].rpartition(":")[2]
    subprocess.run(
        ["umoci", "unpack", "--image", f"{site.folder / 'bedplate'}:{tag}", str(tmp_path / "out")], check=True
    )
    ran = json.loads((tmp_path / "out" / "config.json").read_text())["process"]
    env = dict(one.split("=", 1) for one in ran["env"])
    user = f"{ran['user']['uid']}:{ran['user']['gid']}"
    stage = BuildStage(tmp_path / "out" / "rootfs", env, user, ran["cwd"], ran["args"][:1], ran["args"][1:])
    assert user == "1000:1000" and ran["args"] == ["bedplate", "--help"] and ran["cwd"] == "/state"
    assert stage.run([*stage.entrypoint, "--version"], read_only=True).stdout.startswith("bedplate ")
    python = "/opt/bedplate/bin/python"
    driver = stage.run([python, "-c", "import psycopg; print(psycopg.pq.__impl__)"], read_only=True)
    assert driver.stdout == "binary\n", driver.stderr
    served = stage.run([python, "-c", GATEWAY], read_only=True)
    assert (served.returncode, served.stdout) == (0, "a\n"), served.stderr


@contextmanager
def start_registry(folder: Path, address: str, hosts: Collection[str]) -> Iterator[dict[str, str]]:
    """A registry, and variables with which skopeo uses it in place of these hosts."""
    skip_without("docker-registry", "skopeo")
    config = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(folder / "registry")}},
        "http": {"addr": address},
    }
    (folder / "registry.yml").write_text(json.dumps(config))
    containers = folder / ".config" / "containers"
    containers.mkdir(parents=True)
    (containers / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    lines = [f'[[registry]]\nprefix = "{name}"\nlocation = "{address}/{name}"\ninsecure = true\n' for name in hosts]
    (containers / "registries.conf").write_text("\n".join(lines))
    with (folder / "registry.log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", str(folder / "registry.yml")], stdout=log, stderr=log)
    try:
        env = {**os.environ, "HOME": str(folder)}
        wait_for(lambda: b"listening on" in (folder / "registry.log").read_bytes(), "the registry to listen")
        yield env
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def registry(site: Site, tmp_path: Path) -> Iterator[dict[str, str]]:
    others = {one["source"].partition("/")[0] for one in site.images}
    with start_registry(tmp_path, site.registry, others) as env:
        yield env


def test_layout_that_skopeo_copies_is_a_base(tmp_path: Path) -> None:
    """The command of docs/platform.md, with a registry here in place of Docker Hub."""
    (command,) = (line[2:] for line in PAGE.read_text().splitlines() if line.startswith("$ skopeo ") and "oci:" in line
                  and "docker://" in line)  # fmt: skip
    source = re.findall(r"docker://(\S+)", command)[0]
    archive = write_base(tmp_path / "base.tar.gz", "local/bin/python3.12")
    layout = tmp_path / "layout"
    layout.mkdir()
    store(build(tmp_path / "built", archive, write_tree(tmp_path / "tree")), layout)
    address = f"127.0.0.1:{find_free_port()}"
    with start_registry(tmp_path, address, ["docker.io"]) as env:
        push = ["skopeo", "copy", "--dest-tls-verify=false", f"oci:{layout}:1.0", f"docker://{address}/{source}"]
        for words in (push, shlex.split(command)):
            done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
    found = read_base(tmp_path / "python", tmp_path)
    assert (found.architecture, found.python, len(found.layers)) == ("amd64", "3.12", 2)


def test_scripts_carry_all_images_to_the_mirror(site: Site, registry: dict[str, str]) -> None:
    """The images of others are stand-ins: this one, under their names."""

    def skopeo(*words: str) -> str:
        done = subprocess.run(["skopeo", *words], capture_output=True, text=True, env=registry)
        assert done.returncode == 0, done.stderr
        return done.stdout

    layout = f"oci:{site.folder / 'bedplate'}:{site.image['name'].rpartition(':')[2]}"
    for one in site.images:
        skopeo("copy", "--dest-tls-verify=false", layout, f"docker://{site.registry}/{one['source']}")
    for script, options in (("fetch.sh", []), ("push.sh", ["--dest-tls-verify=false"])):
        for _ in range(2):
            done = subprocess.run([str(site.folder / script), *options], capture_output=True, text=True, env=registry)
            assert done.returncode == 0, done.stderr
    for name in (site.image["name"], *(one["target"] for one in site.images)):
        shown = json.loads(skopeo("inspect", "--tls-verify=false", f"docker://{name}"))
        assert shown["Digest"] == f"sha256:{site.image['digest']}", name
    assert run("bundle", "--check", str(site.folder)).code == 0
    sums = ["sha256sum", "--check", "--quiet", "SHA256SUMS", "FETCHED.SHA256SUMS"]
    assert subprocess.run(sums, cwd=site.folder, capture_output=True).returncode == 0
