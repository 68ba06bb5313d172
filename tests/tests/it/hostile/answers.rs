//! Hostile answers of a server to a program: Snowflake's SQL API.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use super::fault_of;
use super::folder::Folder;

/// Answer of the server to every request.
struct HostileAnswer {
    name: &'static str,
    head: &'static str,
    body: fn() -> String,
    /// Text of the error.
    words: &'static [&'static str],
}

const ANSWERS: &[HostileAnswer] = &[
    HostileAnswer {
        name: "a list nested a million times",
        head: "200 OK",
        body: || "[".repeat(1_000_000),
        words: &["read Snowflake's response"],
    },
    HostileAnswer {
        name: "a page of HTML",
        head: "200 OK",
        body: || "<html>".to_owned(),
        words: &["read Snowflake's response"],
    },
    HostileAnswer {
        name: "a compressed body that is none",
        head: "200 OK\r\ncontent-encoding: gzip",
        body: || "plain".to_owned(),
        words: &["failed to reach Snowflake"],
    },
    HostileAnswer {
        name: "a handle that leads to another address",
        head: "202 Accepted",
        body: || r#"{"statementHandle": "../x?y#z"}"#.to_owned(),
        words: &["is no statementHandle"],
    },
    HostileAnswer {
        name: "more rows than there are",
        head: "200 OK",
        body: || {
            r#"{"statementHandle": "a", "data": [], "resultSetMetaData": {"numRows": 18446744073709551615,
                "rowType": [{"name": "TEXT", "type": "text"}], "partitionInfo": [{"rowCount": 18446744073709551615}]}}"#
                .to_owned()
        },
        words: &["0 rows, but 18446744073709551615 are announced"],
    },
    HostileAnswer {
        name: "escape sequences in a message",
        head: "422 Unprocessable",
        body: || r#"{"message": "\u001b[2Jred\u202e"}"#.to_owned(),
        words: &["\\u001b[2Jred\\u202e"],
    },
];

/// Gives the answer to every request, until the process ends. Returns the address.
fn serve(head: &'static str, body: String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || listener.incoming().flatten().for_each(|stream| answer(&stream, head, &body)));
    address
}

fn answer(mut stream: &TcpStream, head: &str, body: &str) {
    let mut request = BufReader::new(stream);
    let lines: Vec<String> =
        request.by_ref().lines().map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
    let length = lines.iter().find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
    let _ = request.read_exact(&mut vec![0; length.unwrap_or(0)]);
    let length = body.len();
    let _ = write!(stream, "HTTP/1.1 {head}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}");
}

#[test]
fn hostile_answers_are_refused() {
    let folder = Folder::new();
    let source = "data.sources=[{type: snowflake, table_name: A}]";
    let faults: Vec<_> = ANSWERS
        .iter()
        .filter_map(|answer| {
            folder.restore();
            let address = serve(answer.head, (answer.body)());
            let variables = [
                ("SNOWFLAKE_HOST", address.as_str()),
                ("SNOWFLAKE_TOKEN", "t0k3n"),
                ("SNOWFLAKE_WAREHOUSE", "W"),
                ("SNOWFLAKE_AUTHENTICATOR", "oauth"),
            ];
            let output = folder.run_with(&variables, &["trainer", "train", "recipe.yaml", "type=causal", source]);
            Some(format!("{}: {}", answer.name, fault_of(output, &[3], answer.words)?))
        })
        .collect();
    super::report(&faults);
}
