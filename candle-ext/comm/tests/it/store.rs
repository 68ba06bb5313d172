//! The store's two ends, through the front door: with each other, and byte for byte as torch speaks.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use candlewick_comm::store::{Client, Error, Result, Server};

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(30);

/// An address of this process's own, at which nobody listens: other processes use 127.0.0.1.
fn lonely() -> (String, u16) {
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
    let other = store.reconnect()?;
    let waiting = thread::spawn(move || other.get("late"));
    store.set("late", b"here")?;
    assert_eq!(waiting.join().unwrap()?, b"here");
    Ok(())
}

#[test]
fn a_wait_that_is_too_long_names_its_keys_and_leaves_the_client_usable() -> Result<()> {
    let (_server, store) = pair();
    store.set("a", b"1")?;
    let error = store.wait_for(&["a", "b"], SHORT).unwrap_err();
    assert_eq!(error.to_string(), "see a, b in the store within 30ms");
    store.set("b", b"2")?;
    store.wait(&["a", "b"])?;
    assert_eq!(store.get("b")?, b"2");
    Ok(())
}

#[test]
fn a_key_that_comes_while_the_wait_is_given_up_has_come() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let peer = thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        let mut asked = |n: usize| {
            let mut bytes = vec![0; n];
            stream.read_exact(&mut bytes).unwrap();
            bytes
        };
        let hello = asked(10);
        let nonce = hello[6..].to_vec();
        (&stream).write_all(&nonce).unwrap();
        let asked = |n: usize| (&stream).read_exact(&mut vec![0; n]).unwrap();
        asked(1 + 8 + 8 + "/k".len());
        asked(1);
        // The end of the wait was on its way when the wait was cancelled: both are answered.
        (&stream).write_all(&[0, 1]).unwrap();
        asked(1 + 8 + "/n".len() + 8);
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
            let own = store.reconnect().unwrap();
            scope.spawn(move || (0..100).for_each(|_| assert!(own.add("count", 1).unwrap() > 0)));
        }
    });
    assert_eq!(store.get("count")?, b"800");
    Ok(())
}

#[test]
fn a_client_may_come_before_its_server() -> Result<()> {
    let (host, port) = lonely();
    let there = host.clone();
    let early = thread::spawn(move || Client::connect(&there, port, LONG));
    let _server = Server::bind((host.as_str(), port))?;
    early.join().unwrap()?.set("key", b"value")
}

#[test]
fn nobody_there_is_said_after_the_time_out() {
    let (host, port) = lonely();
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
fn a_server_that_is_stopping_is_tried_again() {
    let port = peer([|mut stream| stream.read_exact(&mut [0; 10]).unwrap(), drop, |mut stream| welcome(&mut stream)]);
    Client::connect("127.0.0.1", port, LONG).unwrap();
}

#[test]
fn a_silent_server_is_given_up_in_time() {
    let port = peer([std::mem::forget]);
    let began = Instant::now();
    let error = Client::connect("127.0.0.1", port, SHORT).unwrap_err();
    assert!(matches!(error, Error::Unanswered { .. }) && began.elapsed() < LONG / 2, "{error}");
}

#[test]
fn a_server_that_takes_nothing_is_given_up_in_time() {
    let deaf = |mut stream: TcpStream| {
        welcome(&mut stream);
        // Kept open, and never read from again.
        std::mem::forget(stream);
    };
    let store = Client::connect("127.0.0.1", peer([deaf, deaf]), LONG).unwrap().reconnect_within(SHORT).unwrap();
    let began = Instant::now();
    let error = (0..16).find_map(|_| store.set("large", &vec![0; 8 << 20]).err()).unwrap();
    assert!(matches!(error, Error::Lost { .. }) && began.elapsed() < LONG / 2, "{error}");
}

#[test]
fn what_no_server_takes_is_refused_before_it_is_sent() -> Result<()> {
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
fn another_service_on_the_port_is_told_apart() {
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
fn a_dropped_server_ends_its_clients_and_frees_its_port() {
    let (host, port) = lonely();
    let server = Server::bind((host.as_str(), port)).unwrap();
    let store = Client::connect(&host, port, LONG).unwrap();
    let other = store.reconnect().unwrap();
    let waiting = thread::spawn(move || other.get("never"));
    store.set("key", b"value").unwrap();
    drop(server);
    assert!(matches!(waiting.join().unwrap(), Err(Error::Lost { .. })));
    assert!(matches!(store.get("key"), Err(Error::Lost { .. })));
    assert!(matches!(store.get("key"), Err(Error::Lost { .. })), "a lost client stays lost");
    drop(Server::bind((host.as_str(), port)).unwrap());
}

#[test]
fn a_client_that_talks_nonsense_harms_nobody_else() -> Result<()> {
    let (server, store) = pair();
    let mut stray = TcpStream::connect(server.addr()).unwrap();
    stray.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = stray.read_to_end(&mut answer);
    assert!(answer.is_empty());
    store.set("text", b"no number")?;
    assert_eq!(store.get("text")?, b"no number", "a set is not answered; a get is answered after it");
    assert!(matches!(store.reconnect()?.add("text", 1), Err(Error::Lost { .. })));
    assert_eq!(store.get("text")?, b"no number");
    Ok(())
}

/// What torch's client and server said in one call, recorded by `tests/reference/store_bytes.py`.
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

/// A call's questions with their answers: a `get` waits for its key, then asks for its value.
fn exchanges(said: Recorded) -> Vec<Recorded> {
    if said.call != "get" {
        return vec![said];
    }
    let wait_bytes = 1 + 8 + 8 + "/key".len();
    let part = |client: &[u8], server: &[u8]| Recorded { call: "get", client: client.into(), server: server.into() };
    let (wait, get) = said.client.split_at(wait_bytes);
    vec![part(wait, &said.server[..1]), part(get, &said.server[1..])]
}

#[test]
fn our_server_answers_torchs_client_as_torchs_does() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let mut stream = TcpStream::connect(server.addr()).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    for said in recorded() {
        stream.write_all(&said.client).unwrap();
        let mut answer = vec![0; said.server.len()];
        stream.read_exact(&mut answer).unwrap_or_else(|error| panic!("{}: {error}", said.call));
        assert_eq!(answer, said.server, "{}", said.call);
    }
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap(), 0, "more was answered than torch's server does");
}

#[test]
fn our_client_asks_torchs_server_as_torchs_does() {
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
    // Not ours: the extended calls, and a wait that is given up (its moment is not ours to choose here).
    let others = ["wait_too_long", "multi_set", "multi_get", "queue_push", "queue_len", "queue_pop"];
    let said = recorded().into_iter().filter(|said| !others.contains(&said.call));
    for mut said in said.flat_map(exchanges) {
        let mut asked = vec![0; said.client.len()];
        stream.read_exact(&mut asked).unwrap_or_else(|error| panic!("{}: {error}", said.call));
        if said.call == "connect" {
            // The number to be sent back is the client's choice.
            said.server.copy_from_slice(&asked[6..]);
            said.client[6..].copy_from_slice(&said.server);
        }
        assert_eq!(asked, said.client, "{}", said.call);
        stream.write_all(&said.server).unwrap();
    }
    client.join().unwrap().unwrap();
}
