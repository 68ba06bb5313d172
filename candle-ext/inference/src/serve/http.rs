//! The HTTP server: routes, authorization and shutdown.

use std::net::TcpListener;
use std::pin::pin;
use std::sync::Arc;

use anyhow::{Context, Result};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, FromRequest, FromRequestParts, Path, Request, State};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::future::select;
use serde_json::{Value as Json, json};
use tokio::runtime::Builder;
use tokio::sync::watch;

use super::api_error::ApiError;
use super::fields::Fields;
use super::response::{ParsedRequest, json_response};
use super::server_state::{ServedModel, ServerState};
use super::{chat, completions};

/// Largest body of a request, in bytes.
const MAX_BODY_BYTES: usize = 16 << 20;

/// Threads that parse and tokenize requests.
const N_PARSERS: usize = 2;

/// Serves requests until the first signal, and completes running ones until the second. `signals` counts them.
pub(super) fn run(listener: TcpListener, state: Arc<ServerState>, signals: watch::Receiver<usize>) -> Result<()> {
    let runtime = Builder::new_current_thread().enable_all().max_blocking_threads(N_PARSERS).build();
    let runtime = runtime.context("failed to start the HTTP server")?;
    let served = runtime.block_on(async {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let (first, second) = (n_signals(signals.clone(), 1), n_signals(signals, 2));
        let served = axum::serve(listener, router(state)).with_graceful_shutdown(first);
        select(pin!(std::future::IntoFuture::into_future(served)), pin!(second)).await;
        std::io::Result::Ok(())
    });
    // Open connections are closed here.
    runtime.shutdown_background();
    served.context("failed to serve HTTP")
}

/// Waits for the n-th signal.
async fn n_signals(mut signals: watch::Receiver<usize>, n: usize) {
    if signals.wait_for(|received| *received >= n).await.is_err() {
        std::future::pending::<()>().await;
    }
}

fn router(state: Arc<ServerState>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(text_completions))
        .fallback(unknown_url)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(state)
}

/// A request with the server's API key, if it has one.
struct Authorized;

impl FromRequestParts<Arc<ServerState>> for Authorized {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &Arc<ServerState>) -> Result<Self, ApiError> {
        let Some(key) = &state.api_key else { return Ok(Self) };
        let given =
            parts.headers.get(header::AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        match given.is_some_and(|given| is_equal_in_constant_time(given, key.as_bytes())) {
            true => Ok(Self),
            false => {
                let problem = "the API key is missing or wrong; send the header `Authorization: Bearer KEY`";
                Err(ApiError::new(StatusCode::UNAUTHORIZED, problem).with_code("invalid_api_key"))
            }
        }
    }
}

/// Compares secrets; the time depends on the length of `a` only.
fn is_equal_in_constant_time(a: &[u8], b: &[u8]) -> bool {
    let differences = a.iter().zip(b.iter().cycle()).fold(0, |sum, (a, b)| sum | (a ^ b));
    a.len() == b.len() && std::hint::black_box(differences) == 0
}

impl FromRequest<Arc<ServerState>> for Fields {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &Arc<ServerState>) -> Result<Self, ApiError> {
        // A web page can send other types to a server on the loopback interface without the user's consent.
        let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let media_type = content_type.and_then(|value| value.split(';').next()).map(str::trim);
        if !media_type.is_some_and(|media_type| media_type.eq_ignore_ascii_case("application/json")) {
            let problem = "the request needs the header `Content-Type: application/json`";
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, problem));
        }
        let length =
            request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        if length.is_some_and(|length: usize| length > MAX_BODY_BYTES) {
            return Err(too_large());
        }
        let body = Bytes::from_request(request, state).await.map_err(|rejection| match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => too_large(),
            status => ApiError::new(status, format!("failed to read the body: {rejection}")),
        })?;
        Self::parse(&body)
    }
}

fn too_large() -> ApiError {
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body has more than {MAX_BODY_BYTES} bytes"))
}

async fn health() -> Response {
    json_response(&json!({"status": "ok"}))
}

async fn models(State(state): State<Arc<ServerState>>, _: Authorized) -> Response {
    let cards: Vec<Json> = state.models.iter().map(|model| card(&state, model)).collect();
    json_response(&json!({"object": "list", "data": cards}))
}

async fn model(
    State(state): State<Arc<ServerState>>,
    _: Authorized,
    Path(name): Path<String>,
) -> Result<Response, ApiError> {
    let model = &state.models[state.find_model(Some(&name))?];
    Ok(json_response(&card(&state, model)))
}

fn card(state: &ServerState, model: &ServedModel) -> Json {
    json!({
        "id": model.name, "parent": model.parent, "object": "model", "created": state.created, "owned_by": "candlewick",
        "max_model_len": state.max_model_len,
    })
}

async fn chat_completions(
    State(state): State<Arc<ServerState>>,
    _: Authorized,
    fields: Fields,
) -> Result<Response, ApiError> {
    respond(state, fields, chat::parse).await
}

async fn text_completions(
    State(state): State<Arc<ServerState>>,
    _: Authorized,
    fields: Fields,
) -> Result<Response, ApiError> {
    respond(state, fields, completions::parse).await
}

/// Parses a request on another thread, and answers it.
async fn respond(
    state: Arc<ServerState>,
    fields: Fields,
    parse: fn(Fields, &ServerState) -> Result<ParsedRequest, ApiError>,
) -> Result<Response, ApiError> {
    let of_parser = Arc::clone(&state);
    let parsed = tokio::task::spawn_blocking(move || parse(fields, &of_parser)).await;
    let parsed = parsed.map_err(|error| ApiError::internal(&error.into()))??;
    match parsed.stream {
        None => Ok(json_response(&parsed.complete(&state).await?)),
        Some(options) => {
            let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
            Ok((headers, Body::from_stream(parsed.stream(options, &state)?)).into_response())
        }
    }
}

async fn unknown_url(method: Method, uri: Uri) -> ApiError {
    let problem = format!(
        "{method} {} is not served; /v1/chat/completions, /v1/completions, /v1/models and /health are",
        uri.path()
    );
    ApiError::new(StatusCode::NOT_FOUND, problem).with_code("unknown_url")
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, format!("{} does not accept {method}", uri.path()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_equal_if_all_bytes_are() {
        let is_equal = is_equal_in_constant_time;
        assert!(is_equal(b"key", b"key") && is_equal(b"", b""));
        assert!(!is_equal(b"key", b"kez") && !is_equal(b"key", b"keykey") && !is_equal(b"keykey", b"key"));
        assert!(!is_equal(b"", b"key"));
    }
}
