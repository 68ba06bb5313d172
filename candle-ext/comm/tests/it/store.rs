//! Client and server of the store through their public API: with each other, and byte for byte against torch.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use candlewick_comm::store::{Client, Error, Result, Server, StoreSecret};

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(30);

/// Returns a loopback address of this process without a server. Other processes use 127.0.0.1.
fn unused_addr() -> (String, u16) {
    let [.., a, b] = std::process::id().to_be_bytes();
    let host = format!("127.77.{a}.{b}");
    let port = TcpListener::bind((host.as_str(), 0)).unwrap().local_addr().unwrap().port();
    (host, port)
}

fn pair() -> (Server, Client) {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let client = Client::connect("127.0.0.1", server.port(), LONG).unwrap();
    (server, client)
}

#[test]
fn keys_are_set_read_counted_and_deleted() -> Result<()> {
    let (_server, store) = pair();
    store.set("key", b"\x00value\xff")?;
    assert_eq!(store.get("key")?, b"\x00value\xff");
    assert_eq!((store.add("count", 5)?, store.add("count", -7)?), (5, -2));
    assert_eq!(store.get("count")?, b"-2");
    store.append("key", b"!")?;
    assert_eq!(store.get("key")?, b"\x00value\xff!");
    assert!(store.check(&["key", "count"])? && store.check(&[])? && !store.check(&["key", "nothing"])?);
    assert_eq!(store.compare_set("key", b"other", b"new")?, b"\x00value\xff!");
    assert_eq!(store.compare_set("fresh", b"", b"new")?, b"new");
    assert_eq!(store.num_keys()?, 3);
    assert_eq!((store.delete_key("key")?, store.delete_key("key")?, store.num_keys()?), (true, false, 2));
    Ok(())
}

#[test]
fn a_value_of_a_mebibyte_arrives_whole() -> Result<()> {
    let (_server, store) = pair();
    let value: Vec<u8> = (0..1 << 20).map(|i| (i % 251) as u8).collect();
    store.set("large", &value)?;
    assert!(store.get("large")? == value);
    Ok(())
}

#[test]
fn a_get_waits_for_the_key_of_another_client() -> Result<()> {
    let (_server, store) = pair();
    let other = store.new_connection()?;
    let waiting = thread::spawn(move || other.get("late"));
    store.set("late", b"here")?;
    assert_eq!(waiting.join().unwrap()?, b"here");
    Ok(())
}

#[test]
fn a_wait_that_times_out_names_its_keys_and_leaves_the_client_usable() -> Result<()> {
    let (_server, store) = pair();
    store.set("a", b"1")?;
    let error = store.wait_for(&["a", "b"], SHORT).unwrap_err();
    assert_eq!(error.to_string(), "wait for a, b in the store: timed out after 30ms");
    store.set("b", b"2")?;
    store.wait(&["a", "b"])?;
    assert_eq!(store.get("b")?, b"2");
    Ok(())
}

#[test]
fn a_key_that_is_set_while_the_wait_times_out_ends_the_wait() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let peer = thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        let mut read_bytes = |n: usize| {
            let mut bytes = vec![0; n];
            stream.read_exact(&mut bytes).unwrap();
            bytes
        };
        let hello = read_bytes(10);
        let nonce = hello[6..].to_vec();
        (&stream).write_all(&nonce).unwrap();
        let read_bytes = |n: usize| (&stream).read_exact(&mut vec![0; n]).unwrap();
        read_bytes(1 + 8 + 8 + "/k".len());
        read_bytes(1);
        // The wait ended just before its cancellation: answer both.
        (&stream).write_all(&[0, 1]).unwrap();
        read_bytes(1 + 8 + "/n".len() + 8);
        (&stream).write_all(&7i64.to_le_bytes()).unwrap();
    });
    let store = Client::connect("127.0.0.1", port, LONG).unwrap();
    store.wait_for(&["k"], SHORT).unwrap();
    assert_eq!(store.add("n", 1).unwrap(), 7);
    peer.join().unwrap();
}

#[test]
fn a_prefix_keeps_keys_apart() -> Result<()> {
    let (_server, store) = pair();
    let inner = store.with_prefix("attempt").with_prefix("2");
    inner.set("key", b"inner")?;
    assert_eq!(store.get("attempt/2/key")?, b"inner");
    assert!(!store.check(&["key"])?);
    Ok(())
}

