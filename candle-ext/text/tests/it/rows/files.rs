//! Every file format: its rows, and the errors for malformed files.

use std::io::Write;

use candlewick_text::source::{ReadOptions, SampleBy};

use super::{Folder, show};

#[track_caller]
fn check(name: &str, content: &[u8], want: &[&str]) {
    let folder = Folder::new(&[(name, content)]);
    let source = folder.open(name, &ReadOptions::default()).unwrap();
    assert_eq!(show(&*source).unwrap(), want);
}

/// Checks that opening or reading fails with a message that contains `want`.
#[track_caller]
pub(crate) fn refused(name: &str, content: &[u8], want: &str) {
    let folder = Folder::new(&[(name, content)]);
    let opened = folder.open(name, &ReadOptions::default());
    let error = match opened {
        Err(error) => error,
        Ok(source) => folder.short(show(&*source).unwrap_err()),
    };
    assert!(error.contains(want), "{want:?} is not in {error:?}");
}

#[test]
fn json_lines_with_blank_lines_marks_and_any_line_ends() {
    check("a.jsonl", b"{\"a\":1}\n\n{\"a\":2}\n", &[r#"{"a":1}"#, r#"{"a":2}"#]);
    check("a.jsonl", b"\xEF\xBB\xBF{\"a\":1}\r\n{\"a\":2}\r\n", &[r#"{"a":1}"#, r#"{"a":2}"#]);
    check("a.ndjson", b"{\"a\":1}\n  \n{\"a\":2}", &[r#"{"a":1}"#, r#"{"a":2}"#]);
    check("a.jsonl", b"[{\"a\":1},\n {\"a\":2}]", &[r#"{"a":1}"#, r#"{"a":2}"#]);
}

#[test]
fn a_row_says_where_it_stands() {
    let folder = Folder::new(&[("a.jsonl", b"{\"a\":1}\n\n{\"a\":2}\n")]);
    let source = folder.open("a.jsonl", &ReadOptions::default()).unwrap();
    assert_eq!(folder.short(source.locate(1)), "a.jsonl:3");
}

#[test]
fn broken_json_lines_name_the_line_and_the_way_out() {
    refused("a.jsonl", b"{\"a\":1}\n{\"a\" 2}\n", "read a.jsonl:2: not valid JSON at column 6");
    refused("a.jsonl", b"{\"a\":1}\n{\"a\": \"cut", "a.jsonl:2: the row breaks off");
    refused("a.jsonl", b"{\"a\":1}\n\n{\"a\":\"\xFF\"}\n", "a.jsonl:3: byte 0xFF at column 7 is not UTF-8; save");
    refused("a.jsonl", b"{\"a\":1,\"a\":2}\n", "a.jsonl:1: not valid JSON at column 10: key \"a\" appears twice");
    refused("a.jsonl", b"1\n", "a.jsonl:1: the row is a number, not an object; write each row as");
    refused("a.jsonl", b"\xFF\xFE{\0}\0", "the text is UTF-16LE; convert it: iconv -f UTF-16LE");
}

#[test]
fn an_empty_data_file_is_reported() {
    for (name, content) in [
        ("a.jsonl", &b""[..]),
        ("a.jsonl", b"\n\n"),
        ("a.json", b"[]"),
        ("a.json", b"  "),
        ("a.csv", b"a,b\n"),
        ("a.csv", b""),
        ("a.txt", b"\n"),
    ] {
        refused(name, content, "read a.");
        refused(name, content, "there are no rows in it");
    }
    let folder = Folder::new(&[]);
    assert!(folder.open("none.jsonl", &ReadOptions::default()).err().unwrap().contains("No such file"));
}

#[test]
fn json_lists_objects_in_a_row_and_lists_under_a_key() {
    let rows = [r#"{"a":1}"#, r#"{"a":[{"b":"]"}]}"#];
    check("a.json", b"[ {\"a\": 1} , {\"a\": [{\"b\": \"]\"}]} ]", &rows);
    check("a.json", b"{\"a\": 1}\n{\"a\": [{\"b\": \"]\"}]}", &rows);
    check("a.json", b"{\"a\": 1}{\"a\": [{\"b\": \"]\"}]}", &rows);
    check("a.json", b"{\"rows\": [{\"a\": 1}, {\"a\": [{\"b\": \"]\"}]}]}", &rows);
    check("a.json", b"{\"version\": {\"x\": [1]}, \"data\": [{\"a\": 1}]}", &[rows[0]]);
    check("a.json", b"{\"messages\": [{\"role\": \"user\"}]}", &[r#"{"messages":[{"role":"user"}]}"#]);
    check("a.json", b"{\"q\": \"x\", \"tools\": [{\"n\": 1}]}", &[r#"{"q":"x","tools":[{"n":1}]}"#]);
}

#[test]
fn every_value_of_a_json_file_is_read_or_refused() {
    let [a, b, c] = [r#"{"a":1}"#, r#"{"a":2}"#, r#"{"a":3}"#];
    for name in ["a.json", "a.jsonl"] {
        check(name, b"[{\"a\":1}][{\"a\":2},{\"a\":3}]", &[a, b, c]);
        check(name, b"[{\"a\":1}]\n[]\n[{\"a\":2}]\n", &[a, b]);
        check(name, b"[{\"a\":1}]{\"a\":2}", &[a, b]);
        refused(name, b"[{\"a\":1}]\ngarbage", "a.json");
        refused(name, b"[{\"a\":1}]\ngarbage", ":2: expected a list or an object, found 'g'");
        refused(name, b"[{\"a\":1}],[{\"a\":2}]", ":1: expected a list or an object, found ','");
        refused(name, b"[{\"a\":1}][{\"a\":2}", "the file ends in the middle of a value");
    }
    check("a.json", b"{\"a\":1}[{\"a\":2}]", &[a, b]);
    check("a.json", b"{\"data\":[{\"a\":1}]}{\"a\":2}", &[r#"{"data":[{"a":1}]}"#, b]);
    refused("a.json", b"{\"data\":[{\"a\":1}]}]", "a.json:1: expected a list or an object, found ']'");
}

#[test]
fn every_frame_of_a_compressed_file_is_read_or_refused() {
    let [a, b] = ["{\"a\":1}\n", "{\"a\":2}\n"];
    let zstd = |text: &str| zstd::encode_all(text.as_bytes(), 0).unwrap();
    for (name, first, second) in
        [("a.jsonl.gz", gzip(a.as_bytes()), gzip(b.as_bytes())), ("a.jsonl.zst", zstd(a), zstd(b))]
    {
        check(name, &[&first[..], &second].concat(), &[a.trim(), b.trim()]);
        refused(name, &[&first[..], b"garbage after the frame"].concat(), "it cannot be unpacked");
        refused(name, &[&first[..], &second[..second.len() - 3]].concat(), "it cannot be unpacked");
    }
}

#[test]
fn a_field_names_the_list() {
    let folder = Folder::new(&[("a.json", b"{\"x\": [{\"a\": 1}], \"messages\": [{\"a\": 2}]}")]);
    let field = |name: &str| ReadOptions { field: Some(name.into()), ..ReadOptions::default() };
    let source = folder.open("a.json", &field("messages")).unwrap();
    assert_eq!(show(&*source).unwrap(), [r#"{"a":2}"#]);
    let error = folder.open("a.json", &field("y")).err().unwrap();
    assert!(error.contains("no list under the field \"y\"; keys: x, messages"), "{error}");
}

#[test]
fn broken_json_names_the_line() {
    refused("a.json", b"[\n {\"a\": 1}\n {\"a\": 2}]", "a.json:3: expected a comma or the end of the list, found '{'");
    refused("a.json", b"[{\"a\": 1},", "the file ends in the middle of a value");
    refused("a.json", b"[{\"a\": 1}, {\"a\": ", "the file ends in the middle of a value");
    refused("a.json", b"[\n{\"a\": 1},\n{\"a\": oops}]", "a.json:3: not valid JSON");
    refused("a.json", b"[1, 2]", "a.json:1: the row is a number, not an object");
    refused("a.json", b"hello", "a.json:1: expected a list or an object, found 'h'");
    refused("a.json", b"[{\"a\": 1}, {\"a\":\n2, \"a\": 3}]", "a.json:2: not valid JSON at column 6: key \"a\"");
}

#[test]
fn csv_with_quotes_breaks_and_tabs() {
    check(
        "a.csv",
        b"\xEF\xBB\xBFq, a \n\"one, two\",\"line\nbreak\"\nx,\n",
        &[r#"{"q":"one, two","a":"line\nbreak"}"#, r#"{"q":"x","a":""}"#],
    );
    check("a.tsv", b"q\ta\r\n1,5\t2\r\n", &[r#"{"q":"1,5","a":"2"}"#]);
    refused("a.csv", b"q,a\n1,2\n1,2,3\n", "a.csv:3: 3 values under 2 columns; quote values");
    refused("a.csv", b"q,q\n1,2\n", "the header names the column \"q\" twice");
    refused("a.csv", b"q,a\n1,\xFF\n", "a.csv:2: value 2 is not UTF-8");
    check("a.csv", b"q,a\n5\" disk,\"say \"\"hi\"\"\"\n", &[r#"{"q":"5\" disk","a":"say \"hi\""}"#]);
}

#[test]
fn a_quote_that_is_never_closed_is_named_by_its_line() {
    let problem = "a quote is opened here and never closed";
    refused("a.csv", b"q,a\n1,2\n3,\"four\n5,6\n7,8\n", &format!("a.csv:3: {problem}"));
    refused("a.csv", b"q,a\n1,\"two \"\"and\n", &format!("a.csv:2: {problem}"));
    refused("a.csv", b"q,a\n\"1\n2\",3\n\n4,\"", &format!("a.csv:5: {problem}"));
    refused("a.tsv", b"\"q\ta\n1\t2\n", &format!("a.tsv:1: {problem}"));
}

#[test]
fn csv_with_another_delimiter() {
    let folder = Folder::new(&[("a.csv", b"q;a\n1,5;2\n")]);
    let options = ReadOptions { delimiter: Some(b';'), ..ReadOptions::default() };
    let source = folder.open("a.csv", &options).unwrap();
    assert_eq!(show(&*source).unwrap(), [r#"{"q":"1,5","a":"2"}"#]);
}

#[test]
fn text_by_line_paragraph_and_document() {
    let text = b"one\r\n\r\ntwo\nthree\n\n \nfour";
    let folder = Folder::new(&[("a.txt", text)]);
    let by = |sample_by| {
        let options = ReadOptions { sample_by, ..ReadOptions::default() };
        show(&*folder.open("a.txt", &options).unwrap()).unwrap()
    };
    let line = |text: &str| serde_json::json!({ "text": text }).to_string();
    assert_eq!(by(SampleBy::Line), ["one", "two", "three", "four"].map(line));
    assert_eq!(by(SampleBy::Paragraph), ["one", "two\nthree", "four"].map(line));
    assert_eq!(by(SampleBy::Document), ["one\n\ntwo\nthree\n\n \nfour"].map(line));
    refused("a.txt", b"fine\nfi\xE9ne\n", "a.txt:2: byte 0xE9 is not UTF-8");
    assert!("pages".parse::<SampleBy>().unwrap_err().to_string().contains("line, paragraph, document"));
}

#[test]
fn other_files_are_explained() {
    refused("a.jsonl.xz", b"x", "it is compressed (xz); unpack it first");
    refused("a.parquet.gz", b"x", "rows are read from .json");
    refused("a.arrow", b"x", "Arrow files are not read");
    refused("a.docx", b"x", "rows are read from .json");
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn compressed_files_are_read_as_what_they_hold() {
    let lines = b"{\"a\":1}\n\n{\"a\":2}\n";
    let rows = [r#"{"a":1}"#, r#"{"a":2}"#];
    check("a.jsonl.gz", &gzip(lines), &rows);
    check("a.jsonl.zst", &zstd::encode_all(&lines[..], 3).unwrap(), &rows);
    check("a.json.gz", &gzip(b"[{\"a\":1},{\"a\":2}]"), &rows);
    check("a.csv.gz", &gzip(b"a\n1\n"), &[r#"{"a":"1"}"#]);
    check("a.txt.GZ", &gzip(b"x\ny\n"), &[r#"{"text":"x"}"#, r#"{"text":"y"}"#]);
    // Two gzip members are one file; the extension does not matter.
    check("a.jsonl.gz", &[gzip(b"{\"a\":1}\n"), gzip(b"{\"a\":2}\n")].concat(), &rows);
    check("a.jsonl", &gzip(lines), &rows);
}

#[test]
fn a_broken_row_of_a_compressed_file_has_its_line() {
    refused("a.jsonl.gz", &gzip(b"{\"a\":1}\n{\"a\":\n"), "read a.jsonl.gz:2: the row breaks off");
    let cut = gzip(&b"{\"a\":1}\n".repeat(99));
    refused("a.jsonl.gz", &cut[..cut.len() / 2], "read a.jsonl.gz: it cannot be unpacked");
    refused("a.jsonl.zst", &[0x28, 0xB5, 0x2F, 0xFD, 1, 2, 3], "a.jsonl.zst: it cannot be unpacked");
}

/// A gigabyte of zeros compresses to a megabyte.
#[test]
fn a_file_that_unpacks_to_far_too_much_is_refused() {
    let bomb = gzip(&vec![0; 1 << 20]).repeat(1100);
    refused("a.jsonl.gz", &bomb, "it unpacks to more than 200 times its size");
}

#[test]
fn a_pipe_is_no_data_file() {
    let folder = Folder::new(&[]);
    let path = folder.path("a.jsonl");
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    let error = folder.open("a.jsonl", &ReadOptions::default()).err().unwrap();
    assert!(error.contains("it is a pipe, a device or a folder"), "{error}");
}

/// The test starts itself as a second process, which truncates a file while it reads it.
#[test]
fn a_file_that_is_shortened_while_it_is_read_is_named() {
    const VARIABLE: &str = "CANDLEWICK_SHORTENED_FILE";
    if let Some(path) = std::env::var_os(VARIABLE) {
        candlewick_text::source::report_shortened_files();
        let source = candlewick_text::source::open_files(&[path.clone().into()], &ReadOptions::default()).unwrap();
        std::fs::File::options().write(true).open(path).unwrap().set_len(0).unwrap();
        let _ = source.row(20_000);
        unreachable!("reading beyond the end of a mapped file raises SIGBUS");
    }
    let folder = Folder::new(&[("rows.jsonl", &b"{\"a\":1}\n".repeat(30_000))]);
    let own = std::env::current_exe().unwrap();
    let name = "rows::files::a_file_that_is_shortened_while_it_is_read_is_named";
    let output = std::process::Command::new(own)
        .args([name, "--exact", "--nocapture"])
        .env(VARIABLE, folder.path("rows.jsonl"))
        .output()
        .unwrap();
    let stderr = folder.short(String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    assert!(stderr.contains("failed to read a mapped file: rows.jsonl was shortened while it was read"), "{stderr}");
}
