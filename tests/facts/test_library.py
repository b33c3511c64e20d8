from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from bedplate.errors import UsageError
from bedplate.facts import library
from bedplate.facts.library import LocatedModel, find_quantization, list_local_models, locate, split_reference

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "fedcba9876543210fedcba9876543210fedcba98"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate home folder, without environment variables that name other folders."""
    for variable in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "OLLAMA_MODELS"):
        monkeypatch.delenv(variable, raising=False)
    home = tmp_path / "home"
    work = tmp_path / "work"
    home.mkdir()
    work.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "bedplate"))
    monkeypatch.chdir(work)
    return home


def put(path: Path, size: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF".ljust(size, b"\0"))
    return path


def write_hub_repository(cache: Path, repo: str, *files: str, commit: str = COMMIT, main: bool = True) -> Path:
    """Write a cached repository in huggingface_hub's layout: blobs, links to them, and a ref."""
    folder = cache / ("models--" + repo.replace("/", "--"))
    for file in files:
        etag = hashlib.sha256(f"{repo}{commit}{file}".encode()).hexdigest()
        put(folder / "blobs" / etag)
        link = folder / "snapshots" / commit / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(folder / "blobs" / etag, link.parent))
    if main:
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
    return folder / "snapshots" / commit


def write_ollama_model(
    store: Path, name: str, *, size: int = 100, kind: str = "model", digest: str | None = None
) -> Path:
    """Write a model in Ollama's layout: a manifest, and blobs named by their hash."""
    digest = digest or "sha256:" + hashlib.sha256(name.encode()).hexdigest()
    manifest = store / "manifests" / name.replace(":", "/")
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest, "size": size},
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "0" * 64, "size": 5},
        {"mediaType": "application/vnd.ollama.image.params", "digest": "sha256:" + "1" * 64, "size": 5},
    ]
    manifest.write_text(
        json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
                "config": {"mediaType": "application/vnd.docker.container.image.v1+json", "digest": digest},
                "layers": layers,
            }
        )
    )
    return put(store / "blobs" / digest.replace(":", "-"), size)


def locate_existing(text: str) -> LocatedModel:
    located = locate(text)
    assert located is not None, text
    return located


