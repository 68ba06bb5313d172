"""Sends equal requests to lm-evaluation-harness and `evaluator answer`, and compares each response.

    pip install lm-eval==0.4.13 accelerate torch==2.11.0 transformers==5.17.0
    python harness_answers.py requests DATA requests.jsonl [--n N]
    evaluator answer requests.jsonl --model MODEL --device cpu --dtype f32 -o ours.jsonl
    python harness_answers.py compare MODEL requests.jsonl ours.jsonl

DATA is a folder with arc_easy_test.jsonl, openbookqa_test.jsonl, piqa_validation.jsonl, lambada_test.jsonl,
wikitext2_test.jsonl and gsm8k/test.jsonl. `requests` creates requests of each kind from them. `compare` prints the largest
differences. It fails if a log-probability has a relative difference above 1e-3, or if two generated texts differ at a token
where the harness's two likeliest tokens are further apart than rounding.
"""

import argparse
import json
import sys
import time
from pathlib import Path


def rows(path, n):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line, _ in zip(file, range(n))]


def loglikelihood(context, continuation):
    return {"type": "loglikelihood", "context": context, "continuation": continuation}


def shots(data, n):
    pairs = [(row["question"], row["choices"]["text"][row["choices"]["label"].index(row["answerKey"])])
             for row in rows(data / "arc_easy_test.jsonl", n)]
    return "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in pairs)


def make(data, n):
    prefix = shots(data, 5)
    for row in rows(data / "arc_easy_test.jsonl", 5 + n)[5:]:
        context = f"{prefix}Question: {row['question']}\nAnswer:"
        yield from (loglikelihood(context, f" {choice}") for choice in row["choices"]["text"])
    for row in rows(data / "openbookqa_test.jsonl", n):
        choices = dict(zip(row["choices"]["label"], row["choices"]["text"]))
        listed = "".join(f"\n{label}. {text}" for label, text in choices.items())
        yield from (loglikelihood(f"{row['question_stem']}{listed}\nAnswer:", f" {label}") for label in choices)
    for row in rows(data / "piqa_validation.jsonl", n):
        yield from (loglikelihood(f"Question: {row['goal']}\nAnswer:", f" {row[key]}") for key in ("sol1", "sol2"))
    for row in rows(data / "lambada_test.jsonl", n):
        context, _, last = row["text"].rpartition(" ")
        yield loglikelihood(context, f" {last}")
        yield loglikelihood("", row["text"][:200])
    for row in rows(data / "wikitext2_test.jsonl", 2 + n // 20)[1:]:
        yield {"type": "loglikelihood_rolling", "text": row["page"][:6000]}
    questions = rows(data / "gsm8k/test.jsonl", 3 + n // 4)
    prefix = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in questions[:3])
    for row in questions[3:]:
        yield {"type": "generate_until", "context": f"{prefix}Question: {row['question']}\nAnswer:",
               "until": ["Question:", "\n\n"], "max_gen_toks": 64}


def harness_model(model, batch_size, max_length):
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=model, device="cpu", dtype="float32", batch_size=batch_size, max_length=max_length)


def instance(request):
    from lm_eval.api.instance import Instance

    kind = request["type"]
    if kind == "loglikelihood":
        arguments = (request["context"], request["continuation"])
    elif kind == "loglikelihood_rolling":
        arguments = (request["text"],)
    else:
        gen = {key: value for key, value in request.items() if key not in ("type", "context")}
        arguments = (request["context"], {"do_sample": False, **gen})
    return Instance(kind, {}, arguments, 0, ("", 0, 1))


def ask(lm, requests):
    answers = [None] * len(requests)
    for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        places = [i for i, request in enumerate(requests) if request["type"] == kind]
        if places:
            began = time.monotonic()
            found = getattr(lm, kind)([instance(requests[i]) for i in places], disable_tqdm=True)
            print(f"harness: {len(places)} {kind} in {time.monotonic() - began:.1f} s", file=sys.stderr)
            for place, answer in zip(places, found):
                answers[place] = answer
    return answers


def margin(lm, request, text):
    """Returns the log-probability margin of the top token where two generated texts diverge; 0 is a tie."""
    import torch

    ids = lm.tok_encode(request["context"])[-(lm.max_length - request["max_gen_toks"]):]
    ids += lm.tokenizer.encode(text, add_special_tokens=False)
    with torch.no_grad():
        top = lm.model(torch.tensor([ids])).logits[0, -1].topk(2).values
    return float(top[0] - top[1])


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def compare(args):
    requests, ours = ([json.loads(line) for line in open(path, encoding="utf-8")] for path in (args.requests, args.ours))
    lm = harness_model(args.model, args.batch_size, args.max_length)
    theirs = ask(lm, requests)
    worst, failed = {}, 0
    for request, our, their in zip(requests, ours, theirs, strict=True):
        kind = request["type"]
        if kind == "generate_until":
            if our["text"] != their:
                apart = margin(lm, request, their[: common(our["text"], their)])
                worst["texts that differ"] = worst.get("texts that differ", 0) + 1
                failed += apart > 1e-3
                print(f"apart by {apart:.1e}: {our['text']!r} {their!r}")
            continue
        our_sum, their_sum = (our["logprob"], their[0]) if kind == "loglikelihood" else (our["loglikelihood"], their)
        off = abs(our_sum - their_sum) / max(1.0, abs(their_sum))
        worst[kind] = max(worst.get(kind, 0.0), off)
        failed += off > 1e-3
        if kind == "loglikelihood" and our["is_greedy"] != their[1]:
            failed += 1
            print(f"greedy? {our['is_greedy']} {their[1]}: {request}")
    print(json.dumps({"requests": len(requests), "largest differences": worst, "failed": failed}))
    sys.exit(failed > 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("requests")
    command.add_argument("data", type=Path)
    command.add_argument("out", type=Path)
    command.add_argument("--n", type=int, default=40)
    command.set_defaults(run=lambda args: args.out.write_text(
        "".join(json.dumps(request) + "\n" for request in make(args.data, args.n)), encoding="utf-8"))
    command = commands.add_parser("compare")
    command.add_argument("model")
    command.add_argument("requests")
    command.add_argument("ours")
    command.add_argument("--batch-size", type=int, default=8)
    command.add_argument("--max-length", type=int)
    command.set_defaults(run=compare)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
