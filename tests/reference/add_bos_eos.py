"""Records the tokens of texts when tokenizer_config.json has `add_bos_token` and `add_eos_token`.

    python tests/reference/add_bos_eos.py [FOLDER ...]

Writes candle-ext/text/tests/fixtures/chat/add_bos_eos.json: for each tokenizer in that folder and each pair of values, the ids
of a text by `AutoTokenizer.from_pretrained(folder)`, and with `add_bos_token` as an argument, as lm-evaluation-harness passes
its model argument. Prints the tokens of the other FOLDERs.
"""

import itertools
import json
import shutil
import sys
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

FIXTURES = Path(__file__).resolve().parents[2] / "candle-ext/text/tests/fixtures/chat"
FAMILIES = ["llama3", "llama3_2", "qwen2_5", "qwen3", "smollm2"]
TEXT = "Yes."
VALUES = [None, False, True]


def cases(source):
    for add_bos, add_eos in itertools.product(VALUES, VALUES):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(source / "tokenizer.json", folder)
            config = json.loads((source / "tokenizer_config.json").read_text())
            keys = {"add_bos_token": add_bos, "add_eos_token": add_eos}
            config = {key: value for key, value in config.items() if key not in keys}
            config.update({key: value for key, value in keys.items() if value is not None})
            (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
            given = {None: {}, False: {"add_bos_token": False}, True: {"add_bos_token": True}}
            ids = [AutoTokenizer.from_pretrained(folder, **given[value])(TEXT)["input_ids"] for value in VALUES]
        yield {**keys, "ids": ids[0], "ids_if_given_false": ids[1], "ids_if_given_true": ids[2]}


def main():
    for folder in map(Path, sys.argv[1:]):
        print(folder.name, *map(json.dumps, cases(folder)), sep="\n")
    lines = [json.dumps({"tokenizer": family, **case}) for family in FAMILIES for case in cases(FIXTURES / family)]
    (FIXTURES / "add_bos_eos.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