def read_refusal(text: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        locate(text)
    return caught.value


class TestPaths:
    def test_a_file_is_located(self, tmp_path: Path) -> None:
        path = put(tmp_path / "work" / "Qwen3-8B-Q4_K_M.gguf", 321)
        for text in (str(path), "Qwen3-8B-Q4_K_M.gguf", "./Qwen3-8B-Q4_K_M.gguf"):
            assert locate_existing(text) == LocatedModel("Qwen3-8B", path, "a file", 321, "Q4_K_M")

    def test_a_tilde_is_the_home_folder(self, machine: Path) -> None:
        path = put(machine / "a.gguf")
        assert locate_existing("~/a.gguf").path == path

    def test_any_part_finds_the_first_and_the_total_size(self, tmp_path: Path) -> None:
        parts = [put(tmp_path / f"big-0000{n}-of-00003.gguf", 100 * n) for n in (1, 2, 3)]
        assert locate_existing(str(parts[2])) == LocatedModel("big", parts[0], "a file", 600)

    def test_a_folder_with_one_model_is_located(self, tmp_path: Path) -> None:
        path = put(tmp_path / "models" / "only-Q8_0.gguf")
        put(tmp_path / "models" / "mmproj-only-f16.gguf")
        assert locate_existing(str(tmp_path / "models")) == LocatedModel("only", path, "a folder", 100, "Q8_0")

    def test_a_split_model_in_a_subfolder_is_located(self, tmp_path: Path) -> None:
        parts = [put(tmp_path / "models" / "Q4" / f"big-Q4_K_M-0000{n}-of-00002.gguf") for n in (1, 2)]
        assert locate_existing(str(tmp_path / "models")).path == parts[0]

    def test_several_models_in_a_folder_are_listed(self, tmp_path: Path) -> None:
        put(tmp_path / "models" / "one.gguf")
        put(tmp_path / "models" / "two.gguf")
        error = read_refusal(str(tmp_path / "models"))
        assert "has 2 models" in error.message
        assert error.cause is not None
        assert "one.gguf" in error.cause
        assert "two.gguf" in error.cause

    def test_a_folder_without_a_model_names_its_other_files(self, tmp_path: Path) -> None:
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf" / "pytorch_model.bin").touch()
        error = read_refusal(str(tmp_path / "hf"))
        assert "contains no model" in error.message
        assert error.cause is not None
        assert "pytorch_model.bin" in error.cause

    def test_a_folder_of_safetensors_is_a_model_itself(self, tmp_path: Path) -> None:
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf" / "model.safetensors").write_bytes(b"12345")
        found = locate(str(tmp_path / "hf"))
        assert found is not None
        assert (found.path, found.size_bytes, found.origin) == (tmp_path / "hf", 5, "a folder")

    def test_a_folder_with_only_the_same_name_is_ignored(self, tmp_path: Path, machine: Path) -> None:
        (tmp_path / "work" / "llama3.2").mkdir()
        blob = write_ollama_model(machine / ".ollama" / "models", "registry.ollama.ai/library/llama3.2:latest")
        assert locate_existing("llama3.2").path == blob

    @pytest.mark.parametrize("text", ["./qwen3-8b.gguf", "qwen3-8b.gguf"])
    def test_a_missing_file_suggests_a_similar_name(self, tmp_path: Path, text: str) -> None:
        put(tmp_path / "work" / "qwen3-8B.gguf")
        error = read_refusal(text)
        assert error.message == f"there is no file {text}"
        assert error.hint == "that folder contains qwen3-8B.gguf"

    def test_a_missing_folder_suggests_models_elsewhere(self, machine: Path) -> None:
        put(machine / ".lmstudio" / "models" / "pub" / "repo" / "phi-4-Q4_K_M.gguf")
        error = read_refusal("/nowhere/phi-4-Q4_K_S.gguf")
        assert error.hint is not None
        assert "pub/repo/phi-4-Q4_K_M.gguf" in error.hint

    def test_an_empty_name_is_rejected(self) -> None:
        assert "no model is specified" in read_refusal("  ").message


class TestHuggingFace:
    @pytest.fixture
    def cache(self, machine: Path) -> Path:
        return machine / ".cache" / "huggingface" / "hub"

    def test_a_repository_with_one_model_is_located(self, cache: Path) -> None:
        snapshot = write_hub_repository(cache, "unsloth/Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf", "mmproj-F16.gguf")
        located = locate_existing("unsloth/Qwen3-8B-GGUF")
        assert located.path == snapshot / "Qwen3-8B-Q4_K_M.gguf"
        assert located.name == "unsloth/Qwen3-8B-GGUF"
        assert located.origin == "the Hugging Face cache"
        assert located.size_bytes == 100

    @pytest.mark.parametrize(
        "text",
        [
            "a/b:Q8_0",
            "a/b:q8_0",
            "a/b/m-Q8_0.gguf",
            "hf.co/a/b:Q8_0",
            "A/B:Q8_0",
            "https://huggingface.co/a/b/blob/main/m-Q8_0.gguf",
        ],
    )
    def test_quantization_or_file_selects_one_of_several(self, cache: Path, text: str) -> None:
        snapshot = write_hub_repository(cache, "a/b", "m-Q4_K_M.gguf", "m-Q8_0.gguf")
        assert locate_existing(text).path == snapshot / "m-Q8_0.gguf"

    def test_several_models_are_listed_if_none_is_selected(self, cache: Path) -> None:
        write_hub_repository(cache, "a/b", "m-Q4_K_M.gguf", "m-Q8_0.gguf")
        error = read_refusal("a/b")
        assert error.cause == "a/b:Q4_K_M (100 B); a/b:Q8_0 (100 B)"

    def test_a_missing_quantization_is_left_to_the_hub(self, cache: Path) -> None:
        write_hub_repository(cache, "a/b", "m-Q4_K_M.gguf")
        assert locate("a/b:Q6_K") is None
        assert locate("a/b/m-Q6_K.gguf") is None
        assert locate("c/d") is None

    def test_the_ud_prefix_may_be_omitted(self, cache: Path) -> None:
        snapshot = write_hub_repository(cache, "a/b", "m-UD-Q4_K_XL.gguf")
        assert locate_existing("a/b:Q4_K_XL").path == snapshot / "m-UD-Q4_K_XL.gguf"

    def test_main_takes_precedence_over_other_snapshots(self, cache: Path) -> None:
        snapshot = write_hub_repository(cache, "a/b", "m-Q4_K_M.gguf")
        write_hub_repository(cache, "a/b", "m-Q4_K_M.gguf", commit=OLDER, main=False)
        os.utime(snapshot.parent / OLDER, (2**31, 2**31))
        assert locate_existing("a/b").path.parent.name == COMMIT

    def test_a_split_model_in_a_repository_folder_is_located(self, cache: Path) -> None:
        parts = [f"Q4_K_M/m-Q4_K_M-0000{n}-of-00002.gguf" for n in (1, 2)]
        snapshot = write_hub_repository(cache, "a/b", *parts)
        assert locate_existing("a/b:Q4_K_M").path == snapshot / parts[0]
        assert locate_existing("a/b").size_bytes == 200

    def test_an_incomplete_split_model_is_not_found(self, cache: Path) -> None:
        write_hub_repository(cache, "a/b", "m-Q4_K_M-00001-of-00002.gguf")
        assert locate("a/b") is None

    def test_a_dangling_link_is_ignored(self, cache: Path) -> None:
        snapshot = write_hub_repository(cache, "a/b", "m-Q4_K_M.gguf")
        (snapshot / "m-Q4_K_M.gguf").resolve().unlink()
        assert locate("a/b") is None

    def test_the_environment_variables_set_the_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_hub_repository(tmp_path / "one" / "hub", "a/one", "m.gguf")
        write_hub_repository(tmp_path / "two", "a/two", "m.gguf")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "one"))
        assert locate("a/one") is not None
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "two"))
        assert locate("a/one") is None
        assert locate("a/two") is not None

    def test_the_folder_is_the_one_of_huggingface_hub(self, machine: Path) -> None:
        from huggingface_hub import constants

        relative = Path(constants.HF_HUB_CACHE).relative_to(constants.HF_HOME)
        assert library.find_hub_cache() == machine / ".cache" / "huggingface" / relative


