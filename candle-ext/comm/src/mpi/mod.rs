//! Ranks that `mpirun` or `srun` started, on one machine or many, connected by an installed MPI (Open MPI, MPICH, Intel
//! MPI).
//!
//! MPI only carries bytes between two ranks: request, checks and sums are `group`'s, so all results have the bits that they
//! have on threads. One thread of a process makes all calls to MPI, and asks it for no more than `MPI_THREAD_FUNNELED`.
//! What is sent and received is copied once: MPI's buffers are its own until it says otherwise, whatever fails meanwhile.
//!
//! A rank that fails tells the others. One that dies is noticed by whoever started the ranks, who then ends the others;
//! one that stops, or that no message reaches any more, by the time-out.

mod connections;
mod frame;
mod message;
mod progress;
mod rank;

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::transport::{Connections, FailureChannel, Transport, TransportError};
use crate::{Call, Error, Options, RankFailure, Result, World};
use connections::MpiConnections;
use progress::ProgressThread;
use rank::MpiRank;

/// Joins the world of `size` ranks as rank `rank`: what whoever started this process says, and MPI must say, too. Fails if
/// MPI has not brought all together within `options.timeout`.
///
/// A process can do so once in its life. Dropping the world waits until all ranks have left or one has failed.
pub fn join(rank: usize, size: usize, options: Options) -> Result<World> {
    let refuse = |why| Error::Join { rank, size, why };
    let (sender, started) = channel();
    let work = move || {
        let progress = match ProgressThread::start(rank, size, options.timeout) {
            Ok(progress) => progress,
            Err(why) => return drop(sender.send(Err(why))),
        };
        // Who has stopped waiting has said why.
        if sender.send(Ok(Arc::clone(progress.shared()))).is_ok() {
            progress.run();
        }
    };
    let thread = thread::Builder::new().name("comm-mpi".to_owned()).spawn(work);
    let thread = thread.map_err(|error| refuse(format!("start a thread: {error}")))?;
    let shared = match started.recv_timeout(options.timeout) {
        Ok(shared) => shared.map_err(refuse)?,
        Err(RecvTimeoutError::Timeout) => {
            return Err(refuse(format!("MPI has not brought the ranks together within {:?}", options.timeout)));
        }
        Err(RecvTimeoutError::Disconnected) => return Err(refuse("MPI did not start".to_owned())),
    };
    World::open(Arc::new(MpiTransport { shared, thread: Some(thread) }), size, &options)
}

/// See [`Transport`].
struct MpiTransport {
    shared: Arc<MpiRank>,
    thread: Option<JoinHandle<()>>,
}

impl FailureChannel for MpiTransport {
    fn rank(&self) -> usize {
        self.shared.rank
    }

    fn who(&self, rank: usize) -> String {
        self.shared.peers[rank].to_string()
    }

    fn fail(&self, failure: RankFailure) -> RankFailure {
        self.shared.fail(failure)
    }

    fn failure(&self) -> Option<RankFailure> {
        self.shared.monitor.failure()
    }

    fn await_failure(&self, within: Duration) -> Option<RankFailure> {
        self.shared.monitor.await_failure(within)
    }

    fn beat(&self) {
        self.shared.beat();
    }
}

impl Transport for MpiTransport {
    fn open(&self, id: &str, members: &[usize]) -> Result<Box<dyn Connections>, TransportError> {
        let tag = self.shared.open(id, members)?;
        Ok(Box::new(MpiConnections::new(Arc::clone(&self.shared), members.to_vec(), tag)))
    }

    // A dead rank's end is told by who started it, not by us.
    fn set_current_call(&self, _id: &str, _call: Option<&Call>) {}
}

impl Drop for MpiTransport {
    fn drop(&mut self) {
        self.shared.leave();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
