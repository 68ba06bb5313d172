//! What a node writes down about itself, and what two nodes must have in common.

use serde::{Deserialize, Serialize};

use super::{MeetingError, Result};
use crate::plan::Plan;
use crate::round::Member;

/// A node that waits to be called, or was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::meeting) struct Entry {
    /// No other launcher's.
    pub(super) id: u64,
    pub(super) member: Member,
    terms: Terms,
}

/// What launchers must agree on, as they were started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::meeting) struct Terms {
    n_nodes: String,
    max_restarts: usize,
    /// Of the keys in the store.
    protocol: usize,
}

const PROTOCOL: usize = 1;

impl Terms {
    pub(in crate::meeting) fn of(plan: &Plan) -> Self {
        let n_nodes = format!("{}:{}", plan.nodes.min, plan.nodes.max);
        Self { n_nodes, max_restarts: plan.max_restarts, protocol: PROTOCOL }
    }
}

impl Entry {
    pub(in crate::meeting) fn new(member: Member, terms: Terms) -> Self {
        Self { id: rand::random(), member, terms }
    }

    pub(super) fn json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a node is plain data")
    }

    /// `None` for what another version wrote.
    pub(super) fn parse(json: &[u8]) -> Option<Self> {
        serde_json::from_slice(json).ok()
    }

    /// Says that another launcher's words cannot be read.
    pub(super) fn foreign() -> MeetingError {
        let difference = "it is another version of `launch`".to_owned();
        MeetingError::Differs { other: "another node".into(), difference }
    }

    /// Looks whether the two were started alike.
    pub(super) fn check(&self, other: &Self) -> Result<()> {
        let (ours, theirs) = (&self.terms, &other.terms);
        let differs = |what: &str, theirs: &dyn ToString, ours: &dyn ToString| {
            let difference = format!("{what} is {} there and {} here", theirs.to_string(), ours.to_string());
            Err(MeetingError::Differs { other: other.member.host.clone(), difference })
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
