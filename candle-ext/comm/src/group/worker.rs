//! Thread of a process group: runs the group's calls in order, and aborts the world if one fails.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut, zeroed_vec};
use candle_core::{DType, Tensor};

use super::exchange::{self, Peers, Scratch};
use super::header::{CallHeader, Handshake, INLINE_BYTES, inline, inline_mut};
use crate::call::span;
use crate::element::{ReduceElement, TensorBytes, combine, tensor, with_type};
use crate::panic::panic_message;
use crate::transport::{Connections, Transport, TransportError};
use crate::{CollectiveCall, Op, Recv, Reduce, Result};

/// State of the thread.
pub(super) struct GroupWorker {
    /// Id of the group in messages; unique in the world.
    pub(super) id: String,
    pub(super) group: Arc<str>,
    /// World ranks of the group's ranks.
    pub(super) members: Vec<usize>,
    pub(super) me: usize,
    pub(super) connections: ByteCounter,
    pub(super) transport: Arc<dyn Transport>,
    /// Numbers of tensors sent to each rank and received from it. Both ranks count alike.
    pub(super) n_sent: Vec<u64>,
    pub(super) n_received: Vec<u64>,
    pub(super) scratch: Scratch,
}

/// Connections that count the bytes sent.
pub(super) struct ByteCounter {
    connections: Box<dyn Connections>,
    n_sent: u64,
}

impl ByteCounter {
    pub(super) fn new(connections: Box<dyn Connections>) -> Self {
        Self { connections, n_sent: 0 }
    }
}

impl Connections for ByteCounter {
    fn exchange(&mut self, send: &[&[u8]], recv: &mut [&mut [u8]]) -> Result<(), TransportError> {
        self.n_sent += send.iter().map(|bytes| bytes.len() as u64).sum::<u64>();
        self.connections.exchange(send, recv)
    }
}

impl GroupWorker {
    /// Runs one call. Fails if the world has failed, and aborts the world if the call fails or panics.
    pub(super) fn run<T>(
        &mut self,
        call: &CollectiveCall,
        body: impl FnOnce(&mut Self) -> Result<T, TransportError>,
    ) -> Result<T> {
        if let Some(failure) = self.transport.failure() {
            return Err(failure.into());
        }
        self.transport.set_current_call(&self.id, Some(call));
        let span = span(&self.group, call.op, "exchange");
        let n_before = self.connections.n_sent;
        let done = catch_unwind(AssertUnwindSafe(|| body(self)))
            .unwrap_or_else(|panic| Err(TransportError::Local(format!("panicked: {}", panic_message(&*panic)))));
        let done = done.map_err(|error| error.fail_call(&*self.transport, &self.members, call).into());
        span.record("bytes", self.connections.n_sent - n_before);
        self.transport.set_current_call(&self.id, None);
        done
    }

    pub(super) fn all_reduce(
        &mut self,
        call: &CollectiveCall,
        x: &Tensor,
        op: Reduce,
    ) -> Result<Tensor, TransportError> {
        let x = &TensorBytes::new(x)?;
        let handshakes = self.check_call_with(call, x)?;
        with_type!(dtype(call), T => tensor_from::<T>(&call.shape, |out| {
            if x.n_bytes() <= INLINE_BYTES {
                let parts: Vec<&[T]> = handshakes.iter().map(|handshake| inline(handshake, out.len())).collect();
                combine(op, &parts, out);
                return Ok(());
            }
            let (mut peers, scratch) = self.peers();
            exchange::all_reduce(&mut peers, scratch, x, op, out)
        }))
    }

