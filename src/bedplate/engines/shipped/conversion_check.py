#!/usr/bin/env python3
"""Compares a converted model with its source: token ids of texts that are hard to tokenize, and greedy answers.

    conversion-check SOURCE RESULT --bits 4.5 [--gguf-server JSON]

The source generates a few short greedy answers; the result then predicts the next token after each prefix of them.
Freely generated text diverges at random, single next tokens do not. Of the tokens where the source has a clear
favourite, a minimum share must agree, which depends on the bits per weight of the result.

GGUF files run in llama.cpp's server, folders in the engine that converted them: Transformers, MLX, ONNX Runtime or
ExLlama. Runs in that engine's environment; packages are imported where they are used.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

TEXTS = (
    "Hello, world!", "The capital of France is", "Once upon a time, in a land far away,", "2 + 2 = 4, 10/3 = 3.333…",
    # Digits, and characters before them.
    "\n\n1", "\n1", "x\n\n\n42", "1.\n2.\n\n3. three\n\n10. ten", " 1", "  12", "\t7", "a1b22c333d4444", "½ ² ³ ٣ Ⅷ ５",
    "1234567890 1,234,567.89 0x1F 1e-9 007", "year\n2026\n\n2027", "A:\n\n9", "v1.2.3-rc4+567", "+49 (0)30 123-456",
    # Spaces and line breaks.
    "a", " ", "\n", "    ", "  leading and trailing spaces  ", "tabs\tand\nnew lines\r\n\n\nand more", "\r\n\r\n",
    " \n \n  x", "a \u00a0b\u3000c\u2028d", "def f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)\n",
    "\tif (x) {\n\t\treturn 1;\n\t}\n", "for (int i = 0; i < n; ++i) {}", "SELECT name FROM users WHERE age >= 18;",
    # Scripts.
    "Ünïcödé: äöüß ÄÖÜ éèêë ñ ç", "Здравствуй, мир! Как дела?", "你好，世界。今天天气怎么样？", "第12章，共345页",
    "こんにちは世界。元気ですか？", "안녕하세요 세계 2026년", "مرحبا بالعالم ١٢٣", "שלום עולם", "नमस्ते दुनिया १२",
    "Γειά σου Κόσμε", "สวัสดีชาวโลก", "Xin chào thế giới", "日本語とEnglishのmixed文章です",
    "😀 emoji 👩‍👩‍👧 family 🇫🇷 flag ✨", "👍🏽1", "e\u0301 combining and \u200b zero width \ufeff mark",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝕒𝕓𝕠𝕧𝕖 𝟘𝟙𝟚",
    # Punctuation, markup, names.
    "UPPER lower MiXeD snake_case camelCase", "don't, won't, it's, I'm, you're, we'll, they've, he'd, IT'S, DON'T",
    "email@example.com https://example.com/path?x=1&y=2#end", "!@#$%^&*()_+-=[]{}|;':\",./<>?`~", "...", "!!!???",
    "—“quotes”—‘and’…", "¿Qué? ¡Sí!", "<html><body class=\"x\">text</body></html>",
    '{"key": [1, 2.5, null, true], "other": "value"}', "# Title\n\n## Section\n\n| a | b |\n| --- | --- |\n",
    "$x^2 + y^2 = z^2$ and \\frac{1}{2}", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "ACGTACGTTAGC",
    "Q: What is 7 times 8?\nA:", "supercalifragilisticexpialidocious antidisestablishmentarianism",
)  # fmt: skip
PROMPTS = (
    "The capital of France is",
    "Question: Why is the sky blue?\nAnswer: The sky is blue because",
    "def fibonacci(n):\n    ",
    "Here is a list of three animals:\n\n1.",
)
ANSWER_TOKENS = 16
CLEAR_GAP = 0.5
FLOORS = ((16.0, 0.97), (8.0, 0.97), (6.0, 0.85), (5.0, 0.65), (0.0, 0.55))
CHANCE = 1e-3
"""Significance level, as for the answers of a served engine. 16 bits include engines that compute in 8 bits."""
APPROXIMATED = frozenset(["tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"])
"""Pre-tokenizers that llama.cpp implements exactly only for ASCII (llama-vocab.cpp)."""
START_LIMIT_S = 300.0
STARTS = 3
SHOWN = 3


class PredictedToken(NamedTuple):
    token: int
    gap: float
    """Difference of its logit to the second best."""


class ComparedModel:
    """A model under comparison: its tokenizer and its greedy next tokens."""

    name: str
    normalizes = False
    """Whether its tokenizer applies NFC normalization."""
    approximated = False

    def tokenize(self, text: str, begin: bool = False) -> list[int]:
        """Token ids, special tokens in the text included; `begin`: with the default special tokens around the text."""
        raise NotImplementedError

    def list_special_tokens(self) -> list[str]:
        return []

    def detokenize(self, ids: list[int]) -> str:
        return str(ids)

    def answer(self, ids: list[int]) -> list[PredictedToken]:
        """Its greedy answer."""
        raise NotImplementedError

    def follow(self, ids: list[int], written: list[int]) -> list[int]:
        """Its greedy token at the position of each token of `written`, given the tokens before it."""
        raise NotImplementedError

    def close(self) -> None:
        pass


class LlamaCppModel(ComparedModel):
    """A GGUF file in llama.cpp's server, which loads while the other model does."""

    name = "llama.cpp"

    def __init__(self, path: Path, command: str) -> None:
        self._path, self._command = path, json.loads(command)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._key = secrets.token_urlsafe(32)  # other users of the machine can connect to the port
        self._ready, self._starts = False, 0
        self._start()
        self.approximated = read_pre_tokenizer(path) in APPROXIMATED

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        argv = [*self._command, "--model", str(self._path.resolve()), "--host", "127.0.0.1", "--port", str(self._port)]
        argv += ["--ctx-size", "512", "--parallel", "1", "--threads", str(count_free_threads()), "--no-warmup"]
        self._starts += 1
        env = {**os.environ, "LLAMA_API_KEY": self._key}
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, env=env)

    def tokenize(self, text: str, begin: bool = False) -> list[int]:
        return [
            int(one) for one in self._post("/tokenize", content=text, add_special=begin, parse_special=True)["tokens"]
        ]

    def detokenize(self, ids: list[int]) -> str:
        return str(self._post("/detokenize", tokens=ids)["content"])

    def answer(self, ids: list[int]) -> list[PredictedToken]:
        return self._complete(ids, ANSWER_TOKENS)

    def follow(self, ids: list[int], written: list[int]) -> list[int]:
        found = (self._complete([*ids, *written[:count]], 1) for count in range(len(written)))
        return [one[0].token if one else -1 for one in found]

    def _complete(self, ids: list[int], count: int) -> list[PredictedToken]:
        given = self._post("/completion", prompt=ids, n_predict=count, temperature=0, n_probs=2, cache_prompt=True)
        found = []
        for one in given.get("completion_probabilities", []):
            first, second = (one.get("top_logprobs") or [one, one])[:2]
            if first["logprob"] is None:
                fail("the logits in llama.cpp are not finite")
            found.append(PredictedToken(int(first["id"]), float(first["logprob"]) - float(second["logprob"])))
        return found

    def _post(self, path: str, **body: Any) -> Any:
        self._wait()
        status, answer = self._ask("POST", path, body)
        if status != 200:
            fail(f"llama.cpp failed at {path}: {answer}")
        return answer

    def _wait(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not self._ready and time.monotonic() < deadline:
            if self._process.poll() is not None:
                if self._starts == STARTS:
                    break
                self._process.communicate()
                self._start()  # another program may have taken its port
            with contextlib.suppress(OSError, ValueError):  # it is not listening yet
                self._ready = self._ask("GET", "/health")[0] == 200 and self._is_ours()
            if not self._ready:
                time.sleep(0.2)
        if not self._ready:
            self._log.seek(0)
            lines = self._log.read().decode("utf-8", "replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "no output")
            fail(f"llama.cpp cannot load {self._path.name}: {last[:300]}")

    def _is_ours(self) -> bool:
        """Whether the server on the port is the one started here."""
        status, properties = self._ask("GET", "/props")
        return status == 200 and properties.get("model_path") == str(self._path.resolve())

    def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
            connection.request(method, path, json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()


class FolderModel(ComparedModel):
    """A Hugging Face folder with the tokenizer of Transformers, which engines use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(path)
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        self.normalizes = "NFC" in str(getattr(backend, "normalizer", ""))

    def tokenize(self, text: str, begin: bool = False) -> list[int]:
        return [int(one) for one in self.tokenizer.encode(text, add_special_tokens=begin)]

    def list_special_tokens(self) -> list[str]:
        return [str(one) for one in self.tokenizer.all_special_tokens[:4]]

    def detokenize(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))


class TransformersModel(FolderModel):
    name = "PyTorch"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._loaded: Any = None

    def _load_model(self) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        if self._loaded is None:
            torch.set_num_threads(count_free_threads())
            wide = 2 * count_bytes(self.path) < read_available_bytes()
            dtype = torch.float32 if wide else "auto"
            self._loaded = AutoModelForCausalLM.from_pretrained(self.path, dtype=dtype).eval()
        return self._loaded

    def answer(self, ids: list[int]) -> list[PredictedToken]:
        import torch

        found: list[PredictedToken] = []
        given, seen = ids, None
        with torch.inference_mode():
            for _ in range(ANSWER_TOKENS):
                made = self._load_model()(input_ids=torch.tensor([given]), past_key_values=seen, use_cache=True)
                logits, seen = made.logits[0, -1].float(), made.past_key_values
                if not bool(logits.isfinite().all()):
                    fail("the logits in PyTorch are not finite")
                best = logits.topk(2)
                found.append(PredictedToken(int(best.indices[0]), float(best.values[0] - best.values[1])))
                given = [found[-1].token]
        return found

    def follow(self, ids: list[int], written: list[int]) -> list[int]:
        import torch

        with torch.inference_mode():
            logits = self._load_model()(input_ids=torch.tensor([[*ids, *written[:-1]]])).logits[0]
        return [int(one) for one in logits[len(ids) - 1 :].argmax(-1)]

    def close(self) -> None:
        self._loaded = None


class MlxModel(FolderModel):
    name = "MLX"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._loaded: Any = None

    def _load_model(self) -> Any:
        import mlx.core as mx
        from mlx_lm.utils import load_model

        if self._loaded is None:
            self._loaded, _ = load_model(self.path)
            if mx.default_device() == mx.cpu:
                # In bfloat16 its CPU kernels are slow, and partly wrong.
                self._loaded.set_dtype(mx.float32)
        return self._loaded

    def answer(self, ids: list[int]) -> list[PredictedToken]:
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache

        found: list[PredictedToken] = []
        given, seen = ids, make_prompt_cache(self._load_model())
        for _ in range(ANSWER_TOKENS):
            logits = self._load_model()(mx.array([given]), cache=seen)[0, -1].astype(mx.float32)
            if not bool(mx.isfinite(logits).all()):
                fail("the logits in MLX are not finite")
            best = mx.sort(logits)[-2:]
            found.append(PredictedToken(int(mx.argmax(logits)), float(best[1] - best[0])))
            given = [found[-1].token]
        return found

    def follow(self, ids: list[int], written: list[int]) -> list[int]:
        import mlx.core as mx

        logits = self._load_model()(mx.array([[*ids, *written[:-1]]]))[0].astype(mx.float32)
        return [int(one) for one in mx.argmax(logits[len(ids) - 1 :], axis=-1)]

    def close(self) -> None:
        self._loaded = None


class OnnxModel(ComparedModel):
    """Output of the ONNX Runtime GenAI builder, with tokenizer.json as in bedplate's server."""

    name = "ONNX Runtime"

    def __init__(self, path: Path) -> None:
        import tokenizers

        self.path = path
        self.tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        self.normalizes = "NFC" in str(self.tokenizer.normalizer)

    def tokenize(self, text: str, begin: bool = False) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=begin).ids)

    def detokenize(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def follow(self, ids: list[int], written: list[int]) -> list[int]:
        import numpy as np
        import onnxruntime_genai as genai

        model = genai.Model(str(self.path))
        params = genai.GeneratorParams(model)
        params.set_search_options(max_length=len(ids) + len(written) + 1, batch_size=1)
        generator = genai.Generator(model, params)
        found = []
        for step in (ids, *([one] for one in written[:-1])):
            generator.append_tokens(np.array([step], dtype=np.int32))
            found.append(int(np.asarray(generator.get_logits())[0, -1].argmax()))
        return found


class ExLlamaModel(ComparedModel):
    """ExLlamaV2 and ExLlamaV3: 16-bit weights and their own formats, on the first GPU."""

    def __init__(self, path: Path, package: str) -> None:
        import tokenizers

        self.path, self.package, self.name = path, package, package
        self._loaded: Any = None
        if (kernels := Path(f"{package}-kernels")).is_dir():
            # Compiled before the conversion; otherwise the import would compile them again.
            os.environ["TORCH_EXTENSIONS_DIR"] = str(kernels.absolute())
        # From tokenizer.json, as in bedplate's server.
        self.tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))

    def tokenize(self, text: str, begin: bool = False) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=begin).ids)

    def detokenize(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def _compute_logits(self, ids: list[int]) -> Any:
        import torch

        if self._loaded is None:
            self._loaded = self._load_exllamav3() if self.package == "exllamav3" else self._load_exllamav2()
        with torch.inference_mode():
            return self._loaded(torch.tensor([ids]))[0].float().cpu()

    def _load_exllamav3(self) -> Any:
        import exllamav3

        model = exllamav3.Model.from_config(exllamav3.Config.from_directory(str(self.path)))
        model.load(device="cuda:0")
        return lambda ids: model.forward(ids, {"attn_mode": "flash_attn_nc"})

    def _load_exllamav2(self) -> Any:
        import exllamav2

        config = exllamav2.ExLlamaV2Config(str(self.path))
        config.no_flash_attn = True
        # Version 0.3.2 passes no causal mask to PyTorch's attention; its own attention has one.
        config.no_sdpa = True
        config.max_seq_len = 512
        model = exllamav2.ExLlamaV2(config)
        model.load()
        return lambda ids: model.forward(ids)

    def answer(self, ids: list[int]) -> list[PredictedToken]:
        found: list[PredictedToken] = []
        for _ in range(ANSWER_TOKENS):
            best = self._compute_logits([*ids, *(one.token for one in found)])[-1].topk(2)
            found.append(PredictedToken(int(best.indices[0]), float(best.values[0] - best.values[1])))
        return found

    def follow(self, ids: list[int], written: list[int]) -> list[int]:
        return [int(one) for one in self._compute_logits([*ids, *written[:-1]])[len(ids) - 1 :].argmax(-1)]

    def close(self) -> None:
        self._loaded = None


def choose_models(source: Path, result: Path, llama: str | None) -> tuple[ComparedModel, ComparedModel]:
    """The engines that compute the source and the result."""
    kinds = detect_format(source), detect_format(result)
    if "gguf" in kinds and llama is None:
        raise NotComparable("llama.cpp, which is needed for the GGUF file, is not installed")
    if kinds == ("gguf", "gguf"):
        return LlamaCppModel(source, str(llama)), LlamaCppModel(result, str(llama))
    if kinds == ("gguf", "folder"):
        return LlamaCppModel(source, str(llama)), TransformersModel(result)
    if kinds == ("folder", "gguf"):
        theirs = LlamaCppModel(result, str(llama))
        try:
            return TransformersModel(source), theirs
        except BaseException:
            theirs.close()
            raise
    if kinds == ("folder", "mlx"):
        return MlxModel(source), MlxModel(result)
    if kinds == ("folder", "onnx"):
        return TransformersModel(source), OnnxModel(result)
    if kinds in (("folder", "exl2"), ("folder", "exl3")):
        package = f"exllamav{kinds[1][-1]}"
        return ExLlamaModel(source, package), ExLlamaModel(result, package)
    raise NotComparable(f"there is no comparison of {kinds[0]} with {kinds[1]}")


def detect_format(path: Path) -> str:
    if path.is_file():
        return "gguf" if path.suffix == ".gguf" else "file"
    if (path / "genai_config.json").is_file():
        return "onnx"
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "unknown"
    method = str((config.get("quantization_config") or {}).get("quant_method", ""))
    if method in ("exl2", "exl3"):
        return method
    if any(path.glob("*.onnx")):
        return "encoder"
    return "mlx" if "quantization" in config else "folder"


class NotComparable(Exception):
    """The models cannot be compared here, which does not mean that the result is wrong."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="conversion-check", description=__doc__, allow_abbrev=False)
    parser.add_argument("source", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--bits", type=float, default=16.0, help="bits per weight of the result")
    parser.add_argument("--gguf-server", metavar="JSON", help="command that starts llama.cpp's server, as a JSON list")
    options = parser.parse_args(arguments)
    os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"})
    try:
        with open_models(options) as (source, result):
            compare_ids(source, result)
            compare_answers(source, result, options.bits)
    except NotComparable as reason:
        say(f"not compared: {reason}")


@contextlib.contextmanager
def open_models(options: argparse.Namespace) -> Iterator[tuple[ComparedModel, ComparedModel]]:
    for path in (options.source, options.result):
        if count_bytes(path) > read_available_bytes():
            raise NotComparable(f"{path.name} is larger than the free memory")
    source, result = choose_models(options.source, options.result, options.gguf_server)
    try:
        yield source, result
    finally:
        source.close()
        result.close()


def compare_ids(source: ComparedModel, result: ComparedModel) -> None:
    texts = [
        *TEXTS,
        *(f"a {one}b\n{one}1" for one in dict.fromkeys([*source.list_special_tokens(), *result.list_special_tokens()])),
    ]
    if source.normalizes or result.normalizes:
        # llama.cpp does not normalize.
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    wrong = [text for text in texts if source.tokenize(text) != result.tokenize(text)]
    if source.approximated or result.approximated:
        for text in (known := [text for text in wrong if not text.isascii()]):
            wrong.remove(text)
        if known:
            say(f"token ids: {len(known)} non-ASCII texts differ, because llama.cpp splits them differently")
    if wrong:
        shown = ", ".join(
            f"{text!r} (source {source.tokenize(text)[:12]}, result {result.tokenize(text)[:12]})"
            for text in wrong[:SHOWN]
        )
        fail(f"token ids differ from the source in {len(wrong)} of {len(texts)} texts: {shown}")
    say(f"token ids: {len(texts)} of {len(texts)} texts agree with the source")
    begins, began = source.tokenize("x", begin=True), result.tokenize("x", begin=True)
    if begins != began:
        say(f"note: with default special tokens, 'x' is {begins} in the source and {began} in the result")


def compare_answers(source: ComparedModel, result: ComparedModel, bits: float) -> None:
    asked = [(ids, source.answer(ids)) for ids in (source.tokenize(prompt, begin=True) for prompt in PROMPTS)]
    clear = agreed = total = same = 0
    odd: list[str] = []
    for ids, answer in asked:
        written = [one.token for one in answer]
        for count, (one, other) in enumerate(zip(answer, result.follow(ids, written), strict=True)):
            total, same = total + 1, same + (one.token == other)
            if one.gap < CLEAR_GAP:
                continue
            clear, agreed = clear + 1, agreed + (one.token == other)
            if one.token != other:
                before = result.detokenize([*ids, *written[:count]])[-40:]
                odd.append(
                    f"after …{before!r} {result.detokenize([other])!r} instead of {result.detokenize([one.token])!r}"
                )
    floor = next(share for least, share in FLOORS if bits >= least)
    counts = f"{agreed} of {clear} clear next tokens of {len(asked)} greedy answers agree ({same} of all {total})"
    if clear and compute_binomial_tail(agreed, clear, floor) < CHANCE:
        fail(f"{counts}; expected at least {floor:.0%} at this quantization: {'; '.join(odd[:SHOWN])}")
    first = " ".join(source.detokenize([one.token for one in asked[0][1]]).split())[:60]
    say(f"answers: {counts}; {PROMPTS[0]!r} continues with {first!r}")


def compute_binomial_tail(count: int, of: int, share: float) -> float:
    """The binomial probability of at most `count` agreements."""
    return sum(math.comb(of, one) * share**one * (1 - share) ** (of - one) for one in range(count + 1))


def read_pre_tokenizer(path: Path) -> str | None:
    try:
        from gguf import GGUFReader

        field = GGUFReader(path).get_field("tokenizer.ggml.pre")
    except (ImportError, ValueError, KeyError, IndexError, OSError):
        return (
            None  # without the package both are GGUF files, split by the same code; a broken file does not load either
        )
    return str(field.contents()) if field is not None else None


def count_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def read_available_bytes() -> int:
    with contextlib.suppress(OSError, ValueError, StopIteration, IndexError):
        line = next(one for one in Path("/proc/meminfo").read_text().splitlines() if one.startswith("MemAvailable"))
        return 1024 * int(line.split()[1])
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 1 << 62


def count_free_threads() -> int:
    """Cores that other processes leave free: spinning threads are slow if they cannot run at the same time."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1, round(count - load))


def say(text: str) -> None:
    print(f"conversion-check: {text}", flush=True)  # noqa: T201


def fail(text: str) -> Any:
    sys.exit(f"conversion-check: {' '.join(str(text).split())}")


if __name__ == "__main__":
    main()
