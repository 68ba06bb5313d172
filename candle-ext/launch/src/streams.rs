//! Which of a worker's two streams a flag means: torchrun's 0 to 3, for every rank or by local rank.

use std::collections::BTreeMap;
use std::str::FromStr;

/// A choice among a worker's streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    /// Its stdout.
    pub out: bool,
    /// Its stderr.
    pub err: bool,
}

/// A choice for every worker: `3`, or `0:1,1:2` for stdout of local rank 0 and stderr of local rank 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PerRank {
    /// The same for all.
    Every(Streams),
    /// By local rank; of those not named, neither stream.
    Of(BTreeMap<usize, Streams>),
}

/// One of a worker's streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stream {
    /// Its stdout.
    Out,
    /// Its stderr.
    Err,
}

impl PerRank {
    /// Returns the choice for one worker.
    pub fn of(&self, local_rank: usize) -> Streams {
        match self {
            PerRank::Every(streams) => *streams,
            PerRank::Of(map) => map.get(&local_rank).copied().unwrap_or_default(),
        }
    }

    /// Says whether any stream of any worker is chosen.
    pub fn is_any(&self) -> bool {
        match self {
            PerRank::Every(streams) => streams.out || streams.err,
            PerRank::Of(map) => map.values().any(|streams| streams.out || streams.err),
        }
    }
}

impl Streams {
    /// Says whether a stream is chosen.
    pub fn has(self, stream: Stream) -> bool {
        match stream {
            Stream::Out => self.out,
            Stream::Err => self.err,
        }
    }
}

impl Stream {
    /// Returns the stream's name: stdout or stderr.
    pub fn name(self) -> &'static str {
        match self {
            Stream::Out => "stdout",
            Stream::Err => "stderr",
        }
    }
}

impl FromStr for Streams {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "0" => Ok(Self::default()),
            "1" => Ok(Self { out: true, err: false }),
            "2" => Ok(Self { out: false, err: true }),
            "3" => Ok(Self { out: true, err: true }),
            _ => Err(format!("`{text}` is none of 0 (neither), 1 (stdout), 2 (stderr), 3 (both)")),
        }
    }
}

impl FromStr for PerRank {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !text.contains(':') {
            return Ok(Self::Every(text.parse()?));
        }
        text.split(',').map(rank_and_streams).collect::<Result<_, _>>().map(Self::Of)
    }
}

fn rank_and_streams(item: &str) -> Result<(usize, Streams), String> {
    let not_a_pair = || format!("`{item}` is not LOCAL_RANK:STREAMS, such as 0:3");
    let (rank, streams) = item.split_once(':').ok_or_else(not_a_pair)?;
    Ok((rank.parse().map_err(|_| not_a_pair())?, streams.parse()?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const NEITHER: Streams = Streams { out: false, err: false };
    const OUT: Streams = Streams { out: true, err: false };
    const ERR: Streams = Streams { out: false, err: true };

    #[test]
    fn a_map_leaves_the_others_alone() {
        let map: PerRank = "0:1,12:2".parse().unwrap();
        assert_eq!([0, 1, 12].map(|rank| map.of(rank)), [OUT, NEITHER, ERR]);
        assert!(map.is_any() && !"0:0".parse::<PerRank>().unwrap().is_any());
    }

    #[test]
    fn what_is_neither_form_is_refused() {
        for text in ["", "4", "x", "0:4", "0:1,", "a:1", "0:1,1"] {
            assert!(text.parse::<PerRank>().is_err(), "{text}");
        }
    }
}
