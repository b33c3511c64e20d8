"""The catalogue of published weights: every entry cites its sources and matches the model that it belongs to."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from bedplate.errors import UsageError
from bedplate.facts.known_models import apply_label, find_model, look_up_model
from bedplate.facts.published_weights import (
    HubListing,
    PublishedCatalogue,
    PublishedRepository,
    RepositoryListing,
    find_gguf_repository,
    find_published_name,
    get_listing_path,
    get_published_model,
    list_published,
    list_repository_keys,
    load_catalogue,
    look_up_named_weights,
)
from bedplate.values import replace_fields
from bedplate.values.decision import list_part_names

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
REPOSITORIES = [(name, one) for name, model in load_catalogue().models.items() for one in model.repositories]


def find_uncited(catalogue: PublishedCatalogue) -> list[str]:
    """The repositories without a source, or with a source that has no address."""
    return [
        one.repository
        for model in catalogue.models.values()
        for one in model.repositories
        if not one.sources
        or any(not catalogue.sources.get(source, "").startswith("https://") for source in one.sources)
    ]


def test_every_entry_cites_a_page_or_file() -> None:
    assert find_uncited(load_catalogue()) == []


@pytest.mark.parametrize("sources", [(), ("nowhere",)])
def test_an_entry_without_a_citation_is_found(sources: tuple[str, ...]) -> None:
    made = PublishedRepository(repository="me/model", format="mlx", weights={"4-BIT": None}, sources=sources)
    catalogue = load_catalogue()
    model = next(iter(catalogue.models.values()))
    faulty = msgspec.structs.replace(
        catalogue, models={**catalogue.models, "me/original": msgspec.structs.replace(model, repositories=(made,))}
    )
    assert find_uncited(faulty) == ["me/model"]


def test_the_most_used_families_are_there() -> None:
    names = " ".join(load_catalogue().models)
    for family in (
        "Llama-3.1-8B-Instruct", "Llama-3.2-3B-Instruct", "Llama-3.3-70B-Instruct", "Qwen2.5-7B-Instruct", "Qwen3-8B",
        "Qwen3-30B-A3B", "gemma-2-9b-it", "gemma-3-12b-it", "Mistral-7B-Instruct-v0.3", "Mixtral-8x7B-Instruct-v0.1",
        "phi-4", "gpt-oss-20b", "DeepSeek-R1", "DeepSeek-V3", "DeepSeek-R1-Distill-Qwen-7B", "SmolLM2-1.7B-Instruct",
    ):  # fmt: skip
        assert f"/{family}" in names, family
    assert len(load_catalogue().models) >= 40


def test_all_seven_kinds_are_there() -> None:
    kinds = {one.method or one.format for _, one in REPOSITORIES}
    assert {"gguf", "awq", "gptq", "fp8", "nvfp4", "mlx", "exl3"} <= kinds


def test_fp8_of_nvidia_is_made_with_modelopt() -> None:
    found = [form for name, _ in REPOSITORIES for form in list_published(find_model(name)) if form.label == "FP8"]
    methods = {form.weights.repository: form.model.quantization_details for form in found}
    assert len([name for name in methods if name.startswith("nvidia/")]) >= 5
    for name, details in methods.items():
        assert details is not None and (details.method == "modelopt") == name.startswith("nvidia/"), name


def test_names_are_repositories_of_known_models() -> None:
    for name, one in REPOSITORIES:
        assert REPOSITORY.fullmatch(one.repository), one.repository
        assert look_up_model(name) is not None, name


def test_files_exist_for_gguf_only_and_branches_for_exl3_only() -> None:
    for _, one in REPOSITORIES:
        for label in one.weights:
            file = one.get_file(label)
            assert (file is not None and file.endswith(".gguf")) == (one.format == "gguf"), (one.repository, label)
            assert (label in one.revisions) == (one.format == "exl3"), (one.repository, label)


def test_short_names_are_unique() -> None:
    short = [model.short for model in load_catalogue().models.values() if model.short is not None]
    assert len(short) == len(set(short)) > 40
    assert {"llama3.1:8b", "qwen3:30b-a3b", "gpt-oss:20b"} <= set(short)


def test_stated_sizes_are_near_the_computed_ones() -> None:
    """A size of another model, or in other units, would be far off."""
    for name, one in REPOSITORIES:
        for label, size in one.weights.items():
            if size is None:
                continue
            made = apply_label(find_model(name), label)
            without = made.weight_bytes - (made.vision_weight_bytes if one.format == "gguf" else 0)
            # K-quants need more bits where rows are not a multiple of 256.
            most = 1.6 if (made.hidden_size or 0) % 256 else 1.25
            assert 0.8 < size / without < most, (name, one.repository, label, size, without)


class TestForms:
    def test_a_reported_size_is_the_memory_of_the_weights(self) -> None:
        model = find_model("meta-llama/Llama-3.1-8B-Instruct")
        form = next(one for one in list_published(model) if one.label == "Q4_K_M")
        assert form.weights.size_bytes == form.model.weight_bytes == 4_920_739_168
        assert form.weights.size_basis == "reported"
        assert sum(part.bytes for part in form.model.parts) == pytest.approx(form.model.weight_bytes, rel=1e-6)
        assert form.weights.sources

    def test_a_missing_size_is_computed(self) -> None:
        form = next(one for one in list_published(find_model("Qwen/Qwen3-8B")) if one.label == "AWQ-Int4")
        assert form.weights.size_basis == "computed"
        assert form.weights.size_bytes == form.model.weight_bytes > 4e9

    def test_the_original_name_stays(self) -> None:
        for form in list_published(find_model("Qwen/Qwen3-32B")):
            assert form.model.name == "Qwen/Qwen3-32B"
            assert get_published_model(find_model("Qwen/Qwen3-32B"), form.weights) == form.model

    def test_blocks_of_fp8_are_known(self) -> None:
        for name in ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B"):
            form = next(one for one in list_published(find_model(name)) if one.label == "FP8")
            assert form.model.quantization_details is not None
            assert form.model.quantization_details.block == (128, 128)

    def test_an_earlier_name_of_the_repository_counts(self) -> None:
        assert find_published_name("meta-llama/Meta-Llama-3.1-8B-Instruct") == "meta-llama/Llama-3.1-8B-Instruct"
        assert list_published(find_model("meta-llama/Meta-Llama-3.1-8B-Instruct"))

    @pytest.mark.parametrize("name", ["meta-llama/Meta-Llama-3.1-70B", "me/Llama-3.1-8B-Instruct-tuned"])
    def test_a_model_of_the_same_shape_is_another_model(self, name: str) -> None:
        assert list_published(find_model(name)) == ()

    @pytest.mark.parametrize("name", ["Qwen3-8B Q4_K_M", "Qwen/Qwen3-8B:Q4_K_M"])
    def test_a_requested_quantization_is_the_only_one(self, name: str) -> None:
        (form,) = list_published(find_model(name))
        assert form.weights.file == "Qwen3-8B-Q4_K_M.gguf"

    def test_own_files_are_never_replaced(self) -> None:
        model = replace_fields(find_model("Qwen/Qwen3-8B"), files=("/models/mine/model.safetensors",))
        assert list_published(model) == ()

    def test_a_split_file_has_all_its_parts(self) -> None:
        form = next(one for one in list_published(find_model("deepseek-ai/DeepSeek-R1")) if one.label == "Q4_K_M")
        assert form.weights.file is not None
        names = list_part_names(form.weights.file)
        assert len(names) == form.weights.parts == 9
        assert names[-1].endswith("-00009-of-00009.gguf")

    def test_serve_finds_the_gguf_repository(self) -> None:
        assert find_gguf_repository("Qwen/Qwen3-8B") == "unsloth/Qwen3-8B-GGUF"
        assert find_gguf_repository("me/model") is None


class TestNamedRepositories:
    """`unsloth/Qwen3-32B-GGUF` names weights in one engine's format, not the original model."""

    def test_each_repository_means_its_own_weights(self) -> None:
        of_files = [one for _, one in REPOSITORIES if one.format in ("gguf", "exl3")]
        assert len(of_files) > 100
        for one in of_files:
            model = look_up_named_weights(one.repository)
            assert model is not None, one.repository
            (form,) = list_published(model)
            assert (model.format, form.weights.repository) == (one.format, one.repository)
            assert form.weights.sources and (form.weights.file or form.weights.revision), one.repository
            assert any(label.replace("BPW", " bpw") == model.quantization for label in one.weights)
            assert form.model == get_published_model(model, form.weights)

    def test_a_quantization_that_is_not_stated_is_assumed_and_said(self) -> None:
        model = look_up_named_weights("unsloth/Qwen3-32B-GGUF")
        assert model is not None and (model.name, model.quantization) == ("unsloth/Qwen3-32B-GGUF:Q4_K_M", "Q4_K_M")
        assert model.origin is not None and "Q4_K_M is assumed (of Q2_K" in model.origin
        stated = "unsloth/Qwen3-32B-GGUF:Q6_K"
        assert look_up_named_weights(stated) == find_model(stated)

    @pytest.mark.parametrize(
        ("text", "fetched"),
        [
            ("TheBloke/Mistral-7B-Instruct-v0.2-GGUF", "Mistral-7B-Instruct-v0.2-Q4_K_M.gguf"),
            ("me/Llama-3.1-8B-Instruct-tuned-GGUF:Q5_K_M", "Llama-3.1-8B-Instruct-tuned-Q5_K_M.gguf"),
            ("unsloth/Qwen3-32B-GGUF/Qwen3-32B-Q5_K_M.gguf", "Qwen3-32B-Q5_K_M.gguf"),
            ("me/Qwen3-8B-exl3", "4.0bpw"),
            ("me/Qwen3-8B-exl2:5.0bpw", "5.0bpw"),
        ],
    )
    def test_an_unlisted_repository_is_fetched_too(self, text: str, fetched: str) -> None:
        model = look_up_named_weights(text)
        assert model is not None
        (form,) = list_published(model)
        assert form.weights.repository == "/".join(text.partition(":")[0].split("/")[:2])
        assert form.weights.sources == ()
        assert fetched in (form.weights.file, form.weights.revision) and form.format in text.lower()

    @pytest.mark.parametrize("text", ["Qwen/Qwen3-32B", "Qwen3 32B Q4_K_M GGUF", "Qwen/Qwen3-8B-AWQ"])
    def test_other_names_mean_what_they_meant(self, text: str) -> None:
        assert look_up_named_weights(text) == find_model(text)


