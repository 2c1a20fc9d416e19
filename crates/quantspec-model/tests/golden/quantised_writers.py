"""Matrices as the libraries of the formats pack them, and their values.

Made with GPTQModel 7.7.0, AutoGPTQ 0.7.1, AutoAWQ 0.2.9, compressed-tensors 0.20.0, AutoRound 0.16.1 and torch 1.13:

    pip download --no-deps -d DIR gptqmodel==7.7.0 auto-gptq==0.7.1 autoawq==0.2.9
    pip download --no-deps -d DIR compressed-tensors==0.20.0 auto-round==0.16.1
    python quantised_writers.py DIR      # needs torch and numpy; writes .json and .safetensors next to this file

Of the libraries only the functions that pack are executed, as none can be imported without a GPU's packages. A packer gets a
matrix that lies on its grid: random codes and zero points times scales. So the values are known without the library.
"""

import ast
import json
import math
import struct
import sys
import tarfile
import zipfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch

ROWS, COLUMNS, GROUP = 32, 32, 16
rng = np.random.default_rng(37)


def source(package, file):
    """Text of a file in a downloaded package."""
    (archive,) = Path(sys.argv[1]).glob(f"{package}-*")
    if archive.suffix == ".whl":
        return zipfile.ZipFile(archive).read(file).decode()
    with tarfile.open(archive) as tar:
        (member,) = [member for member in tar if member.name.endswith(f"/{file}")]
        return tar.extractfile(member).read().decode()


def function(package, file, name, **space):
    """A function of a library, executed with these global names; its decorators are dropped."""
    (node,) = [node for node in ast.walk(ast.parse(source(package, file))) if getattr(node, "name", None) == name]
    node.decorator_list = []
    space |= {"torch": torch, "t": torch, "np": np, "nn": torch.nn, "math": math, "Literal": Literal}
    exec(compile(ast.Module([node], []), file, "exec"), space)
    return space[name]


class Layer(torch.nn.Module):
    """Stands in for a library's quantised layer."""

    def __init__(self, **fields):
        super().__init__()
        self.__dict__ |= fields


HUGGING_FACE = SimpleNamespace(pytorch_utils=SimpleNamespace(Conv1D=()))
CONVOLUTION = torch.nn.modules.conv._ConvNd
FILE = "gptqmodel/nn_modules/qlinear/__init__.py"
LIMITS = SimpleNamespace(threadpool_limits=lambda _: nullcontext())
pack_gptqmodel = function(
    "gptqmodel", FILE, "pack_original", transformers=HUGGING_FACE, _ConvNd=CONVOLUTION, THREADPOOLCTL=LIMITS
)
NAMES = {"BaseQuantLinear": Layer, "QuantizeConfig": None, "log": SimpleNamespace(info=SimpleNamespace(once=str))}
to_v1 = function("gptqmodel", "gptqmodel/utils/model.py", "convert_gptq_v2_to_v1_format_module", **NAMES)
pack_autogptq = function("auto_gptq", "auto_gptq/nn_modules/qlinear/qlinear_cuda.py", "pack", transformers=HUGGING_FACE)
pack_autoawq = function("autoawq", "awq/modules/linear/gemm.py", "from_linear", get_best_device=lambda: "cpu")
pack_words = function("compressed_tensors", "compressed_tensors/compressors/pack_quantized/helpers.py", "pack_to_int32")
pack_scales = function("compressed_tensors", "compressed_tensors/compressors/mx_utils.py", "compress_mx_scale")
CPU = {"get_packing_device": lambda _: "cpu", "transformers": HUGGING_FACE}
of_autoround = "auto_round_extension/torch/qlinear_torch"
pack_autoround = function("auto_round", f"{of_autoround}.py", "pack_248_bits", **CPU)
pack_autoround_v1 = function("auto_round", f"{of_autoround}_zp.py", "pack_248_bits", **CPU)
pack_autoround_awq = function("auto_round", "auto_round/export/export_to_awq/utils.py", "from_linear", **CPU)


def width(kind):
    return 8 if "8" in kind else 4


def gptq(kind, linear, scale, zero, order):
    bits = width(kind)
    fields = {"pack_dtype": torch.int32, "pack_dtype_bits": 32, "pack_factor": 32 // bits, "planar": False}
    fields |= {"pack_np_math_dtype": np.uint32, "pack_np_dtype": np.int32, "maxq": 2**bits - 1}
    layer = Layer(bits=bits, infeatures=COLUMNS, qzero_format=lambda format: format, **fields)
    if kind.startswith("autogptq"):
        pack_autogptq(layer, linear, scale, zero, order)
    else:
        pack_gptqmodel(layer, linear, scale, zero, order)
        if "v2" not in kind:
            to_v1(layer, layer)
    tensors = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales.half()}
    return tensors | {"g_idx": order.to(torch.int32)}


def awq(linear, scale, zero):
    layer = pack_autoawq(
        lambda bits, *_: Layer(w_bit=bits, in_features=COLUMNS), linear, 4, GROUP, False, scale.T, zero.T
    )
    return {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}


