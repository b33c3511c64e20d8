"""The pages of `bundle`: contents, requirements, and the command that starts it."""

from __future__ import annotations

from pathlib import Path

from rich.console import RenderableType

from bedplate.show.columns import SourcedTable
from bedplate.values.bundle import (
    TOP,
    Bundle,
    ClusterBundle,
    PackedBundle,
    PackedForCluster,
    PackedForTarget,
    TargetBundle,
)
from bedplate.values.units import format_size


def render_packed(packed: PackedBundle) -> RenderableType:
    path = Path(packed.path)
    command = f"tar xf {path.name} && ./{TOP}/serve" if path.suffix == ".tar" else f"{path}/serve"
    if packed.bundle.image is not None:
        command = "docker load, then docker compose up; see README.txt in the bundle"
    rows = [
        ("Bundle", packed.path, format_size(packed.size_bytes)),
        *_list_contents(packed.bundle),
        ("Start", command, ""),
    ]
    if packed.bundle.image is None:
        rows.append(("", f"or: bedplate serve --bundle {path.name}", ""))
    return _make_page([*rows, *_list_hash(packed.manifest_sha256)])


def render_packed_for_target(packed: PackedForTarget) -> RenderableType:
    bundle = packed.bundle
    rows = [
        ("Bundle", packed.path, f"{format_size(packed.size_bytes)} in {_format_count(len(bundle.pieces), 'piece')}")
    ]
    rows += [*_list_target_contents(bundle), ("Start", f"python3 {Path(packed.path).name}/install.py", "")]
    return _make_page([*rows, *_list_hash(packed.manifest_sha256)])


def render_packed_for_cluster(packed: PackedForCluster) -> RenderableType:
    rows = [("Bundle", packed.path, format_size(packed.size_bytes)), *_list_cluster_contents(packed.bundle)]
    rows += [("Next", "./fetch.sh with network access; at the site ./push.sh and ./apply.sh", "see README.txt")]
    return _make_page([*rows, *_list_hash(packed.manifest_sha256)])


def _list_cluster_contents(bundle: ClusterBundle) -> list[tuple[str, str, str]]:
    own = bundle.own_image
    rows = []
    if own is not None:
        what = f"{own.name}, Python {own.python}, {own.architecture}, {_describe_packages(own.packages)}"
        rows += [("Image", what, format_size(own.size_bytes)), ("", f"sha256:{own.digest}", "")]
    others = [*(one.source for one in bundle.images), *bundle.built]
    rows += [("Images" if not number else "", name, "not in the bundle") for number, name in enumerate(others)]
    for number, one in enumerate({one.folder: one for one in bundle.models}.values()):
        size = format_size(one.size_bytes) if one.size_bytes is not None else "not in the bundle"
        revision = f" at {one.revision[:12]}" if one.revision is not None else ""
        rows.append(("Models" if not number else "", f"{one.name}{revision}", size))
    return rows


def _list_hash(sha256: str | None) -> list[tuple[str, str, str]]:
    return [("Verify", f"--manifest-sha256 {sha256}", "")] if sha256 is not None else []


def _list_target_contents(bundle: TargetBundle) -> list[tuple[str, str, str]]:
    target = bundle.target
    rows = []
    for one in bundle.engines:
        kind = f"over PyTorch {one.torch}" if one.torch is not None else "complete"
        rows.append(("Engine", f"{one.name} {one.version}, {_describe_packages(one.packages)}", kind))
    if bundle.model is not None:
        rows.append(("Model", bundle.model, ""))
    if bundle.own_place is not None:
        rows.append(("bedplate", f"{bundle.bedplate}, {_describe_packages(bundle.own_packages)}", ""))
    needs = [f"Python {target.python} on {target.system}-{target.machine}"]
    needs += [f"glibc {target.glibc} or newer"] if target.glibc is not None else []
    needs += [f"driver {target.driver} or newer"] if target.driver is not None else []
    needs += [f"compute capability {target.capability}"] if target.capability is not None else []
    return [*rows, ("Needs", ", ".join(needs), f"{format_size(bundle.unpacked_bytes)} of disk")]


def render_checked(path: Path, bundle: Bundle | TargetBundle | ClusterBundle, by_hash: bool) -> RenderableType:
    """Show the result of the check; without a given hash, whoever changed a file may have changed the manifest too."""
    origin = [] if by_hash else [("Origin", "not verified: --manifest-sha256 HASH compares the manifest itself", "")]
    if isinstance(bundle, TargetBundle):
        text = f"{path}: {_format_count(len(bundle.pieces), 'piece')} unchanged since {bundle.made_at}"
        intact = ("Intact", text, format_size(bundle.size_bytes))
        return _make_page([intact, *origin, *_list_target_contents(bundle)])
    count = sum(file.link is None for file in bundle.files)
    intact = ("Intact", f"{path}: {count} files, unchanged since {bundle.made_at}", "")
    contents = _list_cluster_contents(bundle) if isinstance(bundle, ClusterBundle) else _list_contents(bundle)
    return _make_page([intact, *origin, *contents])


def _make_page(rows: list[tuple[str, str, str]]) -> RenderableType:
    table = SourcedTable()
    for label, text, aside in rows:
        table.add_row(label, text, aside)
    return table


def _list_contents(bundle: Bundle) -> list[tuple[str, str, str]]:
    plan, site = bundle.plan, bundle.site
    source = plan.source or plan.model
    wheels = [file for file in bundle.files if file.path.startswith("wheels/")]
    engine = f"{plan.engine} {plan.engine_version}, {_describe_packages(bundle.packages)}"
    if bundle.image is not None:
        engine = f"{plan.engine} from the image {bundle.image}, which is not in the bundle"
    needs = f"Python {site.python} on {site.platform}" + (f", glibc {site.glibc} or newer" if site.glibc else "")
    return [
        ("Model", f"{source.name} · {source.quantization or source.format}", format_size(source.weight_bytes)),
        ("Engine", engine, plan.settings.device),
        (
            "bedplate",
            f"{bundle.bedplate}, {_describe_packages(bundle.own_packages)}",
            f"{format_size(sum(file.size_bytes for file in wheels))} of packages",
        ),
        ("Needs", needs, ""),
    ]


def _describe_packages(pins: tuple[str, ...]) -> str:
    return _format_count(len(pins), "package")


def _format_count(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number != 1 else ''}"
