"""Emitted files with hostile names: no name leaves its comment, string or scalar, and none is executed."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from tests.deploy.schemas import LOADER
from tests.values.test_quoting import expand_kubernetes

from bedplate.decide import decide, plan
from bedplate.decide.intent import resolve_hardware, to_intent
from bedplate.decide.nodes import list_node_launches
from bedplate.decide.portfolio import make_portfolio
from bedplate.deploy import emit as emit_module
from bedplate.deploy.emit import TARGETS, emit_target
from bedplate.deploy.platform import Platform, place_one_service, place_services
from bedplate.deploy.shell import write_script
from bedplate.engines import get_engine
from bedplate.errors import BedplateError, UsageError
from bedplate.run.models import find_intended_model
from bedplate.values import Decision, Hardware, Model, replace_fields
from bedplate.values.intent import Intent
from bedplate.values.portfolio import Portfolio
from bedplate.values.quoting import is_safe

SOURCE = Path(emit_module.__file__).parents[1]
EMITTERS = [
    *sorted((SOURCE / "deploy").glob("*.py")),
    SOURCE / "hosting" / "systemd.py",
    SOURCE / "bundling" / "texts.py",
]
H100, XEON = {"accelerator": "H100 SXM", "count": 8}, {"cpu": "Intel Xeon Gold 6430", "cores": 32, "ram_gb": 128}
RTX, MAC = (
    {"accelerator": "RTX 4090", "ram_gb": 128},
    {"accelerator": "Apple M3 Max 40-core", "ram_gb": 64, "os": "macos"},
)
WORK = {"concurrency": 64, "prompt_tokens": 1024, "output_tokens": 256}
QWEN, LARGE = "Qwen/Qwen3-8B", "meta-llama/Meta-Llama-3.1-70B"
NODES = {"accelerator": "H100 SXM", "count": 16, "gpus_per_node": 8, "network": "InfiniBand NDR 400"}
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "vllm": (H100, QWEN, "vllm"), "sglang": (H100, QWEN, "sglang"), "tensorrt-llm": (H100, QWEN, "tensorrt-llm"),
    "tensorrt-llm converted": ({**H100, "count": 1}, LARGE, "tensorrt-llm"), "tgi": (H100, QWEN, "tgi"),
    "vllm converted": ({"accelerator": "RTX 5090", "ram_gb": 128}, "Qwen/Qwen3-32B", "vllm"),
    "several nodes": (NODES, "meta-llama/Meta-Llama-3.1-405B", "vllm"),
    "llama.cpp": (XEON, QWEN, "llama.cpp"), "llama.cpp built": (RTX, QWEN, "llama.cpp"),
    "ollama": (XEON, QWEN, "ollama"),
    "exllamav3": (RTX, QWEN, "exllamav3"), "onnxruntime": (RTX, "BAAI/bge-m3", "onnxruntime"),
    "lmdeploy": (RTX, QWEN, "lmdeploy"), "mistral.rs": (XEON, QWEN, "mistral.rs"), "pytorch": (XEON, QWEN, "pytorch"),
    "mlx": (MAC, QWEN, "mlx"), "exllamav2": (RTX, QWEN, "exllamav2"),
}  # fmt: skip
# Each example writes a deployment. Shrinking a failure would take minutes and shows no more.
a_fifth = settings(max_examples=settings().max_examples // 5, phases=[Phase.explicit, Phase.generate])
SECRET = "the value of a secret"

hostile = st.lists(
    st.sampled_from([
        "\ntouch canary\n", "$(touch canary)", "`touch canary`", "'; touch canary; '", '"; touch canary; "', "\r\n",
        "; touch canary #", "&& touch canary", "| touch canary", "\\", "'", '"', "#", " #", ": ", "\n- a: b\n",
        "\n---\n",
        "${HF_TOKEN}", "$(HF_TOKEN)", "$(VLLM_API_KEY)", "$$(HF_TOKEN)", "$HF_TOKEN", "{{x}}", "{x}", "%n", "*a", "&a",
        "!!x", "../", "/", "--trust-remote-code", "\x1b[2J", "\x9b", "\x85", "\u2028", "\u202e", "\t", "é", "x",
        "END_OF_PROGRAM\n", "')\nimport os; os.system('touch canary')\n('", "<script>", "\udcff", ":", "@", "%",
    ])
    | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=4),
    max_size=5,
).map("".join)  # fmt: skip


@functools.cache
def find_model(name: str) -> Model:
    return find_intended_model(name)


@functools.cache
def decide_case(case: str) -> tuple[Hardware, Model, Intent, Decision]:
    """Decide once for the usual name: a name changes no decision, and deciding takes most of the time."""
    described, model, engine = CASES[case]
    intent = to_intent({"hardware": described, "workload": WORK if "several" not in case else {}})
    hardware, facts = resolve_hardware(intent), find_model(model)
    return hardware, facts, intent, decide(hardware, facts, intent.workload, engine)


def rename(case: str, name: str, path: str | None) -> tuple[Model, Decision]:
    """The model of a case with a hostile name, or with files at a hostile path, and the decision for it."""
    hardware, usual, intent, decision = decide_case(case)
    files = (f"/models/{path}/model.safetensors",) if path is not None else ()
    model = replace_fields(usual, name=name or "model", files=files)
    reasons = tuple(replace_fields(one, text=f"{one.text}: {name}") for one in decision.reasons)
    engine, planned = get_engine(CASES[case][2]), plan(decision, model, intent.workload)
    launch, on_nodes = engine.launch(planned, 8080), list_node_launches(planned, engine, hardware, 8080)
    changed = {"model": model.name, "launch": launch, "node_launches": on_nodes, "reasons": reasons}
    return model, replace_fields(decision, **changed)


def emit(case: str, target: str, name: str, path: str | None) -> dict[str, str]:
    hardware, _, intent, _ = decide_case(case)
    model, decision = rename(case, name, path)
    return emit_target(place_one_service(intent, hardware, model, intent.workload, decision), target)


def write_command(case: str, name: str, path: str | None) -> tuple[str, Decision]:
    _, _, intent, _ = decide_case(case)
    model, decision = rename(case, name, path)
    return write_script(plan(decision, model, intent.workload), decision), decision


def describe_shape(value: Any) -> Any:
    """The structure of a document without its strings; names are the same in number, so it is the same as usual."""
    if isinstance(value, dict):
        return {key: describe_shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [describe_shape(inner) for inner in value]
    return type(value).__name__


def list_strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from list_strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from list_strings(inner)
    elif isinstance(value, str):
        yield value


def list_containers(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "image" in value and ("command" in value or "args" in value or "entrypoint" in value):
            yield value
        for inner in value.values():
            yield from list_containers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from list_containers(inner)


@functools.cache
def make_tools() -> Path:
    """A PATH with nothing but `touch`, which creates the canary when a name is executed."""
    folder = Path(tempfile.mkdtemp(prefix="bedplate-tools-"))
    (folder / "touch").symlink_to("/usr/bin/touch")
    return folder


@pytest.fixture(scope="module", autouse=True)
def remove_tools() -> Iterator[None]:
    yield
    if make_tools.cache_info().currsize:
        (make_tools() / "touch").unlink()
        make_tools().rmdir()
        make_tools.cache_clear()


@functools.lru_cache(10_000)
def run_harmlessly(program: str, script: str, before: str) -> dict[str, bytes]:
    """Run a script without any program but `touch`; return the files that it created."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script").write_text(f"{before}\n{script}", encoding="utf-8")
        parsed = subprocess.run([program, "-n", "script"], cwd=folder, capture_output=True)
        assert parsed.returncode == 0, parsed.stderr
        env = {"PATH": str(make_tools()), "HOME": folder, "LC_ALL": "C.UTF-8"}
        subprocess.run([f"/bin/{program}", "script"], cwd=folder, env=env, capture_output=True, timeout=60)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


