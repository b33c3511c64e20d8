"""Replaces every program that an emitted script calls: logs the call and creates what the real program would create.

It runs through links with the programs' names. Installing a package adds the same programs as the real package,
so a script that calls one too early fails as it would on a real machine.
"""

import json
import os
import re
import sys
from pathlib import Path

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
    program, words = Path(sys.argv[0]), sys.argv[1:]
    name = program.name
    if name in ("python", "python3") and words[0].startswith("/"):
        # One of bedplate's programs, whose first line names this interpreter.
        name, words = Path(words[0]).name, words[1:]
    with Path(os.environ["CALLS"]).open("a") as log:
        log.write(json.dumps([name, *words]) + "\n")
    imitate(program, name, words)
    if os.environ.get("BREAKS", "never") in " ".join([name, *words]):
        sys.exit(f"{name} was interrupted")


def imitate(program: Path, name: str, words: list[str]) -> None:
    if words[:2] == ["-m", "venv"]:
        link(Path(words[2]) / "bin", "python", "python3", "pip")
    elif name == "pip" or words[:2] == ["pip", "install"]:
        at = words.index("--python") if "--python" in words else None
        bin_folder = Path(words[at + 1]).parent if at is not None else program.parent
        for word in words:
            link(bin_folder, *BRINGS.get(re.split(r"[\[=;]", word)[0], ()))
    elif name == "uvx":
        assert words[0] == "--from" and words[1].startswith(f"{HUB_CLIENT}==") and words[2] == "hf", words
        create_folder(words[words.index("--local-dir") + 1])
    elif words[:3] == ["-m", "pip", "download"]:
        package = next(word for word in words if "==" in word)
        Path(f"{package.replace('-', '_').replace('==', '-')}.tar.gz").touch()
    elif name == "tar":
        create_file(f"{words[-1].removesuffix('.tar.gz')}/{MADE_OF_SOURCE}")
    elif name == "git":
        create_file(f"{words[-1]}/{OPTIMIZER}")
    elif name == "cmake" and words[0] == "--build":
        link(Path(words[1]) / "bin", *words[words.index("--target") + 1 :])
    elif name == "cmake":
        create_folder(words[words.index("-B") + 1])
    else:
        convert(words)


def convert(words: list[str]) -> None:
    """Convert, compile or serve: require the input files, and create the output."""
    for word in words:
        if word == os.environ["SOURCE"] and not Path(word).is_dir():
            sys.exit(f"FileNotFoundError: {word}")
        if word.endswith(".py") and "/" in word and not Path(word).is_file():
            sys.exit(f"can't open file {word}")
        for made in re.findall(r"'([^']+\.part)'|abspath\(\"([^\"]+)\"\)", word):
            create_folder("".join(made))
        if word.endswith(".part"):
            create_folder(word)


def link(where: Path, *names: str) -> None:
    where.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not (where / name).exists():
            (where / name).symlink_to(os.environ["SELF"])


def create_folder(path: str) -> None:
    Path(path).mkdir(parents=True, exist_ok=True)


def create_file(path: str) -> None:
    create_folder(str(Path(path).parent))
    Path(path).touch()


if __name__ == "__main__":
    main()