class TestOllama:
    @pytest.fixture
    def store(self, machine: Path) -> Path:
        return machine / ".ollama" / "models"

    def test_latest_is_the_default_tag(self, store: Path) -> None:
        write_ollama_model(store, "registry.ollama.ai/library/llama3.2:1b")
        latest = write_ollama_model(store, "registry.ollama.ai/library/llama3.2:latest", size=777)
        assert locate_existing("llama3.2") == LocatedModel("llama3.2:latest", latest, "Ollama", 777)

    @pytest.mark.parametrize(
        ("text", "manifest", "name"),
        [
            ("llama3.2:1b", "registry.ollama.ai/library/llama3.2:1b", "llama3.2:1b"),
            ("me/mine:v2", "registry.ollama.ai/me/mine:v2", "me/mine:v2"),
            ("hf.co/a/b-GGUF:Q4_K_M", "hf.co/a/b-GGUF:Q4_K_M", "hf.co/a/b-GGUF:Q4_K_M"),
        ],
    )
    def test_names_with_namespace_and_tag_are_located(self, store: Path, text: str, manifest: str, name: str) -> None:
        blob = write_ollama_model(store, manifest)
        write_ollama_model(store, "registry.ollama.ai/library/other:latest")
        located = locate_existing(text)
        assert (located.path, located.name) == (blob, name)

    def test_a_single_tag_may_be_omitted(self, store: Path) -> None:
        blob = write_ollama_model(store, "registry.ollama.ai/library/qwen3:0.6b")
        assert locate_existing("qwen3").path == blob

    def test_several_tags_are_listed(self, store: Path) -> None:
        write_ollama_model(store, "registry.ollama.ai/library/qwen3:0.6b")
        write_ollama_model(store, "registry.ollama.ai/library/qwen3:8b")
        error = read_refusal("qwen3")
        assert error.cause == "qwen3:0.6b (100 B); qwen3:8b (100 B)"

    def test_ollama_models_sets_the_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        blob = write_ollama_model(tmp_path / "elsewhere", "registry.ollama.ai/library/qwen3:latest")
        monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "elsewhere"))
        assert locate_existing("qwen3").path == blob

    @pytest.mark.parametrize("digest", ["sha256:/../../secret", "sha256:zz", "md5:00", "../../secret"])
    def test_a_manifest_cannot_point_outside_of_the_store(self, store: Path, digest: str) -> None:
        name = "registry.ollama.ai/library/evil:latest"
        write_ollama_model(store, name)
        (store / "blobs" / "sha256-").mkdir()
        put(store / "secret")
        put(store / "blobs" / "sha256-zz")
        manifest = store / "manifests" / name.replace(":", "/")
        manifest.write_text(json.dumps({"layers": [{"mediaType": library._MODEL_LAYER, "digest": digest}]}))
        assert locate("evil") is None

    @pytest.mark.parametrize("content", ["", "[]", "{", '{"layers": 3}', '{"layers": [1]}', "null"])
    def test_a_broken_manifest_is_skipped(self, store: Path, content: str) -> None:
        write_ollama_model(store, "registry.ollama.ai/library/broken:latest")
        (store / "manifests/registry.ollama.ai/library/broken/latest").write_text(content)
        assert locate("broken") is None
        assert list_local_models() == ()

    def test_models_that_are_not_gguf_are_skipped(self, store: Path) -> None:
        write_ollama_model(store, "registry.ollama.ai/library/mlx:latest", kind="tensor")
        assert locate("mlx") is None

    def test_a_missing_blob_is_not_a_model(self, store: Path) -> None:
        write_ollama_model(store, "registry.ollama.ai/library/gone:latest").unlink()
        assert locate("gone") is None

    @pytest.mark.parametrize("text", ["a/b/c/d", "no such", "x:y:z", "..:latest", "https://example.com/x"])
    def test_invalid_names_are_not_looked_up(self, store: Path, text: str) -> None:
        write_ollama_model(store, "registry.ollama.ai/library/x:latest")
        assert locate(text) is None