QUIET = """
NODE_RANK=1 NODE_0_ADDRESS=NODE_0_ADDRESS
command() { return 0; }
uv() { return 0; }
exec() { printf '%s\\0' "$@" > launched; }
wait() { builtin wait; }
"""


def check_script(case: str, name: str, path: str | None) -> None:
    try:
        text, decision = write_command(case, name, path)
    except BedplateError:
        return  # refused, such as a path that a Modelfile cannot name
    assert decision.launch is not None
    assert all(letter in "\n\t" or is_safe(letter) for letter in text), "it can be printed"
    here = [one.argv for one in decision.node_launches if one.node == decision.node_launches[-1].node]
    before = QUIET
    if len(here) > 1:  # in the background, each with an output of its own
        program = here[0][0]
        before += f"{program}() {{ printf '%s\\0' {program} \"$@\" > launched-$BASHPID; }}\n"
    found = run_harmlessly("bash", text.replace("set -euo pipefail", "set +e"), before)
    assert "canary" not in found
    launched = sorted(text.split(b"\0")[:-1] for name, text in found.items() if name.startswith("launched"))
    planned = [[word.encode("utf-8", "surrogateescape") for word in argv] for argv in here or [decision.launch.argv]]
    assert launched == sorted(planned), "the engine gets exactly the planned words"


