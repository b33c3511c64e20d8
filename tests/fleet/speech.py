"""Makes a tiny Whisper of random weights, and transcribes with transformers. Runs in PyTorch's environment.

python speech.py make FOLDER
python speech.py transcribe FOLDER AUDIO ORDERS    prints texts and their token ids; each order: [language, prompt]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LANGUAGES = ("en", "de")
MARKS = ("<|endoftext|>", "<|startoftranscript|>", *(f"<|{one}|>" for one in LANGUAGES), "<|translate|>")
MARKS += ("<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")
TIMES = tuple(f"<|{0.02 * step:.2f}|>" for step in range(1501))


def make(folder: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    folder.mkdir(parents=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {one: index for index, one in enumerate((*letters, *MARKS, *TIMES))}
    (folder / "vocab.json").write_text(json.dumps({one: index for one, index in ids.items() if one in letters}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "normalizer.json").write_text("{}")
    tokenizer = WhisperTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), str(folder / "normalizer.json"),
        unk_token=MARKS[0], bos_token=MARKS[0], eos_token=MARKS[0], pad_token=MARKS[0],
    )  # fmt: skip
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.add_tokens(list(TIMES))
    assert tokenizer.convert_tokens_to_ids("<|30.00|>") == ids["<|30.00|>"], "ids are in this order"
    torch.manual_seed(1)
    config = WhisperConfig(
        vocab_size=len(ids), d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=128, decoder_ffn_dim=128, init_std=0.3,
        bos_token_id=ids[MARKS[0]], eos_token_id=ids[MARKS[0]], pad_token_id=ids[MARKS[0]],
        decoder_start_token_id=ids[MARKS[1]],
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    # Letters are always more likely than times, so that a window is one segment, and are text that people can read.
    with torch.no_grad():
        rows = model.get_input_embeddings().weight
        rows.mul_(0.1)
        rows[[ids[one] for one in letters if one.isascii() and one.isalpha()]] *= 30
    model.generation_config = GenerationConfig(
        bos_token_id=ids[MARKS[0]], eos_token_id=ids[MARKS[0]], pad_token_id=ids[MARKS[0]],
        decoder_start_token_id=ids[MARKS[1]], max_length=48, is_multilingual=True,
        lang_to_id={f"<|{one}|>": ids[f"<|{one}|>"] for one in LANGUAGES},
        task_to_id={one: ids[f"<|{one}|>"] for one in ("transcribe", "translate")},
        no_timestamps_token_id=ids["<|notimestamps|>"], prev_sot_token_id=ids["<|startofprev|>"],
        suppress_tokens=[], begin_suppress_tokens=[ids[MARKS[0]]], max_initial_timestamp_index=50,
        return_timestamps=False,
    )  # fmt: skip
    model.save_pretrained(folder)
    WhisperProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)


def transcribe(folder: Path, audio: Path, orders: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """A file of 16 kHz, at most 30 seconds, with transformers alone."""
    import soundfile
    import torch
    from transformers import AutoProcessor, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(folder)
    wave, rate = soundfile.read(audio, dtype="float32")
    inputs = processor(wave, sampling_rate=rate, return_tensors="pt", return_attention_mask=True)
    found = []
    for language, prompt in orders:
        more = {"prompt_ids": processor.get_prompt_ids(prompt, return_tensors="pt")} if prompt else {}
        with torch.no_grad():
            made = model.generate(**inputs, language=language, task="transcribe", do_sample=False, **more)
        found.append({"text": processor.decode(made[0], skip_special_tokens=True), "ids": made[0].tolist()})
    return found


if __name__ == "__main__":
    verb, folder, *rest = sys.argv[1:]
    if verb == "make":
        make(Path(folder))
    else:
        print(json.dumps(transcribe(Path(folder), Path(rest[0]), json.loads(rest[1]))))
