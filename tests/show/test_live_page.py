"""The live page in a real browser: contents, keys and tenants, keyboard, widths, and no external requests."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import pytest
from tests.browser import Page as Tab
from tests.browser import open_browser
from tests.engines.plans import machine
from tests.hosting.stub_hosts import add, make_stub_environment, make_stub_readied
from tests.page.test_live import ANNS, OPERATOR, make_request, require_keys
from tests.page.test_page_actions import OPERATIONS

from bedplate.hosting.host import Host
from bedplate.hosting.memory import MemoryLimits
from bedplate.page import page
from bedplate.page.binding import NamedBottleneck
from bedplate.page.live import IntervalCounts, ModelSnapshot, SecondCounts
from bedplate.page.page import LiveFigures, add_live_page
from bedplate.progress import SilentProgress
from bedplate.run.listening import ListenOptions
from bedplate.show.live import load_live_page, write_policy
from bedplate.values import replace_fields
from bedplate.values.live import LiveBottleneck

SAID = "The sky is blue since <b>air</b> scatters blue light more than red light."
STREAMS = f"""
import http.server, json, sys, time
words = {SAID!r}.split()
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def event(self, value):
        data = b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\\n\\n"
        self.wfile.write(b"%x\\r\\n%b\\r\\n" % (len(data), data))
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        most = asked["max_tokens"]
        said = [word for _ in range(most) for word in words][:most]
        for number, word in enumerate(said):
            self.event({{"choices": [{{"index": 0, "delta": {{"content": ("" if number == 0 else " ") + word}}}}]}})
            time.sleep(0.01)
        self.event({{"choices": [{{"index": 0, "delta": {{}}, "finish_reason": "length"}}]}})
        self.event({{"choices": [], "usage": {{"prompt_tokens": 9, "completion_tokens": len(said)}}}})
        self.event(b"[DONE]")
        self.wfile.write(b"0\\r\\n\\r\\n")
    def log_message(self, *_): pass
words_given = sys.argv[1:]
port = int(words_given[words_given.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))


needs_browser = pytest.mark.browser
ANSWER = "document.getElementById('answer').textContent"
TOLD = "document.getElementById('told').textContent"
SHOWN = "!document.getElementById('all').hidden"


def test_the_page_is_small_and_self_contained() -> None:
    page = load_live_page()
    text = page.body.decode()
    assert len(page.body) < 60_000
    assert not re.findall(r"""(?:src|href)=["'](?!data:|/)""", text) and "@import" not in text and "url(" not in text
    assert "innerHTML" not in text and "style=" not in text and " onclick" not in text
    assert page.headers["Content-Security-Policy"] == write_policy(text)


def test_the_policy_covers_the_script() -> None:
    text = load_live_page().body.decode()
    assert write_policy(text) != write_policy(text.replace('"use strict";', '"use strict"; alert(1);'))


@contextlib.asynccontextmanager
async def serving(tmp_path: Path, *models: str) -> AsyncIterator[tuple[Host, LiveFigures]]:
    hardware = machine("cpu")
    stub = make_stub_environment(tmp_path / "stub", STREAMS)
    host = Host(
        "demo",
        ListenOptions(port=0, grace_s=1),
        hardware,
        SilentProgress(),
        tmp_path,
        room=MemoryLimits.from_hardware(hardware),
    )
    figures = add_live_page(host, OPERATIONS)
    await host.start()
    running = asyncio.create_task(figures.run())
    try:
        for model in models:
            await add(host, make_stub_readied(model, stub))
        host.state = "ready"
        yield host, figures
    finally:
        running.cancel()
        await host.stop()


def add_history(figures: LiveFigures, models: tuple[str, ...]) -> None:
    """Add ten minutes of history up to now."""
    now = time.time()
    figures.recorder._now = SecondCounts(int(now) - 600)
    figures.recorder._spell = IntervalCounts(int(now) - 600)
    for second in range(600):
        for model in models:
            for number in range(second % 3):
                request = make_request(now - 600 + second, ttft_ms=80.0 + second % 40 + 30 * number, duration_ms=900.0)
                for tenant in ("default", "ann"):
                    figures.recorder.record_request(replace_fields(request, model=model, tenant=tenant))
        standing = ModelSnapshot(second % 5, second % 2, 400_000_000 + 100_000 * second)
        in_flight = {"default": 3, "ann": second % 4}
        figures.recorder.end_second(dict.fromkeys(models, standing), now - 599 + second, in_flight=in_flight)


def run_in_browser(
    tmp_path: Path, models: tuple[str, ...], then: Callable[[Tab, Host, LiveFigures], Awaitable[None]]
) -> None:
    async def main() -> None:
        async with serving(tmp_path, *models) as (host, figures):
            add_history(figures, tuple(host.services))
            async with open_browser(tmp_path / "profile") as tab:
                await then(tab, host, figures)
                assert tab.complaints == []
                assert {one for one in tab.requested if not one.startswith((host.url, "data:"))} == set()

    asyncio.run(main())