    pub(super) fn all_gather(&mut self, call: &CollectiveCall, x: &Tensor) -> Result<Tensor, TransportError> {
        let x = &TensorBytes::new(x)?;
        let handshakes = self.check_call_with(call, x)?;
        let shape = with_rows(call, call.shape[0] * self.members.len());
        tensor_from_bytes(dtype(call), &shape, |out| {
            if x.n_bytes() <= INLINE_BYTES {
                let ranges = handshakes.iter().zip(out.chunks_mut(x.n_bytes().max(1)));
                ranges.for_each(|(handshake, place)| place.copy_from_slice(inline(handshake, x.n_bytes())));
                return Ok(());
            }
            exchange::all_gather(&mut self.peers().0, x, out)
        })
    }

    pub(super) fn reduce_scatter(&mut self, call: &CollectiveCall, x: &Tensor) -> Result<Tensor, TransportError> {
        let x = &TensorBytes::new(x)?;
        let handshakes = self.check_call_with(call, x)?;
        let shape = with_rows(call, call.shape[0] / self.members.len());
        with_type!(dtype(call), T => tensor_from::<T>(&shape, |out| {
            if x.n_bytes() <= INLINE_BYTES {
                let own = self.me * out.len()..(self.me + 1) * out.len();
                let parts: Vec<&[T]> = handshakes.iter().map(|handshake| &inline(handshake, own.end)[own.clone()]).collect();
                combine(Reduce::Sum, &parts, out);
                return Ok(());
            }
            let (mut peers, scratch) = self.peers();
            exchange::reduce_scatter(&mut peers, scratch, x, out)
        }))
    }

    pub(super) fn all_to_all(
        &mut self,
        call: &CollectiveCall,
        x: &Tensor,
        send: &[usize],
        recv: &[usize],
    ) -> Result<Tensor, TransportError> {
        let x = &TensorBytes::new(x)?;
        let header = CallHeader::new(call, 0);
        let sent: Vec<_> = (0..self.members.len()).map(|r| header.with_rows(send[r], recv[r]).encode()).collect();
        let received = headers(&self.exchange_all(sent)?);
        self.compare(&received)?;
        self.compare_rows(&received, recv)?;
        let shape = with_rows(call, recv.iter().sum());
        let row_bytes = call.shape[1..].iter().product::<usize>() * dtype(call).size_in_bytes();
        let [send, recv] = [send, recv].map(|rows| rows.iter().map(|n| n * row_bytes).collect::<Vec<_>>());
        tensor_from_bytes(dtype(call), &shape, |out| {
            let (mut peers, scratch) = self.peers();
            exchange::all_to_all(&mut peers, scratch, Some(x), [&send, &recv], out)
        })
    }

    pub(super) fn broadcast(
        &mut self,
        call: &CollectiveCall,
        x: &Tensor,
        root: usize,
    ) -> Result<Tensor, TransportError> {
        let x = &TensorBytes::new(x)?;
        let handshakes = self.check_call_with(call, x)?;
        tensor_from_bytes(dtype(call), &call.shape, |out| {
            if x.n_bytes() <= INLINE_BYTES {
                out.copy_from_slice(inline(&handshakes[root], out.len()));
                return Ok(());
            }
            exchange::broadcast(&mut self.peers().0, x, root, out)
        })
    }

    pub(super) fn send_recv(
        &mut self,
        call: &CollectiveCall,
        x: Option<(&Tensor, usize)>,
        recv: Option<&Recv>,
    ) -> Result<Option<Tensor>, TransportError> {
        let outgoing = x.map(|(x, to)| TensorBytes::new(x).map(|x| (x, to))).transpose()?;
        let incoming = self.exchange_handshakes(call, outgoing.as_ref(), recv)?;
        let mut lengths = [vec![0; self.members.len()], vec![0; self.members.len()]];
        if let Some((x, to)) = outgoing.as_ref().filter(|(x, _)| x.n_bytes() > INLINE_BYTES) {
            lengths[0][*to] = x.n_bytes();
        }
        let Some((handshake, recv)) = incoming.zip(recv) else {
            self.exchange_tensors(outgoing.as_ref(), &lengths, &mut [])?;
            return Ok(None);
        };
        let made = tensor_from_bytes(recv.dtype, &recv.shape, |out| {
            if out.len() <= INLINE_BYTES {
                out.copy_from_slice(inline(&handshake, out.len()));
                return self.exchange_tensors(outgoing.as_ref(), &lengths, &mut []);
            }
            lengths[1][recv.from] = out.len();
            self.exchange_tensors(outgoing.as_ref(), &lengths, out)
        });
        made.map(Some)
    }

