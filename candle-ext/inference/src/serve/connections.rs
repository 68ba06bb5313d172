//! Connections of the HTTP server: their number, their deadlines, and their end when the server stops.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::deadline_stream::DeadlineStream;
use axum::Router;
use axum::extract::Request;
use axum::response::Response;
use axum::serve::Listener;
use futures_util::future::{Either, select};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

/// Deadlines of connections.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnectionDeadlines {
    /// Time until the head of a request is complete. An idle connection is closed after it, too.
    pub(super) head: Duration,
    /// Time of a response without progress, because the client does not read it.
    pub(super) write: Duration,
    /// Time of running requests after the first signal.
    pub(super) shutdown: Duration,
}

/// Address of the client, in a request's extensions.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClientAddress(pub(super) SocketAddr);

/// Maximum number of open connections. Others wait in the system's queue.
const MAX_CONNECTIONS: usize = 1024;

/// Buffer of a connection, and largest head of a request, in bytes.
const MAX_BUFFER_BYTES: usize = 64 << 10;

/// Serves connections until the first signal, and running requests until the second or the deadline. `signals` counts
/// the signals.
pub(super) async fn serve_connections(
    mut listener: TcpListener,
    router: Router,
    deadlines: ConnectionDeadlines,
    signals: watch::Receiver<usize>,
) {
    let mut connections = JoinSet::new();
    let mut first = pin!(n_signals(signals.clone(), 1));
    loop {
        while connections.try_join_next().is_some() {}
        if connections.len() >= MAX_CONNECTIONS {
            match select(pin!(connections.join_next()), first.as_mut()).await {
                Either::Left(_) => continue,
                Either::Right(_) => break,
            }
        }
        match select(pin!(Listener::accept(&mut listener)), first.as_mut()).await {
            Either::Left(((stream, client), _)) => {
                let service = TowerToHyperService::new(router.clone());
                let requests = move |mut request: Request<Incoming>| {
                    request.extensions_mut().insert(ClientAddress(client));
                    service.call(request)
                };
                connections.spawn(serve_connection(stream, requests, deadlines, signals.clone()));
            }
            Either::Right(_) => break,
        }
    }
    drop(listener);
    let ended = async { while connections.join_next().await.is_some() {} };
    let (second, deadline) = (pin!(n_signals(signals, 2)), pin!(sleep(deadlines.shutdown)));
    select(pin!(ended), select(second, deadline)).await;
}

