"""`watch --once --upgrade` on a real service, and what its result must contain."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from tests.conftest import Served, post_json
from tests.contract.documents import check_document

from bedplate.run.releases import is_newer

EXIT_CODES = {"upgrade": {10}, "not proven": {20, 30}, "stay": {0, 30}}


def check_upgrade(served: Served, name: str, package: str, present: str, budget: str) -> dict[str, Any]:
    """The `upgrade` of the result. Whatever the verdict, the service still answers afterwards."""
    body = {"model": served.endpoint["model"], "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    for _ in range(4):
        assert post_json(f"{served.url}/chat/completions", body)[0] == 200
    command = ["watch", name, "--once", "--upgrade", "--share", "100%", "--budget", budget, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "bedplate", *command],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    upgrade: dict[str, Any] = check_document("watch", done.stdout)["upgrade"]
    print(done.stdout)
    assert (upgrade["package"], upgrade["present"]) == (package, present) and is_newer(upgrade["release"], present)
    assert upgrade["options"].startswith("its own parser accepts all "), done.stderr
    assert done.returncode in EXIT_CODES[upgrade["answer"]], (done.returncode, upgrade["text"])
    if upgrade["effects"]:
        assert all(one["gain"]["low"] <= one["gain"]["value"] <= one["gain"]["high"] for one in upgrade["effects"])
        assert upgrade["quality"]["verdict"] == upgrade["present_quality"]["verdict"] == "ok"
    assert post_json(f"{served.url}/chat/completions", body)[0] == 200
    return upgrade
