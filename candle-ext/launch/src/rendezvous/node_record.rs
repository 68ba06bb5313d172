//! The record of a node in the store, with the settings that must be equal on all nodes.

use serde::{Deserialize, Serialize};

use super::error::{RendezvousError, Result};
use crate::generation::Participant;
use crate::plan::LaunchPlan;

/// The record of a node that waits to join or is a participant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NodeRecord {
    /// Random ID of the launcher.
    pub(super) id: u64,
    pub(super) participant: Participant,
    settings: RendezvousSettings,
}

/// The settings that must be equal on all nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RendezvousSettings {
    n_nodes: String,
    max_restarts: usize,
    /// The version of the keys in the store.
    protocol: usize,
}

const PROTOCOL: usize = 2;

impl RendezvousSettings {
    pub(super) fn of(plan: &LaunchPlan) -> Self {
        let n_nodes = format!("{}:{}", plan.nodes.min, plan.nodes.max);
        Self { n_nodes, max_restarts: plan.max_restarts, protocol: PROTOCOL }
    }
}

impl NodeRecord {
    pub(super) fn new(participant: Participant, settings: RendezvousSettings) -> Self {
        Self { id: rand::random(), participant, settings }
    }

    pub(super) fn json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("records serialize to JSON")
    }

    /// Parses a record. Returns `None` for the record of another version.
    pub(super) fn parse(json: &[u8]) -> Option<Self> {
        serde_json::from_slice(json).ok()
    }

    /// Returns the error of a record that cannot be parsed.
    pub(super) fn unreadable() -> RendezvousError {
        let difference = "it runs another version of `launch`".to_owned();
        RendezvousError::SettingsMismatch { other: "another node".into(), difference }
    }

    /// Fails if the settings of two launchers differ.
    pub(super) fn check(&self, other: &Self) -> Result<()> {
        let (ours, theirs) = (&self.settings, &other.settings);
        let differs = |what: &str, theirs: &dyn ToString, ours: &dyn ToString| {
            let difference = format!("{what} is {} there and {} here", theirs.to_string(), ours.to_string());
            Err(RendezvousError::SettingsMismatch { other: other.participant.host.clone(), difference })
        };
        match () {
            () if ours.protocol != theirs.protocol => differs("the version", &theirs.protocol, &ours.protocol),
            () if ours.n_nodes != theirs.n_nodes => differs("--nnodes", &theirs.n_nodes, &ours.n_nodes),
            () if ours.max_restarts != theirs.max_restarts => {
                differs("--max-restarts", &theirs.max_restarts, &ours.max_restarts)
            }
            () => Ok(()),
        }
    }
}
