"""The report: a self-contained page, its text, its charts, and how a real browser shows it."""

from __future__ import annotations

import asyncio
import csv
import html
import io
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.browser import Page as Tab
from tests.browser import open_browser
from tests.runs import MODEL, make_cell, make_run

from bedplate.run.builtin import read_builtin_facts
from bedplate.show import plots
from bedplate.show.report import ReportPage, find_knee, make_report, to_html, to_markdown
from bedplate.values import replace_fields
from bedplate.values.decision import Parallelism
from bedplate.values.run import Flag, Quality, Run

CELLS = [make_cell("llama.cpp", load, rate, 50 * load) for load, rate in ((1, 60), (4, 140), (8, 170), (16, 175))]
CELLS += [make_cell("vllm", load, rate, 40 * load, label="BF16") for load, rate in ((1, 40), (4, 120), (16, 260))]
WRONG = make_cell(
    "mlx", 1, 20, label="4-BIT", quality=Quality(asked=48, agreement=0.11, verdict="broken"),
    flags=(Flag(kind="broken", text="answers disagree with the reference"),),
)  # fmt: skip


def make_report_run() -> Run:
    return make_run([*CELLS, WRONG], engines=["llama.cpp", "vllm", "mlx", "pytorch"])


def make_page(one: Run | None = None) -> ReportPage:
    facts = read_builtin_facts()
    return make_report([one or make_report_run()], {(MODEL, label): facts for label in ("Q4_1", "BF16", "4-BIT")})


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_report_loads_no_external_resource() -> None:
    tags = Tags()
    tags.feed(to_html(make_page()))
    assert not [tag for tag, _ in tags.found if tag in ("link", "img", "iframe", "object")]
    assert not [given for _, given in tags.found if "src" in given or "href" in given]
    assert "url(" not in to_html(make_page()) and "@import" not in to_html(make_page())


def test_the_report_gives_reasons_and_shows_every_row() -> None:
    text = to_html(make_page())
    assert "Deploy vLLM BF16." in text and "1.49 times" in text
    assert "answers disagree with the reference" in text
    assert make_page().rows[-1].cells == ("pytorch", *["TBD"] * 14)
    chosen = [row.cells[0] for row in make_page().rows if row.chosen and row.first]
    assert chosen == ["vllm"]
    assert len(make_page().plots) == 6


def test_key_figures_are_those_of_the_recommended_engine() -> None:
    page = make_page()
    assert page.tiles_of.startswith("vLLM BF16, ") and "16" in page.tiles_of
    tiles = {tile.name: (tile.value, tile.unit, tile.note) for tile in page.tiles}
    assert tiles["Output"][:2] == ("260", "tok/s") and tiles["Output"][2].startswith("95 %: ")
    assert tiles["Requests"] == ("60", "", "0 failed") and tiles["Peak memory"][0] == "0.40"
    assert make_report([make_run([], engines=["vllm"])]).tiles == ()


def test_each_row_has_its_requests_and_errors() -> None:
    cell = make_cell("llama.cpp", 4, 60)
    lost = replace_fields(cell.repeats[0].samples[0], outcome="failed", ttft_ms=None)
    repeat = replace_fields(cell.repeats[0], samples=(lost, *cell.repeats[0].samples[1:]))
    page = make_report([make_run([replace_fields(cell, repeats=(repeat, *cell.repeats[1:]))])])
    names = [column.name for column in page.columns]
    (row,) = page.rows
    assert [row.cells[names.index(name)] for name in ("requests", "errors")] == ["60", "1"]


def test_the_data_are_in_the_file_as_csv() -> None:
    rows = list(csv.DictReader(io.StringIO(make_page().csv)))
    assert len(rows) == len(CELLS) + 1 and {row["engine"] for row in rows} == {"llama.cpp", "vllm", "mlx"}
    assert html.escape(make_page().csv.splitlines()[1]) in to_html(make_page()).replace("&#34;", "&quot;")


def test_throughput_per_gpu_counts_the_gpus() -> None:
    cell = make_cell("vllm", 16, 400, label="BF16")
    subject = replace_fields(cell.subject, device="cuda", parallelism=Parallelism(tensor=2, data=2))
    (plot,) = [
        one for one in make_report([make_run([replace_fields(cell, subject=subject)])]).plots if "per GPU" in one.title
    ]
    assert "25 tok/s per user, 100 tok/s per GPU" in plot.drawings[0]


