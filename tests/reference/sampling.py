"""Computes the sampling probabilities of transformers' logits processors for random logits.

    python sampling.py candle-ext/inference/tests/fixtures/sampling.json

Each case has logits, sampling parameters, tokens that have occurred (`seen`), and the probabilities of the next token. The
processors are those that `generate` makes from a generation config with `do_sample`.
"""

import json
import sys

import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (LogitsProcessorList, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor,
                                                    TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)

NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
CASES = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 5},
    {"top_p": 0.8},
    {"temperature": 0.7, "top_p": 0.3},
    {"min_p": 0.2},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.85, "min_p": 0.15},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 7, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.2},
]


def main(path: str) -> None:
    generator = torch.Generator().manual_seed(5)
    cases = []
    for case in CASES:
        settings = NEUTRAL | case
        logits = (torch.randn(24, generator=generator) * 2.0).round(decimals=3)
        # Equal logits at the border of top_k are all kept.
        logits[3] = logits.sort(descending=True).values[4]
        seen = sorted(torch.randperm(24, generator=generator)[:6].tolist())
        probabilities = processors(settings)(torch.tensor([seen]), logits[None]).softmax(-1)[0]
        cases.append({**settings, "logits": [round(x, 3) for x in logits.tolist()], "seen": seen,
                      "probabilities": [float(f"{x:.7g}") for x in probabilities.tolist()]})
    with open(path, "w") as file:
        file.write("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


def processors(settings: dict) -> LogitsProcessorList:
    """Returns the processors in the order of `GenerationMixin._get_logits_processor`."""
    config = GenerationConfig(do_sample=True, **settings)
    found = LogitsProcessorList()
    if config.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    if config.temperature != 1.0:
        found.append(TemperatureLogitsWarper(config.temperature))
    if config.top_k:
        found.append(TopKLogitsWarper(config.top_k))
    if config.top_p < 1.0:
        found.append(TopPLogitsWarper(config.top_p))
    if config.min_p:
        found.append(MinPLogitsWarper(config.min_p))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
