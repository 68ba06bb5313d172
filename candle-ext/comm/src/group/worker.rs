//! A group's own thread: it carries out calls one after another, and turns what goes wrong into the world's failure.

use std::sync::Arc;

use bytemuck::{Zeroable, cast_slice_mut};
use candle_core::Tensor;

use super::exchange::{self, Peers, Scratch};
use super::head::{HEAD_BYTES, Head};
use crate::element::{tensor, with_bytes, with_elements, with_type};
use crate::fabric::{Fabric, Links, Trouble};
use crate::{Call, Failure, Op, Reduce, Result};

/// What the thread owns.
pub(super) struct Worker {
    /// Names the group on the wire; unique in the world.
    pub(super) id: String,
    pub(super) group: Arc<str>,
    /// The world ranks of the group's ranks.
    pub(super) members: Vec<usize>,
    pub(super) me: usize,
    pub(super) links: Box<dyn Links>,
    pub(super) fabric: Arc<dyn Fabric>,
    /// How many tensors went to each rank, and came from each: both ends count alike.
    pub(super) n_sent: Vec<u64>,
    pub(super) n_received: Vec<u64>,
    pub(super) scratch: Scratch,
}

impl Worker {
    /// Carries out one call, or says why that is not possible any more.
    pub(super) fn run<T>(&mut self, call: &Call, body: impl FnOnce(&mut Self) -> Result<T, Trouble>) -> Result<T> {
        if let Some(failure) = self.fabric.failure() {
            return Err(failure.into());
        }
        self.fabric.doing(&self.id, Some(call));
        let done = body(self).map_err(|trouble| self.fail(call, trouble).into());
        self.fabric.doing(&self.id, None);
        done
    }

    pub(super) fn all_reduce(&mut self, call: &Call, x: &Tensor, op: Reduce) -> Result<Tensor, Trouble> {
        self.agree(call, 0)?;
        with_type!(x.dtype(), T => {
            let out = with_elements::<T, _>(x, |x| self.with_peers(|peers, scratch| exchange::all_reduce(peers, scratch, x, op)))??;
            Ok(tensor(out, x.dims())?)
        })
    }

    pub(super) fn all_gather(&mut self, call: &Call, x: &Tensor) -> Result<Tensor, Trouble> {
        self.agree(call, 0)?;
        let mut shape = x.dims().to_vec();
        shape[0] *= self.members.len();
        with_type!(x.dtype(), T => {
            let out = with_elements::<T, _>(x, |x| self.with_peers(|peers, _| exchange::all_gather(peers, x)))??;
            Ok(tensor(out, &shape)?)
        })
    }

    pub(super) fn reduce_scatter(&mut self, call: &Call, x: &Tensor) -> Result<Tensor, Trouble> {
        self.agree(call, 0)?;
        let mut shape = x.dims().to_vec();
        shape[0] /= self.members.len();
        with_type!(x.dtype(), T => {
            let out = with_elements::<T, _>(x, |x| self.with_peers(|peers, scratch| exchange::reduce_scatter(peers, scratch, x)))??;
            Ok(tensor(out, &shape)?)
        })
    }

    pub(super) fn all_to_all(
        &mut self,
        call: &Call,
        x: &Tensor,
        send: &[usize],
        recv: &[usize],
    ) -> Result<Tensor, Trouble> {
        let head = Head::new(call, 0);
        let told = (0..self.members.len()).map(|r| head.with_rows(send[r], recv[r])).collect::<Vec<_>>();
        let heard = self.tell(&told)?;
        self.compare(&heard)?;
        self.compare_rows(&heard, recv)?;
        let mut shape = x.dims().to_vec();
        let row: usize = shape[1..].iter().product();
        shape[0] = recv.iter().sum();
        let elements = |rows: &[usize]| rows.iter().map(|n| n * row).collect::<Vec<_>>();
        let (send, recv) = (elements(send), elements(recv));
        with_type!(x.dtype(), T => {
            let out = with_elements::<T, _>(x, |x| self.with_peers(|peers, _| exchange::all_to_all(peers, x, &send, &recv)))??;
            Ok(tensor(out, &shape)?)
        })
    }

    pub(super) fn broadcast(&mut self, call: &Call, x: &Tensor, root: usize) -> Result<Tensor, Trouble> {
        self.agree(call, 0)?;
        with_type!(x.dtype(), T => {
            let out = with_elements::<T, _>(x, |x| self.with_peers(|peers, _| exchange::broadcast(peers, x, root)))??;
            Ok(tensor(out, x.dims())?)
        })
    }

    pub(super) fn send_recv(
        &mut self,
        call: &Call,
        x: Option<(&Tensor, usize)>,
        from: Option<usize>,
    ) -> Result<Option<Tensor>, Trouble> {
        let coming = self.swap_heads(call, x.map(|(_, to)| to), from)?.zip(from);
        match x {
            Some((x, to)) => with_bytes(x, |bytes| self.swap_tensors(Some((bytes, to)), coming))?,
            None => self.swap_tensors(None, coming),
        }
    }

    /// Makes sure that all ranks make this call, and waits for them to do so.
    pub(super) fn agree(&mut self, call: &Call, digest: u64) -> Result<(), Trouble> {
        let heard = self.tell(&vec![Head::new(call, digest); self.members.len()])?;
        self.compare(&heard)
    }

