//! Trying again when the Hub is busy or out of reach, for as long as it asks and no longer.

use std::time::Duration;

use super::{HubError, HubSettings, RepoId};

/// Why a request came to nothing, before it is known what that means.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The server answered with a status that is none of success.
    Status(Refusal),
    /// No answer came.
    Lost(String),
    /// The answer began and broke off.
    Cut(String),
    /// The answer arrives too slowly to wait for it.
    Slow(String),
    /// The answer is not what was announced.
    Wrong(String),
    /// Already explained.
    Told(HubError),
}

/// An answer that refuses.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) status: u16,
    /// The Hub's `X-Error-Code`: `RepoNotFound`, `GatedRepo`, ...
    pub(crate) code: String,
    pub(crate) message: String,
    pub(crate) url: String,
    pub(crate) wait: Option<Duration>,
}

/// What was asked, to tell which thing a 404 means.
pub(crate) struct Asked<'a> {
    pub(crate) repo: &'a RepoId,
    pub(crate) revision: &'a str,
    pub(crate) file: Option<&'a str>,
}

/// Calls `attempt` until it succeeds, fails for good, or has been tried often enough.
pub(crate) fn patiently<T>(
    settings: &HubSettings,
    asked: &Asked,
    mut attempt: impl FnMut() -> Result<T, Failure>,
) -> Result<T, HubError> {
    let mut n_tries = 0;
    loop {
        n_tries += 1;
        let failure = match attempt() {
            Ok(value) => return Ok(value),
            Err(failure) => failure,
        };
        let wait = failure.wait().unwrap_or(settings.backoff * (1 << (n_tries - 1).min(10)));
        let is_last = n_tries >= settings.n_tries || wait > settings.longest_wait;
        if is_last || !failure.may_pass() {
            return Err(explain(settings, asked, failure, n_tries));
        }
        tracing::info!("{} is busy or out of reach, next try in {wait:?}", settings.redact(&settings.endpoint));
        std::thread::sleep(wait);
    }
}

impl Failure {
    fn may_pass(&self) -> bool {
        match self {
            Self::Status(refusal) => matches!(refusal.status, 408 | 429 | 500 | 502 | 503 | 504),
            Self::Lost(_) | Self::Cut(_) => true,
            Self::Slow(_) | Self::Wrong(_) | Self::Told(_) => false,
        }
    }

    fn wait(&self) -> Option<Duration> {
        match self {
            Self::Status(refusal) => refusal.wait,
            _ => None,
        }
    }
}

fn explain(settings: &HubSettings, asked: &Asked, failure: Failure, n_tries: usize) -> HubError {
    let id = asked.repo.to_string();
    let redact = |text: String| settings.redact(&text);
    match failure {
        Failure::Told(error) => error,
        Failure::Lost(reason) => {
            HubError::Unreachable { endpoint: redact(settings.endpoint.clone()), reason: redact(reason) }
        }
        Failure::Cut(problem) | Failure::Slow(problem) => {
            HubError::Interrupted { id, file: name_of(asked), problem: redact(problem) }
        }
        Failure::Wrong(problem) => HubError::Unverified { id, file: name_of(asked), problem: redact(problem) },
        Failure::Status(refusal) => match refusal.status {
            401 | 403 if refusal.code != "RepoNotFound" => {
                let (status, advice) = (refusal.status, redact(advice(settings, asked, &refusal)));
                HubError::Refused { id, status, advice }
            }
            401 | 404 => not_found(asked, &refusal),
            429 => HubError::RateLimited { id, n_tries, wait: refusal.wait },
            status => {
                let message = match refusal.message.as_str() {
                    "" => String::new(),
                    message => redact(format!(": {message}")),
                };
                HubError::Status { id, url: redact(refusal.url), status, message }
            }
        },
    }
}

fn name_of(asked: &Asked) -> String {
    asked.file.unwrap_or("the listing").to_owned()
}

fn not_found(asked: &Asked, refusal: &Refusal) -> HubError {
    let (id, revision) = (asked.repo.to_string(), asked.revision.to_owned());
    match (refusal.code.as_str(), asked.file) {
        ("EntryNotFound", Some(file)) => HubError::FileNotFound { id, revision, file: file.into() },
        ("RevisionNotFound", _) => HubError::RevisionNotFound { id, revision },
        ("RepoNotFound", _) | (_, None) => HubError::RepoNotFound { id, kind: asked.repo.kind() },
        (_, Some(file)) => HubError::FileNotFound { id, revision, file: file.into() },
    }
}

fn advice(settings: &HubSettings, asked: &Asked, refusal: &Refusal) -> String {
    let page = format!("{}/{}", settings.endpoint, asked.repo.web_path());
    let said = match refusal.message.as_str() {
        "" => String::new(),
        message => format!(" (the server says: {message})"),
    };
    match (settings.token.is_some(), refusal.status) {
        (false, _) => format!(
            "it is gated or private: accept its terms at {page} and set HF_TOKEN to a token of \
             that account{said}"
        ),
        (true, 401) => format!("HF_TOKEN is not accepted: check that it is complete and not expired{said}"),
        (true, _) => format!(
            "this token has no access: accept the terms at {page} with its account, and check \
             that the token may read gated repositories{said}"
        ),
    }
}
