"""One workload model: the same question has the same number of requests in flight in every command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.commands import invoke

from bedplate.decide.intent import read_intent
from bedplate.decide.questions import procure
from bedplate.facts.chips import find_chip
from bedplate.facts.known_models import find_model

MODEL, CARD = "Qwen/Qwen3-8B", "NVIDIA H100 SXM 80GB"
LENGTHS = {"prompt_tokens": 1000, "output_tokens": 300}
QUESTIONS: dict[str, dict[str, Any]] = {
    "users": {"users": 500},
    "users with think time": {"users": 500, "think_time_s": 10},
    "few users": {"users": 3},
    "request rate": {"requests_per_s": 8},
    "more than the machine answers": {"requests_per_s": 400},
    "concurrency": {"concurrency": 40},
    "users and concurrency": {"users": 500, "concurrency": 40},
}


def read_json(*arguments: str) -> Any:
    answer = invoke(*arguments, "--json")
    assert answer.code == 0, answer
    return json.loads(answer.out)


@pytest.mark.parametrize("work", QUESTIONS.values(), ids=QUESTIONS)
def test_every_command_has_the_same_number_in_flight(work: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "bedplate.yaml"
    path.write_text(json.dumps({"hardware": f"1x {CARD}", "model": MODEL, "workload": {**LENGTHS, **work}}))
    file = ("-f", str(path))
    plan = read_json("plan", *file)
    planned = plan["in_flight"]
    assert plan["load"]["in_flight"] == planned
    found = {
        "what-if": read_json("plan", *file, "--what-if", "ram_gb=512")["before"]["in_flight"],
        "models": read_json("models", *file, "--search", MODEL)["models"][0]["in_flight"],
        "simulate": read_json("simulate", *file, "--requests", "40", "--replicas", "1")["traffic"]["load"]["in_flight"],
    }
    chip = find_chip(CARD)
    assert chip is not None
    offers = [
        one
        for _, one in procure(find_model(MODEL), read_intent(path).workload, read_intent(path).operations, [chip.chip])
    ]
    if offers[0] is not None and offers[0].count == 1:
        found["procure"] = offers[0].decision.in_flight
    files = invoke("plan", *file, "--emit", "kubernetes").out
    written = re.search(r"([\d,]+) (?:in flight|concurrent requests,)", files)
    assert written is not None
    found["emitted files"] = int(written[1].replace(",", ""))
    assert found == dict.fromkeys(found, planned)
    assert "procure" in found or work == {"requests_per_s": 400}


def test_every_page_prints_the_assumed_think_time() -> None:
    asked = (MODEL, "--hardware", f"1x {CARD}", "--set", "users=500")
    words = "500 users, 30 s between requests (assumed): "
    pages = {
        "plan": invoke("plan", *asked).out,
        "models": invoke("models", "--hardware", f"1x {CARD}", "--users", "500", "--search", MODEL).out,
        "simulate": invoke("simulate", *asked, "--requests", "50", "--replicas", "1").out,
        "emit": invoke("plan", *asked, "--emit", "command").out,
    }
    for name, page in pages.items():
        # Tables and comments wrap their lines, and the next column is between the two parts of a sentence.
        plain = re.sub(r"[\s#]+", " ", page)
        assert words in plain and re.search(r"\d in flight", plain), (name, page)
    changes = read_json("plan", *asked, "--what-if", "users=900")["changes"]
    (load,) = [change for change in changes if change["what"] == "load"]
    assert load["before"].startswith(words) and load["after"].startswith("900 users, 30 s between requests (assumed): ")


def test_stated_concurrency_is_taken_as_it_is() -> None:
    stated = read_json("plan", MODEL, "--hardware", CARD, "--users", "500", "--concurrency", "64")
    assert stated["in_flight"] == 64 and stated["load"]["arrival"] == "closed"
    assert stated["settings"]["slots"] == 64


def test_users_have_a_slot_each_and_fewer_requests_in_flight() -> None:
    decision = read_json("plan", MODEL, "--hardware", CARD, "--users", "50")
    assert decision["load"]["arrival"] == "users" and decision["load"]["think_time_assumed"]
    assert 1 < decision["in_flight"] < 50 == decision["settings"]["slots"]
    took_s = decision["estimate"]["ttft_ms"]["value"] / 1000 + decision["estimate"]["tpot_ms"]["value"] * 256 / 1000
    assert decision["in_flight"] == pytest.approx(50 * took_s / (took_s + 30), abs=1)
