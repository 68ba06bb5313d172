//! Errors in OpenAI's format.

use std::borrow::Cow;

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value as Json, json};

use super::access_log::RefusalReason;

/// Error of a request, as OpenAI's clients read it.
#[derive(Clone, Debug)]
pub(super) struct ApiError {
    status: StatusCode,
    message: String,
    /// Field of the request.
    param: Option<Cow<'static, str>>,
    code: Option<&'static str>,
}

impl ApiError {
    /// Creates an error about a field of the request.
    pub(super) fn field(param: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    /// Creates an error about the request.
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None }
    }

    /// Creates an error of the server. Its response or stream logs it, so the caller does not wait for stderr.
    pub(super) fn internal(error: &anyhow::Error) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, format!("{error:#}"))
    }

    /// Creates the error of a request that a stopping server does not complete.
    pub(super) fn stopping() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "the server is stopping").with_code("server_stopping")
    }

    /// Sets OpenAI's error code.
    pub(super) fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// Returns the HTTP status.
    pub(super) fn status(&self) -> StatusCode {
        self.status
    }

    /// Returns the message.
    pub(super) fn message(&self) -> &str {
        &self.message
    }

    /// Returns the error object.
    pub(super) fn json(&self) -> Json {
        let kind = match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = self.json().to_string();
        let mut response = (self.status, [(header::CONTENT_TYPE, "application/json")], body).into_response();
        let header = match self.status {
            StatusCode::TOO_MANY_REQUESTS => Some((header::RETRY_AFTER, "1")),
            StatusCode::UNAUTHORIZED => Some((header::WWW_AUTHENTICATE, "Bearer")),
            _ => None,
        };
        if let Some((name, value)) = header {
            response.headers_mut().insert(name, header::HeaderValue::from_static(value));
        }
        response.extensions_mut().insert(RefusalReason(self.message));
        response
    }
}
