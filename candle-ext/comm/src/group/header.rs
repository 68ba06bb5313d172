//! Header of a call's first message. Ranks compare headers, so that mismatched calls fail instead of hanging.

use std::sync::Arc;

use bytemuck::{Pod, cast_slice, cast_slice_mut};

use crate::arguments::MAX_DIMS;
use crate::element::DTYPES;
use crate::{CollectiveCall, Op, Reduce};

/// Largest tensor, in bytes, that is sent inline with its header. Its all-reduce takes one exchange.
pub(super) const INLINE_BYTES: usize = 8 * (HANDSHAKE_WORDS - HEADER_WORDS);

/// First message of every call: a header, and the tensor if it is small.
///
/// All handshakes have one length, so that mismatched calls do not read each other's data.
pub(super) type Handshake = [u64; HANDSHAKE_WORDS];

const HANDSHAKE_WORDS: usize = 128;
const HEADER_WORDS: usize = 7 + MAX_DIMS;

const ALL_TO_ALL: u64 = 4;

/// Description of a call that ranks send to each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CallHeader {
    kind: u64,
    /// Reduction, root, or digest of a split's lists.
    detail: u64,
    /// Sequence number of the call in its group; for a send, its number between the two ranks.
    number: u64,
    dtype: u64,
    n_dims: u64,
    dims: [u64; MAX_DIMS],
    /// Rows that the sender of this header sends to its receiver in an all_to_all.
    pub(super) rows_sent: u64,
    /// Rows that the sender of this header expects from its receiver.
    rows_expected: u64,
}

impl CallHeader {
    /// Describes `call`. `digest` covers the lists of a split.
    pub(super) fn new(call: &CollectiveCall, digest: u64) -> Self {
        let (kind, detail) = match call.op {
            Op::Barrier => (0, 0),
            Op::AllReduce(Reduce::Sum) => (1, 0),
            Op::AllReduce(Reduce::Max) => (1, 1),
            Op::AllReduce(Reduce::Min) => (1, 2),
            Op::AllGather => (2, 0),
            Op::ReduceScatter => (3, 0),
            Op::AllToAll => (ALL_TO_ALL, 0),
            Op::Broadcast { root } => (5, root as u64),
            Op::SendRecv { .. } => (6, 0),
            Op::Split => (7, digest),
        };
        let mut dims = [0; MAX_DIMS];
        dims.iter_mut().zip(&call.shape).for_each(|(dim, size)| *dim = *size as u64);
        let dtype = call.dtype.and_then(|dtype| DTYPES.iter().position(|known| *known == dtype));
        Self {
            kind,
            detail,
            number: call.number,
            dtype: dtype.map_or(0, |code| code as u64 + 1),
            n_dims: call.shape.len() as u64,
            dims,
            ..Self::default()
        }
    }

    /// Sets the rows of an all_to_all that are sent to the receiver of this header and expected from it.
    pub(super) fn with_rows(self, sent: usize, expected: usize) -> Self {
        Self { rows_sent: sent as u64, rows_expected: expected as u64, ..self }
    }

    /// Replaces the sequence number.
    pub(super) fn with_number(self, number: u64) -> Self {
        Self { number, ..self }
    }

    /// Returns true if the headers of two ranks describe one call of their group.
    pub(super) fn matches(&self, other: &Self) -> bool {
        // The rows of an all_to_all may differ from rank to rank.
        let common = |header: &Self| {
            let mut header = Self { rows_sent: 0, rows_expected: 0, ..*header };
            if header.kind == ALL_TO_ALL {
                header.dims[0] = 0;
            }
            header
        };
        common(self) == common(other)
    }

    /// Returns the call that the header describes.
    pub(super) fn call(&self, group: &Arc<str>) -> CollectiveCall {
        let op = match self.kind {
            1 => Op::AllReduce([Reduce::Sum, Reduce::Max, Reduce::Min][self.detail.min(2) as usize]),
            2 => Op::AllGather,
            3 => Op::ReduceScatter,
            ALL_TO_ALL => Op::AllToAll,
            5 => Op::Broadcast { root: self.detail as usize },
            6 => Op::SendRecv { to: None, from: None },
            7 => Op::Split,
            _ => Op::Barrier,
        };
        let dtype = self.dtype.checked_sub(1).and_then(|code| DTYPES.get(code as usize).copied());
        CollectiveCall { group: Arc::clone(group), number: self.number, op, dtype, shape: self.shape() }
    }

