//! The settings of the trackers.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The trackers of a run. Only rank 0 has some.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrackingPlan {
    /// The name of the run; `None` for the name of its folder.
    pub run_name: Option<String>,
    /// The folder of TensorBoard's event files; `None` writes none.
    pub tensorboard: Option<PathBuf>,
    /// Weights and Biases.
    pub wandb: Option<WandbPlan>,
    /// MLflow.
    pub mlflow: Option<MlflowPlan>,
}

/// The settings of Weights and Biases.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WandbPlan {
    /// The upload during the run.
    pub mode: WandbMode,
    /// The URL of the server.
    pub base_url: String,
    /// The entity; `None` for the default entity of the API key.
    pub entity: Option<String>,
    /// The project.
    pub project: String,
    /// The run's name; `None` for the name of all trackers.
    pub name: Option<String>,
    /// The id of the W&B run; `None` derives it from the id of the run.
    pub run_id: Option<String>,
    /// The group of runs.
    pub group: Option<String>,
    /// The type of job.
    pub job_type: Option<String>,
    /// Notes about the run.
    pub notes: Option<String>,
    /// The tags.
    pub tags: Vec<String>,
    /// The folder of the run folders; `None` writes none.
    pub folder: Option<PathBuf>,
    /// The API key.
    #[serde(skip)]
    pub api_key: Option<Secret>,
}

/// The upload of a W&B run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WandbMode {
    /// Uploads during the run, and writes the files of `Offline`, too.
    Online,
    /// Writes files for `wandb sync`.
    Offline,
}

/// The settings of MLflow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MlflowPlan {
    /// The URL of the tracking server.
    pub tracking_uri: String,
    /// The experiment.
    pub experiment_name: String,
    /// The id of an existing MLflow run to continue.
    pub run_id: Option<String>,
    /// The user's credentials.
    #[serde(skip)]
    pub credentials: Credentials,
}

/// The credentials of an HTTP server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Credentials {
    /// No authentication.
    #[default]
    None,
    /// Basic authentication.
    Basic {
        /// The user name.
        username: String,
        /// The password.
        password: Secret,
    },
    /// A bearer token.
    Bearer(Secret),
}

/// A password, token or key. It is neither printed nor serialized.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the text.
    pub(super) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

impl Credentials {
    /// Masks the secret in a text.
    pub(super) fn redact(&self, text: &str) -> String {
        match self {
            Self::Basic { password: secret, .. } | Self::Bearer(secret) if !secret.0.is_empty() => {
                text.replace(&secret.0, "(secret)")
            }
            _ => text.to_owned(),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_in_no_output() {
        let plan = MlflowPlan {
            tracking_uri: "http://host".to_owned(),
            experiment_name: "Default".to_owned(),
            run_id: None,
            credentials: Credentials::Bearer(Secret::new("t0ken")),
        };
        let outputs = [format!("{plan:?}"), serde_json::to_string(&plan).unwrap()];
        assert!(outputs.iter().all(|output| !output.contains("t0ken")), "{outputs:?}");
        assert_eq!(plan.credentials.redact("bad token t0ken"), "bad token (secret)");
    }
}
