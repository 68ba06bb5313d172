//! One rank's membership in a whole run, and what it was joined with.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use crate::call::Journal;
use crate::fabric::Fabric;
use crate::group::Group;
use crate::store::Server;
use crate::{Call, Collective, Failure, Result, Solo};

/// How a world behaves.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How long a rank may be silent while others wait for it, in joining and in every operation.
    pub timeout: Duration,
    /// Whether every call is kept, for [`World::calls`].
    pub record: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(600), record: false }
    }
}

/// One rank's end of a world: the group of all ranks, and the way to end it for all. Dropping it, when the groups are
/// dropped too, leaves; dropping it in a panic ends the world.
pub struct World {
    group: Arc<dyn Collective>,
    fabric: Option<Arc<dyn Fabric>>,
    journal: Journal,
    /// What the ranks meet in, where this one has to keep it.
    host: Option<Server>,
}

impl World {
    /// Makes a world of one rank.
    pub fn solo() -> Self {
        Self { group: Arc::new(Solo), fabric: None, journal: Journal::default(), host: None }
    }

    /// Connects all ranks that `fabric` reaches.
    pub(crate) fn open(fabric: Arc<dyn Fabric>, size: usize, options: &Options) -> Result<Self> {
        let journal = Journal::new(options.record);
        let group = Group::world(&fabric, size, &journal)?;
        Ok(Self { group: Arc::new(group), fabric: Some(fabric), journal, host: None })
    }

    /// The same, with the store that its ranks meet in.
    pub(crate) fn with_host(mut self, host: Option<Server>) -> Self {
        self.host = host;
        self
    }

    /// Returns the group of all ranks.
    pub fn group(&self) -> Arc<dyn Collective> {
        Arc::clone(&self.group)
    }

    /// Returns this process's rank.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// Ends the world because of something that went wrong on this rank: what the others wait for will not come.
    /// Returns the world's failure, which is another one if there was one before.
    pub fn fail(&self, why: impl Display) -> Failure {
        let rank = self.rank();
        let failure = Failure { rank, message: format!("go on: rank {rank} failed to {why}") };
        self.fabric.as_ref().map_or_else(|| failure.clone(), |fabric| fabric.fail(failure.clone()))
    }

    /// Returns why the world has ended, if it has.
    pub fn failure(&self) -> Option<Failure> {
        self.fabric.as_ref().and_then(|fabric| fabric.failure())
    }

    /// Returns this rank's calls so far, to all its groups, if [`Options::record`] was asked for. Groups of one rank
    /// record nothing.
    pub fn calls(&self) -> Vec<Call> {
        self.journal.calls()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail("finish: it panicked");
        }
    }
}
