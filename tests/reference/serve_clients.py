"""Checks `trainer serve` with the real clients: the openai package, and lm-evaluation-harness's `local-completions`.

    pip install openai==3.57.0 "lm_eval[api]==0.4.13" transformers==5.23.0
    python serve_clients.py DATA MODEL TRAINER EVALUATOR FOLDER [--tasks arc_easy,openbookqa] [--limit 100] [--keep FILE]

DATA is as for harness_tasks.py; FOLDER gets the output. The script starts a server with the model in f32 on a free port.

The openai package must get the same texts whole and streamed, log-probabilities, and typed errors. Then `local-completions` and
`evaluator run` evaluate the same documents: every log-probability must agree to 1e-3, and every text and metric must be equal.
The table has a row for each task. `--keep` writes it and the texts as JSON; `serve_clients.json` was made this way.
"""

import argparse
import json
import shutil
import subprocess
from pathlib import Path

import openai

import harness_tasks

NAME = "model"
KEY = "secret"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("data", "model", "trainer", "evaluator", "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--tasks", default="arc_easy,openbookqa,piqa,lambada_openai,gsm8k")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--max-gen-toks", type=int, default=64)
    parser.add_argument("--keep", type=Path)
    asked = parser.parse_args()
    # The options of harness_tasks.py that this script does not have.
    vars(asked).update(num_fewshot=None, chat=False, multiturn=False, system=None)
    shutil.rmtree(asked.folder, ignore_errors=True)
    server, url = start(asked)
    try:
        kept = {"openai": openai_package(url), "tasks": {}}
        tasks(asked, url, kept["tasks"])
    finally:
        server.terminate()
    assert server.wait() == 0, "the server ends with 0 after SIGTERM"
    if asked.keep:
        asked.keep.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def start(asked) -> tuple[subprocess.Popen, str]:
    """Starts the server and returns it with its URL."""
    command = [asked.trainer, "serve", asked.model, "--port", "0", "--device", "cpu", "--dtype", "f32", "--api-key", KEY,
               "--served-model-name", NAME]
    server = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        if " at http://" in line:
            return server, line.split(" at ")[1].strip()
    raise SystemExit("the server has not started")


def openai_package(url: str) -> dict:
    client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    texts = {"chat": chat(client), "completion": completions(client)}
    errors(client, url)
    return texts


def chat(client) -> str:
    settings = {"model": NAME, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 24}
    whole = client.chat.completions.create(**settings, logprobs=True, top_logprobs=2)
    (choice,) = whole.choices
    assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length")
    assert len(choice.logprobs.content) == whole.usage.completion_tokens
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in choice.logprobs.content)
    text, usage = "", None
    for chunk in client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert (text, usage) == (choice.message.content, whole.usage)
    sampled = {**settings, "temperature": 0.8, "top_p": 0.9, "seed": 5, "n": 3, "extra_body": {"top_k": 40, "min_p": 0.02}}
    first, again = (client.chat.completions.create(**sampled) for _ in range(2))
    assert [c.message.content for c in first.choices] == [c.message.content for c in again.choices]
    assert len({c.message.content for c in first.choices}) > 1
    stopped = client.chat.completions.create(**settings, stop=["France"])
    assert stopped.choices[0].message.content == text.split("France")[0]
    # A client that closes the stream cancels the generation.
    with client.chat.completions.create(**settings | {"max_completion_tokens": 4000}, stream=True) as stream:
        next(iter(stream))
    return text


def completions(client) -> str:
    settings = {"model": NAME, "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(prompt="Once upon a time", **settings)
    streamed = client.completions.create(prompt="Once upon a time", stream=True, **settings)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text
    scored = client.completions.create(prompt=["One plus one is two.", "The sky"], model=NAME, max_tokens=0, echo=True, logprobs=1)
    for choice, prompt in zip(scored.choices, ["One plus one is two.", "The sky"], strict=True):
        logprobs = choice.logprobs
        assert choice.text == prompt == "".join(logprobs.tokens)
        assert logprobs.token_logprobs[0] is None and all(x < 0 for x in logprobs.token_logprobs[1:])
        assert [prompt[at:].startswith(token) for at, token in zip(logprobs.text_offset, logprobs.tokens)]
    return whole.choices[0].text


def errors(client, url: str) -> None:
    refused(openai.BadRequestError, "temperature", lambda: client.completions.create(model=NAME, prompt="a", temperature=-1))
    refused(openai.BadRequestError, "context", lambda: client.completions.create(model=NAME, prompt="a " * 9000))
    refused(openai.NotFoundError, "gpt-4o", lambda: client.completions.create(model="gpt-4o", prompt="a"))
    refused(openai.AuthenticationError, "API key", openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list)


def refused(kind: type, word: str, call) -> None:
    try:
        call()
    except kind as error:
        assert word in str(error) or word in str(error.code), error
        return
    raise AssertionError(f"{kind} was expected")


def tasks(asked, url: str, kept: dict) -> None:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    lm = LocalCompletionsAPI(base_url=f"{url}/completions", model=NAME, tokenizer=str(asked.model), header=None,
                             tokenizer_backend="huggingface", num_concurrent=4, max_length=8192, batch_size=8)
    lm.header = {"Authorization": f"Bearer {KEY}"}
    print("| task | documents | largest difference | other texts | other metrics | local-completions s | evaluator run s |")
    print("|---|---|---|---|---|---|---|")
    is_good = True
    for task in asked.tasks.split(","):
        theirs, their_seconds = harness_tasks.harness(asked, lm, task)
        ours, our_seconds = harness_tasks.evaluator(asked, task)
        worst, texts, metrics = harness_tasks.compare(theirs, ours)
        is_good &= worst <= 1e-3 and not texts and not metrics
        row = [task, str(len(ours["answers"])), f"{worst:.1e}", str(texts), ", ".join(metrics) or "none",
               f"{their_seconds:.1f}", f"{our_seconds:.1f}"]
        print("| " + " | ".join(row) + " |", flush=True)
        kept[task] = {"documents": len(ours["answers"]), "largest_difference": float(f"{worst:.1e}"), "other_texts": texts,
                      "other_metrics": metrics, "local-completions": theirs["metrics"], "evaluator": metrics_of(ours, theirs)}
    assert is_good, "local-completions and evaluator run differ"


def metrics_of(ours: dict, theirs: dict) -> dict:
    return {name: harness_tasks.value_of(ours, name) for name in theirs["metrics"]}


if __name__ == "__main__":
    main()