@pytest.mark.parametrize("case", CASES)
def test_script_runs_no_part_of_a_name(case: str) -> None:
    evil = "a\ntouch canary\n$(touch canary)`touch canary`'; touch canary; '\"; touch canary #\x1b[2J\r"
    check_script(case, evil, None)
    check_script(case, evil, evil.replace("/", ""))


@a_fifth
@given(case=st.sampled_from(sorted(CASES)), name=hostile, path=st.none() | hostile)
def test_script_with_generated_names_runs_only_the_engine(case: str, name: str, path: str | None) -> None:
    check_script(case, name, path)


PLAIN_CASES = [case for case in CASES if case not in ("mlx", "exllamav2")]


@functools.cache
def find_usual_shape(case: str, target: str, with_files: bool) -> dict[str, Any] | None:
    try:
        files = emit(case, target, "usual", "usual" if with_files else None)
    except BedplateError:
        return None
    return {name: [describe_shape(tree) for tree in yaml.load_all(text, LOADER)] for name, text in read_yaml(files)}


def read_yaml(files: dict[str, str]) -> list[tuple[str, str]]:
    """The YAML files by kind: their names contain the service's name."""
    usual = ("namespace.yaml", "network.yaml", "monitoring.yaml", "scaling.yaml", "queues.yaml", "gateway.yaml",
             "kustomization.yaml", "compose.yaml")  # fmt: skip
    found = [(name, text) for name, text in files.items() if name.endswith(".yaml")]
    return [(name if name in usual else re.sub(r"[^/]+\.yaml$", "SERVICE", name), text) for name, text in found]


