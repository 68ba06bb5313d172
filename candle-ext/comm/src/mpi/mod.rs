//! Backend over an installed MPI (Open MPI, MPICH, Intel MPI), for ranks that `mpirun` or `srun` started on one or more nodes.
//!
//! MPI only carries bytes between two ranks. `group` implements the order, the checks and the reductions, so results are
//! bitwise equal to those of the thread backend. One thread makes all calls to MPI, which needs `MPI_THREAD_FUNNELED` only.
//! Every message is copied once, because MPI owns a buffer until its request completes, also after a failure.
//!
//! A rank that fails reports to the others. `mpirun` or `srun` detects a rank that exits, and kills the others. The timeout
//! detects a rank that stops or becomes unreachable.

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
use crate::{CollectiveCall, Error, Options, RankFailure, Result, World};
use connections::MpiConnections;
use progress::ProgressThread;
use rank::MpiRank;

/// Joins the world of `size` ranks as rank `rank`, as the launcher has numbered them.
///
/// Fails if MPI reports another rank or size, or if its initialization takes longer than `options.timeout`. A process can
/// join once. Dropping the world waits until all ranks have left or one has failed.
pub fn join(rank: usize, size: usize, options: Options) -> Result<World> {
    let refuse = |why| Error::Join { rank, size, why };
    let (sender, started) = channel();
    let work = move || {
        let progress = match ProgressThread::start(rank, size, options.timeout) {
            Ok(progress) => progress,
            Err(why) => return drop(sender.send(Err(why))),
        };
        // After a timeout `join` has already returned its error.
        if sender.send(Ok(Arc::clone(progress.shared()))).is_ok() {
            progress.run();
        }
    };
    let thread = thread::Builder::new().name("comm-mpi".to_owned()).spawn(work);
    let thread = thread.map_err(|error| refuse(format!("start a thread: {error}")))?;
    let shared = match started.recv_timeout(options.timeout) {
        Ok(shared) => shared.map_err(refuse)?,
        Err(RecvTimeoutError::Timeout) => {
            return Err(refuse(format!(
                "MPI_Init has not finished within {:?}; check that all ranks have started",
                options.timeout
            )));
        }
        Err(RecvTimeoutError::Disconnected) => return Err(refuse("MPI_Init panicked".to_owned())),
    };
    World::open(Arc::new(MpiTransport { shared, thread: Some(thread) }), size, &options)
}

/// Transport of one rank over MPI.
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

    // mpirun or srun reports the exit of a rank.
    fn set_current_call(&self, _id: &str, _call: Option<&CollectiveCall>) {}
}

impl Drop for MpiTransport {
    fn drop(&mut self) {
        self.shared.leave();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
