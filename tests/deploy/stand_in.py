"""Replaces every program that an emitted script calls: logs the call and creates what the real program would create.

It runs through links with the programs' names. Installing a package adds the same programs as the real package,
so a script that calls one too early fails as it would on a real machine. Tests start it a thousand times, so it imports
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
    if words[:1] == ["-I"]:
        # bedplate's own helper, which is not replaced.
        sys.argv = words[1:]
        with open(words[1]) as file:
            exec(compile(file.read(), words[1], "exec"), {"__name__": "__main__", "__file__": words[1]})
    if name in ("python", "python3") and words[0].startswith("/"):
        # One of bedplate's programs, whose first line names this interpreter.
        name, words = os.path.basename(words[0]), words[1:]
    with open(os.environ["CALLS"], "a") as log:
        log.write(f"{[name, *words]!r}\n")
    imitate(program, name, words)
    if os.environ.get("BREAKS", "never") in " ".join([name, *words]):
        sys.exit(f"{name} was interrupted")


def imitate(program: str, name: str, words: list[str]) -> None:
    if words[:2] == ["-m", "venv"]:
        link(f"{words[2]}/bin", "python", "python3", "pip")
    elif name == "uv" and words[0] == "venv":
        link(f"{words[-1]}/bin", "python", "python3")
    elif name == "uv" and "--target" in words:
        assert "--no-deps" in words and words[-1].startswith("bedplate"), words
        helper = f"{words[words.index('--target') + 1]}/bedplate/deploy"
        create_folder(helper)
        os.symlink(os.environ["STEPS"], f"{helper}/script_steps.py")
    elif name == "pip" or words[:2] == ["pip", "install"]:
        at = words.index("--python") if "--python" in words else None
        bin_folder = os.path.dirname(words[at + 1] if at is not None else program)
        for word in words:
            for mark in "[=;":
                word = word.partition(mark)[0]
            link(bin_folder, *BRINGS.get(word, ()))
    elif name == "uvx":
        assert words[0] == "--from" and words[1].startswith(f"{HUB_CLIENT}==") and words[2] == "hf", words
        create_folder(words[words.index("--local-dir") + 1])
    elif words[:3] == ["-m", "pip", "download"]:
        package = next(word for word in words if "==" in word)
        create_file(f"{package.replace('-', '_').replace('==', '-')}.tar.gz")
    elif name == "tar":
        create_file(f"{words[-1].removesuffix('.tar.gz')}/{MADE_OF_SOURCE}")
    elif name == "git":
        create_file(f"{words[-1]}/{OPTIMIZER}")
    elif name == "cmake" and words[0] == "--build":
        link(f"{words[1]}/bin", *words[words.index("--target") + 1 :])
    elif name == "cmake":
        create_folder(words[words.index("-B") + 1])
    else:
        convert(words)


def convert(words: list[str]) -> None:
    """Convert, compile or serve: require the input files, and create the output."""
    for word in words:
        if word == os.environ["SOURCE"] and not os.path.isdir(word):
            sys.exit(f"FileNotFoundError: {word}")
        if word.endswith(".py") and "/" in word and not os.path.isfile(word):
            sys.exit(f"can't open file {word}")
        if ".part'" in word or "abspath(" in word:
            import re

            for made in re.findall(r"'([^']+\.part)'|abspath\(\"([^\"]+)\"\)", word):
                create_folder("".join(made))
        if word.endswith(".part"):
            create_folder(word)


def link(where: str, *names: str) -> None:
    create_folder(where)
    for name in names:
        if not os.path.exists(f"{where}/{name}"):
            os.symlink(os.environ["SELF"], f"{where}/{name}")


def create_folder(path: str) -> None:
    os.makedirs(path, exist_ok=True)


def create_file(path: str) -> None:
    create_folder(os.path.dirname(path) or ".")
    with open(path, "a"):
        pass


if __name__ == "__main__":
    main()
