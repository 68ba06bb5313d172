//! Description of a rank's process, which ranks exchange in the rendezvous.

use std::fmt;
use std::fs;

use crate::node::boot_id;

/// Version of the protocol between ranks. Ranks with different versions do not connect.
const PROTOCOL: &str = "candlewick-peer-1";

/// Process and node of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerInfo {
    pub(crate) rank: usize,
    /// World size of the rank.
    pub(crate) size: usize,
    /// Host name of the node, for messages.
    pub(crate) host: String,
    /// Kernel's boot id. It differs between any two running machines; containers of one machine share it.
    pub(crate) boot_id: String,
    /// Network and user namespace, the scope of socket names and user ids. A container has its own.
    pub(crate) namespaces: String,
    pub(crate) uid: u32,
    /// Address of the rank in its transport: the name of a Unix socket, or the UUID of a GPU.
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

    /// Encodes all fields except the rank.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let Self { rank: _, size, host, boot_id, namespaces, uid, address, pid } = self;
        format!("{PROTOCOL}\n{size}\n{host}\n{boot_id}\n{namespaces}\n{uid}\n{address}\n{pid}").into_bytes()
    }

    /// Decodes the description of `rank`. Returns `None` for another protocol version.
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

/// Formats a rank: `rank 2 (pid 4711 on node7)`.
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
    fn a_decoded_peer_equals_the_encoded_peer() {
        let info = PeerInfo::this_process(2, 3, "socket".to_owned());
        assert_eq!(PeerInfo::decode(2, &info.encode()), Some(info.clone()));
        let named = PeerInfo { host: "node7".to_owned(), pid: 4711, ..info };
        assert_eq!(named.to_string(), "rank 2 (pid 4711 on node7)");
        assert_eq!(PeerInfo::decode(2, b"another-program\n3\nhost\nboot\nnet user\n0\nsocket\n7"), None);
        assert_eq!(PeerInfo::decode(2, format!("{PROTOCOL}\n3\nhost").as_bytes()), None);
        assert_eq!(PeerInfo::decode(2, &[]), None);
    }
}
