//! The events of the agent's queue.

use std::fs;
use std::io;
use std::sync::mpsc::Sender;
use std::thread;

use signal_hook::consts::{SIGHUP, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use crate::exit::ExitReason;

/// An event that the agent handles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A worker exited.
    Exited {
        /// The worker's local rank.
        local_rank: usize,
        /// The exit code or signal.
        reason: ExitReason,
    },
    /// The launcher received a signal.
    Signal(i32),
    /// An event on another node.
    Peer {
        /// The generation of the event. Events of earlier generations are ignored.
        generation: usize,
        /// The event.
        peer: PeerEvent,
    },
}

/// An event on another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerEvent {
    /// Workers failed, or the node sends no heartbeats. The text names the cause.
    Failed(String),
    /// The connection to the store host is lost.
    Lost(String),
    /// The node received a stop signal and leaves for good.
    Stopped(String),
    /// A worker saved a checkpoint and exited. The other workers are expected to follow.
    Saved(String),
    /// A node waits to join.
    Joins,
}

/// Signals that are forwarded to workers and stop nothing. The program defines their meaning.
pub const FORWARDED_SIGNALS: [i32; 2] = [SIGUSR1, SIGUSR2];

/// Sends the signals of `ending` and [`FORWARDED_SIGNALS`] to `events` from now on.
pub fn catch_signals(ending: &[i32], events: Sender<Event>) -> io::Result<()> {
    // nohup ignores SIGHUP, and that must stay. Other ignored signals come from a shell's `&` and are handled.
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

/// Returns whether this process inherited a signal as ignored.
fn is_ignored(signal: i32) -> bool {
    is_in_mask("self", "SigIgn:", signal)
}

/// Returns whether a process has a handler for a signal.
pub fn is_caught(pid: i32, signal: i32) -> bool {
    is_in_mask(&pid.to_string(), "SigCgt:", signal)
}

fn is_in_mask(process: &str, name: &str, signal: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix(name));
    let mask = mask.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}
