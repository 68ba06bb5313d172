//! Typed access to environment variables, and the checks that all launchers share.

use super::env::{Master, Variables};
use super::error::RankEnvError;
use super::launcher::Launcher;
use crate::fnv1a::fnv1a;

pub(super) const LOOPBACK: &str = "127.0.0.1";
pub(super) const DEFAULT_PORT: u16 = 29500;

/// Reader of environment variables. An empty variable counts as unset.
pub(super) struct Reader<'a>(pub(super) &'a Variables);

impl<'a> Reader<'a> {
    pub(super) fn text(&self, name: &str) -> Option<&'a str> {
        self.0.get(name).map(String::as_str).filter(|text| !text.is_empty())
    }

    pub(super) fn number(&self, name: &'static str) -> Result<Option<usize>, RankEnvError> {
        let parse =
            |text: &str| text.parse().map_err(|_| RankEnvError::NotANumber { name, value: text.to_owned(), bound: "" });
        self.text(name).map(parse).transpose()
    }

    pub(super) fn port(&self) -> Result<Option<u16>, RankEnvError> {
        let name = "MASTER_PORT";
        let bound = " up to 65535";
        let parse =
            |text: &str| text.parse().map_err(|_| RankEnvError::NotANumber { name, value: text.to_owned(), bound });
        self.text(name).map(parse).transpose()
    }

    pub(super) fn master(&self, launcher: Launcher, is_single_node: bool, port: u16) -> Result<Master, RankEnvError> {
        let hint = match launcher {
            Launcher::OpenMpi => " (mpirun -x MASTER_ADDR=HOST)",
            Launcher::Pmi => " (mpirun -genv MASTER_ADDR HOST)",
            _ => "",
        };
        let addr = self.text("MASTER_ADDR").or(is_single_node.then_some(LOOPBACK));
        let addr = addr.ok_or(RankEnvError::NoMaster { launcher_name: launcher, hint })?.to_owned();
        let agent = self.text("TORCHELASTIC_USE_AGENT_STORE");
        let agent_hosts_store =
            launcher == Launcher::Torchrun && agent.is_some_and(|text| text.eq_ignore_ascii_case("true"));
        Ok(Master { addr, port: self.port()?.unwrap_or(port), agent_hosts_store })
    }
}

/// Returns a port from a job's id: its last four digits, or the FNV-1a hash of an id that is no number.
///
/// All such ports are below the range from which the system picks ephemeral ports.
pub(super) fn port_of_job(job: &str) -> u16 {
    let number = job.parse().unwrap_or_else(|_| fnv1a(job.bytes().map(u64::from)));
    15000 + (number % 10000) as u16
}

pub(super) fn below(smaller: (&'static str, usize), larger: (&'static str, usize)) -> Result<(), RankEnvError> {
    let error =
        RankEnvError::NotBelow { smaller_name: smaller.0, smaller: smaller.1, larger_name: larger.0, larger: larger.1 };
    (smaller.1 < larger.1).then_some(()).ok_or(error)
}

pub(super) fn at_most(local: (&'static str, usize), all: (&'static str, usize)) -> Result<(), RankEnvError> {
    let error = RankEnvError::TooMany { local_name: local.0, local: local.1, all_name: all.0, all: all.1 };
    (local.1 <= all.1).then_some(()).ok_or(error)
}
