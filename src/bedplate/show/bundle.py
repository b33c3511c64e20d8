"""The pages of `bundle`: contents, requirements, and the command that starts it."""

from __future__ import annotations

from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from bedplate.show.decision import page
from bedplate.values.bundle import TOP, Bundle, Packed
from bedplate.values.units import size


def render_packed(packed: Packed) -> RenderableType:
    path = Path(packed.path)
    command = f"tar xf {path.name} && ./{TOP}/serve" if path.suffix == ".tar" else f"{path}/serve"
    if packed.bundle.image is not None:
        command = "docker load, then docker compose up; see README.txt in the bundle"
    rows = [
        ("Bundle", packed.path, size(packed.size_bytes)),
        *_contents(packed.bundle),
        ("Start", command, ""),
    ]
    if packed.bundle.image is None:
        rows.append(("", f"or: bedplate serve --bundle {path.name}", ""))
    return _page(rows)


def render_checked(path: Path, bundle: Bundle) -> RenderableType:
    count = sum(file.link is None for file in bundle.files)
    return _page([("Intact", f"{path}: {count} files, unchanged since {bundle.made_at}", ""), *_contents(bundle)])


def _page(rows: list[tuple[str, str, str]]) -> RenderableType:
    table = page()
    for label, text, aside in rows:
        table.add_row(Text(label, style="bold"), Text(text), Text(aside, style="dim"))
    return table


def _contents(bundle: Bundle) -> list[tuple[str, str, str]]:
    plan, site = bundle.plan, bundle.site
    source = plan.source or plan.model
    wheels = [file for file in bundle.files if file.path.startswith("wheels/")]
    engine = f"{plan.engine} {plan.engine_version}, {_packages(bundle.packages)}"
    if bundle.image is not None:
        engine = f"{plan.engine} from the image {bundle.image}, which is not in the bundle"
    needs = f"Python {site.python} on {site.platform}" + (f", glibc {site.glibc} or newer" if site.glibc else "")
    return [
        ("Model", f"{source.name} · {source.quantization or source.format}", size(source.weight_bytes)),
        ("Engine", engine, plan.settings.device),
        (
            "bedplate",
            f"{bundle.bedplate}, {_packages(bundle.own_packages)}",
            f"{size(sum(file.size_bytes for file in wheels))} of packages",
        ),
        ("Needs", needs, ""),
    ]


def _packages(pins: tuple[str, ...]) -> str:
    return f"{len(pins)} package{'s' if len(pins) != 1 else ''}"