def check_files(case: str, target: str, name: str, path: str | None) -> None:
    usual = find_usual_shape(case, target, path is not None)
    try:
        files = emit(case, target, name, path)
    except BedplateError:
        return
    assert all(re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", one, re.ASCII) for one in files), list(files)
    trees: list[Any] = []
    shapes: dict[str, Any] = {}
    for kind, text in read_yaml(files):
        assert all(letter == "\n" or is_safe(letter) for letter in text), "it can be printed"
        own = list(yaml.load_all(text, LOADER))
        shapes[kind] = [describe_shape(tree) for tree in own]
        trees += own
    if not {"/", ":"} & set(name + (path or "")) and not name.lower().endswith(".gguf"):
        assert name_service(shapes) == name_service(usual), "a name added, removed or changed nothing but strings"
    for container in list_containers(trees):
        check_container(container, target)


def name_service(shapes: Any) -> Any:
    """The shapes without names of services in keys, as Compose has them."""
    if isinstance(shapes, dict):
        return [name_service(inner) for inner in shapes.values()]
    return [name_service(inner) for inner in shapes] if isinstance(shapes, list) else shapes


def check_container(container: dict[str, Any], target: str) -> None:
    words = [*container.get("entrypoint", ()), *container.get("command", ()), *container.get("args", ())]
    if target == "compose":
        for text in list_strings(container):
            left = re.sub(r"\$\{[A-Z_]+:-\}", "", text.replace("$$", ""))
            assert "$" not in left, f"Compose substitutes a variable in {text!r}"
        words = [word.replace("$$", "$") for word in words]
    else:
        variables = dict.fromkeys(("HF_TOKEN", "VLLM_API_KEY", "HOME", "USER"), SECRET)
        values = [*words, *(one.get("value", "") for one in container.get("env", ()))]
        assert SECRET not in "".join(expand_kubernetes(value, variables) for value in values)
        words = [expand_kubernetes(word, {}) for word in words]
    for at, word in enumerate(words[:-1]):
        if word == "-c" and words[at - 1] == "sh":
            found = run_harmlessly("sh", words[at + 1], "sleep() { exit 0; }")
            assert "canary" not in found
        elif word == "-c":
            ast.parse(words[at + 1])


@pytest.mark.parametrize("target", TARGETS)
@a_fifth
@given(case=st.sampled_from(PLAIN_CASES), name=hostile, path=st.none() | hostile)
@example(case="ollama", name="a\ntouch canary\n", path=None)
@example(case="vllm", name="$(VLLM_API_KEY)${HF_TOKEN}", path="a:b$(HF_TOKEN)")
@example(case="tensorrt-llm converted", name="'; touch canary; '", path=None)
@example(case="llama.cpp", name="`touch canary`", path=None)
def test_files_with_generated_names_keep_their_structure(target: str, case: str, name: str, path: str | None) -> None:
    check_files(case, target, name, path)


def describe_platform(names: list[str]) -> Intent:
    """An intent whose pools, services, tenants and settings all have hostile names."""
    pool, other, service, tenant, namespace, gateway, more = names
    return to_intent({
        "pools": [
            {"name": pool, "accelerator": "L40S", "count": 4, "gpus_per_node": 4},
            {"name": f"{other}2", "cpu": "Intel Xeon Gold 6430", "cores": 32, "count": 1, "ram_gb": 128},
        ],
        "services": [
            {"name": service, "model": QWEN, "pool": pool, "tenants": [tenant], "workload": {"concurrency": 4}},
            {"name": f"{service}2", "model": QWEN, "pool": f"{other}2", "workload": {"concurrency": 1}},
        ],
        "tenants": [{"name": tenant, "share": 0.5}, {"name": f"{tenant}2"}],
        "deploy": {
            "namespace": namespace, "gateway": gateway, "storage_class": more, "prometheus": more, "registry": more,
            "rdma": more,
        },
        "operations": {"machinery": "kubernetes"},
    })  # fmt: skip


@functools.cache
def plan_platform() -> Portfolio:
    """The portfolio with usual names: names change no decision."""
    intent = describe_platform(["pool", "other", "service", "tenant", "namespace", "gateway", "more"])
    return make_portfolio(intent, [find_model(QWEN) for _ in intent.services])


def build_hostile_platform(names: list[str]) -> Platform:
    intent, usual = describe_platform(names), plan_platform()
    renamed = dict(zip(("pool", "other2"), (pool.name for pool in intent.pools), strict=True))
    placements = tuple(
        replace_fields(placement, service=str(service.name), pool=renamed[str(placement.pool)])
        for placement, service in zip(usual.placements, intent.services, strict=True)
    )
    free = {renamed[name]: count for name, count in usual.free.items()}
    found = replace_fields(usual, placements=placements, free=free)
    return place_services(intent, found, [find_model(QWEN) for _ in intent.services])


@a_fifth
@given(st.lists(hostile.map(lambda text: f"{text}x".encode("utf-8", "replace").decode()), min_size=7, max_size=7))
@example(["../../outside", "..", "a\n- b", "a: b", 'a"} or vector(1) #', "a/b\n", "$(HF_TOKEN)"])
def test_hostile_platform_stays_in_its_files_and_scalars(names: list[str]) -> None:
    try:
        platform = build_hostile_platform(names)
    except UsageError:
        return  # such as a name that is too long, or used twice
    for target in TARGETS:
        with contextlib.suppress(BedplateError):
            files = emit_target(platform, target)
            assert not [one for one in files if one.startswith("/") or ".." in one.split("/")]
            trees = [tree for _, text in read_yaml(files) for tree in yaml.load_all(text, LOADER)]
            assert trees and all(isinstance(tree, dict) for tree in trees)
            for container in list_containers(trees):
                check_container(container, target)
            for tree in trees:
                if tree.get("kind") == "ScaledObject":
                    for trigger in tree["spec"]["triggers"]:
                        check_query(trigger["metadata"]["query"])


def check_query(query: str) -> None:
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', query)
    assert re.fullmatch(r'(?:sum\(\w+(?::\w+)*\{\w+=""(?:,\w+="")*\}\)(?: \+ )?)+', bare), query


# the source


def find_comments_with_values(text: str) -> list[int]:
    """Lines with a comment that contains a value and is not written by `write_comment`."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            pieces = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            if re.search(r"(?:^|\n)#[^\n]*\{\}", pieces):
                found.append(node.lineno)
        elif isinstance(node, ast.Constant) and re.search(r"(?:^|\n)#[^\n]*(?<!\{)\{\w+\}(?!\})", str(node.value)):
            found.append(node.lineno)
    return found


def test_only_one_module_quotes_text() -> None:
    allowed = {SOURCE / "values" / "quoting.py", SOURCE / "bundling" / "install.py"}
    allowed.add(SOURCE / "deploy" / "script_steps.py")  # runs without the rest of bedplate
    shipped = SOURCE / "engines" / "shipped"
    users = {path for path in SOURCE.rglob("*.py") if re.search(r"^\s*(?:import|from) shlex\b", path.read_text(), re.M)}
    assert {path for path in users if not path.is_relative_to(shipped)} == allowed


@pytest.mark.parametrize("path", EMITTERS, ids=lambda path: path.name)
def test_emitters_write_comments_through_the_quoting_module(path: Path) -> None:
    assert find_comments_with_values(path.read_text()) == []


def test_a_comment_with_a_value_is_found() -> None:
    assert find_comments_with_values('x = f"# {name}"') == [1] and find_comments_with_values(
        "HEAD = '#!/x\\n# {a}'"
    ) == [1]
    assert find_comments_with_values('x = f"a {name} # b"\ny = "# plain"') == []
