//! Id of a run: the time at which its rank 0 started.

use std::time::SystemTime;

use anyhow::{Context, Result};
use candlewick_text::template::Clock;

use crate::process_group::ProcessGroup;

/// Start of a run, in milliseconds since 1970. A resumed run keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunId {
    /// Id of the run in its output files.
    pub run: u64,
    /// Time whose date the chat template prints: the start of the first run in a chain of copied checkpoints.
    pub date: u64,
}

impl RunId {
    /// Returns the id of a run that starts now.
    pub fn now() -> Self {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = since.map_or(0, |since| since.as_millis() as u64);
        Self { run: now, date: now }
    }

    /// Returns rank 0's id on every rank. Collective: all ranks of `process` call it.
    pub fn agree(process: &ProcessGroup, own: Result<Self>) -> Result<Self> {
        let all = process.exchange(own.map(|Self { run, date }| [run, date].map(u64::to_le_bytes).concat()))?;
        let mut moments = all[0].chunks_exact(8).map(|bytes| bytes.try_into().map(u64::from_le_bytes));
        let mut moment = || moments.next().context("failed to read the clock of rank 0").and_then(|at| Ok(at?));
        Ok(Self { run: moment()?, date: moment()? })
    }

    /// Returns the clock of chat templates.
    pub fn clock(self) -> Clock {
        Clock::Fixed((self.date / 1000).cast_signed())
    }

    /// Returns the start in seconds since 1970.
    pub fn seconds(self) -> f64 {
        self.run as f64 / 1e3
    }

    /// Returns the start in the format of lm-eval's file names: `2026-01-02T03-04-05.678000`.
    pub fn file_stamp(self) -> String {
        let seconds = Clock::Fixed((self.run / 1000).cast_signed()).format("%Y-%m-%dT%H-%M-%S").unwrap_or_default();
        format!("{seconds}.{:03}000", self.run % 1000)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candlewick_comm::{Options, World, threads};

    use super::*;

    #[test]
    fn all_ranks_have_the_id_of_rank_0() {
        let rank = |world: &World| {
            let process = ProcessGroup::new(world)?;
            let own = RunId { run: 10 + process.rank() as u64, date: 20 + process.rank() as u64 };
            RunId::agree(&process, Ok(own))
        };
        let ids = threads::run(3, Options::default(), rank).unwrap();
        assert_eq!(ids, [RunId { run: 10, date: 20 }; 3]);
    }

    #[test]
    fn a_start_is_formatted_as_in_lm_eval() {
        let id = RunId { run: 1_767_323_045_007, date: 0 };
        assert_eq!(id.file_stamp(), "2026-01-02T03-04-05.007000");
        assert_eq!(id.seconds(), 1_767_323_045.007);
        assert_eq!(id.clock().format("%F").unwrap(), "1970-01-01");
    }
}
