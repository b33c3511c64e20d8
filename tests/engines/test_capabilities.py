"""What each engine states about the features of requests, and the mistakes that its error messages report."""

from __future__ import annotations

import pytest
from tests.engines.plans import machine, model, plan

from bedplate.engines import get_engine, load_engines
from bedplate.run.builtin import read_builtin_facts
from bedplate.values import Workload, replace_fields
from bedplate.values.capabilities import Capabilities

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.mark.parametrize("name", load_engines())
def test_every_engine_states_its_features_with_a_source(name: str) -> None:
    features = get_engine(name).server_features
    assert features is not None and features.source


def describe(name: str, which: str = LLAMA, on: str = "H100 SXM", **work: object) -> Capabilities:
    engine = get_engine(name)
    workload = Workload(concurrency=16, context_tokens=8192, **work)  # type: ignore[arg-type]
    found = engine.describe_capabilities(plan(engine, machine(on), model(which), workload=workload))
    assert found is not None
    return found


def test_capabilities_follow_from_the_engine_the_model_and_the_plan() -> None:
    vllm = describe("vllm")
    assert (vllm.tools, vllm.n, vllm.vision, vllm.context_tokens) == ("forced", None, False, 8192)
    assert describe("vllm", "Qwen/Qwen2-72B-Instruct").tools == "none", "vLLM has no parser for its calls"
    assert describe("vllm", "google/gemma-4-31B-it").vision
    embeds = describe("vllm", task="embed")
    assert embeds.embeddings and not embeds.generation
    assert not describe("tensorrt-llm").json_schema
    assert describe("tensorrt-llm", structured_output=True).json_schema


def test_llama_cpp_offers_tools_where_its_chat_template_has_them() -> None:
    engine = get_engine("llama.cpp")
    own = read_builtin_facts()
    base = plan(engine, machine("cpu"), own, workload=Workload(concurrency=4, context_tokens=1024))
    for template, tools in (
        (own.chat_template, "auto"), ("{{ tools }}", "auto"), ("{{ messages }}", "none"), (None, "auto"),
    ):  # fmt: skip
        found = engine.describe_capabilities(replace_fields(base, model=replace_fields(own, chat_template=template)))
        assert found is not None and found.tools == tools
    bare = replace_fields(own, chat_template=None, has_chat_template=False)
    found = engine.describe_capabilities(replace_fields(base, model=bare))
    assert found is not None and found.tools == "none"
    assert (found.n, found.vocab_size) == (4, own.vocab_size)


@pytest.mark.parametrize(
    ("name", "level"),
    [("onnxruntime", "forced"), ("mistral.rs", "forced"), ("exllamav3", "forced"), ("exllamav2", "auto")],
)
def test_the_shipped_server_offers_tools_whose_calls_it_can_read(name: str, level: str) -> None:
    engine = get_engine(name)
    own = model(LLAMA)
    card = "cpu" if name in ("onnxruntime", "mistral.rs") else "RTX 4090"
    base = plan(engine, machine(card), own, workload=Workload(concurrency=1, context_tokens=1024))
    for template, tools in (
        (read_builtin_facts().chat_template, level), ("{{ tools }}<tool_call>", level),
        ("{{ tools }}[TOOL_CALLS]", level), ("{{ tools }}", "none"), ("{{ messages }}", "none"), (None, level),
    ):  # fmt: skip
        found = engine.describe_capabilities(replace_fields(base, model=replace_fields(own, chat_template=template)))
        assert found is not None and found.tools == tools, template


@pytest.mark.parametrize(
    ("name", "message", "code"),
    [
        ("llama.cpp", "request (3104 tokens) exceeds the available context size (512 tokens), try increasing it",
         "context_length_exceeded"),
        ("llama.cpp", "Failed to parse messages: Missing tool call type: \"x\"", "invalid_messages"),
        ("llama.cpp", "audio input is not supported - hint: you may need to provide the mmproj", "unsupported_vision"),
        ("llama.cpp", "This server does not support embeddings. Start it with `--embeddings`",
         "unsupported_embeddings"),
        ("llama.cpp", "Unable to generate parser for this template. Automatic parser generation failed: JSON schema "
         "error at #: unrecognized type banana", "invalid_schema"),
        ("llama.cpp", "While executing CallExpression\nError: Jinja Exception: Conversation roles must alternate",
         "invalid_messages"),
        ("llama.cpp", "Unknown reasoning format: x", "invalid_value"),
        ("llama.cpp", "failed to decode", None),
        ("vllm", "This model's maximum context length is 512 tokens, not 600", "context_length_exceeded"),
        ("vllm", "Token id 5279552648203111001 is out of vocabulary", "invalid_tokens"),
        ("sglang", "The input (900 tokens) is longer than the model's context length (512 tokens).",
         "context_length_exceeded"),
    ],
)  # fmt: skip
def test_error_messages_of_engines_report_mistakes(name: str, message: str, code: str | None) -> None:
    found = get_engine(name).find_mistake(message)
    assert (found.code if found is not None else None) == code
    assert found is None or ("{" not in found.message and "--embeddings" not in found.message)
