//! A group's own thread: it carries out calls one after another, and turns what goes wrong into the world's failure.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut, zeroed_vec};
use candle_core::{DType, Tensor};

use super::exchange::{self, Peers, Scratch};
use super::head::{Head, Opening, SMALL_BYTES, small, small_mut};
use crate::call::span;
use crate::element::{Element, Source, combine, tensor, with_type};
use crate::panic::said;
use crate::transport::{Connections, Transport, TransportError};
use crate::{Call, Op, Recv, Reduce, Result};

/// What the thread owns.
pub(super) struct Worker {
    /// Names the group on the wire; unique in the world.
    pub(super) id: String,
    pub(super) group: Arc<str>,
    /// The world ranks of the group's ranks.
    pub(super) members: Vec<usize>,
    pub(super) me: usize,
    pub(super) connections: Metered,
    pub(super) transport: Arc<dyn Transport>,
    /// How many tensors went to each rank, and came from each: both ends count alike.
    pub(super) n_sent: Vec<u64>,
    pub(super) n_received: Vec<u64>,
    pub(super) scratch: Scratch,
}

/// Connections that count what is sent.
pub(super) struct Metered {
    connections: Box<dyn Connections>,
    /// Bytes.
    n_sent: u64,
}

impl Metered {
    pub(super) fn new(connections: Box<dyn Connections>) -> Self {
        Self { connections, n_sent: 0 }
    }
}

impl Connections for Metered {
    fn exchange(&mut self, send: &[&[u8]], recv: &mut [&mut [u8]]) -> Result<(), TransportError> {
        self.n_sent += send.iter().map(|bytes| bytes.len() as u64).sum::<u64>();
        self.connections.exchange(send, recv)
    }
}

impl Worker {
    /// Carries out one call, or says why that is not possible any more.
    pub(super) fn run<T>(
        &mut self,
        call: &Call,
        body: impl FnOnce(&mut Self) -> Result<T, TransportError>,
    ) -> Result<T> {
        if let Some(failure) = self.transport.failure() {
            return Err(failure.into());
        }
        self.transport.doing(&self.id, Some(call));
        let span = span(&self.group, call.op, "exchange");
        let n_before = self.connections.n_sent;
        let done = catch_unwind(AssertUnwindSafe(|| body(self)))
            .unwrap_or_else(|panic| Err(TransportError::Local(format!("panicked: {}", said(&*panic)))));
        let done = done.map_err(|error| error.unfinished(&*self.transport, &self.members, call).into());
        span.record("bytes", self.connections.n_sent - n_before);
        self.transport.doing(&self.id, None);
        done
    }

    pub(super) fn all_reduce(&mut self, call: &Call, x: &Tensor, op: Reduce) -> Result<Tensor, TransportError> {
        let x = &Source::new(x)?;
        let openings = self.agree_on(call, x)?;
        with_type!(dtype(call), T => made::<T>(&call.shape, |out| {
            if x.n_bytes() <= SMALL_BYTES {
                let parts: Vec<&[T]> = openings.iter().map(|opening| small(opening, out.len())).collect();
                combine(op, &parts, out);
                return Ok(());
            }
            let (mut peers, scratch) = self.peers();
            exchange::all_reduce(&mut peers, scratch, x, op, out)
        }))
    }

    pub(super) fn all_gather(&mut self, call: &Call, x: &Tensor) -> Result<Tensor, TransportError> {
        let x = &Source::new(x)?;
        let openings = self.agree_on(call, x)?;
        let shape = with_rows(call, call.shape[0] * self.members.len());
        made_of_bytes(dtype(call), &shape, |out| {
            if x.n_bytes() <= SMALL_BYTES {
                let places = openings.iter().zip(out.chunks_mut(x.n_bytes().max(1)));
                places.for_each(|(opening, place)| place.copy_from_slice(small(opening, x.n_bytes())));
                return Ok(());
            }
            exchange::all_gather(&mut self.peers().0, x, out)
        })
    }

    pub(super) fn reduce_scatter(&mut self, call: &Call, x: &Tensor) -> Result<Tensor, TransportError> {
        let x = &Source::new(x)?;
        let openings = self.agree_on(call, x)?;
        let shape = with_rows(call, call.shape[0] / self.members.len());
        with_type!(dtype(call), T => made::<T>(&shape, |out| {
            if x.n_bytes() <= SMALL_BYTES {
                let own = self.me * out.len()..(self.me + 1) * out.len();
                let parts: Vec<&[T]> = openings.iter().map(|opening| &small(opening, own.end)[own.clone()]).collect();
                combine(Reduce::Sum, &parts, out);
                return Ok(());
            }
            let (mut peers, scratch) = self.peers();
            exchange::reduce_scatter(&mut peers, scratch, x, out)
        }))
    }

