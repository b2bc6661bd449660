"""What torchao and compressed-tensors make of a tensor: `python others.py GIVEN ANSWER`, with their folder on the path.

GIVEN holds `x` [rows, K], its NVFP4 scale `global`, and `values` [rows, K], each a value of E2M1. ANSWER holds bytes.
"""

import sys

import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

given = torch.load(sys.argv[1])
x = given["x"]
answer = {"global": per_tensor_amax_to_scale(x.abs().max()), "packed": pack_fp4_to_uint8(given["values"])}
scales, codes = nvfp4_quantize(x, 16, given["global"])
answer |= {"nvfp4 scales": scales.view(torch.uint8).view(len(x), -1), "nvfp4 codes": codes.view(torch.uint8)}
for name, dtype in (("mxfp4", torch.float4_e2m1fn_x2), ("mxfp8", torch.float8_e4m3fn)):
    for rule in ("rceil", "floor"):
        scales, codes = to_mx(x, dtype, 32, ScaleCalculationMode[rule.upper()])
        answer |= {f"{name} {rule} scales": scales.view(torch.uint8), f"{name} {rule} codes": codes.view(torch.uint8)}
torch.save(answer, sys.argv[2])
