"""Builds the root file system of the Dockerfile from Debian packages, and runs commands in it as a container would.

    python -m tests.image.root_filesystem FOLDER

The base image (ARG PYTHON) is replaced by Debian's python3, since no base image can be fetched without a registry. All
instructions of the Dockerfile are carried out. What is not covered: the base image itself and its Python version, the
layers, and the builder. Needs root, mmdebstrap, and the right to mount (a mount namespace).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("python3", "python3-venv", "ca-certificates")
PASSED = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "HTTPS_PROXY", "https_proxy")
"""Variables of the package index, which a build gets from its builder; also the certification authorities."""
AUTHORITIES = os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")


def explain_absence() -> str | None:
    """Why the file system cannot be built here; `None`: it can."""
    if os.geteuid() != 0:
        return "building a root file system needs root"
    if shutil.which("mmdebstrap") is None:
        return "mmdebstrap is not installed here (Debian: apt-get install mmdebstrap)"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        return "this machine does not allow mount namespaces"
    return None


@dataclass
class BuildStage:
    """One stage of a Dockerfile and its settings."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    workdir: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def run(self, words: Sequence[str], *, read_only: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a command in the file system; `read_only`: as the container does, with /state and /tmp of its own."""
        mounts = [
            f"mount --bind {shlex.quote(str(self.folder))} {shlex.quote(str(self.folder))}",
            f"mount --rbind /dev {shlex.quote(str(self.folder / 'dev'))}",
            f"mount -t proc proc {shlex.quote(str(self.folder / 'proc'))}",
        ]
        if read_only:
            uid = self.user.partition(":")[0]
            mounts += [
                f"mount -o remount,ro,bind {shlex.quote(str(self.folder))}",
                f"mount -t tmpfs -o mode=1777 tmpfs {shlex.quote(str(self.folder / 'tmp'))}",
                f"mount -t tmpfs -o mode=0700,uid={uid},gid={uid} tmpfs {shlex.quote(str(self.folder / 'state'))}",
            ]
        uid, _, gid = self.user.partition(":")
        inner = ["chroot", str(self.folder), "/usr/bin/env", "-i", "-C", self.workdir]
        inner += [f"{name}={value}" for name, value in self.env.items()]
        drop = [
            "setpriv",
            f"--reuid={uid}",
            f"--regid={gid or uid}",
            "--clear-groups",
            "--no-new-privs",
            "--bounding-set=-all",
        ]
        inner += [*(drop if uid != "0" else []), *words]
        script = " && ".join([*mounts, f"exec {shlex.join(inner)}"])
        return subprocess.run(
            ["unshare", "--mount", "--fork", "--kill-child", "sh", "-c", script], capture_output=True, text=True
        )


def read_instructions(text: str) -> list[tuple[str, str]]:
    lines = re.sub(r"\\\n", " ", text).splitlines()
    found = [line.strip().partition(" ") for line in lines if line.strip() and not line.strip().startswith("#")]
    return [(name.upper(), rest.strip()) for name, _, rest in found]


def install_base(target: Path, packages: Sequence[str]) -> None:
    """Install Debian packages into a folder, or into an archive if the name ends in .tar."""
    words = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(packages)}", "bookworm", str(target)]
    subprocess.run(words, check=True)


def build(folder: Path) -> BuildStage:
    """Carry out the Dockerfile and return its last stage."""
    stages: dict[str, BuildStage] = {}
    base = folder / "base"
    install_base(base, PACKAGES)
    stage = BuildStage(base)
    for name, rest in read_instructions((ROOT / "Dockerfile").read_text(encoding="utf-8")):
        if name == "ARG":
            continue
        if name == "FROM":
            words = rest.split()
            assert words[0] == "${PYTHON}", f"another base image: {words[0]}"
            label = words[2] if len(words) == 3 else f"stage{len(stages)}"
            target = folder / label
            subprocess.run(["cp", "-a", "--reflink=auto", str(base), str(target)], check=True)
            for config in ("/etc/resolv.conf", "/etc/hosts"):
                shutil.copyfile(config, target / config[1:])
            stage = stages[label] = BuildStage(target, {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"})
        elif name == "COPY":
            _copy(rest.split(), stage, stages)
        elif name == "ENV":
            key, _, value = rest.partition("=")
            stage.env[key] = value
        elif name == "RUN":
            builder = {key: os.environ[key] for key in PASSED if key in os.environ}
            authorities = stage.folder / "tmp" / "authorities.crt"
            shutil.copyfile(AUTHORITIES, authorities)
            builder["PIP_CERT"] = "/tmp/authorities.crt"
            made = BuildStage(stage.folder, {**stage.env, **builder}).run(["sh", "-c", rest])
            authorities.unlink()
            assert made.returncode == 0, f"{rest}: {made.stderr}"
        elif name in ("USER", "WORKDIR"):
            setattr(stage, name.lower(), rest)
        elif name in ("ENTRYPOINT", "CMD"):
            setattr(stage, "entrypoint" if name == "ENTRYPOINT" else "command", json.loads(rest))
        else:
            assert name in ("VOLUME", "EXPOSE"), f"unknown instruction {name}"
    return stage


def _copy(words: list[str], stage: BuildStage, stages: dict[str, BuildStage]) -> None:
    source = ROOT
    if words[0].startswith("--from="):
        source = stages[words.pop(0).removeprefix("--from=")].folder
    *names, to = words
    target = stage.folder / to.lstrip("/")
    for name in names:
        found = source / name.lstrip("/")
        if found.is_dir():
            shutil.copytree(
                found, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__") if source is ROOT else None
            )
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(found, target / found.name)


def main() -> int:
    if (reason := explain_absence()) is not None:
        print(reason, file=sys.stderr)
        return 3
    stage = build(Path(sys.argv[1]))
    done = stage.run([*stage.entrypoint, *stage.command], read_only=True)
    print(done.stdout + done.stderr, end="")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
