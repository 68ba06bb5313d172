"""Inputs of both sides: text, a tokenizer trained on it, and models with random weights. Made on demand, once per call.

The text is Zipf-distributed words of an artificial language with punctuation and line breaks, equal in each run. Every word
of a training row is one token of the tokenizer, so that a row of n words has n tokens on both sides.
"""

import itertools
import json
import random
import shutil
from functools import cache
from pathlib import Path

from cases import Case, config
from process import peer_command, run

N_WORDS = 40_000
MOST_TOKENS = 32_000
DOCUMENT_WORDS = 300


class Inputs:
    """A folder of inputs."""

    def __init__(self, folder: Path):
        self.folder = folder

    def tokenizer(self, case: Case) -> Path:
        """Trains a byte-level BPE tokenizer for the model, in a Hugging Face folder, without an EOS token."""
        return self.trained(min(case.shape["vocab_size"], MOST_TOKENS))

    @cache
    def trained(self, vocab_size: int) -> Path:
        from tokenizers import ByteLevelBPETokenizer

        folder = self.folder / f"tokenizer-{vocab_size}"
        folder.mkdir()
        trained = ByteLevelBPETokenizer()
        texts = itertools.islice(documents(1), 4000)
        trained.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=["<pad>"], show_progress=False)
        trained.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": None,
                    "pad_token": "<pad>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder

    def rows(self, case: Case, n_rows: int) -> Path:
        """Returns rows of text of exactly `length` tokens."""
        folder, length = self.tokenizer(case), case.length
        path = self.folder / f"rows-{folder.name}-{length}-{n_rows}.jsonl"
        if not path.exists():
            chosen = random.Random(length)
            texts = ("".join(chosen.choices(whole_words(folder), k=length)) for _ in range(n_rows))
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return path

    def ids(self, case: Case, n_rows: int) -> Path:
        """Returns the tokens of `rows`, one list per row."""
        tokenizer = load(self.tokenizer(case))
        rows = self.rows(case, n_rows)
        ids = [tokenizer.encode(json.loads(line)["text"]).ids for line in rows.read_text().splitlines()]
        assert all(len(row) == case.length for row in ids), "a word of a row is one token"
        path = rows.with_suffix(".ids.json")
        path.write_text(json.dumps(ids))
        return path

    def model(self, case: Case) -> Path:
        """Makes a Hugging Face folder with random f32 weights and the tokenizer."""
        folder = self.folder / f"model-{case.shape['hidden_size']}"
        if not folder.exists():
            run(peer_command("make", {"config": config(case), "folder": str(folder)}))
            for file in self.tokenizer(case).iterdir():
                shutil.copy(file, folder)
            (folder / "generation_config.json").unlink(missing_ok=True)
        return folder

    @cache
    def text(self, megabytes: int) -> Path:
        """Writes documents of about this number of MB, one row per document."""
        path = self.folder / f"text-{megabytes}.jsonl"
        n_bytes = 0
        with path.open("w") as file:
            for document in documents(2):
                print(json.dumps({"text": document}), file=file)
                n_bytes += len(document)
                if n_bytes >= megabytes * 10**6:
                    return path


@cache
def load(folder: Path):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@cache
def whole_words(folder: Path) -> list[str]:
    """Returns words that are one token, each with a leading space."""
    words = [" " + word for word in vocabulary()]
    return [word for word in words if len(load(folder).encode(word).ids) == 1]


@cache
def vocabulary() -> list[str]:
    """Returns words, the most frequent first; frequent words are shorter."""
    letters = random.Random(3)
    syllable = lambda: letters.choice("bdfgklmnprstvwz") + letters.choice("aeiou") + letters.choice(["", "", "n", "r", "s"])
    words = {}
    while len(words) < N_WORDS:
        n_syllables = 1 + sum(letters.random() < len(words) / N_WORDS + 0.3 for _ in range(4))
        words["".join(syllable() for _ in range(n_syllables))] = None
    return list(words)


def documents(seed: int):
    """Generates documents of a few paragraphs without end."""
    chance = random.Random(seed)
    words = vocabulary()
    weights = list(itertools.accumulate(1 / (rank + 2.7) for rank in range(len(words))))
    while True:
        pieces, capital = [], True
        for word in chance.choices(words, cum_weights=weights, k=DOCUMENT_WORDS):
            ending = chance.random()
            end = ". " if ending < 0.06 else ".\n\n" if ending < 0.07 else ", " if ending < 0.15 else " "
            number = str(chance.randrange(3000)) + " " if ending > 0.98 else ""
            pieces.append(number + (word.capitalize() if capital else word) + end)
            capital = end.startswith(".")
        yield "".join(pieces).strip()