@needs_browser
def test_both_themes_fit_at_two_widths(tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>"

    async def then(tab: Tab, host: Host, figures: LiveFigures) -> None:
        host.say(hostile)
        seen = {}
        for width in (1280, 800, 360):
            for theme in ("light", "dark"):
                await tab.open(host.url, width, theme)
                await tab.wait_until(SHOWN)
                assert await tab.evaluate("document.documentElement.scrollWidth") <= width
                drawn = "[...document.querySelectorAll('#charts .plot .a')].map(one => one.getBBox().width)"
                assert sum(found > 100 for found in await tab.wait_until(drawn)) >= 6
                assert await tab.evaluate("document.getElementById('title').textContent") == "alpha"
                assert await tab.evaluate("document.getElementById('notes').textContent") == hostile
                seen[width, theme] = await tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert {seen[width, "light"] for width in (1280, 800, 360)} != {
            seen[width, "dark"] for width in (1280, 800, 360)
        }
        assert len(set(seen.values())) == 2
        # With two models, the charts show the selected one.
        await tab.evaluate("document.querySelector('input[value=beta]').click()")
        assert await tab.evaluate("document.getElementById('title').textContent") == "beta"
        assert await tab.evaluate("document.querySelectorAll('#engines tr').length") == 2

    run_in_browser(tmp_path, ("alpha", "beta"), then)


CUT_OFF = """[...document.querySelectorAll('#all *')].filter(one => {
    const box = one.getBoundingClientRect();
    return box.width && box.height && (box.right > innerWidth + 1 || box.left < -1) && !one.closest('svg');
}).map(one => one.outerHTML.slice(0, 80))"""


@needs_browser
def test_a_phone_shows_the_prompt_first_and_cuts_nothing_off(tmp_path: Path) -> None:
    async def then(tab: Tab, host: Host, figures: LiveFigures) -> None:
        await tab.open(host.url, 390, "light")
        await tab.wait_until(SHOWN)
        await tab.wait_until("document.querySelectorAll('#recent tr').length > 1")
        assert await tab.evaluate("document.getElementById('send').getBoundingClientRect().bottom") < 844
        order = "document.getElementById('h-try').compareDocumentPosition(document.getElementById('charts')) & 4"
        assert await tab.evaluate(order)
        assert await tab.evaluate(CUT_OFF) == []
        wide = "[...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth + 1).length"
        assert await tab.evaluate(wide) == 0

    run_in_browser(tmp_path, ("alpha",), then)


@needs_browser
def test_axe_finds_no_serious_fault(tmp_path: Path) -> None:
    async def then(tab: Tab, host: Host, figures: LiveFigures) -> None:
        for width, theme in ((1280, "light"), (390, "dark")):
            await tab.open(host.url, width, theme)
            await tab.wait_until(SHOWN)
            assert await tab.find_faults() == []
            await tab.evaluate("document.getElementById('log').open = true")
            await tab.wait_until("document.querySelector('#log pre').textContent")
            assert await tab.find_faults() == []

    run_in_browser(tmp_path, ("alpha", "beta"), then)


@needs_browser
def test_values_outside_the_plan_are_marked_and_explained(tmp_path: Path) -> None:
    async def then(tab: Tab, host: Host, figures: LiveFigures) -> None:
        await tab.open(host.url, 1280, "light")
        await tab.wait_until(SHOWN)
        lines = await tab.wait_until("[...document.querySelectorAll('#outside li')].map(one => one.textContent)")
        assert any(line.startswith("Time to first token is above the plan: median ") for line in lines)
        marked = "getComputedStyle(document.querySelector('#chart-ttft .now .a')).color"
        usual = "getComputedStyle(document.querySelector('#chart-memory .now .a')).color"
        assert await tab.evaluate(marked) != await tab.evaluate(usual)

    run_in_browser(tmp_path, ("alpha",), then)


@needs_browser
def test_snippets_can_be_copied_and_the_time_range_changes(tmp_path: Path) -> None:
    async def then(tab: Tab, host: Host, figures: LiveFigures) -> None:
        await tab.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
        await tab.call("Emulation.setFocusEmulationEnabled", enabled=True)
        await tab.open(host.url, 1280, "light")
        await tab.wait_until(SHOWN)
        shown = "document.getElementById('snippet').textContent"
        for number, mark in enumerate(("curl http", "from openai import OpenAI", "new OpenAI({ baseURL: ")):
            await tab.evaluate(f"document.querySelectorAll('#kinds button')[{number}].click()")
            assert mark in await tab.evaluate(shown) and f"{host.url}/v1" in await tab.evaluate(shown)
        for name, text in (("base", f"{host.url}/v1"), ("snippet", await tab.evaluate(shown))):
            await tab.evaluate(f"document.querySelector('[data-copy={name}]').click()")
            await tab.wait_until(f"document.querySelector('[data-copy={name}]').textContent == 'Copied'")
            assert await tab.evaluate("navigator.clipboard.readText()") == text
        await tab.evaluate("document.querySelectorAll('#span button')[0].click()")
        assert "1 min ago" in await tab.evaluate("document.querySelector('#chart-ttft .plot').textContent")

    run_in_browser(tmp_path, ("alpha",), then)


@needs_browser
def test_a_model_is_unloaded_and_loaded_on_the_page(tmp_path: Path) -> None:
    state = "document.getElementById('subtitle').textContent"

    async def then(tab: Tab, host: Host, figures: LiveFigures) -> None:
        await tab.open(host.url, 1280, "light")
        await tab.wait_until(f"{state}.endsWith('ready')")
        await tab.evaluate("document.getElementById('unload').click()")
        # Nothing happens before it is confirmed.
        assert await tab.evaluate("document.activeElement.id") == "yes" and host.engines
        await tab.press("Enter")
        await tab.wait_until(f"{state}.endsWith('unloaded')")
        assert not host.engines
        await tab.evaluate("document.getElementById('load').click()")
        await tab.wait_until(f"{state}.endsWith('ready')")
        await tab.wait_until("document.getElementById('acted').textContent == 'Load alpha: done.'")
        assert len(host.engines) == 1

    run_in_browser(tmp_path, ("alpha",), then)


@needs_browser
def test_shows_the_bottleneck_and_the_whole_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name comes from its field, so the sentence may begin with anything."""
    found = LiveBottleneck(limit="scheduler", text="Requests wait for a slot.")

    def diagnose(inputs: Mapping[str, page.DiagnosisInput], *before: object) -> dict[str, NamedBottleneck]:
        return {name: NamedBottleneck(found, 0.0, one.plan, one.slots) for name, one in inputs.items()}

    monkeypatch.setattr(page, "diagnose_models", diagnose)

    async def then(tab: Tab, host: Host, figures: LiveFigures) -> None:
        await tab.open(host.url, 1280, "light")
        await tab.wait_until("document.getElementById('binding').textContent == 'Scheduler'")
        assert await tab.evaluate("document.getElementById('bound').textContent") == found.text

    run_in_browser(tmp_path, ("alpha",), then)


@needs_browser
def test_the_page_works_with_the_keyboard_alone(tmp_path: Path) -> None:
    async def then(tab: Tab, host: Host, figures: LiveFigures) -> None:
        await tab.open(host.url, 1280, "light")
        await tab.wait_until(SHOWN)
        await tab.press("/")
        assert await tab.evaluate("document.activeElement.id") == "prompt"
        await tab.write("Why?")
        await tab.press("Enter")
        await tab.wait_until(f"{TOLD}.includes('200 tokens')")
        said = await tab.evaluate(ANSWER)
        # The answer is shown as text, not as markup.
        assert said.startswith(SAID) and "<b>air</b>" in said
        told = await tab.evaluate(TOLD)
        assert re.search(r"first token .*ms · [\d.,]+ tokens/s · 200 tokens · token limit reached", told), told
        # The endpoint has counted the request.
        before = sum(600 // 3 * number for number in (1, 2)) * 11
        assert figures.recorder.used["default"].completion_tokens == before + 200
        await tab.wait_until("document.querySelector('#tenants tr').cells[7].textContent == '6.8k'")
        # Stopping a stream also cancels it in the engine.
        await tab.evaluate("document.getElementById('most').value = 5000")
        await tab.press("Enter")
        await tab.wait_until(f"{TOLD}.startsWith('first token')")
        await tab.press("Escape")
        await tab.wait_until(f"{TOLD}.endsWith('stopped')")
        await tab.evaluate("document.querySelector('#chart-ttft .plot').focus()")
        for _ in range(3):
            await tab.press("ArrowLeft")
        spoken = "document.activeElement.getAttribute('aria-valuetext')"
        assert re.match(r"1\d s ago: [\d.]+ ms p50, [\d.]+ ms p95", await tab.evaluate(spoken)), await tab.evaluate(
            spoken
        )
        assert await tab.evaluate("document.querySelectorAll('.plot .cursor').length") == 9
        await tab.press("Escape")
        assert (await tab.evaluate(spoken)).startswith("now: ")

    run_in_browser(tmp_path, ("alpha",), then)


async def enter(tab: Tab, key: str) -> None:
    await tab.wait_until("!document.getElementById('door').hidden && document.activeElement.id == 'key'")
    await tab.write(key)
    await tab.press("Enter")


@needs_browser
def test_a_tenants_key_shows_only_its_own_usage(tmp_path: Path) -> None:
    door, why = "!document.getElementById('door').hidden", "document.getElementById('doorwhy').textContent"
    names = "[...document.querySelectorAll('#tenants tr')].map(row => row.cells[0].textContent)"
    charts, own = (f"getComputedStyle(document.getElementById('{id}')).display" for id in ("charts", "ours"))

    async def then(tab: Tab, host: Host, figures: LiveFigures) -> None:
        require_keys(host)
        before = figures.recorder.used["ann"].requests
        await tab.open(host.url, 360, "dark")
        await tab.wait_until(door)
        assert "alpha" not in await tab.evaluate("document.body.innerText")
        await enter(tab, "wrong")
        await tab.wait_until(f"{why}.includes('is not valid')")
        await enter(tab, ANNS)
        assert await tab.wait_until(names) == ["ann"]
        assert await tab.evaluate(charts) == "none" and await tab.evaluate(own) == "grid"
        # The key is stored for this tab and also used for prompts.
        await tab.open(host.url, 360, "dark")
        await tab.wait_until(SHOWN)
        await tab.evaluate("document.getElementById('prompt').focus()")
        await tab.press("Enter")
        await tab.wait_until(f"{TOLD}.includes('200 tokens')")
        assert figures.recorder.used["ann"].requests == before + 1
        await tab.evaluate("document.getElementById('forget').click()")
        await tab.open(host.url, 360, "dark")
        await tab.wait_until(door)
        assert await tab.evaluate(names) == []
        assert await tab.evaluate("sessionStorage.length") == 0
        await enter(tab, OPERATOR)
        assert sorted(await tab.wait_until(names)) == ["ann", "default"]
        assert await tab.evaluate(charts) == "grid" and await tab.evaluate(own) == "none"
        # The browser logs each rejected request. There are no other messages.
        tab.complaints[:] = [one for one in tab.complaints if "401" not in one]

    run_in_browser(tmp_path, ("alpha",), then)


@needs_browser
def test_a_tenant_sees_its_history_and_remaining_limits(tmp_path: Path) -> None:
    async def then(tab: Tab, host: Host, figures: LiveFigures) -> None:
        require_keys(host)
        found = host.gateway.tenants.get_member("ann")
        assert found is not None
        found.admit(90_000, time.monotonic())
        await tab.open(host.url, 360, "dark")
        await enter(tab, ANNS)
        await tab.wait_until(SHOWN)
        for width, theme in ((360, "dark"), (800, "dark"), (1280, "light")):
            await tab.open(host.url, width, theme)
            await tab.wait_until(SHOWN)
            assert await tab.evaluate("document.documentElement.scrollWidth") <= width
            drawn = "[...document.querySelectorAll('#ours .plot .a')].map(one => one.getBBox().width)"
            assert [found > 100 for found in await tab.wait_until(drawn)] == [True] * 6
        limits = await tab.evaluate(
            "[...document.querySelectorAll('#limits tr')].map(row => row.innerText.split('\\t'))"
        )
        assert [row[:2] for row in limits] == [
            ["requests per minute", "60"], ["tokens per minute", "100.0k"], ["requests in flight", "4"],
        ]  # fmt: skip
        assert float(limits[1][2].rstrip("k")) < 50 and limits[2][2] == "3"
        await tab.evaluate("document.querySelector('#chart-own-ttft .plot').focus()")
        await tab.press("ArrowLeft")
        spoken = await tab.evaluate("document.activeElement.getAttribute('aria-valuetext')")
        assert re.match(r"\d+ s ago: [\d.]+ ms p50, [\d.]+ ms p95", spoken), spoken
        assert "default" not in await tab.evaluate("document.body.innerText")
        tab.complaints[:] = [one for one in tab.complaints if "401" not in one]  # before there was a key

    run_in_browser(tmp_path, ("alpha",), then)


@needs_browser
def test_the_page_reports_a_lost_endpoint_and_reconnects(tmp_path: Path) -> None:
    link = "document.getElementById('link').textContent"

    async def then(tab: Tab, host: Host, figures: LiveFigures) -> None:
        await tab.open(host.url, 1280, "light")
        await tab.wait_until(f"{link}.startsWith('up ')")
        page = host.gateway.handed.pop("/bedplate/live")
        await tab.wait_until(f"{link}.startsWith('no response since')")
        host.gateway.handed["/bedplate/live"] = page
        await tab.wait_until(f"{link}.startsWith('up ')")
        tab.complaints[:] = [one for one in tab.complaints if "404" not in one]

    run_in_browser(tmp_path, ("alpha",), then)