#[test]
fn many_clients_count_together() -> Result<()> {
    let (_server, store) = pair();
    thread::scope(|scope| {
        for _ in 0..8 {
            let own = store.new_connection().unwrap();
            scope.spawn(move || (0..100).for_each(|_| assert!(own.add("count", 1).unwrap() > 0)));
        }
    });
    assert_eq!(store.get("count")?, b"800");
    Ok(())
}

#[test]
fn a_client_may_start_before_its_server() -> Result<()> {
    let (host, port) = unused_addr();
    let there = host.clone();
    let early = thread::spawn(move || Client::connect(&there, port, LONG));
    let _server = Server::bind((host.as_str(), port))?;
    early.join().unwrap()?.set("key", b"value")
}

#[test]
fn a_missing_server_is_reported_after_the_timeout() {
    let (host, port) = unused_addr();
    let error = Client::connect(&host, port, SHORT).unwrap_err().to_string();
    assert!(error.starts_with(&format!("connect to the store at {host}:{port}: ")), "{error}");
    let error = Client::connect("no\0host", port, SHORT).unwrap_err().to_string();
    assert!(error.starts_with(&format!("connect to the store at no\0host:{port}: ")), "{error}");
}

/// Listens; each caller, in turn, is dealt with by one of `deeds`.
fn peer<const N: usize>(deeds: [fn(TcpStream); N]) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || deeds.into_iter().for_each(|deed| deed(listener.accept().unwrap().0)));
    port
}

/// Answers a hello as a store does.
fn welcome(stream: &mut TcpStream) {
    let mut hello = [0; 10];
    stream.read_exact(&mut hello).unwrap();
    stream.write_all(&hello[6..]).unwrap();
}

#[test]
fn a_connection_to_a_stopping_server_is_retried() {
    let port = peer([|mut stream| stream.read_exact(&mut [0; 10]).unwrap(), drop, |mut stream| welcome(&mut stream)]);
    Client::connect("127.0.0.1", port, LONG).unwrap();
}

#[test]
fn a_server_without_an_answer_times_out() {
    let port = peer([std::mem::forget]);
    let began = Instant::now();
    let error = Client::connect("127.0.0.1", port, SHORT).unwrap_err();
    assert!(matches!(error, Error::Unanswered { .. }) && began.elapsed() < LONG / 2, "{error}");
}

#[test]
fn a_server_that_reads_nothing_times_out() {
    let stalled = |mut stream: TcpStream| {
        welcome(&mut stream);
        // Keep the connection open without reading.
        std::mem::forget(stream);
    };
    let store = Client::connect("127.0.0.1", peer([stalled, stalled]), LONG)
        .unwrap()
        .new_connection_with_timeout(SHORT)
        .unwrap();
    let began = Instant::now();
    let error = (0..16).find_map(|_| store.set("large", &vec![0; 8 << 20]).err()).unwrap();
    assert!(matches!(error, Error::Lost { .. }) && began.elapsed() < LONG / 2, "{error}");
}

#[test]
fn oversized_keys_and_values_are_rejected_before_they_are_sent() -> Result<()> {
    let (_server, store) = pair();
    let (value, key) = (vec![0; (8 << 20) + 1], "k".repeat(8 << 10));
    let refused = |done: Result<()>| done.unwrap_err().to_string();
    assert_eq!(refused(store.set("k", &value)), "store 8388609 bytes in a value: at most 8388608 are allowed");
    assert_eq!(refused(store.append("k", &value)), "store 8388609 bytes in a value: at most 8388608 are allowed");
    assert_eq!(refused(store.set(&key, b"")), "store 8193 bytes in a key: at most 8192 are allowed");
    store.set(&key[1..], &value[1..])?;
    assert!(store.get(&key[1..])? == value[1..]);
    Ok(())
}

#[test]
fn another_service_on_the_port_is_detected() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let web = thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        let _ = stream.read(&mut [0; 64]);
    });
    let error = Client::connect("127.0.0.1", port, LONG).unwrap_err();
    assert!(matches!(error, Error::NotAStore { .. }), "{error}");
    web.join().unwrap();
}

