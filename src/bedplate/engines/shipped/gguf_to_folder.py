#!/usr/bin/env python3
"""Unpacks a GGUF file to a Hugging Face folder, which engines load that do not read GGUF, and checks what it made.

    gguf-to-folder MODEL.gguf FOLDER

Weights are written in bfloat16. A quantized weight is a 16-bit scale times a small number, so most do not fit exactly:
rounding moves each by 0.2 % at the most, where its block's own steps are 7 % (4 bits) to 0.4 % (8 bits) of the largest.
In float32 nothing more is lost, at twice the memory that a plan counts with: `--dtype float32`. The check says how many
next tokens differ from those in float32.

Runs inside of PyTorch's environment: torch, transformers, accelerate and gguf.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TEXTS = (
    "Hello, world!", "The capital of France is", "Once upon a time, in a land far away,", "2 + 2 = 4, 10/3 = 3.333…",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n", "SELECT name FROM users WHERE age >= 18;",
    "  leading and trailing spaces  ", "tabs\tand\nnew lines\r\n\n\nand more", "UPPER lower MiXeD snake_case camelCase",
    "don't, won't, it's, I'm, you're, we'll, they've, he'd", "1234567890 1,234,567.89 0x1F 1e-9 007",
    "email@example.com https://example.com/path?x=1&y=2#end", "!@#$%^&*()_+-=[]{}|;':\",./<>?`~",
    "Ünïcödé: äöüß ÄÖÜ éèêë ñ ç", "Здравствуй, мир! Как дела?", "你好，世界。今天天气怎么样？",
    "こんにちは世界。元気ですか？",
    "안녕하세요 세계", "مرحبا بالعالم", "שלום עולם", "नमस्ते दुनिया", "Γειά σου Κόσμε", "สวัสดีชาวโลก", "Xin chào thế giới",
    "😀 emoji 👩‍👩‍👧 family 🇫🇷 flag ✨", "e\u0301 combining and \u200b zero width \ufeff mark", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝕒𝕓𝕠𝕧𝕖 𝟘𝟙𝟚",
    "a", " ", "\n", "    ", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "...", "—“quotes”—‘and’…", "¿Qué? ¡Sí!",
    "naïve café façade",
    "<html><body class=\"x\">text</body></html>", '{"key": [1, 2.5, null, true], "other": "value"}',
    "- [ ] item\n- [x] done",
    "# Title\n\n## Section\n\n| a | b |\n| --- | --- |\n", "$x^2 + y^2 = z^2$ and \\frac{1}{2}",
    "for (int i = 0; i < n; ++i) {}",
    "The quick brown fox jumps over the lazy dog.", "Water boils at 100 °C, which is 212 °F.", "ACGTACGTTAGC",
    "In 1969, Neil Armstrong walked on the Moon.", "Q: What is 7 times 8?\nA:", "Dear Sir or Madam,\n\nI am writing to",
    "Ingredients: 200 g flour, 2 eggs, 1/2 tsp salt.",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "Mr. Smith went to Washington, D.C. on Jan. 5th.", "日本語とEnglishのmixed文章です",
)  # fmt: skip
QUESTION = "What is the capital of France?"
ANSWER_TOKENS = 24
LEAST_SAME = 0.9
"""Of the next tokens: rounding swaps a few that were as good as equal; a mistake in unpacking swaps nearly all."""
BATCH = 8
START_LIMIT_S = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Unpack a GGUF file to a Hugging Face folder, and check it.")
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--llama-server", metavar="JSON", help="how to start llama.cpp, to compare token ids with")
    options = parser.parse_args()
    if not options.source.is_file():
        fail(f"there is no file {options.source}")
    if options.folder.exists():
        fail(f"{options.folder} is there already")
    try:
        unpack(options)
    except BaseException:
        shutil.rmtree(options.folder, ignore_errors=True)
        raise


def unpack(options: argparse.Namespace) -> None:
    # What is not in the file would be looked for on the hub.
    os.environ["HF_HUB_OFFLINE"] = "1"
    theirs = Theirs(options.llama_server, options.source) if options.llama_server else None
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        fail(f"this Python lacks what unpacks GGUF files: {error}")
    torch.set_num_threads(free_threads())
    given: dict[str, Any] = {"gguf_file": options.source.name}
    where, dtype = str(options.source.parent), getattr(torch, options.dtype)
    say("reading and unpacking")
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **given)
        wide = fits_in_memory(options.source)
        loaded = AutoModelForCausalLM.from_pretrained(
            where, **given, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32 if wide else dtype
        )
    except (ValueError, KeyError, OSError, RuntimeError, ImportError, NotImplementedError) as error:
        fail(f"Transformers cannot unpack this file: {error}")
    loaded.eval()
    before = next_tokens(loaded, tokenizer) if wide else None
    model = loaded.to(dtype)
    if getattr(model.config, "_name_or_path", None):
        model.config._name_or_path = ""
    say("writing")
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    for file in options.folder.iterdir():
        file.chmod(0o644)  # weights are written for their owner alone
    say("checking")
    check_tokens(AutoTokenizer.from_pretrained(options.folder), tokenizer, options.source, theirs)
    del model, loaded
    made = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32 if wide else dtype)
    made.eval()
    if before is not None:
        check_next(before, next_tokens(made, tokenizer), options.dtype)
    check_answer(made, tokenizer)


def fits_in_memory(source: Path) -> bool:
    """Whether the weights can be held in float32, with room to spare: ten times the file, for one of 4 bits."""
    try:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return source.stat().st_size < 1e9
    return 10 * source.stat().st_size < available


def free_threads() -> int:
    """Processors that others leave free: threads that wait for each other crawl where they cannot run together."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1, round(count - load))


