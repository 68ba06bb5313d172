//! The collectives as exchanges of slices between `n` ranks, of which `me` is this one.
//!
//! One rank reduces each element, in rank order, and sends the result to the others. All ranks and all backends therefore get
//! the same bits.

use std::ops::Range;

use bytemuck::{Pod, cast_slice, cast_slice_mut};

use crate::Reduce;
use crate::element::{ReduceElement, TensorBytes, combine};
use crate::transport::{Connections, TransportError};

/// Number of bytes that an exchange sends to each rank.
///
/// A received chunk is still in the cache when it is reduced, and a tensor's storage is locked for one chunk's copy at a time.
pub(super) const CHUNK_BYTES: usize = 1 << 18;

/// Connections of one rank to its group.
pub(super) struct Peers<'a> {
    pub(super) connections: &'a mut dyn Connections,
    pub(super) me: usize,
    pub(super) n: usize,
}

impl Peers<'_> {
    /// Sends `send[r]` to each other rank `r` and receives `recv[r]` from it. Ignores this rank's own entries.
    fn exchange<T: Pod>(&mut self, mut send: Vec<&[T]>, mut recv: Vec<&mut [T]>) -> Result<(), TransportError> {
        send[self.me] = &[];
        recv[self.me] = &mut [];
        let send: Vec<&[u8]> = send.into_iter().map(cast_slice).collect();
        let mut recv: Vec<&mut [u8]> = recv.into_iter().map(cast_slice_mut).collect();
        self.connections.exchange(&send, &mut recv)
    }

    /// Sends this rank's range of `out` to all ranks and receives theirs.
    fn all_gather_in_place<T: Pod>(&mut self, out: &mut [T], ranges: &[Range<usize>]) -> Result<(), TransportError> {
        let mut recv = disjoint(out, ranges);
        let own = std::mem::take(&mut recv[self.me]);
        self.exchange(vec![&*own; self.n], recv)
    }

    /// Sends `send[r]` to each rank `r` and returns the slices received from all ranks, in rank order, in `inbox`.
    fn exchange_parts<'i, T: Pod>(
        &mut self,
        inbox: &'i mut Vec<u64>,
        send: Vec<&[T]>,
    ) -> Result<Vec<&'i [T]>, TransportError> {
        let own = send[self.me];
        let ranges = spans(&vec![own.len(); self.n]);
        let inbox = borrow_buffer::<T>(inbox, own.len() * self.n);
        inbox[ranges[self.me].clone()].copy_from_slice(own);
        self.exchange(send, disjoint(inbox, &ranges))?;
        let inbox: &[T] = inbox;
        Ok(ranges.into_iter().map(|place| &inbox[place]).collect())
    }
}

/// Buffers of an exchange, reused from call to call: page faults of fresh memory cost more than the reduction.
#[derive(Default)]
pub(super) struct Scratch {
    inbox: Vec<u64>,
    outbox: Vec<u64>,
}

/// Computes `out = x_0 + x_1 + ...` over the ranks, or their maximum or minimum.
pub(super) fn all_reduce<T: ReduceElement>(
    peers: &mut Peers,
    scratch: &mut Scratch,
    x: &TensorBytes,
    op: Reduce,
    out: &mut [T],
) -> Result<(), TransportError> {
    for chunk in chunks::<T>(&shard_ranges(out.len(), peers.n)) {
        for part in &chunk {
            x.read_elements(part.start, &mut out[part.clone()])?;
        }
        let parts = peers.exchange_parts(&mut scratch.inbox, chunk.iter().map(|part| &out[part.clone()]).collect())?;
        combine(op, &parts, &mut out[chunk[peers.me].clone()]);
        peers.all_gather_in_place(out, &chunk)?;
    }
    Ok(())
}