    fn with_peers<T>(&mut self, exchange: impl FnOnce(&mut Peers, &mut Scratch) -> T) -> T {
        let mut peers = Peers { links: &mut *self.links, me: self.me, n: self.members.len() };
        exchange(&mut peers, &mut self.scratch)
    }

    /// Tells each rank its head and hears theirs; this rank's own is among them.
    fn tell(&mut self, told: &[Head]) -> Result<Vec<Head>, Trouble> {
        let sent: Vec<_> = told.iter().map(Head::encode).collect();
        let mut heard = sent.clone();
        let (mut send, mut recv) = self.nothing();
        for (r, (sent, heard)) in sent.iter().zip(&mut heard).enumerate().filter(|(r, _)| *r != self.me) {
            (send[r], recv[r]) = (sent, heard);
        }
        self.links.exchange(&send, &mut recv)?;
        Ok(heard.iter().map(Head::decode).collect())
    }

    // Every rank compares all with the first, so that all find the same one wrong.
    fn compare(&self, heard: &[Head]) -> Result<(), Trouble> {
        let Some(other) = heard.iter().position(|head| !head.fits(&heard[0])) else { return Ok(()) };
        let [first, second] = [&heard[0], &heard[other]].map(|head| head.call(&self.group).to_string());
        let [first_who, second_who] = [0, other].map(|r| self.who(r));
        let what = if first == second {
            format!("{first_who} and {second_who} call {first}, each with other lists")
        } else {
            format!("{first_who} calls {first}, {second_who} calls {second}")
        };
        Err(Trouble::Mismatch(other, what))
    }

    fn compare_rows(&self, heard: &[Head], recv: &[usize]) -> Result<(), Trouble> {
        let Some(other) = (0..recv.len()).find(|r| heard[*r].rows_there != recv[*r] as u64) else { return Ok(()) };
        let (sender, receiver) = (self.who(other), self.who(self.me));
        let what =
            format!("{sender} sends {} rows to {receiver}, which expects {}", heard[other].rows_there, recv[other]);
        Err(Trouble::Mismatch(other, what))
    }

    /// Of the two ranks of a send only the sender tells its call; the receiver is given it.
    fn swap_heads(&mut self, call: &Call, to: Option<usize>, from: Option<usize>) -> Result<Option<Call>, Trouble> {
        let number = to.map_or(0, |to| self.n_sent[to] + 1);
        let told = Head::new(call, 0).with_number(number).encode();
        let mut heard = [0; HEAD_BYTES];
        let (mut send, mut recv) = self.nothing();
        if let Some(to) = to {
            self.n_sent[to] += 1;
            send[to] = &told;
        }
        if let Some(from) = from {
            self.n_received[from] += 1;
            recv[from] = &mut heard;
        }
        self.links.exchange(&send, &mut recv)?;
        let Some(from) = from else { return Ok(None) };
        let theirs = Head::decode(&heard).call(&self.group);
        if matches!(theirs.op, Op::SendRecv { .. }) && theirs.number == self.n_received[from] {
            return Ok(Some(theirs));
        }
        let what = format!("{} calls {theirs}, {} calls {call}", self.who(from), self.who(self.me));
        Err(Trouble::Mismatch(from, what))
    }

    fn swap_tensors(
        &mut self,
        going: Option<(&[u8], usize)>,
        coming: Option<(Call, usize)>,
    ) -> Result<Option<Tensor>, Trouble> {
        let (mut send, mut recv) = self.nothing();
        if let Some((bytes, to)) = going {
            send[to] = bytes;
        }
        let Some((call, from)) = coming else {
            self.links.exchange(&send, &mut recv)?;
            return Ok(None);
        };
        with_type!(call.dtype.expect("who sends says what"), T => {
            let mut out = vec![<T as Zeroable>::zeroed(); call.shape.iter().product()];
            recv[from] = cast_slice_mut(&mut out);
            self.links.exchange(&send, &mut recv)?;
            Ok(Some(tensor(out, &call.shape)?))
        })
    }

    fn nothing<'a>(&self) -> (Vec<&'a [u8]>, Vec<&'a mut [u8]>) {
        self.members.iter().map(|_| (<&[u8]>::default(), <&mut [u8]>::default())).unzip()
    }

    fn who(&self, rank: usize) -> String {
        self.fabric.who(self.members[rank])
    }

    /// Ends the world with what went wrong in `call`; returns why it ended.
    fn fail(&self, call: &Call, trouble: Trouble) -> Failure {
        let (rank, what) = match trouble {
            Trouble::Failed(failure) => return failure,
            Trouble::Late(ranks, after) => {
                let names: Vec<String> = ranks.iter().map(|rank| self.who(*rank)).collect();
                (ranks[0], format!("{} silent for {after:?}", names.join(", ")))
            }
            Trouble::Left(rank) => (rank, format!("{} has left", self.who(rank))),
            Trouble::Mismatch(rank, what) => (rank, what),
            Trouble::Connect(rank, error) => (rank, format!("connect to {}: {error}", self.who(rank))),
            Trouble::Tensor(error) => (self.me, format!("{}: {error}", self.who(self.me))),
        };
        let (group, members, seen_by) = (&self.group, &self.members, self.fabric.rank());
        let message = format!("finish {call} in group {group} of ranks {members:?}: {what} (seen by rank {seen_by})");
        self.fabric.fail(Failure { rank: self.members[rank], message })
    }
}
