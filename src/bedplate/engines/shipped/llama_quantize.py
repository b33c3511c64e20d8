#!/usr/bin/env python3
"""llama-quantize for the wheel of llama.cpp, which contains the library without the program.

    llama-quantize [--allow-requantize] IN.gguf OUT.gguf Q4_K_M [THREADS]

The library reads, writes and quantizes. This program chooses the type of each tensor for the mixtures that bedplate
plans, as in llama-quant.cpp of llama.cpp b11549 (without an importance matrix).

Runs in llama.cpp's environment and depends only on its wheel.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import mmap
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13,
    "Q6_K": 14, "BF16": 30,
}  # fmt: skip
NAMES = {number: name for name, number in TYPES.items()}
BLOCKS = {"F32": 1, "F16": 1, "BF16": 1, "Q3_K": 256, "Q4_K": 256, "Q5_K": 256, "Q6_K": 256}
"""Block size in weights; 32 for all other types."""
MIXTURES = {
    "Q8_0": ("Q8_0", 7), "Q6_K": ("Q6_K", 18), "Q5_K_M": ("Q5_K", 17), "Q4_K_M": ("Q4_K", 15), "Q3_K_M": ("Q3_K", 12),
    "Q5_1": ("Q5_1", 9), "Q5_0": ("Q5_0", 8), "Q4_1": ("Q4_1", 3), "Q4_0": ("Q4_0", 2), "F16": ("F16", 1),
    "BF16": ("BF16", 32),
}  # fmt: skip
"""The type of most tensors, and `general.file_type` of the mixture in the header."""
PLAIN = ("F32", "F16", "BF16")
SMALLER_BLOCKS = {"Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Replacements for rows that are not a multiple of 256."""
NOT_QUANTIZED = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj",
    "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight", "time_mix_first.weight",
    "time_mix_w0.weight", "time_mix_w1.weight", "time_mix_w2.weight", "time_mix_v0.weight", "time_mix_v1.weight",
    "time_mix_v2.weight", "time_mix_a0.weight", "time_mix_a1.weight", "time_mix_a2.weight", "time_mix_g1.weight",
    "time_mix_g2.weight", "time_mix_decay_w1.weight", "time_mix_decay_w2.weight", "time_mix_lerp_fused.weight",
    "attn_rel_b.weight", ".position_embd", "position_embd.weight", "token_types.weight", "sam.", ".rel_pos",
    ".patch_embd", ".patch_merger", "a.rvq.codebook", "mm.a.code_embd",
)  # fmt: skip
"""Tensors that are not quantized: small and sensitive ones, and some that are not matrices."""
ODD_ARCHITECTURES = frozenset(["glm5-next", "bailingmoe3", "jais2"])
"""Architectures with their own rules, which are not implemented here."""
ROLES = (
    ("attn_qkv.weight", "value"), ("attn_kv_b.weight", "value"), ("attn_v.weight", "value"), ("attn_k.weight", "key"),
    ("attn_q.weight", "query"), ("attn_output.weight", "attention output"), ("ffn_up", "up"), ("ffn_gate", "gate"),
    ("ffn_down", "down"),
)  # fmt: skip
SLAB_BYTES = 1 << 30
CHUNK_WEIGHTS = 1 << 20
QUANTIZATION_VERSION = 2


class ModelProperties(NamedTuple):
    """The properties of a model that the mixtures depend on."""

    architecture: str
    layers: int
    experts: int
    heads: int
    kv_heads: int
    tied: bool

    @property
    def large(self) -> bool:
        """Whether it is a model of about 70 billion weights, where the value matrices are a small part."""
        if self.architecture == "llama":
            return self.layers == 80 and self.heads != self.kv_heads
        return self.layers == 80 and self.architecture in ("qwen2", "deci", "olmo")