class TestListing:
    """What the hub said replaces what the catalogue says."""

    @pytest.fixture(autouse=True)
    def _use_own_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path))

    def store(self, repositories: dict[str, RepositoryListing]) -> None:
        found = HubListing(listed_at="2026-11-18T00:00:00+00:00", endpoint="https://hub", repositories=repositories)
        get_listing_path().write_bytes(msgspec.json.encode(found))

    def test_sizes_and_missing_files(self) -> None:
        files = {"Qwen3-8B-Q4_K_M.gguf": 5_027_783_488}
        self.store({"unsloth/Qwen3-8B-GGUF": RepositoryListing(files=files)})
        found = [one for one in list_published(find_model("Qwen/Qwen3-8B")) if one.format == "gguf"]
        assert [(one.label, one.weights.size_bytes) for one in found] == [("Q4_K_M", 5_027_783_488)]
        assert found[0].weights.size_basis == "reported"

    def test_a_repository_that_is_gone(self) -> None:
        self.store({"Qwen/Qwen3-8B-AWQ": RepositoryListing(missing=True)})
        labels = {one.label for one in list_published(find_model("Qwen/Qwen3-8B"))}
        assert "AWQ-Int4" not in labels and "FP8" in labels

    def test_a_branch_is_listed_by_itself(self) -> None:
        self.store({"turboderp/Qwen3-8B-exl3@4.0bpw": RepositoryListing(files={"model.safetensors": 5_000_000_000})})
        forms = [one.weights for one in list_published(find_model("Qwen/Qwen3-8B")) if one.format == "exl3"]
        sizes = {one.revision: one.size_bytes for one in forms}
        assert sizes["4.0bpw"] == 5_000_000_000 < sizes["6.0bpw"]

    def test_a_damaged_file_counts_as_none(self) -> None:
        get_listing_path().write_text("{")
        assert list_published(find_model("Qwen/Qwen3-8B"))

    def test_keys(self) -> None:
        keys = list_repository_keys(["Qwen/Qwen3-8B"])
        assert "unsloth/Qwen3-8B-GGUF" in keys and "turboderp/Qwen3-8B-exl3@4.0bpw" in keys
        assert set(keys) < set(list_repository_keys())
        with pytest.raises(UsageError, match="does not have Qwen/Qwen3-9B"):
            list_repository_keys(["Qwen/Qwen3-9B"])
