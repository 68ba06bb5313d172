//! Parquet files: valid ones, malformed ones, and column types without a JSON equivalent.

use std::sync::Arc;

use candlewick_text::format::{FormatRequest, RowFormat};
use candlewick_text::source::{ConcatSource, NullFieldRemoval, ReadOptions, RowSource, SliceSource, WithoutNullFields};
use parquet::data_type::{ByteArray, ByteArrayType, FixedLenByteArray, FixedLenByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

use super::files::refused;
use super::{Folder, show};

#[test]
fn parquet_lists_and_structs_come_out_as_json() {
    let folder = Folder::new(&[("chat.parquet", include_bytes!("../../fixtures/chat.parquet"))]);
    let source = folder.open("chat.parquet", &ReadOptions::default()).unwrap();
    let rows = show(&*source).unwrap();
    assert_eq!(rows.len(), 5);
    assert_eq!(
        rows[1],
        "{\"id\":1,\"messages\":[{\"role\":\"user\",\"content\":\"Was ist 1 plus eins? ü€\",\
         \"tool_calls\":null},{\"role\":\"assistant\",\"content\":\"2\",\"tool_calls\":null}],\
         \"score\":null,\"tags\":[\"sum\",\"1\"],\"meta\":{\"source\":\"generated\",\"checked\":false}}"
    );
    assert!(rows[2].contains("\"tags\":[]"));
    assert!(rows[3].contains("\"content\":null,\"tool_calls\":[{\"type\":\"function\",\"function\":"));
    assert_eq!(folder.short(source.locate(4)), "chat.parquet row 4");
    let backwards: Vec<_> = (0..5).rev().map(|i| source.row(i).unwrap()["id"].clone()).collect();
    assert_eq!(backwards, [4, 3, 2, 1, 0]);
}

/// All structs of a Parquet column have the same fields. datasets and pyarrow return nulls for those that a row lacks.
#[test]
fn null_fields_that_parquet_adds_are_removed() {
    let folder = Folder::new(&[
        ("tools.parquet", include_bytes!("../../fixtures/tools.parquet")),
        ("tools.jsonl", include_bytes!("../../fixtures/tools.jsonl")),
        ("nulls.jsonl", br#"{"a":{"b":null}}"#),
    ]);
    let open = |name: &str, remove_none_values| {
        let inner = folder.open(name, &ReadOptions::default()).unwrap();
        WithoutNullFields::new(inner.into(), NullFieldRemoval::of(remove_none_values))
    };
    let documents = |source: &WithoutNullFields| {
        let format = RowFormat::find(&FormatRequest::default(), source).unwrap();
        (0..source.len()).map(|row| format!("{:?}", format.read(source, row).unwrap())).collect::<Vec<_>>()
    };
    let (lines, parquet, kept) =
        (open("tools.jsonl", None), open("tools.parquet", None), open("tools.parquet", Some(false)));
    assert_eq!(documents(&parquet), documents(&lines));
    assert!(documents(&kept)[0].contains(r#""city": String("Oslo"), "a": Null"#), "{}", documents(&kept)[0]);
    let first = |source: &WithoutNullFields| source.first_row_with_removed_nulls().map(|place| folder.short(place));
    assert_eq!(first(&parquet).as_deref(), Some("tools.parquet row 0"));
    assert_eq!([first(&lines), first(&kept)], [None, None]);
    let nulls = |remove_none_values| show(&open("nulls.jsonl", remove_none_values)).unwrap();
    assert_eq!(nulls(None), [r#"{"a":{"b":null}}"#]);
    assert_eq!(nulls(Some(true)), [r#"{"a":{}}"#]);
    let inner = folder.open("tools.parquet", &ReadOptions::default()).unwrap();
    let nested = ConcatSource::new(vec![folder.open("tools.jsonl", &ReadOptions::default()).unwrap(), inner]);
    let nested = SliceSource::new(Box::new(nested), 1..3);
    assert_eq!([nested.adds_null_fields(0), nested.adds_null_fields(1)], [false, true]);
}

#[test]
fn broken_parquet_is_an_error() {
    let whole = include_bytes!("../../fixtures/chat.parquet");
    refused("a.parquet", b"not parquet at all", "may be cut short or not be Parquet");
    refused("a.parquet", &whole[..whole.len() - 100], "may be cut short");
    refused("a.parquet", b"", "may be cut short");
    let mut damaged = whole.to_vec();
    damaged[40..400].fill(0x55);
    refused("a.parquet", &damaged, "a.parquet row 0");
}

/// Returns a file with the column `schema` and these values, all of 12 bytes or of any length.
fn column(schema: &str, values: &[&[u8]]) -> Vec<u8> {
    column_in_groups(schema, values, usize::MAX)
}

fn column_in_groups(schema: &str, values: &[&[u8]], rows_per_group: usize) -> Vec<u8> {
    let schema = Arc::new(parse_message_type(&format!("message m {{ {schema} }}")).unwrap());
    let mut file = Vec::new();
    let mut writer =
        SerializedFileWriter::new(&mut file, schema.clone(), Arc::new(WriterProperties::default())).unwrap();
    for values in values.chunks(rows_per_group) {
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let values: Vec<ByteArray> = values.iter().map(|bytes| ByteArray::from(bytes.to_vec())).collect();
        if schema.get_fields()[0].name() == "fixed" {
            let values: Vec<FixedLenByteArray> = values.into_iter().map(FixedLenByteArray::from).collect();
            column.typed::<FixedLenByteArrayType>().write_batch(&values, None, None).unwrap();
        } else {
            column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
        }
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
    file
}

#[test]
fn bytes_are_text_or_an_error_that_names_column_and_row() {
    let file = column("required binary text;", &["é".as_bytes(), b"b"]);
    let folder = Folder::new(&[("a.parquet", &file)]);
    let source = folder.open("a.parquet", &ReadOptions::default()).unwrap();
    assert_eq!(show(&*source).unwrap(), [r#"{"text":"é"}"#, r#"{"text":"b"}"#]);
    let file = column("required binary image;", &[b"a", b"\xFF\xD8"]);
    refused("a.parquet", &file, "a.parquet row 1: column `image` holds bytes that are not UTF-8");
}

#[test]
fn a_column_of_an_unread_type_is_refused_by_name() {
    let file = column("required fixed_len_byte_array(12) fixed (INTERVAL);", &[&[0; 12]]);
    refused("a.parquet", &file, "a.parquet: column `fixed` is of the type INTERVAL, which is not read");
}

#[test]
fn threads_decode_row_groups_of_one_file_at_once() {
    let texts: Vec<String> = (0..2000).map(|row_idx| format!("{row_idx} ").repeat(1 + row_idx % 60)).collect();
    let values: Vec<&[u8]> = texts.iter().map(String::as_bytes).collect();
    let file = column_in_groups("required binary text (UTF8);", &values, 20);
    let folder = Folder::new(&[("a.parquet", &file)]);
    for _ in 0..20 {
        let source = folder.open("a.parquet", &ReadOptions::default()).unwrap();
        std::thread::scope(|scope| {
            for thread_idx in 0..16 {
                let (source, texts) = (&source, &texts);
                scope.spawn(move || {
                    for row_idx in (thread_idx * 20..texts.len()).step_by(320) {
                        assert_eq!(source.row(row_idx).unwrap()["text"], *texts[row_idx]);
                    }
                });
            }
        });
    }
}

#[test]
fn a_footer_that_announces_other_rows_than_the_row_groups_is_refused() {
    let mut file = column("required binary text (UTF8);", &[b"a", b"b", b"c"]);
    let n_footer = u32::from_le_bytes(file[file.len() - 8..file.len() - 4].try_into().unwrap()) as usize;
    let start = file.len() - 8 - n_footer;
    // The footer's first field with the thrift header 0x16 is the number of rows, 3 as a zigzag varint.
    let at = start + file[start..].windows(2).position(|bytes| bytes == [0x16, 6]).unwrap();
    file[at + 1] = 8;
    refused("a.parquet", &file, "its row groups hold 3 rows, but its footer announces 4");
}