def autoround(kind, linear, scale, zero):
    if kind.endswith("awq"):
        layer = Layer(w_bit=4, in_features=COLUMNS, use_generic_bit_packing=False)
        layer = pack_autoround_awq(lambda *_: layer, linear, 4, GROUP, False, scale.T, zero.T)
    else:
        layer = Layer(bits=width(kind), maxq=2 ** width(kind) - 1, group_size=GROUP, device="cpu")
        (pack_autoround_v1 if kind.endswith("v1") else pack_autoround)(layer, linear, scale, zero)
    return {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}


def mx():
    """Random e4m3 codes with scales that are powers of two, and their values."""
    codes = rng.integers(0, 127, (ROWS, COLUMNS), dtype=np.uint8)
    exponent, mantissa = (codes >> 3).astype(float), (codes & 7).astype(float)
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    scale = torch.from_numpy(2.0 ** rng.integers(-12, -6, (ROWS, COLUMNS // 32)))
    values = torch.from_numpy(values) * scale.repeat_interleave(32, 1)
    return {"weight": torch.from_numpy(codes), "weight_scale": pack_scales(scale, torch.uint8)}, values.half()


def words(bits, codes, scale, zero):
    middle = 2 ** (bits - 1)
    tensors = {"weight_packed": pack_words((codes - middle).to(torch.int8), bits), "weight_scale": scale.half()}
    tensors["weight_zero_point"] = pack_words((zero - middle).to(torch.int8), bits, 0).contiguous()
    return tensors | {"weight_shape": torch.tensor(codes.shape)}


def matrix(kind):
    """Tensors of a module, and its values in half precision."""
    if kind.endswith("mx"):
        return mx()
    bits = width(kind)
    codes = torch.from_numpy(rng.integers(0, 2**bits, (ROWS, COLUMNS)))
    # AutoGPTQ's packer spoils the neighbours of a zero point of 0, AutoRound's writes 1 for it.
    first = 1 if kind.startswith("autogptq") or kind == "autoround4-v1" else 0
    zero = torch.from_numpy(rng.integers(first, 2**bits, (ROWS, COLUMNS // GROUP)))
    zero[::5] = first
    scale = torch.from_numpy(rng.uniform(0.5, 1.5, zero.shape) / 64).half().float()
    order = torch.arange(COLUMNS) // GROUP
    if kind.endswith("-order"):
        order = order[torch.from_numpy(rng.permutation(COLUMNS))]
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False).requires_grad_(False)
    linear.weight.data = (codes - zero[:, order]) * scale[:, order]
    values = linear.weight.half()
    if kind.startswith("compressed-tensors"):
        return words(bits, codes, scale, zero), values
    if kind.startswith("autoround"):
        return autoround(kind, linear, scale, zero.float()), values
    if kind.startswith("autoawq"):
        return awq(linear, scale, zero.float()), values
    return gptq(kind, linear, scale, zero.float(), order), values


def packed(bits):
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}
    groups = {"group_0": {"weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def by_gptqmodel(bits, form):
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": False, "format": form}


def by_autoround(bits, packing):
    return {"quant_method": "auto-round", "bits": bits, "group_size": GROUP, "sym": False, "packing_format": packing}


MX = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
FORMATS = {
    "gptqmodel4": by_gptqmodel(4, "gptq") | {"checkpoint_format": "gptq"},
    "gptqmodel8-order": by_gptqmodel(8, "gptq"),
    "gptqmodel4-v2-order": by_gptqmodel(4, "gptq_v2"),
    "autogptq4-order": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "is_marlin_format": False},
    "autoawq4": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": False, "version": "gemm"},
    "compressed-tensors4": packed(4),
    "compressed-tensors8": packed(8),
    "autoround4-v1": by_autoround(4, "auto_round:auto_gptq"),
    "autoround4": by_autoround(4, "auto_round"),
    "autoround8": by_autoround(8, "auto_round:gptqmodel"),
    "autoround4-awq": by_autoround(4, "auto_round:auto_awq"),
    "compressed-tensors-mx": packed(8) | {"format": "mxfp8-quantized", "config_groups": {"group_0": {"weights": MX}}},
}
KINDS = {"int32": "I32", "int64": "I64", "float16": "F16"}
BYTES = {"weight": "F8_E4M3", "weight_scale": "U8"}
header, body = {}, b""
for kind in FORMATS:
    tensors, values = matrix(kind)
    for part, data in (tensors | {"expected": values}).items():
        array = data.contiguous().numpy()
        end = len(body) + array.nbytes
        name = f"{kind}/model.layers.0.self_attn.q_proj.{part}"
        dtype = BYTES[part] if array.dtype == np.uint8 else KINDS[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(body), end]}
        body += array.tobytes()
text = json.dumps(header).encode()
here = Path(__file__)
here.with_suffix(".json").write_text(json.dumps(FORMATS, indent=1) + "\n")
here.with_suffix(".safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
