"""Writes Parquet files to candle-ext/text/tests/fixtures.

chat.parquet has nested messages over two row groups. tools.parquet has the rows of tools.jsonl: tools and arguments
with different keys, which Parquet gives to every row, as nulls.

Needs pyarrow. Run from the repository's root:

    python tests/reference/parquet_fixture.py
"""

import json
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


def tool_row(name, arguments, properties):
    function = {"name": name, "arguments": arguments}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    definition = {"name": name, "description": f"{name} it", "parameters": schema}
    return {
        "messages": [
            {"role": "user", "content": f"Please {name}."},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "It is 3."},
        ],
        "tools": [{"type": "function", "function": definition}],
    }


def tool_rows():
    text, integer = {"type": "string"}, {"type": "integer", "description": "a number"}
    yield tool_row("weather", {"city": "Oslo"}, {"city": text})
    yield tool_row("add", {"a": 1, "b": 2}, {"a": integer, "b": integer})


def main():
    folder = Path(__file__).resolve().parents[2] / "candle-ext/text/tests/fixtures"
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(list(rows()), schema=schema())
    pq.write_table(table, folder / "chat.parquet", row_group_size=3, compression="zstd")
    write_tools(folder)
    for name in ["chat.parquet", "tools.parquet"]:
        print(folder / name, (folder / name).stat().st_size, "bytes")


def write_tools(folder):
    lines = [json.dumps(row) + "\n" for row in tool_rows()]
    (folder / "tools.jsonl").write_text("".join(lines))
    pq.write_table(pa.Table.from_pylist(list(tool_rows())), folder / "tools.parquet", compression="zstd")


if __name__ == "__main__":
    main()