#[test]
fn a_port_in_use_is_an_error_of_the_server() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let error = Server::bind(("127.0.0.1", server.port())).unwrap_err().to_string();
    assert!(error.starts_with("listen on ") && error.contains(&server.port().to_string()), "{error}");
    let any = Server::bind_any(0).unwrap();
    assert!(matches!(Server::bind_any(any.port()), Err(Error::Bind { .. })));
    Client::connect("127.0.0.1", any.port(), LONG).unwrap().set("key", b"over IPv4").unwrap();
}

#[test]
fn a_dropped_server_disconnects_its_clients_and_frees_its_port() {
    let (host, port) = unused_addr();
    let server = Server::bind((host.as_str(), port)).unwrap();
    let store = Client::connect(&host, port, LONG).unwrap();
    let other = store.new_connection().unwrap();
    let waiting = thread::spawn(move || other.get("never"));
    store.set("key", b"value").unwrap();
    drop(server);
    assert!(matches!(waiting.join().unwrap(), Err(Error::Lost { .. })));
    assert!(matches!(store.get("key"), Err(Error::Lost { .. })));
    assert!(matches!(store.get("key"), Err(Error::Lost { .. })), "a lost client stays lost");
    drop(Server::bind((host.as_str(), port)).unwrap());
}

#[test]
fn an_invalid_client_does_not_affect_others() -> Result<()> {
    let (server, store) = pair();
    let mut stray = TcpStream::connect(server.addr()).unwrap();
    stray.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = stray.read_to_end(&mut answer);
    assert!(answer.is_empty());
    store.set("text", b"no number")?;
    assert_eq!(store.get("text")?, b"no number", "a set is not answered; a get is answered after it");
    assert!(matches!(store.new_connection()?.add("text", 1), Err(Error::Lost { .. })));
    assert_eq!(store.get("text")?, b"no number");
    Ok(())
}

/// Bytes of torch's client and server in one call, recorded by `tests/reference/store_bytes.py`.
struct Recorded {
    call: &'static str,
    client: Vec<u8>,
    server: Vec<u8>,
}

fn recorded() -> Vec<Recorded> {
    let bytes = |hex: &str| -> Vec<u8> {
        hex.as_bytes()
            .chunks(2)
            .filter(|pair| pair.len() == 2)
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
            .collect()
    };
    let line = |line: &'static str| {
        let mut words = line.split(' ');
        let mut word = || words.next().unwrap();
        Recorded { call: word(), client: bytes(word()), server: bytes(word()) }
    };
    include_str!("../fixtures/store.txt").lines().map(line).collect()
}

/// Splits a call into its requests with their answers: a `get` waits for its key, then reads its value.
fn exchanges(recorded_call: Recorded) -> Vec<Recorded> {
    if recorded_call.call != "get" {
        return vec![recorded_call];
    }
    let wait_bytes = 1 + 8 + 8 + "/key".len();
    let part = |client: &[u8], server: &[u8]| Recorded { call: "get", client: client.into(), server: server.into() };
    let (wait, get) = recorded_call.client.split_at(wait_bytes);
    vec![part(wait, &recorded_call.server[..1]), part(get, &recorded_call.server[1..])]
}

#[test]
fn our_server_sends_the_bytes_of_torchs_server() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let mut stream = TcpStream::connect(server.addr()).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    for recorded_call in recorded() {
        stream.write_all(&recorded_call.client).unwrap();
        let mut answer = vec![0; recorded_call.server.len()];
        stream.read_exact(&mut answer).unwrap_or_else(|error| panic!("{}: {error}", recorded_call.call));
        assert_eq!(answer, recorded_call.server, "{}", recorded_call.call);
    }
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the server sent more bytes than torch's server");
}

