"""Transcriptions in OpenAI's API for the server of transformers.

Its own handler decodes with packages that are not installed with it, reads the first 30 seconds alone, and ignores
`language`, `prompt`, `temperature` and `response_format`. Runs in the engine's environment: transformers, soundfile,
soxr and python-multipart.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TOKENS_PER_S = 50
"""Positions of Whisper's encoder in one second of audio."""
MAX_AUDIO_S = 4 * 3600
"""A compressed file of a few megabytes may expand to days of silence."""
FORMATS = ("json", "verbose_json")
"""The gateway makes text and subtitles from these."""
FIELDS = frozenset([
    "file", "model", "language", "prompt", "response_format", "temperature", "stream", "timestamp_granularities",
    "timestamp_granularities[]",
])  # fmt: skip


class SpeechMistake(Exception):
    """A client's mistake."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param = message, param


@dataclass(frozen=True, kw_only=True)
class TranscriptionOrder:
    """What a request asks for."""

    audio: bytes
    language: str | None
    prompt: str
    temperature: float
    format: str


@dataclass(frozen=True, kw_only=True)
class SpeechSegment:
    start_s: float
    end_s: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Transcript:
    text: str
    language: str | None
    duration_s: float
    segments: tuple[SpeechSegment, ...]
    prompt_tokens: int
    output_tokens: int

    def count_usage(self) -> dict[str, Any]:
        audio = round(TOKENS_PER_S * self.duration_s)
        details = {"audio_tokens": audio, "text_tokens": self.prompt_tokens}
        total = audio + self.prompt_tokens
        return {
            "type": "tokens", "input_tokens": total, "output_tokens": self.output_tokens,
            "total_tokens": total + self.output_tokens, "input_token_details": details,
        }  # fmt: skip


def read_order(fields: Mapping[str, Any], audio: bytes | None) -> TranscriptionOrder:
    """`fields` are the form's, without the file; raises `SpeechMistake`."""
    if unknown := sorted(set(fields) - FIELDS):
        raise SpeechMistake(f"unknown field {unknown[0]!r}", unknown[0])
    if not audio:
        raise SpeechMistake("file must be an audio file", "file")
    form = str(fields.get("response_format") or "json")
    if form not in FORMATS:
        raise SpeechMistake(f"response_format must be one of {', '.join(FORMATS)}", "response_format")
    if str(fields.get("stream", "false")).lower() not in ("false", "0", ""):
        raise SpeechMistake("stream is not supported for transcriptions", "stream")
    detail = fields.get("timestamp_granularities[]") or fields.get("timestamp_granularities") or "segment"
    if detail != "segment":
        raise SpeechMistake("timestamp_granularities must be segment", "timestamp_granularities")
    try:
        temperature = float(fields.get("temperature") or 0)
    except ValueError:
        temperature = -1.0
    if not 0 <= temperature <= 1:
        raise SpeechMistake("temperature must be a number from 0 to 1", "temperature")
    language = fields.get("language") or None
    return TranscriptionOrder(
        audio=audio, language=language, prompt=str(fields.get("prompt") or ""), temperature=temperature, format=form
    )


def decode_audio(data: bytes, rate: int) -> Any:
    """The samples of a WAV, FLAC, Ogg or MP3 file in one channel; raises `SpeechMistake`."""
    import soundfile
    import soxr

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.frames > MAX_AUDIO_S * file.samplerate:
                raise SpeechMistake(f"the audio is longer than {MAX_AUDIO_S // 3600} hours", "file")
            samples, own_rate = file.read(dtype="float32", always_2d=True).mean(axis=1), file.samplerate
    except soundfile.SoundFileError as error:
        message = "the file is not audio in a supported format: wav, flac, ogg or mp3"
        raise SpeechMistake(message, "file") from error
    if not len(samples):
        raise SpeechMistake("the file has no audio", "file")
    return samples if own_rate == rate else soxr.resample(samples, own_rate, rate)


