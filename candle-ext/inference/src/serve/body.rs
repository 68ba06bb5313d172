//! Bodies of requests: their type, their size, their deadline, and the memory of all of them.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use futures_util::StreamExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::api_error::ApiError;

/// Body of a request. It holds its part of [`RequestBodyMemory`].
pub(super) struct RequestBody {
    pub(super) bytes: Vec<u8>,
    _reserved: Option<OwnedSemaphorePermit>,
}

/// Memory of the bodies of all requests.
pub(super) struct RequestBodyMemory {
    /// Free bytes.
    free: Arc<Semaphore>,
    /// Time until a body is complete.
    deadline: Duration,
}

/// Largest body of a request, in bytes.
const MAX_BODY_BYTES: usize = 16 << 20;

/// Largest size of all bodies, in bytes.
const MAX_ALL_BODIES_BYTES: usize = 64 << 20;

/// Time until a body is complete.
const BODY_DEADLINE: Duration = Duration::from_secs(60);

impl Default for RequestBodyMemory {
    fn default() -> Self {
        Self { free: Arc::new(Semaphore::new(MAX_ALL_BODIES_BYTES)), deadline: BODY_DEADLINE }
    }
}

impl RequestBodyMemory {
    /// Reads a body within the deadline. `length` is its size, if the request has it.
    pub(super) async fn read(&self, body: Body, length: Option<usize>) -> Result<RequestBody, ApiError> {
        if length.is_some_and(|length| length > MAX_BODY_BYTES) {
            return Err(too_large());
        }
        let read = timeout(self.deadline, self.read_all(body, length.unwrap_or_default()));
        read.await.unwrap_or_else(|_| {
            let problem = format!("the body is incomplete after {} seconds", self.deadline.as_secs());
            Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, problem))
        })
    }

    /// Reads a body. Reserves memory for bytes that have arrived, not for announced ones.
    async fn read_all(&self, body: Body, length: usize) -> Result<RequestBody, ApiError> {
        let mut read = RequestBody { bytes: Vec::with_capacity(length), _reserved: None };
        let mut chunks = body.into_data_stream();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk
                .map_err(|error| ApiError::new(StatusCode::BAD_REQUEST, format!("failed to read the body: {error}")))?;
            if read.bytes.len() + chunk.len() > MAX_BODY_BYTES {
                return Err(too_large());
            }
            let reserved = Arc::clone(&self.free).try_acquire_many_owned(chunk.len() as u32).map_err(|_| {
                let problem = "the bodies of all requests take too much memory; send the request again later";
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, problem).with_code("too_many_bodies")
            })?;
            match &mut read._reserved {
                Some(earlier) => earlier.merge(reserved),
                none => *none = Some(reserved),
            }
            read.bytes.extend_from_slice(&chunk);
        }
        Ok(read)
    }
}

/// Rejects types that a web page may send without a preflight request.
pub(super) fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let media_type = content_type.and_then(|value| value.split(';').next()).map(str::trim);
    match media_type.is_some_and(|media_type| media_type.eq_ignore_ascii_case("application/json")) {
        true => Ok(()),
        false => {
            let problem = "the request needs the header `Content-Type: application/json`";
            Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, problem))
        }
    }
}

fn too_large() -> ApiError {
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body has more than {MAX_BODY_BYTES} bytes"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::convert::Infallible;

    use futures_util::stream;
    use tokio::runtime::Builder;

    use super::*;

    fn of_chunks(chunks: Vec<Vec<u8>>) -> Body {
        Body::from_stream(stream::iter(chunks.into_iter().map(Ok::<_, Infallible>)))
    }

    #[track_caller]
    fn message(read: Result<RequestBody, ApiError>) -> String {
        read.err().unwrap().json()["error"]["message"].as_str().unwrap().to_owned()
    }

    #[test]
    fn bodies_are_bounded_one_by_one_and_together() {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let bodies = RequestBodyMemory { free: Arc::new(Semaphore::new(10)), deadline: Duration::from_secs(60) };
        let read = |chunks| runtime.block_on(bodies.read(of_chunks(chunks), None));
        let first = read(vec![vec![1; 3], vec![], vec![2; 4]]).unwrap();
        assert_eq!(first.bytes, [1, 1, 1, 2, 2, 2, 2]);
        assert!(message(read(vec![vec![0; 3], vec![0; 1]])).contains("too much memory"));
        // A refused body, and one that has been parsed, free their memory.
        drop(first);
        assert_eq!(read(vec![vec![0; 10]]).unwrap().bytes.len(), 10);
        let bodies = RequestBodyMemory::default();
        let chunk = vec![0; MAX_BODY_BYTES / 2 + 1];
        assert!(message(runtime.block_on(bodies.read(of_chunks(vec![chunk; 2]), None))).contains("16777216 bytes"));
        assert!(message(runtime.block_on(bodies.read(Body::empty(), Some(MAX_BODY_BYTES + 1)))).contains("more than"));
    }

    #[test]
    fn an_incomplete_body_is_refused_after_the_deadline() {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let bodies = RequestBodyMemory { free: Arc::new(Semaphore::new(10)), deadline: Duration::from_millis(5) };
        let chunks = stream::iter([Ok::<_, Infallible>(vec![0u8; 3])]).chain(stream::pending());
        let refused = message(runtime.block_on(bodies.read(Body::from_stream(chunks), Some(4))));
        assert!(refused.contains("incomplete"), "{refused}");
        assert_eq!(bodies.free.available_permits(), 10);
    }
}
