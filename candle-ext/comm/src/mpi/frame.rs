//! Control messages between ranks.

use crate::RankFailure;

/// Control message of one rank to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// The sender has left the world.
    Leave,
    /// The sender has failed. Rank 0 answers with the first failure.
    ReportFailure(RankFailure),
    /// The world has failed.
    Ended(RankFailure),
    /// The group with this id uses this tag.
    Open(i32, String),
    /// Heartbeat of a busy sender.
    Beat,
    /// Heartbeat of a sender that waits for these ranks.
    Waits(Vec<u32>),
}

impl Frame {
    pub(super) fn encode(&self) -> Vec<u8> {
        match self {
            Self::Leave => vec![0],
            Self::ReportFailure(failure) => [&[1][..], &failure.encode()].concat(),
            Self::Ended(failure) => [&[2][..], &failure.encode()].concat(),
            Self::Open(tag, id) => [&[3][..], &tag.to_le_bytes(), id.as_bytes()].concat(),
            Self::Beat => vec![4],
            Self::Waits(ranks) => [5].into_iter().chain(ranks.iter().flat_map(|rank| rank.to_le_bytes())).collect(),
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (kind, rest) = bytes.split_first()?;
        match kind {
            0 => Some(Self::Leave),
            1 => RankFailure::decode(rest).map(Self::ReportFailure),
            2 => RankFailure::decode(rest).map(Self::Ended),
            3 => {
                let (tag, id) = rest.split_first_chunk()?;
                Some(Self::Open(i32::from_le_bytes(*tag), String::from_utf8_lossy(id).into_owned()))
            }
            4 => Some(Self::Beat),
            5 => Some(Self::Waits(rest.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cause;

    #[test]
    fn a_decoded_frame_equals_the_encoded_frame() {
        let failure = RankFailure { rank: 7, cause: Cause::TimedOut, message: "read row 17".to_owned() };
        let open = Frame::Open(32_000, "world/3.1".to_owned());
        for frame in [
            Frame::Leave,
            Frame::ReportFailure(failure.clone()),
            Frame::Ended(failure),
            Frame::Beat,
            Frame::Waits(vec![3, 70_000]),
            open,
        ] {
            assert_eq!(Frame::decode(&frame.encode()), Some(frame));
        }
        assert_eq!([&[][..], &[9], &[1, 0], &[3, 1]].map(Frame::decode), [const { None }; 4]);
    }
}