class TestLmStudio:
    @pytest.mark.parametrize("place", [".lmstudio/models", ".cache/lm-studio/models"])
    @pytest.mark.parametrize("text", ["pub/repo", "pub/repo:Q4_K_M", "pub/repo/m-Q4_K_M.gguf"])
    def test_a_model_is_located_by_publisher_and_repository(self, machine: Path, place: str, text: str) -> None:
        path = put(machine / place / "pub" / "repo" / "m-Q4_K_M.gguf")
        put(machine / place / "pub" / "repo" / "mmproj-m-f16.gguf")
        located = locate_existing(text)
        assert (located.path, located.origin) == (path, "LM Studio")

    def test_the_hub_cache_takes_precedence(self, machine: Path) -> None:
        put(machine / ".lmstudio/models/pub/repo/m-Q4_K_M.gguf")
        write_hub_repository(machine / ".cache/huggingface/hub", "pub/repo", "m-Q4_K_M.gguf")
        assert locate_existing("pub/repo").origin == "the Hugging Face cache"


class TestByName:
    def test_a_common_name_finds_the_model(self, machine: Path) -> None:
        path = put(machine / ".lmstudio/models/pub/SmolLM2-GGUF/SmolLM2-135M-Instruct-Q4_K_M.gguf")
        for text in ("smollm2-135m-instruct", "SmolLM2-135M-Instruct-Q4_K_M", "SmolLM2-135M-Instruct:q4_k_m"):
            assert locate_existing(text).path == path
        assert locate("SmolLM2-135M-Instruct:Q8_0") is None

    def test_two_models_with_one_name_are_listed(self, machine: Path) -> None:
        put(machine / ".lmstudio/models/pub/repo/phi-4-Q4_K_M.gguf")
        put(machine / ".lmstudio/models/pub/repo/phi-4-Q8_0.gguf")
        error = read_refusal("phi-4")
        assert error.cause is not None
        assert "pub/repo/phi-4-Q4_K_M.gguf" in error.cause

    def test_models_of_bedplate_are_found(self, tmp_path: Path) -> None:
        path = put(tmp_path / "bedplate" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf")
        assert locate_existing("smollm2-135m-instruct").path == path


class TestListing:
    def test_every_model_is_listed_once_by_a_name_that_finds_it(self, machine: Path, tmp_path: Path) -> None:
        cache = machine / ".cache" / "huggingface" / "hub"
        write_hub_repository(cache, "a/b", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj.gguf", "imatrix.gguf")
        write_hub_repository(cache, "c/d", "plain.gguf")
        write_ollama_model(machine / ".ollama/models", "registry.ollama.ai/library/qwen3:8b")
        studio = put(machine / ".lmstudio/models/pub/repo/x-Q4_K_M.gguf")
        (studio.parent / "linked-Q4_K_M.gguf").symlink_to(studio)
        put(tmp_path / "bedplate" / "models" / "own.gguf")
        listed = list_local_models()
        assert [model.name for model in listed] == [
            "a/b:Q4_K_M",
            "a/b:Q8_0",
            "c/d/plain.gguf",
            "own",
            "pub/repo/linked-Q4_K_M.gguf",
            "qwen3:8b",
        ]
        for model in listed:
            again = locate(model.name)
            assert again is not None, model.name
            assert again.path.resolve() == model.path.resolve()

    def test_an_empty_machine_has_no_models(self) -> None:
        assert list_local_models() == ()


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M"),
        ("smollm2.q4_1.gguf", "Q4_1"),
        ("Q4_K_M/x-Q4_K_M-00001-of-00002.gguf", "Q4_K_M"),
        ("x-UD-IQ1_S.gguf", "UD-IQ1_S"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("gpt-oss-20b-MXFP4_MOE.gguf", "MXFP4"),
        ("model-fp16.gguf", "F16"),
        ("model-bf16.gguf", "BF16"),
        ("x-TQ1_0.gguf", "TQ1_0"),
        ("phi-4.gguf", None),
        ("model-16.gguf", None),
        ("qwen3-8b.gguf", None),
    ],
)
def test_quantizations_in_names_are_recognized(name: str, label: str | None) -> None:
    assert find_quantization(name) == label


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a/b", ("a/b", None, None)),
        ("a/b:Q4_K_M", ("a/b", "Q4_K_M", None)),
        ("hf.co/a/b:Q4_K_M", ("a/b", "Q4_K_M", None)),
        ("a/b/c/d.gguf", ("a/b", None, "c/d.gguf")),
        ("https://huggingface.co/a/b/resolve/main/d.gguf?download=true", ("a/b", None, "d.gguf")),
    ],
)
def test_references_are_split(text: str, pieces: tuple[str, str | None, str | None]) -> None:
    assert split_reference(text) == pieces
