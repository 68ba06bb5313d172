//! Any file or row gives a document or an error, never a panic.

use candlewick_text::format::{FormatRequest, RowFormat};
use candlewick_text::source::{ReadOptions, RowSource};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::Folder;

/// Generates JSON that is nearly a row: known columns, known keys, values of any type.
fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-zé\"{}\\[\\]:, ]{0,12}".prop_map(Value::from),
        prop::sample::select(vec!["user", "human", "gpt", "assistant", "function_call", "[]"]).prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 4, |inner| {
        let key = prop::sample::select(vec![
            "role",
            "content",
            "from",
            "value",
            "type",
            "text",
            "tool_calls",
            "function",
            "arguments",
            "name",
            "weight",
        ]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key, inner), 0..4)
                .prop_map(|pairs| { Value::Object(pairs.into_iter().map(|(k, v)| (k.to_owned(), v)).collect()) }),
        ]
    })
}

fn row() -> impl Strategy<Value = Value> {
    let column = prop::sample::select(vec![
        "messages",
        "conversations",
        "instruction",
        "input",
        "output",
        "history",
        "system",
        "tools",
        "prompt",
        "completion",
        "question",
        "answer",
        "text",
        "other",
    ]);
    prop::collection::vec((column, value()), 0..5)
        .prop_map(|pairs| pairs.into_iter().map(|(k, v)| (k.to_owned(), v)).collect())
}

/// Reads every row by every function.
fn read_all(source: &dyn RowSource) {
    for format in [None, Some("messages"), Some("sharegpt"), Some("alpaca"), Some("text")] {
        for role_mapping in [vec![], vec![("user".to_owned(), "messages.role.user".to_owned())]] {
            let format = format.map(str::to_owned);
            let request = FormatRequest { format, role_mapping, ..FormatRequest::default() };
            if let Ok(format) = RowFormat::find(&request, source) {
                for i in 0..source.len() {
                    let _ = format.read(source, i);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn rows_of_any_shape(rows in prop::collection::vec(row(), 1..4)) {
        let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
        let folder = Folder::new(&[("a.jsonl", lines.as_bytes()), ("a.json", json!(rows).to_string().as_bytes())]);
        for name in ["a.jsonl", "a.json"] {
            let source = folder.open(name, &ReadOptions::default()).unwrap();
            prop_assert_eq!(source.len(), rows.len());
            read_all(&*source);
        }
    }

    #[test]
    fn bytes_of_any_kind(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        for name in ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt", "a.parquet"] {
            let folder = Folder::new(&[(name, &bytes)]);
            if let Ok(source) = folder.open(name, &ReadOptions::default()) {
                read_all(&*source);
            }
        }
    }

    #[test]
    fn almost_json(text in r#"[\{\}\[\]",:a0\n -]{0,80}"#) {
        for name in ["a.jsonl", "a.json", "a.csv"] {
            let folder = Folder::new(&[(name, text.as_bytes())]);
            if let Ok(source) = folder.open(name, &ReadOptions::default()) {
                read_all(&*source);
            }
        }
    }

    #[test]
    fn a_damaged_parquet_file(at in 0usize..2000, byte: u8) {
        let mut bytes = include_bytes!("../../fixtures/chat.parquet").to_vec();
        let at = at % bytes.len();
        bytes[at] = byte;
        let folder = Folder::new(&[("a.parquet", &bytes)]);
        if let Ok(source) = folder.open("a.parquet", &ReadOptions::default()) {
            for i in 0..source.len().min(10) {
                let _ = source.row(i);
            }
        }
    }
}
