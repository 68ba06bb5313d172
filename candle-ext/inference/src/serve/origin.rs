//! Protection of a loopback server from web pages: the headers `Host` and `Origin` of a request.
//!
//! A page in the user's browser reaches 127.0.0.1 under a name of its own (DNS rebinding). The browser then sends that name as
//! `Host`.

use std::net::IpAddr;

use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};

use super::api_error::ApiError;

/// Hosts and origins that a server answers.
#[derive(Clone, Debug)]
pub(super) struct OriginPolicy {
    /// True if the server listens on a loopback address. Only then are hosts and unlisted origins checked.
    pub(super) is_loopback: bool,
    /// Further host names, without a port.
    pub(super) hosts: Vec<String>,
    /// Origins of web pages, such as `https://chat.example.org`.
    pub(super) origins: Vec<String>,
}

impl OriginPolicy {
    /// Fails if a request is for another host, or from a web page that is not allowed.
    pub(super) fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), ApiError> {
        if !self.is_loopback {
            return Ok(());
        }
        let hosts = headers.get_all(header::HOST).iter().map(|host| host.to_str().unwrap_or("?"));
        let of_uri = uri.authority().map(|authority| authority.as_str());
        if let Some(host) = hosts.chain(of_uri).find(|host| !self.allows_host(host)) {
            let problem =
                format!("this server does not answer requests for the host {host}; start it with --allowed-hosts");
            return Err(ApiError::new(StatusCode::FORBIDDEN, problem).with_code("host_not_allowed"));
        }
        let mut origins = headers.get_all(header::ORIGIN).iter().map(|origin| origin.to_str().unwrap_or("?"));
        if let Some(origin) = origins.find(|origin| !self.allows_origin(origin)) {
            let problem = format!(
                "this server does not answer requests of web pages of {origin}; start it with --allowed-origins"
            );
            return Err(ApiError::new(StatusCode::FORBIDDEN, problem).with_code("origin_not_allowed"));
        }
        Ok(())
    }

    /// Returns true for a name of this machine or of the options. DNS rebinding needs a name, so any address is allowed.
    fn allows_host(&self, host: &str) -> bool {
        let name = without_port(host);
        is_loopback(name) || address(name).is_some() || is_reserved(name) || self.is_named(name)
    }

    fn allows_origin(&self, origin: &str) -> bool {
        let host = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://")).map(without_port);
        self.lists(origin) || host.is_some_and(|name| is_loopback(name) || self.is_named(name))
    }

    fn is_named(&self, name: &str) -> bool {
        self.hosts.iter().any(|allowed| allowed.eq_ignore_ascii_case(name))
    }

    fn lists(&self, origin: &str) -> bool {
        self.origins.iter().any(|allowed| allowed == "*" || allowed.eq_ignore_ascii_case(origin))
    }

    /// Returns the origin of a request, if it is a listed one.
    pub(super) fn listed(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        headers.get(header::ORIGIN).filter(|origin| origin.to_str().is_ok_and(|origin| self.lists(origin))).cloned()
    }
}

/// Returns the answer to the preflight request of a listed origin's page.
pub(super) fn preflight(method: &Method) -> Option<Response> {
    let headers = [
        (header::ACCESS_CONTROL_ALLOW_METHODS, "GET, POST"),
        (header::ACCESS_CONTROL_ALLOW_HEADERS, "authorization, content-type, *"),
    ];
    (method == Method::OPTIONS).then(|| (StatusCode::NO_CONTENT, headers).into_response())
}

/// Lets the page of a listed origin read a response.
pub(super) fn allow_origin(response: &mut Response, origin: HeaderValue) {
    response.headers_mut().insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    response.headers_mut().insert(header::VARY, HeaderValue::from_static("Origin"));
}

/// Removes the port of `name:port`, `[::1]:port` or `name`.
fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|digit| digit.is_ascii_digit()) && !name.ends_with(':') => name,
        _ => host,
    }
}

fn is_loopback(name: &str) -> bool {
    name.eq_ignore_ascii_case("localhost") || address(name).is_some_and(|address| address.is_loopback())
}

/// Returns true for names that no public DNS server can give to another machine, such as `host.docker.internal`.
fn is_reserved(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    [".localhost", ".internal"].iter().any(|ending| name.ends_with(ending))
}

fn address(name: &str) -> Option<IpAddr> {
    name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name).parse().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_loopback_server_answers_only_its_own_hosts_and_origins() {
        let policy = OriginPolicy {
            is_loopback: true,
            hosts: vec!["gpu-box".to_owned()],
            origins: vec!["https://chat.example.org".to_owned()],
        };
        let allows = |policy: &OriginPolicy, name: header::HeaderName, value: &str| {
            let headers = HeaderMap::from_iter([(name, HeaderValue::from_str(value).unwrap())]);
            policy.check(&Uri::from_static("/health"), &headers).is_ok()
        };
        let others = OriginPolicy { is_loopback: false, ..policy.clone() };
        for (host, is_allowed) in [
            ("localhost", true),
            ("LOCALHOST:8000", true),
            ("127.0.0.1:8000", true),
            ("127.0.0.1", true),
            ("[::1]:8000", true),
            ("[::1]", true),
            ("gpu-box:1", true),
            ("evil.example", false),
            ("evil.example:8000", false),
            ("localhost.evil.example", false),
            ("127.0.0.1.evil.example:8000", false),
            ("localhost:8000@evil.example", false),
            ("192.168.1.2", true),
            ("192.168.1.2.evil.example", false),
            ("host.docker.internal:8000", true),
            ("chat.localhost", true),
            ("internal.evil.example", false),
            ("", false),
            (":8000", false),
        ] {
            assert_eq!(allows(&policy, header::HOST, host), is_allowed, "{host}");
            assert!(allows(&others, header::HOST, host), "{host}");
        }
        for (origin, is_allowed) in [
            ("http://localhost:3000", true),
            ("https://127.0.0.1", true),
            ("http://[::1]:8000", true),
            ("https://chat.example.org", true),
            ("https://gpu-box", true),
            ("http://192.168.1.2", false),
            ("https://host.docker.internal", false),
            ("http://chat.example.org", false),
            ("https://evil.example", false),
            ("http://localhost.evil.example", false),
            ("http://localhost@evil.example", false),
            ("file://localhost", false),
            ("null", false),
        ] {
            assert_eq!(allows(&policy, header::ORIGIN, origin), is_allowed, "{origin}");
        }
        assert!(policy.check(&Uri::from_static("http://evil.example/health"), &HeaderMap::new()).is_err());
        assert!(policy.check(&Uri::from_static("/health"), &HeaderMap::new()).is_ok());
    }
}
