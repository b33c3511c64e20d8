"""The image's root file system, built from Debian packages: it runs without root rights on a read-only root."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.image.root_filesystem import BuildStage, build, explain_absence, read_instructions

ROOT = Path(__file__).parents[2]


def test_the_last_stage_has_a_user_and_no_build_tools() -> None:
    found = read_instructions((ROOT / "Dockerfile").read_text(encoding="utf-8"))
    last = found[max(index for index, (name, _) in enumerate(found) if name == "FROM") :]
    assert ("USER", "1000:1000") in last and not any("pip" in rest for name, rest in last if name == "RUN")
    assert ("ENTRYPOINT", '["bedplate"]') in last


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> BuildStage:
    if (reason := explain_absence()) is not None:
        pytest.skip(reason)
    return build(tmp_path_factory.mktemp("image"))


@pytest.mark.nightly
def test_it_runs_as_its_user_on_a_read_only_root(stage: BuildStage) -> None:
    shown = stage.run([*stage.entrypoint, "--version"], read_only=True)
    assert shown.returncode == 0, shown.stderr
    written = "import os, pathlib; pathlib.Path('/state/a').touch(); pathlib.Path('/tmp/a').touch(); print(os.getuid())"
    python = "/opt/bedplate/bin/python"
    assert stage.run([python, "-c", written], read_only=True).stdout == "1000\n"
    refused = stage.run([python, "-c", "import pathlib; pathlib.Path('/opt/a').touch()"], read_only=True)
    assert refused.returncode and "Error" in refused.stderr


@pytest.mark.nightly
def test_it_has_the_driver_and_reads_the_configuration_of_a_gateway(stage: BuildStage) -> None:
    driver = stage.run(["/opt/bedplate/bin/python", "-c", "import psycopg; print(psycopg.pq.__impl__)"], read_only=True)
    assert driver.stdout == "binary\n", driver.stderr
    intent = """echo 'services: [{url: "http://127.0.0.1:9/v1", model: a}]' > /tmp/gateway.yaml"""
    store = "BEDPLATE_USAGE_STORE=postgresql://u@127.0.0.1:9/x"
    serve = ["sh", "-c", f"{intent} && {store} bedplate serve --file /tmp/gateway.yaml --port 0"]
    shown = stage.run(serve, read_only=True)
    assert shown.returncode == 3 and "cannot use the usage store in PostgreSQL" in shown.stderr, shown.stderr