    /// Waits until all ranks have made this call. Fails if their calls do not match.
    pub(super) fn check_call(&mut self, call: &CollectiveCall, digest: u64) -> Result<(), TransportError> {
        let received = self.exchange_all(vec![CallHeader::new(call, digest).encode(); self.members.len()])?;
        self.compare(&headers(&received))
    }

    /// Waits until all ranks have made this call and returns their handshakes, which hold small tensors inline.
    fn check_call_with(&mut self, call: &CollectiveCall, x: &TensorBytes) -> Result<Vec<Handshake>, TransportError> {
        let handshake = handshake(&CallHeader::new(call, 0), Some(x))?;
        let received = self.exchange_all(vec![handshake; self.members.len()])?;
        self.compare(&headers(&received))?;
        Ok(received)
    }

    fn peers(&mut self) -> (Peers<'_>, &mut Scratch) {
        (Peers { connections: &mut self.connections, me: self.me, n: self.members.len() }, &mut self.scratch)
    }

    /// Sends each rank its handshake and returns the handshakes of all ranks, this one's included.
    fn exchange_all(&mut self, sent: Vec<Handshake>) -> Result<Vec<Handshake>, TransportError> {
        let mut received = sent.clone();
        let (mut send, mut recv) = self.empty_slices();
        for (r, (sent, received)) in sent.iter().zip(&mut received).enumerate().filter(|(r, _)| *r != self.me) {
            (send[r], recv[r]) = (cast_slice(sent), cast_slice_mut(received));
        }
        self.connections.exchange(&send, &mut recv)?;
        Ok(received)
    }

    // All ranks report the same culprit: the rank that differs from most others, the highest of several.
    fn compare(&self, received: &[CallHeader]) -> Result<(), TransportError> {
        let alike = |r: &usize| received.iter().filter(|header| header.matches(&received[*r])).count();
        let odd = (0..received.len()).rev().min_by_key(alike).expect("a group has a rank");
        let Some(other) = received.iter().position(|header| !header.matches(&received[odd])) else { return Ok(()) };
        let [first, second] = [odd.min(other), odd.max(other)];
        let [first_who, second_who] = [first, second].map(|r| self.who(r));
        let [first, second] = [first, second].map(|r| received[r].call(&self.group).to_string());
        let what = if first == second {
            format!("{first_who} and {second_who} call {first} with different lists")
        } else {
            format!("{first_who} calls {first}, {second_who} calls {second}")
        };
        Err(TransportError::Mismatch(odd, what))
    }

    fn compare_rows(&self, received: &[CallHeader], recv: &[usize]) -> Result<(), TransportError> {
        let Some(other) = (0..recv.len()).find(|r| received[*r].rows_sent != recv[*r] as u64) else { return Ok(()) };
        let (sender, receiver) = (self.who(other), self.who(self.me));
        let what =
            format!("{sender} sends {} rows to {receiver}, which expects {}", received[other].rows_sent, recv[other]);
        Err(TransportError::Mismatch(other, what))
    }