    fn shape(&self) -> Vec<usize> {
        self.dims.iter().take(self.n_dims as usize).map(|dim| *dim as usize).collect()
    }

    /// Encodes the header into a handshake, whose inline tensor is zero.
    pub(super) fn encode(&self) -> Handshake {
        let Self { kind, detail, number, dtype, n_dims, dims, rows_sent, rows_expected } = *self;
        let mut handshake = [0; HANDSHAKE_WORDS];
        handshake[..HEADER_WORDS - MAX_DIMS].copy_from_slice(&[
            kind,
            detail,
            number,
            dtype,
            n_dims,
            rows_sent,
            rows_expected,
        ]);
        handshake[HEADER_WORDS - MAX_DIMS..HEADER_WORDS].copy_from_slice(&dims);
        handshake
    }

    /// Decodes the header of a handshake.
    pub(super) fn decode(handshake: &Handshake) -> Self {
        let [kind, detail, number, dtype, n_dims, rows_sent, rows_expected, rest @ ..] = *handshake;
        let dims = *rest.first_chunk().expect("a handshake is longer than a header");
        Self { kind, detail, number, dtype, n_dims, dims, rows_sent, rows_expected }
    }
}

/// Returns the first `n` elements of a handshake's inline tensor.
pub(super) fn inline<T: Pod>(handshake: &Handshake, n: usize) -> &[T] {
    &cast_slice(&handshake[HEADER_WORDS..])[..n]
}

/// Returns the first `n` bytes of a handshake's inline tensor.
pub(super) fn inline_mut(handshake: &mut Handshake, n: usize) -> &mut [u8] {
    &mut cast_slice_mut(&mut handshake[HEADER_WORDS..])[..n]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candle_core::DType;

    use super::*;

    #[track_caller]
    fn check(op: Op, shape: &[usize]) -> CallHeader {
        let dtype = (!shape.is_empty()).then_some(DType::BF16);
        let call = CollectiveCall { group: "world".into(), number: 1 << 40, op, dtype, shape: shape.to_vec() };
        let header = CallHeader { rows_sent: 3, rows_expected: 4, ..CallHeader::new(&call, 5) };
        assert_eq!(CallHeader::decode(&header.encode()), header);
        assert_eq!(header.call(&call.group), call);
        header
    }

    #[test]
    fn a_decoded_header_describes_the_encoded_call() {
        for op in [Reduce::Sum, Reduce::Max, Reduce::Min] {
            check(Op::AllReduce(op), &[2, 0, 3]);
        }
        for op in [Op::AllGather, Op::ReduceScatter, Op::AllToAll, Op::Broadcast { root: 3 }] {
            check(op, &[1, 2, 3, 4, 5, 6, 7, 8]);
        }
        // The header of a send has no ranks: its receiver knows both.
        let sent = check(Op::SendRecv { to: None, from: None }, &[1]);
        assert_eq!(sent.call(&"world".into()).to_string(), "send_recv 1099511627776 (bf16 [1])");
        check(Op::Barrier, &[]);
        check(Op::Split, &[]);
    }

    #[test]
    fn only_the_rows_of_an_all_to_all_may_differ() {
        assert!(check(Op::AllToAll, &[2, 3]).matches(&check(Op::AllToAll, &[5, 3])));
        assert!(!check(Op::AllToAll, &[2, 3]).matches(&check(Op::AllToAll, &[2, 4])));
        assert!(!check(Op::AllGather, &[2, 3]).matches(&check(Op::AllGather, &[5, 3])));
        assert!(!check(Op::AllGather, &[2]).matches(&check(Op::AllGather, &[2, 0])));
        assert!(!check(Op::AllReduce(Reduce::Sum), &[2]).matches(&check(Op::AllReduce(Reduce::Max), &[2])));
        assert!(!check(Op::Broadcast { root: 0 }, &[2]).matches(&check(Op::Broadcast { root: 1 }, &[2])));
    }
}
