//! The all-to-all dispatcher: rows travel to the ranks of their experts and back.
//!
//! Dispatch: rows sorted by expert, one all-gather of counts, then an all-to-all of rows and of their weights. Combine:
//! the all-to-all back. Experts that are padded to their capacity need no counts. See Lepikhin et al., GShard, 2020,
//! <https://arxiv.org/abs/2006.16668>.
//!
//! A row travels to every rank that holds a shard of its expert. The sum over a token's rows adds the shards' outputs.
//!
//! Dimensions: t tokens of this rank, d hidden size, n rows that this rank sends, m rows that it receives

use std::sync::Arc;

use candle_core::{Result, Tensor};
use candlewick_comm::{Collective, Pending};
use candlewick_model::ExpertCall;
use candlewick_ops::{self as ops, TokensPerCall, record};

use super::row_counts::{RowCounts, counts_of_ranks};
use super::{ExpertParallel, Meanwhile};

impl ExpertParallel {
    /// Computes the routed experts of a layer: [t, d] -> [t, d]. Collective.
    pub(super) fn compute_by_all_to_all(&self, call: &ExpertCall, meanwhile: Meanwhile) -> Result<Tensor> {
        let n_local = self.n_local_experts(call);
        let assignment = call.routing.assignment.sharded(n_local, self.n_shards)?;
        let counts = RowCounts::new(&counts_of_ranks(&*self.ep, &assignment, call.padding)?, self.ep.rank());
        let assignment = match call.padded(&assignment, 1)? {
            Some(padded) => padded,
            None => assignment.without_dropped_rows(counts.send.iter().sum())?,
        };
        let weights = ops::repeat_weights(&call.routing.weights, self.n_shards)?;
        let rows = self.start_dispatch(ops::permute(call.x, &assignment)?, &counts)?;
        let weights = self.start_dispatch(ops::permute_weights(&weights, &assignment)?, &counts)?;
        meanwhile()?;
        let (received_md, weights_m) = (rows.wait()?, weights.wait()?);
        let by_expert = counts.assignment(n_local, call.x)?;
        let weights_m1 = ops::reshape(&weights_m, (counts.experts.len(), 1))?;
        let computed_md = call.compute_rows(
            ops::permute(&received_md, &by_expert)?,
            &ops::permute_weights(&weights_m1, &by_expert)?,
            &by_expert.offsets,
            TokensPerCall::Many,
        )?;
        let returned_nd = self.combine(ops::unpermute(&computed_md, &by_expert)?, &counts)?;
        ops::unpermute(&returned_nd, &assignment)
    }

    /// Starts to send rows sorted by expert to the ranks of their experts: [n, ..] -> [m, ..], in the order of the senders.
    fn start_dispatch(&self, x: Tensor, counts: &RowCounts) -> Result<TravellingRows> {
        self.start("expert_dispatch", x, [&counts.send, &counts.recv])
    }

    /// Returns computed rows to their senders: [m, ..] -> [n, ..].
    fn combine(&self, y: Tensor, counts: &RowCounts) -> Result<Tensor> {
        self.start("expert_combine", y, [&counts.recv, &counts.send])?.wait()
    }

    fn start(&self, name: &'static str, x: Tensor, [send, recv]: [&Vec<usize>; 2]) -> Result<TravellingRows> {
        let pending = self.ep.start_all_to_all(&x.contiguous()?, send, recv)?;
        Ok(TravellingRows { name, x, pending, ep: Arc::clone(&self.ep), send: send.clone(), recv: recv.clone() })
    }
}

/// Rows between their sender and their receiver.
struct TravellingRows {
    name: &'static str,
    x: Tensor,
    pending: Pending,
    ep: Arc<dyn Collective>,
    send: Vec<usize>,
    recv: Vec<usize>,
}

