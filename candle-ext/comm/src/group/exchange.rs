//! The operations as exchanges of slices: who sends which elements to whom, and in which order they are summed.
//!
//! n ranks, me this one. Every element is summed by one rank, in rank order, and handed to the others: the bits are the
//! same everywhere, whatever the engine.

use std::ops::Range;

use bytemuck::{Pod, cast_slice, cast_slice_mut};

use crate::Reduce;
use crate::element::{Element, combine};
use crate::fabric::{Links, Trouble};

/// How much of each rank's share is summed at a time: what was received is still in the cache when it is added.
const PIECE_BYTES: usize = 1 << 18;

/// One rank's connections, and its place among them.
pub(super) struct Peers<'a> {
    pub(super) links: &'a mut dyn Links,
    pub(super) me: usize,
    pub(super) n: usize,
}

impl Peers<'_> {
    /// Sends `send[r]` to each rank r and fills `recv[r]` from it; this rank's own are left alone.
    fn swap<T: Element>(&mut self, mut send: Vec<&[T]>, mut recv: Vec<&mut [T]>) -> Result<(), Trouble> {
        send[self.me] = &[];
        recv[self.me] = &mut [];
        let send: Vec<&[u8]> = send.into_iter().map(cast_slice).collect();
        let mut recv: Vec<&mut [u8]> = recv.into_iter().map(cast_slice_mut).collect();
        self.links.exchange(&send, &mut recv)
    }
}

/// out = x_0 + x_1 + ... over the ranks, or their maximum or minimum.
pub(super) fn all_reduce<T: Element>(
    peers: &mut Peers,
    scratch: &mut Scratch,
    x: &[T],
    op: Reduce,
) -> Result<Vec<T>, Trouble> {
    let mut out = vec![T::zeroed(); x.len()];
    for piece in pieces::<T>(&shares(x.len(), peers.n)) {
        let own = combined(peers, scratch, x, &piece, op)?;
        out[piece[peers.me].clone()].copy_from_slice(own);
        peers.swap(vec![own; peers.n], disjoint(&mut out, &piece))?;
    }
    Ok(out)
}

/// out = this rank's share of the sum; x splits evenly.
pub(super) fn reduce_scatter<T: Element>(peers: &mut Peers, scratch: &mut Scratch, x: &[T]) -> Result<Vec<T>, Trouble> {
    let mut out = Vec::with_capacity(x.len() / peers.n);
    for piece in pieces::<T>(&shares(x.len(), peers.n)) {
        out.extend_from_slice(combined(peers, scratch, x, &piece, Reduce::Sum)?);
    }
    Ok(out)
}

/// out = x_0, x_1, ...
pub(super) fn all_gather<T: Element>(peers: &mut Peers, x: &[T]) -> Result<Vec<T>, Trouble> {
    let places = spans(&vec![x.len(); peers.n]);
    let mut out = vec![T::zeroed(); x.len() * peers.n];
    out[places[peers.me].clone()].copy_from_slice(x);
    peers.swap(vec![x; peers.n], disjoint(&mut out, &places))?;
    Ok(out)
}

/// Sends `send[r]` elements to each rank r, in order; out = `recv[r]` elements from each.
pub(super) fn all_to_all<T: Element>(
    peers: &mut Peers,
    x: &[T],
    send: &[usize],
    recv: &[usize],
) -> Result<Vec<T>, Trouble> {
    let parts: Vec<&[T]> = spans(send).into_iter().map(|part| &x[part]).collect();
    let places = spans(recv);
    let mut out = vec![T::zeroed(); recv.iter().sum()];
    out[places[peers.me].clone()].copy_from_slice(parts[peers.me]);
    peers.swap(parts, disjoint(&mut out, &places))?;
    Ok(out)
}

/// out = x of `root`.
pub(super) fn broadcast<T: Element>(peers: &mut Peers, x: &[T], root: usize) -> Result<Vec<T>, Trouble> {
    let mut out = x.to_vec();
    if peers.me == root {
        peers.swap(vec![x; peers.n], nothing(peers.n))?;
    } else {
        let mut recv = nothing(peers.n);
        recv[root] = &mut out;
        peers.swap(vec![&[]; peers.n], recv)?;
    }
    Ok(out)
}

/// Room in which sums are taken. It is kept from call to call: fresh memory costs more than the sums do.
#[derive(Default)]
pub(super) struct Scratch {
    inbox: Vec<u64>,
    wide: Vec<u64>,
    out: Vec<u64>,
}

/// Gives each rank its part of `x`, and combines the parts that this rank is given.
fn combined<'a, T: Element>(
    peers: &mut Peers,
    scratch: &'a mut Scratch,
    x: &[T],
    piece: &[Range<usize>],
    op: Reduce,
) -> Result<&'a [T], Trouble> {
    let own = &x[piece[peers.me].clone()];
    let places = spans(&vec![own.len(); peers.n]);
    let inbox = room::<T>(&mut scratch.inbox, own.len() * peers.n);
    let send = piece.iter().map(|part| &x[part.clone()]).collect();
    peers.swap(send, disjoint(inbox, &places))?;
    let mut parts: Vec<&[T]> = places.iter().map(|place| &inbox[place.clone()]).collect();
    parts[peers.me] = own;
    let out = room(&mut scratch.out, own.len());
    combine(op, &parts, room(&mut scratch.wide, own.len()), out);
    Ok(out)
}

/// Borrows room for `n` elements.
fn room<T: Pod>(words: &mut Vec<u64>, n: usize) -> &mut [T] {
    let n_words = (n * size_of::<T>()).div_ceil(size_of::<u64>());
    words.resize(n_words.max(words.len()), 0);
    &mut cast_slice_mut(&mut words[..n_words])[..n]
}

/// Splits `n_elements` among `n` ranks, as evenly as can be.
fn shares(n_elements: usize, n: usize) -> Vec<Range<usize>> {
    (0..n).map(|r| n_elements * r / n..n_elements * (r + 1) / n).collect()
}

/// Goes through all shares at once, piece by piece: each item has a range a rank.
fn pieces<T>(shares: &[Range<usize>]) -> impl Iterator<Item = Vec<Range<usize>>> {
    let step = PIECE_BYTES / size_of::<T>();
    let longest = shares.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
    (0..longest).step_by(step).map(move |at| {
        let part = |share: &Range<usize>| (share.start + at).min(share.end)..(share.start + at + step).min(share.end);
        shares.iter().map(part).collect()
    })
}

/// Returns where parts of these lengths lie, one after another.
fn spans(lengths: &[usize]) -> Vec<Range<usize>> {
    let ends = lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end)
    });
    ends.zip(lengths).map(|(end, length)| end - length..end).collect()
}

/// Borrows parts of `buffer`, which are in order and do not overlap.
fn disjoint<'a, T>(buffer: &'a mut [T], parts: &[Range<usize>]) -> Vec<&'a mut [T]> {
    let mut rest = buffer;
    let mut at = 0;
    let mut cut = |part: &Range<usize>| {
        let (_, from_start) = std::mem::take(&mut rest).split_at_mut(part.start - at);
        let (wanted, after) = from_start.split_at_mut(part.len());
        (rest, at) = (after, part.end);
        wanted
    };
    parts.iter().map(&mut cut).collect()
}

fn nothing<'a, T>(n: usize) -> Vec<&'a mut [T]> {
    (0..n).map(|_| <&mut [T]>::default()).collect()
}