/// Computes this rank's shard of the sum. The size of `x` can be divided by `n`.
pub(super) fn reduce_scatter<T: ReduceElement>(
    peers: &mut Peers,
    scratch: &mut Scratch,
    x: &TensorBytes,
    out: &mut [T],
) -> Result<(), TransportError> {
    let shard_ranges = shard_ranges(out.len() * peers.n, peers.n);
    for chunk in chunks::<T>(&shard_ranges) {
        let outbox = borrow_buffer::<T>(&mut scratch.outbox, chunk[0].len() * peers.n);
        let mut send = Vec::with_capacity(peers.n);
        for (part, staged) in chunk.iter().zip(outbox.chunks_exact_mut(chunk[0].len())) {
            x.read_elements(part.start, staged)?;
            send.push(&*staged);
        }
        let parts = peers.exchange_parts(&mut scratch.inbox, send)?;
        let at = chunk[peers.me].start - shard_ranges[peers.me].start;
        combine(Reduce::Sum, &parts, &mut out[at..at + chunk[peers.me].len()]);
    }
    Ok(())
}

/// Concatenates `x_0, x_1, ...` into `out`.
pub(super) fn all_gather(peers: &mut Peers, x: &TensorBytes, out: &mut [u8]) -> Result<(), TransportError> {
    let ranges = spans(&vec![x.n_bytes(); peers.n]);
    x.read(0, &mut out[ranges[peers.me].clone()])?;
    peers.all_gather_in_place(out, &ranges)
}

/// Sends the next `send[r]` bytes of `x` to each rank `r`, and receives `recv[r]` bytes from it into `out`.
pub(super) fn all_to_all(
    peers: &mut Peers,
    scratch: &mut Scratch,
    x: Option<&TensorBytes>,
    [send, recv]: [&[usize]; 2],
    out: &mut [u8],
) -> Result<(), TransportError> {
    let [mut send, mut recv] = [send, recv].map(spans);
    if let Some(x) = x {
        x.read(send[peers.me].start, &mut out[recv[peers.me].clone()])?;
    }
    for ranges in [&mut send, &mut recv] {
        ranges[peers.me].end = ranges[peers.me].start;
    }
    // Sender and receiver split a transfer into the same chunks.
    let longest = send.iter().chain(&recv).map(ExactSizeIterator::len).max().unwrap_or(0);
    for at in (0..longest).step_by(CHUNK_BYTES) {
        let [from, to] = [&send, &recv].map(|ranges| cut(ranges, at, CHUNK_BYTES));
        let lengths: Vec<usize> = from.iter().map(ExactSizeIterator::len).collect();
        let mut staged = disjoint(borrow_buffer::<u8>(&mut scratch.outbox, lengths.iter().sum()), &spans(&lengths));
        for (part, staged) in from.iter().zip(&mut staged).filter(|(part, _)| !part.is_empty()) {
            x.expect("a non-empty part has a tensor").read(part.start, staged)?;
        }
        peers.exchange(staged.into_iter().map(|staged| &*staged).collect(), disjoint(out, &to))?;
    }
    Ok(())
}

/// Copies `x` of `root` into `out`. The root scatters shards of `x`, and the ranks all-gather them.
pub(super) fn broadcast(peers: &mut Peers, x: &TensorBytes, root: usize, out: &mut [u8]) -> Result<(), TransportError> {
    let ranges = shard_ranges(out.len(), peers.n);
    if peers.me == root {
        x.read(0, out)?;
        let out: &[u8] = out;
        peers.exchange(ranges.iter().map(|place| &out[place.clone()]).collect(), empty_slices(peers.n))?;
        let own = &out[ranges[root].clone()];
        return peers.exchange(vec![own; peers.n], empty_slices(peers.n));
    }
    let mut recv = empty_slices(peers.n);
    recv[root] = &mut out[ranges[peers.me].clone()];
    peers.exchange(vec![&[]; peers.n], recv)?;
    let mut recv = disjoint(out, &ranges);
    let own = std::mem::take(&mut recv[peers.me]);
    let mut send = vec![&*own; peers.n];
    send[root] = &[];
    peers.exchange(send, recv)
}

