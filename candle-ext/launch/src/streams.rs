//! Selections of stdout and stderr: torchrun's values 0 to 3, for every rank or by local rank.

use std::collections::BTreeMap;
use std::str::FromStr;

/// A selection of a worker's streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StdStreams {
    /// Selects stdout.
    pub out: bool,
    /// Selects stderr.
    pub err: bool,
}

/// A selection for every worker: `3`, or `0:1,1:2` for stdout of local rank 0 and stderr of local rank 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamsPerRank {
    /// One selection for all local ranks.
    Every(StdStreams),
    /// A selection by local rank; empty for missing ranks.
    Of(BTreeMap<usize, StdStreams>),
}

/// A standard output stream of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StdStream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

impl StreamsPerRank {
    /// Returns the selection for one worker.
    pub fn of(&self, local_rank: usize) -> StdStreams {
        match self {
            StreamsPerRank::Every(streams) => *streams,
            StreamsPerRank::Of(map) => map.get(&local_rank).copied().unwrap_or_default(),
        }
    }

    /// Returns whether any stream of any worker is selected.
    pub fn is_any(&self) -> bool {
        match self {
            StreamsPerRank::Every(streams) => streams.out || streams.err,
            StreamsPerRank::Of(map) => map.values().any(|streams| streams.out || streams.err),
        }
    }
}

impl StdStreams {
    /// Returns whether a stream is selected.
    pub fn has(self, stream: StdStream) -> bool {
        match stream {
            StdStream::Out => self.out,
            StdStream::Err => self.err,
        }
    }
}

impl StdStream {
    /// Returns the stream's name: stdout or stderr.
    pub fn name(self) -> &'static str {
        match self {
            StdStream::Out => "stdout",
            StdStream::Err => "stderr",
        }
    }
}

impl FromStr for StdStreams {
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

impl FromStr for StreamsPerRank {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !text.contains(':') {
            return Ok(Self::Every(text.parse()?));
        }
        text.split(',').map(rank_and_streams).collect::<Result<_, _>>().map(Self::Of)
    }
}

fn rank_and_streams(item: &str) -> Result<(usize, StdStreams), String> {
    let not_a_pair = || format!("`{item}` is not LOCAL_RANK:STREAMS, such as 0:3");
    let (rank, streams) = item.split_once(':').ok_or_else(not_a_pair)?;
    Ok((rank.parse().map_err(|_| not_a_pair())?, streams.parse()?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const NEITHER: StdStreams = StdStreams { out: false, err: false };
    const OUT: StdStreams = StdStreams { out: true, err: false };
    const ERR: StdStreams = StdStreams { out: false, err: true };

    #[test]
    fn ranks_missing_from_a_map_select_no_stream() {
        let map: StreamsPerRank = "0:1,12:2".parse().unwrap();
        assert_eq!([0, 1, 12].map(|rank| map.of(rank)), [OUT, NEITHER, ERR]);
        assert!(map.is_any() && !"0:0".parse::<StreamsPerRank>().unwrap().is_any());
    }

    #[test]
    fn an_invalid_stream_selection_is_rejected() {
        for text in ["", "4", "x", "0:4", "0:1,", "a:1", "0:1,1"] {
            assert!(text.parse::<StreamsPerRank>().is_err(), "{text}");
        }
    }
}
