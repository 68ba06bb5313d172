//! The operations as exchanges of slices: who sends which elements to whom, and in which order they are summed.
//!
//! n ranks, me this one. Every element is summed by one rank, in rank order, and handed to the others: the bits are the
//! same everywhere, whatever the engine.

use std::ops::Range;

use bytemuck::{Pod, cast_slice, cast_slice_mut};

use crate::Reduce;
use crate::element::{ReduceElement, TensorBytes, combine};
use crate::transport::{Connections, TransportError};

/// How much goes to each rank at a time: what was received is still in the cache when it is added, and a tensor's storage
/// is locked for no longer than it takes to copy so much.
pub(super) const CHUNK_BYTES: usize = 1 << 18;

/// One rank's connections, and its place among them.
pub(super) struct Peers<'a> {
    pub(super) connections: &'a mut dyn Connections,
    pub(super) me: usize,
    pub(super) n: usize,
}

impl Peers<'_> {
    /// Sends `send[r]` to each rank r and fills `recv[r]` from it; this rank's own are left alone.
    fn exchange<T: Pod>(&mut self, mut send: Vec<&[T]>, mut recv: Vec<&mut [T]>) -> Result<(), TransportError> {
        send[self.me] = &[];
        recv[self.me] = &mut [];
        let send: Vec<&[u8]> = send.into_iter().map(cast_slice).collect();
        let mut recv: Vec<&mut [u8]> = recv.into_iter().map(cast_slice_mut).collect();
        self.connections.exchange(&send, &mut recv)
    }

    /// Gives every rank what each has at its place in `out`.
    fn all_gather_in_place<T: Pod>(&mut self, out: &mut [T], ranges: &[Range<usize>]) -> Result<(), TransportError> {
        let mut recv = disjoint(out, ranges);
        let own = std::mem::take(&mut recv[self.me]);
        self.exchange(vec![&*own; self.n], recv)
    }

    /// Sends `send[r]` to each rank r and returns what each rank sends this one, in rank order; `inbox` is where it lies.
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

/// Room for what is on its way. It is kept from call to call: fresh memory costs more than the sums do.
#[derive(Default)]
pub(super) struct Scratch {
    inbox: Vec<u64>,
    outbox: Vec<u64>,
}

/// out = x_0 + x_1 + ... over the ranks, or their maximum or minimum.
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

/// out = this rank's share of the sum; x splits evenly.
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

/// out = x_0, x_1, ...
pub(super) fn all_gather(peers: &mut Peers, x: &TensorBytes, out: &mut [u8]) -> Result<(), TransportError> {
    let ranges = spans(&vec![x.n_bytes(); peers.n]);
    x.read(0, &mut out[ranges[peers.me].clone()])?;
    peers.all_gather_in_place(out, &ranges)
}

/// Sends `send[r]` bytes to each rank r, in order; out = `recv[r]` bytes from each.
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
    // Both ends of each way cut it into the same chunks.
    let longest = send.iter().chain(&recv).map(ExactSizeIterator::len).max().unwrap_or(0);
    for at in (0..longest).step_by(CHUNK_BYTES) {
        let [from, to] = [&send, &recv].map(|ranges| cut(ranges, at, CHUNK_BYTES));
        let lengths: Vec<usize> = from.iter().map(ExactSizeIterator::len).collect();
        let mut staged = disjoint(borrow_buffer::<u8>(&mut scratch.outbox, lengths.iter().sum()), &spans(&lengths));
        for (part, staged) in from.iter().zip(&mut staged).filter(|(part, _)| !part.is_empty()) {
            x.expect("only a tensor has a length").read(part.start, staged)?;
        }
        peers.exchange(staged.into_iter().map(|staged| &*staged).collect(), disjoint(out, &to))?;
    }
    Ok(())
}

/// out = x of `root`. The root sends each rank its share of x; each hands its share on.
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

/// Borrows room for `n` elements.
fn borrow_buffer<T: Pod>(words: &mut Vec<u64>, n: usize) -> &mut [T] {
    let n_words = (n * size_of::<T>()).div_ceil(size_of::<u64>());
    words.resize(n_words.max(words.len()), 0);
    &mut cast_slice_mut(&mut words[..n_words])[..n]
}

/// Splits `n_elements` among `n` ranks, as evenly as can be.
fn shard_ranges(n_elements: usize, n: usize) -> Vec<Range<usize>> {
    let end = |r: usize| (n_elements as u128 * r as u128 / n as u128) as usize;
    (0..n).map(|r| end(r)..end(r + 1)).collect()
}

/// Goes through all shard_ranges at once, chunk by chunk: each item has a range a rank.
fn chunks<T>(shard_ranges: &[Range<usize>]) -> impl Iterator<Item = Vec<Range<usize>>> {
    let step = CHUNK_BYTES / size_of::<T>();
    let longest = shard_ranges.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
    (0..longest).step_by(step).map(move |at| cut(shard_ranges, at, step))
}

/// Of each range, the part that begins `at` elements after its start and has `step` elements, or what there is of it.
fn cut(ranges: &[Range<usize>], at: usize, step: usize) -> Vec<Range<usize>> {
    let part = |all: &Range<usize>| (all.start + at).min(all.end)..(all.start + at + step).min(all.end);
    ranges.iter().map(part).collect()
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

    /// Connections over which another view of a tensor is written to while its exchange is under way.
    struct Writing(Tensor);

    impl Connections for Writing {
        fn exchange(&mut self, _send: &[&[u8]], _recv: &mut [&mut [u8]]) -> Result<(), TransportError> {
            let (other, ones, (sender, written)) = (self.0.clone(), self.0.ones_like()?, channel());
            thread::spawn(move || sender.send(other.slice_set(&ones, 0, 0)));
            written.recv_timeout(Duration::from_secs(20)).expect("the tensor is locked")?;
            Ok(())
        }
    }

    #[track_caller]
    fn check(operation: impl FnOnce(&mut Peers, &mut Scratch, &TensorBytes) -> Result<(), TransportError>) {
        let all = Tensor::zeros((2, 1024), DType::F32, &Device::Cpu).expect("there is room");
        let [own, other] = [0, 1].map(|row| all.narrow(0, row, 1).expect("there are two rows"));
        let mut connections = Writing(other);
        let source = TensorBytes::new(&own).expect("it is on the CPU");
        operation(&mut Peers { connections: &mut connections, me: 0, n: 2 }, &mut Scratch::default(), &source)
            .expect("it is done");
    }

    #[test]
    fn other_views_of_a_tensor_may_be_written_to_meanwhile() {
        check(|peers, scratch, x| all_reduce(peers, scratch, x, Reduce::Sum, &mut [0f32; 1024]));
        check(|peers, scratch, x| reduce_scatter(peers, scratch, x, &mut [0f32; 512]));
        check(|peers, _, x| all_gather(peers, x, &mut [0; 8192]));
        check(|peers, scratch, x| all_to_all(peers, scratch, Some(x), [&[2048, 2048], &[2048, 2048]], &mut [0; 4096]));
        check(|peers, _, x| broadcast(peers, x, 0, &mut [0; 4096]));
    }
}