#[test]
fn our_client_sends_the_bytes_of_torchs_client() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let peer = thread::spawn(move || listener.accept().unwrap().0);
    let client = thread::spawn(move || -> Result<()> {
        let store = Client::connect("127.0.0.1", port, LONG)?;
        store.set("key", b"value")?;
        store.get("key")?;
        store.add("count", 5)?;
        store.add("count", -7)?;
        store.check(&["key", "count"])?;
        store.check(&["key", "nothing"])?;
        store.compare_set("key", b"value", b"new")?;
        store.compare_set("key", b"value", b"newer")?;
        store.wait(&["key", "count"])?;
        store.append("key", b"er")?;
        store.num_keys()?;
        assert!(store.delete_key("key")?);
        assert!(!store.delete_key("key")?);
        store.set("empty", b"")?;
        store.with_prefix("group").set("key", b"inner")
    });
    let mut stream = peer.join().unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    // Our client lacks the extended calls. A wait that times out has no fixed time.
    let others = ["wait_too_long", "multi_set", "multi_get", "queue_push", "queue_len", "queue_pop"];
    let recorded_call = recorded().into_iter().filter(|recorded_call| !others.contains(&recorded_call.call));
    for mut recorded_call in recorded_call.flat_map(exchanges) {
        let mut request = vec![0; recorded_call.client.len()];
        stream.read_exact(&mut request).unwrap_or_else(|error| panic!("{}: {error}", recorded_call.call));
        if recorded_call.call == "connect" {
            // The client chooses the ping's number.
            recorded_call.server.copy_from_slice(&request[6..]);
            recorded_call.client[6..].copy_from_slice(&recorded_call.server);
        }
        assert_eq!(request, recorded_call.client, "{}", recorded_call.call);
        stream.write_all(&recorded_call.server).unwrap();
    }
    client.join().unwrap().unwrap();
}

/// Connects with a secret.
fn connect_with(server: &Server, secret: &str) -> Result<Client> {
    Client::connect_with_secret("127.0.0.1", server.port(), LONG, Some(StoreSecret::new(secret)))
}

#[test]
fn a_store_with_a_secret_refuses_clients_without_it() {
    let server = Server::bind_with_secret("127.0.0.1:0", Some(StoreSecret::new("own-secret"))).unwrap();
    let store = connect_with(&server, "own-secret").unwrap();
    store.set("key", b"value").unwrap();
    assert_eq!(store.new_connection().unwrap().get("key").unwrap(), b"value");
    for refused in [Client::connect("127.0.0.1", server.port(), LONG), connect_with(&server, "other-secret")] {
        let error = refused.unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{error}");
        let text = format!("{error} {error:?}");
        assert!(text.contains("CANDLEWICK_STORE_SECRET") && !text.contains("-secret"), "{text}");
    }
    // A store without a secret accepts clients with one.
    let open = Server::bind("127.0.0.1:0").unwrap();
    connect_with(&open, "own-secret").unwrap().set("key", b"value").unwrap();
}

/// First bytes of a connection: validation, a secret, and a ping.
const VALIDATE: [u8; 5] = [0, 0xce, 0xf7, 0x85, 0x3c];

#[test]
fn hostile_connections_get_no_answer_and_change_nothing() {
    let server = Server::bind_with_secret("127.0.0.1:0", Some(StoreSecret::new("s"))).unwrap();
    let store = connect_with(&server, "s").unwrap();
    store.set("key", b"value").unwrap();
    let string = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let list = vec![17];
    let delete = [&[8][..], &string("/key")].concat();
    let set = [&[1][..], &string("/key"), &string("other")].concat();
    let secret = |text: &str| [&[200][..], &string(text)].concat();
    let large = [&[1][..], &string("/key"), &(8u64 << 20).to_le_bytes(), &[0; 20_000]].concat();
    for sent in [
        vec![list.clone()],
        vec![delete.clone()],
        vec![set.clone()],
        vec![secret(""), list.clone()],
        vec![secret("S"), delete],
        vec![secret("ss"), set],
        vec![secret("x"), secret("s"), list.clone()],
        vec![VALIDATE.to_vec(), list],
        vec![large],
        vec![vec![200], u64::MAX.to_le_bytes().to_vec()],
    ] {
        let mut stream = TcpStream::connect(server.addr()).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let _ = stream.write_all(&[VALIDATE.to_vec(), sent.concat()].concat());
        let mut answer = Vec::new();
        // The server may reset the connection, because it has not read all bytes.
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty(), "{sent:?}: {answer:?}");
    }
    assert_eq!(store.get("key").unwrap(), b"value");
}
