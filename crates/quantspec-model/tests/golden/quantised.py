"""A tiny Llama in every quantised format with random codes, and its matrices' values by NumPy.

python quantised.py        # needs numpy; writes quantised.json and quantised.safetensors next to this file
"""

import json
import struct
from pathlib import Path

import numpy as np

rng = np.random.default_rng(28)
MATRICES = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (64, 32),
    "mlp.up_proj": (64, 32),
    "mlp.down_proj": (32, 64),
}
GROUP = 16


def fp8(codes):
    exponent, mantissa = (codes >> 3 & 15).astype(float), (codes & 7).astype(float)
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.where(codes > 127, -value, value).astype(np.float32)


def pack(codes, bits, axis):
    """Words along an axis, the first code in the lowest bits."""
    codes = np.moveaxis(codes, axis, -1).astype(np.uint32)
    codes = codes.reshape(*codes.shape[:-1], -1, 32 // bits)
    words = (codes << (np.arange(32 // bits, dtype=np.uint32) * bits)).sum(-1, dtype=np.uint32)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).astype(np.uint32).view(np.int32)


def place(x):
    """Inputs first, outputs in AWQ's order."""
    return x.T.reshape(x.shape[1], -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(x.shape[1], -1)


def scales(*shape):
    return (rng.uniform(0.5, 1.5, shape) / 64).astype(np.float16)


def matrix(kind, rows, columns):
    """Tensors of a module, and its values in half precision."""
    if kind.startswith("fp8"):
        codes = (
            rng.integers(0, 127, (rows, columns), dtype=np.uint8)
            | rng.integers(0, 2, (rows, columns), dtype=np.uint8) << 7
        )
        shape = {"fp8-tensor": (1,), "fp8-channel": (rows, 1), "fp8-block": (-(-rows // 24), -(-columns // 24))}[kind]
        if kind == "fp8-block":
            scale = rng.uniform(0.5, 1.5, shape).astype(np.float32) / 64
            values = fp8(codes) * scale.repeat(24, 0)[:rows].repeat(24, 1)[:, :columns]
            return {"weight": codes, "weight_scale_inv": scale}, values.astype(np.float16)
        scale = scales(*shape)
        return {"weight": codes, "weight_scale": scale}, (fp8(codes) * scale.astype(np.float32)).astype(np.float16)
    bits = 8 if "8" in kind else 4
    groups = columns // GROUP
    codes, scale = rng.integers(0, 2**bits, (rows, columns)), scales(rows, groups)
    zeros, order = rng.integers(0, 2**bits, (rows, groups)), np.arange(columns) // GROUP
    if kind == "int8":
        scale, order = scale[:, :1], np.zeros(columns, int)
        tensors = {"weight": (codes - 128).astype(np.int8), "weight_scale": scale}
        zeros = np.full((rows, 1), 128)
    elif kind == "int4":
        zeros[:] = 8
        tensors = {"weight_packed": pack(codes, 4, 1), "weight_scale": scale, "weight_shape": np.array([rows, columns])}
    elif kind == "int4-zeros":
        tensors = {"weight_packed": pack(codes, 4, 1), "weight_scale": scale, "weight_zero_point": pack(zeros, 4, 0)}
    elif kind.startswith("gptq"):
        order = rng.permutation(order)
        words = pack(zeros.T, bits, 1).view(np.uint32)
        # Whole words are decremented in format 1, so a zero point of 0 borrows from the next one.
        ones = 0 if kind == "gptq4-v2" else 0xFFFFFFFF // (2**bits - 1)
        tensors = {
            "qweight": pack(codes.T, bits, 0),
            "qzeros": (words - np.uint32(ones)).view(np.int32),
            "scales": np.ascontiguousarray(scale.T),
        }
        tensors["g_idx"] = order.astype(np.int32)
    else:
        tensors = {
            "qweight": pack(place(codes), 4, 1),
            "qzeros": pack(place(zeros), 4, 1),
            "scales": np.ascontiguousarray(scale.T),
        }
    values = (codes - zeros[:, order]).astype(np.float16) * scale[:, order]
    return tensors, values.astype(np.float16)


def compressed(form, **weights):
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}


FORMATS = {
    "fp8-tensor": compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "fp8-channel": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "fp8-block": {"quant_method": "fp8", "weight_block_size": [24, 24]},
    "int8": compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
    "int4": compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=True),
    "int4-zeros": compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False
    ),
    "gptq4": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
    "gptq4-v2": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": True,
        "checkpoint_format": "gptq_v2",
    },
    "gptq8": {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
}
KINDS = {"uint8": "F8_E4M3", "int8": "I8", "int32": "I32", "int64": "I64"}
KINDS |= {"float16": "F16", "float32": "F32", "uint16": "BF16"}
header, body = {}, b""
for kind in FORMATS:
    for name, shape in MATRICES.items():
        tensors, values = matrix(kind, *shape)
        for part, data in (tensors | {"expected": values}).items():
            end = len(body) + data.nbytes
            key = f"{kind}/model.layers.0.{name}.{part}"
            header[key] = {"dtype": KINDS[data.dtype.name], "shape": data.shape, "data_offsets": [len(body), end]}
            body += data.tobytes()
# Variants of published files, whose codes and zero points are those above.


def bf16(values):
    """Bits of the nearest BF16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def wide(bits):
    """Values of BF16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def variant(kind, rows, columns):
    """Tensors of a module, and its values in half precision."""
    if kind.endswith(("e8m0", "mx")):
        codes = rng.integers(0, 127, (rows, columns), dtype=np.uint8)
        height, width = (24, 24) if kind.endswith("e8m0") else (1, 32)
        power = rng.integers(127 - 12, 127 - 6, (-(-rows // height), -(-columns // width)), dtype=np.uint8)
        scale = (2.0 ** (power.astype(int) - 127)).repeat(height, 0)[:rows].repeat(width, 1)[:, :columns]
        name = "weight_scale_inv" if kind.endswith("e8m0") else "weight_scale"
        return {"weight": codes, name: power}, (fp8(codes) * scale).astype(np.float16)
    if kind == "fp8-block-bf16":
        codes = rng.integers(0, 127, (rows, columns), dtype=np.uint8)
        scale = bf16(rng.uniform(0.5, 1.5, (-(-rows // 128), -(-columns // 128))) / 64)
        values = wide(bf16(fp8(codes) * wide(scale)))
        return {"weight": codes, "weight_scale": scale}, values.astype(np.float16)
    bits = 8 if "8" in kind else 4
    group = columns if kind.endswith("-whole") else GROUP
    codes, zeros = rng.integers(0, 2**bits, (rows, columns)), rng.integers(0, 2**bits, (rows, columns // group))
    order = np.arange(columns) // group
    if kind.startswith(("gptq", "awq")):
        scale = scales(rows, columns // group)
        tensors = {"scales": np.ascontiguousarray(scale.T)}
        if kind.startswith("gptq"):
            # Zero points of symmetric files are all the middle.
            zeros[:] = 2 ** (bits - 1)
            tensors |= {"qweight": pack(codes.T, bits, 0), "qzeros": pack((zeros - 1).T, bits, 1)}
        else:
            tensors |= {"qweight": pack(place(codes), 4, 1), "qzeros": pack(place(zeros), 4, 1)}
        values = (codes - zeros[:, order]).astype(np.float16) * scale[:, order]
        return tensors, values
    scale = bf16(rng.uniform(0.5, 1.5, (rows, columns // group)) / 64)
    middle = 2 ** (bits - 1)
    if kind == "int8-zeros-whole":
        tensors = {"weight": (codes - middle).astype(np.int8), "weight_zero_point": (zeros - middle).astype(np.int8)}
    elif kind == "int4-byte-zeros":
        tensors = {"weight_packed": pack(codes, bits, 1), "weight_zero_point": (zeros - middle).astype(np.int8)}
    else:
        zeros[:] = middle
        tensors = {"weight_packed": pack(codes, bits, 1)}
        if kind == "int4-order":
            order = rng.permutation(order)
        if "order" in kind:
            stored = order if kind == "int4-order" else np.full(columns, -1)
            tensors["weight_g_idx"] = stored.astype(np.int32)
    values = wide(bf16((codes - zeros[:, order]) * wide(scale[:, order])))
    return tensors | {"weight_scale": scale}, values.astype(np.float16)


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
VARIANTS = {
    "fp8-block-bf16": compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]
    ),
    "int4-order": compressed("pack-quantized", **INT4, actorder="group"),
    "int4-no-order": compressed("pack-quantized", **INT4, actorder=None),
    "int4-byte-zeros": compressed("pack-quantized", **INT4 | {"symmetric": False}),
    "int8-words-whole": compressed("pack-quantized", num_bits=8, type="int", strategy="channel", group_size=-1),
    "int8-zeros-whole": compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
    "gptq4-whole": {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False, "sym": True},
    "gptq8-plain": {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": False, "sym": True},
    "awq-whole": {"quant_method": "awq", "bits": 4, "group_size": -1, "version": "gemm", "zero_point": True},
    "fp8-e8m0": {"quant_method": "fp8", "weight_block_size": [24, 24], "scale_fmt": "ue8m0"},
    "fp8-mx": compressed("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32),
}
for kind in VARIANTS:
    # Three matrices of different shapes suffice.
    for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"):
        tensors, values = variant(kind, *MATRICES[name])
        for part, data in (tensors | {"expected": values}).items():
            end = len(body) + data.nbytes
            key = f"{kind}/model.layers.0.{name}.{part}"
            dtype = {"weight_scale_inv": "F8_E8M0", "weight_scale": "U8"}.get(part) if data.dtype == np.uint8 else None
            dtype = dtype or KINDS[data.dtype.name]
            header[key] = {"dtype": dtype, "shape": data.shape, "data_offsets": [len(body), end]}
            body += data.tobytes()
FORMATS |= VARIANTS
text = json.dumps(header).encode()
Path(__file__).with_name("quantised.json").write_text(json.dumps(FORMATS, indent=1) + "\n")
Path(__file__).with_name("quantised.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
