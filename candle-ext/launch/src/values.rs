//! Parsed values of flags: node and process counts, rendezvous options, local ranks, signals and line filters.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use signal_hook::low_level::signal_name;

/// The number of nodes: `N`, or `MIN:MAX` for an elastic job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeRange {
    /// Minimum number of nodes.
    pub min: usize,
    /// Maximum number of nodes.
    pub max: usize,
}

/// The number of workers per node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NprocPerNode {
    /// A fixed number.
    Exactly(usize),
    /// One per GPU, or one per core without a GPU.
    Auto,
    /// One per GPU.
    Gpu,
    /// One per core.
    Cpu,
}

/// The rendezvous backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RendezvousBackend {
    /// Every node gets its rank on the command line.
    Static,
    /// Node ranks follow the order of arrival at a store, which one of the nodes hosts.
    C10d,
}

/// The `key=value` pairs of `--rdzv-conf`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RendezvousOptions(pub BTreeMap<String, String>);

/// A list of local ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalRanks(pub BTreeSet<usize>);

/// Filter words. A line matches if it contains one of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LineFilter(pub Vec<String>);

/// The signals of `--signals-to-handle`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignalSet {
    /// The flag's value. Workers get it as TORCHELASTIC_SIGNALS_TO_HANDLE.
    pub text: String,
    /// Signal numbers on this system.
    pub numbers: Vec<i32>,
}

impl FromStr for NodeRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = |text: &str| text.parse::<usize>().map_err(|_| format!("`{text}` is not N or MIN:MAX"));
        let (min, max) = text.split_once(':').unwrap_or((text, text));
        let (min, max) = (parse(min)?, parse(max)?);
        if min == 0 || min > max {
            return Err(format!("expected 1 <= MIN <= MAX, not {min}:{max}"));
        }
        Ok(Self { min, max })
    }
}

impl FromStr for NprocPerNode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "gpu" => Ok(Self::Gpu),
            "cpu" => Ok(Self::Cpu),
            "xpu" => Err("Intel's GPUs are not supported: use auto, cpu or a number".into()),
            _ => match text.parse() {
                Ok(n) if n > 0 => Ok(Self::Exactly(n)),
                _ => Err("expected auto, gpu, cpu or a number of at least 1".into()),
            },
        }
    }
}

impl FromStr for RendezvousBackend {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "static" => Ok(Self::Static),
            "c10d" => Ok(Self::C10d),
            _ if text.starts_with("etcd") => {
                Err("etcd is not supported: use c10d, which needs no separate server".into())
            }
            _ => Err("expected static or c10d".into()),
        }
    }
}

impl FromStr for RendezvousOptions {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let pair = |item: &str| match item.split_once('=').map(|(key, value)| (key.trim(), value.trim())) {
            Some((key, value)) if !key.is_empty() && !value.is_empty() => Ok((key.to_owned(), value.to_owned())),
            _ => Err(format!("`{item}` is not KEY=VALUE, such as timeout=60")),
        };
        let items = text.split(',').filter(|_| !text.trim().is_empty());
        let map: BTreeMap<_, _> = items.map(pair).collect::<Result<_, _>>()?;
        match map.keys().find(|key| !KNOWN_OPTIONS.contains(&key.as_str())) {
            Some(key) => Err(format!("`{key}` is none of {}", KNOWN_OPTIONS.join(", "))),
            None => Ok(Self(map)),
        }
    }
}

/// The rendezvous options of torchrun, without those of etcd.
const KNOWN_OPTIONS: &[&str] = &[
    "close_timeout",
    "heartbeat_timeout",
    "is_host",
    "join_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "last_call_timeout",
    "rank",
    "read_timeout",
    "store_type",
    "timeout",
];

impl FromStr for LocalRanks {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = |item: &str| item.trim().parse().map_err(|_| format!("`{item}` is not a local rank, as in 0,1,2"));
        text.split(',').map(parse).collect::<Result<_, _>>().map(Self)
    }
}

impl FromStr for LineFilter {
    type Err = String;

    /// Splits at commas. A doubled comma stands for a comma in a word.
    fn from_str(text: &str) -> Result<Self, String> {
        const ESCAPED_COMMA: &str = "\0";
        let items = text.replace(",,", ESCAPED_COMMA);
        Ok(Self(items.split(',').map(|item| item.replace(ESCAPED_COMMA, ",")).collect()))
    }
}

impl FromStr for SignalSet {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |name: &str| {
            let name = name.trim();
            let number = (1..=64).find(|number| signal_name(*number) == Some(name));
            let number = number.filter(|number| !signal_hook::consts::FORBIDDEN.contains(number));
            number.ok_or_else(|| format!("`{name}` is not a signal that can be handled, such as SIGTERM"))
        };
        let numbers = text.split(',').map(number).collect::<Result<_, _>>()?;
        Ok(Self { text: text.to_owned(), numbers })
    }
}

impl fmt::Display for RendezvousBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RendezvousBackend::Static => "static",
            RendezvousBackend::C10d => "c10d",
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_doubled_comma_is_part_of_the_word() {
        assert_eq!("a,b,,c".parse::<LineFilter>().unwrap().0, ["a", "b,c"]);
    }

    #[test]
    fn a_signal_without_possible_handler_is_rejected() {
        assert!("SIGTERM, SIGUSR1".parse::<SignalSet>().is_ok());
        for text in ["SIGKILL", "SIGSTOP", "TERM", "SIGTERM,", ""] {
            assert!(text.parse::<SignalSet>().is_err(), "{text}");
        }
    }

    #[test]
    fn an_unknown_rendezvous_option_is_rejected() {
        assert!("".parse::<RendezvousOptions>().unwrap().0.is_empty());
        assert!("timeuot=3".parse::<RendezvousOptions>().unwrap_err().contains("`timeuot` is none of"));
    }
}
