#!/usr/bin/env python3
"""The greedy next token after each of many prefixes in PyTorch with float32: the reference for every engine.

Reads a JSON list of texts from a file or stdin, and prints JSON. With `--text`, it adds the likelihood of that text and
the most likely next tokens after some of its words. `--by-layer` keeps one layer in memory at a time, for models that
are larger than the memory. Runs in an environment with torch, transformers and accelerate, and depends on nothing else.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BATCH_TOKENS = 2048
PLACES = 40
FIRST_TOKENS = 12
LAST_TOKENS = 220
TOP = 20


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bedplate-reference", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder with config.json, tokenizer and .safetensors")
    parser.add_argument("--prefixes", default="-", help="file with a JSON list of texts; -: stdin")
    parser.add_argument("--text", help="file with a text whose likelihood is computed")
    parser.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS, help="prompt tokens per batch")
    parser.add_argument("--threads", type=int, help="number of threads; default: chosen by PyTorch")
    parser.add_argument("--by-layer", action="store_true", help="keep one layer in memory at a time")
    parser.add_argument("--seconds", type=float, help="time limit; prefixes without time are left out")
    parser.add_argument("--clear-gap", type=float, default=0.0, help="logit gap from which an answer is clear")
    parser.add_argument("--least", type=int, default=0, help="end early if there will be fewer clear answers")
    parser.add_argument("--out", default="-", help="file for the result; -: stdout")
    options = parser.parse_args(arguments)
    until = time.monotonic() + options.seconds if options.seconds else None
    prefixes = read_prefixes(options.prefixes)
    import torch
    import transformers

    if options.threads:
        torch.set_num_threads(options.threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    config = transformers.AutoConfig.from_pretrained(options.model)
    configs = [one for one in (config, perturb_rope(config)) if one is not None]
    # As in a completions API: with the default special tokens of the tokenizer, such as BOS.
    prompts = [list(tokenizer(prefix)["input_ids"]) for prefix in prefixes]
    text = Path(options.text).read_text(encoding="utf-8") if options.text else None
    tokens = list(tokenizer(text)["input_ids"]) if text else []
    longest = getattr(config, "max_position_embeddings", None) or sys.maxsize
    if len(tokens) > longest:
        text = None
    batches = spread_batches(
        [one for one in group_prompts(prompts, options.batch_tokens) if len(prompts[one[0]]) <= longest]
    )
    jobs = [ForwardJob(0, [tokens], False)] if text else []
    jobs += [
        ForwardJob(version, [prompts[number] for number in batch], True)
        for batch in batches
        for version in range(len(configs))
    ]
    if options.by_layer:
        # All answers come with the last layer, so none of them tells anything early.
        LayeredModels(options.model, configs).run(jobs, until)
    else:
        answers_seen = ClearAnswers(options.clear_gap, options.least, sum(map(len, batches)))
        LoadedModels(options.model, configs).run(jobs, until, answers_seen)
    found: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    if text:
        first, *jobs = jobs
        if first.logits is not None:
            found["likelihood"] = describe_likelihood(first.logits[0].log_softmax(-1), tokenizer, text, tokens, PLACES)
    answers: list[dict[str, Any]] = []
    for batch, each in zip(batches, group_jobs(jobs, len(configs)), strict=True):
        if all(job.logits is not None for job in each):
            answers += describe_answers(tokenizer, prefixes, prompts, batch, [job.logits[:, -1] for job in each])
    order = {hash_text(prefix): number for number, prefix in enumerate(prefixes)}
    answers.sort(key=lambda one: order[one["prefix"]])
    result = json.dumps({"schema": "reference/1", **found, "answers": answers}, ensure_ascii=False)
    if options.out == "-":
        print(result)  # noqa: T201
    else:
        Path(options.out).write_text(result, encoding="utf-8")


def read_prefixes(where: str) -> list[str]:
    try:
        text = sys.stdin.read() if where == "-" else Path(where).read_text(encoding="utf-8")
        found = json.loads(text)
    except (OSError, ValueError) as error:
        sys.exit(f"bedplate-reference: cannot read the prefixes: {error}")
    if not isinstance(found, list) or not found or not all(isinstance(one, str) and one for one in found):
        sys.exit("bedplate-reference: the prefixes must be a non-empty JSON list of texts")
    return found


def report_progress(done: int, total: int) -> None:
    """One line that bedplate reads while this program runs."""
    print(f"progress {done} {total}", file=sys.stderr, flush=True)  # noqa: T201


def perturb_rope(config: Any) -> Any | None:
    """A deliberately wrong configuration, with a tenth of the rotary base; `None`: the model has no rotary base."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or not isinstance(rope.get("rope_theta"), int | float):
        return None
    other = copy.deepcopy(config)
    other.rope_parameters = {**rope, "rope_theta": rope["rope_theta"] / 10}
    return other


