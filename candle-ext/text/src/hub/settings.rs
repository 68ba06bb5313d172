//! Settings of Hub access: endpoint, token, cache, timeouts.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::files::{MAX_CONFIG_FILE_BYTES, read_regular_text_file};
use crate::response_body::userinfo;

/// Settings of Hub access. Binaries read them from the environment once.
#[derive(Clone, PartialEq, Eq)]
pub struct HubSettings {
    /// URL of the Hub.
    pub endpoint: String,
    /// Access token of the user.
    pub token: Option<String>,
    /// Cache folder of repositories.
    pub cache: PathBuf,
    /// Offline mode: only cached files are used.
    pub offline: bool,
    /// Largest number of attempts of a request while the Hub is busy or unreachable.
    pub max_attempts: usize,
    /// Wait before the second attempt. It doubles with each attempt.
    pub backoff: Duration,
    /// Longest wait that the Hub may request. A longer one is reported as an error.
    pub max_retry_wait: Duration,
    /// Longest time without data before or during a response. The request is then retried.
    pub read_timeout: Duration,
}

impl HubSettings {
    /// Returns settings for the public Hub without a token, cached in `cache`.
    pub fn new(cache: impl Into<PathBuf>) -> Self {
        Self {
            endpoint: "https://huggingface.co".into(),
            token: None,
            cache: cache.into(),
            offline: false,
            max_attempts: 5,
            backoff: Duration::from_millis(300),
            max_retry_wait: Duration::from_secs(300),
            read_timeout: Duration::from_secs(60),
        }
    }

    /// Reads the settings from the Hugging Face environment variables, for binaries only.
    ///
    /// These are `HF_ENDPOINT`, `HF_TOKEN`, `HF_TOKEN_PATH`, `HF_HUB_DISABLE_IMPLICIT_TOKEN`, `HF_HOME`,
    /// `HF_HUB_CACHE`, `HF_HUB_OFFLINE` and `XDG_CACHE_HOME`.
    pub fn from_env() -> Self {
        Self::from_vars(|name| std::env::var(name).ok())
    }

    /// Reads the settings from any lookup of variables, as [`HubSettings::from_env`] does.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Self {
        let var = |name: &str| var(name).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty());
        let is_set =
            |name: &str| var(name).is_some_and(|v| ["1", "true", "yes", "on"].contains(&v.to_lowercase().as_str()));
        let user = PathBuf::from(var("HOME").unwrap_or_else(|| ".".into()));
        let path = |name: &str| var(name).map(|path| expanded(&path, &user));
        let home = match (path("HF_HOME"), path("XDG_CACHE_HOME")) {
            (Some(home), _) => home,
            (None, Some(caches)) => caches.join("huggingface"),
            (None, None) => user.join(".cache/huggingface"),
        };
        let cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
        let mut settings = Self::new(cache.unwrap_or_else(|| home.join("hub")));
        if let Some(endpoint) = var("HF_ENDPOINT") {
            settings.endpoint = endpoint.trim_end_matches('/').to_owned();
        }
        settings.offline = is_set("HF_HUB_OFFLINE") || is_set("TRANSFORMERS_OFFLINE");
        if !is_set("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
            let file = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
            settings.token = var("HF_TOKEN").or_else(|| token_in(&file));
        }
        settings
    }
}

impl HubSettings {
    /// Masks the token, and user name and password in the Hub's URL.
    pub(crate) fn redact(&self, text: &str) -> String {
        let masked = match &self.token {
            Some(token) => text.replace(token.as_str(), "(token)"),
            None => text.to_owned(),
        };
        match userinfo(&self.endpoint) {
            Some(userinfo) => masked.replace(&format!("{userinfo}@"), ""),
            None => masked,
        }
    }
}

impl std::fmt::Debug for HubSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_struct("HubSettings")
            .field("endpoint", &self.redact(&self.endpoint))
            .field("token", &self.token.as_ref().map(|_| "(set)"))
            .field("cache", &self.cache)
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}

/// Expands `~` to the home folder. Shells do not expand it inside quotes.
fn expanded(path: &str, user: &Path) -> PathBuf {
    match path.strip_prefix('~').map(|rest| rest.strip_prefix('/').unwrap_or(rest)) {
        Some(rest) if path == "~" || path.starts_with("~/") => user.join(rest),
        _ => PathBuf::from(path),
    }
}

fn token_in(path: &Path) -> Option<String> {
    let token = read_regular_text_file(path, MAX_CONFIG_FILE_BYTES).ok()?;
    Some(token.trim().to_owned()).filter(|token| !token.is_empty())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn from(vars: &[(&str, &str)]) -> HubSettings {
        HubSettings::from_vars(|name| vars.iter().find(|(own, _)| *own == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn the_cache_follows_the_nearest_variable() {
        assert_eq!(from(&[("HOME", "/u")]).cache, Path::new("/u/.cache/huggingface/hub"));
        assert_eq!(from(&[("XDG_CACHE_HOME", "/x")]).cache, Path::new("/x/huggingface/hub"));
        assert_eq!(from(&[("HF_HOME", "/h"), ("XDG_CACHE_HOME", "/x")]).cache, Path::new("/h/hub"));
        assert_eq!(from(&[("HF_HOME", "/h"), ("HF_HUB_CACHE", "/c")]).cache, Path::new("/c"));
    }

    #[test]
    fn a_tilde_is_the_users_folder() {
        let cache = |name: &str, path: &str| from(&[("HOME", "/u"), (name, path)]).cache;
        assert_eq!(cache("HF_HOME", "~/hf"), Path::new("/u/hf/hub"));
        assert_eq!(cache("HF_HUB_CACHE", "~"), Path::new("/u"));
        assert_eq!(cache("HUGGINGFACE_HUB_CACHE", "~/a/~"), Path::new("/u/a/~"));
        assert_eq!(cache("XDG_CACHE_HOME", "~/x"), Path::new("/u/x/huggingface/hub"));
        assert_eq!(cache("HF_HUB_CACHE", "~other/x"), Path::new("~other/x"));
    }

    #[test]
    fn a_token_comes_from_the_variable_or_the_file() {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("token"), "hf_file\n").unwrap();
        let home = home.path().to_str().unwrap();
        assert_eq!(from(&[("HF_HOME", home)]).token.as_deref(), Some("hf_file"));
        assert_eq!(from(&[("HF_HOME", home), ("HF_TOKEN", "hf_var")]).token.as_deref(), Some("hf_var"));
        let without = [("HF_HOME", home), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")];
        assert_eq!(from(&without).token, None);
    }

    #[test]
    fn offline_endpoint_and_a_token_kept_out_of_debug_output() {
        let settings = from(&[("HF_HUB_OFFLINE", "YES"), ("HF_ENDPOINT", "http://mirror/"), ("HF_TOKEN", "hf_secret")]);
        assert!(settings.offline);
        assert_eq!(settings.endpoint, "http://mirror");
        assert!(!format!("{settings:?}").contains("hf_secret"));
        assert!(!from(&[("HF_HUB_OFFLINE", "0")]).offline);
    }

    #[test]
    fn secrets_are_masked() {
        let settings = from(&[("HF_ENDPOINT", "http://me:pass@host:8080/hub"), ("HF_TOKEN", "hf_secret")]);
        assert!(!format!("{settings:?}").contains("pass"));
        let said = settings.redact("http://me:pass@host:8080/hub/api says: bad token hf_secret");
        assert_eq!(said, "http://host:8080/hub/api says: bad token (token)");
        assert_eq!(from(&[]).redact("me@example.com"), "me@example.com");
    }
}
