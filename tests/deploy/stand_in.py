"""Stands in for every program that an emitted script calls: says so in a log, and makes what the real one would make.

It is run through links with the programs' names. A package brings the programs that the real one brings, so
that a script which calls one too early fails as it would on a machine. Tests start it a thousand times, so it imports
as little as it can.
"""

import os
import sys

BRINGS = {
    "uv": ("uv", "uvx"),
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "lmdeploy": ("lmdeploy",),
    "tensorrt-llm": ("trtllm-serve",),
    "mlx-lm": ("mlx_lm.convert",),
    "transformers": ("transformers", "hf"),
}
HUB_CLIENT = "huggingface_hub"
MADE_OF_SOURCE = "vendor/llama.cpp/convert_hf_to_gguf.py"
OPTIMIZER = "examples/llm_ptq/hf_ptq.py"


def main() -> None:
    program, words = sys.argv[0], sys.argv[1:]
    name = os.path.basename(program)
    if name in ("python", "python3") and words[0].startswith("/"):
        # One of bedplate's own, whose first line names this interpreter.
        name, words = os.path.basename(words[0]), words[1:]
    with open(os.environ["CALLS"], "a") as log:
        log.write(f"{[name, *words]!r}\n")
    take(program, name, words)
    if os.environ.get("BREAKS", "never") in " ".join([name, *words]):
        sys.exit(f"{name} was interrupted")


def take(program: str, name: str, words: list[str]) -> None:
    if words[:2] == ["-m", "venv"]:
        link(f"{words[2]}/bin", "python", "python3", "pip")
    elif name == "pip" or words[:2] == ["pip", "install"]:
        at = words.index("--python") if "--python" in words else None
        bin_folder = os.path.dirname(words[at + 1] if at is not None else program)
        for word in words:
            for mark in "[=;":
                word = word.partition(mark)[0]
            link(bin_folder, *BRINGS.get(word, ()))
    elif name == "uvx":
        assert words[0] == "--from" and words[1].startswith(f"{HUB_CLIENT}==") and words[2] == "hf", words
        folder(words[words.index("--local-dir") + 1])
    elif words[:3] == ["-m", "pip", "download"]:
        package = next(word for word in words if "==" in word)
        file(f"{package.replace('-', '_').replace('==', '-')}.tar.gz")
    elif name == "tar":
        file(f"{words[-1].removesuffix('.tar.gz')}/{MADE_OF_SOURCE}")
    elif name == "git":
        file(f"{words[-1]}/{OPTIMIZER}")
    elif name == "cmake" and words[0] == "--build":
        link(f"{words[1]}/bin", *words[words.index("--target") + 1 :])
    elif name == "cmake":
        folder(words[words.index("-B") + 1])
    else:
        convert(words)


def convert(words: list[str]) -> None:
    """Or compile, or serve: all of them want what they are given, and some write."""
    for word in words:
        if word == os.environ["SOURCE"] and not os.path.isdir(word):
            sys.exit(f"FileNotFoundError: {word}")
        if word.endswith(".py") and "/" in word and not os.path.isfile(word):
            sys.exit(f"can't open file {word}")
        if ".part'" in word or "abspath(" in word:
            import re

            for made in re.findall(r"'([^']+\.part)'|abspath\(\"([^\"]+)\"\)", word):
                folder("".join(made))
        if word.endswith(".part"):
            folder(word)


def link(where: str, *names: str) -> None:
    folder(where)
    for name in names:
        if not os.path.exists(f"{where}/{name}"):
            os.symlink(os.environ["SELF"], f"{where}/{name}")


def folder(path: str) -> None:
    os.makedirs(path, exist_ok=True)


def file(path: str) -> None:
    folder(os.path.dirname(path) or ".")
    with open(path, "a"):
        pass


if __name__ == "__main__":
    main()