def group_prompts(prompts: list[list[int]], most_tokens: int) -> Iterator[list[int]]:
    """Indices of prompts per batch: only prompts of the same length, so that the reference has no padding."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        by_length[len(prompt)].append(number)
    for length, numbers in sorted(by_length.items()):
        size = max(1, most_tokens // length)
        yield from (numbers[first : first + size] for first in range(0, len(numbers), size))


def spread_batches(batches: list[list[int]]) -> list[list[int]]:
    """Another order, in which every beginning has short and long prompts: the time may not suffice for all of them."""
    golden = (5**0.5 - 1) / 2
    return [batches[number] for number in sorted(range(len(batches)), key=lambda number: number * golden % 1)]


def group_jobs(jobs: list[ForwardJob], size: int) -> list[list[ForwardJob]]:
    return [jobs[first : first + size] for first in range(0, len(jobs), size)]


class ForwardJob:
    """One forward pass of one version of the model."""

    def __init__(self, version: int, prompts: list[list[int]], last_only: bool) -> None:
        self.version, self.prompts, self.last_only = version, prompts, last_only
        self.logits: Any = None
        self.error: Exception | None = None
        self.may_run = threading.Semaphore(0)

    def forward(self, model: Any) -> None:
        import torch

        with torch.no_grad():
            given = torch.tensor(self.prompts)
            kept = model(input_ids=given, use_cache=False, logits_to_keep=1 if self.last_only else 0)
            self.logits = kept.logits.float()


FEW_PROMPTS = 16
"""Answers after fewer prompts than this say too little about the others."""
LUCK = 2
"""So many more of the answers so far are counted as clear, so that bad luck ends nothing."""


class ClearAnswers:
    """Tells early that there will be too few clear answers: in the time that is left, or because of the weights."""

    def __init__(self, clear_gap: float, least: int, prompts: int) -> None:
        self.clear_gap, self.least, self.prompts = clear_gap, least, prompts
        self.seen = self.clear = 0
        self.spent_s = 0.0
        """On prompts; the text, which is longer, comes before them."""

    def add(self, job: ForwardJob, took_s: float) -> None:
        if not job.last_only:
            return
        self.spent_s += took_s
        if job.version == 0:
            best = job.logits[:, -1].topk(2).values
            self.seen += len(job.prompts)
            self.clear += int((best[:, 0] - best[:, 1] >= self.clear_gap).sum())

    def are_too_few(self, left_s: float) -> bool:
        if self.seen < FEW_PROMPTS:
            return False
        possible = min(self.prompts, self.seen * (1 + left_s / max(self.spent_s, 1e-6)))
        return (self.clear + LUCK) / self.seen * possible < self.least


class LoadedModels:
    """The versions of a model, completely in memory."""

    def __init__(self, folder: str, configs: list[Any]) -> None:
        import accelerate
        import torch
        import transformers

        first = transformers.AutoModelForCausalLM.from_pretrained(folder, config=configs[0], dtype=torch.float32)
        self.models = [first.eval()]
        for config in configs[1:]:
            # The versions share their weights.
            with accelerate.init_empty_weights(include_buffers=False):
                other = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            other.load_state_dict(first.state_dict(), assign=True)
            other.tie_weights()
            self.models.append(other)

    def run(self, jobs: list[ForwardJob], until: float | None, answers: ClearAnswers) -> None:
        for number, job in enumerate(jobs):
            began = time.monotonic()
            left_s = math.inf if until is None else until - began
            if left_s < 0 or answers.are_too_few(left_s):
                return
            job.forward(self.models[job.version])
            answers.add(job, time.monotonic() - began)
            report_progress(number + 1, len(jobs))


class LayeredModels:
    """The versions of a model, of which one layer at a time is read from disk; the versions share it.

    Each job is a thread that stops before each layer, and only one thread runs at a time. So each layer is read once
    for all jobs, with the unchanged forward pass of Transformers.
    """

    def __init__(self, folder: str, configs: list[Any]) -> None:
        import accelerate
        import torch
        import transformers

        with accelerate.init_empty_weights(include_buffers=False):
            self.models = [
                transformers.AutoModelForCausalLM.from_config(one, dtype=torch.float32).eval() for one in configs
            ]
        self.files = find_tensor_files(Path(folder))
        self.layers = [find_layers(model, configs[0].num_hidden_layers) for model in self.models]
        self.prefix = f"{self.models[0].base_model_prefix}."
        self.turn_ended = threading.Semaphore(0)
        self.running: ForwardJob | None = None
        inside = f"{self.layers[0][0]}."
        for model in self.models:
            names = [name for name, _ in model.named_parameters() if not name.startswith(inside)]
            self.fill(names, missing_is_tied=True)
            model.tie_weights()
        left = [name for name, one in self.models[0].named_parameters() if one.is_meta and not name.startswith(inside)]
        if left:
            sys.exit(f"bedplate-reference: the files have no tensor {left[0]}")

    def fill(self, names: list[str], missing_is_tied: bool = False) -> None:
        """Read the parameters with these names from disk, once for all versions."""
        import torch
        from accelerate.utils import set_module_tensor_to_device
        from safetensors import safe_open

        for name in names:
            found = next((one for one in self.list_spellings(name) if one in self.files), None)
            if found is None:
                if missing_is_tied:
                    continue
                sys.exit(f"bedplate-reference: the files have no tensor {name}")
            with safe_open(self.files[found], framework="pt") as file:
                value = file.get_tensor(found).to(torch.float32)
            for model in self.models:
                set_module_tensor_to_device(model, name, "cpu", value=value)

    def list_spellings(self, name: str) -> tuple[str, ...]:
        """Files of a base model have names without its prefix."""
        return (name, name.removeprefix(self.prefix), self.prefix + name)

    def empty(self, names: list[str]) -> None:
        from accelerate.utils import set_module_tensor_to_device

        for name in names:
            for model in self.models:
                set_module_tensor_to_device(model, name, "meta")

    def run(self, jobs: list[ForwardJob], until: float | None) -> None:
        name, layers = self.layers[0]
        for _, each in self.layers:
            for layer in each:
                layer.register_forward_pre_hook(self.wait_for_turn)
        for job in jobs:
            threading.Thread(target=self.run_job, args=(job,), daemon=True).start()
            self.let_run(job)  # up to the first layer
        for number, layer in enumerate(layers):
            began = time.monotonic()
            names = [f"{name}.{number}.{one}" for one, _ in layer.named_parameters()]
            self.fill(names)
            for done, job in enumerate(jobs):
                self.let_run(job)
                if number == 0 and until is not None and (time.monotonic() - began) * len(layers) > until - began:
                    # The jobs so far need all of the time for the other layers.
                    jobs = jobs[: done + 1]
                    break
            self.empty(names)
            report_progress(number + 1, len(layers))

    def run_job(self, job: ForwardJob) -> None:
        job.may_run.acquire()
        try:
            job.forward(self.models[job.version])
        except Exception as error:
            job.error = error
        self.turn_ended.release()

    def wait_for_turn(self, layer: Any, given: Any) -> None:
        job = self.running
        if job is None:
            raise RuntimeError("no job has the turn")
        self.turn_ended.release()
        job.may_run.acquire()

    def let_run(self, job: ForwardJob) -> None:
        """Let a job run until it stops before the next layer, or ends."""
        self.running = job
        job.may_run.release()
        self.turn_ended.acquire()
        if job.error is not None:
            raise job.error


def find_tensor_files(folder: Path) -> dict[str, str]:
    """The file of each tensor."""
    from safetensors import safe_open

    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            found |= dict.fromkeys(file.keys(), str(path))
    return found


def find_layers(model: Any, count: int) -> tuple[str, Any]:
    """The list of the model's layers, and its name."""
    import torch

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return name, module
    sys.exit(f"bedplate-reference: the model has no list of {count} layers")