def next_tokens(model: Any, tokenizer: Any) -> list[int]:
    """What comes next after each text, greedily."""
    import torch

    rows = [ids for text in TEXTS if (ids := tokenizer.encode(text))]
    found = []
    with torch.inference_mode():
        for batch in (rows[start : start + BATCH] for start in range(0, len(rows), BATCH)):
            # What stands behind the last token of a row is not seen from it.
            width = max(map(len, batch))
            ids = torch.tensor([[*row, *[row[-1]] * (width - len(row))] for row in batch])
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            found += [int(logits[number, len(row) - 1].argmax()) for number, row in enumerate(batch)]
    return found


def check_next(before: list[int], after: list[int], dtype: str) -> None:
    same = sum(one == other for one, other in zip(before, after, strict=True))
    say(f"next tokens: {same} of {len(before)} as in float32")
    if same < LEAST_SAME * len(before):
        fail(f"in {dtype} only {same} of {len(before)} next tokens are those of the unpacked weights")


def check_tokens(saved: Any, read: Any, source: Path, theirs: Theirs | None) -> None:
    """Token ids as llama.cpp has them, where it is at hand; else as before, and with the words of the file itself."""
    ours = {text: saved.encode(text, add_special_tokens=False) for text in TEXTS}
    if theirs is not None:
        wrong = [text for text, ids in theirs.token_ids().items() if ids != ours[text]]
        if wrong:
            fail(f"{len(wrong)} of {len(TEXTS)} texts have other token ids than in llama.cpp, such as {wrong[0]!r}")
        say(f"token ids: {len(TEXTS)} of {len(TEXTS)} texts as in llama.cpp")
        return
    wrong = [text for text in TEXTS if ours[text] != read.encode(text, add_special_tokens=False)]
    words = words_of(source)
    odd = [number for number in range(0, len(words), 97) if saved.convert_ids_to_tokens(number) != words[number]]
    if wrong or odd:
        fail(f"the tokenizer changed when it was written: {len(wrong)} texts, {len(odd)} words of the vocabulary")
    back = sum(saved.decode(ids, clean_up_tokenization_spaces=False) == text for text, ids in ours.items())
    if back < len(TEXTS) / 2:
        fail(f"only {back} of {len(TEXTS)} texts come back as they were from their token ids")
    say(f"token ids: checked by the file's own vocabulary; {back} of {len(TEXTS)} texts come back as they were")


def words_of(source: Path) -> list[str]:
    from gguf import GGUFReader

    field = GGUFReader(source).get_field("tokenizer.ggml.tokens")
    return [bytes(field.parts[index]).decode("utf-8", "replace") for index in field.data] if field is not None else []


def check_answer(model: Any, tokenizer: Any) -> None:
    import torch

    if tokenizer.chat_template:
        talk = [{"role": "user", "content": QUESTION}]
        given = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        given = tokenizer(QUESTION, return_tensors="pt")
    with torch.inference_mode():
        logits = model(**given).logits
        if not bool(torch.isfinite(logits).all()):
            fail("the unpacked weights compute to numbers that are not finite")
        made = model.generate(**given, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    text = tokenizer.decode(made[0][given["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    if not text:
        fail("the unpacked weights answer with nothing")
    say(f"asked {QUESTION!r}, it answers {text!r}")


class Theirs:
    """llama.cpp, started at once, since it loads while we do."""

    def __init__(self, command: str, source: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        argv = [
            *json.loads(command),
            "--model",
            str(source.resolve()),
            "--host",
            "127.0.0.1",
            "--port",
            str(self._port),
        ]
        argv += ["--ctx-size", "512", "--no-warmup"]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=sys.stderr)

    def token_ids(self) -> dict[str, list[int]]:
        try:
            self._wait()
            return {text: self._ids(text) for text in TEXTS}
        finally:
            self._process.kill()
            self._process.wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                if self._ask("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass  # not listening yet
            time.sleep(0.2)
        fail("llama.cpp did not start, so that token ids cannot be compared")

    def _ids(self, text: str) -> list[int]:
        status, answer = self._ask("POST", "/tokenize", {"content": text, "add_special": False, "parse_special": True})
        if status != 200:
            fail(f"llama.cpp did not say which tokens {text!r} is: {answer}")
        return [int(one) for one in answer["tokens"]]

    def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()


def say(text: str) -> None:
    print(f"gguf-to-folder: {text}", flush=True)  # noqa: T201


def fail(text: str) -> Any:
    sys.exit(f"gguf-to-folder: {' '.join(str(text).split())}")


if __name__ == "__main__":
    main()
