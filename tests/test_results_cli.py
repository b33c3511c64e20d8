"""`runs export`, `runs verify`, `runs import`, and `report DIR`, with files of bedplate and of other tools."""

from __future__ import annotations

import asyncio
import json
import lzma
import re
import shutil
from pathlib import Path

import pytest
from tests.browser import open_browser
from tests.commands import invoke
from tests.contract.documents import check_document

from bedplate import store
from bedplate.facts.hardware import probe
from bedplate.measure.results import ResultFile
from bedplate.show.results_page import FolderContent, make_results_page
from bedplate.values import from_json, replace_fields, to_json
from bedplate.values.run import Load, Run

CAPTURES = Path(__file__).parent / "captures" / "runs"
RUN_ID = "20261116-064003-7056"
OTHERS = ("llama-bench.json", "vllm-bench-serve-summary.json", "guidellm-real.json", "aiperf.json",
          "aiperf-records.jsonl", "inferencex.json")  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with one real run."""
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    path = tmp_path / "run.json"
    path.write_bytes(lzma.decompress((CAPTURES / "two-cores-arm-llama.json.xz").read_bytes()))
    assert invoke("runs", "import", str(path)).code == 0
    return tmp_path


def export_signed(folder: Path, name: str = "result.json") -> Path:
    path = folder / name
    done = invoke("runs", "export", RUN_ID, "--sign", "-o", str(path))
    assert done.code == 0 and "signed" in done.err
    return path


def test_an_exported_run_is_verified_and_imported_elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = export_signed(home)
    before = store.find_run(RUN_ID)
    document = check_document("signed-result", path.read_text())
    assert document["run"]["id"] == RUN_ID and document["run"]["cells"][0]["repeats"][0]["samples"]
    valid = invoke("runs", "verify", str(path))
    assert valid.code == 0 and valid.out.startswith(f"valid: run {RUN_ID}")
    key = check_document("verified-result", invoke("runs", "verify", str(path), "--json").out)["public_key"]
    assert invoke("runs", "verify", str(path), "--public-key", key).code == 0
    assert invoke("runs", "verify", str(path), "--public-key", "x").code == 1
    monkeypatch.setenv("BEDPLATE_HOME", str(home / "elsewhere"))
    (found,) = check_document("imported-runs", invoke("runs", "import", str(path), "--json").out)["runs"]
    assert (found["run"], found["is_verified"], found["cells"]) == (RUN_ID, True, 4)
    assert store.find_run(RUN_ID).cells == before.cells
    assert invoke("compare", str(path), f"{RUN_ID}").code == 2, "a cell is not compared with itself"


def test_an_export_without_a_signature_is_not_valid(home: Path) -> None:
    done = invoke("runs", "export", RUN_ID)
    assert done.code == 0 and check_document("signed-result", done.out)["signature"] is None
    path = home / "plain.json"
    path.write_text(done.out)
    assert invoke("runs", "verify", str(path)).out == "not valid: it has no signature\n"
    assert invoke("runs", "export", RUN_ID, "--key", "key.pem").code == 2
    assert invoke("runs", "export", "nothing").code == 2
    assert invoke("runs", "verify", str(home / "none.json")).code == 2


def test_a_changed_result_is_refused(home: Path) -> None:
    path = export_signed(home)
    path.write_text(path.read_text().replace("Neoverse", "Faster"))
    assert invoke("runs", "verify", str(path)).code == 1
    done = invoke("runs", "import", str(path))
    assert done.code == 1 and "was changed after it was signed" in done.err
    for words in (("compare", str(path), RUN_ID), ("report", str(path), "--md"), ("gate", str(path))):
        refused = invoke(*words)
        assert refused.code == 1 and "was changed after it was signed" in refused.err, words


def test_every_command_that_imports_refuses_a_changed_result(home: Path) -> None:
    path = export_signed(home)
    path.write_text(path.read_text().replace(RUN_ID, "20990101-000000-0000"))
    done = invoke("bench", "--import", str(path))
    assert done.code == 1 and "was changed after it was signed" in done.err
    assert RUN_ID in invoke("runs", "list").out and "20990101" not in invoke("runs", "list").out


def test_an_import_never_replaces_what_was_measured_here(home: Path) -> None:
    measured = replace_fields(store.find_run(RUN_ID), source=None)
    store.remove_run(RUN_ID)
    store.add_run(measured)
    for cell in measured.cells:
        store.add_cell(cell)
    path = home / "other.json"
    document = json.loads(to_json(measured))
    path.write_text(json.dumps(document | {"at": "2030-01-01T00:00:00Z"}))
    done = invoke("runs", "import", str(path))
    assert done.code == 2 and "was measured here" in done.err
    path.write_text(json.dumps(document | {"id": "another"}))
    assert "is stored already, in run" in invoke("runs", "import", str(path)).err, "its cells belong to the first run"
    for cell in document["cells"]:
        cell["run"] = "another"
    path.write_text(json.dumps(document | {"id": "another"}))
    assert invoke("runs", "import", str(path)).code == 2
    assert store.find_run(RUN_ID) == measured and len(store.read_runs()) == 1
    for cell in document["cells"]:
        cell["id"] = "the same"
    path.write_text(json.dumps(document | {"id": "another"}))
    assert "not unique" in invoke("runs", "import", str(path)).err


def test_a_verdict_about_an_import_changes_no_plan(home: Path) -> None:
    """Its machine has the id of this one, which covers the kind of hardware and is in every file."""
    machine = store.compute_fingerprint(probe())
    document = json.loads((home / "run.json").read_text().replace(store.find_run(RUN_ID).environment.machine, machine))
    for name, speed in (("mine", 1), ("theirs", 2)):
        changed = document | {"id": name}
        for number, cell in enumerate(changed["cells"]):
            cell |= {"id": f"{name}-{number}", "run": name}
            for repeat in cell["repeats"]:
                repeat["delivered_tokens"] = speed * repeat["delivered_tokens"]
        (home / f"{name}.json").write_text(json.dumps(changed))
    assert invoke("runs", "import", str(home / "theirs.json")).code == 0
    mine = from_json(Run, (home / "mine.json").read_bytes())
    store.add_run(mine)
    for cell in mine.cells:
        store.add_cell(cell)
    assert invoke("compare", "mine", "theirs").code in (0, 10, 20, 30)
    assert len(store.read_verdicts(machine)) == 1 and store.read_evidence(machine).verdicts == ()


def test_an_import_may_be_repeated(home: Path) -> None:
    path = CAPTURES / "vllm-bench-serve.json"
    before = [invoke("runs", "import", str(path)).out for _ in range(2)]
    assert before[0] == before[1] and len(store.read_runs()) == 2


def test_a_damaged_file_leaves_the_store_readable(home: Path) -> None:
    document = json.loads((CAPTURES / "vllm-bench-serve-summary.json").read_text())
    path = home / "damaged.json"
    path.write_text(json.dumps(document | {"median_ttft_ms": "fast"}))
    done = invoke("runs", "import", str(path))
    assert done.code == 2 and "cannot be read" in done.err
    assert len(store.read_cells()) == 4


def test_results_of_other_tools_are_imported_with_their_gaps(home: Path) -> None:
    done = invoke("runs", "import", *(str(CAPTURES / name) for name in OTHERS))
    assert done.code == 0
    for name in OTHERS:
        part = done.out.partition(f"{name}: ")[2]
        assert "not signed" in part.splitlines()[0] and "the file does not contain: " in part
    rows = json.loads(invoke("runs", "list", "--json").out)["runs"]
    assert [row["kind"] for row in rows].count("import") == len(OTHERS) + 1
    assert all(row["effects"] == [] for row in rows), "imported runs never change plans"
    assert invoke("runs", "import", str(home / "none.json")).code == 2
    table = invoke("runs", "list").out
    assert "1970" not in table and "not reported" in table, "InferenceX states no time"
    assert "tokens on average (" in done.out and "9 tokens instead of 9" not in done.out


# report DIR


@pytest.fixture
def folder(home: Path) -> Path:
    """Signed, changed, unsigned and foreign results, and a file that is none."""
    made = home / "results"
    made.mkdir()
    signed = export_signed(made, "signed.json")
    (made / "changed.json").write_text(signed.read_text().replace('"agreement": 1.0', '"agreement": 0.5'))
    assert (made / "changed.json").read_text() != signed.read_text()
    for name in OTHERS:
        shutil.copy(CAPTURES / name, made)
    (made / "other.json").write_text("{}")
    (made / "notes.txt").write_text("not read")
    return made


def test_only_verified_clean_rows_are_ranked(folder: Path) -> None:
    done = invoke("report", str(folder), "--md")
    assert done.code == 0, done.err
    rows = [line.strip("| ").split(" | ") for line in done.out.splitlines() if re.match(r"\| (\d+ )?", line)][2:]
    ranked = {row[-1] for row in rows if row[0].isdigit()}
    assert ranked == {"signed.json"} and len(rows) == 4 + 4 + 2 + len(OTHERS) - 1
    assert "other.json is not a supported run file" in done.out and "notes.txt" not in done.out
    assert all("the file does not contain" in row[-2] for row in rows if row[-1] in OTHERS)


def test_a_copy_of_a_result_is_not_ranked_again(folder: Path) -> None:
    shutil.copy(folder / "signed.json", folder / "z.json")
    done = invoke("report", str(folder), "--md")
    rows = [line.strip("| ").split(" | ") for line in done.out.splitlines() if line.endswith("z.json |")]
    assert len(rows) == 4 and all(not row[0].isdigit() and "a copy of that in signed.json" in row[-2] for row in rows)
    assert "4 verified and clean ones are ranked" in done.out


def test_only_the_same_load_is_ranked_together(home: Path) -> None:
    """Prompts that share a prefix, bursts of another size and another trace are other loads."""
    run = store.find_run(RUN_ID)
    replay = Load(arrivals="replay", requests_per_s=2.0, trace="a.csv 12")
    burst = Load(arrivals="burst", requests_per_s=2.0, burst=4)
    loads = (
        Load(concurrency=4), Load(concurrency=4, shared_prefix_tokens=400), burst, replace_fields(burst, burst=8),
        replay, replace_fields(replay, trace="b.csv 34"),
    )  # fmt: skip
    cells = tuple(replace_fields(run.cells[2], id=str(number), load=load) for number, load in enumerate(loads))
    content = FolderContent((ResultFile("one.json", replace_fields(run, cells=cells), is_verified=True),))
    groups = {row.group for row in make_results_page(content, "results").rows}
    assert len(groups) == len(loads) and any("512 + 128, 400 shared" in load for _, _, load in groups)


def test_the_page_is_one_file_that_loads_nothing(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "all.html"
    done = invoke("report", str(folder), "-o", str(page))
    assert done.code == 0 and "4 verified and clean ones are ranked" in done.out and "other.json" in done.err
    text = page.read_text()
    assert not re.search(r'(src|href)="|url\(|@import', text) and text.count('<tr class="ranked">') == 4
    assert re.findall(r"<button type=\"button\">(\w+)</button>", text) == [
        "rank", "hardware", "model", "engine", "weights", "load", "quality", "signature",
    ]  # fmt: skip


def test_texts_of_files_are_escaped(home: Path) -> None:
    made = home / "hostile"
    made.mkdir()
    document = json.loads((CAPTURES / "inferencex.json").read_text())
    (made / "x.json").write_text(json.dumps(document | {"model": "<script>alert(1)</script>|x"}))
    page = home / "page.html"
    assert invoke("report", str(made), "-o", str(page)).code == 0
    assert "<script>alert" not in page.read_text()
    assert "<script>alert" not in invoke("report", str(made), "--md").out


def test_wrong_folders_are_usage_errors(home: Path, folder: Path) -> None:
    empty = home / "empty"
    empty.mkdir()
    assert "has no result files" in invoke("report", str(empty)).err
    assert invoke("report", str(folder), RUN_ID).code == 2
    assert invoke("report", str(folder), "--slo", "ttft_ms=1").code == 2
    assert invoke("report", str(folder), "--price-per-hour", "1").code == 2


@pytest.mark.browser
def test_the_table_is_sorted_by_hardware_model_and_engine(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "all.html"
    assert invoke("report", str(folder), "-o", str(page)).code == 0

    async def sort_columns() -> None:
        async with open_browser(tmp_path / "profile") as tab:
            await tab.open(page, 1200, "light")
            for column in (1, 2, 3):
                read = f"[...document.querySelectorAll('tbody tr')].map(row => row.cells[{column}].textContent)"
                await tab.evaluate(f"document.querySelectorAll('th button')[{column}].click()")
                up = await tab.evaluate(read)
                assert up == sorted(up, key=str.lower) and len(set(up)) > 1
                await tab.evaluate(f"document.querySelectorAll('th button')[{column}].click()")
                assert await tab.evaluate(read) == up[::-1]
            assert await tab.evaluate("document.querySelector('th[aria-sort]').textContent") == "engine"
            # Figures are sorted by value, in both directions with the unknown ones last.
            rates = "[...document.querySelectorAll('tbody tr')].map(row => row.cells[6].dataset.value)"
            for reverse in (False, True):
                await tab.evaluate("document.querySelectorAll('th button')[6].click()")
                found = await tab.evaluate(rates)
                known = [float(one) for one in found if one]
                assert known == sorted(known, reverse=reverse) and len(known) > 5
                assert found.index("") == len(known)
            assert not tab.complaints and {url.partition(":")[0] for url in tab.requested} == {"file"}

    asyncio.run(sort_columns())


@pytest.mark.browser
def test_the_table_fits_two_widths_and_has_no_serious_fault(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "all.html"
    assert invoke("report", str(folder), "-o", str(page)).code == 0

    async def look() -> None:
        async with open_browser(tmp_path / "profile") as tab:
            for width, theme in ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")):
                await tab.open(page, width, theme)
                ends = "[...document.querySelectorAll('td')].map(one => one.getBoundingClientRect().right)"
                assert max(await tab.evaluate(ends)) <= width
                assert await tab.find_faults() == []

    asyncio.run(look())