/// Borrows `n` elements of a buffer and grows it if needed.
fn borrow_buffer<T: Pod>(words: &mut Vec<u64>, n: usize) -> &mut [T] {
    let n_words = (n * size_of::<T>()).div_ceil(size_of::<u64>());
    words.resize(n_words.max(words.len()), 0);
    &mut cast_slice_mut(&mut words[..n_words])[..n]
}

/// Returns the ranges of `n` shards whose sizes differ by at most one.
fn shard_ranges(n_elements: usize, n: usize) -> Vec<Range<usize>> {
    let end = |r: usize| (n_elements as u128 * r as u128 / n as u128) as usize;
    (0..n).map(|r| end(r)..end(r + 1)).collect()
}

/// Splits all shards into chunks. Each item has one range per shard.
fn chunks<T>(shards: &[Range<usize>]) -> impl Iterator<Item = Vec<Range<usize>>> {
    let step = CHUNK_BYTES / size_of::<T>();
    let longest = shards.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
    (0..longest).step_by(step).map(move |at| cut(shards, at, step))
}

/// Returns the elements `at..at + step` of each range, clipped to the range.
fn cut(ranges: &[Range<usize>], at: usize, step: usize) -> Vec<Range<usize>> {
    let part = |all: &Range<usize>| (all.start + at).min(all.end)..(all.start + at + step).min(all.end);
    ranges.iter().map(part).collect()
}

/// Returns the ranges of consecutive parts of these lengths.
fn spans(lengths: &[usize]) -> Vec<Range<usize>> {
    let ends = lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end)
    });
    ends.zip(lengths).map(|(end, length)| end - length..end).collect()
}

/// Borrows disjoint parts of `buffer`, given in order.
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

fn empty_slices<'a, T>(n: usize) -> Vec<&'a mut [T]> {
    (0..n).map(|_| <&mut [T]>::default()).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use candle_core::{DType, Device, Tensor};

    use super::*;

    /// Connections whose exchange writes to another view of the tensor.
    struct Writing(Tensor);

    impl Connections for Writing {
        fn exchange(&mut self, _send: &[&[u8]], _recv: &mut [&mut [u8]]) -> Result<(), TransportError> {
            let (other, ones, (sender, written)) = (self.0.clone(), self.0.ones_like()?, channel());
            thread::spawn(move || sender.send(other.slice_set(&ones, 0, 0)));
            written.recv_timeout(Duration::from_secs(60)).expect("the tensor is locked")?;
            Ok(())
        }
    }

    #[track_caller]
    fn check(operation: impl FnOnce(&mut Peers, &mut Scratch, &TensorBytes) -> Result<(), TransportError>) {
        let all = Tensor::zeros((2, 1024), DType::F32, &Device::Cpu).expect("the tensor fits into memory");
        let [own, other] = [0, 1].map(|row| all.narrow(0, row, 1).expect("the tensor has two rows"));
        let mut connections = Writing(other);
        let source = TensorBytes::new(&own).expect("the tensor is on the CPU");
        operation(&mut Peers { connections: &mut connections, me: 0, n: 2 }, &mut Scratch::default(), &source)
            .expect("the operation succeeds");
    }

    #[test]
    fn other_views_of_a_tensor_may_be_written_to_during_an_exchange() {
        check(|peers, scratch, x| all_reduce(peers, scratch, x, Reduce::Sum, &mut [0f32; 1024]));
        check(|peers, scratch, x| reduce_scatter(peers, scratch, x, &mut [0f32; 512]));
        check(|peers, _, x| all_gather(peers, x, &mut [0; 8192]));
        check(|peers, scratch, x| all_to_all(peers, scratch, Some(x), [&[2048, 2048], &[2048, 2048]], &mut [0; 4096]));
        check(|peers, _, x| broadcast(peers, x, 0, &mut [0; 4096]));
    }
}
