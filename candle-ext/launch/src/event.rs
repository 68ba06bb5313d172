//! What the launcher waits for, on one channel.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::sync::mpsc::Sender;
use std::thread;

use signal_hook::consts::{SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use crate::ended::Ended;

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A worker ended.
    Ended {
        /// Its number on this machine.
        local_rank: usize,
        /// How.
        ended: Ended,
    },
    /// The launcher got a signal.
    Signal(i32),
    /// Something happened on another node.
    Peer {
        /// In which round: an earlier one's news is none.
        round: usize,
        /// What.
        peer: Peer,
    },
}

/// What happens on other nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Workers failed, or the node is gone; the text says which.
    Failed(String),
    /// A node would like to join.
    Joins,
}

/// Signals that are passed on and end nothing: what they mean is the program's business.
pub const PASSED_ON: [i32; 2] = [SIGUSR1, SIGUSR2];

/// Sends the signals of `ending` and those that are passed on to `events` from now on.
pub fn catch_signals(ending: &[i32], events: Sender<Event>) -> io::Result<()> {
    let ignored = ignored_signals();
    // Who is started by nohup shall not die of the terminal's end.
    let wanted = ending.iter().chain(&PASSED_ON).filter(|signal| !ignored.contains_key(*signal));
    let mut signals = Signals::new(wanted)?;
    thread::spawn(move || {
        for signal in signals.forever() {
            if events.send(Event::Signal(signal)).is_err() {
                return;
            }
        }
    });
    Ok(())
}

/// The signals that this process was started to ignore.
fn ignored_signals() -> BTreeMap<i32, ()> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    (1..=64).filter(|signal| mask >> (signal - 1) & 1 == 1).map(|signal| (signal, ())).collect()
}