class TensorTypeChooser:
    """Chooses the type of one tensor after the other, in the order of layers."""

    def __init__(self, label: str, shape: ModelProperties, value_matrices: int) -> None:
        self.label, self.shape = label, shape
        self.base = MIXTURES[label][0]
        self.values, self._value, self._down = value_matrices, 0, 0

    def choose_type(self, name: str, columns: int) -> str:
        chosen = self._choose_mixed_type(name, columns)
        if columns % get_block_size(chosen):
            chosen = SMALLER_BLOCKS.get(chosen, chosen)
        return chosen if columns % get_block_size(chosen) == 0 else "F16"

    def _choose_mixed_type(self, name: str, columns: int) -> str:
        role, shape, label = find_role(name), self.shape, self.label
        if self.base in ("F16", "BF16"):
            return self.base
        if role == "output" or (role == "embedding" and shape.tied):
            if shape.architecture == "falcon" or columns % get_block_size(self.base):
                return "Q8_0"
            return self.base if self.base == "Q8_0" else "Q6_K"
        if role == "value":
            return self._choose_value_type()
        if role == "key" and shape.experts == 8:
            return "Q8_0"
        if role == "down":
            return self._choose_down_type(name)
        if role == "attention output" and shape.architecture != "falcon":
            if shape.experts == 8:
                return "Q5_K" if label in ("Q3_K_M", "Q4_K_M") else self.base
            return "Q4_K" if label == "Q3_K_M" else self.base
        return self.base

    def _choose_value_type(self) -> str:
        number, self._value = self._value, self._value + 1
        chosen = self.base
        if self.label == "Q3_K_M":
            chosen = "Q5_K" if number < 2 else "Q4_K"
        elif self.label in ("Q4_K_M", "Q5_K_M") and needs_more_bits(number, self.values):
            chosen = "Q6_K"
        if self.shape.large and chosen in ("Q3_K", "Q4_K"):
            chosen = "Q5_K"
        return "Q8_0" if self.shape.experts == 8 else chosen

    def _choose_down_type(self, name: str) -> str:
        number, self._down = self._down, self._down + 1
        layers, falcon = self.shape.layers, self.shape.architecture == "falcon"
        if self.shape.experts > 1:
            number = parse_layer(name)
        more = needs_more_bits(number, layers)
        if self.label == "Q3_K_M":
            if number < layers // 16:
                return "Q5_K"
            return "Q4_K" if more or not falcon else "Q3_K"
        if self.label == "Q4_K_M" and falcon:
            return "Q6_K" if number < layers // 16 else "Q5_K" if more else "Q4_K"
        return "Q6_K" if more and self.label in ("Q4_K_M", "Q5_K_M") else self.base


def get_block_size(name: str) -> int:
    return BLOCKS.get(name, 32)