    pub(super) fn all_to_all(
        &mut self,
        call: &Call,
        x: &Tensor,
        send: &[usize],
        recv: &[usize],
    ) -> Result<Tensor, TransportError> {
        let x = &Source::new(x)?;
        let head = Head::new(call, 0);
        let told: Vec<_> = (0..self.members.len()).map(|r| head.with_rows(send[r], recv[r]).open()).collect();
        let heard = heads(&self.tell(told)?);
        self.compare(&heard)?;
        self.compare_rows(&heard, recv)?;
        let shape = with_rows(call, recv.iter().sum());
        let row_bytes = call.shape[1..].iter().product::<usize>() * dtype(call).size_in_bytes();
        let [send, recv] = [send, recv].map(|rows| rows.iter().map(|n| n * row_bytes).collect::<Vec<_>>());
        made_of_bytes(dtype(call), &shape, |out| {
            let (mut peers, scratch) = self.peers();
            exchange::all_to_all(&mut peers, scratch, Some(x), [&send, &recv], out)
        })
    }

    pub(super) fn broadcast(&mut self, call: &Call, x: &Tensor, root: usize) -> Result<Tensor, TransportError> {
        let x = &Source::new(x)?;
        let openings = self.agree_on(call, x)?;
        made_of_bytes(dtype(call), &call.shape, |out| {
            if x.n_bytes() <= SMALL_BYTES {
                out.copy_from_slice(small(&openings[root], out.len()));
                return Ok(());
            }
            exchange::broadcast(&mut self.peers().0, x, root, out)
        })
    }

    pub(super) fn send_recv(
        &mut self,
        call: &Call,
        x: Option<(&Tensor, usize)>,
        recv: Option<&Recv>,
    ) -> Result<Option<Tensor>, TransportError> {
        let going = x.map(|(x, to)| Source::new(x).map(|x| (x, to))).transpose()?;
        let coming = self.swap_openings(call, going.as_ref(), recv)?;
        let mut lengths = [vec![0; self.members.len()], vec![0; self.members.len()]];
        if let Some((x, to)) = going.as_ref().filter(|(x, _)| x.n_bytes() > SMALL_BYTES) {
            lengths[0][*to] = x.n_bytes();
        }
        let Some((opening, recv)) = coming.zip(recv) else {
            self.swap_tensors(going.as_ref(), &lengths, &mut [])?;
            return Ok(None);
        };
        let made = made_of_bytes(recv.dtype, &recv.shape, |out| {
            if out.len() <= SMALL_BYTES {
                out.copy_from_slice(small(&opening, out.len()));
                return self.swap_tensors(going.as_ref(), &lengths, &mut []);
            }
            lengths[1][recv.from] = out.len();
            self.swap_tensors(going.as_ref(), &lengths, out)
        });
        made.map(Some)
    }

    /// Makes sure that all ranks make this call, and waits for them to do so.
    pub(super) fn agree(&mut self, call: &Call, digest: u64) -> Result<(), TransportError> {
        let heard = self.tell(vec![Head::new(call, digest).open(); self.members.len()])?;
        self.compare(&heads(&heard))
    }

    /// Makes sure that all ranks make this call, and hands each the others' tensors if they are small.
    fn agree_on(&mut self, call: &Call, x: &Source) -> Result<Vec<Opening>, TransportError> {
        let opening = opening(&Head::new(call, 0), Some(x))?;
        let heard = self.tell(vec![opening; self.members.len()])?;
        self.compare(&heads(&heard))?;
        Ok(heard)
    }

    fn peers(&mut self) -> (Peers<'_>, &mut Scratch) {
        (Peers { connections: &mut self.connections, me: self.me, n: self.members.len() }, &mut self.scratch)
    }

    /// Tells each rank its opening and hears theirs; this rank's own is among them.
    fn tell(&mut self, told: Vec<Opening>) -> Result<Vec<Opening>, TransportError> {
        let mut heard = told.clone();
        let (mut send, mut recv) = self.nothing();
        for (r, (told, heard)) in told.iter().zip(&mut heard).enumerate().filter(|(r, _)| *r != self.me) {
            (send[r], recv[r]) = (cast_slice(told), cast_slice_mut(heard));
        }
        self.connections.exchange(&send, &mut recv)?;
        Ok(heard)
    }

    // All ranks find the same one wrong: the one that differs from most, the last of several.
    fn compare(&self, heard: &[Head]) -> Result<(), TransportError> {
        let alike = |r: &usize| heard.iter().filter(|head| head.fits(&heard[*r])).count();
        let odd = (0..heard.len()).rev().min_by_key(alike).expect("a group has a rank");
        let Some(other) = heard.iter().position(|head| !head.fits(&heard[odd])) else { return Ok(()) };
        let [first, second] = [odd.min(other), odd.max(other)];
        let [first_who, second_who] = [first, second].map(|r| self.who(r));
        let [first, second] = [first, second].map(|r| heard[r].call(&self.group).to_string());
        let what = if first == second {
            format!("{first_who} and {second_who} call {first}, each with other lists")
        } else {
            format!("{first_who} calls {first}, {second_who} calls {second}")
        };
        Err(TransportError::Mismatch(odd, what))
    }

