"""The README.txt and the start script in a bundle."""

from __future__ import annotations

from bedplate.values.bundle import MANIFEST, Bundle, TargetBundle
from bedplate.values.quoting import escape_controls, quote_posix_shell
from bedplate.values.units import format_size

_README = """bedplate bundle: {model}, with {engine}

Made {made_at} by bedplate {version}. The bundle needs no network.

Requirements
  {needs}
  {disk} of disk space for the installed packages, in addition to this folder

Check the copy
  sha256sum --check --quiet SHA256SUMS

{start}
Contents
  model/                     {weights}
  wheels/                    {wheels} packages{of_engine}, bedplate and its dependencies
  plan.json, decision.json   the decision for {machine} and its reasons
  {manifest}       every file with its size and sha256
"""

_SERVE = """Serve
  ./serve                    installs bedplate from this folder once, then serves at http://127.0.0.1:8080/v1
  ./serve --port 9000 -d     accepts all options of `bedplate serve`

or, in your own Python environment
  pip install --no-index --find-links wheels bedplate=={version}
  bedplate serve --bundle .
"""

_IMAGE = """Serve
  {engine} runs from a container image, which is not included. On a machine with network access:
      docker pull {image}
      docker save {image} -o image.tar
  At the site:
      docker load -i image.tar
      docker compose -f compose/compose.yaml up
  The model's files are in model/; compose/compose.yaml has the path where the engine expects them.
"""

_SCRIPT = """#!/bin/sh
# Installs bedplate from this folder once, then serves the bundle. It needs no network.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
kept=${{BEDPLATE_HOME:-${{XDG_CACHE_HOME:-$HOME/.cache}}/bedplate}}/bundles
env=$kept/bedplate-{version}-{pins_id}
if [ ! -x "$env/bin/bedplate" ]; then
    python=
    for one in ${{UV_PYTHON:-}} python{python} python3 python; do
        if command -v "$one" >/dev/null 2>&1 &&
            "$one" -c 'import sys, sysconfig as s
sys.exit(sys.version_info[:2] != {python_tuple} or s.get_platform() != "{platform}")' 2>/dev/null; then
            python=$(command -v "$one")
            break
        fi
    done
    if [ -z "$python" ]; then
        echo "error: this bundle needs Python {python} on {platform}, which is not on the PATH" >&2
        echo "hint: install it, or name its path: UV_PYTHON=/path/to/python{python} $0" >&2
        exit 1
    fi
    mkdir -p "$kept"
    making=$(mktemp -d "$kept/.making-XXXXXX")
    trap 'rm -rf "$making"' EXIT
    echo " installing bedplate {version} to $env" >&2
    "$python" -m zipfile -e "$here"/{uv} "$making/tool"
    uv=$(echo "$making"/tool/uv-*.data/scripts/uv)
    chmod +x "$uv"
    "$uv" --quiet --offline --no-config venv --relocatable --python "$python" "$making/env"
    "$uv" --quiet --offline --no-config pip install --python "$making/env/bin/python" --no-deps --no-index \\
        --find-links "$here/wheels" --require-hashes --requirement "$here/{pins}"
    rm -rf "$env"
    mv "$making/env" "$env"
    rm -rf "$making"
    trap - EXIT
fi
exec "$env/bin/python" -I -m bedplate serve --bundle "$here" "$@"
"""

_TARGET = """bedplate bundle for {target}: {what}

Made {made_at} by bedplate {version}. Installing it needs no network.

The target machine needs
  {needs}
  {disk} of disk space

Copy all files of this folder to one folder on the target. Then run
  python3 install.py --check     reports everything that is missing and unpacks nothing
  python3 install.py             installs to BEDPLATE_HOME (~/.cache/bedplate) and prints the serve command
{over}
Files
  install.py                     the installer; needs only Python
  {manifest}           the manifest: pieces with size and sha256, packages, requirements
  piece.000 ...                  {pieces} piece{s}, {packed} in total: a tar archive compressed with zstd
  zstandard.zip                  the decompressor
"""


def list_target_needs(bundle: TargetBundle) -> list[str]:
    """List what the target machine must have before the bundle is installed."""
    target = bundle.target
    needs = [f"Python {target.python} on {target.system}-{target.machine}"]
    if target.glibc is not None:
        needs.append(f"glibc {target.glibc} or newer")
    if target.cuda is not None:
        needs.append(f"an NVIDIA GPU with driver {target.driver} or newer (CUDA {target.cuda})")
    if target.capability is not None:
        needs.append(f"a GPU with compute capability {target.capability}: code for other GPUs is not included")
    needs += sorted(
        {
            f"PyTorch {one.torch} for CUDA {target.cuda} in that Python"
            for one in bundle.engines
            if one.torch is not None
        }
    )
    return needs


def write_target_readme(bundle: TargetBundle) -> str:
    what = [f"{one.name} {one.version}" for one in bundle.engines]
    what += [bundle.model] if bundle.model is not None else []
    what += [f"bedplate {bundle.bedplate}"] if bundle.own_place is not None else []
    over = "Run it with the Python that has PyTorch, such as /opt/venv/bin/python3 install.py.\n"
    return _TARGET.format(
        target=bundle.target.name,
        what=escape_controls(", ".join(what)),
        made_at=bundle.made_at,
        version=bundle.bedplate,
        needs="\n  ".join(list_target_needs(bundle)),
        disk=format_size(bundle.unpacked_bytes),
        over=over if any(one.torch is not None for one in bundle.engines) else "",
        manifest=MANIFEST,
        pieces=len(bundle.pieces),
        s="s" if len(bundle.pieces) != 1 else "",
        packed=format_size(bundle.size_bytes),
    )


def write_readme(bundle: Bundle) -> str:
    site, plan = bundle.site, bundle.plan
    source = plan.source or plan.model
    needs = [f"Python {site.python} on {site.platform}"]
    if site.glibc is not None:
        needs.append(f"glibc {site.glibc} or newer")
    if bundle.image is not None:
        needs.append(f"the image {bundle.image}")
    packages = {*bundle.packages, *bundle.own_packages}
    start = (_SERVE if bundle.image is None else _IMAGE).format(
        version=bundle.bedplate, engine=plan.engine, image=bundle.image
    )
    disk = sum(file.size_bytes for file in bundle.files if file.path.startswith("wheels/"))
    return _README.format(
        model=escape_controls(source.name),
        engine=f"{plan.engine} {plan.engine_version}",
        made_at=bundle.made_at,
        version=bundle.bedplate,
        needs="\n  ".join(needs),
        disk=f"about {format_size(4 * disk)}",
        start=start,
        weights=f"{escape_controls(source.quantization or source.format)}, {format_size(source.weight_bytes)}",
        wheels=len(packages),
        of_engine=f": {plan.engine}" if bundle.packages else ": none of the engine",
        machine=bundle.hardware.cpu.name
        if not bundle.hardware.accelerators
        else f"{len(bundle.hardware.accelerators)} × {bundle.hardware.accelerators[0].name}",
        manifest=MANIFEST,
    )


def write_serve_script(bundle: Bundle, pins: str, pins_id: str, uv: str) -> str:
    """Write the start script in POSIX shell, because the site may have no uv: the script unpacks it from its wheel.

    `pins_id` identifies the set of packages; each set has its own environment.
    """
    return _SCRIPT.format(
        version=bundle.bedplate,
        python=bundle.site.python,
        python_tuple=tuple(int(part) for part in bundle.site.python.split(".")),
        platform=bundle.site.platform,
        uv=quote_posix_shell(uv),
        pins=pins,
        pins_id=pins_id,
    )
