"""Blocks of every GGUF type with random codes and scales, and their values by the `gguf` package.

python gguf_blocks.py        # needs numpy and gguf; writes gguf_blocks.safetensors next to this file
"""

import json
import struct
from pathlib import Path

import gguf
import numpy as np

# Bytes of a block that are scales in half precision.
SCALES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "F16": [0],
    "BF16": [],
    "F32": [],
}
rng = np.random.default_rng(28)
header, body = {}, b""
for name, scales in SCALES.items():
    kind = gguf.GGMLQuantizationType[name]
    size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    count = 4 if size == 256 else 64 // size * 4
    blocks = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    if name in ("BF16", "F32"):
        # Random bits would contain NaN.
        values = rng.standard_normal(count).astype(np.float32)
        blocks = gguf.quants.quantize(values, kind).view(np.uint8).reshape(count, block_bytes)
    for at in scales:
        blocks[:, at : at + 2] = rng.standard_normal((count, 1)).astype(np.float16).view(np.uint8)
    values = gguf.quants.dequantize(blocks.reshape(1, -1), kind).astype(np.float32)
    for part, dtype, data in (("values", "F32", values), ("raw", "U8", blocks)):
        content = data.tobytes()
        shape = [len(content) // (4 if dtype == "F32" else 1)]
        header[f"{name}.{part}"] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(body), len(body) + len(content)],
        }
        body += content
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)
Path(__file__).with_name("gguf_blocks.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
