//! Rendezvous of a world's ranks in a store.

use std::cell::Cell;
use std::time::{Duration, Instant};

use crate::liveness::deadline;
use crate::peer::PeerInfo;
use crate::rank_env::Launcher;
use crate::store::{self, Client};
use crate::{Error, Result};

/// Rendezvous of one rank with the others.
pub(crate) struct PeerRendezvous {
    store: Client,
    rank: usize,
    size: usize,
    timeout: Duration,
    deadline: Instant,
    launcher: Launcher,
    /// Time until the next log line about an absent rank.
    notice: Cell<Duration>,
}

/// Wait for another rank before the first log line.
const FIRST_NOTICE: Duration = Duration::from_secs(5);

/// Interval of later log lines.
const NOTICE_INTERVAL: Duration = Duration::from_secs(300);

impl PeerRendezvous {
    /// Begins the rendezvous as rank `rank` of `size`. `store` has a prefix of its own.
    pub(crate) fn new(store: Client, rank: usize, size: usize, timeout: Duration) -> Result<Self> {
        let rendezvous = Self {
            store,
            rank,
            size,
            timeout,
            deadline: deadline(timeout),
            launcher: Launcher::None,
            notice: Cell::new(FIRST_NOTICE),
        };
        if rank >= size {
            Err(rendezvous.join_error("the rank must be less than the world size".to_owned()))
        } else {
            Ok(rendezvous)
        }
    }

    /// Sets the launcher of the ranks, which log lines name.
    #[cfg(any(target_os = "linux", feature = "cuda"))]
    pub(crate) fn with_launcher(self, launcher: Launcher) -> Self {
        Self { launcher, ..self }
    }

    pub(crate) fn store(&self) -> &Client {
        &self.store
    }

    #[cfg(any(target_os = "linux", feature = "cuda"))]
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    #[cfg(any(target_os = "linux", feature = "cuda"))]
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    #[cfg(target_os = "linux")]
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Publishes this rank's description and returns those of all ranks. Fails if `check` fails for one.
    pub(crate) fn exchange_peers(
        &self,
        own: &PeerInfo,
        check: impl Fn(&PeerInfo) -> Result<()>,
    ) -> Result<Vec<PeerInfo>> {
        if self.store.add(&format!("{}/claims", self.rank), 1)? > 1 {
            return Err(self.join_error("another process has already joined as this rank; check RANK".to_owned()));
        }
        self.store.set(&key(self.rank), &own.encode())?;
        let checked = |rank| {
            let peer = self.await_one(rank)?;
            check(&peer).map(|()| peer)
        };
        (0..self.size).map(checked).collect()
    }

    fn await_one(&self, rank: usize) -> Result<PeerInfo> {
        loop {
            let (left, notice) = (self.deadline.saturating_duration_since(Instant::now()), self.notice.get());
            match self.store.wait_for(&[&key(rank)], left.min(notice)) {
                Ok(()) => break,
                Err(store::Error::Timeout { .. }) if notice < left => {
                    tracing::warn!("{}", waiting_text(rank, self.size, self.launcher));
                    self.notice.set(NOTICE_INTERVAL);
                }
                Err(store::Error::Timeout { .. }) => return Err(self.absent()?),
                Err(error) => return Err(error.into()),
            }
        }
        let peer = PeerInfo::decode(rank, &self.store.get(&key(rank))?);
        let peer = peer.ok_or_else(|| {
            self.join_error(format!("rank {rank} runs another version of this program; start all ranks from one build"))
        })?;
        if peer.size != self.size {
            let (other, other_size) = (rank, peer.size);
            return Err(Error::OtherSize { rank: self.rank, size: self.size, other, other_size });
        }
        Ok(peer)
    }

    fn absent(&self) -> Result<Error> {
        let mut absent = Vec::new();
        for rank in 0..self.size {
            if !self.store.check(&[&key(rank)])? {
                absent.push(rank);
            }
        }
        Ok(Error::Absent { rank: self.rank, size: self.size, absent, timeout: self.timeout })
    }

    /// Creates the error of this rank's failure to join.
    pub(crate) fn join_error(&self, why: String) -> Error {
        Error::Join { rank: self.rank, size: self.size, why }
    }
}

/// Returns the log line of a wait for `rank`.
///
/// An interactive shell of `srun --pty` has the variables of a task, although its other tasks run no program. They equal those
/// of a batch job.
fn waiting_text(rank: usize, size: usize, launcher: Launcher) -> String {
    let text = format!("waiting for rank {rank} of {size}");
    match launcher {
        Launcher::None => text,
        Launcher::Slurm => format!(
            "{text}, a task of this Slurm step (SLURM_PROCID, SLURM_NTASKS); to run one process in an interactive \
             shell: env -u SLURM_PROCID -u PMI_RANK COMMAND"
        ),
        launcher => format!("{text}, started by {launcher}"),
    }
}

fn key(rank: usize) -> String {
    format!("{rank}/peer")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::store::Server;

    #[test]
    fn a_wait_for_an_absent_rank_is_logged_once_before_it_fails() {
        let server = Server::bind("127.0.0.1:0").unwrap();
        let store = Client::connect("127.0.0.1", server.port(), Duration::from_secs(60)).unwrap();
        let rendezvous = PeerRendezvous::new(store, 0, 2, Duration::from_secs(1)).unwrap();
        rendezvous.notice.set(Duration::from_millis(1));
        let error = rendezvous.await_one(1).unwrap_err();
        assert!(matches!(error, Error::Absent { .. }), "{error}");
        assert_eq!(rendezvous.notice.get(), NOTICE_INTERVAL);
    }

    #[test]
    fn a_wait_names_the_rank_and_the_remedy_in_a_shell_of_slurm() {
        assert_eq!(waiting_text(1, 2, Launcher::None), "waiting for rank 1 of 2");
        assert_eq!(waiting_text(1, 2, Launcher::Torchrun), "waiting for rank 1 of 2, started by torchrun");
        let slurm = waiting_text(1, 2, Launcher::Slurm);
        assert!(
            slurm.contains("SLURM_PROCID") && slurm.ends_with("env -u SLURM_PROCID -u PMI_RANK COMMAND"),
            "{slurm}"
        );
    }
}
