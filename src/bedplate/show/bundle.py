"""A bundle on the terminal: what is in it, what it needs, and what to do with it."""

from __future__ import annotations

from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from bedplate.show.decision import page
from bedplate.values.bundle import TOP, Bundle, Packed, PackedForTarget, TargetBundle
from bedplate.values.units import size


def render_packed(packed: Packed) -> RenderableType:
    path = Path(packed.path)
    started = f"tar xf {path.name} && ./{TOP}/serve" if path.suffix == ".tar" else f"{path}/serve"
    if packed.bundle.image is not None:
        started = "docker load, then docker compose up: README.txt in it says how"
    rows = [
        ("Bundle", packed.path, size(packed.size_bytes)),
        *_inside(packed.bundle),
        ("There", started, ""),
    ]
    if packed.bundle.image is None:
        rows.append(("", f"or: bedplate serve --bundle {path.name}", ""))
    return _page(rows)


def render_packed_for_target(packed: PackedForTarget) -> RenderableType:
    bundle = packed.bundle
    rows = [("Bundle", packed.path, f"{size(packed.size_bytes)} in {_count(len(bundle.pieces), 'piece')}")]
    return _page([*rows, *_inside_for_target(bundle), ("There", f"python3 {Path(packed.path).name}/install.py", "")])


def _inside_for_target(bundle: TargetBundle) -> list[tuple[str, str, str]]:
    target = bundle.target
    rows = []
    for one in bundle.engines:
        kind = f"over PyTorch {one.torch}" if one.torch is not None else "complete"
        rows.append(("Engine", f"{one.name} {one.version}, {_packages(one.packages)}", kind))
    if bundle.model is not None:
        rows.append(("Model", bundle.model, ""))
    if bundle.own_place is not None:
        rows.append(("bedplate", f"{bundle.bedplate}, {_packages(bundle.own_packages)}", ""))
    needs = [f"Python {target.python} on {target.system}-{target.machine}"]
    needs += [f"glibc {target.glibc} or newer"] if target.glibc is not None else []
    needs += [f"driver {target.driver} or newer"] if target.driver is not None else []
    needs += [f"compute capability {target.capability}"] if target.capability is not None else []
    return [*rows, ("Needs", ", ".join(needs), f"{size(bundle.unpacked_bytes)} of disk")]


def render_checked(path: Path, bundle: Bundle | TargetBundle) -> RenderableType:
    if isinstance(bundle, TargetBundle):
        text = f"{path}: {_count(len(bundle.pieces), 'piece')} as made {bundle.made_at}"
        return _page([("Whole", text, size(bundle.size_bytes)), *_inside_for_target(bundle)])
    count = sum(file.link is None for file in bundle.files)
    return _page([("Whole", f"{path}: {count} files as they were packed {bundle.made_at}", ""), *_inside(bundle)])


def _page(rows: list[tuple[str, str, str]]) -> RenderableType:
    table = page()
    for label, text, aside in rows:
        table.add_row(Text(label, style="bold"), Text(text), Text(aside, style="dim"))
    return table


def _inside(bundle: Bundle) -> list[tuple[str, str, str]]:
    plan, site = bundle.plan, bundle.site
    source = plan.source or plan.model
    wheels = [file for file in bundle.files if file.path.startswith("wheels/")]
    engine = f"{plan.engine} {plan.engine_version}, {_packages(bundle.packages)}"
    if bundle.image is not None:
        engine = f"{plan.engine} by the image {bundle.image}, which is not in it"
    needs = f"Python {site.python} on {site.platform}" + (f", glibc {site.glibc} or newer" if site.glibc else "")
    return [
        ("Model", f"{source.name} · {source.quantization or source.format}", size(source.weight_bytes)),
        ("Engine", engine, plan.settings.device),
        (
            "bedplate",
            f"{bundle.bedplate}, {_packages(bundle.own_packages)}",
            f"{size(sum(file.size_bytes for file in wheels))} of packages in all",
        ),
        ("Needs", needs, ""),
    ]


def _packages(pins: tuple[str, ...]) -> str:
    return _count(len(pins), "package")


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number != 1 else ''}"
