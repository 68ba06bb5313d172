//! Records of the experts of each token, which another run replays.
//!
//! A record is a folder with a folder for each step. Each rank writes a file for each of its micro-batches, with its tokens and
//! layers. A replay reads the files of all ranks, so the meshes may differ.

mod error;
mod file;
mod folder;
mod record;
mod replay;
mod routed_model;

pub(crate) use error::RoutingError;
pub(crate) use folder::MicroPosition;
pub(crate) use record::RoutingRecorder;
pub(crate) use replay::RoutingReplay;
pub(crate) use routed_model::RoutedModel;

/// The record that a run writes or replays.
#[derive(Debug)]
pub(crate) enum RoutingFiles {
    /// The run writes its experts.
    Record(RoutingRecorder),
    /// The run takes its experts from a record.
    Replay(RoutingReplay),
}