/// Serves a connection. After the first signal, it ends with the running request, or at once without one.
async fn serve_connection<F>(
    stream: TcpStream,
    answer: impl Fn(Request<Incoming>) -> F,
    deadlines: ConnectionDeadlines,
    signals: watch::Receiver<usize>,
) where
    F: Future<Output = Result<Response, Infallible>>,
{
    let _ = stream.set_nodelay(true);
    let has_request = Arc::new(AtomicBool::new(false));
    let service = service_fn(|request| {
        has_request.store(true, Ordering::Relaxed);
        answer(request)
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(deadlines.head).max_buf_size(MAX_BUFFER_BYTES);
    let stream = TokioIo::new(DeadlineStream::new(stream, deadlines.write));
    let mut connection = pin!(builder.serve_connection(stream, service));
    if let Either::Right(_) = select(connection.as_mut(), pin!(n_signals(signals, 1))).await {
        // hyper closes an idle connection, but waits for the rest of the first head.
        if has_request.load(Ordering::Relaxed) {
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
        }
    }
}

/// Waits for the n-th signal.
pub(super) async fn n_signals(mut signals: watch::Receiver<usize>, n: usize) {
    if signals.wait_for(|received| *received >= n).await.is_err() {
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::{Read, Write};
    use std::thread;
    use std::time::Instant;

    use axum::routing::get;
    use tokio::runtime::Builder;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(20);
    const DEADLINES: ConnectionDeadlines = ConnectionDeadlines { head: LONG, write: LONG, shutdown: LONG };

    /// Starts a server whose `/endless` is never answered, and whose `/large` no socket buffers. Returns its address, its signals, and a thread that ends with it.
    fn start(deadlines: ConnectionDeadlines) -> (SocketAddr, watch::Sender<usize>, thread::JoinHandle<()>) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new()
            .route("/", get(|| async { "done" }))
            .route("/large", get(|| async { "a".repeat(64 << 20) }))
            .route("/endless", get(std::future::pending::<()>));
        let (signals, counted) = watch::channel(0);
        let server = thread::spawn(move || {
            Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
                let listener = TcpListener::from_std(listener).unwrap();
                serve_connections(listener, router, deadlines, counted).await;
            });
        });
        (address, signals, server)
    }

    /// Sends `bytes`, and returns the connection.
    fn send(address: SocketAddr, bytes: &str) -> std::net::TcpStream {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(bytes.as_bytes()).unwrap();
        stream
    }

    /// Returns the received text after the server has closed the connection.
    fn read(mut stream: std::net::TcpStream) -> String {
        let mut text = Vec::new();
        // The server resets a connection whose bytes it has not read.
        if let Err(error) = stream.read_to_end(&mut text) {
            let is_open = matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut);
            assert!(!is_open, "the connection is open after {LONG:?}");
        }
        String::from_utf8(text).unwrap()
    }

    const HALF_HEAD: &str = "POST / HTTP/1.1\r\nHost: a\r\n";

    #[test]
    fn a_connection_without_a_complete_head_is_closed_after_the_deadline() {
        let (address, _signals, _server) = start(ConnectionDeadlines { head: SHORT, ..DEADLINES });
        for sent in ["", "G", HALF_HEAD] {
            let answer = read(send(address, sent));
            assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408"), "{sent:?}: {answer}");
        }
        // The connection is idle after its request.
        let (address, _signals, _server) = start(ConnectionDeadlines { head: Duration::from_secs(1), ..DEADLINES });
        assert!(read(send(address, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")).ends_with("done"));
    }

    #[test]
    fn incomplete_requests_do_not_delay_the_end_of_the_server() {
        let (address, signals, server) = start(ConnectionDeadlines { shutdown: 60 * LONG, ..DEADLINES });
        let half: Vec<_> = ["", "G", HALF_HEAD].map(|sent| send(address, sent)).into();
        let mut idle = send(address, "GET / HTTP/1.1\r\nHost: a\r\n\r\n");
        let mut answer = [0; 12];
        idle.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"HTTP/1.1 200");
        signals.send_modify(|n| *n += 1);
        let stopped = Instant::now();
        server.join().unwrap();
        assert!(stopped.elapsed() < LONG / 2);
        drop(half);
    }

    #[test]
    fn a_client_that_does_not_read_its_response_loses_the_connection() {
        let deadlines = ConnectionDeadlines { write: SHORT, shutdown: 60 * LONG, ..DEADLINES };
        let (address, signals, server) = start(deadlines);
        let mut unread = send(address, "GET /large HTTP/1.1\r\nHost: a\r\n\r\n");
        unread.read_exact(&mut [0]).unwrap();
        signals.send_modify(|n| *n += 1);
        let stopped = Instant::now();
        server.join().unwrap();
        assert!(stopped.elapsed() < LONG / 2);
        assert!(read(unread).len() < 64 << 20);
    }

    #[test]
    fn a_running_request_ends_with_the_deadline_or_the_second_signal() {
        for (shutdown, n_signals) in [(SHORT, 1), (60 * LONG, 2)] {
            let (address, signals, server) = start(ConnectionDeadlines { shutdown, ..DEADLINES });
            let endless = send(address, "GET /endless HTTP/1.1\r\nHost: a\r\n\r\n");
            // The answer shows that the server has accepted the earlier connection.
            assert!(read(send(address, "GET / HTTP/1.0\r\n\r\n")).ends_with("done"));
            signals.send_modify(|n| *n += n_signals);
            let stopped = Instant::now();
            server.join().unwrap();
            assert!(stopped.elapsed() < LONG / 2);
            assert_eq!(read(endless), "");
        }
    }
}