# describing


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def describe_answers(
    tokenizer: Any, prefixes: list[str], prompts: list[list[int]], batch: list[int], versions: list[Any]
) -> list[dict[str, Any]]:
    """The next tokens of the first version, and for each the logit gap of the second one."""
    logits, *others = versions
    best = logits.topk(2)
    special = set(tokenizer.all_special_ids)  # computed anew at each access
    answers = []
    for row, number in enumerate(batch):
        token = int(best.indices[row, 0])
        text, kind = spell_token(tokenizer, prompts[number], token, special)
        answers.append(
            {
                "prefix": hash_text(prefixes[number]),
                "tokens": len(prompts[number]),
                "token": token,
                "text": text,
                "kind": kind,
                "gap": round(float(best.values[row, 0] - best.values[row, 1]), 3),
                "turned_gap": round(compute_gap(others[0][row], token), 3) if others else None,
            }
        )
    return answers


def compute_gap(logits: Any, token: int) -> float:
    """The difference of a token's logit to the best other one; negative if another is better."""
    best = logits.topk(2)
    other = best.values[1] if int(best.indices[0]) == token else best.values[0]
    return float(logits[token] - other)


def spell_token(tokenizer: Any, prompt: list[int], token: int, special: set[int]) -> tuple[str, str]:
    """Text and kind of a token after the prompt; decoded alone it would lose its space in some tokenizers."""
    if token in special:
        return str(tokenizer.decode([token])), "special"
    before = tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
    after = tokenizer.decode([*prompt, token], clean_up_tokenization_spaces=False)
    text = str(after[len(before) :])
    return text, "part" if "\ufffd" in text or not text else "text"


