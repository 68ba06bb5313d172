//! The HTTP server: routes, authorization and shutdown.

use std::net::TcpListener;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Path, Request, State};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use candlewick_comm::store::is_equal_in_constant_time;
use futures_util::future::{Either, select};
use serde_json::{Value as Json, json};
use tokio::runtime::Builder;

use super::api_error::ApiError;
use super::body::{RequestBody, check_content_type};
use super::connections::{ClientAddress, ConnectionDeadlines, n_signals, serve_connections};
use super::fields::Fields;
use super::metrics::{METRICS_CONTENT_TYPE, ServedRoute};
use super::origin::{allow_origin, preflight};
use super::request_record::RequestRecord;
use super::response::{ParsedRequest, json_response};
use super::server_state::{ServedModel, ServerState};
use super::{chat, completions};

/// Threads that parse and tokenize requests.
const N_PARSERS: usize = 2;

/// Smallest size of a large body, in bytes.
const LARGE_BODY_BYTES: usize = 64 << 10;

/// Time until the head of a request is complete.
const HEAD_DEADLINE: Duration = Duration::from_secs(30);

/// Time of a response without progress, because the client does not read it.
const WRITE_DEADLINE: Duration = Duration::from_secs(60);

/// Serves requests until the first signal, and completes running ones until the second or the deadline.
pub(super) fn run(listener: TcpListener, state: Arc<ServerState>) -> Result<()> {
    let runtime = Builder::new_current_thread().enable_all().max_blocking_threads(N_PARSERS).build();
    let runtime = runtime.context("failed to start the HTTP server")?;
    let served = runtime.block_on(async {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let deadlines =
            ConnectionDeadlines { head: HEAD_DEADLINE, write: WRITE_DEADLINE, shutdown: state.shutdown_timeout };
        let signals = state.signals.clone();
        serve_connections(listener, router(state), deadlines, signals).await;
        std::io::Result::Ok(())
    });
    // Open connections are closed here.
    runtime.shutdown_background();
    served.context("failed to serve HTTP")
}

fn router(state: Arc<ServerState>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(text_completions))
        .fallback(unknown_url)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(Arc::clone(&state), checked))
        .with_state(state)
}

/// A request with the server's API key, if it has one.
struct Authorized;

impl FromRequest<Arc<ServerState>> for RequestBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &Arc<ServerState>) -> Result<Self, ApiError> {
        check_content_type(request.headers())?;
        let length = request.headers().get(header::CONTENT_LENGTH);
        let length = length.and_then(|length| length.to_str().ok()?.parse().ok());
        let body = pin!(state.bodies.read(request.into_body(), length));
        match select(body, pin!(n_signals(state.signals.clone(), 1))).await {
            Either::Left((body, _)) => body,
            Either::Right(_) => Err(ApiError::stopping()),
        }
    }
}

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

/// Checks the host and origin of a request, and logs it.
async fn checked(State(state): State<Arc<ServerState>>, mut request: Request, next: Next) -> Response {
    let (method, uri) = (request.method().clone(), request.uri().clone());
    let client = request.extensions().get::<ClientAddress>().copied();
    let record = RequestRecord::begin(&state.reporter, ServedRoute::of(uri.path()), client);
    request.extensions_mut().insert(record.clone());
    let listed = state.origins.listed(request.headers());
    let mut response = match state.origins.check(&uri, request.headers()) {
        Err(error) => error.into_response(),
        Ok(()) => match listed.as_ref().and_then(|_| preflight(&method)) {
            Some(response) => response,
            None => next.run(request).await,
        },
    };
    if let Some(origin) = listed {
        allow_origin(&mut response, origin);
    }
    record.set_status(response.status());
    if let Some(reason) = response.extensions().get() {
        state.log.log(client.as_ref(), (&method, &uri), response.status(), reason, &state.reporter.log);
    }
    response
}

async fn health() -> Response {
    json_response(&json!({"status": "ok"}))
}

async fn metrics(State(state): State<Arc<ServerState>>, _: Authorized) -> Response {
    ([(header::CONTENT_TYPE, METRICS_CONTENT_TYPE)], state.metrics()).into_response()
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
    Extension(record): Extension<RequestRecord>,
    body: RequestBody,
) -> Result<Response, ApiError> {
    respond(state, record, body, chat::parse).await
}

async fn text_completions(
    State(state): State<Arc<ServerState>>,
    _: Authorized,
    Extension(record): Extension<RequestRecord>,
    body: RequestBody,
) -> Result<Response, ApiError> {
    respond(state, record, body, completions::parse).await
}

/// Parses a request on another thread, and answers it.
async fn respond(
    state: Arc<ServerState>,
    record: RequestRecord,
    body: RequestBody,
    parse: fn(Fields, &ServerState) -> Result<ParsedRequest, ApiError>,
) -> Result<Response, ApiError> {
    let of_parser = Arc::clone(&state);
    let is_large = body.bytes.len() >= LARGE_BODY_BYTES;
    let permit = if is_large { Arc::clone(&state.large_parser).acquire_owned().await.ok() } else { None };
    let parsed = tokio::task::spawn_blocking(move || {
        // A cancelled request holds its memory and its permit until the thread is free.
        let (body, _permit) = (body, permit);
        parse(Fields::parse(&body.bytes)?, &of_parser)
    })
    .await;
    let mut parsed = parsed.map_err(|error| ApiError::internal(&error.into()))??;
    parsed.compile_grammar(&state).await?;
    match parsed.stream {
        None => Ok(json_response(&parsed.complete(&state, &record).await?)),
        Some(options) => {
            let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
            Ok((headers, Body::from_stream(parsed.stream(options, &state, record)?)).into_response())
        }
    }
}

async fn unknown_url(method: Method, uri: Uri) -> ApiError {
    let problem = format!(
        "{method} {} is not served; /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics are",
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
