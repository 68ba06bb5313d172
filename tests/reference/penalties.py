"""Computes next-token probabilities with logit bias and penalties, for random logits.

    python penalties.py candle-ext/inference/tests/fixtures/penalties.json

The order is that of vLLM's `Sampler.forward`: logit bias, then `apply_penalties` (repetition, frequency, presence), then
temperature. Repetition is transformers' `RepetitionPenaltyLogitsProcessor`, over prompt and answer. Frequency and presence are
over the answer, as OpenAI's API reference defines them. Needs numpy.
"""

import json
import sys

import numpy as np

NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
           "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": []}
CASES = [
    {"presence_penalty": 0.7},
    {"presence_penalty": -1.5},
    {"frequency_penalty": 0.4},
    {"frequency_penalty": -2.0},
    {"presence_penalty": 2.0, "frequency_penalty": 1.1},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"logit_bias": [[3, 5.0], [7, -100.0]]},
    {"logit_bias": [[3, -4.0], [20, 2.5]], "repetition_penalty": 1.4, "frequency_penalty": 0.6, "temperature": 0.7},
]


def probabilities(case: dict, logits: np.ndarray, prompt: list[int], generated: list[int]) -> np.ndarray:
    logits = logits.astype(np.float64)
    for token, bias in case["logit_bias"]:
        logits[token] += bias
    occurred = sorted(set(prompt) | set(generated))
    penalty = case["repetition_penalty"]
    logits[occurred] = np.where(logits[occurred] < 0, logits[occurred] * penalty, logits[occurred] / penalty)
    counts = np.bincount(generated, minlength=len(logits))
    logits -= case["frequency_penalty"] * counts
    logits -= case["presence_penalty"] * (counts > 0)
    exponents = np.exp((logits - logits.max()) / case["temperature"])
    return exponents / exponents.sum()


def main(path: str) -> None:
    generator = np.random.default_rng(5)
    cases = []
    for settings in CASES:
        case = NEUTRAL | settings
        logits = (generator.standard_normal(24) * 2.0).round(3)
        prompt = generator.integers(0, 24, 5).tolist()
        # Some tokens occur several times, some in the prompt, too.
        generated = generator.integers(0, 6, 8).tolist() + prompt[:2]
        cases.append({**case, "logits": logits.tolist(), "seen": prompt, "generated": generated,
                      "probabilities": [float(f"{x:.7g}") for x in probabilities(case, logits, prompt, generated)]})
    with open(path, "w") as file:
        file.write("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
