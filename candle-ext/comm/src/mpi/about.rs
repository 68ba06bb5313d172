//! What each rank tells the others about itself.

use std::fmt;

/// Changes with what is said between ranks, so that different programs do not misread each other.
const PROTOCOL: &str = "candlewick-mpi-3";

/// How much room it has in a message.
pub(super) const ABOUT_BYTES: usize = 128;

/// A rank's process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct About {
    pub(super) rank: usize,
    pub(super) pid: u32,
    pub(super) host: String,
}

impl About {
    pub(super) fn encode(&self) -> [u8; ABOUT_BYTES] {
        let Self { rank, pid, host } = self;
        let mut bytes = [0; ABOUT_BYTES];
        let text = format!("{PROTOCOL}\n{rank}\n{pid}\n{host}");
        bytes.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from);
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        let text = String::from_utf8_lossy(&bytes[..end]).into_owned();
        let mut lines = text.split('\n');
        if lines.next()? != PROTOCOL {
            return None;
        }
        let (rank, pid) = (lines.next()?.parse().ok()?, lines.next()?.parse().ok()?);
        Some(Self { rank, pid, host: lines.next()?.to_owned() })
    }
}

/// `rank 2 (pid 4711 on node7)`
impl fmt::Display for About {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, pid, host } = self;
        write!(f, "rank {rank} (pid {pid} on {host})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_read_as_it_was_written() {
        let about = About { rank: 2, pid: 4711, host: "node7".to_owned() };
        assert_eq!(About::decode(&about.encode()), Some(about.clone()));
        assert_eq!(about.to_string(), "rank 2 (pid 4711 on node7)");
        assert_eq!(About::decode(b"another-program\n2\n4711\nnode7"), None);
        assert_eq!(About::decode(&[]), None);
        let long = About { host: "h".repeat(200), ..about };
        assert!(About::decode(&long.encode()).is_some_and(|about| about.pid == 4711 && about.host.len() > 64));
    }
}
