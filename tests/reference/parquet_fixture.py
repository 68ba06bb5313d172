"""Writes candle-ext/text/tests/fixtures/chat.parquet: nested messages over two row groups.

Needs pyarrow. Run from the repository's root:

    python tests/reference/parquet_fixture.py
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

CALL = [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]


def rows():
    for i in range(5):
        messages = [
            {"role": "user", "content": f"Was ist {i} plus eins? ü€", "tool_calls": None},
            {"role": "assistant", "content": f"{i + 1}", "tool_calls": None},
        ]
        if i == 3:
            messages.insert(1, {"role": "assistant", "content": None, "tool_calls": CALL})
        yield {
            "id": i,
            "messages": messages,
            "score": None if i == 1 else i / 2,
            "tags": [] if i == 2 else ["sum", str(i)],
            "meta": {"source": "generated", "checked": i % 2 == 0},
        }


def schema():
    function = pa.struct([("name", pa.string()), ("arguments", pa.string())])
    call = pa.struct([("type", pa.string()), ("function", function)])
    message = pa.struct(
        [("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))]
    )
    return pa.schema(
        [
            ("id", pa.int64()),
            ("messages", pa.list_(message)),
            ("score", pa.float64()),
            ("tags", pa.list_(pa.string())),
            ("meta", pa.struct([("source", pa.string()), ("checked", pa.bool_())])),
        ]
    )


def main():
    root = Path(__file__).resolve().parents[2]
    out = root / "candle-ext/text/tests/fixtures/chat.parquet"
    out.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(list(rows()), schema=schema())
    pq.write_table(table, out, row_group_size=3, compression="zstd")
    print(out, out.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