def test_warnings_are_a_banner_above_the_recommendation() -> None:
    busy = Flag(kind="busy", text="other processes used 14% of the CPU")
    mixed = Flag(kind="mixed", text="Q4_1 weights, but vllm BF16")
    cells = [make_cell("llama.cpp", load, 60, flags=(busy, mixed)) for load in (1, 4)]
    page = make_report([make_run(cells)])
    assert page.warnings == ("llama.cpp Q4_1 with 1, 4 in flight: other processes used 14% of the CPU",)
    assert page.flags == ("llama.cpp Q4_1 with 1, 4 in flight: Q4_1 weights, but vllm BF16",)
    text, markdown = to_html(page), to_markdown(page)
    assert text.index('class="warnings"') < text.index(busy.text) < text.index("<h1>")
    assert markdown.startswith("> **Warning:** llama.cpp") and markdown.index("# Deploy") > markdown.index("14%")
    clean = make_report([make_run(CELLS)])
    assert clean.warnings == () and 'class="warnings"' not in to_html(clean) and to_markdown(clean).startswith("# ")


def test_names_are_escaped() -> None:
    cell = make_cell("<script>alert(1)</script>", 1, 10)
    cell = replace_fields(cell, subject=replace_fields(cell.subject, model='a"b<c'))
    text = to_html(make_report([make_run([cell])]))
    assert "<script>alert" not in text and "a&#34;b&lt;c" in text


def test_charts_are_well_formed() -> None:
    for plot in make_page().plots:
        assert plot.title and plot.caption and plot.legend and len(plot.drawings) == 2
        for drawing in plot.drawings:
            root = ET.fromstring(drawing)
            assert root.tag == "svg" and root.get("aria-label") and root.find(".//title") is not None


def test_markdown_has_the_same_table() -> None:
    lines = to_markdown(make_page()).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + len(make_page().rows)
    assert all(line.count("|") == len(make_page().columns) + 1 for line in table)


def test_a_run_without_cells_gives_a_page_of_tbd() -> None:
    text = to_html(make_report([make_run([], engines=["vllm"])]))
    assert "no valid measurement" in text and "TBD" in text and "<svg" not in text


def test_distributions_are_of_the_highest_load_with_answers() -> None:
    """A load at which an engine answered nothing must not hide the engine."""
    highest = CELLS[3]
    unanswered = replace_fields(
        highest,
        repeats=tuple(
            replace_fields(one, samples=tuple(replace_fields(each, outcome="error") for each in one.samples))
            for one in highest.repeats
        ),
    )
    page = make_page(make_run([*CELLS[:3], unanswered, *CELLS[4:]], engines=["llama.cpp", "vllm"]))
    shown = next(plot for plot in page.plots if plot.title == "Time to first token")
    assert [entry.name for entry in shown.legend] == ["llama.cpp Q4_1, 8", "vLLM BF16, 16"]


def test_labels_are_beside_a_steep_line() -> None:
    points = tuple(plots.Point(10 + at / 100, 10.0 * at, f"L{at}") for at in (1, 5, 9))
    other = plots.PlotSeries("b", (plots.Point(1, 1),))
    drawn = plots.draw_lines("t", [plots.PlotSeries("a", points), other], "x", "y")
    (anchor,) = re.findall(r'text-anchor="(\w+)" class="tick">L5<', drawn)
    assert anchor in ("start", "end")


def test_the_knee_has_the_best_throughput_per_latency() -> None:
    assert find_knee([(1.0, 60), (2.0, 140), (5.0, 170), (11.0, 175)]) == 1
    assert find_knee([(1.0, 60), (2.0, 140)]) is None


@given(st.lists(st.tuples(st.floats(1e-6, 1e12), st.floats(1e-6, 1e12)), min_size=1, max_size=20))
def test_all_values_are_drawn_within_the_frame(values: list[tuple[float, float]]) -> None:
    series = [plots.PlotSeries("one", tuple(plots.Point(x, y) for x, y in values), 0)]
    for svg in (plots.draw_lines("t", series, "x", "y"), plots.draw_roofline("t", series, 1e9, 1e12)):
        root = ET.fromstring(svg)
        marks = [one for one in root if one.tag == "circle"]
        assert len(marks) == len(values)
        assert all(0 <= float(one.get("cx", "nan")) <= plots.WIDE.width for one in marks)
        assert all(0 <= float(one.get("cy", "nan")) <= plots.WIDE.height for one in marks)


@given(st.floats(1e-6, 1e9), st.floats(1.0, 1e6))
def test_axes_have_ticks(low: float, ratio: float) -> None:
    scale = plots.make_scale([low, low * ratio], 0, 100)
    assert 1 <= len(scale.choose_ticks()) <= 16
    assert all(scale.low * 0.99 <= tick <= scale.high * 1.01 for tick in scale.choose_ticks())