    fn compare_rows(&self, heard: &[Head], recv: &[usize]) -> Result<(), TransportError> {
        let Some(other) = (0..recv.len()).find(|r| heard[*r].rows_there != recv[*r] as u64) else { return Ok(()) };
        let (sender, receiver) = (self.who(other), self.who(self.me));
        let what =
            format!("{sender} sends {} rows to {receiver}, which expects {}", heard[other].rows_there, recv[other]);
        Err(TransportError::Mismatch(other, what))
    }

    /// Exchanges the openings of a send: only the sender tells its call, and the receiver compares it with what it expects.
    fn swap_openings(
        &mut self,
        call: &Call,
        going: Option<&(Source, usize)>,
        recv: Option<&Recv>,
    ) -> Result<Option<Opening>, TransportError> {
        let number = going.map_or(0, |(_, to)| self.n_sent[*to] + 1);
        let told = opening(&Head::new(call, 0).with_number(number), going.map(|(x, _)| x))?;
        let mut heard = Head::default().open();
        let (mut send, mut inboxes) = self.nothing();
        if let Some((_, to)) = going {
            self.n_sent[*to] += 1;
            send[*to] = cast_slice(&told);
        }
        if let Some(Recv { from, .. }) = recv {
            self.n_received[*from] += 1;
            inboxes[*from] = cast_slice_mut(&mut heard);
        }
        self.connections.exchange(&send, &mut inboxes)?;
        let Some(recv) = recv else { return Ok(None) };
        self.compare_send(call, &Head::of(&heard), recv)?;
        Ok(Some(heard))
    }

    fn compare_send(&self, call: &Call, sent: &Head, recv: &Recv) -> Result<(), TransportError> {
        let theirs = sent.call(&self.group);
        let [sender, receiver] = [recv.from, self.me].map(|rank| self.who(rank));
        let is_meant = matches!(theirs.op, Op::SendRecv { .. }) && theirs.number == self.n_received[recv.from];
        let what = match is_meant {
            true if recv.fits(theirs.dtype, &theirs.shape) => return Ok(()),
            true => recv.unlike(theirs.dtype.map(|dtype| (dtype, &*theirs.shape)), [sender, receiver]),
            false => format!("{sender} calls {theirs}, {receiver} calls {call}"),
        };
        Err(TransportError::Mismatch(recv.from, what))
    }

    fn swap_tensors(
        &mut self,
        going: Option<&(Source, usize)>,
        [send, recv]: &[Vec<usize>; 2],
        out: &mut [u8],
    ) -> Result<(), TransportError> {
        let (mut peers, scratch) = self.peers();
        exchange::all_to_all(&mut peers, scratch, going.map(|(x, _)| x), [send, recv], out)
    }

    fn nothing<'a>(&self) -> (Vec<&'a [u8]>, Vec<&'a mut [u8]>) {
        self.members.iter().map(|_| (<&[u8]>::default(), <&mut [u8]>::default())).unzip()
    }

    fn who(&self, rank: usize) -> String {
        self.transport.who(self.members[rank])
    }
}

/// Returns the message that opens a call; `x` goes with it if it is small.
fn opening(head: &Head, x: Option<&Source>) -> candle_core::Result<Opening> {
    let mut opening = head.open();
    if let Some(x) = x.filter(|x| x.n_bytes() <= SMALL_BYTES) {
        x.read(0, small_mut(&mut opening, x.n_bytes()))?;
    }
    Ok(opening)
}

fn heads(openings: &[Opening]) -> Vec<Head> {
    openings.iter().map(Head::of).collect()
}

fn dtype(call: &Call) -> DType {
    call.dtype.expect("the call has a tensor")
}

fn with_rows(call: &Call, n_rows: usize) -> Vec<usize> {
    [&[n_rows], &call.shape[1..]].concat()
}

/// Makes a tensor whose elements `fill` provides.
fn made<T: Element>(
    shape: &[usize],
    fill: impl FnOnce(&mut [T]) -> Result<(), TransportError>,
) -> Result<Tensor, TransportError> {
    let mut out = zeroed_vec(shape.iter().product());
    fill(&mut out)?;
    Ok(tensor(out, shape)?)
}

fn made_of_bytes(
    dtype: DType,
    shape: &[usize],
    fill: impl FnOnce(&mut [u8]) -> Result<(), TransportError>,
) -> Result<Tensor, TransportError> {
    with_type!(dtype, T => made::<T>(shape, |out| fill(cast_slice_mut(out))))
}
