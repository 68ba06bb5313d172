//! Environment variables and credentials of the trackers.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, read_regular_text_file};

use crate::metrics::Secret;

/// The variables `WANDB_*` and `MLFLOW_*`, and the user's netrc file.
#[derive(Clone, Default)]
pub struct TrackingEnv {
    variables: BTreeMap<String, String>,
    netrc: String,
}

impl TrackingEnv {
    /// Reads the environment.
    pub fn from_env() -> Self {
        let variables = std::env::vars_os();
        Self::from_vars(
            variables.filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?))),
        )
    }

    /// Reads variables as [`TrackingEnv::from_env`] does. `NETRC` or `HOME` names the netrc file.
    pub fn from_vars(variables: impl IntoIterator<Item = (String, String)>) -> Self {
        let mut all: BTreeMap<String, String> = variables.into_iter().filter(|(_, value)| !value.is_empty()).collect();
        let home = all.get("HOME").map(|home| PathBuf::from(home).join(".netrc"));
        let netrc = all.get("NETRC").map(PathBuf::from).or(home);
        let netrc =
            netrc.and_then(|path| read_regular_text_file(&path, MAX_CONFIG_FILE_BYTES).ok()).unwrap_or_default();
        all.retain(|name, _| name.starts_with("WANDB_") || name.starts_with("MLFLOW_"));
        Self { variables: all, netrc }
    }

    /// Returns a variable that is set and not empty.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str)
    }

    /// Returns a variable whose value is a secret.
    pub(super) fn secret(&self, name: &str) -> Option<Secret> {
        self.get(name).map(Secret::new)
    }

    /// Returns the netrc file's password for a host.
    pub(super) fn netrc_password(&self, host: &str) -> Option<Secret> {
        let mut is_of_host = false;
        let mut words =
            self.netrc.lines().filter(|line| !line.trim_start().starts_with('#')).flat_map(str::split_whitespace);
        while let Some(word) = words.next() {
            match word {
                "machine" => is_of_host = words.next() == Some(host),
                "default" => is_of_host = true,
                "password" => {
                    let password = words.next();
                    if is_of_host {
                        return password.map(Secret::new);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

/// The values may be secrets.
impl fmt::Debug for TrackingEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.variables.keys()).finish()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_that_of_its_host() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("netrc");
        let text = "# machine api.wandb.ai password old\nmachine a login u password one\n\
machine api.wandb.ai\n  login user\n  password two\n";
        std::fs::write(&path, text).unwrap();
        let env = TrackingEnv::from_vars([("NETRC".to_owned(), path.display().to_string())]);
        assert_eq!(env.netrc_password("a"), Some(Secret::new("one")));
        assert_eq!(env.netrc_password("api.wandb.ai"), Some(Secret::new("two")));
        assert_eq!(env.netrc_password("b"), None);
    }

    #[test]
    fn values_are_not_printed() {
        let env = TrackingEnv::from_vars([("WANDB_API_KEY".to_owned(), "k3y".to_owned())]);
        assert_eq!(env.get("WANDB_API_KEY"), Some("k3y"));
        assert_eq!(format!("{env:?}"), "{\"WANDB_API_KEY\"}");
    }
}