FAULTS_IN_CHARTS = """[...document.querySelectorAll('svg.plot')].filter(plot => plot.clientWidth).flatMap(plot => {
    const frame = plot.getBoundingClientRect();
    const all = [...plot.querySelectorAll('text')].filter(one => !one.getAttribute('transform'));
    const boxes = all.map(one => [one.textContent, one.getBoundingClientRect()]);
    const cut = boxes.filter(([, box]) => box.left < frame.left - 1 || box.right > frame.right + 1
        || box.top < frame.top - 1 || box.bottom > frame.bottom + 1).map(([text]) => 'cut off: ' + text);
    const small = all.filter(one => one.getBoundingClientRect().height < 12).map(one => 'small: ' + one.textContent);
    const over = boxes.flatMap(([text, a], i) => boxes.slice(i + 1).filter(([, b]) =>
        Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4).map(([other]) => text + ' over ' + other));
    return [...cut, ...small, ...over];
})"""


@pytest.mark.browser
def test_no_text_of_a_chart_is_cut_off_small_or_printed_over_another(tmp_path: Path) -> None:
    close = [make_cell("vllm", load, 100 + load / 100, 40, label="BF16") for load in (1, 2, 3, 4, 5, 6)]
    close += [
        make_cell("sglang", load, 100 + load / 99, 40, label="a quantization with a long name") for load in (1, 2, 3)
    ]
    pages = {"usual": make_page(), "close": make_page(make_run(close))}

    async def main() -> None:
        async with open_browser(tmp_path / "profile") as tab:
            for name, page in pages.items():
                file = tmp_path / f"{name}.html"
                file.write_text(to_html(page), encoding="utf-8")
                for width in (1280, 390):
                    await tab.open(file, width, "light")
                    assert await tab.evaluate(FAULTS_IN_CHARTS) == [], (name, width)
            # A tooltip has the values of the nearest point.
            at = await tab.evaluate(
                "(box => [box.x + box.width / 2, box.y + box.height / 2])((mark => { mark.scrollIntoView(); "
                "return mark.getBoundingClientRect(); })(document.querySelector('svg.narrow .mark')))"
            )
            await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])
            assert "tok/s" in await tab.evaluate("document.getElementById('tip').textContent")
            assert not await tab.evaluate("document.getElementById('tip').hidden")

    asyncio.run(main())


@pytest.mark.browser
def test_axe_finds_no_serious_fault_in_the_report(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(to_html(make_page()), encoding="utf-8")

    async def main() -> None:
        async with open_browser(tmp_path / "profile") as tab:
            for width, theme in ((1280, "light"), (390, "dark")):
                await tab.open(file, width, theme)
                await tab.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
                assert await tab.find_faults() == []

    asyncio.run(main())


@pytest.mark.browser
def test_a_browser_shows_the_report_in_both_themes_and_prints_it_on_two_pages(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(to_html(make_page()), encoding="utf-8")

    async def look(tab: Tab, width: int, theme: str) -> tuple[str, str]:
        await tab.open(file, width, theme)
        assert await tab.evaluate("document.documentElement.scrollWidth") <= width
        drawn = "[...document.querySelectorAll('svg.plot')].filter(s => s.getBoundingClientRect().width > 250).length"
        assert await tab.evaluate(drawn) == 6
        style = "getComputedStyle(document.body)"
        return await tab.evaluate(f"{style}.backgroundColor"), await tab.evaluate(f"{style}.color")

    async def main() -> None:
        async with open_browser(tmp_path / "profile") as tab:
            light = [await look(tab, width, "light") for width in (1200, 360)]
            dark = [await look(tab, width, "dark") for width in (1200, 360)]
            assert light[0] == light[1] and dark[0] == dark[1]
            assert _compute_brightness(light[0][0]) > 200 > 60 > _compute_brightness(dark[0][0])
            assert _compute_brightness(dark[0][1]) > 180
            assert await tab.count_pdf_pages() <= 2
            assert {address for address in tab.requested if not address.startswith("file:")} == set()

    asyncio.run(main())


def _compute_brightness(colour: str) -> float:
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 3


@pytest.mark.browser
def test_paper_has_the_colours_of_the_light_theme_also_in_dark_mode(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(to_html(make_page()), encoding="utf-8")
    marks = "[...document.querySelectorAll('svg.plot .mark')].map(one => getComputedStyle(one).fill)"

    async def main() -> None:
        async with open_browser(tmp_path / "profile") as tab:
            await tab.open(file, 1280, "light")
            light = await tab.evaluate(marks)
            await tab.open(file, 1280, "dark")
            assert await tab.evaluate(marks) != light
            dark = [{"name": "prefers-color-scheme", "value": "dark"}]
            await tab.call("Emulation.setEmulatedMedia", media="print", features=dark)
            assert await tab.evaluate(marks) == light

    asyncio.run(main())