def describe_likelihood(logprobs: Any, tokenizer: Any, text: str, tokens: list[int], places: int) -> dict[str, Any]:
    each = [float(logprobs[number, token]) for number, token in enumerate(tokens[1:])]
    return {
        "tokens": len(tokens),
        "logprob": sum(each),
        "each": [round(one, 4) for one in each],
        "places": [
            list_next_tokens(tokenizer, logprobs, text, tokens, end)
            for end in choose_word_ends(tokenizer, text, tokens, places)
        ],
    }


def choose_word_ends(tokenizer: Any, text: str, tokens: list[int], count: int) -> list[int]:
    """Ends of words, spread over the first part of the text, at which the prefix has the tokens of the whole text."""
    found = []
    for end in (word.end() for word in re.finditer(r"\S+", text)):
        first = list(tokenizer(text[:end])["input_ids"])
        if FIRST_TOKENS <= len(first) <= LAST_TOKENS and tokens[: len(first)] == first and len(first) < len(tokens):
            found.append(end)
    return [found[number * len(found) // count] for number in range(count)] if len(found) > count else found


def list_next_tokens(tokenizer: Any, logprobs: Any, text: str, tokens: list[int], end: int) -> dict[str, Any]:
    length = len(tokenizer(text[:end])["input_ids"])
    row = logprobs[length - 1]
    best = row.topk(min(TOP, len(row)))
    before = tokenizer.decode(tokens[:length], clean_up_tokenization_spaces=False)
    top = []
    for value, token in zip(best.values, best.indices, strict=True):
        after = tokenizer.decode([*tokens[:length], int(token)], clean_up_tokenization_spaces=False)
        top.append([after[len(before) :], round(float(value), 4)])
    following = tokenizer.decode(tokens[: length + 1], clean_up_tokenization_spaces=False)[len(before) :]
    return {"end": end, "tokens": length, "next": [following, round(float(row[tokens[length]]), 4)], "top": top}


if __name__ == "__main__":
    main()