impl TravellingRows {
    /// Returns the received rows. The gradients of rows travel back. The ops that were recorded between the start and this call
    /// have their backward meanwhile.
    fn wait(self) -> Result<Tensor> {
        let Self { name, x, pending, ep, send, recv } = self;
        let y = pending.wait()?;
        Ok(record(name, [(&x).into()], y, move |dy, context| {
            let pending = ep.start_all_to_all(dy, &recv, &send)?;
            context.receive_later(0, Box::new(move || Ok(pending.wait()?)))?;
            Ok([None])
        }))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Mutex;

    use candle_core::{DType, Device};
    use candlewick_comm::{Options, Recv, Reduce, Result as CommResult, threads};
    use candlewick_ops::Tape;

    use super::super::TokenDispatcher;
    use super::*;

    type Events = Arc<Mutex<Vec<&'static str>>>;

    /// A group that notes the start and the end of each all-to-all.
    struct NotesEvents {
        group: Arc<dyn Collective>,
        events: Events,
    }

    impl Collective for NotesEvents {
        fn rank(&self) -> usize {
            self.group.rank()
        }

        fn size(&self) -> usize {
            self.group.size()
        }

        fn check_device(&self, device: &Device) -> CommResult<()> {
            self.group.check_device(device)
        }

        fn start_all_reduce(&self, x: &Tensor, op: Reduce) -> CommResult<Pending> {
            self.group.start_all_reduce(x, op)
        }

        fn start_all_gather(&self, x: &Tensor) -> CommResult<Pending> {
            self.group.start_all_gather(x)
        }

        fn start_reduce_scatter(&self, x: &Tensor) -> CommResult<Pending> {
            self.group.start_reduce_scatter(x)
        }

        fn start_all_to_all(&self, x: &Tensor, send: &[usize], recv: &[usize]) -> CommResult<Pending> {
            self.events.lock().unwrap().push("start");
            let events = Arc::clone(&self.events);
            let pending = self.group.start_all_to_all(x, send, recv)?;
            Ok(pending.then(move |y| {
                events.lock().unwrap().push("wait");
                Ok(y)
            }))
        }

        fn start_broadcast(&self, x: &Tensor, root: usize) -> CommResult<Pending> {
            self.group.start_broadcast(x, root)
        }

        fn start_send_recv(
            &self,
            x: Option<&Tensor>,
            to: Option<usize>,
            recv: Option<Recv>,
        ) -> CommResult<Pending<Option<Tensor>>> {
            self.group.start_send_recv(x, to, recv)
        }

        fn barrier(&self) -> CommResult<()> {
            self.group.barrier()
        }

        fn split(&self, name: &str, lists: &[Vec<usize>]) -> CommResult<Arc<dyn Collective>> {
            self.group.split(name, lists)
        }
    }

    /// Returns the events of a forward and a backward, and the gradient of the sent rows. A shared expert computes between
    /// start and wait.
    fn events(group: Arc<dyn Collective>) -> candle_core::Result<(Vec<&'static str>, Vec<f32>)> {
        let events = Events::default();
        let ep: Arc<dyn Collective> = Arc::new(NotesEvents { group: Arc::clone(&group), events: Arc::clone(&events) });
        let (micro_batch, step) = (Arc::clone(&group), group);
        let experts = ExpertParallel { ep, n_shards: 1, micro_batch, step, dispatcher: TokenDispatcher::AllToAll };
        let x = Tensor::full(1f32 + experts.ep.rank() as f32, (2, 3), &Device::Cpu)?;
        let counts = RowCounts { send: vec![1, 1], recv: vec![1, 1], experts: vec![0, 0] };
        let tape = Tape::record(&[&x], || {
            let rows = experts.start_dispatch(ops::scale(&x, 2.0, DType::F32)?, &counts)?;
            let noted = Arc::clone(&events);
            events.lock().unwrap().push("shared forward");
            let shared = record("shared", [(&x).into()], x.affine(3.0, 0.0)?, move |dy, _| {
                noted.lock().unwrap().push("shared backward");
                Ok([Some(dy.affine(3.0, 0.0)?)])
            });
            ops::add(&rows.wait()?, &shared)
        })?;
        let dy = Tensor::full(experts.ep.rank() as f32 + 1.0, (2, 3), &Device::Cpu)?;
        let grad = tape.backward(&dy)?.remove(&x).unwrap().flatten_all()?.to_vec1()?;
        let noted = events.lock().unwrap().clone();
        Ok((noted, grad))
    }

    #[test]
    fn a_shared_expert_computes_while_rows_travel_in_forward_and_backward() {
        let results = threads::run(2, Options::default(), |world| events(world.group())).unwrap();
        for (rank, (events, grad)) in results.into_iter().enumerate() {
            assert_eq!(events, ["start", "shared forward", "wait", "start", "shared backward", "wait"]);
            // The first row is computed by rank 0, the second by rank 1.
            let of_row = |row: usize| 2.0 * (row as f32 + 1.0) + 3.0 * (rank as f32 + 1.0);
            assert_eq!(grad, [[of_row(0); 3], [of_row(1); 3]].concat());
        }
    }
}
