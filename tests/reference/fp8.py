"""FP8 quantization in torch, for candle-ext/ops/tests/it/fp8/quantization.rs.

    pip install torch==2.15.0 numpy
    python tests/reference/fp8.py

The rules are those of TransformerEngine's references (tests/pytorch/references), written with torch's own conversion to
float8: a number is multiplied by the scale in f32, clamped and converted. `encodings` has, for each code of a positive
number, the bits of the first bf16 that gets it. `quantized` has hashes of codes and inverse scales, whose inputs
`numbers` both sides compute. `delayed` has the scales of a sequence of amaxes.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch

OUT = Path(__file__).resolve().parents[2] / "candle-ext" / "ops" / "tests" / "fixtures" / "fp8.json"
FORMATS = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def encode(x, format):
    dtype, most = FORMATS[format]
    return x.float().clamp(-most, most).to(dtype).view(torch.uint8)


def encodings(format):
    """The bits of the first bf16 of each code of a positive number; the negative ones mirror them."""
    bits = torch.arange(65536, dtype=torch.int32)
    x = bits.to(torch.uint16).view(torch.bfloat16)
    codes = encode(x, format).int()
    nan = x.isnan()
    assert ((codes[nan] & 0x7F) == 0x7F).all()
    positive = codes[:0x7F81]
    assert not nan[:0x7F81].any() and nan[0x7F81:0x8000].all()
    assert torch.equal(codes[0x8000 : 0x8000 + 0x7F81], positive | 0x80)
    assert (positive.diff() >= 0).all()
    first = [int((positive == code).nonzero()[0]) if (positive == code).any() else None for code in range(positive.max() + 1)]
    assert None not in first
    return first


def numbers(rows, columns, seed):
    """Numbers of many magnitudes; a block of zeros; computed alike in Rust."""
    i = np.arange(rows * columns, dtype=np.uint64)
    z = (i + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    mantissa = (z >> np.uint64(40)).astype(np.int64) - (1 << 23)
    exponent = (z & np.uint64(7)).astype(np.int64) - 27
    x = np.ldexp(mantissa.astype(np.float64), exponent).astype(np.float32).reshape(rows, columns)
    x[: min(rows, 128), : min(columns, 128)] = 0.0
    return torch.from_numpy(x)


def scale_of(amax, most, power_of_two, epsilon, largest):
    amax = torch.maximum(amax, torch.tensor(epsilon))
    scale = torch.tensor(most) / amax
    scale = torch.where(scale.isinf(), torch.tensor(largest), scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((amax == 0) | ~amax.isfinite(), torch.tensor(1.0), scale)


def quantized(x, format, block, power_of_two, epsilon, largest):
    """Codes, and the inverse scale of each block."""
    most = FORMATS[format][1]
    wide = x.float()
    rows, columns = wide.shape
    high, long = block if block else (rows, columns)
    padded = torch.nn.functional.pad(wide, (0, -columns % long, 0, -rows % high))
    down, across = padded.shape[0] // high, padded.shape[1] // long
    blocks = padded.reshape(down, high, across, long)
    amax = blocks.abs().amax(dim=(1, 3))
    scale = scale_of(amax, most, power_of_two, epsilon, largest if block else torch.finfo(torch.float32).max)
    codes = encode(blocks * scale[:, None, :, None], format).reshape(padded.shape)[:rows, :columns]
    return codes.contiguous(), (1.0 / scale).flatten()


def sha256(tensor):
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def quantized_cases():
    cases = []
    for (rows, columns), seed in [((7, 33), 1), ((130, 260), 2), ((256, 384), 3)]:
        for dtype in DTYPES:
            x = numbers(rows, columns, seed).to(DTYPES[dtype])
            for format in FORMATS:
                for block in [None, (1, 128), (128, 1), (128, 128)]:
                    for power_of_two in [False, True]:
                        for epsilon in [0.0, 0.25]:
                            largest = float(torch.finfo(DTYPES[dtype]).max)
                            codes, inverse = quantized(x, format, block, power_of_two, epsilon, largest)
                            cases.append(
                                dict(rows=rows, columns=columns, seed=seed, dtype=dtype, format=format, block=block, power_of_two=power_of_two, epsilon=epsilon)
                                | dict(codes=sha256(codes), scale_inv=sha256(inverse), first_scale_inv=inverse[:3].tolist())
                            )
    return cases


def delayed_cases():
    """TransformerEngine's update: the amax enters the history, and the scale follows.

    A step without a finite amax changes nothing. (TransformerEngine puts infinity into the history, where it stops updates
    until it leaves.)
    """
    amaxes = [3.0, 0.5, 20.0, 0.001, float("inf"), 1e-42, 7.0, 7.5, 1.0, 0.25]
    cases = []
    for format in FORMATS:
        for margin in [0, 2]:
            for length in [1, 3, 16]:
                for algorithm in ["max", "most_recent"]:
                    history, scale, scales = torch.zeros(length), torch.tensor(1.0), []
                    for amax in amaxes:
                        if amax == float("inf"):
                            scales.append(scale.item())
                            continue
                        history = torch.roll(history, 1)
                        history[0] = amax
                        chosen = history.max() if algorithm == "max" else history[0]
                        new = torch.tensor(FORMATS[format][1]) / chosen / (2**margin)
                        new = torch.where(chosen > 0, new, scale)
                        scale = torch.where(new.isinf(), torch.tensor(torch.finfo(torch.float32).max), new)
                        scales.append(scale.item())
                    cases.append(dict(format=format, margin=margin, length=length, algorithm=algorithm, scales=scales))
    return dict(amaxes=[str(amax) for amax in amaxes], cases=cases)


OUT.write_text(
    json.dumps(dict(encodings={format: encodings(format) for format in FORMATS}, quantized=quantized_cases(), delayed=delayed_cases()), separators=(",", ":"))
    + "\n"
)
