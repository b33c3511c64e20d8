"""bedplate schema: the JSON Schemas of the documents that bedplate writes and reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

EXAMPLES = """Examples:

\b
  bedplate schema                          list the documents
  bedplate schema decision                 the schema of `bedplate plan --json`
  bedplate schema intent > intent.json     for an editor that checks bedplate.yaml

What stays the same from version to version: docs/compatibility.md."""
FOLDER = Path(__file__).with_name("schemas")
"""Written by `make docs`. Reading a file is faster than importing every record."""


class Document(NamedTuple):
    name: str
    command: str
    """The command line that writes it, or reads it in the case of `intent` and `request`."""
    records: tuple[str, ...]
    """The records that it may be, as module:class below `bedplate`."""
    form: str = "one"
    """one: a JSON object; list: an array of them; lines: one object a line."""
    is_input: bool = False
    """Written by people or other programs, and read by bedplate. Unknown keys are then errors."""


DOCUMENTS = (
    Document("intent", "plan -f FILE", ("values.intent:Intent",), is_input=True),
    Document("hardware", "probe --json", ("values.hardware:Hardware",)),
    Document("model", "inspect --json", ("values.model:Model",)),
    Document("models", "models --json", ("decide.catalogue:Catalogue",)),
    Document("decision", "plan --json", ("values.decision:Decision",)),
    Document(
        "why-not",
        "plan --why-not ENGINE --json",
        ("values.decision:Refusal", "values.decision:Challenger", "values.decision:Decision"),
    ),
    Document("what-if", "plan --what-if FIELD=VALUE --json", ("decide.questions:WhatIf",)),
    Document("offers", "plan --procure --json", ("decide.questions:Offer",), form="list"),
    # Of an intent with several services.
    Document("portfolio", "plan -f FILE --json", ("values.portfolio:Portfolio",)),
    Document("simulation", "simulate --json", ("values.simulation:Simulation",)),
    Document("explanation", "estimate --explain ROW --json", ("values.explanation:Explanation",)),
    Document("trace", "workload --json", ("values.workload:TraceSummary",)),
    Document("request", "workload FILE", ("values.workload:RequestShape",), form="lines", is_input=True),
    Document("engines", "engines --json", ("run.engine_listing:EngineList",)),
    Document("engine", "engines show ID --json", ("run.engine_listing:EnginePage",)),
    Document("prepared", "prepared --json", ("run.prepared_weights:PreparedList",)),
    Document("local-models", "list --json", ("run.local_models:LocalModelList",)),
    Document("local-model", "pull MODEL --json", ("run.local_models:LocalModel",)),
    Document("removed-models", "rm MODEL --yes --json", ("run.local_models:RemovedModels",)),
    Document("doctor", "doctor --json", ("facts.doctor:DoctorReport",)),
    Document("endpoint", "serve --json", ("values.endpoint:Endpoint",)),
    Document("answer", "run MODEL PROMPT --json", ("values.chat:ChatAnswer",)),
    Document("services", "ps --json", ("hosting.services:RunningService",), form="list"),
    Document("host", "status --json", ("values.service:HostStatus",)),
    Document("adapters", "adapters list --json", ("hosting.adapters:AdapterReport",)),
    Document("connected", "connect --json", ("hosting.client_settings:ConnectedClient",)),
    Document("stopped", "stop --json", ("hosting.services:StoppedService",), form="list"),
    Document("run", "bench --json", ("values.run:Run",)),
    Document("row", "bench --jsonl", ("values.summary:BenchRow",), form="lines"),
    Document("diagnosis", "diagnose --json", ("values.diagnosis:Diagnosis",)),
    Document("verdict", "compare --json", ("values.verdict:Verdict",)),
    Document("references", "reference MODEL --json", ("values.reference:ReferenceList",)),
    Document("gate", "gate BASELINE --json", ("values.gate:GateResult",)),
    Document("tuning", "tune --json", ("values.tuning:TuningRun",)),
    Document("knobs", "tune --list --json", ("values.tuning:TunableSetting",), form="list"),
    Document("runs", "runs list --json", ("values.stored_runs:RunList",)),
    Document("run-details", "runs show ID --json", ("values.stored_runs:RunDetails",)),
    Document("discarded-run", "runs discard ID --yes --json", ("values.stored_runs:DiscardedRun",)),
    Document("signed-result", "runs export ID --sign", ("values.signed_result:SignedResult",)),
    Document("verified-result", "runs verify FILE --json", ("values.signed_result:VerifiedResult",)),
    Document("imported-runs", "runs import FILE --json", ("values.signed_result:ImportedRuns",)),
    Document("shadow", "shadow --json", ("values.shadow:ShadowResult",)),
    Document("migration", "migrate --json", ("values.migration:Migration",)),
    Document("watch", "watch --json", ("values.watch:WatchEvaluation",)),
    Document("packed", "bundle --json", ("values.bundle:PackedBundle",)),
    Document("bundle", "bundle --check PATH --json", ("values.bundle:Bundle",)),
    Document("tenants", "keys list --json", ("values.tenant:TenantList",)),
    Document("key", "keys add NAME --json", ("values.tenant:NewKey",)),
    Document("usage", "usage --json", ("values.traffic:UsageReport",)),
)


def schema(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="The document. Default: list all of them.", show_default=False),
    ] = None,
) -> None:
    """Print the JSON Schema of a document of bedplate.

    Every --json option writes one of these documents. `intent` is the file that -f reads.
    """
    if name is None:
        width = max(len(document.name) for document in DOCUMENTS)
        for document in DOCUMENTS:
            verb = "read by" if document.is_input else "written by"
            typer.echo(f"{document.name:{width}}  {verb:10}  bedplate {document.command}")
        return
    if name not in {document.name for document in DOCUMENTS}:
        _refuse_unknown_name(name)
    typer.echo(locate_schema(name).read_text(encoding="utf-8"), nl=False)


def locate_schema(name: str) -> Path:
    return FOLDER / f"{name}.json"


def _refuse_unknown_name(name: str) -> None:
    import difflib

    from bedplate.errors import UsageError

    if written := [one.name for one in DOCUMENTS if one.command.split()[0] == name and not one.is_input]:
        hint = f"bedplate {name} writes {' or '.join(written)}"
    elif near := difflib.get_close_matches(name, [document.name for document in DOCUMENTS], 3, cutoff=0.65):
        hint = f"did you mean {' or '.join(near)}?"
    else:
        hint = "bedplate schema lists the documents"
    raise UsageError(f"there is no document named {name!r}", hint=hint)