def transcribe(model: Any, processor: Any, order: TranscriptionOrder) -> Transcript:
    """Computes the transcript in the thread of the engine; raises `SpeechMistake`."""
    import torch

    rate = processor.feature_extractor.sampling_rate
    samples = decode_audio(order.audio, rate)
    duration_s = len(samples) / rate
    window_s = processor.feature_extractor.chunk_length
    is_long = duration_s > window_s
    # Longer audio is computed in windows, each of which begins where the last timestamp of the one before is.
    options: dict[str, Any] = {"truncation": False, "padding": "longest"} if is_long else {}
    inputs = processor(samples, sampling_rate=rate, return_tensors="pt", return_attention_mask=True, **options)
    inputs = inputs.to(model.device)
    inputs["input_features"] = inputs["input_features"].to(model.dtype)
    given = _choose_language(model, order)
    prompt_tokens = 0
    if order.prompt:
        ids = processor.get_prompt_ids(order.prompt, return_tensors="pt").to(model.device)
        # The prompt may take half of the decoder's positions; its end is kept, as in OpenAI's API.
        ids = torch.cat([ids[:1], ids[1:][-(model.config.max_target_positions // 2 - 1) :]])
        given["prompt_ids"], prompt_tokens = ids, len(ids)
    sampling = order.temperature > 0
    if sampling:
        given["temperature"] = order.temperature
    timed = is_long or order.format == "verbose_json"
    with torch.no_grad():
        made = model.generate(**inputs, do_sample=sampling, return_timestamps=timed, return_segments=timed, **given)
    tokenizer = processor.tokenizer
    if not timed:
        ids = made[0].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=True).strip()
        return _make_transcript(order, text, (), duration_s, prompt_tokens, len(ids))
    segments = tuple(
        SpeechSegment(
            start_s=float(one["start"]),
            end_s=min(float(one["end"]), duration_s),
            text=tokenizer.decode(one["tokens"], skip_special_tokens=True, decode_with_timestamps=False).strip(),
        )
        for one in made["segments"][0]
    )
    text = " ".join(one.text for one in segments if one.text)
    return _make_transcript(order, text, segments, duration_s, prompt_tokens, len(made["sequences"][0]))


def _make_transcript(
    order: TranscriptionOrder,
    text: str,
    segments: tuple[SpeechSegment, ...],
    duration_s: float,
    prompt_tokens: int,
    output_tokens: int,
) -> Transcript:
    return Transcript(
        text=text, language=order.language, duration_s=duration_s, segments=segments, prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )  # fmt: skip


def _choose_language(model: Any, order: TranscriptionOrder) -> dict[str, Any]:
    """Only multilingual models know languages and tasks; without a language they detect it."""
    settings = model.generation_config
    if not getattr(settings, "is_multilingual", False):
        if order.language not in (None, "en"):
            raise SpeechMistake("this model transcribes English alone", "language")
        return {}
    known = getattr(settings, "lang_to_id", None) or {}
    if order.language is not None and f"<|{order.language}|>" not in known:
        raise SpeechMistake("language must be a language of the model, as a code of ISO 639-1 such as en", "language")
    return {"task": "transcribe", "language": order.language}


def make_answer(found: Transcript, form: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"text": found.text, "usage": found.count_usage()}
    if form == "verbose_json":
        answer |= {"task": "transcribe", "language": found.language, "duration": found.duration_s}
        answer["segments"] = [
            {"id": index, "start": one.start_s, "end": one.end_s, "text": one.text}
            for index, one in enumerate(found.segments)
        ]
    return answer


async def handle_transcription(self: Any, request: Any) -> Any:
    """Replaces `TranscriptionHandler.handle_request`."""
    from fastapi.responses import JSONResponse

    try:
        async with request.form() as form:
            upload = form.get("file")
            audio = await upload.read() if hasattr(upload, "read") else None
            fields = {name: value for name, value in form.items() if name != "file"}
        order = read_order(fields, audio)
        name = self.model_manager.process_model_name(self.model_manager.force_model or str(fields.get("model")))
        model, processor = self.model_manager.load_model_and_processor(name)
        if not hasattr(processor, "feature_extractor"):
            raise SpeechMistake("this model does not transcribe audio", "model")
        manager = self.generation_state.get_manager(name)
        found = await manager.async_submit(transcribe, model, processor, order)
    except SpeechMistake as mistake:
        error = {"message": mistake.message, "type": "invalid_request_error", "param": mistake.param, "code": None}
        return JSONResponse({"error": error}, status_code=400)
    return JSONResponse(make_answer(found, order.format))