def needs_more_bits(layer: int, layers: int) -> bool:
    """Whether the layer is in the first or last eighth, or every third one between them."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def find_role(name: str) -> str:
    if name == "output.weight":
        return "output"
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return "embedding"
    return next((role for part, role in ROLES if part in name), "other")


def parse_layer(name: str) -> int:
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1


def is_quantized(name: str, dimensions: int) -> bool:
    """Whether a tensor is quantized."""
    return dimensions >= 2 and name.endswith("weight") and not any(part in name for part in NOT_QUANTIZED)


class InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.POINTER(ctypes.c_void_p)))


class TypeTraits(ctypes.Structure):
    """The first fields of ggml_type_traits, with the conversion of a type to 32 bits."""

    _fields_ = (
        ("name", ctypes.c_char_p), ("block", ctypes.c_int64), ("interleaved", ctypes.c_int64),
        ("size", ctypes.c_size_t), ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )  # fmt: skip


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "gguf_init_from_file": (ctypes.c_void_p, [ctypes.c_char_p, InitParams]),
    "gguf_init_empty": (ctypes.c_void_p, []),
    "gguf_find_key": (ctypes.c_int64, [ctypes.c_void_p, ctypes.c_char_p]),
    "gguf_get_kv_type": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int64]),
    "gguf_get_val_u32": (ctypes.c_uint32, [ctypes.c_void_p, ctypes.c_int64]),
    "gguf_get_val_str": (ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_int64]),
    "gguf_get_arr_n": (ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_int64]),
    "gguf_get_arr_type": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int64]),
    "gguf_get_arr_data": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int64]),
    "gguf_set_kv": (None, [ctypes.c_void_p, ctypes.c_void_p]),
    "gguf_set_val_u32": (None, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32]),
    "gguf_remove_key": (ctypes.c_int64, [ctypes.c_void_p, ctypes.c_char_p]),
    "gguf_get_n_tensors": (ctypes.c_int64, [ctypes.c_void_p]),
    "gguf_get_tensor_name": (ctypes.c_char_p, [ctypes.c_void_p, ctypes.c_int64]),
    "gguf_get_tensor_type": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int64]),
    "gguf_get_tensor_offset": (ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_int64]),
    "gguf_get_tensor_size": (ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_int64]),
    "gguf_find_tensor": (ctypes.c_int64, [ctypes.c_void_p, ctypes.c_char_p]),
    "gguf_get_data_offset": (ctypes.c_size_t, [ctypes.c_void_p]),
    "gguf_add_tensor": (None, [ctypes.c_void_p, ctypes.c_void_p]),
    "gguf_set_tensor_type": (None, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]),
    "gguf_get_meta_size": (ctypes.c_size_t, [ctypes.c_void_p]),
    "gguf_get_meta_data": (None, [ctypes.c_void_p, ctypes.c_void_p]),
    "ggml_get_tensor": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]),
    "ggml_nelements": (ctypes.c_int64, [ctypes.c_void_p]),
    "ggml_nrows": (ctypes.c_int64, [ctypes.c_void_p]),
    "ggml_n_dims": (ctypes.c_int, [ctypes.c_void_p]),
    "ggml_row_size": (ctypes.c_size_t, [ctypes.c_int, ctypes.c_int64]),
    "ggml_get_type_traits": (ctypes.POINTER(TypeTraits), [ctypes.c_int]),
    "ggml_quantize_init": (None, [ctypes.c_int]),
    "ggml_quantize_chunk": (
        ctypes.c_size_t,
        [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p],
    ),
    "ggml_validate_row_data": (ctypes.c_bool, [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]),
}


class GgmlLibrary:
    """The functions of ggml that are used here."""

    def __init__(self) -> None:
        try:
            import xllamacpp.xllamacpp as extension
        except ImportError as error:
            fail(f"llama.cpp's library is missing in this Python: {error}")
        library = ctypes.CDLL(extension.__file__)
        for name, (result, arguments) in SIGNATURES.items():
            if not hasattr(library, name):
                fail(f"this build of llama.cpp has no function {name}")
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:  # for type checkers: all are set above
        raise AttributeError(name)


class SourceTensor(NamedTuple):
    name: str
    type: int
    rows: int
    columns: int
    dimensions: int
    start: int
    size: int


class GgufSource:
    """The GGUF file to quantize, read tensor by tensor."""

    def __init__(self, library: GgmlLibrary, path: Path) -> None:
        self.library, self._inside = library, ctypes.c_void_p()
        params = InitParams(no_alloc=True, ctx=ctypes.pointer(self._inside))
        self.header = library.gguf_init_from_file(os.fsencode(path), params)
        if not self.header:
            fail(f"{path} is not a complete GGUF file")
        self._file = path.open("rb")
        self.data = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def list_tensors(self) -> list[SourceTensor]:
        """The tensors, sorted by layer and name."""
        library, begin = self.library, self.library.gguf_get_data_offset(self.header)
        found = []
        for number in range(library.gguf_get_n_tensors(self.header)):
            name = library.gguf_get_tensor_name(self.header, number)
            handle = self.handle(name)
            rows = library.ggml_nrows(handle)
            found.append(
                SourceTensor(
                    name.decode(),
                    library.gguf_get_tensor_type(self.header, number),
                    rows,
                    library.ggml_nelements(handle) // max(rows, 1),
                    library.ggml_n_dims(handle),
                    begin + library.gguf_get_tensor_offset(self.header, number),
                    library.gguf_get_tensor_size(self.header, number),
                )
            )
        return sorted(found, key=lambda one: (parse_layer(one.name), one.name))

    def handle(self, name: bytes) -> Any:
        return self.library.ggml_get_tensor(self._inside, name)

    def read_text(self, key: str) -> str:
        at = self.library.gguf_find_key(self.header, key.encode())
        return self.library.gguf_get_val_str(self.header, at).decode() if at >= 0 else ""

    def read_number(self, key: str) -> int:
        """The value of a key; the first element if it is a list by layer."""
        at = self.library.gguf_find_key(self.header, key.encode())
        if at < 0:
            return 0
        kind = self.library.gguf_get_kv_type(self.header, at)
        if kind == 9:  # an array
            if not self.library.gguf_get_arr_n(self.header, at) or self.library.gguf_get_arr_type(self.header, at) > 5:
                return 0
            return int(ctypes.cast(self.library.gguf_get_arr_data(self.header, at), ctypes.POINTER(ctypes.c_int))[0])
        return int(self.library.gguf_get_val_u32(self.header, at)) if kind == 4 else 0

    def read_properties(self, tensors: list[SourceTensor]) -> ModelProperties:
        architecture = self.read_text("general.architecture")
        return ModelProperties(
            architecture,
            self.read_number(f"{architecture}.block_count"),
            self.read_number(f"{architecture}.expert_count"),
            self.read_number(f"{architecture}.attention.head_count"),
            self.read_number(f"{architecture}.attention.head_count_kv"),
            all(tensor.name != "output.weight" for tensor in tensors),
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="llama-quantize", description=__doc__, allow_abbrev=False)
    parser.add_argument("--allow-requantize", action="store_true", help="also requantize quantized weights")
    parser.add_argument("source", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("type", choices=tuple(MIXTURES))
    parser.add_argument("threads", type=int, nargs="?", default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    if not options.source.is_file():
        fail(f"the file {options.source} does not exist")
    try:
        again = options.allow_requantize
        quantize(options.source, options.result, options.type, max(1, options.threads), again=again)
    except BaseException:
        options.result.unlink(missing_ok=True)
        raise


def quantize(path: Path, result: Path, label: str, threads: int, *, again: bool = False) -> None:
    library = GgmlLibrary()
    source = GgufSource(library, path)
    tensors = source.list_tensors()
    shape = source.read_properties(tensors)
    if shape.architecture in ODD_ARCHITECTURES:
        fail(f"{shape.architecture} is not supported here; use the llama-quantize of llama.cpp")
    if source.read_number("split.count") > 1:
        fail("the file is one part of a split model: merge the parts first")
    values = sum(find_role(tensor.name) == "value" for tensor in tensors)
    chooser = TensorTypeChooser(label, shape, values)
    chosen = {}
    for tensor in tensors:
        kept = NAMES.get(tensor.type, "") if not is_quantized(tensor.name, tensor.dimensions) else None
        chosen[tensor.name] = (
            tensor.type if kept is not None else TYPES[chooser.choose_type(tensor.name, tensor.columns)]
        )
    header = library.gguf_init_empty()
    library.gguf_set_kv(header, source.header)
    library.gguf_set_val_u32(header, b"general.quantization_version", QUANTIZATION_VERSION)
    library.gguf_set_val_u32(header, b"general.file_type", MIXTURES[label][1])
    for key in (b"split.no", b"split.count", b"split.tensors.count"):
        library.gguf_remove_key(header, key)
    for tensor in tensors:
        library.gguf_add_tensor(header, source.handle(tensor.name.encode()))
        library.gguf_set_tensor_type(header, tensor.name.encode(), chosen[tensor.name])
    with result.open("wb") as file, concurrent.futures.ThreadPoolExecutor(threads) as pool:
        begin = library.gguf_get_meta_size(header)
        meta = ctypes.create_string_buffer(begin)
        library.gguf_get_meta_data(header, meta)
        file.write(meta.raw)
        for number, tensor in enumerate(tensors, 1):
            at = library.gguf_find_tensor(header, tensor.name.encode())
            file.write(b"\0" * (begin + library.gguf_get_tensor_offset(header, at) - file.tell()))
            if not again and chosen[tensor.name] != tensor.type and NAMES.get(tensor.type) not in PLAIN:
                fail(f"{tensor.name} is already quantized; use 16-bit weights, or --allow-requantize")
            for slab in convert_tensor(library, source, tensor, chosen[tensor.name], pool):
                file.write(slab)
            what = NAMES.get(chosen[tensor.name], "unchanged")
            print(f"[{number:4d}/{len(tensors):4d}] {tensor.name} {what}", flush=True)  # noqa: T201
        # All tensors are padded, including the last one.
        file.write(b"\0" * (-(file.tell() - begin) % 32))
    odd = sum(
        tensor.columns % get_block_size(MIXTURES[label][0]) != 0
        for tensor in tensors
        if chosen[tensor.name] != tensor.type
    )
    if odd:
        print(f"{odd} tensors have rows that are not a multiple of 256, and need more bits than {label}")  # noqa: T201


def convert_tensor(
    library: GgmlLibrary, source: GgufSource, tensor: SourceTensor, wanted: int, pool: concurrent.futures.Executor
) -> Iterator[bytes | bytearray | memoryview]:
    """The bytes of a tensor in the wanted type, in slabs of rows."""
    if tensor.type == wanted:
        yield memoryview(source.data)[tensor.start : tensor.start + tensor.size]
        return
    library.ggml_quantize_init(wanted)
    row_in, row_out = library.ggml_row_size(tensor.type, tensor.columns), library.ggml_row_size(wanted, tensor.columns)
    slab_rows = max(1, SLAB_BYTES // (row_in + row_out))
    chunk_rows = max(1, CHUNK_WEIGHTS // tensor.columns)
    for first in range(0, tensor.rows, slab_rows):
        rows = min(slab_rows, tensor.rows - first)
        slab = bytearray(rows * row_out)
        target = (ctypes.c_char * len(slab)).from_buffer(slab)

        def convert_chunk(begin: int, first: int = first, rows: int = rows, target: Any = target) -> None:
            count = min(chunk_rows, rows - begin)
            at = tensor.start + (first + begin) * row_in
            given = ctypes.create_string_buffer(source.data[at : at + count * row_in], count * row_in)
            where = ctypes.addressof(target) + begin * row_out
            convert_rows(library, tensor, wanted, given, where, count)

        list(pool.map(convert_chunk, range(0, rows, chunk_rows)))
        del target, convert_chunk
        yield slab


def convert_rows(library: GgmlLibrary, tensor: SourceTensor, wanted: int, given: Any, where: int, rows: int) -> None:
    """Convert rows to the wanted type through 32 bits."""
    weights = rows * tensor.columns
    numbers = given
    if tensor.type != TYPES["F32"]:
        numbers = ctypes.create_string_buffer(4 * weights)
        library.ggml_get_type_traits(tensor.type).contents.to_float(
            ctypes.addressof(given), ctypes.addressof(numbers), weights
        )
    size = library.ggml_quantize_chunk(wanted, numbers, where, 0, rows, tensor.columns, None)
    if not library.ggml_validate_row_data(wanted, where, size):
        fail(f"{tensor.name} contains weights that are not finite")


def fail(text: str) -> Any:
    sys.exit(f"llama-quantize: {' '.join(str(text).split())}")


if __name__ == "__main__":
    main()