    /// Exchanges the handshakes of a send_recv. The receiver compares the sender's call with its own.
    fn exchange_handshakes(
        &mut self,
        call: &CollectiveCall,
        outgoing: Option<&(TensorBytes, usize)>,
        recv: Option<&Recv>,
    ) -> Result<Option<Handshake>, TransportError> {
        let number = outgoing.map_or(0, |(_, to)| self.n_sent[*to] + 1);
        let sent = handshake(&CallHeader::new(call, 0).with_number(number), outgoing.map(|(x, _)| x))?;
        let mut received = CallHeader::default().encode();
        let (mut send, mut inboxes) = self.empty_slices();
        if let Some((_, to)) = outgoing {
            self.n_sent[*to] += 1;
            send[*to] = cast_slice(&sent);
        }
        if let Some(Recv { from, .. }) = recv {
            self.n_received[*from] += 1;
            inboxes[*from] = cast_slice_mut(&mut received);
        }
        self.connections.exchange(&send, &mut inboxes)?;
        let Some(recv) = recv else { return Ok(None) };
        self.compare_send(call, &CallHeader::decode(&received), recv)?;
        Ok(Some(received))
    }

    fn compare_send(&self, call: &CollectiveCall, sent: &CallHeader, recv: &Recv) -> Result<(), TransportError> {
        let theirs = sent.call(&self.group);
        let [sender, receiver] = [recv.from, self.me].map(|rank| self.who(rank));
        let is_meant = matches!(theirs.op, Op::SendRecv { .. }) && theirs.number == self.n_received[recv.from];
        let what = match is_meant {
            true if recv.matches(theirs.dtype, &theirs.shape) => return Ok(()),
            true => recv.mismatch(theirs.dtype.map(|dtype| (dtype, &*theirs.shape)), [sender, receiver]),
            false => format!("{sender} calls {theirs}, {receiver} calls {call}"),
        };
        Err(TransportError::Mismatch(recv.from, what))
    }

    fn exchange_tensors(
        &mut self,
        outgoing: Option<&(TensorBytes, usize)>,
        [send, recv]: &[Vec<usize>; 2],
        out: &mut [u8],
    ) -> Result<(), TransportError> {
        let (mut peers, scratch) = self.peers();
        exchange::all_to_all(&mut peers, scratch, outgoing.map(|(x, _)| x), [send, recv], out)
    }

    fn empty_slices<'a>(&self) -> (Vec<&'a [u8]>, Vec<&'a mut [u8]>) {
        self.members.iter().map(|_| (<&[u8]>::default(), <&mut [u8]>::default())).unzip()
    }

    fn who(&self, rank: usize) -> String {
        self.transport.who(self.members[rank])
    }
}

/// Returns the handshake of a call, with `x` inline if it is small.
fn handshake(header: &CallHeader, x: Option<&TensorBytes>) -> candle_core::Result<Handshake> {
    let mut handshake = header.encode();
    if let Some(x) = x.filter(|x| x.n_bytes() <= INLINE_BYTES) {
        x.read(0, inline_mut(&mut handshake, x.n_bytes()))?;
    }
    Ok(handshake)
}

fn headers(handshakes: &[Handshake]) -> Vec<CallHeader> {
    handshakes.iter().map(CallHeader::decode).collect()
}

fn dtype(call: &CollectiveCall) -> DType {
    call.dtype.expect("the call has a tensor")
}

fn with_rows(call: &CollectiveCall, n_rows: usize) -> Vec<usize> {
    [&[n_rows], &call.shape[1..]].concat()
}

/// Creates a tensor whose elements `fill` writes.
fn tensor_from<T: ReduceElement>(
    shape: &[usize],
    fill: impl FnOnce(&mut [T]) -> Result<(), TransportError>,
) -> Result<Tensor, TransportError> {
    let mut out = zeroed_vec(shape.iter().product());
    fill(&mut out)?;
    Ok(tensor(out, shape)?)
}

fn tensor_from_bytes(
    dtype: DType,
    shape: &[usize],
    fill: impl FnOnce(&mut [u8]) -> Result<(), TransportError>,
) -> Result<Tensor, TransportError> {
    with_type!(dtype, T => tensor_from::<T>(shape, |out| fill(cast_slice_mut(out))))
}
