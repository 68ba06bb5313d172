//! The description of a rank's process that it gives the other ranks before they connect.

use std::fmt;
use std::fs;

use crate::node::boot_id;

/// The version of what ranks send each other, so that different programs do not misread each other.
const PROTOCOL: &str = "candlewick-peer-1";

/// A rank's process and machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerInfo {
    pub(crate) rank: usize,
    /// The number of ranks it was started for.
    pub(crate) size: usize,
    /// The machine's name, for people.
    pub(crate) host: String,
    /// A value that differs between any two running machines, also where names are alike. Containers of one machine share it.
    pub(crate) boot_id: String,
    /// The network and user namespace, in which a socket's name and a user's number have a meaning. A container has its own.
    pub(crate) namespaces: String,
    pub(crate) uid: u32,
    /// The transport's address of the rank: the name of a Unix socket, or the UUID of a GPU.
    pub(crate) address: String,
    pub(crate) pid: u32,
}

impl PeerInfo {
    /// Describes this process.
    pub(crate) fn this_process(rank: usize, size: usize, address: String) -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let boot_id = boot_id().unwrap_or_else(|| host.clone());
        let namespace = |kind: &str| fs::read_link(format!("/proc/self/ns/{kind}")).unwrap_or_default();
        let namespaces = ["net", "user"].map(|kind| namespace(kind).to_string_lossy().into_owned()).join(" ");
        let (uid, pid) = (rustix::process::geteuid().as_raw(), std::process::id());
        Self { rank, size, host, boot_id, namespaces, uid, address, pid }
    }

    /// Encodes all but the rank.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let Self { rank: _, size, host, boot_id, namespaces, uid, address, pid } = self;
        format!("{PROTOCOL}\n{size}\n{host}\n{boot_id}\n{namespaces}\n{uid}\n{address}\n{pid}").into_bytes()
    }

    /// Decodes what `rank` has sent; returns nothing for what another version of this program encoded.
    pub(crate) fn decode(rank: usize, bytes: &[u8]) -> Option<Self> {
        let mut lines = std::str::from_utf8(bytes).ok()?.split('\n').map(str::to_owned);
        if lines.next()? != PROTOCOL {
            return None;
        }
        let size = lines.next()?.parse().ok()?;
        let (host, boot_id, namespaces) = (lines.next()?, lines.next()?, lines.next()?);
        let (uid, address) = (lines.next()?.parse().ok()?, lines.next()?);
        Some(Self { rank, size, host, boot_id, namespaces, uid, address, pid: lines.next()?.parse().ok()? })
    }
}

/// `rank 2 (pid 4711 on node7)`
impl fmt::Display for PeerInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, host, pid, .. } = self;
        write!(f, "rank {rank} (pid {pid} on {host})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_read_as_it_was_written() {
        let info = PeerInfo::this_process(2, 3, "socket".to_owned());
        assert_eq!(PeerInfo::decode(2, &info.encode()), Some(info.clone()));
        let named = PeerInfo { host: "node7".to_owned(), pid: 4711, ..info };
        assert_eq!(named.to_string(), "rank 2 (pid 4711 on node7)");
        assert_eq!(PeerInfo::decode(2, b"another-program\n3\nhost\nboot\nnet user\n0\nsocket\n7"), None);
        assert_eq!(PeerInfo::decode(2, format!("{PROTOCOL}\n3\nhost").as_bytes()), None);
        assert_eq!(PeerInfo::decode(2, &[]), None);
    }
}
