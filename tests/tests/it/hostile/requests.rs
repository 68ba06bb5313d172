//! Hostile requests to started programs: the HTTP server and the store in which ranks rendezvous. The programs still work
//! afterwards.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::Duration;

use super::folder::{Folder, MEMORY};

/// Request to the HTTP server.
struct HostileRequest {
    name: &'static str,
    bytes: fn() -> Vec<u8>,
    /// Status codes of a refusal. Without one, the server may also close the connection.
    statuses: &'static [u16],
}

const REQUESTS: &[HostileRequest] = &[
    HostileRequest { name: "no HTTP", bytes: || b"\x16\x03\x01\x02\x00\x01\r\n\r\n".to_vec(), statuses: &[400] },
    HostileRequest {
        name: "a header of a megabyte",
        bytes: || format!("GET /v1/models HTTP/1.1\r\nx: {}\r\n\r\n", "a".repeat(1 << 20)).into_bytes(),
        statuses: &[400, 431],
    },
    HostileRequest {
        name: "a body beyond all limits",
        bytes: || post("content-length: 1000000000000000000", ""),
        statuses: &[413],
    },
    HostileRequest {
        name: "a chunk beyond all limits",
        bytes: || post("transfer-encoding: chunked", "ffffffffffffffffff\r\n{}"),
        statuses: &[400],
    },
    HostileRequest {
        name: "a list nested a million times",
        bytes: || post("content-length: 1000000", &"[".repeat(1_000_000)),
        statuses: &[400, 422],
    },
    HostileRequest {
        name: "a path to another folder",
        bytes: || b"GET /../../../../etc/passwd HTTP/1.0\r\n\r\n".to_vec(),
        statuses: &[400, 404],
    },
];

/// Queries of torch's TCPStore that no client sends. A query is a byte for its kind, a length of 8 bytes, and a key.
const QUERIES: [&[u8]; 4] = [
    b"GET / HTTP/1.1\r\n\r\n",
    &[0xff; 64],
    // A key without an end, and half of a length.
    &[1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, b'k'],
    &[1, 4, 0, 0],
];

fn post(header: &str, body: &str) -> Vec<u8> {
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    format!("{head}{header}\r\n\r\n{body}").into_bytes()
}

/// Sends a request and returns the status of its answer.
fn status_of(address: &str, bytes: &[u8]) -> Option<u16> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    // The server may answer and close before it has read all.
    let _ = stream.write_all(bytes);
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).ok()?;
    line.split(' ').nth(1)?.parse().ok()
}

/// Started program, which is killed at the end of the test.
struct StartedProgram(Child);

impl Drop for StartedProgram {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn hostile_requests_are_refused() {
    let folder = Folder::new();
    let words = ["evaluator", "serve", "model", "--served-model-name", "tiny", "--device", "cpu", "--port", "0"];
    let mut server = StartedProgram(folder.command(MEMORY, &words).stderr(Stdio::piped()).spawn().unwrap());
    let lines = BufReader::new(server.0.stderr.take().unwrap()).lines().map_while(Result::ok);
    let mut lines = lines.inspect(|line| println!("{line}"));
    let address = lines.find_map(|line| Some(line.split_once(" at http://")?.1.strip_suffix("/v1")?.to_owned()));
    let address = address.unwrap();
    std::thread::spawn(move || lines.for_each(drop));
    let faults: Vec<_> = REQUESTS
        .iter()
        .filter_map(|request| {
            let status = status_of(&address, &(request.bytes)());
            let alive = status_of(&address, b"GET /v1/models HTTP/1.0\r\n\r\n");
            let is_refused = status.is_none_or(|status| request.statuses.contains(&status));
            let fault = format!("{}: status {status:?}, then {alive:?}", request.name);
            (!is_refused || alive != Some(200)).then_some(fault)
        })
        .collect();
    super::report(&faults);
}

#[test]
fn hostile_queries_do_not_stop_a_rendezvous() {
    let folder = Folder::new();
    let (host, port) = suite::unused_address();
    let start = |rank: &str| {
        let mut command = folder.command(MEMORY, &["trainer", "train", "recipe.yaml"]);
        command.envs([("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")]);
        command.env("MASTER_ADDR", &host).env("MASTER_PORT", port.to_string());
        StartedProgram(command.stderr(Stdio::piped()).spawn().unwrap())
    };
    let mut ranks = vec![start("0")];
    let mut connect = || loop {
        match TcpStream::connect((host.as_str(), port)) {
            Ok(stream) => return stream,
            Err(error) => assert!(ranks[0].0.try_wait().unwrap().is_none(), "rank 0 has ended: {error}"),
        }
    };
    let open: Vec<_> = QUERIES
        .iter()
        .map(|bytes| {
            let mut stream = connect();
            let _ = stream.write_all(bytes);
            stream
        })
        .collect();
    ranks.push(start("1"));
    for mut rank in ranks {
        let mut stderr = String::new();
        rank.0.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert!(rank.0.wait().unwrap().success(), "{stderr}");
    }
    drop(open);
}
