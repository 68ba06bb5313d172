//! The ranks that write a save together, and read it.

use candlewick_comm::AtWork;

use super::error::CheckpointError;
use super::state::StateError;

pub use candlewick_runtime::process_group::Word;

/// One rank of those that save and load together, all from and to one file system.
pub trait Crew {
    /// This rank's number; the first one does what is done once.
    fn rank(&self) -> usize;
    /// How many ranks there are.
    fn size(&self) -> usize;
    /// Gives every rank what each rank says, in rank order. All ranks call it.
    fn tell(&self, own: Word) -> Result<Vec<Word>, StateError>;
    /// Returns the sign that this rank reads or writes, which prolongs the wait of the others; `None` without others.
    fn at_work(&self) -> Option<AtWork>;
}

/// The only rank of a run.
#[derive(Clone, Copy, Debug)]
pub struct Alone;

impl Crew for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn tell(&self, own: Word) -> Result<Vec<Word>, StateError> {
        Ok(vec![own])
    }

    fn at_work(&self) -> Option<AtWork> {
        None
    }
}

/// Does something that takes long while the others wait for it. It must not wait for them.
pub(crate) fn at_work<T>(crew: &dyn Crew, what: impl FnOnce() -> T) -> T {
    let _working = crew.at_work().map(|at_work| at_work.begin());
    what()
}

/// Gives every rank what each has come to; if one has failed, all fail. All ranks call it.
pub(crate) fn together(
    crew: &dyn Crew,
    own: Result<Vec<u8>, CheckpointError>,
) -> Result<Vec<Vec<u8>>, CheckpointError> {
    let word = own.as_ref().map_err(|error| error.to_string()).cloned();
    let told = crew.tell(word).map_err(CheckpointError::Crew);
    let told = match (own, told) {
        // The others gave this rank up while it was stopped, and the first one removed the folder.
        (Err(CheckpointError::NotShared { .. }), Err(gone)) => return Err(gone),
        // A rank's own reason says more than what the others make of it.
        (own, told) => own.and(told)?,
    };
    let said = told.into_iter().enumerate();
    said.map(|(rank, word)| word.map_err(|reason| CheckpointError::OtherRank { rank, reason })).collect()
}

/// Lets the first rank do something; if it fails, all fail. All ranks call it.
pub(crate) fn first<T>(
    crew: &dyn Crew,
    what: impl FnOnce() -> Result<T, CheckpointError>,
) -> Result<Option<T>, CheckpointError> {
    let (done, own) = match (crew.rank() == 0).then(|| at_work(crew, what)).transpose() {
        Ok(done) => (done, Ok(Vec::new())),
        Err(error) => (None, Err(error)),
    };
    together(crew, own)?;
    Ok(done)
}
