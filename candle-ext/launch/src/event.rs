//! What the launcher waits for, on one channel.

use std::fs;
use std::io;
use std::sync::mpsc::Sender;
use std::thread;

use signal_hook::consts::{SIGHUP, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use crate::exit::ExitReason;

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A worker ended.
    Exited {
        /// Its number on this machine.
        local_rank: usize,
        /// How.
        reason: ExitReason,
    },
    /// The launcher got a signal.
    Signal(i32),
    /// Something happened on another node.
    Peer {
        /// In which generation: an earlier one's news is none.
        generation: usize,
        /// What.
        peer: PeerEvent,
    },
}

/// What happens on other nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerEvent {
    /// Workers failed, or the node is silent; the text says which.
    Failed(String),
    /// The store is gone, and the node that hosts it.
    Lost(String),
    /// It was asked to stop, and will not come back.
    Stopped(String),
    /// A worker saved and ended, as all are about to.
    Saved(String),
    /// A node would like to join.
    Joins,
}

/// Signals that are passed on and end nothing: what they mean is the program's business.
pub const FORWARDED_SIGNALS: [i32; 2] = [SIGUSR1, SIGUSR2];

/// Sends the signals of `ending` and those that are passed on to `events` from now on.
pub fn catch_signals(ending: &[i32], events: Sender<Event>) -> io::Result<()> {
    // Who is started by nohup shall not die of the terminal's end. Other signals a shell ignores for what it starts by `&`.
    let is_nohup = is_ignored(SIGHUP);
    let wanted = ending.iter().chain(&FORWARDED_SIGNALS).filter(|signal| !(is_nohup && **signal == SIGHUP));
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

/// Says whether this process was started to ignore a signal.
fn is_ignored(signal: i32) -> bool {
    is_in_mask("self", "SigIgn:", signal)
}

/// Says whether a process has a handler for a signal.
pub fn is_caught(pid: i32, signal: i32) -> bool {
    is_in_mask(&pid.to_string(), "SigCgt:", signal)
}

fn is_in_mask(process: &str, name: &str, signal: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix(name));
    let mask = mask.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}
