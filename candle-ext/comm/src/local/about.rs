//! What each rank tells the others about itself before they connect.

use std::fs;

use crate::machine::boot;

/// Changes with what is said between ranks, so that different programs do not misread each other.
const PROTOCOL: &str = "candlewick-local-4";

/// A rank's process and machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct About {
    /// The number of ranks it was started for.
    pub(super) size: usize,
    /// The machine's name, for people.
    pub(super) host: String,
    /// Differs between any two machines that are up, also where names are alike; containers of one machine share it.
    pub(super) boot: String,
    /// Where its socket's name and its user's number mean something: the network and user namespace. A container has its
    /// own.
    pub(super) namespaces: String,
    pub(super) uid: u32,
    /// The name of its Unix socket.
    pub(super) socket: String,
    pub(super) pid: u32,
}

impl About {
    /// Describes this process, which listens on `socket`.
    pub(super) fn this_process(size: usize, socket: &str) -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let boot = boot().unwrap_or_else(|| host.clone());
        let namespace = |kind: &str| fs::read_link(format!("/proc/self/ns/{kind}")).unwrap_or_default();
        let namespaces = ["net", "user"].map(|kind| namespace(kind).to_string_lossy().into_owned()).join(" ");
        let (uid, pid) = (rustix::process::geteuid().as_raw(), std::process::id());
        Self { size, host, boot, namespaces, uid, socket: socket.to_owned(), pid }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let Self { size, host, boot, namespaces, uid, socket, pid } = self;
        format!("{PROTOCOL}\n{size}\n{host}\n{boot}\n{namespaces}\n{uid}\n{socket}\n{pid}").into_bytes()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut lines = std::str::from_utf8(bytes).ok()?.split('\n').map(str::to_owned);
        if lines.next()? != PROTOCOL {
            return None;
        }
        let size = lines.next()?.parse().ok()?;
        let (host, boot, namespaces) = (lines.next()?, lines.next()?, lines.next()?);
        let (uid, socket) = (lines.next()?.parse().ok()?, lines.next()?);
        Some(Self { size, host, boot, namespaces, uid, socket, pid: lines.next()?.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_read_as_it_was_written() {
        let about = About::this_process(3, "socket");
        assert_eq!(About::decode(&about.encode()), Some(about));
        assert_eq!(About::decode(b"another-program\n3\nhost\nboot\nsocket\n7"), None);
        assert_eq!(About::decode(b"candlewick-local-4\n3\nhost"), None);
    }
}
