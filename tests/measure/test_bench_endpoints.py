"""`bench`, `compare` and `shadow` with endpoints elsewhere: rows of one run, in interleaved rounds, and a verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.commands import invoke
from tests.commands import run as command
from tests.judge.made_cells import Noise, make_pair

from bedplate import store
from bedplate.changing.shadow_elsewhere import probe_url
from bedplate.errors import UsageError
from bedplate.facts.hardware import probe
from bedplate.measure.bench import describe_environment
from bedplate.measure.load import LoadTarget, serve_null
from bedplate.measure.stored import find_cells
from bedplate.store import compute_fingerprint
from bedplate.values import from_json, replace_fields
from bedplate.values.run import Run, Subject
from bedplate.values.verdict import Verdict

pytestmark = pytest.mark.timeout(900)
SHORT = ("--concurrency", "1", "--prompt-tokens", "24", "--output-tokens", "8", "--seconds", "0.5", "--no-quality")
CLOSED = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def pair() -> Iterator[tuple[str, str]]:
    with serve_null(first_ms=5, interval_ms=1, tokens=8) as one, serve_null(first_ms=5, interval_ms=1, tokens=8) as two:
        yield one.url, two.url


def measure(*words: str) -> Run:
    done = command("bench", *words, *SHORT, "--json")
    assert done.code == 0, done.err
    return from_json(Run, done.out)


def list_order(run: Run) -> list[str]:
    """The engines of all repeats, in the order in which they were measured."""
    return [
        engine for _, engine in sorted((r.at or "", cell.subject.engine) for cell in run.cells for r in cell.repeats)
    ]


@pytest.mark.engine
def test_endpoints_are_measured_in_interleaved_rounds(pair: tuple[str, str]) -> None:
    run = measure("--engines", ",".join(pair), "--repeats", "2")
    names = [LoadTarget.from_url(url).name for url in pair]
    assert [cell.subject.engine for cell in run.cells] == names == [url.partition("://")[2] for url in pair]
    assert [cell.subject.url for cell in run.cells] == list(pair)
    a, b = names
    assert list_order(run) == [a, b, b, a], "each round in the reverse order"


def test_compare_finds_endpoints_by_their_urls_and_in_a_run() -> None:
    """The quantization of an endpoint elsewhere is not known: it is printed, and does not prevent the comparison."""
    hardware = probe()
    machine, url, name = compute_fingerprint(hardware), "http://gpu-2.example:8000", "gpu-2.example:8000"
    (mine,), (theirs,) = make_pair(Noise(1), 1.5)
    mine = replace_fields(mine, subject=replace_fields(mine.subject, engine="llama.cpp"))
    theirs = replace_fields(theirs, subject=Subject(engine=name, model=theirs.subject.model, url=url))
    store.add_run(Run(id="made", at=mine.at, environment=describe_environment(hardware)))
    for cell in (mine, theirs):
        store.add_cell(replace_fields(cell, machine=machine))
    a = mine.subject.engine
    for sides in ((a, url), (a, f"{url}/v1"), (f"made:{a}", f"made:{name}"), (a, f"made:{url}")):
        done = invoke("compare", *sides, "--json")
        assert done.code == 10, done.err
        verdict = from_json(Verdict, done.out)
        assert (verdict.a.engine, verdict.b.engine) == (a, name)
        told = {one.what: (one.a, one.b) for one in verdict.differences}
        assert told["endpoint"] == ("not reported", url) and told["quantization"] == ("Q4_1", "not reported")
    refused = invoke("compare", a, f"{CLOSED}/v1")
    assert refused.code == 2 and f"bedplate bench --engines {CLOSED}/v1" in refused.err


@pytest.mark.engine
def test_runs_in_files_name_endpoints_with_colons(pair: tuple[str, str], tmp_path: Path) -> None:
    run = measure("--engines", ",".join(pair), "--repeats", "1")
    file = tmp_path / "both.json"
    assert invoke("runs", "export", run.id, "-o", str(file)).code == 0
    name = run.cells[1].subject.engine
    assert [cell.subject.engine for cell in find_cells(f"{file}:{name}").cells] == [name]


@pytest.mark.engine
def test_an_unreachable_endpoint_is_left_out_and_the_others_are_measured(pair: tuple[str, str]) -> None:
    run = measure("--engines", f"{pair[0]},{CLOSED}", "--repeats", "1")
    assert [cell.subject.url for cell in run.cells] == [pair[0]]
    (left_out,) = run.left_out
    assert left_out.engine == "127.0.0.1:9" and "cannot connect" in left_out.why


@pytest.mark.engine
def test_services_of_an_intent_are_endpoints_with_their_own_names_and_keys(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECOND_KEY", "sk-second")
    services = [{"url": pair[0], "model": "one"}, {"url": pair[1], "model": "two", "key_env": "SECOND_KEY"}]
    file = tmp_path / "services.yaml"
    file.write_text(yaml.safe_dump({"services": services}))
    run = measure("-f", str(file), "--repeats", "1")
    assert [cell.subject.model for cell in run.cells] == ["one", "two"]
    assert run.matrix is not None and run.matrix.engines == ()
    assert [one.key_env for one in run.matrix.endpoints] == [None, "SECOND_KEY"] and "sk-second" not in str(run)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("bench", "--engines", f"llama.cpp,{CLOSED}", "--key-env", "NO_SUCH_KEY"), "NO_SUCH_KEY is not set"),
        (("bench", "--engines", "llama.cpp", "--key-env", "KEY"), "--key-env and --model need a URL"),
        (("bench", "--engines", CLOSED, *SHORT), "127.0.0.1:9: cannot connect"),
        (("shadow", CLOSED, "--url", CLOSED), "cannot be combined"),
        (("shadow", f"{CLOSED}/v1", "--key-env", "NO_SUCH_KEY"), "NO_SUCH_KEY is not set"),
    ],
)
def test_mistakes_are_named(words: tuple[str, ...], why: str) -> None:
    done = invoke(*words)
    assert done.code in (1, 2) and why in " ".join(done.err.split())


@pytest.mark.engine
def test_shadow_accepts_any_engine_behind_a_url(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def list_models(target: LoadTarget) -> bytes:
        return b'{"data": [{"id": "null-model", "engine": "sglang", "engine_version": "1"}]}'

    monkeypatch.setattr("bedplate.changing.shadow_elsewhere._read_model_list", list_models)
    name = LoadTarget.from_url(pair[0]).name
    found = asyncio.run(probe_url(pair[0], None, "null-model", name))
    assert (found.engine, found.engine_version) == (name, "1") and found.to_subject("m").url == pair[0]
    with pytest.raises(UsageError, match="is served by sglang, not by vllm"):
        asyncio.run(probe_url(pair[0], None, "null-model", "vllm"))
